//! What exactly-once takes beside the stream: what is in Kafka already is left out, and what is produced is
//! committed together with a checkpoint.

pub(crate) mod adaptive_window;
pub(crate) mod committer;
pub(crate) mod duplicate_filter;
pub(crate) mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod schedule;
