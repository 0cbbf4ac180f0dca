//! Rate limiting for messages about an outage: one line when it starts, one per interval while it
//! lasts, and one when it ends.
//!
//! This module performs no I/O, and takes the current time as an argument.

use std::time::{Duration, Instant};

const REMINDER_INTERVAL: Duration = Duration::from_secs(60);

/// Tracks whether an outage is in progress, and when it was last logged.
#[derive(Debug)]
pub(crate) struct Outage {
    state: Option<OngoingOutage>,
    reminder: Duration,
    is_silent: bool,
}

impl Default for Outage {
    fn default() -> Self {
        Self::reminding(REMINDER_INTERVAL)
    }
}

#[derive(Debug)]
struct OngoingOutage {
    began: Instant,
    logged_at: Instant,
    failures: u64,
}

/// The message to log for a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutageMessage {
    /// The outage started with this failure.
    Started,
    /// The outage is ongoing. The fields are its duration so far and the number of failures.
    Ongoing(Duration, u64),
    /// No message is logged, because the previous message was logged recently.
    Suppressed,
}

impl Outage {
    /// Creates a tracker that repeats the message about an ongoing outage once per `reminder`
    /// interval.
    #[must_use]
    pub(crate) fn reminding(reminder: Duration) -> Self {
        Self {
            state: None,
            reminder,
            is_silent: false,
        }
    }

    /// Creates a tracker that suppresses all messages, for callers that report failures in a
    /// different way.
    #[must_use]
    pub(crate) fn silent() -> Self {
        Self {
            is_silent: true,
            ..Self::default()
        }
    }

    /// Records a failure, and returns which message to log.
    pub(crate) fn failed(&mut self, now: Instant) -> OutageMessage {
        if self.is_silent {
            return OutageMessage::Suppressed;
        }
        let Some(since) = &mut self.state else {
            self.state = Some(OngoingOutage {
                began: now,
                logged_at: now,
                failures: 1,
            });
            return OutageMessage::Started;
        };
        since.failures += 1;
        if now.duration_since(since.logged_at) < self.reminder {
            return OutageMessage::Suppressed;
        }
        since.logged_at = now;
        OutageMessage::Ongoing(now.duration_since(since.began), since.failures)
    }

    /// Ends the outage. Returns how long the outage lasted, or `None` if no outage was in progress.
    pub(crate) fn end(&mut self, now: Instant) -> Option<Duration> {
        self.state
            .take()
            .map(|since| now.duration_since(since.began))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_an_outage_when_it_starts_and_once_per_minute() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut outage = Outage::default();
        assert_eq!(outage.end(at(0)), None);
        let messages: Vec<_> = (0..150)
            .map(|second| (second, outage.failed(at(second))))
            .collect();
        let logged: Vec<_> = messages
            .into_iter()
            .filter(|(_, message)| *message != OutageMessage::Suppressed)
            .collect();
        assert_eq!(
            logged,
            [
                (0, OutageMessage::Started),
                (60, OutageMessage::Ongoing(Duration::from_secs(60), 61)),
                (120, OutageMessage::Ongoing(Duration::from_secs(120), 121)),
            ]
        );
        assert_eq!(outage.end(at(150)), Some(Duration::from_secs(150)));
        assert_eq!(outage.failed(at(151)), OutageMessage::Started);
    }
}
