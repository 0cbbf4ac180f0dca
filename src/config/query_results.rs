//! The results of the queries in walpost.toml, which are kept when the file is reloaded.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tracing::warn;

use super::Env;
use super::error::ConfigError;
use super::file::{File, FilePipeline, Origin};
use super::query::{LastRows, QuerySource};
use crate::outbox::reserved_topics::TopicUse;
use crate::postgres::text_rows::TextRow;

/// The results of all queries, and when to run each query again.
#[derive(Default)]
pub(crate) struct QueryResults {
    queried: Vec<QueriedSource>,
    last_rows: Arc<LastRows>,
    /// Whether the file was read successfully before. If so, a new query that fails causes the
    /// reload to be rejected, and running pipelines continue.
    was_read: bool,
    /// When to retry after a query caused the reload to be rejected.
    retry_at: Option<Instant>,
    /// Whether to skip all queries.
    is_offline: bool,
}

/// A source, and the results of its query.
struct QueriedSource {
    source: QuerySource,
    /// When to run the query again.
    due: Instant,
    /// The last result, even if its rows were rejected.
    last: Result<Vec<TextRow>, String>,
    /// The rows in use, from the last usable result.
    rows: Vec<TextRow>,
}

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

/// A function that returns the resources that a pipeline uses exclusively, or an error if the
/// pipeline is invalid.
pub(super) type Validate<'v> = &'v dyn Fn(&FilePipeline) -> Result<Vec<ExclusiveResource>, String>;

impl QueryResults {
    /// Creates an instance that runs no queries.
    pub(super) fn offline() -> Self {
        Self {
            is_offline: true,
            ..Self::default()
        }
    }

    /// Runs the queries in the file at `path`. Returns the pipelines that their rows define, and
    /// errors about sources and rows that could not be used.
    ///
    /// A row whose pipeline needs a resource in `taken` is rejected. If a source can't be used, its
    /// previous rows remain in use. At startup, rows that can't be used are skipped.
    ///
    /// # Errors
    /// Returns an error if a source that was added in a reload can't be used, or if rows that define
    /// running pipelines are not valid together with the current file.
    pub(super) fn read(
        &mut self,
        path: &Path,
        file: &File,
        env: Env<'_>,
        validate: Validate<'_>,
        mut taken: HashSet<ExclusiveResource>,
    ) -> Result<(Vec<FilePipeline>, Vec<String>), ConfigError> {
        let mut next = Vec::new();
        let (mut pipelines, mut failures) = (Vec::new(), Vec::new());
        for source in file.queries() {
            if self.is_offline {
                failures.push(format!("{}: not queried", source.describe(env)));
                continue;
            }
            let mut queried = self.queried.iter();
            let previous = queried.find(|queried| queried.source.is_same_query(source));
            let previous_rows = previous.map(|queried| queried.rows.clone());
            let last = query_rows(source, previous_rows.is_none(), env);
            let origin = Origin::Row {
                file: path.to_owned(),
                rows: Arc::clone(&self.last_rows),
                source: format!("{}: {}", source.describe(env), source.query),
            };
            let fill = |rows| fill_rows(source, &origin, rows, validate, &taken);
            let FilledRows { mut used, failure } = match &last {
                Ok(rows) => fill(rows.clone()),
                Err(reason) => FilledRows {
                    used: Vec::new(),
                    failure: Some(reason.clone()),
                },
            };
            if let Some(reason) = failure {
                let fatal = match previous_rows {
                    Some(rows) => {
                        let refilled = fill(rows);
                        used = refilled.used;
                        refilled.failure
                    }
                    None => self.was_read.then(|| reason.clone()),
                };
                if let Some(reason) = fatal {
                    self.retry_at = Some(Instant::now() + source.every);
                    return Err(ConfigError::Source {
                        name: source.describe(env),
                        reason,
                    });
                }
                failures.push(format!("{}: {reason}", source.describe(env)));
            }
            let mut rows = Vec::with_capacity(used.len());
            for ValidRow {
                row,
                pipeline,
                resources,
            } in used
            {
                self.last_rows.set(pipeline.name(), &row);
                rows.push(row);
                pipelines.push(pipeline);
                taken.extend(resources);
            }
            next.push(QueriedSource {
                source: source.clone(),
                due: Instant::now() + source.every,
                last,
                rows,
            });
        }
        (self.queried, self.was_read, self.retry_at) = (next, true, None);
        Ok((pipelines, failures))
    }

    /// Runs the queries that are due. Returns whether the file must be read again, because a result
    /// has changed or a retry is due.
    pub(super) fn have_changed(&mut self, env: Env<'_>) -> bool {
        let now = Instant::now();
        let mut have_changed = self.retry_at.take_if(|time| *time <= now).is_some();
        let due = self.queried.iter_mut().filter(|queried| queried.due <= now);
        for queried in due {
            have_changed |= query_rows(&queried.source, false, env) != queried.last;
            queried.due = Instant::now() + queried.source.every;
        }
        have_changed
    }
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

struct FilledRows {
    used: Vec<ValidRow>,
    failure: Option<String>,
}

/// A row that defines a valid pipeline.
struct ValidRow {
    row: TextRow,
    pipeline: FilePipeline,
    resources: Vec<ExclusiveResource>,
}

/// Returns the rows of the query's result, sorted so that their order does not depend on the
/// server.
fn query_rows(source: &QuerySource, is_new: bool, env: Env<'_>) -> Result<Vec<TextRow>, String> {
    let mut found = source.run(env)?;
    if found.as_superuser && is_new {
        warn!(
            "{}: the query runs as a superuser, so the owner of any table, view or function that it uses can run code \
             as a superuser. Use a role that can read only the tables that the query uses",
            source.describe(env)
        );
    }
    found.rows.sort_unstable();
    Ok(found.rows)
}

/// Returns the names and slots that occur in several rows, all of which are rejected. If the first
/// row were accepted, any role that can add a row that sorts first could take over another
/// pipeline's slot and checkpoint.
fn duplicates<'p>(
    valid: impl Iterator<Item = &'p (FilePipeline, Vec<ExclusiveResource>)>,
) -> HashSet<ExclusiveResource> {
    let (mut seen, mut shared) = (HashSet::new(), HashSet::new());
    for resource in valid.flat_map(|(_, resources)| resources) {
        if !matches!(resource, ExclusiveResource::Topic { .. }) && !seen.insert(resource) {
            shared.insert(resource.clone());
        }
    }
    shared
}

/// Fills the template with each row's values. Returns the rows that define valid pipelines, and an
/// error about the first row that does not.
fn fill_rows(
    source: &QuerySource,
    origin: &Origin,
    rows: Vec<TextRow>,
    validate: Validate<'_>,
    taken: &HashSet<ExclusiveResource>,
) -> FilledRows {
    let (mut used, mut failure, mut rejected) = (Vec::new(), None, 0);
    let results = rows.into_iter().map(|row| {
        let found = source.fill_template(&row).and_then(|filled| {
            let mut pipeline = FilePipeline::from_template(filled)?;
            pipeline.origin = origin.clone();
            let resources = validate(&pipeline)?;
            Ok((pipeline, resources))
        });
        (row, found)
    });
    let results: Vec<_> = results.collect();
    let duplicates = duplicates(results.iter().filter_map(|(_, found)| found.as_ref().ok()));
    let mut in_rows = HashSet::new();
    for (row, found) in results {
        let found = found.and_then(|(pipeline, resources)| {
            let is_taken = |other: &ExclusiveResource| {
                taken.contains(other) || duplicates.contains(other) || in_rows.contains(other)
            };
            let is_free = |resource: &ExclusiveResource| !resource.excluded().iter().any(is_taken);
            match resources.iter().find(|resource| !is_free(resource)) {
                Some(resource) => Err(resource.to_string()),
                None => Ok((pipeline, resources)),
            }
        });
        match found {
            Ok((pipeline, resources)) => {
                in_rows.extend(resources.clone());
                used.push(ValidRow {
                    row,
                    pipeline,
                    resources,
                });
            }
            Err(reason) => {
                rejected += 1;
                failure.get_or_insert_with(|| format!("{}: {reason}", source.row_name(&row)));
            }
        }
    }
    let failure = failure.map(|reason| match rejected {
        1 => reason,
        _ => format!("{rejected} rows can't be used. {reason}"),
    });
    FilledRows { used, failure }
}
