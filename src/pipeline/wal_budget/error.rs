//! Errors about a slot that exceeds its WAL budget.

use bytesize::ByteSize;

use crate::postgres::catalog::{CatalogError, SlotInUse};
use crate::postgres::table::TableName;

/// The slot was dropped, must be dropped, or can't be dropped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalBudgetError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    SlotInUse(#[from] SlotInUse),
    /// The slot retains more WAL than allowed and must be dropped.
    #[error("slot {slot:?} retains more than wal_budget.max, {max}, and could not be dropped yet")]
    OverBudget {
        slot: String,
        /// `wal_budget.max`
        max: ByteSize,
    },
    #[error(transparent)]
    SlotDropped(#[from] Box<SlotDropped>),
    /// The settings allow the slot to be dropped, but the rows could not be sent again.
    #[error(
        "table {table} has no primary key, and wal_budget.on_max is \"drop-slot\": the events of a dropped slot are sent again from the table, \
         which requires one. Add it, or set wal_budget.on_max = \"hold\""
    )]
    NoKey { table: TableName },
}

/// A slot that was dropped.
#[derive(Debug, thiserror::Error)]
#[error(
    "slot {slot:?} was dropped{why}. Still in {outbox} only: {what}, and what is committed until there is a new slot. Create \
     it: {init}; {adopt}start walpost again; then send what is missing: {replay}"
)]
pub(crate) struct SlotDropped {
    pub(super) slot: String,
    /// The command that creates the slot.
    pub(super) init: String,
    /// The command that sends the events again.
    pub(super) replay: String,
    /// Why the slot was dropped, if that just happened; otherwise empty.
    pub(super) why: String,
    /// The events that were not delivered.
    pub(super) what: String,
    /// The outbox that contains the events.
    pub(super) outbox: String,
    /// The command that exactly-once delivery requires in addition, or an empty string.
    pub(super) adopt: String,
}
