//! Rows that are older than the slot are delivered first, from a snapshot. The stream then
//! continues from the snapshot's consistent point.

use std::collections::{HashMap, HashSet};

use crate::support::checker::{self, DeliveredRecord, Resends};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::parse_lsn;
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::Record;
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

mod copy;
pub(crate) mod detached;
mod interrupted;
mod moved;
mod needed;
mod replaced;

pub(crate) const TABLE: &str =
    "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text,
    type text, payload jsonb, created_at timestamptz NOT NULL DEFAULT clock_timestamp())";

/// Creates a fixture with a table but without a slot, so that rows can be older than the slot.
fn fixture_before_init(create: &str) -> Fixture<'static> {
    fixture_before_init_on(create, MAJOR)
}

fn fixture_before_init_on(create: &str, major: u32) -> Fixture<'static> {
    let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
    fixture.db.run(create);
    fixture
}

/// Writes `count` events in a single transaction.
fn fill(fixture: &Fixture<'_>, aggregate: &str, count: usize) {
    let payload = "jsonb_build_object('text', E'a\\tb\\\\c\\n' || n)";
    fixture
        .db
        .run(&fixture.events().insert_many(aggregate, count, payload));
}

/// Returns the state and the consistent point in each journal entry about a snapshot. Leaves out
/// entries written by `init`.
fn journal(fixture: &Fixture<'_>) -> Vec<(String, u64)> {
    let entries = fixture.db.rows(
        "SELECT detail ->> 'state', to_lsn FROM walpost.journal WHERE action = 'snapshot' AND detail ->> 'state' <> 'due' ORDER BY id",
    );
    let text = |value: &Option<String>| value.clone().unwrap();
    entries
        .iter()
        .map(|entry| (text(&entry[0]), parse_lsn(&text(&entry[1]))))
        .collect()
}

/// Asserts that there was only one snapshot and that it is complete, and returns its consistent
/// point.
fn snapshot_lsn(fixture: &Fixture<'_>) -> u64 {
    let entries = journal(fixture);
    let [(started, snapshot_lsn), (done, same)] = &entries[..] else {
        panic!("expected one snapshot: {entries:?}");
    };
    assert_eq!((started.as_str(), done.as_str()), ("begun", "done"));
    assert_eq!(snapshot_lsn, same);
    *snapshot_lsn
}

/// Asserts that each event was delivered once, either from a snapshot with the given consistent
/// point or from the stream that follows it. Returns the number of events from the snapshot.
fn check_copied(fixture: &Fixture<'_>, snapshot_lsn: u64) -> usize {
    check_copied_records(fixture, &fixture.records(), snapshot_lsn)
}

fn check_copied_records(fixture: &Fixture<'_>, records: &[Record], snapshot_lsn: u64) -> usize {
    let history = fixture.history();
    let delivered: Vec<DeliveredRecord> = records.iter().map(DeliveredRecord::from).collect();
    // The LSN of records copied from the snapshot is one less than its consistent point. No commit
    // can have that LSN, because WAL records begin at multiples of eight.
    let (copied, streamed): (Vec<_>, Vec<_>) = delivered
        .into_iter()
        .partition(|record| record.position.0 == snapshot_lsn - 1);
    let ids = |records: &[DeliveredRecord]| -> HashSet<String> {
        records.iter().map(|record| record.id.clone()).collect()
    };
    let before: HashSet<String> = history
        .iter()
        .filter(|event| event.end <= snapshot_lsn)
        .map(|event| event.id.clone())
        .collect();
    assert_eq!(
        ids(&copied),
        before,
        "the events committed before the consistent point"
    );
    assert_eq!(copied.len(), before.len(), "each event once");
    let mut last = HashMap::new();
    for record in copied.iter().chain(&streamed) {
        let after = last.insert(
            record.topic_partition.clone(),
            (record.offset, record.position),
        );
        assert!(
            record.position.0 != snapshot_lsn - 1
                || after.is_none_or(|(_, at)| at < record.position),
            "rows of the snapshot are in order: {record:?} after {after:?}"
        );
        let behind = after.is_none_or(|(offset, _)| offset < record.offset);
        assert!(
            behind,
            "rows of the snapshot precede streamed rows: {record:?} after {after:?}"
        );
    }
    let after: Vec<_> = history
        .into_iter()
        .filter(|event| event.end > snapshot_lsn)
        .collect();
    let verdict = checker::check(&after, &streamed, &[], Resends::Never);
    verdict.unwrap_or_else(|violations| panic!("{violations}"));
    copied.len()
}

/// Waits until everything is confirmed, and then stops Walpost.
pub(crate) fn settle(fixture: &Fixture<'_>, walpost: Walpost) {
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

/// Waits until an open transaction blocks the creation of a snapshot.
fn wait_until_blocked(fixture: &Fixture<'_>, by: &Session) {
    let pid = by.number("SELECT pg_backend_pid()");
    wait_until("a snapshot to wait", || {
        fixture.db.is_true(&format!(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'walsender'
             AND datname = current_database() AND pg_blocking_pids(pid) = ARRAY[{pid}])"
        ))
    });
}

/// Opens a transaction that writes events, some of them under savepoints, and rolls back one of the
/// savepoints.
fn open_transaction(fixture: &Fixture<'_>, aggregate: &str) -> Session {
    let session = fixture.server.session(&fixture.name);
    let one = || fixture.insert_sql(aggregate, "open");
    session.run(&format!(
        "BEGIN; {} SAVEPOINT a; {} RELEASE a; SAVEPOINT b; {} ROLLBACK TO b; {}",
        one(),
        one(),
        one(),
        one()
    ));
    session
}

/// Creates a fixture with the given number of rows that are older than its slot.
pub(crate) fn fixture_with_older_rows(
    create: &str,
    rows: usize,
    exactly_once: bool,
) -> (Fixture<'static>, String) {
    let fixture = fixture_before_init(create);
    let aggregate = fixture.aggregate(2);
    fill(&fixture, &aggregate, rows);
    fixture.init().finish().expect_code(0);
    (fixture.in_mode(exactly_once), aggregate)
}

/// Starts Walpost with a small window, which slows down the copy, and waits until some rows have
/// been copied. If the table is large, the copy is still running when this function returns.
pub(crate) fn start_and_copy_some(fixture: &Fixture<'_>) -> Walpost {
    let before = fixture.records().len();
    let mut walpost = fixture.run().args(["--window-records", "20"]).start();
    walpost.wait_for_log("copying");
    fixture.wait_for_records(before + 100);
    walpost
}

/// Waits until Walpost has copied all rows and streams. With a small window, this can take minutes
/// on a busy machine, so only the time without any progress is limited.
pub(crate) fn wait_until_copied(fixture: &Fixture<'_>, walpost: &Walpost) {
    let topics = fixture.topics();
    let mut is_streaming = false;
    while !is_streaming {
        let before = fixture.broker.ends(&topics);
        wait_until("copied rows", || {
            is_streaming = walpost.logged("streaming") > 0;
            is_streaming || fixture.broker.ends(&topics) != before
        });
    }
}

/// Asserts that all events were delivered and, in exactly-once mode, that none was repeated.
pub(crate) fn expect_all(fixture: &Fixture<'_>, count: usize, exactly_once: bool) {
    let records = fixture.records();
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), count);
    assert!(!exactly_once || records.len() == count, "{}", records.len());
}
