//! Compares delivered records with the history of commits. This does not require a server.

use std::collections::{HashMap, HashSet};
use std::fmt;

use super::lsn::parse_position;
use super::records::{Record, TopicPartition};

/// An event in a committed transaction. A history is a list of events in commit order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommittedEvent {
    pub(crate) id: String,
    /// LSN of the end of the commit record. Walpost may confirm this LSN once Kafka has stored the
    /// transaction's events.
    pub(crate) end: u64,
    /// Zero-based index of the event among the transaction's rows.
    pub(crate) index: u32,
}

/// A delivered record. A delivery is a list of records ordered by topic, partition and offset.
#[derive(Clone, Debug)]
pub(crate) struct DeliveredRecord {
    pub(crate) id: String,
    pub(crate) topic_partition: TopicPartition,
    pub(crate) offset: i64,
    pub(crate) key: Option<Vec<u8>>,
    /// Commit LSN and index, taken from the header `walpost-position`.
    pub(crate) position: (u64, u32),
}

impl From<&Record> for DeliveredRecord {
    fn from(record: &Record) -> Self {
        Self {
            id: record.header("id").to_owned(),
            topic_partition: record.topic_partition(),
            offset: record.offset,
            key: record.key.clone(),
            position: parse_position(record.header("walpost-position")),
        }
    }
}

/// The state immediately after a connector was killed.
#[derive(Clone, Debug, Default)]
pub(crate) struct KilledState {
    /// The offset after the last record in each partition, whether or not that record is committed.
    /// Read after the connector was killed.
    pub(crate) ends: HashMap<TopicPartition, i64>,
    /// The slot's confirmed_flush_lsn. Read after the slot was released but before `ends`.
    pub(crate) confirmed: u64,
}

/// How often records may be repeated in a partition.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Resends {
    /// Records may be repeated at most once per failure, that is, per broken connection or killed
    /// connector. Contains the number of failures.
    AtMost(usize),
    /// A repeated record is an error, because each event must be delivered exactly once.
    Never,
}

/// A way in which a delivery is incorrect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// The event was committed but not delivered.
    Missing(String),
    /// The event was delivered but not committed.
    Phantom(String),
    /// The event's position does not match its commit.
    WrongPosition(String),
    /// The event is out of order: in its partition, its record follows a record of the event
    /// `after` instead of a record of the event that precedes it in commit order. `after` is empty
    /// if the event is the first in the partition.
    OutOfOrder {
        id: String,
        after: String,
        topic_partition: TopicPartition,
    },
    /// The event went to a different partition than an earlier event with the same key.
    KeyMoved(String),
    /// Records were repeated in a partition more often than failures occurred.
    TooManyResends {
        topic_partition: TopicPartition,
        times: usize,
    },
    /// The event was confirmed before a connector was killed, but was delivered again afterwards.
    ConfirmedTwice(String),
    /// The event was confirmed before a connector was killed, although it had not been delivered by
    /// then.
    ConfirmedTooEarly(String),
}

/// The number of committed events and the number of repeated events, for a delivery without
/// violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeliverySummary {
    pub(crate) committed: usize,
    pub(crate) repeated: usize,
}

/// Checks that a delivery is correct:
///
/// - Every committed event was delivered.
/// - Each partition contains its events in commit order. Repeated events are also in commit order,
///   without gaps.
/// - All events with the same key are in the same partition.
/// - Events that were confirmed before a connector was killed had been delivered by then, and were
///   not delivered again.
/// - The positions match those of the commits.
pub(crate) fn check(
    history: &[CommittedEvent],
    delivery: &[DeliveredRecord],
    kills: &[KilledState],
    resends: Resends,
) -> Result<DeliverySummary, Violations> {
    let order: HashMap<&str, usize> = history
        .iter()
        .enumerate()
        .map(|(number, event)| (event.id.as_str(), number))
        .collect();
    let mut found = Vec::new();
    let mut known = Vec::with_capacity(delivery.len());
    for record in delivery {
        match order.get(record.id.as_str()) {
            Some(number) => known.push((*number, record)),
            None => found.push(Violation::Phantom(record.id.clone())),
        }
    }
    find_missing(history, &known, &mut found);
    find_wrong_positions(history, &known, &mut found);
    find_disorder(history, &known, resends, &mut found);
    find_moved_keys(&known, &mut found);
    for kill in kills {
        find_wrong_confirmations(history, &known, kill, &mut found);
    }
    if !found.is_empty() {
        return Err(Violations(found));
    }
    Ok(DeliverySummary {
        committed: history.len(),
        repeated: delivery.len() - history.len(),
    })
}

fn find_missing(
    history: &[CommittedEvent],
    known: &[(usize, &DeliveredRecord)],
    found: &mut Vec<Violation>,
) {
    let delivered: HashSet<usize> = known.iter().map(|(number, _)| *number).collect();
    let missing = (0..history.len()).filter(|number| !delivered.contains(number));
    found.extend(missing.map(|number| Violation::Missing(history[number].id.clone())));
}

/// Checks the positions of events. A commit LSN is the start of a commit record, so it must lie
/// between the end of the preceding commit record and the end of its own record.
fn find_wrong_positions(
    history: &[CommittedEvent],
    known: &[(usize, &DeliveredRecord)],
    found: &mut Vec<Violation>,
) {
    let mut previous_end = vec![0; history.len()];
    for number in 1..history.len() {
        let before = &history[number - 1];
        previous_end[number] = if before.end == history[number].end {
            previous_end[number - 1]
        } else {
            before.end
        };
    }
    for (number, record) in known {
        let (commit, index) = record.position;
        let event = &history[*number];
        if index != event.index || commit >= event.end || commit < previous_end[*number] {
            found.push(Violation::WrongPosition(record.id.clone()));
        }
    }
}

/// Checks that each partition contains its events in commit order without gaps. A partition may
/// start again from an earlier event as often as `resends` permits.
fn find_disorder(
    history: &[CommittedEvent],
    known: &[(usize, &DeliveredRecord)],
    resends: Resends,
    found: &mut Vec<Violation>,
) {
    let mut by_partition: HashMap<&TopicPartition, Vec<(i64, usize)>> = HashMap::new();
    for (number, record) in known {
        by_partition
            .entry(&record.topic_partition)
            .or_default()
            .push((record.offset, *number));
    }
    for (topic_partition, mut records) in by_partition {
        records.sort_unstable();
        let mut expected: Vec<usize> = records.iter().map(|(_, number)| *number).collect();
        expected.sort_unstable();
        expected.dedup();
        let rank: HashMap<usize, usize> = expected
            .iter()
            .enumerate()
            .map(|(rank, number)| (*number, rank))
            .collect();
        let mut times = 0;
        let mut furthest = None;
        let mut previous: Option<usize> = None;
        for (_, number) in records {
            let this = rank[&number];
            let next = previous.map_or(0, |previous| previous + 1);
            let is_resend = furthest.is_some_and(|furthest| this <= furthest) && this < next;
            if is_resend {
                times += 1;
            } else if this != next {
                found.push(Violation::OutOfOrder {
                    id: history[number].id.clone(),
                    after: previous
                        .map_or_else(String::new, |rank| history[expected[rank]].id.clone()),
                    topic_partition: topic_partition.clone(),
                });
            }
            previous = Some(this);
            furthest = furthest.max(Some(this));
        }
        let allowed = match resends {
            Resends::AtMost(times) => times,
            Resends::Never => 0,
        };
        if times > allowed {
            found.push(Violation::TooManyResends {
                topic_partition: topic_partition.clone(),
                times,
            });
        }
    }
}

fn find_moved_keys(known: &[(usize, &DeliveredRecord)], found: &mut Vec<Violation>) {
    let mut first_partition: HashMap<(&str, &[u8]), i32> = HashMap::new();
    for (_, record) in known {
        let Some(key) = record.key.as_deref() else {
            continue;
        };
        let (topic, partition) = &record.topic_partition;
        if first_partition.entry((topic, key)).or_insert(*partition) != partition {
            found.push(Violation::KeyMoved(record.id.clone()));
        }
    }
}

fn find_wrong_confirmations(
    history: &[CommittedEvent],
    known: &[(usize, &DeliveredRecord)],
    kill: &KilledState,
    found: &mut Vec<Violation>,
) {
    let mut delivered = HashSet::new();
    for (number, record) in known {
        let before = kill
            .ends
            .get(&record.topic_partition)
            .is_some_and(|end| record.offset < *end);
        if before {
            delivered.insert(*number);
        } else if history[*number].end <= kill.confirmed {
            found.push(Violation::ConfirmedTwice(record.id.clone()));
        }
    }
    let confirmed = history
        .iter()
        .enumerate()
        .filter(|(_, event)| event.end <= kill.confirmed);
    let early = confirmed.filter(|(number, _)| !delivered.contains(number));
    found.extend(early.map(|(_, event)| Violation::ConfirmedTooEarly(event.id.clone())));
}

/// All violations found in a delivery. Only the first 20 are printed.
#[derive(Debug)]
pub(crate) struct Violations(pub(crate) Vec<Violation>);

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} violations", self.0.len())?;
        for violation in self.0.iter().take(20) {
            writeln!(f, "  {violation:?}")?;
        }
        Ok(())
    }
}
