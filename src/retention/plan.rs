//! Determines what to do with a table's partitions, and what to wait for. Pure: the time and
//! positions in the WAL are passed as arguments.

use std::fmt;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::mark::PartitionMark;
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;

/// The facts about a table that is partitioned by time.
#[derive(Clone, Debug)]
pub(crate) struct RetentionFacts {
    /// The time of the database server.
    pub now: Timestamp,
    /// Start of the oldest visible transaction, and PID of its server process.
    pub oldest_open: Option<(Timestamp, i32)>,
    /// The partitions, in any order.
    pub partitions: Vec<Partition>,
    /// Tables that were partitions, and have a mark.
    pub detached: Vec<Detached>,
    /// Of the slots that read the table, the one with the lowest position; `None` if nothing may be
    /// removed.
    pub slot: Option<(String, Lsn)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    pub name: TableName,
    /// Its bounds. Both are open for the default partition.
    pub bounds: Bounds,
    /// Whether it is the default partition.
    pub is_default: bool,
    /// Whether detaching it was started and not completed.
    pub is_pending: bool,
    /// Its current mark.
    pub mark: Option<PartitionMark>,
}

/// A table that was a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Detached {
    /// Distinguishes the table from another one with the same name.
    pub oid: u32,
    pub name: TableName,
    /// Its current mark.
    pub mark: Option<PartitionMark>,
    /// The end of its comment, which contains the mark.
    pub comment_end: String,
}

/// The bounds of a partition. `None` is an open side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// The lower bound, inclusive.
    pub lower: Option<Timestamp>,
    /// The upper bound, exclusive.
    pub upper: Option<Timestamp>,
}

/// A time range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeRange {
    /// The lower bound, inclusive.
    pub lower: Timestamp,
    /// The upper bound, exclusive.
    pub upper: Timestamp,
}

impl fmt::Display for TimeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.lower, self.upper)
    }
}

/// The length of a partition's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Month,
    Fixed(SignedDuration),
}

/// A step to perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RetentionStep {
    /// Create a partition for this range.
    Make(TableName, TimeRange),
    /// The partition's time range has ended: record the current WAL position.
    Close(Partition),
    /// The slots have passed that position: record the time.
    NoteDelivered(Partition),
    /// Detach it from the table.
    Detach(Partition),
    /// Complete an interrupted detachment.
    Finalize(Partition),
    /// Record the current WAL position, which is after everything that the table contains.
    NoteDetached(Detached),
    /// Drop the table.
    Drop(Detached),
}

/// Why something has not been done yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RemovalWait {
    /// A slot has not passed a position.
    #[error("{table} waits until slot {slot:?}, confirmed up to {confirmed}, has passed {needed}")]
    Slot {
        table: TableName,
        slot: String,
        /// The current position of the slot.
        confirmed: Lsn,
        /// The position that the slot has to pass.
        needed: Lsn,
    },
    /// The partition is younger than the retention.
    #[error("{table} is delivered and kept until {until}")]
    Age {
        table: TableName,
        /// According to the database server's clock.
        until: Timestamp,
    },
    /// A transaction may still insert into the partition.
    #[error(
        "{table} waits for the end of a transaction of PID {pid}, which began at {began} and can still insert into it. \
         If it was forgotten: SELECT pg_catalog.pg_terminate_backend({pid})"
    )]
    Transaction {
        table: TableName,
        /// PID of the server process.
        pid: i32,
        /// When the transaction began.
        began: Timestamp,
    },
    /// Rows of a table without partitions are locked.
    #[error("rows of {0} that are to be deleted are locked by someone else")]
    Rows(TableName),
    /// Another session is detaching the partition.
    #[error(
        "{table} is being detached by someone else. If that was interrupted, as the owner of the table: ALTER TABLE ... DETACH PARTITION {table} \
         FINALIZE"
    )]
    Pending {
        /// The partition.
        table: TableName,
    },
}

/// Returns steps that create the partitions that `table` lacks: the current one, and `ahead` more.
#[must_use]
pub(crate) fn plan_missing(
    table: &TableName,
    found: &RetentionFacts,
    ahead: u32,
) -> Vec<RetentionStep> {
    let Some(model) = model(found) else {
        return Vec::new();
    };
    let width = width(model);
    let mut steps = Vec::new();
    let mut at = found.now;
    for _ in 0..=ahead {
        let Some(range) = range_at(model, width, at) else {
            break;
        };
        if !found.partitions.iter().any(|p| p.overlaps(range)) {
            steps.push(RetentionStep::Make(name(table, range, width), range));
        }
        at = range.upper;
    }
    steps
}

/// Returns what to do with partitions that are older than `keep`, and what to wait for.
#[must_use]
pub(crate) fn removals(
    found: &RetentionFacts,
    keep: SignedDuration,
) -> (Vec<RetentionStep>, Vec<RemovalWait>) {
    let (mut steps, mut waits) = (Vec::new(), Vec::new());
    let Some((slot, confirmed)) = &found.slot else {
        return (steps, waits);
    };
    let behind = |table: &TableName, needed| RemovalWait::Slot {
        table: table.clone(),
        slot: slot.clone(),
        confirmed: *confirmed,
        needed,
    };
    let mut old: Vec<_> = found.partitions.iter().collect();
    old.retain(|p| !p.is_default && p.bounds.upper.is_some_and(|upper| upper <= found.now));
    old.sort_by_key(|p| p.bounds.upper);
    for partition in old {
        let table = partition.name.clone();
        if partition.is_pending {
            match partition.mark {
                Some(PartitionMark::Delivered(_)) => {
                    steps.push(RetentionStep::Finalize(partition.clone()))
                }
                _ => waits.push(RemovalWait::Pending { table }),
            }
            continue;
        }
        match partition.mark {
            // A partition that was detached and attached again starts over.
            None | Some(PartitionMark::Detached(_)) => {
                steps.push(RetentionStep::Close(partition.clone()))
            }
            Some(PartitionMark::Closed(needed)) if needed <= *confirmed => {
                steps.push(RetentionStep::NoteDelivered(partition.clone()));
            }
            Some(PartitionMark::Closed(needed)) => waits.push(behind(&table, needed)),
            // The clock went backwards, so the recorded time does not count.
            Some(PartitionMark::Delivered(at)) if at > found.now => {
                steps.push(RetentionStep::NoteDelivered(partition.clone()));
            }
            Some(PartitionMark::Delivered(at)) => {
                let until = at.checked_add(keep).unwrap_or(Timestamp::MAX);
                match found.oldest_open {
                    _ if until > found.now => waits.push(RemovalWait::Age { table, until }),
                    Some((began, pid)) if Some(began) < partition.bounds.upper => {
                        waits.push(RemovalWait::Transaction { table, pid, began });
                    }
                    _ => steps.push(RetentionStep::Detach(partition.clone())),
                }
            }
        }
    }
    for detached in &found.detached {
        match detached.mark {
            Some(PartitionMark::Detached(needed)) if needed <= *confirmed => {
                steps.push(RetentionStep::Drop(detached.clone()));
            }
            Some(PartitionMark::Detached(needed)) => waits.push(behind(&detached.name, needed)),
            // The table was detached, but this was not recorded.
            Some(_) => steps.push(RetentionStep::NoteDetached(detached.clone())),
            None => {}
        }
    }
    (steps, waits)
}

impl Partition {
    fn overlaps(&self, range: TimeRange) -> bool {
        let Bounds { lower, upper } = self.bounds;
        !self.is_default
            && lower.is_none_or(|lower| lower < range.upper)
            && upper.is_none_or(|upper| upper > range.lower)
    }

    /// Returns whether the partition has both bounds.
    #[must_use]
    pub(crate) fn is_range(&self) -> bool {
        self.range().is_some()
    }

    fn range(&self) -> Option<TimeRange> {
        let (lower, upper) = (self.bounds.lower?, self.bounds.upper?);
        Some(TimeRange { lower, upper })
    }
}

/// Returns the range that serves as a model for others: the last one that has started, or else the
/// first one.
fn model(found: &RetentionFacts) -> Option<TimeRange> {
    let ranges = || found.partitions.iter().filter_map(Partition::range);
    ranges()
        .filter(|range| range.lower <= found.now)
        .max_by_key(|range| range.lower)
        .or_else(|| ranges().min_by_key(|range| range.lower))
}

fn width(range: TimeRange) -> Width {
    match month_at(range.lower) {
        Some(month) if month == range => Width::Month,
        _ => Width::Fixed(range.upper.duration_since(range.lower)),
    }
}

/// Returns the range that contains `at`, has this width and is aligned with `model`. Returns `None`
/// outside the supported calendar.
fn range_at(model: TimeRange, width: Width, at: Timestamp) -> Option<TimeRange> {
    let length = match width {
        Width::Month => return month_at(at),
        Width::Fixed(length) => i64::try_from(length.as_micros()).ok().filter(|l| *l > 0)?,
    };
    let start = model.lower.as_microsecond();
    let lower = start + (at.as_microsecond() - start).div_euclid(length) * length;
    Some(TimeRange {
        lower: Timestamp::from_microsecond(lower).ok()?,
        upper: Timestamp::from_microsecond(lower.checked_add(length)?).ok()?,
    })
}

/// Returns the UTC month that contains `at`.
fn month_at(at: Timestamp) -> Option<TimeRange> {
    let day = at.to_zoned(TimeZone::UTC).date();
    let begin = |date: Date| Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp());
    Some(TimeRange {
        lower: begin(day.first_of_month())?,
        upper: begin(day.last_of_month().tomorrow().ok()?)?,
    })
}

/// Returns the name of a table's partition. It contains as much of the start time as the width
/// requires, in the format that sql/outbox_partitioned.sql uses for days.
fn name(table: &TableName, range: TimeRange, width: Width) -> TableName {
    let is_whole = |unit: i64| match width {
        Width::Month => true,
        Width::Fixed(length) => {
            let unit = SignedDuration::from_secs(unit);
            let offset = SignedDuration::from_micros(range.lower.as_microsecond());
            [length, offset]
                .iter()
                .all(|time| time.as_micros() % unit.as_micros() == 0)
        }
    };
    let format = match width {
        Width::Month => "_p%Y%m",
        Width::Fixed(_) if is_whole(86_400) => "_p%Y%m%d",
        Width::Fixed(_) if is_whole(3_600) => "_p%Y%m%d%H",
        Width::Fixed(_) if is_whole(1) => "_p%Y%m%d%H%M%S",
        Width::Fixed(_) => "_p%Y%m%d%H%M%S_%6f",
    };
    let ending = range.lower.strftime(format).to_string();
    // A name has at most 63 bytes.
    let mut stem = table.name.as_str();
    while stem.len() + ending.len() > 63 {
        let mut chars = stem.chars();
        chars.next_back();
        stem = chars.as_str();
    }
    TableName {
        schema: table.schema.clone(),
        name: format!("{stem}{ending}"),
    }
}

#[cfg(test)]
mod tests;
