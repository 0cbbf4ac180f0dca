//! Errors about a slot that exceeds its WAL budget.

use bytesize::ByteSize;

use crate::postgres::catalog::{CatalogError, SlotInUse};
use crate::postgres::table::TableName;

/// An error about a slot and its WAL budget: the slot was dropped, must be dropped, or can't be
/// dropped safely.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalBudgetError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    SlotInUse(#[from] SlotInUse),
    /// The slot retains more WAL than `wal_budget.max` and must be dropped.
    #[error(
        "slot {slot:?} retains more WAL than wal_budget.max ({max}), but has not been dropped yet"
    )]
    OverBudget {
        slot: String,
        /// The value of `wal_budget.max`.
        max: ByteSize,
    },
    #[error(transparent)]
    SlotDropped(#[from] Box<SlotDropped>),
    /// The settings allow the slot to be dropped, but the table has no primary key, which is
    /// required to resend its rows.
    #[error(
        "table {table} has no primary key, but wal_budget.on_max is \"drop-slot\": a primary key is required to send the events of \
         a dropped slot again from the table. Add a primary key, or set wal_budget.on_max = \"hold\""
    )]
    NoKey { table: TableName },
}

/// A slot that was dropped.
#[derive(Debug, thiserror::Error)]
#[error(
    "slot {slot:?} was dropped. {why}These events are in {outbox} but not in Kafka: {what}, and all events that are committed \
     before a new slot exists. Create a slot: {init}; {adopt}start walpost again; then send the missing events: {replay}"
)]
pub(crate) struct SlotDropped {
    pub(super) slot: String,
    /// The command that creates a new slot.
    pub(super) init: String,
    /// The command that resends the missing events.
    pub(super) replay: String,
    /// The reason why the slot was dropped, as a sentence that ends with a period and a space.
    /// Empty unless Walpost has just dropped the slot.
    pub(super) why: String,
    /// A description of the events that were not delivered.
    pub(super) what: String,
    /// The outbox that contains the missing events.
    pub(super) outbox: String,
    /// An additional step that the operator must take if the pipeline uses exactly-once delivery;
    /// otherwise empty.
    pub(super) adopt: String,
}
