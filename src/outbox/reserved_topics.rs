//! Topics that no event may be written to: Walpost's own and those of Kafka itself. Pure.
//!
//! Whoever may insert into an outbox can choose the topic if the settings derive it from a column. Without this check
//! such a row could forge a checkpoint of another pipeline or a dead letter.
//!
//! Kafka creates no topic whose name differs from that of an existing one in `.` and `_` alone. So names are compared without that
//! difference: a row whose topic is created first would keep a reserved topic from ever being created.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The checkpoint topic unless the configuration names another one.
pub(crate) const DEFAULT_CHECKPOINT_TOPIC: &str = "walpost-checkpoints";
/// The dead-letter topic unless the configuration names another one.
pub(crate) const DEFAULT_DEAD_LETTER_TOPIC: &str = "walpost-dead-letters";
/// The names of Kafka's internal topics begin with this: `__consumer_offsets`, `__transaction_state`.
const INTERNAL_PREFIX: &str = "__";

/// What a reserved topic is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TopicUse {
    Checkpoints,
    DeadLetters,
    /// Any name that begins with `__`.
    KafkaInternal,
}

impl fmt::Display for TopicUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Checkpoints => "checkpoints",
            Self::DeadLetters => "dead letters",
            Self::KafkaInternal => "Kafka's internal topics, whose names begin with __",
        })
    }
}

/// Returns what two names of topics have in common if Kafka lets only one of them exist.
///
/// Spec: Apache Kafka 4, `Topic.hasCollision`.
pub(crate) fn collision_key(topic: &str) -> String {
    topic.replace('.', "_")
}

/// The bytes of [`collision_key`], without allocating.
fn collision_bytes(topic: &str) -> impl Iterator<Item = u8> {
    topic
        .bytes()
        .map(|byte| if byte == b'.' { b'_' } else { byte })
}

/// The names that are reserved, by what they are for. Names that begin with `__` are always reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedTopics {
    /// By their [`collision_key`], in order.
    names: Arc<[(String, TopicUse)]>,
    internal: bool,
}

impl Default for ReservedTopics {
    /// The default names, for a pipeline about which nothing else is known.
    fn default() -> Self {
        Self::new([])
    }
}

impl ReservedTopics {
    /// The default names and these.
    pub(crate) fn new(names: impl IntoIterator<Item = (String, TopicUse)>) -> Self {
        let defaults = [
            (DEFAULT_CHECKPOINT_TOPIC, TopicUse::Checkpoints),
            (DEFAULT_DEAD_LETTER_TOPIC, TopicUse::DeadLetters),
        ];
        let defaults = defaults.map(|(name, of)| (name.to_owned(), of));
        let names = names.into_iter().chain(defaults);
        let names: BTreeMap<_, _> = names.map(|(name, of)| (collision_key(&name), of)).collect();
        Self {
            names: names.into_iter().collect(),
            internal: true,
        }
    }

    /// What `topic` is reserved for, if it is.
    #[inline]
    #[must_use]
    pub(crate) fn find(&self, topic: &str) -> Option<TopicUse> {
        let prefix = collision_bytes(topic).take(INTERNAL_PREFIX.len());
        if self.internal && prefix.eq(INTERNAL_PREFIX.bytes()) {
            return Some(TopicUse::KafkaInternal);
        }
        let compare = |(name, _): &(String, TopicUse)| name.bytes().cmp(collision_bytes(topic));
        let found = self.names.binary_search_by(compare).ok()?;
        self.names.get(found).map(|(_, of)| *of)
    }

    /// Those of the names that `can_be` accepts, and names that begin with `__` if one can begin with that prefix, as
    /// `can_begin_with` says. Both are given a [`collision_key`].
    #[must_use]
    pub(super) fn filter(
        &self,
        can_be: impl Fn(&str) -> bool,
        can_begin_with: impl Fn(&str) -> bool,
    ) -> Self {
        let names = self.names.iter().filter(|(name, _)| can_be(name));
        Self {
            names: names.cloned().collect(),
            internal: self.internal && can_begin_with(INTERNAL_PREFIX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> ReservedTopics {
        ReservedTopics::new([
            ("b.checkpoints".to_owned(), TopicUse::Checkpoints),
            ("b.dead".to_owned(), TopicUse::DeadLetters),
        ])
    }

    #[test]
    fn names_are_reserved_with_all_that_collide_and_internal_topics_by_prefix() {
        let reserved = all();
        let check = |topic: &str, expected| assert_eq!(reserved.find(topic), expected, "{topic}");
        check("walpost-checkpoints", Some(TopicUse::Checkpoints));
        check("b.checkpoints", Some(TopicUse::Checkpoints));
        check("walpost-dead-letters", Some(TopicUse::DeadLetters));
        check("b.dead", Some(TopicUse::DeadLetters));
        check("__consumer_offsets", Some(TopicUse::KafkaInternal));
        check("__", Some(TopicUse::KafkaInternal));
        check("b_dead", Some(TopicUse::DeadLetters));
        check("b_checkpoints", Some(TopicUse::Checkpoints));
        for internal in ["_.consumer.offsets", "._consumer_offsets", "..x"] {
            check(internal, Some(TopicUse::KafkaInternal));
        }
        // Names of topics are case-sensitive.
        for free in [
            "Walpost-checkpoints",
            "walpost-checkpoints-2",
            "walpost_checkpoints",
            "_schemas",
            ".schemas",
            "b-dead",
            "b.deadly",
            "b.dea",
            "b",
            "",
        ] {
            check(free, None);
        }
    }
}
