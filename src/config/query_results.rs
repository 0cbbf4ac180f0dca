//! The results of the queries in walpost.toml, which are kept when the file is reloaded.

use std::collections::HashSet;
use std::path::Path;
use std::time::Instant;

use tracing::warn;

use super::Env;
use super::error::ConfigError;
use super::exclusive::{ExclusiveResource, SourceRows, ValidRow};
use super::file::{File, FilePipeline, Origin};
use super::query::{DefiningRows, QuerySource};
use crate::postgres::text_rows::TextRow;

/// The results of all queries, and when to run each query again.
#[derive(Default)]
pub(crate) struct QueryResults {
    queried: Vec<QueriedSource>,
    /// The names of the pipelines that are defined by the rows currently in use.
    running: HashSet<String>,
    /// The rows that define pipelines.
    rows: DefiningRows,
    /// Whether the file has been read successfully at least once. If so, a reload is rejected if a
    /// new query fails, and the running pipelines continue.
    was_read: bool,
    /// When to retry a reload that was rejected because a query failed.
    retry_at: Option<Instant>,
    /// Whether to run no queries and report their sources as failed.
    is_offline: bool,
}

/// A source that runs a query, and the results of the query.
struct QueriedSource {
    source: QuerySource,
    /// When to run the query again.
    due: Instant,
    /// The last result, even if its rows were rejected.
    last: Result<Vec<TextRow>, String>,
    /// The rows that currently define pipelines, from the last result that could be used.
    rows: Vec<TextRow>,
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

    /// Runs the queries in the file at `path`. Returns the pipelines that the resulting rows
    /// define, and errors about sources and rows that could not be used.
    ///
    /// If a source can't be used, its previous rows remain in use. At startup, rows that can't be
    /// used are skipped. A row is also unusable if it conflicts with a name, slot or topic in
    /// `in_files`.
    ///
    /// # Errors
    /// Returns an error if a source that was added in a reload can't be used, or if rows that
    /// define running pipelines are no longer valid or conflict with pipelines in files.
    pub(super) fn read(
        &mut self,
        path: &Path,
        file: &File,
        env: Env<'_>,
        validate: Validate<'_>,
        in_files: &HashSet<ExclusiveResource>,
    ) -> Result<(Vec<FilePipeline>, Vec<String>), ConfigError> {
        let sources: Vec<_> = file.queries().collect();
        if self.is_offline {
            let not_queried =
                |source: &&QuerySource| format!("{}: not queried", source.describe(env));
            return Ok((Vec::new(), sources.iter().map(not_queried).collect()));
        }
        let results: Vec<_> = sources
            .iter()
            .map(|source| query_rows(source, self.previous(source).is_none(), env))
            .collect();
        let mut used = Vec::with_capacity(sources.len());
        for (source, result) in sources.iter().zip(&results) {
            let rows = self.choose_rows(source, result, validate, in_files);
            used.push(rows.map_err(|reason| {
                self.retry_at = Some(Instant::now() + source.every);
                ConfigError::Source {
                    name: source.describe(env),
                    reason,
                }
            })?);
        }
        let (mut pipelines, mut failures) = (Vec::new(), Vec::new());
        self.queried.clear();
        self.running.clear();
        for ((source, last), used) in sources.into_iter().zip(results).zip(used) {
            let failure = used.failure();
            failures.extend(failure.map(|reason| format!("{}: {reason}", source.describe(env))));
            let mut rows = Vec::with_capacity(used.rows.len());
            for ValidRow {
                row, mut pipeline, ..
            } in used.rows
            {
                pipeline.origin = Origin::Row {
                    file: path.to_owned(),
                    row: self.rows.set(pipeline.name(), source.id(), &row),
                    source: format!("{}: {}", source.describe(env), source.query),
                };
                self.running.insert(pipeline.name().to_owned());
                pipelines.push(pipeline);
                rows.push(row);
            }
            self.queried.push(QueriedSource {
                source: source.clone(),
                due: Instant::now() + source.every,
                last,
                rows,
            });
        }
        self.rows.remove_unused();
        (self.was_read, self.retry_at) = (true, None);
        Ok((pipelines, failures))
    }

    /// Chooses between the rows that a source's query has just returned and the rows that are
    /// currently in use.
    ///
    /// # Errors
    /// Returns an error message in the cases described in [`Self::read`].
    fn choose_rows(
        &self,
        source: &QuerySource,
        result: &Result<Vec<TextRow>, String>,
        validate: Validate<'_>,
        in_files: &HashSet<ExclusiveResource>,
    ) -> Result<SourceRows, String> {
        let mut found = match result {
            Ok(rows) => fill_rows(source, rows, validate),
            Err(reason) => SourceRows {
                rejected: vec![reason.clone()],
                ..SourceRows::default()
            },
        };
        let fatal = match self.previous(source) {
            Some(previous) => {
                let previous = fill_rows(source, &previous.rows, validate);
                found.previous_failure = previous.failure();
                found.previous = Some(previous.rows);
                found.replace_if_rejected()
            }
            None if self.was_read => found.failure(),
            None => None,
        };
        if let Some(reason) = fatal {
            return Err(reason);
        }
        found.reject_conflicts(in_files, &self.running)?;
        Ok(found)
    }

    /// Returns the stored results of the source's query, or `None` if no results are stored.
    fn previous(&self, source: &QuerySource) -> Option<&QueriedSource> {
        let id = source.id();
        self.queried
            .iter()
            .find(|queried| queried.source.id() == id)
    }

    /// Runs the queries that are due. Returns true if the file must be read again because a result
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

/// Fills the template with each row's values. Returns the rows that define valid pipelines, and the
/// reasons why the other rows were rejected.
fn fill_rows(source: &QuerySource, rows: &[TextRow], validate: Validate<'_>) -> SourceRows {
    let mut filled = SourceRows::default();
    for row in rows {
        let name = source.row_name(row);
        let found = source.fill_template(row).and_then(|filled| {
            let pipeline = FilePipeline::from_template(filled)?;
            let resources = validate(&pipeline)?;
            Ok((pipeline, resources))
        });
        match found {
            Ok((pipeline, resources)) => filled.rows.push(ValidRow {
                name,
                row: row.clone(),
                pipeline,
                resources,
            }),
            Err(reason) => filled.rejected.push(format!("{name}: {reason}")),
        }
    }
    filled.remove_duplicates();
    filled
}
