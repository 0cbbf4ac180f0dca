//! How much WAL the slot may retain, and what follows from it.

pub(crate) mod budget;
pub(crate) mod error;
pub(crate) mod slot_monitor;
