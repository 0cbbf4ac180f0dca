//! Pipeline definitions, and the changes between two sets of definitions.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use crate::pipeline::settings::PipelineSettings;

/// A source of pipeline definitions. Methods may block on a file system or a server.
pub(crate) trait Definitions: Send + 'static {
    /// The definition of a pipeline. On reload, it is compared with the pipeline's previous
    /// definition, and a pipeline with an unchanged definition keeps running.
    type Definition: PartialEq + Send + 'static;

    /// Reads all definitions.
    ///
    /// # Errors
    /// Returns an error message that names the part of the configuration that can't be used.
    fn read(&mut self) -> Result<Reading<Self::Definition>, String>;

    /// Returns whether any definitions that don't come from files have changed. Queries each
    /// database whose next poll is due.
    fn have_changed(&mut self) -> bool;

    /// Returns the files and folders that contain definitions, to be watched for changes.
    fn places(&self) -> Vec<PathBuf>;
}

/// The result of reading the definitions.
#[derive(Debug)]
pub(crate) struct Reading<D> {
    pub defined: Vec<Defined<D>>,
    /// The sources that can't be used at the moment, with the reasons. Pipelines from these sources
    /// keep their previous definitions.
    pub failures: Vec<String>,
}

/// A pipeline and its definition.
#[derive(Debug)]
pub(crate) struct Defined<D> {
    pub settings: PipelineSettings,
    pub definition: D,
    /// The file, folder or query from which the definition comes. The same source may also define
    /// other pipelines.
    pub source: String,
}

/// The differences between two sets of definitions. Pipelines are identified by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    pub unchanged: usize,
    /// The sources that would lose more pipelines than they keep. The cause may be a partially
    /// written file, an unmounted folder or a query on the wrong table.
    pub doubtful: Vec<SuspectRemoval>,
}

/// The pipelines that would be removed from a source, and the number of pipelines that the source
/// would keep.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SuspectRemoval {
    pub source: String,
    pub removed: Vec<String>,
    pub left: usize,
}

impl fmt::Display for SuspectRemoval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} pipelines would be removed ({}), leaving {} from {}. To apply the change anyway, run walpost pipeline reload --accept",
            self.removed.len(),
            self.removed.join(", "),
            self.left,
            self.source
        )
    }
}

/// An existing pipeline and its definition.
pub(super) struct Known<'a, D> {
    pub settings: &'a PipelineSettings,
    pub definition: &'a D,
    pub source: &'a str,
}

impl Changes {
    /// Returns the changes that lead from the existing pipelines in `current` to the pipelines in
    /// `next`.
    pub(super) fn between<D: PartialEq>(current: &[Known<'_, D>], next: &[Defined<D>]) -> Self {
        let mut changes = Self::default();
        for defined in next {
            let name = &defined.settings.name;
            match current.iter().find(|known| known.settings.name == *name) {
                None => changes.added.push(name.clone()),
                Some(known) if *known.definition != defined.definition => {
                    changes.changed.push(name.clone());
                }
                Some(_) => changes.unchanged += 1,
            }
        }
        let kept: HashSet<_> = next
            .iter()
            .map(|defined| defined.settings.name.as_str())
            .collect();
        let mut sources: BTreeMap<&str, SuspectRemoval> = BTreeMap::new();
        for known in current {
            let source = sources.entry(known.source).or_default();
            let name = &known.settings.name;
            if kept.contains(name.as_str()) {
                source.left += 1;
            } else {
                source.removed.push(name.clone());
                changes.removed.push(name.clone());
            }
        }
        let is_doubtful =
            |(_, removal): &(&str, SuspectRemoval)| removal.removed.len() > removal.left;
        changes.doubtful = sources
            .into_iter()
            .filter(is_doubtful)
            .map(|(source, removal)| SuspectRemoval {
                source: source.to_owned(),
                ..removal
            })
            .collect();
        changes
    }

    /// Returns whether there are no changes.
    pub(super) fn is_empty(&self) -> bool {
        [&self.added, &self.changed, &self.removed]
            .iter()
            .all(|names| names.is_empty())
    }
}

/// Removes the pipelines of the sources in `doubtful` from `next`. Returns the names of the
/// existing pipelines that must be kept instead. Returns `None` if the kept pipelines can't run
/// together with the pipelines that remain in `next`.
pub(super) fn postpone_doubtful<D>(
    current: &[Known<'_, D>],
    next: &mut Vec<Defined<D>>,
    doubtful: &[SuspectRemoval],
) -> Option<Vec<String>> {
    let is_doubtful = |source: &str| doubtful.iter().any(|removal| removal.source == source);
    let names = |next: &[Defined<D>]| -> HashSet<_> {
        let names = next.iter().map(|defined| defined.settings.name.clone());
        names.collect()
    };
    let before = names(next);
    next.retain(|defined| !is_doubtful(&defined.source));
    let after = names(next);
    // A pipeline that a source in `doubtful` would take over from another source is kept as well.
    let is_kept = |known: &&Known<'_, D>| {
        let name = &known.settings.name;
        !after.contains(name) && (is_doubtful(known.source) || before.contains(name))
    };
    let kept: Vec<_> = current.iter().filter(is_kept).collect();
    let mut pairs = kept
        .iter()
        .flat_map(|known| next.iter().map(|next| (known.settings, &next.settings)));
    let are_compatible = pairs.all(|(known, next)| are_compatible(known, next));
    let kept = kept.iter().map(|known| known.settings.name.clone());
    are_compatible.then(|| kept.collect())
}

/// Returns whether the pipelines use different slots, and neither pipeline can write its events to
/// the other pipeline's topics for checkpoints and dead letters. Pipelines in the same version of
/// the configuration have already been checked, but pipelines in different versions have not.
fn are_compatible(one: &PipelineSettings, other: &PipelineSettings) -> bool {
    let slots = [one, other].map(|one| (&one.target.slot, one.postgres.describe()));
    let reserves_topics_of = |one: &PipelineSettings, other: &PipelineSettings| {
        let reserved = &one.outbox.reserved_topics;
        let mut own = other.own_topics();
        own.all(|(topic, usage)| reserved.find(topic) == Some(usage))
    };
    slots[0] != slots[1] && reserves_topics_of(one, other) && reserves_topics_of(other, one)
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, names) in [
            ("added", &self.added),
            ("changed", &self.changed),
            ("removed", &self.removed),
        ] {
            if !names.is_empty() {
                write!(f, "{} {what} ({}), ", names.len(), names.join(", "))?;
            }
        }
        write!(f, "{} unchanged", self.unchanged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::reserved_topics::{DEFAULT_DEAD_LETTER_TOPIC, ReservedTopics, TopicUse};
    use crate::pipeline::sim;

    type Pipeline = (&'static str, &'static str, u32);

    fn settings(name: &str) -> PipelineSettings {
        let mut settings = sim::settings(false, false, &mut fastrand::Rng::with_seed(0));
        settings.name = name.to_owned();
        settings.dead_letters.topic = DEFAULT_DEAD_LETTER_TOPIC.to_owned();
        settings.target.slot = format!("slot_{name}");
        settings
    }

    fn next(pipelines: &[Pipeline]) -> Vec<Defined<u32>> {
        let defined = pipelines.iter().map(|&(source, name, definition)| Defined {
            settings: settings(name),
            definition,
            source: source.to_owned(),
        });
        defined.collect()
    }

    /// Returns the names of the pipelines that are kept unchanged, and the names of the pipelines
    /// that remain in `next`. Returns `None` if the change must be rejected as a whole.
    fn postponed(
        current: &[Pipeline],
        mut next: Vec<Defined<u32>>,
    ) -> Option<(Vec<String>, Vec<String>)> {
        let existing = self::next(current);
        let current: Vec<_> = existing
            .iter()
            .map(|defined| Known {
                settings: &defined.settings,
                definition: &defined.definition,
                source: &defined.source,
            })
            .collect();
        let doubtful = Changes::between(&current, &next).doubtful;
        let kept = postpone_doubtful(&current, &mut next, &doubtful)?;
        let next = next.into_iter().map(|defined| defined.settings.name);
        Some((kept, next.collect()))
    }

    const CURRENT: [Pipeline; 5] = [
        ("rows", "a", 1),
        ("rows", "b", 1),
        ("rows", "c", 1),
        ("file", "d", 1),
        ("file", "e", 1),
    ];

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn removal_of_most_pipelines_from_a_source_does_not_block_other_changes() {
        let changed = next(&[("rows", "a", 2), ("file", "d", 2), ("file", "f", 1)]);
        let expected = (names(&["a", "b", "c"]), names(&["d", "f"]));
        assert_eq!(postponed(&CURRENT, changed), Some(expected));
        // The source "rows" loses most of its pipelines, and would also take over a pipeline of the
        // source "file".
        let changed = next(&[("rows", "d", 2), ("file", "e", 2)]);
        let expected = (names(&["a", "b", "c", "d"]), names(&["e"]));
        assert_eq!(postponed(&CURRENT, changed), Some(expected));
        // A pipeline that moved to another source is not removed.
        let changed = next(&[("file", "a", 1), ("file", "d", 1), ("file", "e", 1)]);
        let expected = (names(&["b", "c"]), names(&["a", "d", "e"]));
        assert_eq!(postponed(&CURRENT, changed), Some(expected));
    }

    #[test]
    fn rejects_all_changes_if_a_new_pipeline_conflicts_with_one_that_must_be_kept() {
        let changed = || next(&[("file", "d", 1), ("file", "e", 1), ("file", "f", 1)]);
        assert!(postponed(&CURRENT, changed()).is_some());
        let mut same_slot = changed();
        same_slot[2].settings.target.slot = "slot_a".to_owned();
        assert_eq!(postponed(&CURRENT, same_slot), None);
        // The existing pipelines could write their events to the new pipeline's dead-letter topic.
        let mut new_topic = changed();
        new_topic[2].settings.dead_letters.topic = "f.dead".to_owned();
        for defined in &mut new_topic {
            let own = [("f.dead".to_owned(), TopicUse::DeadLetters)];
            defined.settings.outbox.reserved_topics = ReservedTopics::new(own);
        }
        assert_eq!(postponed(&CURRENT, new_topic), None);
    }
}
