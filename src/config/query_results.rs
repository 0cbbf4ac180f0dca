//! The results of the queries in walpost.toml, kept from one reading of the file to the next.

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

/// The results, and when to run the queries again.
#[derive(Default)]
pub(crate) struct QueryResults {
    queried: Vec<QueriedSource>,
    last_rows: Arc<LastRows>,
    /// Whether the file was read before, so that there are running pipelines that can continue.
    has_begun: bool,
    /// When to retry a new query that failed.
    again: Option<Instant>,
    /// Whether queries must not be run.
    is_offline: bool,
}

/// A source and its results.
struct QueriedSource {
    source: QuerySource,
    /// When to run the query again.
    due: Instant,
    /// The last result, whether it could be used or not.
    last: Result<Vec<TextRow>, String>,
    /// The rows that were used from the last usable result.
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
    /// Several pipelines can share a topic reserved for Walpost, but only for the same purpose: a
    /// dead letter must not be mistaken for a checkpoint.
    Topic {
        name: String,
        usage: TopicUse,
    },
}

/// A function that returns the resources that a pipeline uses exclusively, or an error if the
/// pipeline is invalid.
pub(super) type Judge<'j> = &'j dyn Fn(&FilePipeline) -> Result<Vec<ExclusiveResource>, String>;

impl QueryResults {
    /// Creates an instance that runs no queries.
    pub(super) fn offline() -> Self {
        Self {
            is_offline: true,
            ..Self::default()
        }
    }

    /// Runs the queries of the file `path`, and returns their pipelines. A row whose pipeline needs
    /// a resource in `taken` is rejected. Also returns the errors of sources and rows that could
    /// not be used. If a source can't be used, its previous rows remain in use; at the start, rows
    /// that can't be used are skipped.
    ///
    /// # Errors
    /// Returns an error if a new source can't be used and the file was read before, or if rows that
    /// were used before are no longer valid with the current file.
    pub(super) fn read(
        &mut self,
        path: &Path,
        file: &File,
        env: Env<'_>,
        judge: Judge<'_>,
        mut taken: HashSet<ExclusiveResource>,
    ) -> Result<(Vec<FilePipeline>, Vec<String>), ConfigError> {
        let mut next = Vec::new();
        let (mut pipelines, mut failures) = (Vec::new(), Vec::new());
        for source in file.queries() {
            if self.is_offline {
                failures.push(format!("{}: not asked", source.describe(env)));
                continue;
            }
            let before = self.queried.iter().find(|of| of.source.asks_as(source));
            let before = before.map(|of| of.rows.clone());
            let last = query_rows(source, before.is_none(), env);
            let origin = Origin::Row {
                file: path.to_owned(),
                rows: Arc::clone(&self.last_rows),
                source: format!("{}: {}", source.describe(env), source.query),
            };
            let filled = |rows| filled(source, &origin, rows, judge, &taken);
            let FilledRow { mut used, failure } = match &last {
                Ok(rows) => filled(rows.clone()),
                Err(reason) => FilledRow {
                    used: Vec::new(),
                    failure: Some(reason.clone()),
                },
            };
            if let Some(reason) = failure {
                let refused = match before {
                    Some(rows) => {
                        let again = filled(rows);
                        used = again.used;
                        again.failure
                    }
                    None => self.has_begun.then(|| reason.clone()),
                };
                if let Some(reason) = refused {
                    self.again = Some(Instant::now() + source.every);
                    return Err(ConfigError::Source {
                        name: source.describe(env),
                        reason,
                    });
                }
                failures.push(format!("{}: {reason}", source.describe(env)));
            }
            let mut rows = Vec::with_capacity(used.len());
            for ValidRow { row, pipeline, own } in used {
                self.last_rows.set(pipeline.name(), &row);
                rows.push(row);
                pipelines.push(pipeline);
                taken.extend(own);
            }
            next.push(QueriedSource {
                source: source.clone(),
                due: Instant::now() + source.every,
                last,
                rows,
            });
        }
        (self.queried, self.has_begun, self.again) = (next, true, None);
        Ok((pipelines, failures))
    }

    /// Runs the queries that are due. Returns whether the file has to be read again.
    pub(super) fn have_changed(&mut self, env: Env<'_>) -> bool {
        let now = Instant::now();
        let mut have_changed = self.again.take_if(|at| *at <= now).is_some();
        for asked in self.queried.iter_mut().filter(|of| of.due <= now) {
            have_changed |= query_rows(&asked.source, false, env) != asked.last;
            asked.due = Instant::now() + asked.source.every;
        }
        have_changed
    }
}

impl ExclusiveResource {
    /// Returns the resources of other pipelines that conflict with this one.
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

    /// Returns a description of what two pipelines would share.
    pub(super) fn description(&self) -> &'static str {
        match self {
            Self::Name(_) => "name",
            Self::Slot { .. } => "slot in the same database",
            Self::Topic { .. } => "topic, one for checkpoints and one for dead letters",
        }
    }
}

impl fmt::Display for ExclusiveResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(_) => f.write_str("another pipeline has that name"),
            Self::Slot { slot, .. } => {
                write!(f, "another pipeline has slot {slot:?} in the same database")
            }
            Self::Topic { name, usage } => write!(
                f,
                "topic {name:?} is for {usage} here and for something else in another pipeline; name another"
            ),
        }
    }
}

struct FilledRow {
    used: Vec<ValidRow>,
    failure: Option<String>,
}

/// A row that defines a valid pipeline.
struct ValidRow {
    row: TextRow,
    pipeline: FilePipeline,
    own: Vec<ExclusiveResource>,
}

/// Returns the result of the query, sorted so that the order does not depend on the server.
fn query_rows(source: &QuerySource, is_new: bool, env: Env<'_>) -> Result<Vec<TextRow>, String> {
    let mut found = source.run(env)?;
    if found.as_superuser && is_new {
        warn!(
            "{}: it is asked as a superuser: who owns a table, view or function that the query uses can have code run with all \
             rights. Use a role that may read that table and nothing else",
            source.describe(env)
        );
    }
    found.rows.sort_unstable();
    Ok(found.rows)
}

/// Returns the names and slots that occur in several rows. None of these rows is used. Otherwise,
/// any role that can add a row could take over another pipeline's slot and checkpoint with a row
/// that sorts first.
fn shared<'p>(
    judged: impl Iterator<Item = &'p (FilePipeline, Vec<ExclusiveResource>)>,
) -> HashSet<ExclusiveResource> {
    let (mut seen, mut shared) = (HashSet::new(), HashSet::new());
    for own in judged.flat_map(|(_, own)| own) {
        if !matches!(own, ExclusiveResource::Topic { .. }) && !seen.insert(own) {
            shared.insert(own.clone());
        }
    }
    shared
}

/// Returns the rows that define valid pipelines, and the error of the first row that does not.
fn filled(
    source: &QuerySource,
    origin: &Origin,
    rows: Vec<TextRow>,
    judge: Judge<'_>,
    taken: &HashSet<ExclusiveResource>,
) -> FilledRow {
    let (mut used, mut failure, mut refused) = (Vec::new(), None, 0);
    let judged = rows.into_iter().map(|row| {
        let found = source.fill_template(&row).and_then(|filled| {
            let mut pipeline = FilePipeline::from_template(filled)?;
            pipeline.origin = origin.clone();
            let own = judge(&pipeline)?;
            Ok((pipeline, own))
        });
        (row, found)
    });
    let judged: Vec<_> = judged.collect();
    let shared = shared(judged.iter().filter_map(|(_, found)| found.as_ref().ok()));
    let mut in_rows = HashSet::new();
    for (row, found) in judged {
        let found = found.and_then(|(pipeline, own)| {
            let is_taken = |other: &ExclusiveResource| {
                taken.contains(other) || shared.contains(other) || in_rows.contains(other)
            };
            let is_free = |own: &ExclusiveResource| !own.excluded().iter().any(is_taken);
            match own.iter().find(|own| !is_free(own)) {
                Some(own) => Err(own.to_string()),
                None => Ok((pipeline, own)),
            }
        });
        match found {
            Ok((pipeline, own)) => {
                in_rows.extend(own.clone());
                used.push(ValidRow { row, pipeline, own });
            }
            Err(reason) => {
                refused += 1;
                failure.get_or_insert_with(|| format!("{}: {reason}", source.row_name(&row)));
            }
        }
    }
    let failure = failure.map(|reason| match refused {
        1 => reason,
        _ => format!("{refused} rows can't be used. {reason}"),
    });
    FilledRow { used, failure }
}
