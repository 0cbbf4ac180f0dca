//! Topics that rows name but that can't be used, so that their events become dead letters.
//!
//! Anyone who can insert a row chooses its topic, so the number of names is unbounded, and each
//! name may be new. Therefore, the stored state is bounded in size and lifetime, and so is the time
//! that the pipeline spends on waiting for such topics. This module does no I/O, and the current
//! time is passed as an argument.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A response is used for at least this long, and for at most twice as long.
const RESPONSE_LIFETIME: Duration = Duration::from_secs(5);
/// At most twice as many responses are stored.
const RESPONSES_MAX: usize = 5000;
/// How long brokers must report that a topic is missing before it counts as missing. A topic that
/// was just created may be unknown to some brokers for a moment.
const MISSING_AFTER: Duration = Duration::from_secs(2);
/// The same, if the wait budget is used up. Long enough for a second response.
const MISSING_AFTER_MIN: Duration = Duration::from_millis(20);
/// Maximum time available for waiting for topics that turn out to be missing. A tenth of the
/// elapsed time is added to it.
const WAIT_BUDGET_MAX: Duration = Duration::from_secs(10);
const WAIT_BUDGET_TIME_PARTS: u32 = 10;
/// How long to wait before trying again, if brokers did not create a missing topic on request.
const AUTO_CREATION_RETRY_DELAY: Duration = Duration::from_secs(60);

/// Why a topic can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UnusableReason {
    Missing,
    /// The brokers deny access to the topic, or reject its name.
    Denied(String),
    /// The brokers refuse to create the topic.
    NotCreated(String),
    /// The principal may not create the topic.
    CreationDenied(String),
}

/// Brokers also return this error for a missing topic if the principal may not describe it.
pub(super) const NOT_AUTHORIZED: &str = "the principal is not authorized to use it";
pub(super) const NAME_NOT_ACCEPTED: &str = "the broker does not accept the name";

/// The brokers' responses about topics that can't be used.
#[derive(Debug)]
pub(super) struct UnusableTopics {
    /// Never counts as unusable: without this topic, nothing can be delivered.
    dead_letter_topic: String,
    state: Mutex<UnusableState>,
}

#[derive(Debug)]
struct UnusableState {
    recent: HashMap<Box<str>, UnusableReason>,
    earlier: HashMap<Box<str>, UnusableReason>,
    /// When `recent` was last empty.
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
    /// Creates an empty set. `dead_letter_topic` is never added to it.
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

    /// Returns whether events for this topic may become dead letters because of the topic.
    pub(super) fn applies_to(&self, topic: &str) -> bool {
        topic != self.dead_letter_topic
    }

    /// Returns why the topic can't be used, if this was found out recently.
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

    /// Returns how long the brokers must report that a topic is missing before it counts as
    /// missing.
    pub(super) fn certain_after(&self, now: Instant) -> Duration {
        self.state().budget.grant(now)
    }

    /// Records the time spent on waiting for a topic that can't be used.
    pub(super) fn waited(&self, time: Duration) {
        self.state().budget.spend(time);
    }

    /// Returns whether to send the brokers a request that makes them create a missing topic.
    pub(super) fn tries_auto_creation(&self, now: Instant) -> bool {
        match self.state().auto_creation {
            AutoCreation::Unknown | AutoCreation::Works => true,
            AutoCreation::FailedAt(at) => now.duration_since(at) >= AUTO_CREATION_RETRY_DELAY,
        }
    }

    /// Records whether such a request has created the topic.
    pub(super) fn tried_auto_creation(&self, is_created: bool, now: Instant) {
        let state = &mut self.state().auto_creation;
        match (is_created, &state) {
            (true, _) => *state = AutoCreation::Works,
            // Automatic creation works in general, so the topic's name must be the reason.
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

/// The time available for waiting for topics that turn out to be missing.
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
    fn answer_expires_within_twice_its_lifetime() {
        let topics = UnusableTopics::new("dead");
        let now = Instant::now();
        topics.insert("a", UnusableReason::Missing, now);
        let known = |after| topics.reason("a", now + after).is_some();
        assert!(known(RESPONSE_LIFETIME - Duration::from_millis(1)));
        assert!(known(RESPONSE_LIFETIME + Duration::from_millis(1)));
        assert!(!known(RESPONSE_LIFETIME * 2 + Duration::from_millis(2)));

        topics.insert("a", UnusableReason::Missing, now + RESPONSE_LIFETIME * 10);
        let later = now + RESPONSE_LIFETIME * 12 + Duration::from_millis(1);
        assert_eq!(
            topics.reason("a", later),
            None,
            "nothing was asked meanwhile"
        );
    }

    #[test]
    fn any_number_of_names_takes_bounded_memory_and_the_last_one_is_kept() {
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
    fn topic_for_dead_letters_is_never_unusable() {
        let topics = UnusableTopics::new("dead");
        let now = Instant::now();
        topics.insert("dead", UnusableReason::Missing, now);
        assert_eq!(topics.reason("dead", now), None);
        assert!(!topics.applies_to("dead"));
    }

    #[test]
    fn waiting_for_missing_topics_takes_at_most_a_tenth_of_the_time() {
        let topics = UnusableTopics::new("dead");
        let began = Instant::now();
        assert_eq!(topics.certain_after(began), MISSING_AFTER);
        let (mut now, mut waited) = (began, Duration::ZERO);
        while now < began + Duration::from_secs(1000) {
            let wait = topics.certain_after(now);
            topics.waited(wait);
            waited += wait;
            // After each wait, the next row names another topic.
            now += wait + Duration::from_millis(300);
        }
        assert!(waited < Duration::from_secs(1000 / 10 + 80), "{waited:?}");
        now += Duration::from_secs(1000);
        assert_eq!(topics.certain_after(now), MISSING_AFTER);
    }

    #[test]
    fn requests_topic_creation_once_a_minute_from_brokers_that_do_not_create() {
        let topics = UnusableTopics::new("dead");
        let now = Instant::now();
        assert!(topics.tries_auto_creation(now));
        topics.tried_auto_creation(false, now);
        assert!(!topics.tries_auto_creation(now));
        assert!(topics.tries_auto_creation(now + AUTO_CREATION_RETRY_DELAY));
        topics.tried_auto_creation(true, now);
        topics.tried_auto_creation(false, now);
        assert!(
            topics.tries_auto_creation(now),
            "one refused name proves nothing"
        );
    }
}
