//! Rows that can't be replayed, and arguments that are incomplete or contradictory.

use super::{journal, walpost_role};
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation, config_file};

/// Asserts that a command fails without sending or recording anything.
fn refused(fixture: &Fixture, invocation: Invocation, code: i32, texts: &[&str]) -> Finished {
    let finished = invocation.finish().expect_code(code).expect_mentions(texts);
    assert!(journal(fixture).is_empty(), "{texts:?}");
    assert!(fixture.records().is_empty(), "{texts:?}");
    finished
}

#[test]
fn rejects_invalid_replay_requests_and_sends_nothing() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    fixture.db.run(
        "CREATE TABLE diary (at int);
         CREATE FUNCTION write() RETURNS boolean LANGUAGE sql AS 'INSERT INTO public.diary VALUES (1) RETURNING true';
         CREATE TABLE bare (id int, aggregateid text, payload text);
         CREATE TABLE keyed (number int PRIMARY KEY, aggregateid text, payload text)",
    );
    let yes = |arguments: &[&str]| fixture.replay(arguments).arg("--yes");
    let check = |arguments: &[&str], code: i32, texts: &[&str]| {
        refused(&fixture, yes(arguments), code, texts);
    };
    // The operator first gives no answer to the prompt, and then a wrong answer.
    refused(
        &fixture,
        fixture.replay(&["--all"]),
        2,
        &["1 row of table", "nothing was sent"],
    );
    refused(
        &fixture,
        fixture.replay(&["--all"]).answer("no\n"),
        2,
        &["nothing was sent"],
    );
    check(&[], 2, &["no rows of table", "--from", "--all"]);
    check(&["--all", "--id", "1"], 2, &["--all", "--id"]);
    check(&["--from", ""], 2, &["--from", "expected a time"]);
    let yesterday = [
        "--from",
        "\"yesterday\"",
        "a time such as",
        "a position such as",
        "type uuid",
    ];
    check(&["--from", "yesterday"], 2, &yesterday);
    check(&["--from", "2025-13-41"], 2, &["--from", "2025-13-41"]);
    check(&["--to", "not-a-uuid"], 2, &["--to", "uuid"]);
    let unknown_id = "00000000-0000-0000-0000-000000000000";
    check(
        &["--from", unknown_id],
        2,
        &["has no row with id", unknown_id, "--from"],
    );
    check(&["--id", "not-a-uuid"], 2, &["uuid"]);
    check(&["--aggregate", "/1"], 2, &["--aggregate", "expected TYPE"]);
    {
        let walpost_role = walpost_role(&fixture);
        let check_where = |condition: &str, code: i32, texts: &[&str]| {
            let replay = walpost_role.replay(&["--yes", "--where", condition]);
            refused(&fixture, replay, code, texts);
        };
        check_where("nothing = 1", 2, &["nothing", "does not exist"]);
        check_where("true); DROP TABLE outbox; --", 2, &["42601"]);
        check_where("public.write()", 3, &["read-only transaction"]);
    }
    assert_eq!(fixture.db.number("SELECT count(*) FROM diary"), 0);
    for rate in ["0", "-1", "x", "1.5/s", "10/m"] {
        check(
            &[&format!("--rate={rate}")],
            2,
            &["--rate", "expected a number"],
        );
    }
    check(&["--resume", "x"], 2, &["--resume"]);
    check(
        &["--resume", unknown_id, "--id", "1"],
        2,
        &["cannot be used with"],
    );
    check(
        &["--resume", unknown_id],
        2,
        &["does not contain replay", unknown_id],
    );
    check(
        &["--all", "--table", "public.nowhere"],
        3,
        &["public.nowhere", "does not exist"],
    );
    let topic = ["--topic", "t", "--table"];
    let other = |table: &'static str, more: &[&'static str]| [&topic[..], &[table], more].concat();
    check(
        &other("bare", &["--all"]),
        2,
        &["public.bare", "no primary key"],
    );
    let aggregate = ["--header", "n={number}", "--aggregate", "order"];
    check(
        &other("keyed", &aggregate),
        2,
        &["aggregatetype", "--where"],
    );
    let since = ["--header", "n={number}", "--from", "2025-01-01"];
    check(&other("keyed", &since), 2, &["created_at", "--where"]);
    let log = ["--outbox", "messages"];
    check(&log, 2, &["no table from which events can be sent again"]);

    let role = format!("{}_reader", fixture.name);
    fixture.db.run(&format!("CREATE ROLE {role} LOGIN"));
    let conninfo = fixture.conninfo_as(&role);
    let as_role = || fixture.with_conninfo(&conninfo).replay(&["--all", "--yes"]);
    let output = format!(
        "SELECT, INSERT (pipeline, slot, action, from_lsn, to_lsn, detail) ON walpost.journal TO {role}"
    );
    refused(&fixture, as_role(), 3, &[&output]);
    fixture.db.run(&format!(
        "GRANT {output}; GRANT USAGE ON SCHEMA walpost TO {role}; REVOKE SELECT ON outbox FROM PUBLIC"
    ));
    refused(
        &fixture,
        as_role(),
        3,
        &[&format!("GRANT SELECT ON public.outbox TO {role}")],
    );
    fixture
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

#[test]
fn rejects_a_replay_of_a_message_outbox() {
    let fixture = Fixture::with_outbox(Outbox::Messages);
    let finished = fixture.replay(&["--all", "--yes"]).finish().expect_code(2);
    finished.expect_mentions(&[
        "no table from which events can be sent again",
        "publish the events again",
    ]);
}

#[test]
fn requires_a_pipeline_name_if_several_are_defined() {
    let fixture = Fixture::new();
    let text = format!(
        "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n[[pipeline]]\nname = \"a\"\npostgres = \"{0}\"\n\
         [[pipeline]]\nname = \"b\"\npostgres = \"{0}\"\n",
        fixture.conninfo()
    );
    let file = config_file(text);
    let replay = Invocation::new(["replay", "--all", "--yes", "--config"]).arg(file);
    refused(&fixture, replay, 2, &["--pipeline"]);
}

/// An operator may take hours to answer the prompt, and writers must not be blocked meanwhile.
#[test]
fn does_not_lock_the_table_while_waiting_for_confirmation() {
    let fixture = Fixture::new();
    fixture.insert(&fixture.aggregate(1), "k");
    let mut replay = fixture
        .replay(&["--all", "--sink", "stdout"])
        .with_input()
        .start();
    wait_until("the description of the rows", || {
        replay.output().contains("1 row of table")
    });
    wait_until("the table to be unlocked", || {
        let locks = "SELECT count(*) FROM pg_locks WHERE relation = 'outbox'::regclass \
                     AND mode = 'ShareUpdateExclusiveLock'";
        fixture.db.number(locks) == 0
    });
    replay.answer(&format!("{}\n", fixture.name));
    replay.finish().expect_code(0);
}
