//! Counts of dead letters.

use serde::{Deserialize, Serialize};

/// The number of dead letters for each reason. An event that is delivered twice is counted twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetterCounts {
    /// Events whose records were too large.
    pub oversize: u64,
    /// Events for which no record could be created.
    pub unroutable: u64,
    /// Logical decoding messages that have the outbox's prefix but are not valid events.
    #[serde(default)]
    pub malformed: u64,
}

impl DeadLetterCounts {
    /// Returns the number of dead letters for all reasons.
    #[must_use]
    pub fn total(self) -> u64 {
        self.oversize + self.unroutable + self.malformed
    }
}

/// The most recently delivered dead letter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastDeadLetter {
    /// Delivery time, in seconds since 1970.
    pub at: f64,
    /// The position of the event, or a different identifier if the event has no position.
    pub position: String,
    /// The dead-letter topic.
    pub topic: String,
    /// The reason why the event could not be delivered.
    pub reason: String,
}
