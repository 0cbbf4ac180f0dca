use super::*;

const CONFIRMED: Lsn = Lsn(100);

fn last() -> Last {
    Last {
        commit_lsn: Lsn(300),
        index: 1,
        xid: 7,
        commit_time: 9,
        event_id: Some("b".to_owned()),
    }
}

fn dedup() -> Dedup {
    Dedup::new(Delivered::UpTo(last()), CONFIRMED)
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
fn has(dedup: &Dedup, commit: u64, index: u64) -> bool {
    dedup.has(at(commit, index), || Some(b"b")).expect("known")
}

#[test]
fn exactly_what_was_delivered_is_left_out() {
    let mut dedup = dedup();
    dedup.begin(&begin(200)).expect("before");
    assert!(has(&dedup, 200, 5));
    assert_eq!(dedup.commit(Lsn(200), 6), Ok(false));
    dedup.begin(&begin(300)).expect("the same");
    assert!(has(&dedup, 300, 0));
    assert!(has(&dedup, 300, 1));
    assert!(!has(&dedup, 300, 2));
    assert_eq!(dedup.commit(Lsn(300), 3), Ok(true));
}

#[test]
fn a_transaction_in_the_place_of_the_last_one_is_noticed() {
    let error = dedup().begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // PostgreSQL leaves out what has its commit record before what is confirmed, and not what has it
    // just there.
    let mut there = Dedup::new(Delivered::UpTo(last()), Lsn(300));
    let error = there.begin(&begin(400)).expect_err("missing");
    assert!(matches!(error, HistoryError::TransactionMissing { .. }));
    // It is not sent again if the slot is beyond it.
    let mut dedup = Dedup::new(Delivered::UpTo(last()), Lsn(301));
    dedup.begin(&begin(400)).expect("the next");
    assert!(!has(&dedup, 400, 0));
    assert_eq!(dedup.commit(Lsn(400), 1), Ok(true));
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
    assert_eq!(dedup().commit(Lsn(300), 2), Ok(true));
    assert_eq!(what(dedup().commit(Lsn(300), 1).map(drop)), "row messages");
}

#[test]
fn after_a_failover_what_was_before_it_is_left_out() {
    let mut dedup = Dedup::new(Delivered::Before(Lsn(300)), CONFIRMED);
    dedup.begin(&begin(200)).expect("any");
    assert!(has(&dedup, 200, 0));
    assert_eq!(dedup.commit(Lsn(200), 1), Ok(false));
    dedup.begin(&begin(300)).expect("any");
    assert!(!has(&dedup, 300, 0));
    assert_eq!(dedup.commit(Lsn(300), 1), Ok(true));
}
