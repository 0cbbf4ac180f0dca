//! Which pipelines there are to be, and what that changes.

use std::fmt;
use std::path::PathBuf;

use crate::pipeline::settings::PipelineSettings;

/// Where the definitions of pipelines come from.
pub(crate) trait Definitions {
    /// What the definitions of a pipeline are compared by. Where it is the same, the pipeline goes on as it is.
    type Definition: PartialEq;

    /// Reads all of them.
    ///
    /// # Errors
    /// Something can't be used; the message names it.
    fn read(&self) -> Result<Vec<Defined<Self::Definition>>, String>;

    /// The files that they come from, and the folders whose files they come from.
    fn places(&self) -> Vec<PathBuf>;
}

/// A pipeline as it is defined.
pub(crate) struct Defined<D> {
    pub settings: PipelineSettings,
    pub definition: D,
}

/// What becomes of the pipelines, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    pub unchanged: usize,
}

impl Changes {
    /// From the pipelines that are there, each with its definition, to the next ones.
    pub(super) fn between<'a, D: PartialEq + 'a>(
        now: impl Iterator<Item = (&'a str, &'a D)> + Clone,
        next: &[Defined<D>],
    ) -> Self {
        let mut changes = Self::default();
        for defined in next {
            let name = &defined.settings.name;
            match now.clone().find(|(known, _)| known == name) {
                None => changes.added.push(name.clone()),
                Some((_, definition)) if *definition != defined.definition => {
                    changes.changed.push(name.clone());
                }
                Some(_) => changes.unchanged += 1,
            }
        }
        changes.removed = now
            .map(|(name, _)| name)
            .filter(|name| !next.iter().any(|defined| defined.settings.name == **name))
            .map(str::to_owned)
            .collect();
        changes
    }

    /// More than half of the pipelines would go: a file that is half written, or a folder that is not mounted, looks like
    /// that too.
    pub(super) fn are_doubtful(&self) -> bool {
        let stay = self.changed.len() + self.unchanged;
        self.removed.len() > stay
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
