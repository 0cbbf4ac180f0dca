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
