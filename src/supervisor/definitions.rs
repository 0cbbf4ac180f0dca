//! Pipeline definitions, and the changes between two sets of definitions.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use crate::pipeline::settings::PipelineSettings;

/// The source of pipeline definitions. Calls may block on a file system or a server.
pub(crate) trait Definitions: Send + 'static {
    /// A value that changes with the definition of a pipeline. If the value is unchanged, the
    /// pipeline keeps running.
    type Definition: PartialEq + Send + 'static;

    /// Reads all definitions.
    ///
    /// # Errors
    /// Returns a message that names the part of the configuration that can't be used.
    fn read(&mut self) -> Result<Reading<Self::Definition>, String>;

    /// Returns whether definitions that do not come from files have changed. Queries the databases
    /// whose next poll is due.
    fn have_changed(&mut self) -> bool;

    /// Returns the files and folders that contain definitions.
    fn places(&self) -> Vec<PathBuf>;
}

/// The result of reading the definitions.
#[derive(Debug)]
pub(crate) struct Reading<D> {
    pub defined: Vec<Defined<D>>,
    /// The sources that can't be used at the moment, and why. The pipelines from these sources keep
    /// their previous definitions.
    pub failures: Vec<String>,
}

/// A pipeline and its definition.
#[derive(Debug)]
pub(crate) struct Defined<D> {
    pub settings: PipelineSettings,
    pub definition: D,
    /// The file, folder or query that contains the definition, and possibly the definitions of
    /// other pipelines.
    pub source: String,
}

/// The differences between two sets of definitions, by pipeline name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    pub unchanged: usize,
    /// A source from which more pipelines would be removed than kept. The cause may be a partially
    /// written file, an unmounted folder or a query on the wrong table.
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
    /// Returns the changes from the existing pipelines, `current`, to `next`.
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
