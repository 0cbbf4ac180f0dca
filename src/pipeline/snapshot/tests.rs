use super::*;
use crate::postgres::table_pattern::TablePatterns;

const SNAPSHOT_LSN: Lsn = Lsn(0x200);
const BEFORE: Lsn = Lsn(0x1ff);
const BEYOND: Lsn = Lsn(0x201);

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

/// Returns a connection on which nothing ever arrives.
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
    decide(&snapshot_history, confirmed, &table, "slot").expect("it can go on")
}

/// Otherwise, a start would consider the copy delivered and copy nothing, so rows that the sink had
/// not written yet would be lost.
#[tokio::test]
async fn copy_is_durable_when_all_was_read_and_its_snapshot_lsn_is_confirmed() {
    let all_read = copying(None, Lsn::ZERO);
    assert!(!all_read.is_durable(BEFORE));
    assert!(all_read.is_durable(SNAPSHOT_LSN));
    assert!(all_read.is_durable(BEYOND));
    assert!(!copying(Some(silent()), Lsn::ZERO).is_durable(BEYOND));
}

/// A standby was promoted that has no WAL after the consistent point, and the copy continues from
/// there.
#[tokio::test]
async fn copy_whose_snapshot_lsn_the_slot_was_at_is_durable_when_more_is_confirmed() {
    let all_read = copying(None, SNAPSHOT_LSN);
    assert!(!all_read.is_durable(SNAPSHOT_LSN));
    assert!(all_read.is_durable(BEYOND));
}

#[test]
fn begun_copy_is_made_again_unless_the_slot_is_confirmed_up_to_its_snapshot_lsn() {
    let begun = |confirmed| {
        decided(
            SnapshotRecord::Begun(SNAPSHOT_LSN),
            true,
            Rows::About(3),
            confirmed,
        )
    };
    assert_eq!(begun(BEFORE), Decision::Copy);
    // The consistent point is confirmed only by a complete copy.
    assert_eq!(begun(SNAPSHOT_LSN), Decision::Settled("copied"));
    assert_eq!(begun(BEYOND), Decision::Settled("copied"));
}

#[test]
fn position_that_walpost_has_not_recorded_is_not_taken_for_a_complete_copy() {
    assert_eq!(confirmed_by_us(BEYOND, Some(BEFORE)), BEFORE);
    assert_eq!(confirmed_by_us(BEFORE, Some(BEYOND)), BEFORE);
    assert_eq!(confirmed_by_us(BEYOND, None), BEYOND);
}

#[test]
fn rows_are_copied_only_where_nothing_says_that_they_were() {
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
    // The table may be empty by now; a copy that was started is completed nevertheless.
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
fn snapshot_that_another_instance_has_outrun_is_not_copied() {
    for planned in [SnapshotRecord::Nothing, SnapshotRecord::Begun(BEFORE)] {
        let outrun = |record, confirmed| is_outrun(planned, record, confirmed, SNAPSHOT_LSN);
        assert!(!outrun(planned, BEFORE));
        // The slot may be exactly at the consistent point, with nothing after it confirmed.
        assert!(!outrun(planned, SNAPSHOT_LSN));
        // The slot has confirmed events at the start of the stream.
        assert!(outrun(planned, BEYOND));
        // The other instance has started or completed a copy of its own.
        for record in [SnapshotRecord::Done, SnapshotRecord::Begun(SNAPSHOT_LSN)] {
            assert!(outrun(record, BEFORE), "{record:?}");
        }
    }
}

#[test]
fn copy_makes_progress_until_no_row_was_read_for_a_while() {
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

/// The table in docs/pipelines.md, "While older rows are being copied": every kind of outbox that a
/// definition can have before and after a change, with an unfinished copy.
#[test]
fn open_copy_is_continued_by_the_same_table_only() {
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
        let found = Unfinished::find(snapshots, outbox, BEFORE).expect("it is open");
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
        // A complete copy affects none of them.
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
    // An entry that names no table concerns the current table of the definition.
    assert!(continues(&[begun(None)], &table("public.a")));
    assert!(!continues(&[begun(None)], &Outbox::Tables(patterns())));
    // The error names the copy that the definition does not continue.
    let both = [begun(Some("public.a")), begun(Some("public.b"))];
    assert!(!continues(&both, &table("public.a")));
}

#[test]
fn table_that_took_the_place_of_another_is_noticed_once() {
    let of = |table: &str| TableSnapshot {
        table: Some(table.to_owned()),
        record: SnapshotRecord::Done,
    };
    let ours: TableName = "public.b".parse().expect("a table");
    assert_eq!(replaced(&[], &ours), None);
    assert_eq!(replaced(&[of("public.a")], &ours), Some("public.a"));
    assert_eq!(replaced(&[of("public.a"), of("public.b")], &ours), None);
}
