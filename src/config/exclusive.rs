//! Resources that two pipelines must not share. Pipelines are defined in files or by the rows of a
//! query's result. A row that conflicts with a pipeline in a file is rejected. If several rows of
//! one query's result specify the same name or slot, all of them are rejected.
//!
//! Rows from the results of different queries can't define pipelines with the same name, because a
//! configuration whose templates allow that is rejected. However, such rows can specify the same
//! slot. In this case, walpost.slot_state in the slot's database determines which of the pipelines
//! may use the slot (see [`DefinedBy`](crate::postgres::catalog::slot_owner::DefinedBy)).

use std::collections::HashSet;
use std::fmt;

use super::file::FilePipeline;
use crate::outbox::reserved_topics::TopicUse;
use crate::postgres::text_rows::TextRow;

/// A resource that two pipelines must not share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum ExclusiveResource {
    Name(String),
    Slot {
        slot: String,
        database: String,
    },
    /// A topic reserved for Walpost, for example for checkpoints. Several pipelines can share the
    /// topic only if all of them use it for the same purpose, so that a dead letter is never
    /// mistaken for a checkpoint.
    Topic {
        name: String,
        usage: TopicUse,
    },
}

/// A row of a query's result that defines a valid pipeline.
#[derive(Clone)]
pub(super) struct ValidRow {
    /// The name of the row in messages.
    pub name: String,
    pub row: TextRow,
    pub pipeline: FilePipeline,
    pub resources: Vec<ExclusiveResource>,
}

/// The rows that one query returned. Each row defines a pipeline that is valid by itself, but may
/// conflict with pipelines of other rows or files.
#[derive(Default)]
pub(super) struct SourceRows {
    /// The rows of the current result or, if this result can't be used, the rows of the previous
    /// result.
    pub rows: Vec<ValidRow>,
    /// The rows that were in use before the query returned the current result. `None` if the source
    /// is new or its query was changed.
    pub previous: Option<Vec<ValidRow>>,
    /// The reason why one of the previous rows is no longer valid. `None` if all of them are valid.
    pub previous_failure: Option<String>,
    /// The reasons why rows were rejected.
    pub rejected: Vec<String>,
}

impl ExclusiveResource {
    /// Returns the resources that other pipelines must not use while a pipeline uses this resource.
    pub(super) fn excluded(&self) -> Vec<Self> {
        match self {
            Self::Name(_) | Self::Slot { .. } => vec![self.clone()],
            Self::Topic { name, usage } => [TopicUse::Checkpoints, TopicUse::DeadLetters]
                .into_iter()
                .filter(|other| other != usage)
                .map(|usage| Self::Topic {
                    name: name.clone(),
                    usage,
                })
                .collect(),
        }
    }

    pub(super) fn is_slot(&self) -> bool {
        matches!(self, Self::Slot { .. })
    }

    /// Returns the text that describes the conflict if two pipelines share the resource.
    pub(super) fn description(&self) -> &'static str {
        match self {
            Self::Name(_) => "both pipelines use the same name; each pipeline needs its own name",
            Self::Slot { .. } => {
                "both pipelines use the same slot in the same database; each needs its own slot"
            }
            Self::Topic { .. } => {
                "both pipelines use the same topic for different purposes (checkpoints and dead letters); choose another topic \
                 for one of them"
            }
        }
    }
}

impl fmt::Display for ExclusiveResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(_) => f.write_str("another pipeline has the same name"),
            Self::Slot { slot, .. } => {
                write!(
                    f,
                    "another pipeline uses slot {slot:?} in the same database"
                )
            }
            Self::Topic { name, usage } => write!(
                f,
                "topic {name:?} is used for {usage}, but another pipeline uses it for a different purpose; choose another topic"
            ),
        }
    }
}

impl ValidRow {
    /// Returns an error message if the row's pipeline uses a resource that conflicts with a
    /// resource in `taken`.
    fn conflict(&self, taken: &HashSet<ExclusiveResource>) -> Option<String> {
        let is_taken = |resource: &&ExclusiveResource| {
            let mut excluded = resource.excluded().into_iter();
            excluded.any(|other| taken.contains(&other))
        };
        let resource = self.resources.iter().find(is_taken)?;
        Some(format!("{}: {resource}", self.name))
    }
}

impl SourceRows {
    /// Removes rows that specify the same name or slot as another row of the same query's result,
    /// and rows that use the topic of a preceding row for a different purpose.
    pub(super) fn remove_duplicates(&mut self) {
        let (mut taken, duplicates) = (HashSet::new(), duplicates(&self.rows));
        for row in std::mem::take(&mut self.rows) {
            let conflict = row.conflict(&duplicates).or_else(|| row.conflict(&taken));
            if let Some(reason) = conflict {
                self.rejected.push(reason);
            } else {
                taken.extend(row.resources.clone());
                self.rows.push(row);
            }
        }
    }

    /// If any row was rejected and there are previous rows, replaces all rows with the previous
    /// rows. Returns an error message if a previous row is no longer valid.
    pub(super) fn replace_if_rejected(&mut self) -> Option<String> {
        match &self.previous {
            Some(previous) if !self.rejected.is_empty() => {
                self.rows.clone_from(previous);
                self.previous_failure.clone()
            }
            _ => None,
        }
    }

    /// Rejects rows that conflict with a pipeline in a file. `in_files` contains the resources of
    /// all pipelines in files. `running` contains the names of all pipelines that rows have defined
    /// so far.
    ///
    /// If a row conflicts with the files and its pipeline is running, all rows are replaced with
    /// the previous rows. Otherwise, the conflict would cause the running pipeline to be removed.
    ///
    /// # Errors
    /// Returns an error message if a row whose pipeline is running conflicts with the files, and
    /// there are no previous rows that can be used instead.
    pub(super) fn reject_conflicts(
        &mut self,
        in_files: &HashSet<ExclusiveResource>,
        running: &HashSet<String>,
    ) -> Result<(), String> {
        let is_running = |row: &&ValidRow| running.contains(row.pipeline.name());
        let mut rows = self.rows.iter().filter(is_running);
        if let Some(reason) = rows.find_map(|row| row.conflict(in_files)) {
            if self.previous.is_none() {
                return Err(reason);
            }
            self.rejected = vec![reason];
            if let Some(reason) = self.replace_if_rejected() {
                return Err(reason);
            }
        }
        for row in std::mem::take(&mut self.rows) {
            match row.conflict(in_files) {
                Some(reason) if is_running(&&row) => return Err(reason),
                Some(reason) => self.rejected.push(reason),
                None => self.rows.push(row),
            }
        }
        Ok(())
    }

    /// Returns an error message about the rejected rows, or `None` if no row was rejected.
    pub(super) fn failure(&self) -> Option<String> {
        match &*self.rejected {
            [] => None,
            [reason] => Some(reason.clone()),
            [reason, ..] => Some(format!(
                "{} rows can't be used. First error: {reason}",
                self.rejected.len()
            )),
        }
    }
}

/// Returns the names and slots that occur in several rows. All rows with such a name or slot are
/// rejected. If the first of these rows were accepted, a role that can add rows could add one that
/// sorts first, and take over the slot and checkpoint of another pipeline.
fn duplicates<'r>(rows: impl IntoIterator<Item = &'r ValidRow>) -> HashSet<ExclusiveResource> {
    let (mut seen, mut shared) = (HashSet::new(), HashSet::new());
    for resource in rows.into_iter().flat_map(|row| &row.resources) {
        if !matches!(resource, ExclusiveResource::Topic { .. }) && !seen.insert(resource) {
            shared.insert(resource.clone());
        }
    }
    shared
}

#[cfg(test)]
mod tests;
