//! Tests the delivery checker itself: it accepts a correct delivery and detects every kind of
//! violation.

use std::collections::HashMap;

use proptest::prelude::*;

use crate::support::checker::{
    CommittedEvent, DeliveredRecord, DeliverySummary, KilledState, Resends, Violation, check,
};

const TOPIC: &str = "events";

/// Returns a history of transactions with two events each. The id of the nth event is n.
fn history(count: u32) -> Vec<CommittedEvent> {
    (0..count)
        .map(|n| CommittedEvent {
            id: n.to_string(),
            end: end_of(n),
            index: n % 2,
        })
        .collect()
}

fn end_of(n: u32) -> u64 {
    u64::from(n / 2 + 1) * 100
}

/// Returns the records that deliver the events in the given order. Event n goes to partition n % 2,
/// all of whose records have the same key.
fn deliver(order: &[u32]) -> Vec<DeliveredRecord> {
    let mut ends = [0; 2];
    order
        .iter()
        .map(|&n| {
            let partition = n as usize % 2;
            let offset = ends[partition];
            ends[partition] += 1;
            DeliveredRecord {
                id: n.to_string(),
                topic_partition: (TOPIC.to_owned(), i32::from(n % 2 == 1)),
                offset,
                key: Some(vec![u8::from(n % 2 == 1)]),
                position: (end_of(n) - 10, n % 2),
            }
        })
        .collect()
}

/// Returns the state of a connector that was killed when the two partitions had the given numbers
/// of records.
fn killed_state(ends: [i64; 2], confirmed: u64) -> KilledState {
    let ends = HashMap::from([
        ((TOPIC.to_owned(), 0), ends[0]),
        ((TOPIC.to_owned(), 1), ends[1]),
    ]);
    KilledState { ends, confirmed }
}

fn violations(
    delivery: &[DeliveredRecord],
    kills: &[KilledState],
    resends: Resends,
) -> Vec<Violation> {
    check(&history(8), delivery, kills, resends)
        .expect_err("a violation")
        .0
}

#[test]
fn checker_accepts_in_order_delivery_without_duplicates() {
    let delivery = deliver(&[0, 1, 2, 3, 4, 5, 6, 7]);
    let summary = check(&history(8), &delivery, &[], Resends::Never).unwrap();
    assert_eq!(
        summary,
        DeliverySummary {
            committed: 8,
            repeated: 0
        }
    );
}

#[test]
fn checker_accepts_resent_events_that_were_not_confirmed() {
    let delivery = deliver(&[0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]);
    let kills = [killed_state([3, 2], end_of(1))];
    let summary = check(&history(8), &delivery, &kills, Resends::AtMost(1)).unwrap();
    assert_eq!(summary.repeated, 3);
}

#[test]
fn checker_detects_a_lost_event() {
    let found = violations(&deliver(&[0, 1, 2, 3, 4, 5, 7]), &[], Resends::AtMost(9));
    assert_eq!(found, [Violation::Missing("6".into())]);
}

#[test]
fn checker_detects_a_delivered_event_that_was_rolled_back() {
    let found = violations(&deliver(&[0, 1, 2, 3, 4, 5, 6, 7, 8]), &[], Resends::Never);
    assert_eq!(found, [Violation::Phantom("8".into())]);
}

#[test]
fn checker_detects_swapped_records() {
    let found = violations(&deliver(&[0, 1, 4, 3, 2, 5, 6, 7]), &[], Resends::AtMost(9));
    assert!(
        matches!(&found[0], Violation::OutOfOrder { id, .. } if id == "4"),
        "{found:?}"
    );
}

#[test]
fn checker_detects_a_gap_in_resent_records() {
    let order = [0, 1, 2, 3, 4, 5, 0, 1, 3, 4, 5, 6, 7];
    let found = violations(&deliver(&order), &[], Resends::AtMost(1));
    assert!(
        matches!(&found[0], Violation::OutOfOrder { id, .. } if id == "4"),
        "{found:?}"
    );
}

#[test]
fn checker_detects_records_resent_without_a_restart() {
    let found = violations(&deliver(&[0, 1, 0, 2, 3, 4, 5, 6, 7]), &[], Resends::Never);
    assert!(
        matches!(&found[0], Violation::TooManyResends { times: 1, .. }),
        "{found:?}"
    );
}

#[test]
fn checker_detects_a_record_repeated_immediately() {
    let found = violations(&deliver(&[0, 1, 1, 2, 3, 4, 5, 6, 7]), &[], Resends::Never);
    assert!(
        matches!(&found[0], Violation::TooManyResends { times: 1, .. }),
        "{found:?}"
    );
}

#[test]
fn checker_detects_resent_events_that_were_confirmed() {
    let delivery = deliver(&[0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]);
    let found = violations(
        &delivery,
        &[killed_state([3, 2], end_of(3))],
        Resends::AtMost(1),
    );
    assert_eq!(
        found,
        [
            Violation::ConfirmedTwice("2".into()),
            Violation::ConfirmedTwice("3".into())
        ]
    );
}

#[test]
fn checker_detects_confirmation_before_delivery() {
    let delivery = deliver(&[0, 1, 2, 3, 4, 5, 6, 7]);
    let honest = [killed_state([1, 1], end_of(2) - 1)];
    assert!(check(&history(8), &delivery, &honest, Resends::Never).is_ok());
    let found = violations(
        &delivery,
        &[killed_state([1, 1], end_of(2))],
        Resends::Never,
    );
    assert!(
        found.contains(&Violation::ConfirmedTooEarly("2".into())),
        "{found:?}"
    );
}

#[test]
fn checker_detects_a_key_in_two_partitions() {
    let mut delivery = deliver(&[0, 1, 2, 3, 4, 5, 6, 7]);
    delivery[7].key = delivery[0].key.clone();
    let found = violations(&delivery, &[], Resends::Never);
    assert_eq!(found, [Violation::KeyMoved("7".into())]);
}

#[test]
fn checker_detects_a_record_with_the_position_of_a_different_commit() {
    for position in [(end_of(4), 0), (end_of(4) - 10, 1), (end_of(3) - 10, 0)] {
        let mut delivery = deliver(&[0, 1, 2, 3, 4, 5, 6, 7]);
        delivery[4].position = position;
        let found = violations(&delivery, &[], Resends::Never);
        assert_eq!(found, [Violation::WrongPosition("4".into())]);
    }
}

proptest! {
    #[test]
    fn checker_detects_any_removed_record(removed in 0usize..8) {
        let mut delivery = deliver(&[0, 1, 2, 3, 4, 5, 6, 7]);
        delivery.remove(removed);
        prop_assert!(check(&history(8), &delivery, &[], Resends::AtMost(9)).is_err());
    }

    #[test]
    fn checker_detects_any_two_records_swapped_within_a_partition(
        first in 0usize..4, second in 0usize..4, odd in 0usize..2,
    ) {
        prop_assume!(first != second);
        let mut order = [0, 1, 2, 3, 4, 5, 6, 7];
        order.swap(first * 2 + odd, second * 2 + odd);
        prop_assert!(check(&history(8), &deliver(&order), &[], Resends::AtMost(9)).is_err());
    }

    #[test]
    fn checker_accepts_records_resent_from_the_confirmed_position_after_a_crash(
        steps in prop::collection::vec((1u32..8, 0u32..4), 0..6),
    ) {
        let (mut order, mut next, mut kills) = (Vec::new(), 0, Vec::new());
        for (sent, unconfirmed) in steps {
            let end = (next + sent).min(8);
            order.extend(next..end);
            let confirmed = (end.saturating_sub(unconfirmed) / 2 * 2).max(next / 2 * 2);
            let records = |odd| i64::try_from(order.iter().filter(|n| **n % 2 == odd).count()).unwrap();
            kills.push(killed_state([records(0), records(1)], u64::from(confirmed / 2) * 100));
            next = confirmed;
        }
        order.extend(next..8);
        let verdict = check(&history(8), &deliver(&order), &kills, Resends::AtMost(kills.len()));
        prop_assert!(verdict.is_ok(), "{}", verdict.unwrap_err());
    }
}
