//! Findings of `walpost check` about setups that work now but will cause problems later.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::walpost::{Finished, Invocation, config_file};

/// Returns the line that the named check prints. `mark` is the expected level, such as `WARNING`.
fn finding<'f>(finished: &'f Finished, mark: &str, check: &str) -> Option<&'f str> {
    let label = format!(": {check}: ");
    let mut lines = finished.stdout.lines();
    lines.find(|line| line.starts_with(mark) && line.contains(&label))
}

#[test]
fn check_lists_roles_that_can_insert_events() {
    for major in MAJORS {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        let check = || fixture.check().finish().expect_code(0);
        let found = check();
        let warning = finding(&found, "WARNING", "writers").expect("no writer");
        assert!(warning.contains("--writer ROLE"), "{warning}");
        let role = format!("writer_{}", fixture.name);
        fixture.db.run(&format!(
            "CREATE ROLE {role}; GRANT INSERT (payload) ON outbox TO {role}"
        ));
        let found = check();
        let named = finding(&found, "ok", "writers").expect("a writer");
        assert!(
            named.ends_with(&format!("public.outbox: {role}")),
            "{named}"
        );
        fixture.db.run("GRANT INSERT ON outbox TO PUBLIC");
        let found = check();
        let warning = finding(&found, "WARNING", "writers").expect("every role");
        assert!(
            warning.contains("REVOKE INSERT ON public.outbox FROM PUBLIC"),
            "{warning}"
        );
        fixture
            .db
            .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    }
}

#[test]
fn check_lists_slots_without_a_pipeline_and_the_wal_they_retain() {
    let fixture = Fixture::on_servers(Server::shared(MAJOR), Broker::shared());
    let other = format!("walpost_{}_gone", fixture.name);
    let create = |slot: &str| {
        fixture.db.run(&format!(
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ));
    };
    create(&other);
    // This slot's name does not look like the name of a Walpost slot, so the slot is not reported.
    let foreign = format!("subscriber_{}", fixture.name);
    create(&foreign);
    let text = format!(
        "[kafka]\n'bootstrap.servers' = '{}'\n[[pipeline]]\nname = '{}'\npostgres = \"{}\"\n",
        fixture.broker.address(),
        fixture.name,
        fixture.conninfo()
    );
    let file = config_file(&text);
    let check = || {
        Invocation::new(["check", "--config"])
            .arg(&file)
            .finish()
            .expect_code(0)
    };
    let found = check();
    let warning = finding(&found, "WARNING", "unused slots").expect("a finding");
    for word in [
        other.as_str(),
        "of WAL",
        &format!("pg_catalog.pg_drop_replication_slot('{other}')"),
    ] {
        assert!(warning.contains(word), "{word:?} in {warning}");
    }
    assert!(!found.stdout.contains(&foreign), "{}", found.stdout);
    for slot in [&other, &foreign] {
        fixture.db.run(&format!(
            "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
        ));
    }
    assert_eq!(finding(&check(), "WARNING", "unused slots"), None);
}

#[test]
fn check_fails_if_the_replication_factor_exceeds_the_number_of_brokers() {
    let fixture = Fixture::on_servers(Server::shared(MAJOR), Broker::shared());
    let check = |topics: &str| fixture.check().args(["--create-topics", topics]).finish();
    let found = check("3:3").expect_code(3);
    let failure = finding(&found, "FAILED", "kafka topics").expect("a finding");
    assert!(failure.contains("requests 3 replicas"), "{failure}");
    let last = found.stdout.lines().last().expect("a line");
    assert!(last.contains(" checks: 1 FAILED, "), "{last}");
    let found = check("3:1").expect_code(0);
    assert_eq!(finding(&found, "FAILED", "kafka topics"), None);
}

#[test]
fn check_reports_a_modified_or_missing_table_inspection_function() {
    for major in MAJORS {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        let warning = || {
            let found = fixture.check().finish().expect_code(0);
            finding(&found, "WARNING", "owners").map(str::to_owned)
        };
        assert_eq!(warning(), None);
        // Changes only the formatting of the function, so that it appears to come from a different
        // version of Walpost.
        let body = "replace(pg_get_functiondef('walpost.lock_and_examine'::regproc), 'RETURN regexp_replace', 'RETURN  regexp_replace')";
        let changed = fixture.db.value(&format!("SELECT {body}")).unwrap();
        fixture.db.run(&changed);
        let different = warning().expect("a warning");
        assert!(
            different.contains("differs from the function that"),
            "{different}"
        );
        fixture.init().finish().expect_code(0);
        assert_eq!(warning(), None);

        fixture
            .db
            .run("DROP FUNCTION walpost.lock_and_examine(text, text, text)");
        let missing = warning().expect("a warning");
        assert!(missing.contains("does not exist"), "{missing}");
        let verify = fixture.verify().finish().expect_code(3).stderr;
        for text in [&different, &missing, &verify] {
            assert!(text.contains("as a superuser: walpost init --"), "{text}");
            assert!(!text.contains("--config FILE"), "{text}");
        }
        fixture.init().finish().expect_code(0);
        assert_eq!(warning(), None);
    }
}
