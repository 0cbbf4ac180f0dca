//! Tests `walpost maintain`, which creates partitions ahead of time and removes old data, alone and
//! concurrently with `run`.

use std::time::Duration;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::{avoid_utc_midnight, wait_until};
use crate::support::walpost::Finished;

mod concurrent;
mod dropped_slots;
mod long_comments;
mod partitions;
mod refused;
mod rows;
mod several;
mod slots;

const COLUMNS: &str =
    "id uuid NOT NULL, aggregatetype text, aggregateid text, type text, payload jsonb,
    created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)";

/// SQL that creates a default partition, as `init` does. If a table has no default partition,
/// Walpost detaches its partitions with DETACH ... CONCURRENTLY.
const DEFAULT: &str = "CREATE TABLE outbox_default PARTITION OF outbox DEFAULT;";

/// How long maintenance may wait for a lock. Must match the constant in src/retention.rs.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// Returns SQL that creates two partitions: `<table>_old`, whose time range has passed, and
/// `<table>_new`.
fn old_and_new(table: &str) -> String {
    format!(
        "DO $$ DECLARE day timestamptz := date_trunc('day', now(), 'UTC'); BEGIN
             EXECUTE format('CREATE TABLE {table}_old PARTITION OF {table} FOR VALUES FROM (%L) TO (%L)',
                 day - interval '2 days', day - interval '1 day');
             EXECUTE format('CREATE TABLE {table}_new PARTITION OF {table} FOR VALUES FROM (%L) TO (%L)',
                 day - interval '1 day', day + interval '2 days');
         END $$;"
    )
}

/// Creates an outbox with several partitions, including `outbox_old`, whose time range has passed.
fn fixture_with_old_partition(server: &'static Server, more: &str) -> Fixture<'static> {
    avoid_utc_midnight();
    let fixture = Fixture::bare_on_servers(server, Broker::shared());
    fixture.db.run(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY RANGE (created_at);
         {more}
         {}",
        old_and_new("outbox")
    ));
    fixture.init().finish().expect_code(0);
    fixture
}

/// Changes the default of `created_at` so that later rows are stored in the partition whose time
/// range has passed, or in the current partition.
fn turn_clock_back(fixture: &Fixture, is_back: bool) {
    let age = if is_back { "2 days" } else { "0" };
    let default = format!("date_trunc('day', now(), 'UTC') - interval '{age}'");
    fixture.db.run(&format!(
        "ALTER TABLE outbox ALTER COLUMN created_at SET DEFAULT {default}"
    ));
}

/// Commits an event that is stored in `outbox_old`.
fn insert_old(fixture: &Fixture, aggregate: &str, key: &str) {
    turn_clock_back(fixture, true);
    fixture.insert(aggregate, key);
    turn_clock_back(fixture, false);
}

fn maintain(fixture: &Fixture, arguments: &[&str]) -> Finished {
    fixture.invoke("maintain").args(arguments).finish()
}

/// Returns all partitions and former partitions, with their comments.
fn tables(fixture: &Fixture) -> Vec<Vec<Option<String>>> {
    fixture.db.rows(
        "SELECT relname, relispartition, obj_description(oid, 'pg_class') FROM pg_class
         WHERE relkind = 'r' AND relname ~ '^outbox' ORDER BY relname",
    )
}

/// Returns whether a table with the given name exists and is a partition or, if `partition` is
/// false, exists and is not a partition.
fn is(fixture: &Fixture, table: &str, partition: bool) -> bool {
    fixture.db.is_true(&format!(
        "SELECT EXISTS (SELECT FROM pg_class WHERE relname = '{table}' AND relispartition = {partition})"
    ))
}

fn is_gone(fixture: &Fixture, table: &str) -> bool {
    !is(fixture, table, true) && !is(fixture, table, false)
}

/// Runs `maintain` repeatedly with the shortest possible retention period until `until` returns
/// true.
fn maintain_until(fixture: &Fixture, what: &str, mut until: impl FnMut() -> bool) {
    wait_until(what, || {
        maintain(fixture, &["--retention", "1s"]).expect_code(0);
        until()
    });
}

/// Runs `maintain` repeatedly until it reports that `outbox_old` has been delivered. The retention
/// period is long enough to keep the partition.
fn maintain_until_delivered(fixture: &Fixture) {
    wait_until("the partition to be delivered", || {
        let finished = maintain(fixture, &["--retention", "1h"]).expect_code(0);
        finished
            .stdout
            .contains("outbox_old has been delivered and is kept until")
    });
}

/// Creates a fixture whose old partition is detached but contains an undelivered row.
fn fixture_with_late_row_in_detached_partition() -> Fixture<'static> {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "first");
    maintain_until_delivered(&fixture);
    walpost.terminate().expect_code(0);
    // Insert the row after the partition's comment records that its rows have been delivered, but
    // before the partition is detached.
    insert_old(&fixture, &aggregate, "late");
    maintain_until(&fixture, "the partition to be detached", || {
        is(&fixture, "outbox_old", false)
    });
    fixture
}
