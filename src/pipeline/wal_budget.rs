//! How much of the log the slot may keep, and what follows from it.

pub mod budget;
pub mod slot_monitor;
