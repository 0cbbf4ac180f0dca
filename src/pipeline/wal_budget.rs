//! How much of the log the slot may keep, and what follows from it.

pub(crate) mod budget;
pub(crate) mod slot_monitor;
