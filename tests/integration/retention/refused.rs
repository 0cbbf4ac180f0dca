//! Cases in which Walpost can't or must not perform maintenance. The error must explain the remedy.

use super::{COLUMNS, DEFAULT, fixture_with_old_partition, maintain, tables, turn_clock_back};
use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::postgres::{MAJOR, Server};
use crate::support::walpost::{Invocation, word_after};

#[test]
fn suggests_a_remedy_for_an_unsupported_table_and_leaves_it_unchanged() {
    let fixture = Fixture::new();
    fixture.insert("a", "k");
    let before = tables(&fixture);
    let finished = maintain(&fixture, &["--retention", "1s"]).expect_code(3);
    finished.expect_mentions(&[
        "public.outbox is not partitioned",
        "walpost init --partitioned",
        "--delete-rows",
    ]);
    assert_eq!(tables(&fixture), before);
    assert_eq!(fixture.db.number("SELECT count(*) FROM outbox"), 1);

    let partitioned_by = |how: &str| {
        let fixture = Fixture::with_table(&format!(
            "CREATE TABLE outbox ({COLUMNS}) PARTITION BY {how}"
        ));
        maintain(&fixture, &["--retention", "1s"]).expect_code(3)
    };
    partitioned_by("HASH (id)").expect_mentions(&["not partitioned by range of one column"]);
    partitioned_by("RANGE (id, created_at)")
        .expect_mentions(&["not partitioned by range of one column"]);
    partitioned_by("RANGE (created_at)").expect_mentions(&[
        "no partition with both a lower and an upper bound",
        "CREATE TABLE",
    ]);

    let log = Fixture::with_outbox(Outbox::Messages);
    maintain(&log, &["--retention", "1s"])
        .expect_code(2)
        .expect_mentions(&["retention", "an outbox that uses logical decoding messages"]);
    maintain(&log, &[])
        .expect_code(0)
        .expect_mentions(&["no partitions"]);
}

#[test]
fn rejects_invalid_option_values() {
    for arguments in [
        ["--retention", "soon"],
        ["--retention", "0s"],
        ["--partitions-ahead", "0"],
        ["--partitions-ahead", "many"],
    ] {
        Invocation::new(["maintain", "--postgres", "host=/nowhere user=u dbname=x"])
            .args(arguments)
            .finish()
            .expect_code(2)
            .expect_mentions(&[arguments[0]
                .trim_start_matches("--")
                .split('-')
                .next()
                .unwrap()]);
    }
    Invocation::new(["maintain", "--postgres", "host=/nowhere user=u dbname=x"])
        .finish()
        .expect_code(1)
        .expect_mentions(&["/nowhere"]);
}

#[test]
fn suggests_a_remedy_if_a_partition_cannot_be_created() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    fixture
        .db
        .run("ALTER TABLE outbox ALTER COLUMN created_at SET DEFAULT now() + interval '3 days'");
    fixture.insert(&aggregate, "k");
    turn_clock_back(&fixture, false);
    let finished = maintain(&fixture, &[]).expect_code(3);
    finished.expect_mentions(&[
        "default partition public.outbox_default contains rows",
        "docs/retention.md#",
        "created for",
    ]);
    // Walpost created the other partitions, and left no trace of the partition that could not be
    // created.
    assert_eq!(
        fixture.db.number("SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ '_p20' AND NOT relispartition"),
        0
    );
    fixture.db.run("DELETE FROM outbox");
    let name = maintain(&fixture, &["--dry-run"]).expect_code(0).stdout;
    let name = word_after(&name, "public.");
    fixture.db.run(&format!("CREATE TABLE {name} ()"));
    let finished = maintain(&fixture, &[]).expect_code(3);
    finished.expect_mentions(&[
        "another object has this name",
        &format!("ALTER TABLE public.{name} RENAME TO"),
    ]);
}

#[test]
fn missing_privileges_error_contains_the_grant_statement() {
    let fixture = Fixture::bare();
    fixture.init().arg("--partitioned").finish().expect_code(0);
    let (owner, role) = (
        format!("{}_owner", fixture.name),
        format!("{}-Clerk", fixture.name),
    );
    fixture.db.run(&format!(
        "CREATE ROLE {owner}; CREATE ROLE \"{role}\" LOGIN REPLICATION;
         GRANT USAGE ON SCHEMA walpost TO \"{role}\"; GRANT SELECT ON walpost.journal TO \"{role}\""
    ));
    let maintain_for_superuser = fixture
        .with_conninfo(&fixture.conninfo_as(&role))
        .invoke("maintain")
        .args(["--retention", "1h"])
        .finish()
        .expect_code(3)
        .expect_mentions(&["belongs to the superuser postgres", "OWNER TO"]);
    assert!(
        !maintain_for_superuser.stderr.contains("GRANT postgres"),
        "{maintain_for_superuser:?}"
    );
    let owned = fixture.db.rows(&format!(
        "SELECT format('ALTER TABLE %s OWNER TO {owner}', relid) FROM pg_partition_tree('outbox')"
    ));
    owned
        .iter()
        .for_each(|row| fixture.db.run(row[0].as_deref().unwrap()));
    let conninfo = fixture.conninfo_as(&role);
    let maintain = || {
        fixture
            .with_conninfo(&conninfo)
            .invoke("maintain")
            .args(["--retention", "1h", "--partitions-ahead", "9"])
            .finish()
    };
    let check = |expected: &[&str]| {
        fixture
            .with_conninfo(&conninfo)
            .check()
            .args(["--retention", "1h"])
            .finish()
            .expect_code(0)
            .expect_mentions(expected);
    };
    let grant = format!("GRANT {owner} TO \"{role}\"");
    maintain().expect_code(3).expect_mentions(&[&grant]);
    check(&["WARNING", "retention", &grant]);
    fixture.db.run(&grant);
    let grant = format!("GRANT CREATE ON SCHEMA public TO \"{role}\"");
    maintain().expect_code(3).expect_mentions(&[&grant]);
    check(&["WARNING", &grant]);
    fixture.db.run(&format!(
        "{grant}; GRANT CREATE ON SCHEMA public TO {owner}"
    ));
    // Without the privilege to read walpost.table_state and walpost.slot_state, Walpost can't
    // determine which rows are delivered.
    for (table, expected) in [("table_state", "created for"), ("slot_state", "")] {
        let grant = format!("GRANT SELECT ON walpost.{table} TO \"{role}\"");
        maintain()
            .expect_code(3)
            .expect_mentions(&[&grant, expected]);
        check(&["WARNING", &grant]);
        fixture.db.run(&grant);
    }
    maintain().expect_code(0);
    check(&["retention: delivered rows that are older than the retention period can be removed"]);
    let foreign = fixture.db.number(&format!(
        "SELECT count(*) FROM pg_partition_tree('outbox') JOIN pg_class c ON c.oid = relid
         WHERE pg_get_userbyid(relowner) <> '{owner}'"
    ));
    assert_eq!(
        foreign, 0,
        "new partitions belong to the owner of the table"
    );
    // `run` must keep running even if maintenance lacks a privilege.
    fixture.db.run(&format!("REVOKE {owner} FROM \"{role}\""));
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture
        .with_conninfo(&conninfo)
        .run()
        .args(["--retention", "1s"])
        .start();
    walpost.wait_for_log("maintenance failed");
    fixture.insert(&aggregate, "k");
    fixture.settle(walpost, &[], Resends::Never);
    fixture.db.run(&format!(
        "DROP OWNED BY {owner}, \"{role}\" CASCADE; DROP ROLE {owner}, \"{role}\""
    ));
}
