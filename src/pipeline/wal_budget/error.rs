//! Errors about a slot that exceeds its WAL budget.

use bytesize::ByteSize;

use crate::postgres::catalog::{CatalogError, SlotInUse};
use crate::postgres::table::TableName;

/// The slot was dropped, must be dropped or can't be dropped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalBudgetError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    SlotInUse(#[from] SlotInUse),
    /// The slot retains more WAL than allowed and must be dropped.
    #[error(
        "slot {slot:?} retains more WAL than wal_budget.max ({max}), but has not been dropped yet"
    )]
    OverBudget {
        slot: String,
        /// `wal_budget.max`
        max: ByteSize,
    },
    #[error(transparent)]
    SlotDropped(#[from] Box<SlotDropped>),
    /// The settings allow the slot to be dropped, but the table does not have the primary key that
    /// is required to send its rows again.
    #[error(
        "table {table} has no primary key, but wal_budget.on_max is \"drop-slot\": a primary key is required to send the events of \
         a dropped slot again from the table. Add a primary key, or set wal_budget.on_max = \"hold\""
    )]
    NoKey { table: TableName },
}

/// A slot that was dropped.
#[derive(Debug, thiserror::Error)]
#[error(
    "slot {slot:?} was dropped{why}. These events are in {outbox} but not in Kafka: {what}, and all events that are committed \
     before a new slot exists. Create a slot: {init}; {adopt}start walpost again; then send the missing events: {replay}"
)]
pub(crate) struct SlotDropped {
    pub(super) slot: String,
    /// The command that creates the slot.
    pub(super) init: String,
    /// The command that sends the events again.
    pub(super) replay: String,
    /// The reason why the slot was dropped, if it was dropped just now; otherwise empty.
    pub(super) why: String,
    /// The events that were not delivered.
    pub(super) what: String,
    /// The outbox that contains the events.
    pub(super) outbox: String,
    /// An additional command that exactly-once delivery requires, or an empty string.
    pub(super) adopt: String,
}
