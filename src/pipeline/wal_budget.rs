//! How much WAL the slot may retain, and what follows from it.

pub mod budget;
pub mod slot_monitor;
