//! `walpost init` and the SQL files that it runs.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server, debian_binaries};
use crate::support::reaper;
use crate::support::wait::wait_until;

/// Lists all database objects of the kinds that `init` creates.
pub(crate) fn objects(fixture: &Fixture) -> Vec<Vec<Option<String>>> {
    fixture.db.rows(
        "SELECT 'table', c.oid::regclass::text FROM pg_class c
             JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE n.nspname IN ('public', 'walpost') AND relkind IN ('r', 'p', 'i')
         UNION ALL SELECT 'function', p.oid::regprocedure::text FROM pg_proc p
             WHERE pronamespace = 'public'::regnamespace
         UNION ALL SELECT 'trigger', tgname::text FROM pg_trigger
         UNION ALL SELECT 'check', pg_get_constraintdef(oid) FROM pg_constraint
             WHERE conrelid = to_regclass('public.outbox') AND contype = 'c'
         UNION ALL SELECT 'publication', pubname::text FROM pg_publication
         UNION ALL SELECT 'slot', slot_name::text FROM pg_replication_slots
             WHERE database = current_database() AND plugin = 'pgoutput'
         ORDER BY 1, 2",
    )
}

/// A statement that inserts a journal entry.
pub(crate) const WRITE: &str =
    "INSERT INTO walpost.journal (pipeline, slot, action, from_lsn, to_lsn, detail)
     VALUES ('shop', 'shop', 'skip', '0/1', '0/2', '{\"events\": 1}')";

#[test]
fn init_creates_all_objects_and_can_be_repeated() {
    for major in MAJORS {
        let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        assert_eq!(objects(&fixture), Vec::<Vec<_>>::new());
        fixture.init().finish().expect_code(0);
        let made = objects(&fixture);
        for (kind, name) in [
            ("table", "outbox"),
            ("table", "walpost.journal"),
            ("publication", &*fixture.slot()),
            ("slot", &*fixture.slot()),
        ] {
            let wanted = vec![Some(kind.to_owned()), Some(name.to_owned())];
            assert!(
                made.contains(&wanted),
                "{major}: no {kind} {name} in {made:?}"
            );
        }
        let confirmed = fixture.confirmed();
        fixture.insert("kept", "k");
        fixture.db.run(WRITE);
        fixture.init().finish().expect_code(0);
        assert_eq!(objects(&fixture), made, "{major}");
        assert_eq!(
            fixture.confirmed(),
            confirmed,
            "{major}: the slot was changed"
        );
        assert_eq!(fixture.db.number("SELECT count(*) FROM outbox"), 1);
        let actions = "SELECT action FROM walpost.journal ORDER BY id";
        let one = |text: &str| vec![Some(text.to_owned())];
        assert_eq!(fixture.db.rows(actions), [one("snapshot"), one("skip")]);
        let published = "SELECT tablename FROM pg_publication_tables";
        assert_eq!(
            fixture.db.rows(published),
            [vec![Some("outbox".to_owned())]]
        );
        let publication = fixture.db.rows(
            "SELECT pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot FROM pg_publication",
        );
        assert_eq!(
            publication[0].iter().flatten().cloned().collect::<String>(),
            "tffft"
        );
    }
}

#[test]
fn init_with_the_print_flag_prints_equivalent_sql_without_changing_the_database() {
    let fixture = Fixture::bare();
    let finished = fixture.init().arg("--print").finish().expect_code(0);
    assert_eq!(objects(&fixture), Vec::<Vec<_>>::new());
    let sql = finished.stdout;
    for part in [
        "CREATE TABLE",
        "CREATE PUBLICATION",
        "pg_create_logical_replication_slot",
        &fixture.slot(),
    ] {
        assert!(sql.contains(part), "no {part} in:\n{sql}");
    }
    let file = reaper::folder("printed").join("init.sql");
    fs::write(&file, sql).unwrap();
    psql(&fixture, &file);
    let printed = objects(&fixture);
    let other = Fixture::new();
    let made = format!("{:?}", objects(&other)).replace(&other.name, &fixture.name);
    assert_eq!(format!("{printed:?}"), made);
}

#[test]
fn tables_created_by_init_reject_updates() {
    let fixture = Fixture::new();
    fixture.insert("a", "k");
    let refused = fixture
        .db
        .try_run("UPDATE outbox SET type = 'changed'")
        .unwrap_err();
    let message = refused.as_db_error().unwrap().message().to_owned();
    assert!(
        message.contains("UPDATE") && message.contains("outbox"),
        "{message}"
    );
    let conflict = fixture
        .insert_sql("a", "k")
        .replace("gen_random_uuid()", "(SELECT id FROM outbox LIMIT 1)");
    let conflict = conflict.trim_end_matches(';');
    fixture
        .db
        .try_run(&format!(
            "{conflict} ON CONFLICT (id) DO UPDATE SET type = 'changed'"
        ))
        .unwrap_err();
    fixture
        .db
        .run(&format!("{conflict} ON CONFLICT (id) DO NOTHING"));
}

#[test]
fn init_times_out_if_a_transaction_blocks_slot_creation_and_leaves_no_slot() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::bare_on_servers(&server, Broker::shared());
    let other = server.session(&fixture.name);
    other.run("CREATE TABLE busy (); BEGIN; INSERT INTO busy DEFAULT VALUES");
    let finished = fixture.init().args(["--lock-timeout", "1s"]).finish();
    finished
        .expect_code(3)
        .expect_mentions(&["transaction", "Everything except the slot was created"]);
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE plugin = 'pgoutput'";
    // The server reports that it could not create the slot slightly before it drops the unfinished
    // slot.
    wait_until("the slot to be dropped", || fixture.db.number(slots) == 0);
    other.run("COMMIT");
    fixture.init().finish().expect_code(0);
    assert_eq!(fixture.db.number(slots), 1);
}

#[test]
fn run_with_the_init_flag_creates_missing_objects_first() {
    let fixture = Fixture::bare();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&["--init"]);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    walpost.terminate().expect_code(0);
}

/// Runs one of the SQL files in the repository.
pub(crate) fn psql_file(fixture: &Fixture, name: &str) {
    psql(
        fixture,
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("sql").join(name),
    );
}

/// Runs a file with psql, as an operator would.
pub(crate) fn psql(fixture: &Fixture, file: &Path) {
    let output = try_psql(fixture, file);
    assert!(
        output.status.success(),
        "{}: {}",
        file.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Like [`psql`], but returns the output even if psql fails.
pub(crate) fn try_psql(fixture: &Fixture, file: &Path) -> Output {
    try_psql_as(fixture, &fixture.conninfo(), file)
}

/// Like [`try_psql`], but connects with the given connection string.
pub(crate) fn try_psql_as(fixture: &Fixture, conninfo: &str, file: &Path) -> Output {
    try_psql_with(fixture, conninfo, file, &[])
}

/// Like [`try_psql_as`], but sets additional variables.
pub(crate) fn try_psql_with(
    fixture: &Fixture,
    conninfo: &str,
    file: &Path,
    variables: &[(&str, &str)],
) -> Output {
    let variables = variables
        .iter()
        .map(|(name, value)| format!("--set={name}={value}"));
    let name = fixture.slot();
    let installed = debian_binaries(MAJOR).join("psql");
    let program = if installed.exists() {
        installed
    } else {
        "psql".into()
    };
    Command::new(program)
        .args(["--no-psqlrc", "--dbname", conninfo])
        .args([
            "-v",
            &format!("publication={name}"),
            "-v",
            &format!("slot={name}"),
        ])
        .args(["-v", &format!("pipeline={}", fixture.name)])
        .args(["-v", "writer=postgres", "-v", "owner=postgres"])
        .args(["-v", &format!("role={}", fixture.name)])
        .args(variables)
        .arg("--file")
        .arg(file)
        .output()
        .expect("psql runs")
}

/// Several processes run at once: for each object, one process creates it, and the others find that
/// it already exists.
#[test]
fn concurrent_init_processes_all_succeed() {
    for count in [2, 5] {
        for _ in 0..4 {
            let fixture = Fixture::bare();
            let started: Vec<_> = (0..count).map(|_| fixture.init().start()).collect();
            for init in started {
                init.finish().expect_code(0);
            }
            let walpost = fixture.start_and_confirm_one(&fixture.aggregate(1), "k");
            walpost.terminate().expect_code(0);
        }
    }
}

/// Roles are shared by all databases of a server, so the processes compete to create the role.
#[test]
fn concurrent_init_processes_in_several_databases_create_one_role() {
    for _ in 0..4 {
        let fixtures = [Fixture::bare(), Fixture::bare(), Fixture::bare()];
        let role = format!("role_of_{}", fixtures[0].name);
        let started: Vec<_> = fixtures
            .iter()
            .map(|fixture| fixture.invoke("init").args(["--role", &role]).start())
            .collect();
        for init in started {
            init.finish().expect_code(0);
        }
        for fixture in &fixtures {
            fixture.db.run(&format!("DROP OWNED BY {role}"));
        }
        fixtures[0].db.drop_role(&role);
    }
}

#[test]
fn init_reports_the_session_that_holds_the_init_lock() {
    const KEY: &str = "x'77616c70'::int, 0";
    let fixture = Fixture::bare();
    let other = fixture.server.session(&fixture.name);
    other.run(&format!("SELECT pg_advisory_lock({KEY})"));
    let pid = other.number("SELECT pg_backend_pid()");
    fixture
        .init()
        .args(["--lock-timeout", "300ms"])
        .finish()
        .expect_code(3)
        .expect_mentions(&[
            &format!("PID {pid} (application_name"),
            "role \"postgres\") holds the walpost init lock",
            &format!("SELECT pg_catalog.pg_terminate_backend({pid})"),
            "Nothing was changed",
        ]);
    let init = fixture.init().start();
    other.run(&format!("SELECT pg_advisory_unlock({KEY})"));
    init.finish().expect_code(0);
    // A prepared transaction has no session, but can hold the advisory lock that `init` acquires.
    let name = &fixture.name;
    other.run(&format!(
        "BEGIN; SELECT pg_advisory_xact_lock({KEY}); PREPARE TRANSACTION '{name}'"
    ));
    let mut init = fixture.init().args(["--lock-timeout", "300ms"]).start();
    wait_until("init to end", || !init.is_running());
    other.run(&format!("ROLLBACK PREPARED '{name}'"));
    init.finish().expect_code(3).expect_mentions(&[
        &format!("prepared transaction {name:?} (role \"postgres\") holds the walpost init lock"),
        &format!("ROLLBACK PREPARED '{name}'"),
    ]);
}

#[test]
fn sql_files_run_manually_create_the_same_objects_as_init() {
    for major in MAJORS {
        let by_init = Fixture::on_servers(Server::shared(major), Broker::shared());
        let by_hand = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        for _ in 0..2 {
            for file in [
                "guard.sql",
                "outbox.sql",
                "journal.sql",
                "publication.sql",
                "slot.sql",
                "snapshot.sql",
            ] {
                psql_file(&by_hand, file);
            }
        }
        let made =
            |fixture: &Fixture| format!("{:?}", objects(fixture)).replace(&fixture.name, "NAME");
        assert_eq!(made(&by_hand), made(&by_init), "{major}");
        let aggregate = by_hand.aggregate(1);
        let walpost = by_hand.start();
        by_hand.insert(&aggregate, "k");
        by_hand.wait_for_records(1);
        walpost.terminate().expect_code(0);
        for _ in 0..2 {
            psql_file(&by_hand, "teardown.sql");
        }
        let left = format!("{:?}", objects(&by_hand)).replace("slot_state", "");
        assert!(
            !left.contains("slot") && !left.contains("publication"),
            "{major}: {left}"
        );
        assert!(
            left.contains("outbox"),
            "{major}: the table remains: {left}"
        );
    }
}

#[test]
fn role_sql_file_can_be_run_twice() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    psql_file(&fixture, "role.sql");
    psql_file(&fixture, "role.sql");
    let conninfo = fixture.conninfo_as(&fixture.name);
    let walpost = fixture.with_conninfo(&conninfo).run().start_streaming();
    walpost.terminate().expect_code(0);
}

#[test]
fn init_rejects_a_journal_table_with_unexpected_columns() {
    for (columns, expected) in [
        (
            "id bigint GENERATED ALWAYS AS IDENTITY, action text",
            "walpost.journal exists but lacks columns: at, pipeline, slot, from_lsn",
        ),
        (
            "id int, at date, action text",
            "column id integer, column at date",
        ),
    ] {
        let fixture = Fixture::bare();
        fixture.db.run(&format!(
            "CREATE SCHEMA walpost; CREATE TABLE walpost.journal ({columns})"
        ));
        let finished = fixture.init().finish().expect_code(3);
        finished.expect_mentions(&[expected]);
    }
}

#[test]
fn event_id_defaults_to_a_time_ordered_uuid() {
    for major in MAJORS {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        for _ in 0..2 {
            fixture.db.run(
                "INSERT INTO outbox (aggregatetype, aggregateid, type) VALUES ('a', 'k', 't')",
            );
        }
        let version = "SELECT count(*) FROM outbox WHERE substr(id::text, 15, 1) = '7'";
        assert_eq!(fixture.db.number(version), 2, "{major}");
        let seconds = "SELECT abs(extract(epoch FROM now())::bigint
             - ('x' || left(replace(max(id::text), '-', ''), 12))::bit(48)::bigint / 1000) FROM outbox";
        assert!(fixture.db.number(seconds) < 60, "{major}");
    }
}

#[test]
fn outbox_table_rejects_an_oversize_event_on_insert() {
    let fixture = Fixture::new();
    let insert = |bytes: usize| {
        fixture.db.try_run(&format!(
            "INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
             VALUES ('a', 'k', 't', to_jsonb(repeat('x', {bytes})))"
        ))
    };
    insert(989_998).unwrap();
    let refused = insert(989_999).unwrap_err();
    assert_eq!(
        refused.as_db_error().unwrap().constraint(),
        Some("walpost_event_size")
    );
}

#[test]
fn writer_role_can_only_insert_events() {
    for major in [14, 18] {
        for create in [
            "",
            "CREATE TABLE outbox (id bigserial PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
        ] {
            let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
            let shop = format!("{}_shop", fixture.name);
            fixture.db.run(&format!(
                "CREATE ROLE {shop} LOGIN; REVOKE ALL ON SCHEMA public FROM PUBLIC; {create}"
            ));
            let shop_session = fixture.server.session_as(&shop, &fixture.name);
            let insert = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('a', 'k', 't', '{}')";
            fixture.init().finish().expect_code(0);
            shop_session.try_run(insert).unwrap_err();
            let init = || fixture.init().env("WALPOST_WRITER", &shop).finish();
            init().expect_code(0);
            init().expect_code(0);
            shop_session.run(insert);
            for refused in [
                "SELECT * FROM outbox",
                "DELETE FROM outbox",
                "TRUNCATE outbox",
                "SELECT * FROM walpost.journal",
                "CREATE TABLE public.other ()",
            ] {
                shop_session.try_run(refused).expect_err(refused);
            }
            drop(shop_session);
            fixture
                .db
                .run(&format!("DROP OWNED BY {shop}; DROP ROLE {shop}"));
        }
    }
}

#[test]
fn existing_table_is_not_locked_if_no_trigger_is_added_to_it() {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text)",
    );
    fixture.db.run(&format!(
        "ALTER DATABASE {} SET lock_timeout = '2s'",
        fixture.name
    ));
    let writer = fixture.server.session(&fixture.name);
    writer.run("BEGIN; INSERT INTO outbox VALUES (1, 'a', 'k', 't', 'p')");
    psql_file(&fixture, "no_update.sql");
    writer.run("COMMIT");
}

/// The user who created the role may have set its password, and could log in as this role.
#[test]
fn init_warns_that_the_creator_of_an_existing_role_may_know_its_password() {
    let fixture = Fixture::bare();
    let role = format!("{}_role", fixture.name);
    fixture
        .db
        .run(&format!("CREATE ROLE {role} LOGIN PASSWORD 'known'"));
    let init = fixture.invoke("init").args(["--role", &role]).finish();
    fixture.db.run(&format!("DROP ROLE {role}"));
    init.expect_mentions(&[
        "exists but lacks LOGIN or REPLICATION",
        "may know its password",
        &format!("DROP ROLE {role}"),
    ]);
}
