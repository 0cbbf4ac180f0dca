//! The brokers that librdkafka knows.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::producer::{BaseProducer, Producer};
use tracing::debug;

use super::context::Context;
use super::native;

/// How long librdkafka may know no broker until it is given those of the settings.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long at most until it is given them again: librdkafka keeps each list that it is given.
const LONGEST: Duration = Duration::from_secs(600);

/// Gives librdkafka the brokers of the settings again where it knows none any more.
///
/// Brokers that are stopping can answer that there are none. librdkafka (2.12.1) ends all its connections then, and begins
/// anew with `bootstrap.servers`; but where the last connection ends while it still reads that answer, it calls this off
/// as soon as it has read it, and never connects again: <https://github.com/confluentinc/librdkafka/issues/5301>.
pub(super) struct Brokers {
    bootstrap: String,
    loss: Mutex<Loss>,
}

/// Since when no broker is known, or was last given.
struct Loss {
    since: Instant,
    patience: Duration,
}

impl Brokers {
    pub(super) fn new(bootstrap: String) -> Self {
        Self {
            bootstrap,
            loss: Mutex::new(Loss::new(Instant::now())),
        }
    }

    /// To be called every few seconds.
    pub(super) fn keep(&self, producer: &BaseProducer<Context>) {
        let is_known = native::knows_brokers(producer);
        let mut loss = self.loss.lock().unwrap_or_else(PoisonError::into_inner);
        if loss.is_due(is_known, Instant::now()) {
            let pipeline = producer.context().pipeline();
            producer.context().unreachable("librdkafka knows no broker");
            debug!(pipeline, "librdkafka is given bootstrap.servers again");
            native::add_brokers(producer, &self.bootstrap);
        }
    }
}

impl Loss {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            patience: PATIENCE,
        }
    }

    fn is_due(&mut self, is_known: bool, now: Instant) -> bool {
        if is_known {
            *self = Self::new(now);
        }
        let is_due = now.duration_since(self.since) >= self.patience;
        if is_due {
            self.since = now;
            self.patience = LONGEST.min(self.patience * 2);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brokers_are_given_when_none_is_known_for_long_and_then_less_and_less_often() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut loss = Loss::new(start);
        let due = |loss: &mut Loss, from: u64, to: u64| -> Vec<u64> {
            (from..to)
                .filter(|second| loss.is_due(false, at(*second)))
                .collect()
        };
        assert_eq!(due(&mut loss, 0, 100), [5, 15, 35, 75]);
        assert!(!loss.is_due(true, at(100)));
        assert_eq!(due(&mut loss, 100, 130), [105, 115]);
        let times = due(&mut loss, 130, 86_400);
        assert!(times.len() < 150, "{}", times.len());
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] <= 600));
    }
}
