//! Pipeline definitions, and the changes between two sets of definitions.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use crate::pipeline::settings::PipelineSettings;

/// A source of pipeline definitions. Methods may block on a file system or a server.
pub(crate) trait Definitions: Send + 'static {
    /// A pipeline's definition, which is compared with the previous definition on reload. If the
    /// definition is unchanged, the pipeline keeps running.
    type Definition: PartialEq + Send + 'static;

    /// Reads all definitions.
    ///
    /// # Errors
    /// Returns an error message that names the part of the configuration that can't be used.
    fn read(&mut self) -> Result<Reading<Self::Definition>, String>;

    /// Returns whether any definitions that don't come from files have changed. Queries each
    /// database for which the next poll is due.
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
    /// The first source that would lose more pipelines than it keeps. The cause may be a partially
    /// written file, an unmounted folder or a query on the wrong table.
    pub doubtful: Option<SuspectRemoval>,
}

/// A source's pipelines that would be removed, and the number of its pipelines that would be kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SuspectRemoval {
    pub source: String,
    pub removed: Vec<String>,
    pub left: usize,
}

/// An existing pipeline and its definition.
pub(super) struct Known<'a, D> {
    pub name: &'a str,
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
            match current.iter().find(|known| known.name == name) {
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
            if kept.contains(known.name) {
                source.left += 1;
            } else {
                source.removed.push(known.name.to_owned());
                changes.removed.push(known.name.to_owned());
            }
        }
        let is_doubtful =
            |(_, removal): &(&str, SuspectRemoval)| removal.removed.len() > removal.left;
        changes.doubtful = sources
            .into_iter()
            .find(is_doubtful)
            .map(|(source, removal)| SuspectRemoval {
                source: source.to_owned(),
                ..removal
            });
        changes
    }
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
