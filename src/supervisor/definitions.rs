//! The pipelines that are defined, and the changes between two sets of definitions.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use crate::pipeline::settings::PipelineSettings;

/// The source of pipeline definitions. Calls may block on a file system or a server.
pub(crate) trait Definitions: Send + 'static {
    /// The value by which definitions of a pipeline are compared. If it is unchanged, the pipeline keeps running.
    type Definition: PartialEq + Send + 'static;

    /// Reads all definitions.
    ///
    /// # Errors
    /// Returns a message that names the part of the configuration that can't be used.
    fn read(&mut self) -> Result<Reading<Self::Definition>, String>;

    /// Returns whether definitions that do not come from files have changed. Queries the databases whose next poll is due.
    fn have_changed(&mut self) -> bool;

    /// Returns the files that contain definitions, and the folders whose files do.
    fn places(&self) -> Vec<PathBuf>;
}

/// The result of reading the definitions.
#[derive(Debug)]
pub(crate) struct Reading<D> {
    pub defined: Vec<Defined<D>>,
    /// The sources that can't be used at the moment, and why. Their pipelines keep their previous definitions.
    pub failures: Vec<String>,
}

/// A pipeline and its definition.
#[derive(Debug)]
pub(crate) struct Defined<D> {
    pub settings: PipelineSettings,
    pub definition: D,
    /// The file, folder or query that the definition comes from, which may define other pipelines too.
    pub source: String,
}

/// The differences between two sets of definitions, by pipeline name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    pub unchanged: usize,
    /// A source that would lose more pipelines than it keeps. A partially written file, an unmounted folder and a query of
    /// the wrong table would have the same effect.
    pub doubtful: Option<SuspectRemoval>,
}

/// The pipelines of a source that would be removed, and the number that would be kept.
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
    /// Returns the changes that lead from the existing pipelines to `next`.
    pub(super) fn between<D: PartialEq>(now: &[Known<'_, D>], next: &[Defined<D>]) -> Self {
        let mut changes = Self::default();
        for defined in next {
            let name = &defined.settings.name;
            match now.iter().find(|known| known.name == name) {
                None => changes.added.push(name.clone()),
                Some(known) if *known.definition != defined.definition => {
                    changes.changed.push(name.clone());
                }
                Some(_) => changes.unchanged += 1,
            }
        }
        let stay: HashSet<_> = next.iter().map(|of| of.settings.name.as_str()).collect();
        let mut sources: BTreeMap<&str, SuspectRemoval> = BTreeMap::new();
        for known in now {
            let source = sources.entry(known.source).or_default();
            if stay.contains(known.name) {
                source.left += 1;
            } else {
                source.removed.push(known.name.to_owned());
                changes.removed.push(known.name.to_owned());
            }
        }
        let doubtful = |(_, of): &(&str, SuspectRemoval)| of.removed.len() > of.left;
        changes.doubtful = sources
            .into_iter()
            .find(doubtful)
            .map(|(source, of)| SuspectRemoval {
                source: source.to_owned(),
                ..of
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
