//! Compares a delivery with the history of commits, without using a server.

use std::collections::{HashMap, HashSet};
use std::fmt;

use super::lsn::parse_position;
use super::records::{Record, TopicPartition};

/// One event of a committed transaction. A history contains events in commit order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommittedEvent {
    pub(crate) id: String,
    /// LSN of the end of the commit record, which can be confirmed once the transaction is durable.
    pub(crate) end: u64,
    /// Zero-based index of the event among the rows of the transaction.
    pub(crate) index: u32,
}

/// One delivered record. A delivery contains records ordered by topic, partition and offset.
#[derive(Clone, Debug)]
pub(crate) struct DeliveredRecord {
    pub(crate) id: String,
    pub(crate) topic_partition: TopicPartition,
    pub(crate) offset: i64,
    pub(crate) key: Option<Vec<u8>>,
    /// Commit LSN and index from the header `walpost-position`.
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

/// The state just after a connector was killed.
#[derive(Clone, Debug, Default)]
pub(crate) struct KilledState {
    /// Offset after the last record of each partition, committed or not, read after the connector
    /// was killed.
    pub(crate) ends: HashMap<TopicPartition, i64>,
    /// The slot's confirmed_flush_lsn, read after the slot was released and before `ends`.
    pub(crate) confirmed: u64,
}

/// How often a partition may repeat records from an earlier event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Resends {
    /// At most once for each connection that broke or connector that was killed; this is their
    /// number.
    AtMost(usize),
    /// Never: each event is delivered exactly once.
    Never,
}

/// An error in a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// The event was committed but not delivered.
    Missing(String),
    /// The event was delivered but not committed.
    Phantom(String),
    /// The position of the event differs from that of its commit.
    WrongPosition(String),
    /// The event does not follow the previous event of its partition.
    OutOfOrder {
        id: String,
        after: String,
        topic_partition: TopicPartition,
    },
    /// The later of two events with the same key was delivered to a different partition.
    KeyMoved(String),
    /// A partition was repeated from an earlier event more often than failures occurred.
    TooManyResends {
        topic_partition: TopicPartition,
        times: usize,
    },
    /// The event was confirmed before a connector was killed, but was delivered again afterwards.
    ConfirmedTwice(String),
    /// The event was confirmed before a connector was killed, but had not been delivered when the
    /// connector was killed.
    ConfirmedTooEarly(String),
}

/// The counts of a delivery without violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeliverySummary {
    pub(crate) committed: usize,
    pub(crate) repeated: usize,
}

/// Checks a delivery for violations:
///
/// - every committed event was delivered;
/// - each partition contains its events in commit order, and so does each repeated run, without
///   gaps;
/// - a key stays in its partition;
/// - events that had been confirmed when a connector was killed had been delivered before, and were
///   not delivered again;
/// - positions are those of the commits.
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

/// The commit LSN is the start of the commit record, so it lies between the ends of two commits.
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

/// Checks that each partition consists of runs without gaps over the events that belong to it.
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

/// The violations found in a delivery. Only the first ones are printed.
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
