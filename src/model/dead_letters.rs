//! Counts of dead letters.

use serde::{Deserialize, Serialize};

/// How many dead letters there were, by what kept the events from being delivered. What comes again
/// is counted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetterCounts {
    /// Their records were too large.
    pub oversize: u64,
    /// No record could be made of them.
    pub unroutable: u64,
    /// They were messages with the outbox's prefix, and no events.
    #[serde(default)]
    pub malformed: u64,
}

impl DeadLetterCounts {
    /// All of them.
    #[must_use]
    pub fn total(self) -> u64 {
        self.oversize + self.unroutable + self.malformed
    }
}

/// The dead letter that was delivered last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastDeadLetter {
    /// When, in seconds since 1970.
    pub at: f64,
    /// The position of the event, or what else tells it from others.
    pub position: String,
    /// The topic for dead letters.
    pub topic: String,
    /// Why the event could not be delivered.
    pub reason: String,
}
