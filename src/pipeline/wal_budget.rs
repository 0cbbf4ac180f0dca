//! Limits how much WAL the slot may retain.

pub(crate) mod budget;
pub(crate) mod error;
pub(crate) mod slot_monitor;
