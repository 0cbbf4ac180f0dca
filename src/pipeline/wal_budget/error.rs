//! What the WAL budget of a slot can end with.

use bytesize::ByteSize;

use crate::postgres::catalog::{CatalogError, SlotInUse};
use crate::postgres::table::TableName;

/// The slot was dropped, or is to be, or it can't be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalBudgetError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    SlotInUse(#[from] SlotInUse),
    /// The slot retains more WAL than it may, and is to be dropped.
    #[error("slot {slot:?} retains more than wal_budget.max, {max}, and could not be dropped yet")]
    OverBudget {
        slot: String,
        /// `wal_budget.max`
        max: ByteSize,
    },
    /// The slot was dropped.
    #[error(transparent)]
    SlotDropped(#[from] Box<SlotDropped>),
    /// The slot may be dropped, and the rows could not be sent again.
    #[error(
        "table {table} has no primary key, and wal_budget.on_max is \"drop-slot\": the events of a dropped slot are sent again from the table, \
         which requires one. Add it, or set wal_budget.on_max = \"hold\""
    )]
    NoKey { table: TableName },
}

/// A slot was dropped.
#[derive(Debug, thiserror::Error)]
#[error(
    "slot {slot:?} was dropped{why}. Still in {outbox} only: {what}, and what is committed until there is a new slot. Create \
     it: {init}; {adopt}start walpost again; then send what is missing: {replay}"
)]
pub(crate) struct SlotDropped {
    pub(super) slot: String,
    /// The command that creates it.
    pub(super) init: String,
    /// The command that sends the events again.
    pub(super) replay: String,
    /// For what reason, if it was just now.
    pub(super) why: String,
    /// What went with it.
    pub(super) what: String,
    /// Where the events are.
    pub(super) outbox: String,
    /// What exactly-once needs beside a new slot.
    pub(super) adopt: String,
}
