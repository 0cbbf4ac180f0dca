//! What is to be done with a table's partitions, and what has to be waited for. Pure: time and
//! places in WAL come in as arguments.

use std::fmt;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::mark::Mark;
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;

/// What was found of a table that is partitioned by time.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// The database's clock.
    pub now: Timestamp,
    /// When the oldest transaction began that we can see, and which process has it open.
    pub oldest_open: Option<(Timestamp, i32)>,
    /// The partitions, in any order.
    pub partitions: Vec<Partition>,
    /// Tables that were partitions, and have a mark.
    pub detached: Vec<Detached>,
    /// The slot that is furthest behind of those that read the table; none where nothing may be
    /// removed.
    pub slot: Option<(String, Lsn)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    pub name: TableName,
    /// Its bounds; for the default partition both are open.
    pub bounds: Bounds,
    /// It takes what fits no other.
    pub is_default: bool,
    /// Somebody began to detach it, and did not end.
    pub is_pending: bool,
    /// What is known of it.
    pub mark: Option<Mark>,
}

/// A table that was a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Detached {
    /// Its OID, so that another table of the name is not taken for it.
    pub oid: u32,
    pub name: TableName,
    /// What is known of it.
    pub mark: Option<Mark>,
    /// The end of its comment, with the mark.
    pub comment_end: String,
}

/// Bounds of a partition; none is an open side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// From here, inclusive.
    pub lower: Option<Timestamp>,
    /// To here, exclusive.
    pub upper: Option<Timestamp>,
}

/// A span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// From here, inclusive.
    pub lower: Timestamp,
    /// To here, exclusive.
    pub upper: Timestamp,
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.lower, self.upper)
    }
}

/// How long partitions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Month,
    Fixed(SignedDuration),
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Make a partition for this range.
    Make(TableName, Range),
    /// Its time is over: note where WAL is.
    Close(Partition),
    /// The slots have passed that place: note when.
    NoteDelivered(Partition),
    /// Take it off the table.
    Detach(Partition),
    /// End what was interrupted.
    Finalize(Partition),
    /// Note where WAL is, after all that it has.
    NoteDetached(Detached),
    /// Drop the table.
    Drop(Detached),
}

/// Why something is not done yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Wait {
    /// A slot has not passed a place.
    #[error("{table} waits until slot {slot:?}, confirmed up to {confirmed}, has passed {needed}")]
    Slot {
        /// The partition.
        table: TableName,
        slot: String,
        /// Where it is.
        confirmed: Lsn,
        /// Where it has to be.
        needed: Lsn,
    },
    /// It is younger than the retention.
    #[error("{table} is delivered and kept until {until}")]
    Age {
        /// The partition.
        table: TableName,
        /// By the database's clock.
        until: Timestamp,
    },
    /// A transaction may still insert into it.
    #[error(
        "{table} waits for the end of a transaction of PID {pid}, which began at {began} and can still insert into it. \
         If it was forgotten: SELECT pg_catalog.pg_terminate_backend({pid})"
    )]
    Transaction {
        /// The partition.
        table: TableName,
        /// The server process.
        pid: i32,
        /// When it began.
        began: Timestamp,
    },
    /// Rows of a table without partitions are in use.
    #[error("rows of {0} that are to be deleted are locked by someone else")]
    Rows(TableName),
    /// Somebody else is detaching it.
    #[error(
        "{table} is being detached by someone else. If that was interrupted: ALTER TABLE ... DETACH PARTITION {table} \
         FINALIZE"
    )]
    Pending {
        /// The partition.
        table: TableName,
    },
}

/// The partitions that `table` lacks: for now, and for `ahead` more.
#[must_use]
pub(crate) fn missing(table: &TableName, found: &Found, ahead: u32) -> Vec<Step> {
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
            steps.push(Step::Make(name(table, range, width), range));
        }
        at = range.upper;
    }
    steps
}

/// What is to be done about partitions that are older than `keep`, and what has to be waited for.
#[must_use]
pub(crate) fn removals(found: &Found, keep: SignedDuration) -> (Vec<Step>, Vec<Wait>) {
    let (mut steps, mut waits) = (Vec::new(), Vec::new());
    let Some((slot, confirmed)) = &found.slot else {
        return (steps, waits);
    };
    let behind = |table: &TableName, needed| Wait::Slot {
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
                Some(Mark::Delivered(_)) => steps.push(Step::Finalize(partition.clone())),
                _ => waits.push(Wait::Pending { table }),
            }
            continue;
        }
        match partition.mark {
            // One that was detached and attached again starts anew.
            None | Some(Mark::Detached(_)) => steps.push(Step::Close(partition.clone())),
            Some(Mark::Closed(needed)) if needed <= *confirmed => {
                steps.push(Step::NoteDelivered(partition.clone()));
            }
            Some(Mark::Closed(needed)) => waits.push(behind(&table, needed)),
            // The clock went back: what it said then counts no more.
            Some(Mark::Delivered(at)) if at > found.now => {
                steps.push(Step::NoteDelivered(partition.clone()));
            }
            Some(Mark::Delivered(at)) => {
                let until = at.checked_add(keep).unwrap_or(Timestamp::MAX);
                match found.oldest_open {
                    _ if until > found.now => waits.push(Wait::Age { table, until }),
                    Some((began, pid)) if Some(began) < partition.bounds.upper => {
                        waits.push(Wait::Transaction { table, pid, began });
                    }
                    _ => steps.push(Step::Detach(partition.clone())),
                }
            }
        }
    }
    for detached in &found.detached {
        match detached.mark {
            Some(Mark::Detached(needed)) if needed <= *confirmed => {
                steps.push(Step::Drop(detached.clone()));
            }
            Some(Mark::Detached(needed)) => waits.push(behind(&detached.name, needed)),
            // It was detached, and the end of that not noted.
            Some(_) => steps.push(Step::NoteDetached(detached.clone())),
            None => {}
        }
    }
    (steps, waits)
}

impl Partition {
    fn overlaps(&self, range: Range) -> bool {
        let Bounds { lower, upper } = self.bounds;
        !self.is_default
            && lower.is_none_or(|lower| lower < range.upper)
            && upper.is_none_or(|upper| upper > range.lower)
    }

    /// It has both bounds.
    #[must_use]
    pub(crate) fn is_range(&self) -> bool {
        self.range().is_some()
    }

    fn range(&self) -> Option<Range> {
        let (lower, upper) = (self.bounds.lower?, self.bounds.upper?);
        Some(Range { lower, upper })
    }
}

/// The range that others are made after: the last that has begun, else the first.
fn model(found: &Found) -> Option<Range> {
    let ranges = || found.partitions.iter().filter_map(Partition::range);
    ranges()
        .filter(|range| range.lower <= found.now)
        .max_by_key(|range| range.lower)
        .or_else(|| ranges().min_by_key(|range| range.lower))
}

fn width(range: Range) -> Width {
    match month_at(range.lower) {
        Some(month) if month == range => Width::Month,
        _ => Width::Fixed(range.upper.duration_since(range.lower)),
    }
}

/// The range of this width, and in line with `model`, that `at` is in; none beyond the calendar.
fn range_at(model: Range, width: Width, at: Timestamp) -> Option<Range> {
    let length = match width {
        Width::Month => return month_at(at),
        Width::Fixed(length) => i64::try_from(length.as_micros()).ok().filter(|l| *l > 0)?,
    };
    let start = model.lower.as_microsecond();
    let lower = start + (at.as_microsecond() - start).div_euclid(length) * length;
    Some(Range {
        lower: Timestamp::from_microsecond(lower).ok()?,
        upper: Timestamp::from_microsecond(lower.checked_add(length)?).ok()?,
    })
}

/// The month of UTC that `at` is in.
fn month_at(at: Timestamp) -> Option<Range> {
    let day = at.to_zoned(TimeZone::UTC).date();
    let begin = |date: Date| Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp());
    Some(Range {
        lower: begin(day.first_of_month())?,
        upper: begin(day.last_of_month().tomorrow().ok()?)?,
    })
}

/// The name of a table's partition: with as much of its begin as the width needs, as
/// sql/outbox_partitioned.sql names those of a day.
fn name(table: &TableName, range: Range, width: Width) -> TableName {
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
    // A name is at most 63 bytes.
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
