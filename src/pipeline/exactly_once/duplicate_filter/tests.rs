use super::*;

const CONFIRMED: Lsn = Lsn(100);
/// Behind the last transaction, which ends at 310.
const SAFE: Lsn = Lsn(350);

fn last() -> Last {
    Last {
        commit_lsn: Lsn(300),
        index: 1,
        xid: 7,
        commit_time: 9,
        event_id: Some("b".to_owned()),
    }
}

fn of(delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) -> Dedup {
    Dedup::new(delivered, safe, confirmed).expect("something comes again")
}

/// Amid the last transaction.
fn midway() -> Dedup {
    of(Some(Delivered::UpTo(last())), CONFIRMED, CONFIRMED)
}

fn dedup() -> Dedup {
    of(Some(Delivered::UpTo(last())), SAFE, CONFIRMED)
}

fn begin(commit: u64) -> Begin {
    Begin {
        commit: Lsn(commit),
        xid: 7,
        time_micros: 9,
    }
}

fn at(commit: u64, index: u64) -> Position {
    Position {
        commit: Lsn(commit),
        index,
    }
}

/// Whether Kafka has the row; its id is right.
fn has(dedup: &mut Dedup, commit: u64, index: u64) -> bool {
    dedup.has(at(commit, index), || Some(b"b")).expect("known")
}

fn commit(dedup: &mut Dedup, commit: u64, rows: u64) -> Result<bool, HistoryError> {
    dedup.commit(Lsn(commit), Lsn(commit + 10), rows)
}

#[test]
fn exactly_what_was_delivered_is_left_out() {
    let mut dedup = midway();
    dedup.begin(&begin(200)).expect("before");
    assert!(has(&mut dedup, 200, 5));
    assert_eq!(commit(&mut dedup, 200, 6), Ok(false));
    dedup.begin(&begin(300)).expect("the same");
    assert!(has(&mut dedup, 300, 0));
    assert!(has(&mut dedup, 300, 1));
    assert!(!has(&mut dedup, 300, 2));
    assert_eq!(commit(&mut dedup, 300, 3), Ok(true));
}

#[test]
fn where_nothing_comes_again_nothing_is_kept() {
    let none = |delivered, safe, confirmed| Dedup::new(delivered, safe, confirmed).is_none();
    let up_to = || Some(Delivered::UpTo(last()));
    assert!(none(None, CONFIRMED, CONFIRMED));
    assert!(!none(None, SAFE, CONFIRMED));
    assert!(none(up_to(), SAFE, SAFE));
    // The server sends a transaction whose commit record is where the slot stands.
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
    let error = dedup().begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // PostgreSQL leaves out what has its commit record before what is confirmed, and not what has it
    // just there.
    let mut there = of(Some(Delivered::UpTo(last())), SAFE, Lsn(300));
    let error = there.begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // It is not sent again if the slot is beyond it.
    let mut dedup = of(Some(Delivered::UpTo(last())), SAFE, Lsn(310));
    dedup.begin(&begin(400)).expect("the next");
    assert!(!has(&mut dedup, 400, 0));
    assert_eq!(commit(&mut dedup, 400, 1), Ok(true));
}

#[test]
fn an_idle_log_beyond_the_last_one_is_noticed() {
    let mut dedup = dedup();
    assert_eq!(dedup.idle(Lsn(300)), Ok(false));
    let error = dedup.idle(Lsn(301)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
}

#[test]
fn the_log_has_proved_itself_when_it_is_past_what_is_safe() {
    let mut dedup = dedup();
    dedup.begin(&begin(300)).expect("the same");
    assert!(has(&mut dedup, 300, 1));
    assert_eq!(commit(&mut dedup, 300, 2), Ok(false));
    assert_eq!(dedup.idle(Lsn(349)), Ok(false));
    assert_eq!(dedup.idle(SAFE), Ok(true));
    // One that has no event ends there.
    let mut dedup = of(None, SAFE, CONFIRMED);
    assert_eq!(commit(&mut dedup, 320, 0), Ok(false));
    assert_eq!(commit(&mut dedup, 340, 0), Ok(true));
}

#[test]
fn an_event_that_kafka_should_have_and_has_not_is_noticed() {
    let is_noticed = |mut dedup: Dedup, at: Position| {
        let found = dedup.has(at, || None);
        matches!(found, Err(HistoryError::NotPublished { .. }))
    };
    let beyond_last = || of(Some(Delivered::UpTo(last())), SAFE, Lsn(310));
    assert!(is_noticed(beyond_last(), at(349, 0)));
    assert!(!is_noticed(beyond_last(), at(350, 0)));
    // The last transaction was delivered as a whole.
    assert!(is_noticed(dedup(), at(300, 2)));
    assert!(is_noticed(of(None, SAFE, CONFIRMED), at(200, 0)));
    let before = Some(Delivered::Before(Lsn(300)));
    assert!(is_noticed(of(before, SAFE, CONFIRMED), at(300, 0)));
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
    assert_eq!(what(dedup().begin(&other)), "number");
    let other = Begin {
        time_micros: 8,
        ..begin(300)
    };
    assert_eq!(what(dedup().begin(&other)), "commit time");
    let id = |id: Option<&'static [u8]>| dedup().has(at(300, 1), || id).map(drop);
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
    let mut dedup = of(Some(Delivered::Before(Lsn(300))), CONFIRMED, CONFIRMED);
    dedup.begin(&begin(200)).expect("any");
    assert!(has(&mut dedup, 200, 0));
    assert_eq!(commit(&mut dedup, 200, 1), Ok(false));
    assert_eq!(dedup.idle(Lsn(299)), Ok(false));
    dedup.begin(&begin(300)).expect("any");
    assert!(!has(&mut dedup, 300, 0));
    assert_eq!(commit(&mut dedup, 300, 1), Ok(true));
}
