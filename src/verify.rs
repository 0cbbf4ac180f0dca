//! Compares the table with the topics: finds events that are missing, repeated, misplaced or out of
//! order.
//!
//! ```text
//! table ──row──▶ spill ──┐                       ┌──▶ missing, repeated, misplaced
//!                        ├── by the event's id ──┤
//! topics ─record▶ spill ─┘                       └─ first of its event ─▶ journal ──▶ order, gaps
//! ```
//!
//! Each row and record is reduced to a few bytes, which are kept in memory up to a limit and in
//! temporary files beyond it. Neither the table nor the topics have to fit into memory, and both
//! are read once. The table is read first, because its rows determine the topics.
//!
//! An event that is not in a topic may not have been delivered yet. Therefore, before reading the
//! ends of the topics, `verify` waits until the slot's confirmed position covers the contents of
//! the table. After that, an event that is not in a topic is missing.

use std::io;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tracing::{debug, info};

pub(crate) use self::report::{Counts, Finding};

use self::context::{End, VerifyContext, Whole};
use self::dead_letters::DeadLetters;
use self::spill::{Journal, Spill};
use crate::kafka::reader::{ReadError, TopicReader};
use crate::model::lsn::Lsn;
use crate::outbox::columns::MappingError;
use crate::pipeline::settings::{PipelineSettings, SinkSettings};
use crate::postgres::catalog::journal::{Action, LEFT_PUBLICATION};
use crate::postgres::catalog::{Catalog, CatalogError, Observed, Problem, Rows, SnapshotRecord};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::Outbox;
use crate::progress::Progress;

mod context;
mod dead_letters;
mod entry;
mod matching;
mod order;
mod report;
mod spill;
mod table;
mod topics;

/// How much earlier a record's time may be than that of its row, because the two machines' clocks
/// may differ.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(600);
/// A note about missing events if the settings send no dead letters.
const UNKNOWN_DEAD_LETTERS: &str = "these settings send no dead letters. If walpost run has others (on_oversize, on_unroutable, \
    dead_letter_topic), its dead letters can be among the missing: verify with the same settings, best from the same file";
/// The interval at which the slot is queried.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How often the process that reads the slot is asked to confirm its position.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);

/// What to verify, and how.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The rows to compare.
    pub range: Range,
    /// Topics that are read although no row belongs to them.
    pub also: Vec<String>,
    /// How long to wait for the contents of the table to be delivered.
    pub wait: Duration,
    /// Memory for rows and records, in bytes.
    pub memory: u64,
    /// Whether records whose events are not in the table are reported individually instead of only
    /// being counted.
    pub strict: bool,
}

/// Rows selected by their time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Range {
    /// The column, or `created_at` if `None`.
    pub column: Option<String>,
    /// The earliest time, inclusive.
    pub since: Option<jiff::Timestamp>,
    /// The latest time, exclusive.
    pub until: Option<jiff::Timestamp>,
}

impl Range {
    /// Returns whether some rows are excluded.
    #[must_use]
    pub(crate) fn is_bounded(&self) -> bool {
        self.since.is_some() || self.until.is_some()
    }
}

/// The reason why nothing could be verified.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VerifyError {
    /// There is no table to compare the topics with.
    #[error(
        "the outbox is of messages, and there is no table to compare the topics with. verify requires outbox = \"table\""
    )]
    NoTable,
    /// Only a single table can be compared.
    #[error(
        "the outbox is several tables, {0}, and verify compares one with the topics. Name it: --table SCHEMA.TABLE"
    )]
    Several(TablePatterns),
    /// There are no topics.
    #[error("sink is stdout, and there are no topics to read. verify requires sink = \"kafka\"")]
    NoTopics,
    /// Records can't be identified.
    #[error(
        "no header has the event's id, so records and rows can't be matched. Add one: headers = {{ id = \
         \"{{id}}\" }}. Only records that are made from then on will have it"
    )]
    NoIdHeader,
    /// The rows' times are unknown.
    #[error(
        "column {column:?} of table {table} {found}, and --since and --until need one with the rows' times. Name it with \
         --time-column"
    )]
    NoTime {
        table: TableName,
        column: String,
        /// A description of the problem.
        found: &'static str,
    },
    /// The role may not read the table.
    #[error(
        "role {role:?} may not read table {table}. Grant it: GRANT USAGE ON SCHEMA {schema} TO {name}; GRANT SELECT ON \
         {table} TO {name}", schema = identifier(&.table.schema), name = identifier(.role)
    )]
    Denied { role: String, table: TableName },
    /// The table does not exist.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// The catalog query failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The settings don't match the table.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The topics can't be read.
    #[error(transparent)]
    Topics(#[from] ReadError),
    /// A temporary file or the findings can't be written.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Report {
    /// The number of findings of each kind.
    pub counts: Counts,
    /// Limitations of the counts.
    pub notes: Vec<String>,
}

/// A function that receives the findings.
pub(crate) type Tell<'t> = &'t mut dyn FnMut(&Finding) -> io::Result<()>;

/// Counts and reports findings.
pub(crate) struct Reporter<'t> {
    counts: Counts,
    notes: Vec<String>,
    tells_unexpected: bool,
    tell: Tell<'t>,
}

impl Reporter<'_> {
    fn add_finding(&mut self, finding: Finding) -> io::Result<()> {
        (self.tell)(&finding)
    }

    fn unexpected(&mut self, finding: impl FnOnce() -> Finding) -> io::Result<()> {
        match self.tells_unexpected {
            true => self.add_finding(finding()),
            false => Ok(()),
        }
    }

    fn add_note(&mut self, note: String) {
        self.notes.push(note);
    }
}

/// Compares the topics of a pipeline with its table.
///
/// # Errors
/// Returns an error if something can't be read.
pub(crate) fn verify(
    runtime: &Runtime,
    settings: &PipelineSettings,
    options: &Options,
    tell: Tell<'_>,
) -> Result<Report, VerifyError> {
    let table = match &settings.target.outbox {
        Outbox::Table(table) | Outbox::OneOf { table, .. } => table,
        Outbox::Tables(tables) => return Err(VerifyError::Several(tables.clone())),
        Outbox::Messages { .. } => return Err(VerifyError::NoTable),
    };
    let SinkSettings::Kafka {
        properties,
        credentials,
        ..
    } = &settings.sink
    else {
        return Err(VerifyError::NoTopics);
    };
    let name = format!("walpost-verify-{}", settings.name);
    let reader = TopicReader::new(properties, credentials, &name).map_err(ReadError::from)?;
    let mut reporter = Reporter {
        counts: Counts::default(),
        notes: Vec::new(),
        tells_unexpected: options.strict,
        tell,
    };
    // The memory is shared between entries and the journal, which are filled at the same time.
    // Transactions are processed afterwards.
    let mut entries = Spill::new(options.memory / 4 * 3);
    let mut journal = Journal::new(options.memory / 4);
    let database = runtime.block_on(async {
        let catalog = Catalog::open_for_rows(&settings.postgres, settings.row_bytes_max).await?;
        let look = DatabaseReader {
            settings,
            table,
            options,
        };
        let read = look
            .read_snapshot(&catalog, &mut entries, &mut reporter)
            .await;
        read.map_err(|error| match error {
            VerifyError::Catalog(error) => error.with_commands(&settings.target.commands).into(),
            error => error,
        })
    })?;
    let mut names = database.read.topics;
    for topic in &options.also {
        if !names.contains(topic) {
            names.push(topic.clone());
        }
    }
    let plan = topics::Plan {
        reader: &reader,
        id: &database.id,
        // Other timestamps are unrelated to the time when a record was produced.
        since: match settings.outbox.timestamp {
            None => options
                .range
                .since
                .map(|since| millis(since, CLOCK_SKEW_MAX)),
            Some(_) => None,
        },
        is_production_time: settings.outbox.timestamp.is_none(),
        deadline: Instant::now() + options.wait,
    };
    let read = plan.read(names, &mut entries, &mut journal, &mut reporter);
    let read = read.map_err(|error| match error {
        VerifyError::Topics(error) => VerifyError::Topics(runtime.block_on(reader.explain(error))),
        error => error,
    })?;
    let dead_letters = DeadLetters::read(
        settings,
        &reader,
        &database.id,
        usize::try_from(options.memory / 8).unwrap_or(usize::MAX),
        plan.deadline,
        &mut reporter,
    );
    let context = VerifyContext {
        dead_letters,
        topics: read.topics,
        places: read.places,
        is_range: options.range.is_bounded(),
        snapshot_before: database.read.before,
        delivered: database.delivered,
        whole: Whole {
            after: database.gaps_after.max(read.whole_after),
            before: database.confirmed,
        },
        copies: database.journal.copies,
    };
    let firsts =
        matching::bring_together(entries, reporter.counts.records, &context, &mut reporter)?;
    order::check_order(
        journal,
        &firsts,
        options.memory / 4,
        &context,
        &mut reporter,
    )?;
    if reporter.counts.missing > 0 {
        reporter.notes.extend(database.journal.given_up);
        if !settings.dead_letters.is_enabled() {
            reporter.add_note(UNKNOWN_DEAD_LETTERS.to_owned());
        }
    }
    Ok(Report {
        counts: reporter.counts,
        notes: reporter.notes,
    })
}

fn millis(at: jiff::Timestamp, before: Duration) -> i64 {
    let before = i64::try_from(before.as_millis()).unwrap_or(i64::MAX);
    at.as_millisecond().saturating_sub(before).max(0)
}

/// Reads what the verification needs from the database.
struct DatabaseReader<'l> {
    settings: &'l PipelineSettings,
    table: &'l TableName,
    options: &'l Options,
}

/// The result of reading the database.
struct Database {
    read: table::Read,
    /// The header that contains the event's ID.
    id: String,
    delivered: End,
    /// Transactions that committed before this LSN are completely in the topics.
    confirmed: Lsn,
    /// Transactions that committed up to this LSN are not searched for gaps.
    gaps_after: Lsn,
    journal: JournalFindings,
}

/// The findings in the journal.
#[derive(Default)]
struct JournalFindings {
    /// Descriptions of events that were intentionally not delivered. Their rows can't be
    /// determined, because the WAL position of a row is unknown.
    given_up: Vec<String>,
    /// The commit positions of copied rows. A copy that was restarted leaves rows of the previous
    /// copy.
    copies: Vec<Lsn>,
}

impl DatabaseReader<'_> {
    async fn read_snapshot(
        &self,
        catalog: &Catalog,
        entries: &mut Spill,
        reporter: &mut Reporter<'_>,
    ) -> Result<Database, VerifyError> {
        let (settings, table) = (self.settings, self.table);
        let observed = catalog.observe(&settings.target).await?;
        let Some(found) = &observed.table else {
            return Err(VerifyError::Problem(Problem::NoTable {
                table: table.clone(),
                init: settings.target.init_table(table),
                database: observed.database,
            }));
        };
        let plan = table::Plan::new(settings, table, found, &self.options.range)?;
        if catalog.select_grant(table).await?.is_some() {
            return Err(VerifyError::Denied {
                role: observed.user,
                table: table.clone(),
            });
        }
        let rows = match self.options.range.is_bounded() {
            true => Rows::None,
            false => catalog.rows(table).await?,
        };
        let total = match rows {
            Rows::About(rows) => Some(rows),
            Rows::None | Rows::Denied { .. } => None,
        };
        let progress = Progress::new("rows read", total);
        let read = plan.read(catalog, progress, entries, reporter).await?;
        let gaps_after = self.note_omissions(&observed, reporter);
        let (delivered, confirmed) = self.wait(catalog, read.after, reporter).await?;
        Ok(Database {
            read,
            id: plan.id,
            delivered,
            confirmed,
            gaps_after,
            journal: self.journal(catalog).await?,
        })
    }

    async fn journal(&self, catalog: &Catalog) -> Result<JournalFindings, VerifyError> {
        let settings = self.settings;
        let entries = catalog.journal(&settings.name, &settings.target).await;
        let entries = match entries {
            Ok(entries) => entries,
            // A database that was set up manually may have no journal, or none that this role can
            // read.
            Err(CatalogError::NoJournal { .. }) => Vec::new(),
            // insufficient_privilege
            Err(CatalogError::Server(error)) if error.code == "42501" => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let mut journal = JournalFindings::default();
        for entry in entries {
            let (from, to) = (entry.from.unwrap_or_default(), entry.to.unwrap_or_default());
            let what = match entry.action {
                Action::Skip => "skipped",
                Action::DropSlot if entry.detail.get(LEFT_PUBLICATION).is_some() => "not published",
                Action::DropSlot => "dropped with their slot",
                Action::Snapshot if entry.detail[SnapshotRecord::STATE] == SnapshotRecord::DUE => {
                    continue;
                }
                Action::Snapshot => {
                    journal.copies.push(Lsn(to.0.saturating_sub(1)));
                    continue;
                }
                Action::Replay | Action::SetAside => continue,
            };
            journal.given_up.push(format!(
                "events committed between {from} and {to} were {what} at {} by {}: if they were not sent again, they are \
                 among the missing",
                entry.at, entry.by_role
            ));
        }
        Ok(journal)
    }

    /// Notes configurations that cause rows never to be delivered, or event numbers to be missing
    /// in the topics. Returns the commit after which gaps are significant.
    fn note_omissions(&self, observed: &Observed, reporter: &mut Reporter<'_>) -> Lsn {
        let target = &self.settings.target;
        let Some(publication) = &observed.publication else {
            return Lsn::ZERO;
        };
        if let Some(problem @ Problem::NotPublished { .. }) = observed.publication_problem(target) {
            reporter.add_note(problem.to_string());
        }
        let name = &target.publication;
        if let Some(filter) = &publication.row_filter {
            reporter.add_note(format!(
                "publication {name:?} leaves out rows that don't fulfil {filter}: those are missing"
            ));
        }
        if publication.more_than_inserts {
            reporter.add_note(format!(
                "publication {name:?} publishes more than inserts, so gaps were not searched for"
            ));
            return Lsn(u64::MAX);
        }
        let is_one_topic = self.settings.outbox.topic.constant().is_some();
        if target.outbox.is_several() && !is_one_topic {
            reporter.add_note(
                "a transaction's events of other tables may be in other topics, so gaps were not searched for"
                    .to_owned(),
            );
            return Lsn(u64::MAX);
        }
        Lsn::ZERO
    }

    /// Waits until the contents of the table are delivered, as long as a process reads the slot.
    /// Returns whether they are, and the confirmed position.
    async fn wait(
        &self,
        catalog: &Catalog,
        goal: Lsn,
        reporter: &mut Reporter<'_>,
    ) -> Result<(End, Lsn), VerifyError> {
        let slot = &self.settings.target.slot;
        let deadline = Instant::now() + self.options.wait;
        let mut is_told = false;
        let mut request_due = Instant::now();
        loop {
            let Some(found) = catalog.slot(slot).await? else {
                reporter.add_note(format!(
                    "replication slot {slot:?} does not exist: nothing that is not there will come"
                ));
                return Ok((End::Reached, goal));
            };
            let confirmed = found.confirmed;
            if found.wal_status.as_deref() == Some("lost") {
                reporter.add_note(format!(
                    "replication slot {slot:?} is lost: nothing that is not there will come"
                ));
                return Ok((End::Reached, confirmed));
            }
            if confirmed >= goal {
                return Ok((End::Reached, confirmed));
            }
            if found.active_pid.is_none() || Instant::now() >= deadline {
                let why = match found.active_pid {
                    None => "nobody reads it",
                    Some(_) => "that took longer than --wait",
                };
                reporter.add_note(format!(
                    "replication slot {slot:?} is confirmed up to {confirmed}, the table was read at {goal}, and {why}: what \
                     is not there counts as pending, since it may still come"
                ));
                return Ok((End::NotReached, confirmed));
            }
            if !std::mem::replace(&mut is_told, true) {
                info!(slot, %confirmed, %goal, "waiting for the table's rows to be delivered");
            }
            if Instant::now() >= request_due {
                request_due = Instant::now() + REQUEST_INTERVAL;
                if let Err(error) = catalog.request_position(slot).await {
                    debug!(%error, "failed to request that the position is confirmed");
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests;
