//! An outage is a line when it begins, one a minute or more seldom, and one when it ends.
//!
//! Pure: time comes in as an argument.

use std::time::{Duration, Instant};

const REMINDER: Duration = Duration::from_secs(60);

/// Whether something is out of order, and what of it has been said.
#[derive(Debug)]
pub(crate) struct Outage {
    state: Option<Since>,
    reminder: Duration,
}

impl Default for Outage {
    fn default() -> Self {
        Self::reminding(REMINDER)
    }
}

#[derive(Debug)]
struct Since {
    began: Instant,
    said: Instant,
    failures: u64,
}

/// What is to be said of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    /// It is the first.
    Begins,
    /// It has lasted this long, with this many failures.
    Lasts(Duration, u64),
    /// Nothing: too little time has passed.
    Nothing,
}

impl Outage {
    /// One that is told of again so often.
    #[must_use]
    pub(crate) fn reminding(reminder: Duration) -> Self {
        Self {
            state: None,
            reminder,
        }
    }

    /// Something failed.
    pub(crate) fn failed(&mut self, now: Instant) -> Say {
        let Some(since) = &mut self.state else {
            self.state = Some(Since {
                began: now,
                said: now,
                failures: 1,
            });
            return Say::Begins;
        };
        since.failures += 1;
        if now.duration_since(since.said) < self.reminder {
            return Say::Nothing;
        }
        since.said = now;
        Say::Lasts(now.duration_since(since.began), since.failures)
    }

    /// Things are in order: how long they weren't.
    pub(crate) fn ended(&mut self, now: Instant) -> Option<Duration> {
        self.state
            .take()
            .map(|since| now.duration_since(since.began))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_said_when_it_begins_once_a_minute_and_when_it_ends() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut outage = Outage::default();
        assert_eq!(outage.ended(at(0)), None);
        let said: Vec<_> = (0..150)
            .map(|second| (second, outage.failed(at(second))))
            .collect();
        let spoken: Vec<_> = said
            .into_iter()
            .filter(|(_, say)| *say != Say::Nothing)
            .collect();
        assert_eq!(
            spoken,
            [
                (0, Say::Begins),
                (60, Say::Lasts(Duration::from_secs(60), 61)),
                (120, Say::Lasts(Duration::from_secs(120), 121)),
            ]
        );
        assert_eq!(outage.ended(at(150)), Some(Duration::from_secs(150)));
        assert_eq!(outage.failed(at(151)), Say::Begins);
    }
}
