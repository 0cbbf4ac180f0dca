//! Plans maintenance steps for a table's partitions, and determines which steps have to wait. This
//! module does no I/O: times and WAL positions are passed in.

use std::fmt;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::mark::PartitionMark;
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;

/// The data needed to plan the maintenance of a table that is partitioned by time.
#[derive(Clone, Debug)]
pub(crate) struct RetentionFacts {
    /// The database server's current time.
    pub now: Timestamp,
    /// The start time of the oldest open transaction visible to Walpost, and the PID of its server
    /// process.
    pub oldest_open: Option<(Timestamp, i32)>,
    /// The partitions, in any order.
    pub partitions: Vec<Partition>,
    /// Detached partitions, which are identified by the removal progress in their comments.
    pub detached: Vec<Detached>,
    /// The slot with the lowest position among the slots that read the table, and that position.
    /// `None` if nothing may be removed.
    pub slot: Option<(String, Lsn)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    pub name: TableName,
    /// The partition's bounds. For the default partition, both are `None`.
    pub bounds: Bounds,
    /// Whether this is the default partition.
    pub is_default: bool,
    /// Whether DETACH CONCURRENTLY was started but not completed.
    pub is_pending: bool,
    /// The removal progress recorded in the partition's comment, if any.
    pub mark: Option<PartitionMark>,
}

/// A partition that was detached from the outbox table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Detached {
    /// The OID, which distinguishes the table from a later table with the same name.
    pub oid: u32,
    pub name: TableName,
    /// The removal progress recorded in the table's comment, if any.
    pub mark: Option<PartitionMark>,
    /// The end of the table's comment, where the removal progress is recorded.
    pub comment_end: String,
}

/// The bounds of a partition. `None` means unbounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// The lower bound, inclusive.
    pub lower: Option<Timestamp>,
    /// The upper bound, exclusive.
    pub upper: Option<Timestamp>,
}

/// A time range with both a lower and an upper bound.
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

/// The length of the time range that a partition covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Month,
    Fixed(SignedDuration),
}

/// A step that a maintenance pass performs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RetentionStep {
    /// Create a partition for this range.
    Create(TableName, TimeRange),
    /// Record the current WAL position in the partition's comment, because its time range has
    /// ended.
    MarkClosed(Partition),
    /// Record the current time in the partition's comment, because the slots have passed the
    /// position that was recorded there.
    MarkDelivered(Partition),
    /// Detach the partition from the table.
    Detach(Partition),
    /// Complete an interrupted detach.
    Finalize(Partition),
    /// Record the current WAL position in the detached partition's comment. All its rows were
    /// committed before this position.
    MarkDetached(Detached),
    /// Drop the table.
    Drop(Detached),
}

/// The reason a step has to wait.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RemovalWait {
    /// A slot has not reached the required position.
    #[error("{table} is kept until slot {slot:?}, confirmed up to {confirmed}, reaches {needed}")]
    Slot {
        table: TableName,
        slot: String,
        /// The slot's current position.
        confirmed: Lsn,
        /// The position that the slot must reach.
        needed: Lsn,
    },
    /// The partition's retention period has not ended.
    #[error("{table} has been delivered and is kept until {until}")]
    Age {
        table: TableName,
        /// When the retention period ends, according to the database server's clock.
        until: Timestamp,
    },
    /// A transaction may still insert into the partition.
    #[error(
        "{table} is kept until the transaction of PID {pid} ends, because it started at {began} and can still insert \
         rows. To terminate an abandoned transaction: SELECT pg_catalog.pg_terminate_backend({pid})"
    )]
    Transaction {
        table: TableName,
        /// The PID of the server process.
        pid: i32,
        /// When the transaction started.
        began: Timestamp,
    },
    /// Another session has locked rows in a table without partitions.
    #[error("rows of {0} that are due for deletion are locked by another session")]
    Rows(TableName),
    /// Another session is detaching the partition.
    #[error(
        "{table} is being detached by another session. If that session was interrupted, run this as the owner of the \
         table: ALTER TABLE ... DETACH PARTITION {table} FINALIZE"
    )]
    Pending { table: TableName },
}

/// Returns steps that create the missing partitions of `table`: the partition for the current time,
/// and the `ahead` partitions that follow it.
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
            steps.push(RetentionStep::Create(
                partition_name(table, range, width),
                range,
            ));
        }
        at = range.upper;
    }
    steps
}

/// Returns the steps that can be performed now to remove partitions `keep` after their delivery,
/// and the reasons why other partitions have to wait.
#[must_use]
pub(crate) fn plan_removals(
    found: &RetentionFacts,
    keep: SignedDuration,
) -> (Vec<RetentionStep>, Vec<RemovalWait>) {
    let (mut steps, mut waits) = (Vec::new(), Vec::new());
    let Some((slot, confirmed)) = &found.slot else {
        return (steps, waits);
    };
    let slot_wait = |table: &TableName, needed| RemovalWait::Slot {
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
            // If the partition was detached and then attached again, its removal starts over.
            None | Some(PartitionMark::Detached(_)) => {
                steps.push(RetentionStep::MarkClosed(partition.clone()))
            }
            Some(PartitionMark::Closed(needed)) if needed <= *confirmed => {
                steps.push(RetentionStep::MarkDelivered(partition.clone()));
            }
            Some(PartitionMark::Closed(needed)) => waits.push(slot_wait(&table, needed)),
            // The recorded time is in the future, because the server's clock was set back. Record
            // the current time instead.
            Some(PartitionMark::Delivered(at)) if at > found.now => {
                steps.push(RetentionStep::MarkDelivered(partition.clone()));
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
            Some(PartitionMark::Detached(needed)) => waits.push(slot_wait(&detached.name, needed)),
            // The partition was detached, but its comment does not record this yet.
            Some(_) => steps.push(RetentionStep::MarkDetached(detached.clone())),
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

    /// Returns whether the partition has both a lower and an upper bound.
    #[must_use]
    pub(crate) fn is_range(&self) -> bool {
        self.range().is_some()
    }

    fn range(&self) -> Option<TimeRange> {
        let (lower, upper) = (self.bounds.lower?, self.bounds.upper?);
        Some(TimeRange { lower, upper })
    }
}

/// Returns the existing partition range that new partitions are modeled on: the latest range that
/// has started or, if no range has started, the first range.
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

/// Returns the range of the given width that contains `at`. With a fixed width, the start of the
/// range differs from the start of `model` by a whole number of widths. Returns `None` if the
/// result is outside the supported range of times.
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

/// Returns a name for a table's partition. The name contains the start of the partition's range, as
/// precisely as the width of the range requires. For partitions by day, the format is the same as
/// in sql/outbox_partitioned.sql.
fn partition_name(table: &TableName, range: TimeRange, width: Width) -> TableName {
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
    // PostgreSQL limits names to 63 bytes.
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
