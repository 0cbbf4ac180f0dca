//! Topics that events must not be written to: Walpost's own topics and Kafka's internal topics.
//! This module performs no I/O.
//!
//! If the settings derive the topic from a column, any role that can insert into the outbox can
//! choose the topic. If the topic were not checked, a row could forge a checkpoint of another
//! pipeline or a dead letter.
//!
//! Kafka rejects a new topic whose name differs from that of an existing topic only in `.` and `_`.
//! Names are therefore compared as if these characters were equal. Otherwise, a row could cause a
//! topic with a similar name to be created first, which would prevent the reserved topic from being
//! created.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The default checkpoint topic.
pub(crate) const DEFAULT_CHECKPOINT_TOPIC: &str = "walpost-checkpoints";
/// The default dead-letter topic.
pub(crate) const DEFAULT_DEAD_LETTER_TOPIC: &str = "walpost-dead-letters";
/// The prefix of Kafka's internal topics, such as `__consumer_offsets`.
const INTERNAL_PREFIX: &str = "__";

/// The purpose of a reserved topic.
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

/// Returns a key that is equal for two topic names if Kafka allows only one of them to exist.
///
/// Spec: Apache Kafka 4, `Topic.hasCollision`.
pub(crate) fn collision_key(topic: &str) -> String {
    topic.replace('.', "_")
}

/// Returns the bytes of [`collision_key`] without allocating.
fn collision_bytes(topic: &str) -> impl Iterator<Item = u8> {
    topic
        .bytes()
        .map(|byte| if byte == b'.' { b'_' } else { byte })
}

/// The reserved names and their purposes. If `internal` is true, all names that begin with `__` are
/// reserved too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedTopics {
    /// The names as [`collision_key`]s, sorted.
    names: Arc<[(String, TopicUse)]>,
    internal: bool,
}

impl Default for ReservedTopics {
    /// Reserves only the default names.
    fn default() -> Self {
        Self::new([])
    }
}

impl ReservedTopics {
    /// Reserves `names` in addition to the default names.
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

    /// Returns the purpose for which `topic` is reserved, or `None` if it is not reserved.
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

    /// Keeps only the names for which `can_be` returns true. Names that begin with `__` remain
    /// reserved if `can_begin_with` returns true for that prefix. Both functions receive a
    /// [`collision_key`].
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
    fn reserves_kafka_internal_topics_and_names_that_collide_with_reserved_ones() {
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
        // Topic names are case-sensitive.
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
