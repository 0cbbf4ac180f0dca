//! Compares the table with the topics to find events that are missing, repeated, misplaced or out
//! of order.
//!
//! ```text
//! table ──row──▶ spill ──┐                     ┌──▶ missing, repeated, misplaced
//!                        ├─ by the event's ID ─┤
//! topics ─record▶ spill ─┘                     └─ event's first record ─▶ journal ──▶ order, gaps
//! ```
//!
//! Each row and record is reduced to a few bytes, which are kept in memory until a limit is
//! reached, and in temporary files after that. Neither the table nor the topics have to fit into
//! memory, and both are read only once. The table is read first, because its rows determine the
//! topics.
//!
//! An event that is not in a topic may not have been delivered yet. Therefore, before it queries
//! the end offsets of the topics, `verify` waits until the slot's confirmed position covers the
//! contents of the table. An event that is not in a topic after this wait is missing.

use std::io;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tracing::{debug, info};

pub(crate) use self::report::{Counts, Finding};

use self::context::{CompleteRange, End, VerifyContext};
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

/// Maximum time by which a record's timestamp may precede the timestamp of its row, because the two
/// timestamps may come from different clocks.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(600);
/// A note that is added if dead letters are not enabled in the settings of `verify`. If they are
/// enabled in the settings of `walpost run`, events that became dead letters may be counted as
/// missing.
const UNKNOWN_DEAD_LETTERS: &str = "dead letters are not enabled in these settings. If walpost run uses other settings \
 (on_oversize, on_unroutable, dead_letter_topic), events that became dead letters may be counted as missing: run verify \
 with the same settings, preferably from the same file";
/// The interval at which the slot is queried.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How often `verify` requests that the process reading the slot confirm the WAL position that it
/// has reached.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);

/// The options of a verification.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The rows to compare.
    pub range: Range,
    /// Additional topics to read, even if no row belongs to them.
    pub also: Vec<String>,
    /// How long to wait for the contents of the table to be delivered.
    pub wait: Duration,
    /// The memory limit for rows and records, in bytes.
    pub memory: u64,
    /// Whether to report each record whose event is not in the table, instead of only counting
    /// these records.
    pub strict: bool,
}

/// A range of times that selects the rows to compare.
#[derive(Clone, Debug, Default)]
pub(crate) struct Range {
    /// The column that contains the time; `None` for `created_at`.
    pub column: Option<String>,
    /// The earliest time, inclusive.
    pub since: Option<jiff::Timestamp>,
    /// The latest time, exclusive.
    pub until: Option<jiff::Timestamp>,
}

impl Range {
    /// Returns whether an earliest or a latest time is set.
    #[must_use]
    pub(crate) fn is_bounded(&self) -> bool {
        self.since.is_some() || self.until.is_some()
    }
}

/// An error that prevents verification.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VerifyError {
    /// The outbox has no table to compare the topics with.
    #[error(
        "the outbox uses logical decoding messages, so there is no table to compare the topics with. verify requires \
         outbox = \"table\""
    )]
    NoTable,
    /// The outbox has several tables, but only a single table can be compared.
    #[error(
        "the outbox has several tables ({0}), but verify compares a single table with the topics. Specify the table: \
         --table SCHEMA.TABLE"
    )]
    Several(TablePatterns),
    /// The sink has no topics.
    #[error("the sink is stdout, so there are no topics to read. verify requires sink = \"kafka\"")]
    NoTopics,
    /// Records can't be matched with rows, because no header contains the event's ID.
    #[error(
        "no header contains the event's id, so records can't be matched with rows. Add such a header: headers = {{ id = \
         \"{{id}}\" }}. Only records created after that will contain the header"
    )]
    NoIdHeader,
    /// The table has no suitable column with the time of each row.
    #[error(
        "{found}, but --since and --until require a column with the time of each row. Specify the column with \
         --time-column"
    )]
    NoTime {
        /// A description of the problem, which includes the column and the table.
        found: String,
    },
    /// The role is not allowed to read the table.
    #[error(
        "role {role:?} is not allowed to read table {table}. Grant the privilege: GRANT USAGE ON SCHEMA {schema} TO \
         {name}; GRANT SELECT ON \
         {table} TO {name}", schema = identifier(&.table.schema), name = identifier(.role)
    )]
    Denied { role: String, table: TableName },
    /// The table does not exist.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// A catalog query failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The settings don't match the table.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The topics can't be read.
    #[error(transparent)]
    Topics(#[from] ReadError),
    /// Writing a temporary file or a finding failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Report {
    /// The number of findings of each kind.
    pub counts: Counts,
    /// Notes that an operator needs in order to interpret the counts.
    pub notes: Vec<String>,
}

/// A function that is called with each finding.
pub(crate) type Tell<'t> = &'t mut dyn FnMut(&Finding) -> io::Result<()>;

/// Counts and reports findings.
pub(crate) struct Reporter<'t> {
    counts: Counts,
    notes: Vec<String>,
    reports_unexpected: bool,
    on_finding: Tell<'t>,
}

impl Reporter<'_> {
    fn add_finding(&mut self, finding: Finding) -> io::Result<()> {
        (self.on_finding)(&finding)
    }

    fn unexpected(&mut self, finding: impl FnOnce() -> Finding) -> io::Result<()> {
        match self.reports_unexpected {
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
/// Returns an error if the table, the journal or a topic can't be read.
pub(crate) fn verify(
    runtime: &Runtime,
    settings: &PipelineSettings,
    options: &Options,
    on_finding: Tell<'_>,
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
        reports_unexpected: options.strict,
        on_finding,
    };
    // The memory limit is divided between two collections that are filled at the same time:
    // `entries`, with the rows and records, and `journal`, with the positions of the records.
    // Transactions are processed afterwards, when this memory has been released.
    let mut entries = Spill::new(options.memory / 4 * 3, matching::EVENTS);
    let mut journal = Journal::new(options.memory / 4);
    let database = runtime.block_on(async {
        let catalog = Catalog::open_for_rows(&settings.postgres, settings.row_bytes_max).await?;
        let database_reader = DatabaseReader {
            settings,
            table,
            options,
        };
        let read = database_reader
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
        // If a record's timestamp comes from a column, it does not show when the record was
        // produced.
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
        complete_range: CompleteRange {
            after: database.gaps_after.max(read.complete_after),
            before: database.confirmed,
        },
        copies: database.journal.copies,
    };
    let firsts =
        matching::match_entries(entries, reporter.counts.records, &context, &mut reporter)?;
    order::check_order(
        journal,
        &firsts,
        options.memory / 2,
        &context,
        &mut reporter,
    )?;
    if reporter.counts.missing > 0 {
        reporter.notes.extend(database.journal.undelivered);
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

/// Reads the data that a verification needs from the database.
struct DatabaseReader<'l> {
    settings: &'l PipelineSettings,
    table: &'l TableName,
    options: &'l Options,
}

/// The data read from the database.
struct Database {
    read: table::Read,
    /// The header that contains the event's ID.
    id: String,
    delivered: End,
    /// All events of transactions that committed before this LSN are in the topics.
    confirmed: Lsn,
    /// Transactions that committed at or before this LSN are not searched for gaps in their event
    /// numbers.
    gaps_after: Lsn,
    journal: JournalFindings,
}

/// Information from the journal that affects the verification's result.
#[derive(Default)]
struct JournalFindings {
    /// Descriptions of events that were intentionally not delivered. The rows of these events can't
    /// be identified, because the WAL position of a row is unknown.
    undelivered: Vec<String>,
    /// The commit positions in the records of copied rows. If a copy was restarted, the list also
    /// contains the position that the previous attempt used, because the records of that attempt
    /// remain in the topics.
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
            // A database that was set up manually may not have a journal, or the role that `verify`
            // uses may not have the privilege to read the journal.
            Err(CatalogError::NoJournal { .. }) => Vec::new(),
            // insufficient_privilege
            Err(CatalogError::Server(error)) if error.code == "42501" => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let mut journal = JournalFindings::default();
        for entry in entries {
            let (from, to) = (entry.from.unwrap_or_default(), entry.to.unwrap_or_default());
            let action = match entry.action {
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
            journal.undelivered.push(format!(
                "events committed between {from} and {to} were {action} at {} by {}: unless they were sent again, they \
                 are counted as missing",
                entry.at, entry.by_role
            ));
        }
        Ok(journal)
    }

    /// Adds notes about settings that cause rows to be omitted, or that leave gaps in the event
    /// numbers of a transaction. Returns the commit position after which a gap means that an event
    /// is missing.
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
                "publication {name:?} omits rows that do not satisfy {filter}: these rows are counted as missing"
            ));
        }
        if publication.more_than_inserts {
            reporter.add_note(format!(
                "publication {name:?} also publishes operations other than inserts, so Walpost did not search for gaps"
            ));
            return Lsn(u64::MAX);
        }
        let is_one_topic = self.settings.outbox.topic.constant().is_some();
        if target.outbox.is_several() && !is_one_topic {
            reporter.add_note(
                "events of other tables in the same transaction may be in other topics, so Walpost did not search for gaps"
                    .to_owned(),
            );
            return Lsn(u64::MAX);
        }
        Lsn::ZERO
    }

    /// Waits until the contents of the table have been delivered. Stops waiting if no process reads
    /// the slot, or after the time that the options specify. Returns whether the contents have been
    /// delivered, and the confirmed position.
    async fn wait(
        &self,
        catalog: &Catalog,
        goal: Lsn,
        reporter: &mut Reporter<'_>,
    ) -> Result<(End, Lsn), VerifyError> {
        let slot = &self.settings.target.slot;
        let deadline = Instant::now() + self.options.wait;
        let mut is_logged = false;
        let mut request_due = Instant::now();
        loop {
            let Some(found) = catalog.slot(slot).await? else {
                reporter.add_note(format!(
                    "replication slot {slot:?} does not exist, so events that are not in the topics yet will not be delivered"
                ));
                return Ok((End::Reached, goal));
            };
            let confirmed = found.confirmed;
            if found.wal_status.as_deref() == Some("lost") {
                reporter.add_note(format!(
                    "replication slot {slot:?} is lost, so events that are not in the topics yet will not be delivered"
                ));
                return Ok((End::Reached, confirmed));
            }
            if confirmed >= goal {
                return Ok((End::Reached, confirmed));
            }
            if found.active_pid.is_none() || Instant::now() >= deadline {
                let reason = match found.active_pid {
                    None => "no process is reading the slot",
                    Some(_) => "the --wait limit was reached",
                };
                reporter.add_note(format!(
                    "replication slot {slot:?} is confirmed up to {confirmed}, but the table was read at {goal}, and \
                     {reason}: events that are not in the topics are counted as pending, because they may still be delivered"
                ));
                return Ok((End::NotReached, confirmed));
            }
            if !std::mem::replace(&mut is_logged, true) {
                info!(slot, %confirmed, %goal, "waiting for the table's rows to be delivered");
            }
            if Instant::now() >= request_due {
                request_due = Instant::now() + REQUEST_INTERVAL;
                if let Err(error) = catalog.request_position(slot).await {
                    debug!(%error, "failed to request confirmation of the slot's position");
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests;
