//! Catalog comments of several megabytes. Any role can add such a comment to its own objects.

use super::{DEFAULT, fixture_with_old_partition, insert_old, is_gone, maintain_until};
use crate::support::names::unique_name;
use crate::support::postgres::{MAJOR, Server};

/// SQL for a text that is longer than any query result that Walpost accepts.
const LONG_TEXT_SQL: &str = "repeat('x', 20 << 20)";

#[test]
fn long_comment_on_an_unrelated_table_does_not_stop_retention() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let role = unique_name();
    let db = &fixture.db;
    // The comment has the same ending as the comments that Walpost uses to recognize former
    // partitions.
    db.run(&format!(
        "CREATE ROLE {role}; CREATE SCHEMA {role} AUTHORIZATION {role}; SET ROLE {role}; CREATE TABLE {role}.theirs ();
         DO $$ BEGIN EXECUTE format('COMMENT ON TABLE {role}.theirs IS %L', {LONG_TEXT_SQL} || format(' (table %s, cluster %s)',
             'public.outbox'::regclass::oid, (SELECT system_identifier FROM pg_control_system()))); END $$; RESET ROLE"
    ));
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    insert_old(&fixture, &aggregate, "old");
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    maintain_until(&fixture, "the partition to be dropped", || {
        is_gone(&fixture, "outbox_old")
    });
    let theirs = format!("SELECT to_regclass('{role}.theirs') IS NOT NULL");
    assert!(db.is_true(&theirs));
    walpost.terminate().expect_code(0);
    db.drop_role(&role);
}

#[test]
fn keeps_a_long_comment_on_a_partition_when_adding_to_it() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    fixture.db.run(
        "DO $$ BEGIN EXECUTE format('COMMENT ON TABLE outbox_old IS %L', E'first\\nwalpost: of another version\\n' || repeat('x', 100000)); END $$"
    );
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    let comment = "obj_description('outbox_old'::regclass, 'pg_class')";
    maintain_until(&fixture, "the delivery time in the comment", || {
        fixture.db.is_true(&format!(
            "SELECT {comment} LIKE E'first\\nx%x\\nwalpost: delivered by %' AND length({comment}) > 100000"
        )) || is_gone(&fixture, "outbox_old")
    });
    assert!(!is_gone(&fixture, "outbox_old"));
    walpost.terminate().expect_code(0);
}
