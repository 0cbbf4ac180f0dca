use super::*;

const CONFIRMED: Lsn = Lsn(100);
/// After the last transaction, which ends at 310.
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
    Overlap::new(delivered, safe, confirmed).expect("something comes again")
}

/// Returns a stream that resumes in the middle of the last transaction.
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

/// Returns whether Kafka has the row, whose ID is correct.
fn is_delivered(overlap: &mut Overlap, commit: u64, index: u64) -> bool {
    overlap
        .is_delivered(position(commit, index), || Some(b"b"))
        .expect("known")
}

fn commit(overlap: &mut Overlap, commit: u64, rows: u64) -> Result<bool, HistoryError> {
    overlap.commit(Lsn(commit), Lsn(commit + 10), rows)
}

#[test]
fn exactly_what_was_delivered_is_left_out() {
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
fn where_nothing_comes_again_nothing_is_kept() {
    let none = |delivered, safe, confirmed| Overlap::new(delivered, safe, confirmed).is_none();
    let up_to = || Some(Delivered::UpTo(last_event()));
    assert!(none(None, CONFIRMED, CONFIRMED));
    assert!(!none(None, SAFE, CONFIRMED));
    assert!(none(up_to(), SAFE, SAFE));
    // The server sends a transaction whose commit record is exactly at the slot's position.
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
fn a_transaction_in_the_place_of_the_last_one_is_noticed() {
    let error = overlap().begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // PostgreSQL omits transactions whose commit record is before the confirmed position, but not
    // one whose commit record is exactly there.
    let mut there = overlap_from(Some(Delivered::UpTo(last_event())), SAFE, Lsn(300));
    let error = there.begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // The transaction is not sent again if the slot is after it.
    let mut overlap = overlap_from(Some(Delivered::UpTo(last_event())), SAFE, Lsn(310));
    overlap.begin(&begin(400)).expect("the next");
    assert!(!is_delivered(&mut overlap, 400, 0));
    assert_eq!(commit(&mut overlap, 400, 1), Ok(true));
}

#[test]
fn an_idle_log_beyond_the_last_one_is_noticed() {
    let mut overlap = overlap();
    assert_eq!(overlap.idle(Lsn(300)), Ok(false));
    let error = overlap.idle(Lsn(301)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
}

#[test]
fn the_log_has_proved_itself_when_it_is_past_what_is_safe() {
    let mut overlap = overlap();
    overlap.begin(&begin(300)).expect("the same");
    assert!(is_delivered(&mut overlap, 300, 1));
    assert_eq!(commit(&mut overlap, 300, 2), Ok(false));
    assert_eq!(overlap.idle(Lsn(349)), Ok(false));
    assert_eq!(overlap.idle(SAFE), Ok(true));
    // Without a published event, it is enough to reach `SAFE`.
    let mut overlap = overlap_from(None, SAFE, CONFIRMED);
    assert_eq!(commit(&mut overlap, 320, 0), Ok(false));
    assert_eq!(commit(&mut overlap, 340, 0), Ok(true));
}

#[test]
fn an_event_that_kafka_should_have_and_has_not_is_noticed() {
    let is_noticed = |mut overlap: Overlap, at: Position| {
        let found = overlap.is_delivered(at, || None);
        matches!(found, Err(HistoryError::NotPublished { .. }))
    };
    let beyond_last = || overlap_from(Some(Delivered::UpTo(last_event())), SAFE, Lsn(310));
    assert!(is_noticed(beyond_last(), position(349, 0)));
    assert!(!is_noticed(beyond_last(), position(350, 0)));
    // The last transaction was delivered completely.
    assert!(is_noticed(overlap(), position(300, 2)));
    assert!(is_noticed(
        overlap_from(None, SAFE, CONFIRMED),
        position(200, 0)
    ));
    let before = Some(Delivered::Before(Lsn(300)));
    assert!(is_noticed(
        overlap_from(before, SAFE, CONFIRMED),
        position(300, 0)
    ));
}

#[test]
fn another_transaction_at_the_same_place_is_noticed() {
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
fn after_a_failover_what_was_before_it_is_left_out() {
    let mut overlap = overlap_from(Some(Delivered::Before(Lsn(300))), CONFIRMED, CONFIRMED);
    overlap.begin(&begin(200)).expect("any");
    assert!(is_delivered(&mut overlap, 200, 0));
    assert_eq!(commit(&mut overlap, 200, 1), Ok(false));
    assert_eq!(overlap.idle(Lsn(299)), Ok(false));
    overlap.begin(&begin(300)).expect("any");
    assert!(!is_delivered(&mut overlap, 300, 0));
    assert_eq!(commit(&mut overlap, 300, 1), Ok(true));
}
