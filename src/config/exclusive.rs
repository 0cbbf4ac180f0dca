//! Resources that two pipelines must not share, and the rows that may use them if several sources
//! define pipelines.

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
    /// A topic reserved for Walpost. Several pipelines can share it only for the same purpose, so
    /// that a dead letter is never mistaken for a checkpoint.
    Topic {
        name: String,
        usage: TopicUse,
    },
}

/// A row that defines a valid pipeline.
#[derive(Clone)]
pub(super) struct ValidRow {
    /// The row's name in messages.
    pub name: String,
    pub row: TextRow,
    pub pipeline: FilePipeline,
    pub resources: Vec<ExclusiveResource>,
}

/// The rows of one source, each of which is valid by itself.
#[derive(Default)]
pub(super) struct SourceRows {
    /// The rows of the current result or, if this result can't be used, the rows of the previous
    /// result.
    pub rows: Vec<ValidRow>,
    /// The rows that were in use before the current result was read. The pipelines that these rows
    /// define may be running.
    pub previous: Vec<ValidRow>,
    /// The reason why a row in `previous` is no longer valid.
    pub previous_failure: Option<String>,
    /// The reasons why rows were rejected.
    pub rejected: Vec<String>,
}

/// The error returned if the previous rows of a source can't be used with the current files.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Conflict {
    /// The index of the source.
    pub source: usize,
    pub reason: String,
}

impl ExclusiveResource {
    /// Returns the resources that other pipelines must not use if a pipeline uses this resource.
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

    /// Returns a description of the resource, for an error about two pipelines that share it.
    pub(super) fn description(&self) -> &'static str {
        match self {
            Self::Name(_) => "name",
            Self::Slot { .. } => "slot in the same database",
            Self::Topic { .. } => "topic for different purposes (checkpoints and dead letters)",
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
    /// Removes rows that share a resource with another row of the source.
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

    /// Replaces the rows with the previous rows if any row was rejected. Returns an error message
    /// if a previous row is no longer valid, so that the rows can't be replaced.
    pub(super) fn replace_if_rejected(&mut self) -> Option<String> {
        if self.rejected.is_empty() {
            return None;
        }
        self.rows.clone_from(&self.previous);
        self.previous_failure.clone()
    }

    /// Returns why rows were rejected.
    pub(super) fn failure(&self) -> Option<String> {
        match &*self.rejected {
            [] => None,
            [reason] => Some(reason.clone()),
            [reason, ..] => Some(format!(
                "{} rows can't be used. {reason}",
                self.rejected.len()
            )),
        }
    }

    fn has_previous(&self, row: &ValidRow) -> bool {
        let mut previous = self.previous.iter();
        previous.any(|previous| previous.pipeline.name() == row.pipeline.name())
    }

    /// Splits the rows into two lists: rows that use only resources of the previous rows, and all
    /// other rows.
    fn split_by_use(&self) -> (Vec<&ValidRow>, Vec<&ValidRow>) {
        let previous = self.previous.iter().flat_map(|row| &row.resources);
        let previous: HashSet<_> = previous.collect();
        let is_in_use = |resource| previous.contains(resource);
        self.rows
            .iter()
            .partition(|row| row.resources.iter().all(is_in_use))
    }
}

/// Rejects rows whose pipelines need resources of other pipelines. The pipelines in files, whose
/// resources are in `in_files`, take precedence over all rows, and rows that were already in use
/// take precedence over new rows. If several rows need a resource that was not already in use, all
/// of these rows are rejected, so that no role can take over the slot and the checkpoint of another
/// source's pipeline with a row of its own.
///
/// If a row of a pipeline that was already in use would be rejected, all rows of its source are
/// replaced with the source's previous rows, so that no pipeline is removed because of a conflict.
///
/// # Errors
/// Returns an error if rows that were already in use conflict with the files, or if the previous
/// rows must replace the current rows but are no longer valid.
pub(super) fn resolve_conflicts(
    sources: &mut [SourceRows],
    in_files: &HashSet<ExclusiveResource>,
) -> Result<(), Conflict> {
    loop {
        let rejected = find_conflicts(sources, in_files)?;
        let is_running = |(source, row, _): &(usize, ValidRow, String)| {
            let source: &SourceRows = &sources[*source];
            source.has_previous(row)
        };
        let Some((index, _, reason)) = rejected.iter().find(|found| is_running(found)) else {
            for (source, row, reason) in rejected {
                let source = &mut sources[source];
                let name = row.pipeline.name();
                source.rows.retain(|other| other.pipeline.name() != name);
                source.rejected.push(reason);
            }
            return Ok(());
        };
        let source = &mut sources[*index];
        source.rejected = vec![reason.clone()];
        if let Some(reason) = source.replace_if_rejected() {
            let source = *index;
            return Err(Conflict { source, reason });
        }
    }
}

/// Returns the rows that conflict with files or with other rows, each with the index of its source
/// and an error message.
fn find_conflicts(
    sources: &[SourceRows],
    in_files: &HashSet<ExclusiveResource>,
) -> Result<Vec<(usize, ValidRow, String)>, Conflict> {
    let mut taken = in_files.clone();
    let mut added = Vec::new();
    for (source, rows) in sources.iter().enumerate() {
        let (in_use, others) = rows.split_by_use();
        for row in &in_use {
            if let Some(reason) = row.conflict(in_files) {
                return Err(Conflict { source, reason });
            }
        }
        taken.extend(in_use.iter().flat_map(|row| row.resources.clone()));
        added.extend(others.into_iter().map(|row| (source, row)));
    }
    let shared = duplicates(added.iter().map(|(_, row)| *row));
    let mut rejected = Vec::new();
    for (source, row) in added {
        let conflict = row.conflict(&taken).or_else(|| row.conflict(&shared));
        match conflict {
            Some(reason) => rejected.push((source, row.clone(), reason)),
            None => taken.extend(row.resources.iter().cloned()),
        }
    }
    Ok(rejected)
}

/// Returns the names and slots that occur in several rows, all of which are rejected. If the first
/// row were accepted, any role that can add a row that sorts first could take over another
/// pipeline's slot and checkpoint.
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
