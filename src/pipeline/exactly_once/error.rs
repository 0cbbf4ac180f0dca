//! Errors that prevent exactly-once delivery from continuing after the last event in Kafka.

use crate::delivery::checkpoint::HistoryError;

/// An error that prevents exactly-once delivery from starting.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExactlyOnceError {
    /// The pipeline has no checkpoint, so Walpost can't determine which events are already in
    /// Kafka.
    #[error(
        "pipeline {pipeline:?} has no checkpoint in topic {topic:?}, so Walpost can't tell which events of slot {slot:?} are \
         already in Kafka. If this is the first run, or if these events may be delivered again, run: {adopt}{moved}"
    )]
    NoCheckpoint {
        /// The command that creates a checkpoint at the slot's current position.
        adopt: String,
        pipeline: String,
        /// The checkpoint topic.
        topic: String,
        slot: String,
        /// A sentence about events that may be missing because something other than Walpost moved
        /// the slot. Empty if the slot was not moved.
        moved: String,
    },
    #[error(transparent)]
    History(#[from] HistoryConflict),
    /// The WAL does not appear to continue from the checkpoint. However, another instance may have
    /// used the slot after the checkpoint was read, so the checkpoint is read again.
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

/// The server's WAL has diverged from the WAL whose events are in Kafka. This can be detected
/// during startup or while streaming.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}. Since Walpost connected, nothing has been delivered or confirmed. Determine which events are missing from Kafka, send \
     them again, and then accept the current position of the slot"
)]
pub struct HistoryConflict(#[from] HistoryError);
