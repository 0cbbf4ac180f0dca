//! What the queries of walpost.toml have answered, from one reading of it to the next.

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

/// The answers, and what is to be asked again.
#[derive(Default)]
pub(crate) struct Answers {
    asked: Vec<Asked>,
    last_rows: Arc<LastRows>,
    /// Something was read before, so that there are pipelines that can go on as they are.
    has_begun: bool,
    /// Something new was not answered: when it is tried again.
    again: Option<Instant>,
    /// Nobody is asked.
    is_offline: bool,
}

/// A source, and what it has answered.
struct Asked {
    source: QuerySource,
    /// When it is asked again.
    due: Instant,
    /// The last answer, whether it could be used or not.
    last: Result<Vec<TextRow>, String>,
    /// What could be used of the last answer that could.
    rows: Vec<TextRow>,
}

/// What no two pipelines have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Own {
    Name(String),
    Slot {
        slot: String,
        database: String,
    },
    /// Several pipelines can share a topic of Walpost's own, but only for the same purpose: a dead letter must not be taken for
    /// a checkpoint.
    Topic {
        name: String,
        usage: TopicUse,
    },
}

/// What a pipeline has to itself, or why it can't be one.
pub(super) type Judge<'j> = &'j dyn Fn(&FilePipeline) -> Result<Vec<Own>, String>;

impl Answers {
    /// For who may connect to nothing.
    pub(super) fn offline() -> Self {
        Self {
            is_offline: true,
            ..Self::default()
        }
    }

    /// Asks the sources of the file `path`, and gives their pipelines, none of which has what others have that is `taken`. Beside
    /// them, what could not be used. A source that can't be used is as it was before; at the start it is without what can't be used.
    ///
    /// # Errors
    /// There was no such source before, and it is not the start; or rows that were used before can't be with what the file says now.
    pub(super) fn read(
        &mut self,
        path: &Path,
        file: &File,
        env: Env<'_>,
        judge: Judge<'_>,
        mut taken: HashSet<Own>,
    ) -> Result<(Vec<FilePipeline>, Vec<String>), ConfigError> {
        let mut next = Vec::new();
        let (mut pipelines, mut failures) = (Vec::new(), Vec::new());
        for source in file.queries() {
            if self.is_offline {
                failures.push(format!("{}: not asked", source.describe(env)));
                continue;
            }
            let before = self.asked.iter().find(|of| of.source.asks_as(source));
            let before = before.map(|of| of.rows.clone());
            let last = ask(source, before.is_none(), env);
            let origin = Origin::Row {
                file: path.to_owned(),
                rows: Arc::clone(&self.last_rows),
                source: format!("{}: {}", source.describe(env), source.query),
            };
            let filled = |rows| filled(source, &origin, rows, judge, &taken);
            let Filled { mut used, failure } = match &last {
                Ok(rows) => filled(rows.clone()),
                Err(reason) => Filled {
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
            for Used { row, pipeline, own } in used {
                self.last_rows.set(pipeline.name(), &row);
                rows.push(row);
                pipelines.push(pipeline);
                taken.extend(own);
            }
            next.push(Asked {
                source: source.clone(),
                due: Instant::now() + source.every,
                last,
                rows,
            });
        }
        (self.asked, self.has_begun, self.again) = (next, true, None);
        Ok((pipelines, failures))
    }

    /// Asks those whose time has come, and says whether there is something to read.
    pub(super) fn have_changed(&mut self, env: Env<'_>) -> bool {
        let now = Instant::now();
        let mut have_changed = self.again.take_if(|at| *at <= now).is_some();
        for asked in self.asked.iter_mut().filter(|of| of.due <= now) {
            have_changed |= ask(&asked.source, false, env) != asked.last;
            asked.due = Instant::now() + asked.source.every;
        }
        have_changed
    }
}

impl Own {
    /// Returns those of other pipelines that exclude this one.
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

    /// What two pipelines would share.
    pub(super) fn what(&self) -> &'static str {
        match self {
            Self::Name(_) => "name",
            Self::Slot { .. } => "slot in the same database",
            Self::Topic { .. } => "topic, one for checkpoints and one for dead letters",
        }
    }
}

impl fmt::Display for Own {
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

struct Filled {
    used: Vec<Used>,
    failure: Option<String>,
}

/// A row that defines a pipeline.
struct Used {
    row: TextRow,
    pipeline: FilePipeline,
    own: Vec<Own>,
}

/// What the source answers, in an order that does not depend on the server.
fn ask(source: &QuerySource, is_new: bool, env: Env<'_>) -> Result<Vec<TextRow>, String> {
    let mut found = source.ask(env)?;
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

/// Returns the names and slots that more than one row has. None of these rows is used: otherwise any role that can add a
/// row could take over another pipeline's slot and checkpoint with a row that sorts first.
fn shared<'p>(judged: impl Iterator<Item = &'p (FilePipeline, Vec<Own>)>) -> HashSet<Own> {
    let (mut seen, mut shared) = (HashSet::new(), HashSet::new());
    for own in judged.flat_map(|(_, own)| own) {
        if !matches!(own, Own::Topic { .. }) && !seen.insert(own) {
            shared.insert(own.clone());
        }
    }
    shared
}

/// The rows that are pipelines, and why the first one that isn't is none.
fn filled(
    source: &QuerySource,
    origin: &Origin,
    rows: Vec<TextRow>,
    judge: Judge<'_>,
    taken: &HashSet<Own>,
) -> Filled {
    let (mut used, mut failure, mut refused) = (Vec::new(), None, 0);
    let judged = rows.into_iter().map(|row| {
        let found = source.fill(&row).and_then(|filled| {
            let mut pipeline = FilePipeline::of_template(filled)?;
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
            let is_taken = |other: &Own| {
                taken.contains(other) || shared.contains(other) || in_rows.contains(other)
            };
            let is_free = |own: &Own| !own.excluded().iter().any(is_taken);
            match own.iter().find(|own| !is_free(own)) {
                Some(own) => Err(own.to_string()),
                None => Ok((pipeline, own)),
            }
        });
        match found {
            Ok((pipeline, own)) => {
                in_rows.extend(own.clone());
                used.push(Used { row, pipeline, own });
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
    Filled { used, failure }
}
