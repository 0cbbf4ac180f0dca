//! How much WAL the slot may retain, and the reaction when it retains more.

pub(crate) mod budget;
pub(crate) mod error;
pub(crate) mod slot_monitor;
