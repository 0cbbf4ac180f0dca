//! Resends rows of the outbox table.
//!
//! [`ReplayPlan::new`] determines which rows a [`Selection`] contains, [`ReplayPlan::resume`]
//! resumes an interrupted replay, and [`ReplayPlan::send`] sends the rows. Rows are read with
//! [`copy`], in the order of `created_at` and the primary key, and are mapped and routed like rows
//! from the stream. A window limits the records that Kafka has not acknowledged. A replay has its
//! own producer and uses neither the slot nor the checkpoint, so the pipeline can run at the same
//! time.
//!
//! The WAL position of a row in the table is unknown, so its record has the header
//! `walpost-replay`, with the ID of the replay, instead of `walpost-position`. A row that can't be
//! delivered becomes a dead letter if the settings enable dead letters for the stream.
//!
//! The journal records the progress of a replay. One entry is written when the replay starts, and
//! one when it ends. Further entries are written while rows are sent. Each of these further entries
//! contains the key of a row such that Kafka has acknowledged this row and all preceding rows. When
//! a replay is resumed, rows that were sent after the row in the last entry are sent twice.
//!
//! [`ReplayPlan::for_dropped_slots`] sends rows that may be missing after slots were dropped. When
//! this replay ends, the journal entries about these slots are closed.
//!
//! [`ReplayPlan::for_set_aside`] sends the rows that may be missing because a table is set aside.
//! When this replay ends, the journal records an LSN such that all rows committed before the LSN
//! have been sent. The pipeline then records whether the stream resumes delivery at this LSN.
//!
//! The role that resumes a replay may have more privileges than a role that can add entries to the
//! journal. Therefore Walpost never runs SQL from the journal. Walpost stores the selection of rows
//! as values and rebuilds the condition from these values. The operator specifies `--where` again,
//! and the topic comes from the settings.

use tokio::sync::watch;
use tracing::warn;
use uuid::Uuid;

pub(crate) use self::run::{Begun, LockHolder};
use self::run::{PlannedRows, RecordedRun, RunNote, RunState, SentRows, lock, lock_entries};
use self::selection::{Selected, Selection, Table};
use self::sender::Sender;
pub(crate) use self::set_aside::SetAsideOutcome;
use crate::delivery::failure::DeliveryFailure;
use crate::delivery::watermark::{OrderError, Watermark};
use crate::kafka::reader::ReadError;
use crate::model::commands::Commands;
use crate::model::dead_letters::DeadLetterCounts;
use crate::model::lsn::{Lsn, Position};
use crate::outbox::columns::{Mapping, MappingError, TableColumn};
use crate::outbox::route::RouteError;
use crate::outbox::settings::OutboxSettings;
use crate::pipeline::database::open_as_owner;
use crate::pipeline::decode::dead_letters::DeadLetters;
use crate::pipeline::decode::hand_over::Undelivered;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::copy::{self, CopyError};
use crate::postgres::catalog::journal::{Action, Entry};
use crate::postgres::catalog::{Catalog, CatalogError, CreatedAt, Problem, TableVersion};
use crate::postgres::connect::dial::ServerError;
use crate::postgres::sql::SimpleQueryRow;
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::Outbox;
use crate::sink::{Sink, SinkError};

pub(crate) mod already_delivered;
mod condition;
mod dropped_slots;
mod position;
mod rows;
mod run;
pub(crate) mod selection;
mod sender;
mod set_aside;

const DROPPED_SLOTS_FLAG: &str = "--dropped-slots";
const SET_ASIDE_FLAG: &str = "--set-aside";

/// An error that prevents rows from being resent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    /// The outbox has no table.
    #[error(
        "the outbox uses logical decoding {0}, so there is no table from which events can be sent again. The \
         application has to publish the events again"
    )]
    NoTable(Outbox),
    /// The outbox has several tables, but a replay requires a single table.
    #[error(
        "the outbox has several tables ({0}), but replay sends events of a single table. Specify the table: --table \
         SCHEMA.TABLE"
    )]
    Several(TablePatterns),
    /// The table has no primary key, which determines the order in which rows are sent.
    #[error(
        "table {0} has no primary key, which is required to determine the order in which rows are sent"
    )]
    NoKey(TableName),
    /// A flag requires a column that the table does not have.
    #[error("table {table} has no column {column}, which {flag} requires. Use --where instead")]
    NoColumn {
        table: TableName,
        column: String,
        flag: &'static str,
    },
    /// A flag specifies a row that does not exist.
    #[error("table {table} has no row with id {id:?}, as specified with {flag}")]
    NoRow {
        table: TableName,
        id: String,
        flag: &'static str,
    },
    /// A flag specifies the end of a range in an unknown format.
    #[error(
        "{flag} {text:?} is not a time such as 2025-11-01T03:00:00Z, a position such as 00000000/016B3748:0000000002, \
         or an id: {error}"
    )]
    NoBound {
        flag: &'static str,
        /// The value of the flag.
        text: String,
        /// The reason why the value is not an ID.
        error: Box<ServerError>,
    },
    /// A flag specifies a position for which no Kafka record was found.
    #[error(
        "{flag}: can't find the row at position {position} without its Kafka record, which contains the position: \
         {reason}. Specify a time, or the id of a row"
    )]
    NoRecord {
        position: Position,
        flag: &'static str,
        /// The reason why the record was not found.
        reason: String,
    },
    /// Several records have the WAL position that a flag specifies, but their IDs differ. Only one
    /// of these IDs can be from the stream.
    #[error(
        "{flag}: records with different ids have position {position}: {first} and {other}. At least one of them was not produced by \
         this pipeline, or the database was restored from a backup in the meantime. Specify a time, or the id of a row"
    )]
    AmbiguousPosition {
        position: Position,
        flag: &'static str,
        /// The ID and location of one record.
        first: String,
        /// The ID and location of a record with a different ID.
        other: String,
    },
    /// The topics can't be read.
    #[error(transparent)]
    Topics(#[from] ReadError),
    /// The server does not accept the value of a flag.
    #[error("{flag}: {error}")]
    Wrong {
        flag: &'static str,
        /// The server's error.
        error: CatalogError,
    },
    /// The pipeline has no dropped slot with events that still have to be sent.
    #[error(
        "pipeline {pipeline:?} has no dropped slot with events that still have to be sent: the journal has no open entry \
         for slot {slot:?}"
    )]
    NoDroppedSlots { pipeline: String, slot: String },
    /// The table and its rows were dropped.
    #[error(
        "table {table} does not exist, so its missing events can't be sent again from this database. If these events \
         were delivered, or are not needed: {settle}"
    )]
    TableGone { table: TableName, settle: String },
    /// The table is not set aside.
    #[error(
        "table {table} is not set aside: the journal has no open entry about the table for slot {slot:?}"
    )]
    NotSetAside { table: TableName, slot: String },
    /// A journal entry marks a slot to be dropped, but the slot still exists.
    #[error(
        "slot {slot:?} still exists (confirmed up to {confirmed}) and retains undelivered events, although journal \
         entry {entry} was written in order to drop the slot. Start walpost, which drops the slot or delivers the \
         events; then run the replay again"
    )]
    NotDropped {
        slot: String,
        /// The current position of the slot.
        confirmed: Lsn,
        /// The ID of the journal entry.
        entry: i64,
    },
    /// A detached partition contains rows that may not have been delivered.
    #[error(
        "table {partition} was a partition of {table}, and contains rows that may not have been delivered. As the owner \
         of both tables, attach the partition again with its bounds: ALTER TABLE {table} ATTACH PARTITION {partition} \
         FOR VALUES FROM (...) TO (...)"
    )]
    Detached {
        table: TableName,
        /// The former partition.
        partition: TableName,
    },
    /// Open transactions could commit events that the replay would miss.
    #[error(
        "some transactions are still open, and the replay could miss events that they commit. Wait until these \
         transactions end, or terminate them (see backend_xid in pg_stat_activity, and pg_prepared_xacts); then run the \
         replay again"
    )]
    Open,
    /// The journal does not contain the replay.
    #[error(
        "the journal does not contain replay {run} of pipeline {pipeline:?}. To list all entries: SELECT * FROM \
         walpost.journal"
    )]
    NoRun {
        pipeline: String,
        /// The ID of the replay.
        run: Uuid,
    },
    #[error("replay {0} is complete: there is nothing to resume")]
    Complete(Uuid),
    /// Another process is running the same replay.
    #[error("another process is running replay {run}. {holder}")]
    Running { run: Uuid, holder: LockHolder },
    /// Another process is already sending the events that the journal lists for this slot.
    #[error(
        "{flag}: another process is already sending the events that the journal lists for slot {slot:?}. Wait until \
         that process ends, then check whether any of these events still have to be sent. {holder}"
    )]
    EntriesLocked {
        slot: String,
        flag: &'static str,
        holder: LockHolder,
    },
    /// The session's privileges are too broad to run an SQL condition safely.
    #[error(
        "--where runs functions with all privileges of the session, even in a read-only transaction, and role {role} \
         {}. Connect as a role that is not a superuser and can read the table, such as the role of walpost run",
        if role == through { "is a superuser".to_owned() } else { format!("can become {through}") }
    )]
    TooPrivileged {
        /// The session's role.
        role: String,
        /// The role that has the broad privileges: the session's own role, or one that it can
        /// become.
        through: String,
    },
    /// The SQL condition contains a parameter.
    #[error(
        "--where contains a parameter such as $1, which has no value. Replace the parameter with a value"
    )]
    Parameters,
    /// The replay was started with a different SQL condition, or without one.
    #[error(
        "replay {run} was started by role {} at {} {}. Walpost does not execute a condition that is stored in the journal; it only \
         checks that --where is the same. {}",
        begun.by_role,
        begun.at,
        match expected {
            Some(expected) => format!("with the condition: {expected}"),
            None => "without --where".to_owned(),
        },
        match expected {
            Some(_) => format!("If the stored condition is intended, specify it again: {command}"),
            None => format!("Omit --where: {command}"),
        }
    )]
    OtherCondition {
        run: Uuid,
        /// The role that started the replay, and the start time.
        begun: Box<Begun>,
        /// The SQL condition that the journal contains.
        expected: Option<String>,
        /// The command that resumes the replay.
        command: String,
    },
    /// The replay was started with a different topic.
    #[error(
        "replay {run}, which role {} started at {}, sends to topic {expected}, but the settings specify {found}. If \
         topic {expected} is intended, specify it again: {command}",
        begun.by_role,
        begun.at
    )]
    OtherTopic {
        run: Uuid,
        /// The role that started the replay, and the start time.
        begun: Box<Begun>,
        /// The topic in the settings.
        found: String,
        /// The topic of the replay.
        expected: String,
        /// The command that resumes the replay.
        command: String,
    },
    /// Some of the journal entries that the replay would close are no longer open.
    #[error(
        "replay {0} was started for dropped slots or a table that was set aside, but some of their journal entries are \
         no longer open. Start a new replay"
    )]
    Closed(Uuid),
    /// The table's key has changed since the replay was started.
    #[error(
        "replay {run} was ordered by {expected}, but the table is now ordered by {found}. Start a new replay"
    )]
    OtherKey {
        run: Uuid,
        /// The table's current key.
        found: String,
        /// The table's key when the replay was started.
        expected: String,
    },
    /// A journal entry does not have the expected contents.
    #[error("entry {id} of the journal can't be read: {reason}")]
    Entry {
        id: i64,
        /// The reason why the entry can't be read.
        reason: String,
    },
    /// An object in the database does not meet the requirements.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// A catalog query failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The table can't be read.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The table does not match the settings.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// A row can't be converted to a record.
    #[error("{row} can't be converted to a record: {error}")]
    Route {
        /// A description of the row.
        row: String,
        /// The routing error.
        error: RouteError,
    },
    /// The sink rejected a record.
    #[error("{row}: {error}")]
    Produce {
        /// A description of the row.
        row: String,
        /// The sink's error.
        error: SinkError,
    },
    /// The sink rejected a dead letter.
    #[error(
        "the dead letter for {row} can't be delivered: {error}. The dead letter was sent because: {reason}"
    )]
    DeadLetter {
        /// A description of the row.
        row: String,
        /// The sink's error.
        error: Box<SinkError>,
        /// The reason why a dead letter was sent.
        reason: String,
    },
    /// The sink failed.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The sink accepted a record but could not make it durable.
    #[error("{}", .0.reason)]
    Delivery(DeliveryFailure),
    /// The rows are out of order, which indicates a bug in Walpost.
    #[error("rows of the replay are out of order: {0}")]
    Order(#[from] OrderError),
}

impl ReplayError {
    /// Creates the error for a row that was not passed to the sink. `row` returns a description of
    /// the row.
    fn from_undelivered(error: Undelivered, row: impl FnOnce() -> String) -> Self {
        match error {
            Undelivered::Route(error) => Self::Route { row: row(), error },
            Undelivered::Produce(error) => Self::Produce { row: row(), error },
            Undelivered::DeadLetter { error, reason } => Self::DeadLetter {
                row: row(),
                error: Box::new(error),
                reason,
            },
            Undelivered::Order(error) => Self::Order(error),
        }
    }
}

impl ReplayError {
    /// Adds this process's command-line options to the command that the error suggests.
    #[must_use]
    pub(crate) fn with_commands(self, commands: &Commands) -> Self {
        match self {
            Self::Catalog(error) => Self::Catalog(error.with_commands(commands)),
            Self::Copy(CopyError::Catalog(error)) => {
                Self::Copy(CopyError::Catalog(error.with_commands(commands)))
            }
            Self::Wrong { flag, error } => Self::Wrong {
                flag,
                error: error.with_commands(commands),
            },
            other => other,
        }
    }

    /// Creates the error for a failed statement. Attributes the error to the flag if the server
    /// rejected the flag's value.
    fn from_statement_error(flag: &'static str, error: CatalogError) -> Self {
        match &error {
            // The function that reports the error in the server is `exec_stmt_raise`, so the error
            // was raised by one of the files in sql/, for example because one of Walpost's
            // functions is missing.
            CatalogError::Server(server) if server.routine == "exec_stmt_raise" => {
                Self::Catalog(error)
            }
            // SQLSTATE class 22 (data exception) or class 42 (syntax error or access rule
            // violation), except 42501 (insufficient privilege).
            CatalogError::Server(server)
                if server.code.starts_with("22")
                    || server.code.starts_with("42") && server.code != "42501" =>
            {
                Self::Wrong { flag, error }
            }
            _ => Self::Catalog(error),
        }
    }
}

/// A planned run of `walpost replay`.
pub(crate) struct ReplayPlan<'s> {
    settings: &'s PipelineSettings,
    table: &'s TableName,
    columns: Vec<String>,
    mapping: Mapping,
    /// The version of the table for which the columns, mapping and order were determined.
    version: TableVersion,
    /// The connection that reads the rows, in a transaction.
    reader: Catalog,
    /// The connection that writes the journal.
    writer: Catalog,
    planned: PlannedRows,
    /// The SQL condition for the rows that may be missing according to the journal, or empty if the
    /// operator selected the rows instead.
    recorded_rows: String,
    /// The condition for the rows, formatted for display, or empty if all rows are sent.
    described: String,
    /// The ID of the replay.
    pub run: Uuid,
    /// If the replay is resumed, the role that started it, and the start time.
    pub begun: Option<Begun>,
    is_resumed: bool,
    /// The key of the last row that Kafka had received when the replay was interrupted.
    last_sent_key: Option<Vec<String>>,
    sent_before: u64,
    /// The number of rows to send.
    pub rows: u64,
    /// The IDs of the journal entries about dropped slots that the replay closes when it ends.
    closes: Vec<i64>,
}

/// The outcome of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplayEnd {
    /// All rows are in Kafka.
    Complete,
    /// The replay was asked to stop.
    Stopped,
}

impl<'s> ReplayPlan<'s> {
    /// Determines which rows `selection` contains now. Does not change anything.
    ///
    /// # Errors
    /// Returns an error if the selection does not match the table, or if a query failed.
    pub(crate) async fn new(
        settings: &'s PipelineSettings,
        selection: &Selection,
    ) -> Result<Self, ReplayError> {
        let table = table(settings)?;
        let writer = open_as_owner(settings).await?;
        // Fail early if the journal can't be read. Rows are sent only if the replay can be
        // recorded.
        writer.journal(&settings.name, &settings.target).await?;
        let mut plan = Self::start_run(settings, table, writer).await?;
        let rows = Table {
            name: plan.table,
            columns: &plan.columns,
            version: &plan.version,
        };
        let selected = selection.resolve(settings, &plan.reader, &rows).await?;
        plan.planned.selected = Some(selected);
        plan.with_row_count().await
    }

    /// Creates the plan for a new replay, whose rows are determined later.
    async fn start_run(
        settings: &'s PipelineSettings,
        table: &'s TableName,
        writer: Catalog,
    ) -> Result<Self, ReplayError> {
        let run = uuid::Builder::from_random_bytes(fastrand::u128(..).to_ne_bytes()).into_uuid();
        lock(&writer, run).await?;
        Self::resume_run(settings, table, writer, run).await
    }

    /// Determines the number of rows and the key of the last row.
    async fn with_row_count(mut self) -> Result<Self, ReplayError> {
        self.count().await?;
        self.planned.rows = self.rows;
        self.planned.until = self.last_key().await?;
        Ok(self)
    }

    /// Determines which rows may be missing because slots were dropped. Does not change anything.
    ///
    /// # Errors
    /// Returns an error if no slot was dropped, the rows can't be determined yet, or a query
    /// failed.
    pub(crate) async fn for_dropped_slots(
        settings: &'s PipelineSettings,
    ) -> Result<Self, ReplayError> {
        let table = table(settings)?;
        let writer = open_as_owner(settings).await?;
        lock_entries(&writer, &settings.target.slot, DROPPED_SLOTS_FLAG).await?;
        let (closes, condition) = dropped_slots::rows(settings, table, &writer).await?;
        let mut plan = Self::start_run(settings, table, writer).await?;
        // The journal entries about dropped slots determine which rows are sent, even if the replay
        // is resumed.
        plan.planned.selected = Some(Selected::default());
        plan.planned.dropped_slots.clone_from(&closes);
        plan.closes = closes;
        plan.recorded_rows = condition;
        plan.with_row_count().await
    }

    /// Determines which rows of a table that is set aside may be missing. Does not change anything.
    ///
    /// # Errors
    /// Returns an error if the table is not set aside, the rows can't be determined yet, or a
    /// catalog query failed.
    pub(crate) async fn for_set_aside(settings: &'s PipelineSettings) -> Result<Self, ReplayError> {
        let table = table(settings)?;
        let writer = open_as_owner(settings).await?;
        lock_entries(&writer, &settings.target.slot, SET_ASIDE_FLAG).await?;
        let (entries, condition) = set_aside::open_entries(settings, table, &writer).await?;
        let before = set_aside::end_lsn(table, &writer, &condition).await?;
        let mut plan = Self::start_run(settings, table, writer).await?;
        let snapshot_xmin = set_aside::snapshot_xmin(&plan.reader).await?;
        plan.planned.selected = Some(Selected::default());
        plan.planned.set_aside = entries;
        plan.planned.sent_rows = Some(SentRows {
            before,
            snapshot_xmin,
        });
        plan.recorded_rows = condition;
        plan.with_row_count().await
    }

    /// Resumes a replay from the journal. `condition` is the SQL condition of the replay, which the
    /// operator has specified again.
    ///
    /// # Errors
    /// Returns an error if the journal does not contain the replay, or if the replay is complete or
    /// was started with a different condition, topic or table.
    pub(crate) async fn resume(
        settings: &'s PipelineSettings,
        run: Uuid,
        condition: Option<&str>,
    ) -> Result<Self, ReplayError> {
        let table = table(settings)?;
        let writer = open_as_owner(settings).await?;
        // Lock the replay first, because its journal entries can change until the lock is held.
        lock(&writer, run).await?;
        let RecordedRun {
            entry,
            begun,
            planned,
            last,
            sent,
        } = RecordedRun::find(&writer, settings, run).await?;
        let Some(selected) = planned.selected() else {
            return Err(
                entry.unreadable("the entry does not specify which rows to send".to_owned())
            );
        };
        let command = resume_command(settings, run, selected.condition.as_deref(), &planned.topic);
        if selected.condition.as_deref() != condition {
            return Err(ReplayError::OtherCondition {
                run,
                begun: Box::new(begun),
                expected: selected.condition,
                command,
            });
        }
        let found = settings.outbox.topic.to_string();
        if planned.topic != found {
            return Err(ReplayError::OtherTopic {
                run,
                begun: Box::new(begun),
                found,
                expected: planned.topic,
                command,
            });
        }
        let mut plan = Self::resume_run(settings, table, writer, run).await?;
        if planned.table != plan.planned.table {
            let reason = format!("the replay was started for table {}", planned.table);
            return Err(entry.unreadable(reason));
        }
        if planned.order != plan.planned.order {
            return Err(ReplayError::OtherKey {
                run,
                found: plan.planned.order.join(", "),
                expected: planned.order.join(", "),
            });
        }
        let is_other = |key: &Option<Vec<String>>| {
            key.as_ref()
                .is_some_and(|key| key.len() != planned.order.len())
        };
        if is_other(&planned.until)
            || is_other(&last)
            || selected.has_other_key_length(planned.order.len())
        {
            let order = planned.order.join(", ");
            let reason = format!(
                "the members \"until\", \"last\", \"from\" and \"to\" must contain values of the columns \
                 {order}"
            );
            return Err(entry.unreadable(reason));
        }
        if !planned.set_aside.is_empty() {
            lock_entries(&plan.writer, &settings.target.slot, SET_ASIDE_FLAG).await?;
            let condition =
                set_aside::condition(settings, table, &plan.writer, &planned.set_aside).await?;
            plan.recorded_rows = condition.ok_or(ReplayError::Closed(run))?;
        } else if planned.dropped_slots.is_empty() {
            if let Some(condition) = condition {
                condition::examine(&plan.reader, table, &plan.version, condition).await?;
            }
        } else {
            lock_entries(&plan.writer, &settings.target.slot, DROPPED_SLOTS_FLAG).await?;
            let condition =
                dropped_slots::condition(settings, &plan.writer, &planned.dropped_slots).await?;
            plan.recorded_rows = condition.ok_or(ReplayError::Closed(run))?;
        }
        plan.closes.clone_from(&planned.dropped_slots);
        plan.planned = planned;
        plan.is_resumed = true;
        plan.begun = Some(begun);
        plan.last_sent_key = last;
        plan.sent_before = sent;
        plan.count().await?;
        Ok(plan)
    }

    async fn resume_run(
        settings: &'s PipelineSettings,
        table: &'s TableName,
        writer: Catalog,
        run: Uuid,
    ) -> Result<Self, ReplayError> {
        let outbox = &settings.outbox;
        let reader = Catalog::open_for_rows(&settings.postgres, settings.row_bytes_max).await?;
        let observed = reader.observe(&settings.target).await?;
        let database = observed.database;
        let observed = observed.table.ok_or_else(|| Problem::NoTable {
            table: table.clone(),
            init: settings.target.init_table(table),
            database,
        })?;
        let columns = observed.columns;
        let typed = TableColumn::list(&columns);
        let mapping = Mapping::bind_with(
            outbox,
            table.rows(&table.to_string()),
            &typed,
            &observed.facts,
        )?;
        let order = reader.order_columns(table, CreatedAt::First).await?;
        if order.is_empty() {
            return Err(ReplayError::NoKey(table.clone()));
        }
        copy::prepare(reader.client()).await?;
        // All rows are read from one snapshot, in a read-only transaction. Functions in the
        // operator's condition can have side effects even in such a transaction: see the module
        // `condition`.
        let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
        let begun = reader.client().batch_execute(begin).await;
        begun.map_err(CatalogError::from)?;
        Ok(Self {
            settings,
            table,
            columns: columns.into_iter().map(|(name, _)| name).collect(),
            mapping,
            planned: PlannedRows {
                table: table.to_string(),
                selected: None,
                order: order.into_iter().map(|column| column.name).collect(),
                until: None,
                topic: outbox.topic.to_string(),
                rows: 0,
                dropped_slots: Vec::new(),
                set_aside: Vec::new(),
                sent_rows: None,
            },
            recorded_rows: String::new(),
            described: String::new(),
            version: observed.version,
            reader,
            writer,
            run,
            begun: None,
            is_resumed: false,
            last_sent_key: None,
            sent_before: 0,
            rows: 0,
            closes: Vec::new(),
        })
    }

    /// Returns whether the replay closes journal entries when it ends. The end of such a replay is
    /// recorded even if the replay has no rows.
    #[must_use]
    pub(crate) fn closes(&self) -> bool {
        !self.closes.is_empty() || self.is_for_set_aside_table()
    }

    /// Returns whether the replay sends rows of a table that is set aside. The stream may resume
    /// delivery of this table when the replay ends.
    #[must_use]
    pub(crate) fn is_for_set_aside_table(&self) -> bool {
        !self.planned.set_aside.is_empty()
    }

    /// Waits until the pipeline has recorded whether it will resume delivery of the table's rows.
    ///
    /// # Errors
    /// Returns an error if a catalog query failed.
    pub(crate) async fn hand_over(&self) -> Result<SetAsideOutcome, ReplayError> {
        set_aside::hand_over(self.settings, &self.writer, &self.planned.set_aside).await
    }

    /// Describes which rows are sent.
    #[must_use]
    pub(crate) fn describe(&self) -> String {
        let selection = match self.described.as_str() {
            "" => "all rows".to_owned(),
            condition => format!("rows with {}", condition.replace('\n', "")),
        };
        let rows = if self.rows == 1 { "row" } else { "rows" };
        let (count, table, order) = (
            self.rows,
            &self.planned.table,
            self.planned.order.join(", "),
        );
        match self.is_resumed {
            true => format!(
                "{count} {rows} of table {table}: {selection}, not including the {} already sent; ordered by {order}",
                self.sent_before
            ),
            false => format!("{count} {rows} of table {table}: {selection}; ordered by {order}"),
        }
    }

    /// Returns the command that resumes the replay.
    #[must_use]
    pub(crate) fn resume_command(&self) -> String {
        let selected = self.planned.selected();
        let condition = selected.and_then(|selected| selected.condition);
        resume_command(self.settings, self.run, condition.as_deref(), self.topic())
    }

    /// Returns the topic template.
    #[must_use]
    pub(crate) fn topic(&self) -> &str {
        &self.planned.topic
    }

    /// Creates the dead letter writer, if the settings enable dead letters.
    fn dead_letters(&self) -> Option<DeadLetters> {
        DeadLetters::new(&self.settings.name, "", &self.settings.dead_letters)
    }

    /// Sends the rows, at most `rate` per second, until all rows are in Kafka or `stop` becomes
    /// true. Calls `on_progress` with the number of rows that Kafka has acknowledged since the
    /// previous call.
    ///
    /// # Errors
    /// Returns an error if a row can't be read, routed or delivered. The progress up to the error
    /// is recorded in the journal.
    pub(crate) async fn send(
        &self,
        sink: &mut impl Sink,
        watermark: Watermark,
        rate: Option<u32>,
        stop: &mut watch::Receiver<bool>,
        on_progress: impl FnMut(u64),
    ) -> Result<ReplayEnd, ReplayError> {
        if !self.is_resumed {
            self.record_progress(RunState::Begun, 0, None, Some(&self.planned))
                .await?;
        }
        let mut sender = Sender::new(self, sink, watermark, on_progress);
        let ended = sender.send_all(rate, stop).await;
        if !matches!(ended, Ok(ReplayEnd::Complete)) {
            sender.settle().await;
        }
        self.log_dead_letters(sender.dead_letters());
        let sent = self.sent_before + sender.acknowledged;
        match ended {
            Ok(ReplayEnd::Complete) => {
                self.record_progress(RunState::Done, sent, None, None)
                    .await?
            }
            Ok(ReplayEnd::Stopped) | Err(_) => {
                // If the replay failed, its error takes precedence over a failure to record the
                // progress.
                let last = sender.last.as_ref();
                let recorded = self.record_progress(
                    RunState::Going,
                    self.sent_before + sender.last_number(),
                    last,
                    None,
                );
                if let (Err(error), true) = (recorded.await, ended.is_ok()) {
                    return Err(error);
                }
            }
        }
        ended
    }

    fn log_dead_letters(&self, counts: DeadLetterCounts) {
        let DeadLetterCounts {
            oversize,
            unroutable,
            // A replay never counts malformed events, because it sends only rows, and only logical
            // decoding messages can be malformed.
            malformed: _,
        } = counts;
        if oversize + unroutable > 0 {
            let (pipeline, topic) = (&self.settings.name, &self.settings.dead_letters.topic);
            warn!(pipeline, run = %self.run, topic, oversize, unroutable, "some rows were sent as dead letters");
        }
    }

    async fn record_progress(
        &self,
        state: RunState,
        sent: u64,
        last: Option<&(u64, Vec<String>)>,
        plan: Option<&PlannedRows>,
    ) -> Result<(), ReplayError> {
        let sent_rows = self.planned.sent_rows.as_ref();
        let sent_rows = sent_rows.filter(|_| state == RunState::Done);
        let note = RunNote {
            run: self.run,
            state,
            sent,
            plan: plan.cloned(),
            last: last
                .map(|(_, key)| key.clone())
                .or_else(|| self.last_sent_key.clone()),
            dropped_slots: match state {
                RunState::Done => self.closes.clone(),
                RunState::Begun | RunState::Going => Vec::new(),
            },
            set_aside: match state {
                RunState::Done => self.planned.set_aside.clone(),
                RunState::Begun | RunState::Going => Vec::new(),
            },
            snapshot_xmin: sent_rows.map(|sent| sent.snapshot_xmin.clone()),
        };
        let entry = Entry {
            pipeline: &self.settings.name,
            target: &self.settings.target,
            action: Action::Replay,
            from: None,
            to: sent_rows.map(|sent| sent.before),
            detail: serde_json::to_value(note).expect("the entry about a replay run is valid JSON"),
        };
        self.writer.write_journal(&entry).await?;
        Ok(())
    }
}

fn table(settings: &PipelineSettings) -> Result<&TableName, ReplayError> {
    match &settings.target.outbox {
        Outbox::Table(table) | Outbox::OneOf { table, .. } => Ok(table),
        Outbox::Tables(tables) => Err(ReplayError::Several(tables.clone())),
        outbox @ Outbox::Messages { .. } => Err(ReplayError::NoTable(outbox.clone())),
    }
}

/// Returns the command that resumes a replay, including the options that must be specified again.
fn resume_command(
    settings: &PipelineSettings,
    run: Uuid,
    condition: Option<&str>,
    topic: &str,
) -> String {
    let run = run.to_string();
    let mut words = vec!["replay", "--resume", &run];
    if let Some(condition) = condition {
        words.extend(["--where", condition]);
    }
    if topic != OutboxSettings::default().topic.to_string() {
        words.extend(["--topic", topic]);
    }
    settings.target.commands.print_words(&words)
}

/// Returns the values of the primary key in a row of a query's result. The columns of a primary key
/// are never null.
fn key_values(row: &SimpleQueryRow) -> Result<Vec<String>, CatalogError> {
    let value = |index| {
        let value = row.get(index).map(str::to_owned);
        value.ok_or_else(|| {
            CatalogError::Unexpected("a column of the primary key is null".to_owned())
        })
    };
    (0..row.len()).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_an_error_to_the_where_flag_only_if_its_condition_caused_it() {
        let error = |routine: &str| {
            let error = ServerError {
                code: "42883".to_owned(),
                routine: routine.to_owned(),
                ..ServerError::default()
            };
            ReplayError::from_statement_error("--where", CatalogError::Server(Box::new(error)))
        };
        assert!(matches!(
            error("ParseFuncOrColumn"),
            ReplayError::Wrong { .. }
        ));
        assert!(matches!(error("exec_stmt_raise"), ReplayError::Catalog(_)));
    }
}
