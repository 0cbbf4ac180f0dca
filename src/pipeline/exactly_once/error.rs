//! Errors that prevent exactly-once delivery from resuming after what is in Kafka.

use crate::delivery::checkpoint::HistoryError;

/// An error when starting with exactly-once delivery.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExactlyOnceError {
    /// It is unknown which events are in Kafka.
    #[error(
        "pipeline {pipeline:?} has no checkpoint in topic {topic:?}, so what of slot {slot:?} is in Kafka is not known. If \
         nothing is (a first start), or if it may be delivered again: {adopt}{moved}"
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
    /// The WAL may not continue the checkpoint, or another instance had the slot after the
    /// checkpoint was read.
    #[error("the checkpoint was read before this instance had the slot, and is read again: {0}")]
    Outrun(HistoryError),
}

impl From<HistoryError> for ExactlyOnceError {
    fn from(error: HistoryError) -> Self {
        Self::History(error.into())
    }
}

/// The WAL does not continue what is in Kafka. Detected at a start, or later in the stream.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}. Since Walpost connected, nothing was delivered or confirmed. Find out which events Kafka has, send again what it lacks, \
     and accept the slot as it is now"
)]
pub struct HistoryConflict(#[from] HistoryError);
