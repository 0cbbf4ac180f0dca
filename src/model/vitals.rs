//! The state of the slot while a pipeline streams, as reported by the server.

use super::dropped_slot::DroppedSlot;
use super::lsn::Lsn;
use super::set_aside::SetAside;

/// The state of a pipeline's slot and of the outbox's partitions, the oldest open transaction, and
/// the pipeline's dropped slots and set-aside tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vitals {
    /// The end of the server's WAL.
    pub end: Lsn,
    /// The slot, or `None` if it does not exist.
    pub slot: Option<SlotVitals>,
    /// The number of leaf partitions, if the table is partitioned.
    pub partitions: Option<u64>,
    /// The end of the last partition's time range. Set only if the table is partitioned by ranges
    /// of time and every range has an upper bound.
    pub partitions_end: Option<PartitionsEnd>,
    /// The oldest transaction that is open on the server and has a transaction ID.
    pub oldest_open: Option<OpenTransaction>,
    /// The pipeline's dropped slots whose events have not been replayed. `None` if the journal does not exist or cannot
    /// be read.
    pub dropped_slots: Option<Vec<DroppedSlot>>,
    /// The pipeline's tables that are set aside. `None` if the journal does not exist or cannot be read.
    pub set_aside: Option<Vec<SetAside>>,
}

impl Vitals {
    /// Returns how much WAL the server retains for the slot, in bytes, from `restart_lsn` to the end of the WAL.
    #[must_use]
    pub fn retained_bytes(&self) -> Option<u64> {
        Some(self.end.bytes_since(self.slot.as_ref()?.restart?))
    }
}

/// The end of the period that the existing partitions cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionsEnd {
    /// The upper bound of the last partition's range, in microseconds since 1970.
    pub at_micros: u64,
    /// The number of partitions whose ranges begin in the future.
    pub ahead: u64,
    /// Whether a default partition exists, which accepts rows outside all ranges.
    pub has_default: bool,
}

/// An open transaction that has a transaction ID, in any database. The slot retains WAL from the
/// transaction's first record onwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenTransaction {
    /// The transaction ID.
    pub xid: String,
    /// The number of transaction IDs that have been assigned since this transaction obtained its
    /// ID.
    pub age: i64,
    pub whose: TransactionOwner,
    pub role: Option<String>,
    pub database: Option<String>,
    /// When the transaction began or was prepared, in microseconds since 1970. For sessions of other roles, PostgreSQL
    /// shows this time only to members of `pg_read_all_stats`.
    pub began_micros: Option<u64>,
}

/// The session that runs a transaction, or the name of a prepared transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransactionOwner {
    /// A session, identified by the process ID of its backend.
    Session(i32),
    /// A prepared transaction, identified by its name; no session owns it.
    Prepared(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotVitals {
    /// Whether a walsender is using the slot.
    pub active: bool,
    /// The position that was last confirmed (`confirmed_flush_lsn`).
    pub confirmed: Option<Lsn>,
    /// The start of the WAL that is retained for the slot (`restart_lsn`).
    pub restart: Option<Lsn>,
    /// `wal_status`, which is reserved, extended, unreserved or lost.
    pub wal_status: Option<String>,
    /// `safe_wal_size`, which is null if `max_slot_wal_keep_size` is not set, or if the slot is
    /// lost.
    pub safe_wal_bytes: Option<i64>,
    /// `age(catalog_xmin)`.
    pub catalog_xmin_age: Option<i64>,
}
