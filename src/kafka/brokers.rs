//! Reconnects a producer after librdkafka has removed all brokers from its list.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::producer::{BaseProducer, Producer};
use tracing::debug;

use super::context::Context;
use super::native;

/// How long librdkafka's list of brokers may be empty before `bootstrap.servers` is added again.
const NO_BROKER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum delay before `bootstrap.servers` is added again. The delay increases each time, because
/// librdkafka never discards a list that was added.
const READD_DELAY_MAX: Duration = Duration::from_secs(600);

/// Adds `bootstrap.servers` to the producer again if librdkafka has no brokers left.
///
/// A broker that is shutting down can return metadata without any brokers. librdkafka (2.12.1) then
/// closes all its connections and reconnects using `bootstrap.servers`. However, if the last
/// connection closes while that response is still being processed, librdkafka cancels the
/// reconnection when it finishes processing, and never retries:
/// <https://github.com/confluentinc/librdkafka/issues/5301>.
pub(super) struct Brokers {
    bootstrap: String,
    loss: Mutex<Loss>,
}

/// The time at which the list of brokers became empty or `bootstrap.servers` was last added, and
/// the delay until `bootstrap.servers` is added again.
struct Loss {
    since: Instant,
    delay: Duration,
}

impl Brokers {
    pub(super) fn new(bootstrap: String) -> Self {
        Self {
            bootstrap,
            loss: Mutex::new(Loss::new(Instant::now())),
        }
    }

    /// Adds `bootstrap.servers` again if there are no brokers and the delay has elapsed. Must be
    /// called every few seconds.
    pub(super) fn readd_if_due(&self, producer: &BaseProducer<Context>) {
        let is_known = native::knows_brokers(producer);
        let mut loss = self.loss.lock().unwrap_or_else(PoisonError::into_inner);
        if loss.is_due(is_known, Instant::now()) {
            let pipeline = producer.context().pipeline();
            producer
                .context()
                .record_unreachable("librdkafka has no brokers");
            debug!(
                pipeline,
                "librdkafka has no brokers; adding bootstrap.servers again"
            );
            native::add_brokers(producer, &self.bootstrap);
        }
    }
}

impl Loss {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            delay: NO_BROKER_TIMEOUT,
        }
    }

    fn is_due(&mut self, is_known: bool, now: Instant) -> bool {
        if is_known {
            *self = Self::new(now);
        }
        let is_due = now.duration_since(self.since) >= self.delay;
        if is_due {
            self.since = now;
            self.delay = READD_DELAY_MAX.min(self.delay * 2);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_bootstrap_brokers_again_with_backoff_while_no_brokers_are_known() {
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
