//! Which pipelines there are to be, and what that changes.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use crate::pipeline::settings::PipelineSettings;

/// Where the definitions of pipelines come from. Whoever calls it may be blocked by a file system or a server.
pub(crate) trait Definitions: Send + 'static {
    /// What the definitions of a pipeline are compared by. Where it is the same, the pipeline goes on as it is.
    type Definition: PartialEq + Send + 'static;

    /// Reads all of them.
    ///
    /// # Errors
    /// Something can't be used; the message names it.
    fn read(&mut self) -> Result<Reading<Self::Definition>, String>;

    /// Whether there is something to read that is at no place: what is asked is asked, where its time has come.
    fn have_changed(&mut self) -> bool;

    /// The files that they come from, and the folders whose files they come from.
    fn places(&self) -> Vec<PathBuf>;
}

/// What was read.
#[derive(Debug)]
pub(crate) struct Reading<D> {
    pub defined: Vec<Defined<D>>,
    /// Sources that can't be used now, and why. Their pipelines are defined as they were before.
    pub failures: Vec<String>,
}

/// A pipeline as it is defined.
#[derive(Debug)]
pub(crate) struct Defined<D> {
    pub settings: PipelineSettings,
    pub definition: D,
    /// What it comes from, with others: a file, a folder, a query.
    pub source: String,
}

/// What becomes of the pipelines, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    pub unchanged: usize,
    /// A source of which more pipelines would go than stay: a file that is half written, a folder that is not mounted and a query
    /// of the wrong table look like that too.
    pub doubtful: Option<Doubtful>,
}

/// What would become of the pipelines of a source.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Doubtful {
    pub source: String,
    pub removed: Vec<String>,
    pub left: usize,
}

/// A pipeline that is there, as it is defined.
pub(super) struct Known<'a, D> {
    pub name: &'a str,
    pub definition: &'a D,
    pub source: &'a str,
}

impl Changes {
    /// From the pipelines that are there to the next ones.
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
        let mut sources: BTreeMap<&str, Doubtful> = BTreeMap::new();
        for known in now {
            let source = sources.entry(known.source).or_default();
            if stay.contains(known.name) {
                source.left += 1;
            } else {
                source.removed.push(known.name.to_owned());
                changes.removed.push(known.name.to_owned());
            }
        }
        let doubtful = |(_, of): &(&str, Doubtful)| of.removed.len() > of.left;
        changes.doubtful = sources
            .into_iter()
            .find(doubtful)
            .map(|(source, of)| Doubtful {
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
