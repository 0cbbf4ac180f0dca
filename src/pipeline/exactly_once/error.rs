//! Errors that prevent exactly-once delivery from resuming after the last event in Kafka.

use crate::delivery::checkpoint::HistoryError;

/// An error that prevents exactly-once delivery from starting.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExactlyOnceError {
    /// Without a checkpoint, Walpost can't determine which events are in Kafka.
    #[error(
        "pipeline {pipeline:?} has no checkpoint in topic {topic:?}, so Walpost can't tell which events of slot {slot:?} are \
         already in Kafka. If this is the first run, or if these events may be delivered again, run: {adopt}{moved}"
    )]
    NoCheckpoint {
        /// The command that accepts the slot's current position.
        adopt: String,
        pipeline: String,
        /// The checkpoint topic.
        topic: String,
        slot: String,
        /// A sentence about the events that may be missing because something else has moved the
        /// slot, or an empty string.
        moved: String,
    },
    #[error(transparent)]
    History(#[from] HistoryConflict),
    /// The WAL does not appear to continue from the checkpoint, but another instance may have used
    /// the slot after the checkpoint was read.
    #[error(
        "the checkpoint was read before this instance acquired the slot, and will be read again: {0}"
    )]
    Outrun(HistoryError),
}

impl From<HistoryError> for ExactlyOnceError {
    fn from(error: HistoryError) -> Self {
        Self::History(error.into())
    }
}

/// The server's WAL has diverged from the WAL whose events are in Kafka. Detected during startup or
/// later in the stream.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}. Since Walpost connected, nothing was delivered or confirmed. Determine which events are missing from Kafka, send them \
     again, and then accept the current position of the slot"
)]
pub struct HistoryConflict(#[from] HistoryError);
