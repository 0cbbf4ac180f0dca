//! Exactly-once delivery: skips events that are already in Kafka, and commits records together with
//! a checkpoint in one Kafka transaction.

pub(crate) mod adaptive_window;
pub(crate) mod committer;
pub(crate) mod duplicate_filter;
pub(crate) mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod schedule;
