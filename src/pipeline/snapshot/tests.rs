use super::*;
use crate::postgres::table_pattern::TablePatterns;

const SNAPSHOT_LSN: Lsn = Lsn(0x200);
const BEFORE: Lsn = Lsn(0x1ff);
const AFTER: Lsn = Lsn(0x201);

fn copying(connection: Option<Connection>, resumed: Lsn) -> Copying {
    Copying {
        connection,
        snapshot_lsn: SNAPSHOT_LSN,
        resumed,
        progress: None,
        progressed: None,
        rows: 2,
        counted: 2,
    }
}

/// Returns a connection that never receives any data.
fn silent() -> Connection {
    let session = crate::postgres::connect::dial::Session {
        socket: crate::postgres::connect::dial::Socket::Memory(tokio::io::duplex(1).0),
        buffer: bytes::BytesMut::new(),
        parameters: std::collections::HashMap::default(),
        backend_pid: 1,
        secret: 1,
        host: "test".to_owned(),
    };
    Connection::from_session(session, 1)
}

fn decided(record: SnapshotRecord, has_streamed: bool, rows: Rows, confirmed: Lsn) -> Decision {
    let snapshot_history = SnapshotHistory {
        record,
        has_streamed,
        rows,
    };
    let table = "public.outbox".parse().expect("table");
    decide(&snapshot_history, confirmed, &table, "slot").expect("a decision")
}

/// If a copy counted as durable too early, the next run would not repeat it, and the rows that
/// Kafka had not acknowledged yet would be lost.
#[tokio::test]
async fn copy_is_durable_once_it_is_read_completely_and_confirmed() {
    let all_read = copying(None, Lsn::ZERO);
    assert!(!all_read.is_durable(BEFORE));
    assert!(all_read.is_durable(SNAPSHOT_LSN));
    assert!(all_read.is_durable(AFTER));
    assert!(!copying(Some(silent()), Lsn::ZERO).is_durable(AFTER));
}

/// The slot may be at the consistent point before any row is copied, for example after the
/// promotion of a standby that lacks all later WAL.
#[tokio::test]
async fn copy_is_not_durable_while_the_slot_is_at_its_initial_position() {
    let all_read = copying(None, SNAPSHOT_LSN);
    assert!(!all_read.is_durable(SNAPSHOT_LSN));
    assert!(all_read.is_durable(AFTER));
}

#[test]
fn repeats_an_unfinished_copy_unless_its_snapshot_lsn_is_confirmed() {
    let begun = |confirmed| {
        decided(
            SnapshotRecord::Begun(SNAPSHOT_LSN),
            true,
            Rows::About(3),
            confirmed,
        )
    };
    assert_eq!(begun(BEFORE), Decision::Copy);
    // The consistent point is confirmed only once the copy is complete.
    assert_eq!(begun(SNAPSHOT_LSN), Decision::Settled("copied"));
    assert_eq!(begun(AFTER), Decision::Settled("copied"));
}

#[test]
fn ignores_slot_positions_above_the_recorded_position() {
    assert_eq!(position_confirmed_by_walpost(AFTER, Some(BEFORE)), BEFORE);
    assert_eq!(position_confirmed_by_walpost(BEFORE, Some(AFTER)), BEFORE);
    assert_eq!(position_confirmed_by_walpost(AFTER, None), AFTER);
}

#[test]
fn copies_rows_only_if_no_earlier_copy_is_recorded() {
    let some = || Rows::About(3);
    assert_eq!(
        decided(SnapshotRecord::Nothing, false, some(), SNAPSHOT_LSN),
        Decision::Copy
    );
    let settled = decided(SnapshotRecord::Nothing, true, some(), SNAPSHOT_LSN);
    assert_eq!(settled, Decision::Settled("streamed before"));
    let settled = decided(SnapshotRecord::Nothing, false, Rows::None, SNAPSHOT_LSN);
    assert_eq!(settled, Decision::Settled("empty table"));
    for (record, has_streamed, rows) in [
        (SnapshotRecord::Done, false, some()),
        (SnapshotRecord::NoJournal, true, some()),
        (SnapshotRecord::NoJournal, false, Rows::None),
    ] {
        let decision = decided(record, has_streamed, rows, SNAPSHOT_LSN);
        assert_eq!(decision, Decision::Stream, "{record:?}");
    }
    // A copy that was started is completed even if the table is empty by now.
    assert_eq!(
        decided(
            SnapshotRecord::Begun(SNAPSHOT_LSN),
            false,
            Rows::None,
            BEFORE
        ),
        Decision::Copy
    );
}

#[test]
fn rejects_a_snapshot_if_another_instance_has_used_the_slot() {
    for planned in [SnapshotRecord::Nothing, SnapshotRecord::Begun(BEFORE)] {
        let outrun = |record, confirmed| is_superseded(planned, record, confirmed, SNAPSHOT_LSN);
        assert!(!outrun(planned, BEFORE));
        // If the slot is exactly at the consistent point, nothing after that point has been
        // confirmed.
        assert!(!outrun(planned, SNAPSHOT_LSN));
        // Another instance has already confirmed events after the consistent point.
        assert!(outrun(planned, AFTER));
        // Another instance has started or completed its own copy.
        for record in [SnapshotRecord::Done, SnapshotRecord::Begun(SNAPSHOT_LSN)] {
            assert!(outrun(record, BEFORE), "{record:?}");
        }
    }
}

#[test]
fn reports_a_stalled_copy_if_no_rows_are_read_within_the_limit() {
    const LIMIT: Duration = Duration::from_secs(10);
    let mut copying = copying(None, Lsn::ZERO);
    let start = Instant::now();
    let mut progresses = |rows, seconds| {
        copying.rows = rows;
        copying.progresses(start + Duration::from_secs(seconds), LIMIT)
    };
    assert!(progresses(2, 0));
    assert!(progresses(2, 9));
    assert!(!progresses(2, 10));
    assert!(progresses(3, 11));
    assert!(progresses(3, 20));
    assert!(!progresses(3, 21));
}

/// Covers the table in docs/pipelines.md#while-older-rows-are-being-copied: the definition is
/// changed to each kind of outbox while a copy is unfinished.
#[test]
fn continues_an_unfinished_copy_only_for_the_same_table() {
    let table = |name: &str| Outbox::Table(name.parse().expect("a table"));
    let patterns = || TablePatterns::new(&["public.*".to_owned()]).expect("patterns");
    let one_of = |name: &str| Outbox::OneOf {
        table: name.parse().expect("a table"),
        of: patterns(),
    };
    let messages = Outbox::Messages {
        prefix: "p".to_owned(),
    };
    let begun = |table: Option<&str>| TableSnapshot {
        table: table.map(str::to_owned),
        record: SnapshotRecord::Begun(SNAPSHOT_LSN),
    };
    let continues = |snapshots: &[TableSnapshot], outbox: &Outbox| {
        let found = Unfinished::find(snapshots, outbox, BEFORE).expect("an unfinished copy");
        found.is_for(outbox.table())
    };
    let of_a = [begun(Some("public.a"))];
    for (outbox, expected) in [
        (table("public.a"), true),
        (one_of("public.a"), true),
        (table("public.b"), false),
        (one_of("public.b"), false),
        (Outbox::Tables(patterns()), false),
        (messages, false),
    ] {
        assert_eq!(continues(&of_a, &outbox), expected, "{outbox}");
        // Once a copy is complete, the definition can be changed in any way.
        for (confirmed, record) in [
            (SNAPSHOT_LSN, SnapshotRecord::Begun(SNAPSHOT_LSN)),
            (BEFORE, SnapshotRecord::Done),
        ] {
            let table = Some("public.a".to_owned());
            let complete = [TableSnapshot { table, record }];
            let found = Unfinished::find(&complete, &outbox, confirmed);
            assert!(found.is_none(), "{outbox}");
        }
    }
    // An entry without a table name applies to the table that is currently the outbox.
    assert!(continues(&[begun(None)], &table("public.a")));
    assert!(!continues(&[begun(None)], &Outbox::Tables(patterns())));
    // If there are several unfinished copies, a copy that can't be continued is found first.
    let both = [begun(Some("public.a")), begun(Some("public.b"))];
    assert!(!continues(&both, &table("public.a")));
}

#[test]
fn detects_a_replaced_table_unless_the_new_table_already_has_a_snapshot() {
    let done = |table: &str| TableSnapshot {
        table: Some(table.to_owned()),
        record: SnapshotRecord::Done,
    };
    let ours: TableName = "public.b".parse().expect("a table");
    assert_eq!(replaced(&[], &ours), None);
    assert_eq!(replaced(&[done("public.a")], &ours), Some("public.a"));
    assert_eq!(replaced(&[done("public.a"), done("public.b")], &ours), None);
}
