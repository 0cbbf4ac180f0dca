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

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// The default checkpoint topic.
pub(crate) const DEFAULT_CHECKPOINT_TOPIC: &str = "walpost-checkpoints";
/// The default dead-letter topic.
pub(crate) const DEFAULT_DEAD_LETTER_TOPIC: &str = "walpost-dead-letters";
/// The prefix of Kafka's internal topics, such as `__consumer_offsets`.
const INTERNAL_PREFIX: &str = "__";

/// The purpose of a reserved topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

/// Returns a key for comparing topic names. Of all topics whose names have the same key, Kafka
/// allows only one to exist.
///
/// Spec: Apache Kafka 4, `Topic.hasCollision`.
pub(crate) fn collision_key(topic: &str) -> String {
    topic.replace('.', "_")
}

/// Returns the bytes of [`collision_key`] without allocating.
fn collision_bytes(topic: &[u8]) -> impl Iterator<Item = u8> {
    topic
        .iter()
        .map(|&byte| if byte == b'.' { b'_' } else { byte })
}

/// Returns whether `key` is the [`collision_key`] of the text.
fn has_collision_key(text: &[u8], key: &str) -> bool {
    text.len() == key.len() && collision_bytes(text).eq(key.bytes())
}

/// The reserved names and their purposes. If `internal` is true, all names that begin with `__` are
/// reserved too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedTopics {
    /// The names as [`collision_key`]s, sorted.
    names: Arc<[(String, TopicUse)]>,
    /// The patterns for names that templates can produce, sorted.
    patterns: Arc<[TopicPattern]>,
    internal: bool,
}

/// The names of topics that a template for several pipelines can produce, such as `{name}.dead`.
/// The values inserted into the template are unknown, so a placeholder matches any text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TopicPattern {
    /// The template.
    text: String,
    usage: TopicUse,
    /// The literal text before, between and after the placeholders, as [`collision_key`]s. A
    /// template without placeholders has only one part.
    literals: Vec<String>,
}

impl TopicPattern {
    /// Creates a pattern for the template `text`. `literals` contains the literal text before,
    /// between and after the template's placeholders.
    pub(crate) fn new(text: &str, usage: TopicUse, literals: &[String]) -> Self {
        Self {
            text: text.to_owned(),
            usage,
            literals: literals.iter().map(|text| collision_key(text)).collect(),
        }
    }

    /// Returns the template.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn usage(&self) -> TopicUse {
        self.usage
    }

    /// Returns the text with which all names begin, as a [`collision_key`].
    pub(super) fn prefix(&self) -> &str {
        self.literals.first().map_or("", String::as_str)
    }

    /// Returns the text with which all names end, as a [`collision_key`].
    pub(super) fn suffix(&self) -> &str {
        self.literals.last().map_or("", String::as_str)
    }

    /// Returns whether `topic` is equal to, or collides with, a name that the template can produce.
    /// If two names collide, Kafka allows only one of the topics to exist.
    pub(crate) fn matches(&self, topic: &str) -> bool {
        let topic = topic.as_bytes();
        let [prefix, middle @ .., suffix] = &self.literals[..] else {
            let constant = self.literals.first();
            return constant.is_some_and(|constant| has_collision_key(topic, constant));
        };
        let (Some((start, _)), Some(middle_max)) = (
            topic.split_at_checked(prefix.len()),
            topic.len().checked_sub(prefix.len() + suffix.len()),
        ) else {
            return false;
        };
        let (mut rest, end) = topic[prefix.len()..].split_at(middle_max);
        // Use the first match of each literal, so that as much text as possible remains for the
        // literals that follow.
        for literal in middle.iter().filter(|literal| !literal.is_empty()) {
            let mut windows = rest.windows(literal.len());
            let Some(at) = windows.position(|text| has_collision_key(text, literal)) else {
                return false;
            };
            rest = &rest[at + literal.len()..];
        }
        has_collision_key(start, prefix) && has_collision_key(end, suffix)
    }
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
            patterns: Arc::default(),
            internal: true,
        }
    }

    /// Also reserves all names that match one of the patterns.
    #[must_use]
    pub(crate) fn with_patterns(self, patterns: impl IntoIterator<Item = TopicPattern>) -> Self {
        let patterns: BTreeSet<_> = patterns.into_iter().collect();
        Self {
            patterns: patterns.into_iter().collect(),
            ..self
        }
    }

    /// Returns the purpose for which `topic` is reserved, or `None` if it is not reserved.
    #[inline]
    #[must_use]
    pub(crate) fn find(&self, topic: &str) -> Option<TopicUse> {
        let bytes = topic.as_bytes();
        let prefix = collision_bytes(bytes).take(INTERNAL_PREFIX.len());
        if self.internal && prefix.eq(INTERNAL_PREFIX.bytes()) {
            return Some(TopicUse::KafkaInternal);
        }
        let compare = |(name, _): &(String, TopicUse)| name.bytes().cmp(collision_bytes(bytes));
        match self.names.binary_search_by(compare) {
            Ok(found) => self.names.get(found).map(|(_, of)| *of),
            Err(_) => self.find_pattern(topic).map(TopicPattern::usage),
        }
    }

    /// Returns the first pattern that matches `topic`, or `None` if no pattern matches.
    #[must_use]
    pub(crate) fn find_pattern(&self, topic: &str) -> Option<&TopicPattern> {
        self.patterns.iter().find(|pattern| pattern.matches(topic))
    }

    /// Keeps only the names for which `can_be` returns true and the patterns for which `can_match`
    /// returns true. All names that begin with `__` remain reserved if `can_begin_with` returns
    /// true for that prefix. The arguments of `can_be` and `can_begin_with` are [`collision_key`]s.
    #[must_use]
    pub(super) fn filter(
        &self,
        can_be: impl Fn(&str) -> bool,
        can_match: impl Fn(&TopicPattern) -> bool,
        can_begin_with: impl Fn(&str) -> bool,
    ) -> Self {
        let names = self.names.iter().filter(|(name, _)| can_be(name));
        let patterns = self.patterns.iter().filter(|pattern| can_match(pattern));
        Self {
            names: names.cloned().collect(),
            patterns: patterns.cloned().collect(),
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

    fn pattern(literals: &[&str]) -> TopicPattern {
        let literals: Vec<_> = literals.iter().map(|&text| text.to_owned()).collect();
        TopicPattern::new(&literals.join("{x}"), TopicUse::Checkpoints, &literals)
    }

    #[test]
    fn topic_pattern_matches_every_name_that_its_template_can_produce() {
        let check = |literals: &[&str], topic: &str, expected| {
            let found = pattern(literals).matches(topic);
            assert_eq!(found, expected, "{literals:?} and {topic:?}");
        };
        for topic in ["shards.cp", "shards_cp"] {
            check(&["shards.cp"], topic, true);
        }
        for topic in ["shards.cp2", "xshards.cp", "shards", ""] {
            check(&["shards.cp"], topic, false);
        }
        for topic in ["a.dead", "a_dead", "a.dead.dead", "\u{e4}.dead", ".dead"] {
            check(&["", ".dead"], topic, true);
        }
        for topic in ["a.deadly", "a-dead", "dead", "\u{e4}"] {
            check(&["", ".dead"], topic, false);
        }
        for topic in ["cp.a", "cp_", "cp.a.b"] {
            check(&["cp.", ""], topic, true);
        }
        for topic in ["xcp.a", "cp", "Cp.a"] {
            check(&["cp.", ""], topic, false);
        }
        for topic in ["a.b-x.c", "a.b-.c", "a_x-b--x_c", "a.-.c"] {
            check(&["a.", "-", ".c"], topic, true);
        }
        // The literal parts of a pattern must not overlap in a topic name.
        for topic in ["a.c", "a.b.c", "a-.c", "a.-c", "a._c"] {
            check(&["a.", "-", ".c"], topic, false);
        }
        check(&["ab", "ba"], "aba", false);
        check(&["ab", "ba"], "abba", true);
        check(&["a", "", "b"], "ab", true);
    }

    #[test]
    fn reserves_names_that_match_a_pattern() {
        let reserved = all().with_patterns([pattern(&["", ".cp"]), pattern(&["shards"])]);
        assert_eq!(reserved.find("x.cp"), Some(TopicUse::Checkpoints));
        assert_eq!(reserved.find("shards"), Some(TopicUse::Checkpoints));
        assert_eq!(reserved.find("b.dead"), Some(TopicUse::DeadLetters));
        assert_eq!(reserved.find("x.events"), None);
        let found = reserved.find_pattern("x.cp").map(TopicPattern::text);
        assert_eq!(found, Some("{x}.cp"));
    }
}
