//! Journal entries written by other roles, and SQL conditions, must not be able to run code as a
//! superuser.

use super::{journal, walpost_role};
use crate::support::fixture::Fixture;
use crate::support::records::Record;
use crate::support::walpost::{Invocation, word_after};
use crate::support::walpost_role::WalpostRole;

/// Returns a statement that adds a replay entry to the journal.
fn entry(fixture: &Fixture, detail: &serde_json::Value) -> String {
    let (name, slot) = (&fixture.name, fixture.slot());
    let detail = detail.to_string().replace('\'', "''");
    format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, detail) VALUES ('{name}', '{slot}', 'replay', '{detail}')"
    )
}

/// Adds a replay entry to the journal as the given role.
fn write(fixture: &Fixture, walpost_role: &WalpostRole, detail: &serde_json::Value) {
    let session = fixture.server.session_as(&walpost_role.role, &fixture.name);
    session.run(&entry(fixture, detail));
}

const RUN_ID: &str = "5d8ac1b4-5b5c-4a5f-9a62-7f2b4f6a7c11";
const TOPIC: &str = "outbox.event.{aggregatetype}";

/// Returns the details that the journal would contain for a replay that has just started. The
/// replay selects the rows that match `condition`, or all rows if `condition` is empty.
fn start_details(condition: &str, topic: &str) -> serde_json::Value {
    let selected = match condition {
        "" => serde_json::json!({}),
        condition => serde_json::json!({ "where": condition }),
    };
    serde_json::json!({
        "run": RUN_ID, "state": "begun", "sent": 0,
        "plan": {
            "table": "public.outbox", "selected": selected, "order": ["created_at", "id"],
            "until": null, "topic": topic, "rows": 1
        }
    })
}

/// Creates another application's slot, and returns its name and an SQL condition that would drop
/// it.
fn slot_drop_condition(fixture: &Fixture) -> (String, String) {
    let slot = format!("{}_victim", fixture.name);
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let condition = format!(
        "(SELECT count(pg_catalog.pg_drop_replication_slot(slot_name)) FROM pg_replication_slots WHERE slot_name = '{slot}') >= 0"
    );
    (slot, condition)
}

fn is_there(fixture: &Fixture, slot: &str) -> bool {
    fixture.db.is_true(&format!(
        "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}')"
    ))
}

#[test]
fn never_evaluates_a_replay_condition_stored_in_the_journal() {
    let fixture = Fixture::new();
    let walpost_role = walpost_role(&fixture);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let (slot, condition) = slot_drop_condition(&fixture);
    write(&fixture, &walpost_role, &start_details(&condition, TOPIC));
    let entries = journal(&fixture).len();
    let resume = ["--resume", RUN_ID];
    for invocation in [
        fixture.replay(&resume).arg("--yes"),
        fixture
            .replay(&resume)
            .answer(&format!("{}\n", fixture.name)),
        fixture.replay(&resume).arg("--dry-run"),
        walpost_role.replay(&resume).arg("--yes"),
        walpost_role
            .replay(&resume)
            .args(["--yes", "--where", "another = 1"]),
        // A superuser passes the journal entry's condition with `--where`.
        fixture
            .replay(&resume)
            .args(["--yes", "--where", &condition]),
    ] {
        let finished = invocation.finish();
        assert!(is_there(&fixture, &slot), "{finished:?}");
        finished.expect_code(2);
    }
    let refused = fixture.replay(&resume).arg("--yes").finish();
    refused.expect_code(2).expect_mentions(&[
        &walpost_role.role,
        "pg_catalog.pg_drop_replication_slot(slot_name)",
        &format!("--resume {RUN_ID} --where"),
    ]);
    assert_eq!(journal(&fixture).len(), entries);
    assert!(fixture.records().is_empty());
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
}

#[test]
fn rejects_a_replay_condition_if_the_role_could_become_a_superuser() {
    let fixture = Fixture::new();
    let walpost_role = walpost_role(&fixture);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let (slot, condition) = slot_drop_condition(&fixture);
    // Create a function that another role owns. If a superuser evaluated a condition that calls the
    // function, the superuser would run the other role's code.
    fixture.db.run(&format!(
        "CREATE FUNCTION is_due() RETURNS boolean LANGUAGE sql AS $$ SELECT {condition} $$;
         ALTER FUNCTION is_due() OWNER TO {}",
        walpost_role.role
    ));
    let due = ["--where", "public.is_due()", "--yes"];
    let refused = |invocation: Invocation, texts: &[&str]| {
        let finished = invocation.finish();
        assert!(is_there(&fixture, &slot), "{finished:?}");
        finished.expect_code(2).expect_mentions(texts);
    };
    refused(
        fixture.replay(&due),
        &["--where", "role postgres", "walpost run"],
    );
    refused(fixture.replay(&due).arg("--dry-run"), &["role postgres"]);
    let masked = format!(
        "{} options='-c role={}'",
        fixture.conninfo(),
        walpost_role.role
    );
    let replay = |conninfo: &str| fixture.with_conninfo(conninfo).replay(&due);
    refused(replay(&masked), &["role postgres"]);
    for right in ["postgres", "pg_execute_server_program"] {
        fixture
            .db
            .run(&format!("GRANT {right} TO {}", walpost_role.role));
        refused(
            replay(&walpost_role.conninfo()),
            &[&walpost_role.role, right],
        );
        fixture
            .db
            .run(&format!("REVOKE {right} FROM {}", walpost_role.role));
    }
    let sent = walpost_role.replay(&["--where", "aggregateid = 'k'", "--yes"]);
    sent.finish().expect_code(0).expect_mentions(&["replayed"]);
    assert_eq!(fixture.wait_for_records(1).len(), 1);
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
}

#[test]
fn rejects_a_replay_condition_that_is_not_a_self_contained_expression() {
    let fixture = Fixture::new();
    let walpost_role = walpost_role(&fixture);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "one");
    fixture.insert(&aggregate, "two");
    let one = "SELECT id::text FROM outbox WHERE aggregateid = 'one'";
    let one = fixture.db.value(one).unwrap();
    for condition in [
        "false) OR (true",
        "true) UNION SELECT 2 WHERE (true",
        "true) ORDER BY (1",
        "true\n) --",
        "true) /*",
        "true); DROP TABLE outbox; --",
        "true; DROP TABLE outbox",
        "true] = ARRAY[true",
        "true, false",
        "SELECT true",
        "id = $1",
        "'",
        "$$",
        "/*",
        "",
        "--",
    ] {
        let replay = walpost_role.replay(&["--yes", "--id", &one, "--where", condition]);
        let finished = replay.finish();
        assert!(fixture.records().is_empty(), "{condition:?}: {finished:?}");
        finished.expect_code(2).expect_mentions(&["--where"]);
    }
    assert!(journal(&fixture).is_empty());
    // Every closing parenthesis or bracket in this condition is in a string or a comment, or
    // matches an opening one, so none of them ends the condition.
    let harmless = "aggregateid <> ')' AND '\n(' <> $x$)]$x$ /* ) */ AND (ARRAY[true])[1] -- )";
    let replay = walpost_role.replay(&["--yes", "--id", &one, "--where", harmless]);
    replay.finish().expect_code(0);
    assert_eq!(fixture.wait_for_records(1).len(), 1);
}

#[test]
fn ignores_journal_entries_written_by_other_roles() {
    let fixture = Fixture::new();
    let walpost_role = walpost_role(&fixture);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let stolen = format!("{}.stolen", fixture.name);
    fixture.topic(&stolen, 1, &[]);
    fixture.db.run(&entry(&fixture, &start_details("", TOPIC)));
    write(&fixture, &walpost_role, &start_details("", &stolen));
    write(
        &fixture,
        &walpost_role,
        &serde_json::json!({ "run": RUN_ID, "state": "done", "sent": 1 }),
    );
    let resumed = fixture.replay(&["--yes", "--resume", RUN_ID]).finish();
    resumed.expect_code(0).expect_mentions(&[
        "replayed",
        &walpost_role.role,
        "ignored a journal entry",
    ]);
    let records = fixture.wait_for_records(1);
    assert_eq!(records[0].topic, format!("outbox.event.{aggregate}"));
}

#[test]
fn resumes_a_replay_started_by_another_role_only_after_confirmation() {
    let fixture = Fixture::new();
    let walpost_role = walpost_role(&fixture);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    write(&fixture, &walpost_role, &start_details("", TOPIC));
    let resume = ["--resume", RUN_ID];
    let refused = fixture.replay(&resume).arg("--yes").finish().expect_code(2);
    refused.expect_mentions(&[&walpost_role.role, "--yes"]);
    assert!(fixture.records().is_empty());
    let finished = fixture
        .replay(&resume)
        .answer(&format!("{}\n", fixture.name));
    finished
        .finish()
        .expect_code(0)
        .expect_mentions(&[&walpost_role.role]);
    assert_eq!(fixture.wait_for_records(1).len(), 1);
}

#[test]
fn resume_rejects_a_journal_entry_that_differs_from_the_settings_or_table() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let stolen = format!("{}.stolen", fixture.name);
    fixture.topic(&stolen, 1, &[]);
    fixture
        .db
        .run(&entry(&fixture, &start_details("", &stolen)));
    let resume = ["--yes", "--resume", RUN_ID];
    let refused = fixture.replay(&resume).finish().expect_code(2);
    let suggestion = format!("--topic {stolen} ");
    refused.expect_mentions(&[&stolen, TOPIC, &suggestion]);
    assert!(fixture.records().is_empty());
    let given = fixture.replay(&resume).args(["--topic", &stolen]).finish();
    given.expect_code(0);
    assert_eq!(fixture.wait_for_records(1)[0].topic, stolen);

    let broken = |change: &dyn Fn(&mut serde_json::Value), texts: &[&str]| {
        fixture.db.run("DELETE FROM walpost.journal");
        let mut detail = start_details("", TOPIC);
        change(&mut detail["plan"]);
        fixture.db.run(&entry(&fixture, &detail));
        let refused = fixture.replay(&resume).finish();
        assert_eq!(fixture.records().len(), 1, "{refused:?}");
        refused.expect_mentions(texts);
    };
    // With `dropped_slots` set, the replay would end by closing an entry about a dropped slot.
    broken(
        &|plan| plan["dropped_slots"] = serde_json::json!([1]),
        &["dropped slots", "Start a new replay"],
    );
    broken(
        &|plan| plan["until"] = serde_json::json!(["2030-01-01"]),
        &["until", "created_at, id"],
    );
    broken(
        &|plan| plan["order"] = serde_json::json!(["id"]),
        &["was ordered by id"],
    );
    broken(
        &|plan| plan["selected"] = serde_json::json!({ "unheard_of": 1 }),
        &["unheard_of"],
    );
}

#[test]
fn resumes_a_replay_with_a_condition_only_if_the_same_condition_is_passed_again() {
    let fixture = Fixture::new();
    let walpost_role = walpost_role(&fixture);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "before");
    fixture.accept_any_name("outbox");
    fixture.insert("not a topic", "bad");
    fixture.insert(&aggregate, "behind");
    fixture.insert(&aggregate, "other");
    let condition = "aggregateid <> 'other'";
    let failed = walpost_role
        .replay(&["--yes", "--where", condition])
        .finish();
    let failed = failed
        .expect_code(3)
        .expect_mentions(&["is not a valid topic name"]);
    let run = word_after(&failed.stderr, "--resume ").trim_end();
    let again = r"--where 'aggregateid <> '\''other'\'''";
    assert!(failed.stderr.contains(again), "{}", failed.stderr);
    fixture
        .db
        .run("DELETE FROM outbox WHERE aggregateid = 'bad'");
    let resume = ["--yes", "--resume", run];
    let without = walpost_role.replay(&resume).finish().expect_code(2);
    without.expect_mentions(&[condition, again]);
    let other = walpost_role
        .replay(&resume)
        .args(["--where", "true"])
        .finish();
    other.expect_code(2).expect_mentions(&[condition, again]);
    let same = walpost_role
        .replay(&resume)
        .args(["--where", condition])
        .finish();
    same.expect_code(0)
        .expect_mentions(&["1 row of table", "not including the 1 already sent"]);
    let records = fixture.wait_for_records(2);
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["before", "behind"]);
}

/// If another process is replaying the events of a journal entry, they must not be replayed a
/// second time. The other process closes the journal entry when its replay is complete.
#[test]
fn does_not_replay_entries_that_another_process_is_replaying() {
    let fixture = Fixture::new();
    for (flag, without_lock) in [
        ("--dropped-slots", "has no dropped slot"),
        ("--set-aside", "is not set aside"),
    ] {
        let slot = fixture.slot();
        let lock = |function: &str| {
            let name = format!("walpost replay {flag} {slot}");
            format!("SELECT {function}(hashtextextended('{name}', 0))")
        };
        fixture.db.run("SET application_name = 'holds \"it\"'");
        fixture.db.run(&lock("pg_advisory_lock"));
        let locked = fixture.replay(&[flag, "--yes"]).finish();
        let is_sending = "another process is already sending the events";
        let pid = fixture.db.number("SELECT pg_backend_pid()");
        let holder = format!(
            "The advisory lock is held by PID {pid} (application_name \"holds \\\"it\\\"\", role \"postgres\""
        );
        locked
            .expect_code(1)
            .expect_mentions(&[flag, is_sending, &holder]);
        fixture.db.run(&lock("pg_advisory_unlock"));
        let unlocked = fixture.replay(&[flag, "--yes"]).finish();
        unlocked.expect_code(2).expect_mentions(&[without_lock]);
    }
}
