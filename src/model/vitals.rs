//! How the slot is while it streams, as the server said it.

use super::dropped_slot::DroppedSlot;
use super::lsn::Lsn;
use super::set_aside::SetAside;

/// The end of the server's WAL, the slot, the outbox's partitions, and what holds the slot up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vitals {
    /// The end of the server's WAL.
    pub end: Lsn,
    /// The slot, if it is there.
    pub slot: Option<SlotVitals>,
    /// Partitions of the table that hold rows themselves, if it is partitioned.
    pub partitions: Option<u64>,
    /// How long its partitions last, if they are ranges of a time and all of them end.
    pub partitions_end: Option<PartitionsEnd>,
    /// The oldest transaction that is open on the server and has written something.
    pub oldest_open: Option<OpenTransaction>,
    /// Slots of the pipeline that were dropped and not replayed; not known without a journal that may be read.
    pub dropped_slots: Option<Vec<DroppedSlot>>,
    /// Tables of the pipeline that are set aside; not known without a journal that may be read.
    pub set_aside: Option<Vec<SetAside>>,
}

impl Vitals {
    /// Log that the server keeps for the slot, in bytes: from `restart_lsn` to its end.
    #[must_use]
    pub fn retained_bytes(&self) -> Option<u64> {
        Some(self.end.bytes_since(self.slot.as_ref()?.restart?))
    }
}

/// How long partitions last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionsEnd {
    /// Where the last one ends, in microseconds since 1970.
    pub at_micros: u64,
    /// How many begin later than now.
    pub ahead: u64,
    /// There is a default partition for what comes after them.
    pub has_default: bool,
}

/// A transaction that is open and has an id, in any database: log from its first record on is kept
/// for the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenTransaction {
    /// Its id.
    pub xid: String,
    /// How many transactions came after it.
    pub age: i64,
    pub whose: Whose,
    pub role: Option<String>,
    pub database: Option<String>,
    /// When it began, or was prepared, in microseconds since 1970. Of other roles' sessions
    /// PostgreSQL says that only to members of `pg_read_all_stats`.
    pub began_micros: Option<u64>,
}

/// Whose a transaction is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// A session's, with that process id.
    Session(i32),
    /// Nobody's any more: it is prepared under that name.
    Prepared(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotVitals {
    /// A walsender has it.
    pub active: bool,
    /// What was confirmed last.
    pub confirmed: Option<Lsn>,
    /// Where the WAL begins that is retained for it.
    pub restart: Option<Lsn>,
    /// `wal_status`: reserved, extended, unreserved or lost.
    pub wal_status: Option<String>,
    /// `safe_wal_size`: none without `max_slot_wal_keep_size`, and of a slot that is lost.
    pub safe_wal_bytes: Option<i64>,
    /// `age(catalog_xmin)`
    pub catalog_xmin_age: Option<i64>,
}
