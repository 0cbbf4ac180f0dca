//! Partitioned outbox tables of every kind, with partitions added while events are written.

use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::Server;
use crate::support::records::keys;

const COLUMNS: &str = "id uuid, aggregatetype text, aggregateid text, type text, payload jsonb,
    at timestamptz DEFAULT now(), shard int DEFAULT random() * 8";

/// Creates the table, adds partitions while its rows are streamed under load, and checks the
/// delivery.
fn deliver(create: &str, add: &[&str]) {
    deliver_in_mode(create, add, false);
}

fn deliver_in_mode(create: &str, add: &[&str], exactly_once: bool) {
    let fixture = Fixture::with_table(&format!("CREATE TABLE outbox ({COLUMNS}) {create}"));
    let fixture = fixture.in_mode(exactly_once);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let walpost = fixture.start();
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    for statement in add {
        load.wait_for_transactions(50);
        fixture.db.run(statement);
        assert_eq!(walpost.logged("halted"), 0, "{}", walpost.log());
    }
    load.wait_for_transactions(50);
    load.stop();
    let summary = fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.repeated, 0);
    let filled = fixture
        .db
        .number("SELECT count(DISTINCT tableoid) FROM outbox WHERE tableoid <> 'outbox'::regclass");
    assert!(filled > 1, "the test must fill more than one partition");
}

in_both_modes! {
    delivers_rows_of_range_partitions
}

fn delivers_rows_of_range_partitions(exactly_once: bool) {
    deliver_in_mode(
        "PARTITION BY RANGE (shard);
         CREATE TABLE outbox_low PARTITION OF outbox FOR VALUES FROM (0) TO (3);
         CREATE TABLE outbox_default PARTITION OF outbox DEFAULT",
        &[
            "CREATE TABLE outbox_high PARTITION OF outbox FOR VALUES FROM (100) TO (200);
             ALTER TABLE outbox ALTER COLUMN shard SET DEFAULT (random() * 8)::int % 2 * 100",
            "ALTER TABLE outbox DETACH PARTITION outbox_high; DROP TABLE outbox_high",
            "ALTER TABLE outbox ADD COLUMN note text DEFAULT 'new'",
            "ALTER TABLE outbox DROP COLUMN note",
        ],
        exactly_once,
    );
}

#[test]
fn delivers_rows_of_hash_partitions() {
    deliver(
        "PARTITION BY HASH (id);
         CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        &[
            "BEGIN; ALTER TABLE outbox DETACH PARTITION outbox_1;
             CREATE TABLE outbox_2 PARTITION OF outbox FOR VALUES WITH (MODULUS 4, REMAINDER 1);
             CREATE TABLE outbox_3 PARTITION OF outbox FOR VALUES WITH (MODULUS 4, REMAINDER 3); COMMIT",
        ],
    );
}

#[test]
fn delivers_rows_of_list_partitions() {
    deliver(
        "PARTITION BY LIST (shard);
         CREATE TABLE outbox_even PARTITION OF outbox FOR VALUES IN (0, 2, 4, 6, 8);
         CREATE TABLE outbox_odd PARTITION OF outbox FOR VALUES IN (1, 3, 5, 7)",
        &[
            "CREATE TABLE outbox_big PARTITION OF outbox FOR VALUES IN (10, 11);
             ALTER TABLE outbox ALTER COLUMN shard SET DEFAULT 10 + (random())::int",
        ],
    );
}

#[test]
fn delivers_rows_of_nested_partitions() {
    deliver(
        "PARTITION BY LIST (shard);
         CREATE TABLE outbox_even PARTITION OF outbox FOR VALUES IN (0, 2, 4, 6, 8) PARTITION BY HASH (id);
         CREATE TABLE outbox_even_0 PARTITION OF outbox_even FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE outbox_even_1 PARTITION OF outbox_even FOR VALUES WITH (MODULUS 2, REMAINDER 1);
         CREATE TABLE outbox_odd PARTITION OF outbox FOR VALUES IN (1, 3, 5, 7)",
        &[
            "CREATE TABLE outbox_big PARTITION OF outbox FOR VALUES IN (10, 11) PARTITION BY RANGE (at);
             CREATE TABLE outbox_big_default PARTITION OF outbox_big DEFAULT;
             ALTER TABLE outbox ALTER COLUMN shard SET DEFAULT 10 + (random())::int",
        ],
    );
}

#[test]
fn delivers_rows_of_a_partition_with_a_different_column_order() {
    deliver(
        "PARTITION BY LIST (shard);
         CREATE TABLE outbox_even (shard int, gone text, payload jsonb, type text, at timestamptz,
             aggregateid text, aggregatetype text, id uuid);
         ALTER TABLE outbox_even DROP COLUMN gone;
         ALTER TABLE outbox ATTACH PARTITION outbox_even FOR VALUES IN (0, 2, 4, 6, 8);
         CREATE TABLE outbox_odd PARTITION OF outbox FOR VALUES IN (1, 3, 5, 7)",
        &[],
    );
}

#[test]
fn delivers_unsent_rows_of_a_dropped_partition() {
    let fixture = Fixture::with_table(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY LIST (shard);
         CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES IN (0);
         CREATE TABLE outbox_rest PARTITION OF outbox DEFAULT"
    ));
    let aggregate = fixture.aggregate(1);
    fixture
        .db
        .run("ALTER TABLE outbox ALTER COLUMN shard SET DEFAULT 0");
    fixture.insert(&aggregate, "before the drop");
    fixture
        .db
        .run("ALTER TABLE outbox DETACH PARTITION outbox_0; DROP TABLE outbox_0");
    fixture.insert(&aggregate, "after the drop");
    let walpost = fixture.start();
    fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(
        keys(&fixture.records()),
        ["before the drop", "after the drop"]
    );
}

/// In PostgreSQL 14 and 15, a partition can be attached to a table only if the generated columns of
/// both match.
#[test]
fn init_creates_partitions_of_a_table_with_a_generated_column() {
    for major in [14, 18] {
        let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.init().arg("--partitioned").finish().expect_code(0);
        let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox'::regclass";
        let count = fixture.db.number(partitions);
        let last = "SELECT max(inhrelid::regclass::text) FROM pg_inherits
            WHERE inhparent = 'outbox'::regclass AND inhrelid::regclass::text LIKE '%p2%'";
        let last = fixture.db.value(last).expect("a partition");
        fixture.db.run(&format!(
            "ALTER TABLE outbox ADD size integer GENERATED ALWAYS AS (length(aggregateid)) STORED; DROP TABLE {last}"
        ));
        fixture.init().arg("--partitioned").finish().expect_code(0);
        assert_eq!(fixture.db.number(partitions), count);
    }
}

#[test]
fn init_warns_if_a_partition_name_is_already_used_by_another_object() {
    for major in [15, 18] {
        let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.init().arg("--partitioned").finish().expect_code(0);
        let last = "SELECT max(inhrelid::regclass::text) FROM pg_inherits
            WHERE inhparent = 'outbox'::regclass AND inhrelid::regclass::text LIKE '%p2%'";
        let last = fixture.db.value(last).expect("a partition");
        for object in ["TABLE {} (a int)", "DOMAIN {} AS int"] {
            let create = object.replace("{}", &last);
            fixture
                .db
                .run(&format!("DROP TABLE {last}; CREATE {create}"));
            let init = fixture.init().arg("--partitioned").finish().expect_code(0);
            init.expect_mentions(&[&format!(
                "{last} was not created: another object has this name"
            )]);
        }
    }
}

#[test]
fn delivers_rows_of_the_partitioned_table_created_by_init() {
    let fixture = Fixture::bare();
    fixture.init().arg("--partitioned").finish().expect_code(0);
    let kind = fixture
        .db
        .value("SELECT relkind FROM pg_class WHERE oid = 'outbox'::regclass");
    assert_eq!(kind.as_deref(), Some("p"));
    let aggregate = fixture.aggregate(2);
    let walpost = fixture.start();
    let load = fixture.load(&[&aggregate]);
    load.wait_for_transactions(50);
    fixture.init().arg("--partitioned").finish().expect_code(0);
    load.wait_for_transactions(50);
    load.stop();
    fixture.settle(walpost, &[], Resends::Never);
}
