//! Tracks topics that are named in rows but can't be used. Events for these topics become dead
//! letters.
//!
//! Any role that can insert rows can choose their topics, and each row can name a different topic.
//! The number of topic names is therefore unlimited. For this reason, the size and the lifetime of
//! the stored state are limited, as is the time that the pipeline spends waiting for unusable
//! topics. This module does no I/O, and the current time is passed as an argument.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a response is kept: at least this long, and at most twice as long.
const RESPONSE_LIFETIME: Duration = Duration::from_secs(5);
/// Maximum number of responses kept in each of the two maps `recent` and `earlier`.
const RESPONSES_MAX: usize = 5000;
/// How long brokers must report that a topic is missing before Walpost treats it as missing. Some
/// brokers may not have received the metadata of a topic that was just created.
const MISSING_AFTER: Duration = Duration::from_secs(2);
/// Replaces [`MISSING_AFTER`] when the wait budget is used up. This time is long enough for a
/// second response to arrive.
const MISSING_AFTER_MIN: Duration = Duration::from_millis(20);
/// Maximum wait budget: the time that can be spent waiting for topics that turn out to be missing.
/// The budget grows by a tenth of the elapsed time, up to this maximum.
const WAIT_BUDGET_MAX: Duration = Duration::from_secs(10);
const WAIT_BUDGET_TIME_PARTS: u32 = 10;
/// How long to wait before requesting automatic creation again, if brokers did not create a missing
/// topic.
const AUTO_CREATION_RETRY_DELAY: Duration = Duration::from_secs(60);

/// The reason why a topic can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UnusableReason {
    Missing,
    /// The brokers deny access to the topic, or reject its name.
    Denied(String),
    /// The brokers refuse to create the topic.
    NotCreated(String),
    /// The principal is not allowed to create the topic.
    CreationDenied(String),
}

/// Brokers also return an authorization error for a missing topic if the principal is not allowed
/// to describe the topic.
pub(super) const NOT_AUTHORIZED: &str = "the principal is not authorized to use the topic";
pub(super) const NAME_NOT_ACCEPTED: &str = "the broker does not accept the topic name";

/// The brokers' responses about topics that can't be used.
#[derive(Debug)]
pub(super) struct UnusableTopics {
    /// The topic for dead letters. It is never treated as unusable, because dead letters could not
    /// be delivered without it.
    dead_letter_topic: String,
    state: Mutex<UnusableState>,
}

#[derive(Debug)]
struct UnusableState {
    recent: HashMap<Box<str>, UnusableReason>,
    earlier: HashMap<Box<str>, UnusableReason>,
    /// When `recent` was last cleared.
    recent_since: Instant,
    budget: WaitBudget,
    auto_creation: AutoCreation,
}

/// Whether brokers create a topic when its metadata is requested (`auto.create.topics.enable`).
#[derive(Debug)]
enum AutoCreation {
    Unknown,
    Works,
    FailedAt(Instant),
}

impl UnusableTopics {
    /// Creates an empty set; `dead_letter_topic` is never added.
    pub(super) fn new(dead_letter_topic: &str) -> Self {
        let now = Instant::now();
        Self {
            dead_letter_topic: dead_letter_topic.to_owned(),
            state: Mutex::new(UnusableState {
                recent: HashMap::new(),
                earlier: HashMap::new(),
                recent_since: now,
                budget: WaitBudget {
                    available: WAIT_BUDGET_MAX,
                    at: now,
                },
                auto_creation: AutoCreation::Unknown,
            }),
        }
    }

    /// Returns whether the topic can be treated as unusable, which is the case for every topic
    /// except the dead letter topic.
    pub(super) fn applies_to(&self, topic: &str) -> bool {
        topic != self.dead_letter_topic
    }

    /// Returns why the topic can't be used, or `None` if no recent response has reported a problem
    /// with it.
    pub(super) fn reason(&self, topic: &str, now: Instant) -> Option<UnusableReason> {
        let mut state = self.state();
        state.expire(now);
        let found = state.recent.get(topic);
        found.or_else(|| state.earlier.get(topic)).cloned()
    }

    pub(super) fn insert(&self, topic: &str, reason: UnusableReason, now: Instant) {
        if !self.applies_to(topic) {
            return;
        }
        let mut state = self.state();
        state.expire(now);
        if state.recent.len() >= RESPONSES_MAX {
            state.earlier = std::mem::take(&mut state.recent);
            state.recent_since = now;
        }
        state.recent.insert(topic.into(), reason);
    }

    /// Returns how long the brokers must report that a topic is missing before Walpost treats it as
    /// missing.
    pub(super) fn certain_after(&self, now: Instant) -> Duration {
        self.state().budget.grant(now)
    }

    /// Subtracts the time spent waiting for an unusable topic from the wait budget.
    pub(super) fn record_wait(&self, time: Duration) {
        self.state().budget.spend(time);
    }

    /// Returns whether to request the metadata of a missing topic, so that brokers with automatic
    /// topic creation create the topic.
    pub(super) fn tries_auto_creation(&self, now: Instant) -> bool {
        match self.state().auto_creation {
            AutoCreation::Unknown | AutoCreation::Works => true,
            AutoCreation::FailedAt(at) => now.duration_since(at) >= AUTO_CREATION_RETRY_DELAY,
        }
    }

    /// Records whether a request for automatic creation has created the topic.
    pub(super) fn record_auto_creation(&self, is_created: bool, now: Instant) {
        let state = &mut self.state().auto_creation;
        match (is_created, &state) {
            (true, _) => *state = AutoCreation::Works,
            // Automatic creation works for other topics, so the brokers probably rejected this
            // topic's name.
            (false, AutoCreation::Works) => {}
            (false, _) => *state = AutoCreation::FailedAt(now),
        }
    }

    fn state(&self) -> MutexGuard<'_, UnusableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnusableState {
    fn expire(&mut self, now: Instant) {
        let age = now.duration_since(self.recent_since);
        if age < RESPONSE_LIFETIME {
            return;
        }
        self.earlier = std::mem::take(&mut self.recent);
        if age >= RESPONSE_LIFETIME * 2 {
            self.earlier = HashMap::new();
        }
        self.recent_since = now;
    }
}

/// The time that can still be spent waiting for topics that turn out to be missing.
#[derive(Debug)]
struct WaitBudget {
    available: Duration,
    at: Instant,
}

impl WaitBudget {
    fn grant(&mut self, now: Instant) -> Duration {
        let passed = now.duration_since(self.at);
        self.at = now;
        self.available = (self.available + passed / WAIT_BUDGET_TIME_PARTS).min(WAIT_BUDGET_MAX);
        self.available.clamp(MISSING_AFTER_MIN, MISSING_AFTER)
    }

    fn spend(&mut self, time: Duration) {
        self.available = self.available.saturating_sub(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_topic_errors_expire_after_at_most_twice_the_cache_lifetime() {
        let topics = UnusableTopics::new("dead");
        let now = Instant::now();
        topics.insert("a", UnusableReason::Missing, now);
        let known = |after| topics.reason("a", now + after).is_some();
        assert!(known(RESPONSE_LIFETIME - Duration::from_millis(1)));
        assert!(known(RESPONSE_LIFETIME + Duration::from_millis(1)));
        assert!(!known(RESPONSE_LIFETIME * 2 + Duration::from_millis(2)));

        topics.insert("a", UnusableReason::Missing, now + RESPONSE_LIFETIME * 10);
        let later = now + RESPONSE_LIFETIME * 12 + Duration::from_millis(1);
        assert_eq!(topics.reason("a", later), None, "the response has expired");
    }

    #[test]
    fn limits_the_number_of_cached_topics_and_keeps_the_most_recent() {
        let topics = UnusableTopics::new("dead");
        let now = Instant::now();
        for number in 0..RESPONSES_MAX * 5 {
            let name = format!("t{number}");
            topics.insert(&name, UnusableReason::Missing, now);
            assert_eq!(topics.reason(&name, now), Some(UnusableReason::Missing));
            let state = topics.state();
            assert!(state.recent.len() + state.earlier.len() <= 2 * RESPONSES_MAX);
        }
    }

    #[test]
    fn never_treats_the_dead_letter_topic_as_unusable() {
        let topics = UnusableTopics::new("dead");
        let now = Instant::now();
        topics.insert("dead", UnusableReason::Missing, now);
        assert_eq!(topics.reason("dead", now), None);
        assert!(!topics.applies_to("dead"));
    }

    #[test]
    fn spends_at_most_a_tenth_of_the_time_waiting_for_missing_topics() {
        let topics = UnusableTopics::new("dead");
        let started_at = Instant::now();
        assert_eq!(topics.certain_after(started_at), MISSING_AFTER);
        let (mut now, mut waited) = (started_at, Duration::ZERO);
        while now < started_at + Duration::from_secs(1000) {
            let wait = topics.certain_after(now);
            topics.record_wait(wait);
            waited += wait;
            // After each wait, the next row names a different topic.
            now += wait + Duration::from_millis(300);
        }
        assert!(waited < Duration::from_secs(1000 / 10 + 80), "{waited:?}");
        now += Duration::from_secs(1000);
        assert_eq!(topics.certain_after(now), MISSING_AFTER);
    }

    #[test]
    fn retries_automatic_topic_creation_once_a_minute_after_it_failed() {
        let topics = UnusableTopics::new("dead");
        let now = Instant::now();
        assert!(topics.tries_auto_creation(now));
        topics.record_auto_creation(false, now);
        assert!(!topics.tries_auto_creation(now));
        assert!(topics.tries_auto_creation(now + AUTO_CREATION_RETRY_DELAY));
        topics.record_auto_creation(true, now);
        topics.record_auto_creation(false, now);
        assert!(
            topics.tries_auto_creation(now),
            "a rejected topic name does not mean that automatic topic creation is disabled"
        );
    }
}
