//! Values that every room speaks of, without logic and without a connection to anything. Imports nothing of ours.

pub mod dead_letters;
pub mod dropped_slot;
pub mod exit;
pub mod lifecycle;
pub mod lsn;
pub mod outage;
pub mod rounded;
pub mod statistics;
pub mod time;
pub mod vitals;
pub mod window;
