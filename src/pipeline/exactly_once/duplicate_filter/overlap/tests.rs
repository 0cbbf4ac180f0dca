use super::*;

const CONFIRMED: Lsn = Lsn(100);
/// An LSN after the last published transaction, which ends at 310.
const SAFE: Lsn = Lsn(350);

fn last_event() -> Last {
    Last {
        commit_lsn: Lsn(300),
        index: 1,
        xid: 7,
        commit_time: 9,
        event_id: Some("b".to_owned()),
    }
}

fn overlap_from(delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) -> Overlap {
    Overlap::new(delivered, safe, confirmed).expect("an overlap")
}

/// Returns an [`Overlap`] for a checkpoint that was written in the middle of a transaction.
fn midway() -> Overlap {
    overlap_from(Some(Delivered::UpTo(last_event())), CONFIRMED, CONFIRMED)
}

fn overlap() -> Overlap {
    overlap_from(Some(Delivered::UpTo(last_event())), SAFE, CONFIRMED)
}

fn begin(commit: u64) -> Begin {
    Begin {
        commit: Lsn(commit),
        xid: 7,
        time_micros: 9,
    }
}

fn position(commit: u64, index: u64) -> Position {
    Position {
        commit: Lsn(commit),
        index,
    }
}

/// Returns whether the event with the given position is already in Kafka. The event has the ID of
/// the last published event.
fn is_delivered(overlap: &mut Overlap, commit: u64, index: u64) -> bool {
    overlap
        .is_delivered(position(commit, index), || Some(b"b"))
        .expect("known")
}

fn commit(overlap: &mut Overlap, commit: u64, rows: u64) -> Result<bool, HistoryError> {
    overlap.commit(Lsn(commit), Lsn(commit + 10), rows)
}

#[test]
fn omits_exactly_the_delivered_events() {
    let mut overlap = midway();
    overlap.begin(&begin(200)).expect("before");
    assert!(is_delivered(&mut overlap, 200, 5));
    assert_eq!(commit(&mut overlap, 200, 6), Ok(false));
    overlap.begin(&begin(300)).expect("the same");
    assert!(is_delivered(&mut overlap, 300, 0));
    assert!(is_delivered(&mut overlap, 300, 1));
    assert!(!is_delivered(&mut overlap, 300, 2));
    assert_eq!(commit(&mut overlap, 300, 3), Ok(true));
}

#[test]
fn finds_no_overlap_if_the_server_resends_no_wal() {
    let none = |delivered, safe, confirmed| Overlap::new(delivered, safe, confirmed).is_none();
    let up_to = || Some(Delivered::UpTo(last_event()));
    assert!(none(None, CONFIRMED, CONFIRMED));
    assert!(!none(None, SAFE, CONFIRMED));
    assert!(none(up_to(), SAFE, SAFE));
    // The server still sends a transaction whose commit record is exactly at the slot's position.
    assert!(!none(up_to(), CONFIRMED, Lsn(300)));
    assert!(none(up_to(), Lsn(301), Lsn(301)));
    assert!(none(Some(Delivered::Before(Lsn(300))), CONFIRMED, Lsn(300)));
    assert!(!none(
        Some(Delivered::Before(Lsn(300))),
        CONFIRMED,
        Lsn(299)
    ));
}

#[test]
fn detects_that_the_last_transaction_is_missing() {
    let error = overlap().begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // PostgreSQL does not send transactions whose commit record precedes the confirmed position,
    // but it does send one whose commit record is exactly at that position.
    let mut at_commit_record = overlap_from(Some(Delivered::UpTo(last_event())), SAFE, Lsn(300));
    let error = at_commit_record.begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // The server does not resend the last published transaction if the slot's position is after it.
    let mut overlap = overlap_from(Some(Delivered::UpTo(last_event())), SAFE, Lsn(310));
    overlap.begin(&begin(400)).expect("the next");
    assert!(!is_delivered(&mut overlap, 400, 0));
    assert_eq!(commit(&mut overlap, 400, 1), Ok(true));
}

#[test]
fn detects_a_missing_last_transaction_when_a_keepalive_arrives() {
    let mut overlap = overlap();
    assert_eq!(overlap.process_keepalive(Lsn(300)), Ok(false));
    let error = overlap.process_keepalive(Lsn(301)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
}

#[test]
fn finishes_wal_verification_when_the_stream_reaches_the_safe_lsn() {
    let mut overlap = overlap();
    overlap.begin(&begin(300)).expect("the same");
    assert!(is_delivered(&mut overlap, 300, 1));
    assert_eq!(commit(&mut overlap, 300, 2), Ok(false));
    assert_eq!(overlap.process_keepalive(Lsn(349)), Ok(false));
    assert_eq!(overlap.process_keepalive(SAFE), Ok(true));
    // If no events have been published, the WAL is verified once the stream reaches `SAFE`.
    let mut overlap = overlap_from(None, SAFE, CONFIRMED);
    assert_eq!(commit(&mut overlap, 320, 0), Ok(false));
    assert_eq!(commit(&mut overlap, 340, 0), Ok(true));
}

#[test]
fn detects_an_event_that_should_be_in_kafka_but_is_not() {
    let is_detected = |mut overlap: Overlap, at: Position| {
        let found = overlap.is_delivered(at, || None);
        matches!(found, Err(HistoryError::NotPublished { .. }))
    };
    let after_last = || overlap_from(Some(Delivered::UpTo(last_event())), SAFE, Lsn(310));
    assert!(is_detected(after_last(), position(349, 0)));
    assert!(!is_detected(after_last(), position(350, 0)));
    // `SAFE` is after the last transaction, so the transaction was delivered completely and can't
    // contain another event.
    assert!(is_detected(overlap(), position(300, 2)));
    assert!(is_detected(
        overlap_from(None, SAFE, CONFIRMED),
        position(200, 0)
    ));
    let before = Some(Delivered::Before(Lsn(300)));
    assert!(is_detected(
        overlap_from(before, SAFE, CONFIRMED),
        position(300, 0)
    ));
}

#[test]
fn detects_a_different_transaction_at_the_same_position() {
    let what = |result: Result<_, HistoryError>| match result {
        Err(HistoryError::OtherTransaction { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let other = Begin {
        xid: 8,
        ..begin(300)
    };
    assert_eq!(what(overlap().begin(&other)), "number");
    let other = Begin {
        time_micros: 8,
        ..begin(300)
    };
    assert_eq!(what(overlap().begin(&other)), "commit time");
    let id = |id: Option<&'static [u8]>| overlap().is_delivered(position(300, 1), || id).map(drop);
    assert_eq!(id(Some(b"b")), Ok(()));
    assert_eq!(what(id(Some(b"c"))), "event id");
    assert_eq!(what(id(None)), "event id");
    assert_eq!(commit(&mut midway(), 300, 2), Ok(true));
    assert_eq!(
        what(commit(&mut midway(), 300, 1).map(drop)),
        "row messages"
    );
}

#[test]
fn omits_events_delivered_before_a_failover() {
    let mut overlap = overlap_from(Some(Delivered::Before(Lsn(300))), CONFIRMED, CONFIRMED);
    overlap.begin(&begin(200)).expect("any");
    assert!(is_delivered(&mut overlap, 200, 0));
    assert_eq!(commit(&mut overlap, 200, 1), Ok(false));
    assert_eq!(overlap.process_keepalive(Lsn(299)), Ok(false));
    overlap.begin(&begin(300)).expect("any");
    assert!(!is_delivered(&mut overlap, 300, 0));
    assert_eq!(commit(&mut overlap, 300, 1), Ok(true));
}
