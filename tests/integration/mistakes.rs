//! Common mistakes of new users. Each message contains the cause and a command that works.

use std::net::TcpListener;
use std::thread;

use crate::support::fixture::Fixture;
use crate::support::walpost::Invocation;

#[test]
fn suggests_another_security_protocol_if_the_broker_closes_connections() {
    let fixture = Fixture::new();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    // Nothing stops this thread, so it runs until the test program exits.
    thread::spawn(move || other.incoming().for_each(drop));
    let check = Invocation::new(["check", "--postgres", &fixture.conninfo()]);
    let broker = format!("127.0.0.1:{port}");
    let check = check.args(["--kafka", &broker, "--pipeline", &fixture.name]);
    let unreachable = check.finish().expect_code(1);
    let line = unreachable
        .stdout
        .lines()
        .find(|line| line.contains("no broker at 127.0.0.1:"));
    assert!(
        line.is_some_and(|line| line.contains("the listener may use a different security.protocol")),
        "{unreachable:?}"
    );
}

#[test]
fn suggests_the_command_that_creates_a_missing_function() {
    let fixture = Fixture::bare();
    // With `--role`, `init` grants the privileges on the schema explicitly.
    let role = format!("{}_role", fixture.name);
    let init = || fixture.invoke("init").args(["--role", &role]);
    init().finish().expect_code(0);
    fixture
        .db
        .run("DROP FUNCTION walpost.lock_and_examine(text, text, text)");
    let replay = |from: &str| {
        let replay = fixture.invoke("replay").args(["--kafka", fixture.kafka()]);
        replay.args(["--from", from, "--dry-run"]).finish()
    };
    for from in ["1h", "01a223e1-cb31-7174-aaed-e736c31686f6"] {
        let failed = replay(from).expect_code(3).expect_mentions(&[
            "function walpost.lock_and_examine does not exist",
            "Create it as a superuser: walpost init --",
        ]);
        for text in ["--config FILE", "which rows: ", "--from: "] {
            assert!(!failed.mentions(text), "{text}: {}", failed.stderr);
        }
    }
    init().finish().expect_code(0);
    replay("1h").expect_code(0);
    fixture
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

#[test]
fn suggests_the_command_that_creates_a_missing_journal_table() {
    let fixture = Fixture::new();
    fixture
        .db
        .run("ALTER TABLE walpost.journal RENAME TO diary");
    let replay = || {
        let replay = fixture.invoke("replay").args(["--kafka", fixture.kafka()]);
        replay.args(["--from", "1h", "--dry-run"]).finish()
    };
    let failed = replay().expect_code(3).expect_mentions(&[
        "table walpost.journal does not exist. Create it: walpost init --",
        "; or run sql/journal.sql and sql/role.sql in this database",
    ]);
    assert!(!failed.mentions("--config FILE"), "{}", failed.stderr);
    fixture
        .db
        .run("ALTER TABLE walpost.diary RENAME TO journal");
    replay().expect_code(0);
}

#[test]
fn init_rejects_a_slot_name_used_by_another_database() {
    let fixture = Fixture::new();
    let other = Fixture::bare();
    let slot = fixture
        .db
        .value(
            "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() AND plugin = 'pgoutput'",
        )
        .unwrap();
    let init = other.invoke("init").args(["--no-role", "--slot", &slot]);
    let failed = init.finish().expect_code(3).expect_mentions(&[
        "Choose another name, because slot names are unique within a server: walpost init --slot NAME --",
    ]);
    assert!(!failed.mentions("--config FILE"), "{}", failed.stderr);
}

#[test]
fn init_by_an_unprivileged_role_prints_the_command_for_a_superuser() {
    let fixture = Fixture::bare();
    let role = format!("{}_role", fixture.name);
    fixture
        .db
        .run(&format!("CREATE ROLE {role} LOGIN REPLICATION"));
    let init = Invocation::new(["init", "--postgres", &fixture.conninfo_as(&role)]);
    let init = init
        .args(["--pipeline", &fixture.name, "--no-role"])
        .finish();
    let failed = init.expect_code(3).expect_mentions(&[
        "permission denied",
        "or as a superuser: sudo -u postgres walpost init --postgres 'host=",
        &format!("user=postgres' --table public.outbox --publication walpost_{0} --slot walpost_{0} --pipeline {0}", fixture.name),
    ]);
    let from = failed.stderr.find("walpost init --postgres").unwrap();
    let command = &failed.stderr[from + "walpost ".len()..];
    let command = command.split(". Nothing was changed").next().unwrap();
    let words: Vec<_> = command.split('\'').collect();
    let [before, connection, after] = words[..] else {
        panic!("{command}");
    };
    let words = before.split_whitespace().chain([connection]);
    let words: Vec<_> = words.chain(after.split_whitespace()).collect();
    Invocation::new(words)
        .arg("--no-role")
        .finish()
        .expect_code(0);
    fixture.db.run(&format!("DROP ROLE {role}"));
}

#[test]
fn check_warns_if_a_column_name_used_as_the_key_lacks_braces() {
    let fixture = Fixture::new();
    let warning = "key = \"aggregateid\" is the same text for all events";
    let check = fixture.check().args(["--key", "aggregateid"]).finish();
    check
        .expect_code(0)
        .expect_mentions(&[warning, "key = \"{aggregateid}\""]);
    let check = fixture.check().finish().expect_code(0);
    assert!(!check.mentions("is the same text"), "{}", check.stdout);
}

#[test]
fn does_not_suggest_adding_a_nonexistent_table_to_the_publication() {
    let fixture = Fixture::new();
    let check = fixture.check().args(["--table", "public.outbx"]).finish();
    let check = check
        .expect_code(3)
        .expect_mentions(&["table public.outbx does not exist in database"]);
    assert!(!check.mentions("ADD TABLE"), "{}", check.stdout);
}

#[test]
fn check_reports_a_missing_slot_state_privilege_instead_of_an_outbox_problem() {
    let fixture = Fixture::bare();
    let role = format!("{}_role", fixture.name);
    let init = fixture.invoke("init").args(["--role", &role]);
    init.finish().expect_code(0);
    // The table must not belong to a superuser, because then other roles could not lock it.
    let owner = format!("{}_owner", fixture.name);
    fixture.db.run(&format!(
        "CREATE ROLE {owner}; ALTER TABLE outbox OWNER TO {owner}; REVOKE ALL ON walpost.slot_state FROM {role}"
    ));
    let check = || {
        let check = Invocation::new(["check", "--postgres", &fixture.conninfo_as(&role)]);
        let check = check.args(["--kafka", fixture.kafka(), "--pipeline", &fixture.name]);
        check.finish()
    };
    let found = check();
    let grant = format!(
        "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT SELECT, INSERT, UPDATE ON walpost.slot_state TO {role}"
    );
    let owners = found
        .stdout
        .lines()
        .find(|line| line.starts_with("WARNING") && line.contains(": owners: "));
    assert!(
        owners.is_some_and(|line| line.ends_with(&grant)),
        "{}",
        found.stdout
    );
    fixture.db.run(&grant);
    let found = check();
    assert!(
        !found.stdout.contains("permission denied"),
        "{}",
        found.stdout
    );
    fixture.db.run(&format!(
        "DROP OWNED BY {role}; DROP ROLE {role}; DROP OWNED BY {owner} CASCADE; DROP ROLE {owner}"
    ));
}
