//! Sends rows of the outbox table again.
//!
//! [`Plan::new`] finds out which rows a [`Selection`] means, [`Plan::resume`] goes on with a run that
//! was cut short, and [`Plan::send`] sends them: read with [`copy`], mapped and
//! routed as the stream's, in the table's order, through a window of records that Kafka has not
//! acknowledged. It has a producer of its own and touches neither slot nor checkpoint, so the
//! pipeline can run meanwhile.
//!
//! A row of the table does not say where it was in the log, so that its record has no
//! `walpost-position`, and instead of that the header `walpost-replay` with the id of the run. One that
//! can't be delivered becomes a dead letter where the settings have the stream's do so.
//!
//! How far a run is stands in the journal: an entry when it begins, one now and then with the key of
//! the last row before which, and including which, Kafka has everything, and one at its end. What
//! was sent after the last of them is sent again when the run is resumed.
//!
//! [`Plan::of_let_go`] sends what may be missing after slots were let go. The end of such a run closes
//! their entries in the journal.

use tokio::sync::watch;
use tracing::warn;
use uuid::Uuid;

use self::book::{Note, Planned, State, Told, lock};
use self::selection::{Selection, Table};
use self::sender::Sender;
use crate::kafka::reader::ReadError;
use crate::outbox::columns::{Mapping, MappingError, TableColumn};
use crate::outbox::dead_letter::SOURCE_TABLE;
use crate::outbox::route::RouteError;
use crate::outbox::settings::OutboxSettings;
use crate::pipeline::core::dead_letters::{DeadLetterCounts, DeadLetters};
use crate::pipeline::settings::PipelineSettings;
use crate::pipeline::sink::{Sink, SinkError};
use crate::pipeline::watermark::{DeliveryFailure, OrderError, Watermark};
use crate::postgres::catalog::{Catalog, CatalogError, Problem};
use crate::postgres::copy::{self, CopyError, Key};
use crate::postgres::journal::{Action, Entry};
use crate::postgres::lsn::{Lsn, Position};
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;

mod book;
mod let_go;
mod position;
pub mod selection;
mod sender;

/// Why rows can't be sent again.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// There is no table.
    #[error(
        "the outbox is {0}: there is no table to send events again from. Whoever published them has to publish them again"
    )]
    NoTable(Outbox),
    /// Rows can't be put in an order that a run can be resumed in.
    #[error("table {0} has no primary key, which says in which order rows are sent")]
    NoKey(TableName),
    /// A flag needs a column that the table has not.
    #[error("table {table} has no column {column}, which {flag} needs. Use --where")]
    NoColumn {
        /// The table.
        table: TableName,
        /// The column.
        column: String,
        /// The flag.
        flag: &'static str,
    },
    /// A flag names a row that is not there.
    #[error("table {table} has no row with id {id:?}, which {flag} names")]
    NoRow {
        /// The table.
        table: TableName,
        /// The id.
        id: String,
        /// The flag.
        flag: &'static str,
    },
    /// A flag names a position that no record has.
    #[error(
        "{flag}: position {position} says which row is meant only by the record that has it: {why}. Take a time, or the id of \
         a row"
    )]
    NoRecord {
        /// The position.
        position: Position,
        /// The flag.
        flag: &'static str,
        /// Why there is none.
        why: String,
    },
    /// The topics can't be read.
    #[error(transparent)]
    Topics(#[from] ReadError),
    /// The server does not understand what a flag says.
    #[error("{flag}: {error}")]
    Wrong {
        /// The flag.
        flag: &'static str,
        /// The server's own words.
        error: CatalogError,
    },
    /// Nothing was let go.
    #[error(
        "nothing was let go of pipeline {pipeline:?} that was not sent again: the journal has no open entry for slot {slot:?}"
    )]
    NothingLetGo {
        /// The pipeline.
        pipeline: String,
        /// Its slot.
        slot: String,
    },
    /// The slot is still the one that was to be let go.
    #[error(
        "slot {slot:?} stands at {confirmed}, where it was to be let go (entry {entry} of the journal), and was not dropped \
         yet. What it has not delivered is still in it. Start walpost, which lets go of it or delivers; and send again then"
    )]
    NotDropped {
        /// The slot.
        slot: String,
        /// Where it stands.
        confirmed: Lsn,
        /// The journal's entry.
        entry: i64,
    },
    /// Rows that may be missing are in a table that is no partition any more.
    #[error(
        "table {partition} was a partition of {table}, and has rows that may have been let go. Make it one again, with its \
         bounds: ALTER TABLE {table} ATTACH PARTITION {partition} FOR VALUES FROM (...) TO (...)"
    )]
    Detached {
        /// The table.
        table: TableName,
        /// What was its partition.
        partition: TableName,
    },
    /// What commits later could be missed.
    #[error(
        "transactions that began before now are still open, and what they commit could be missed: wait for them, or end them \
         (backend_xid in pg_stat_activity, and pg_prepared_xacts), and send again then"
    )]
    Open,
    /// The journal has no such run.
    #[error(
        "the journal of pipeline {pipeline:?} has no replay {run}: SELECT * FROM walpost.journal has all"
    )]
    NoRun {
        /// The pipeline.
        pipeline: String,
        /// The run's id.
        run: Uuid,
    },
    /// The run has reached its end.
    #[error("replay {0} is complete: there is nothing to resume")]
    Complete(Uuid),
    /// Another process goes on with the run.
    #[error("replay {0} is being sent by another process")]
    Running(Uuid),
    /// The table has another key than when the run began.
    #[error(
        "replay {run} was ordered by {expected}, and the table's order is {found} now: begin a new one"
    )]
    OtherKey {
        /// The run's id.
        run: Uuid,
        /// Now.
        found: String,
        /// Then.
        expected: String,
    },
    /// The journal has something else than what was written there.
    #[error("the journal's entry {id} can't be read: {reason}")]
    Entry {
        /// Its id.
        id: i64,
        /// What is wrong with it.
        reason: String,
    },
    /// Something in the database is not as it has to be.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// The server can't be asked.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The table can't be read.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The table does not fit the settings.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// A row can't become a record.
    #[error("{row} can't become a record: {error}")]
    Route {
        /// The row, for a person.
        row: String,
        /// Why.
        error: RouteError,
    },
    /// A record that the sink doesn't take.
    #[error("{row}: {error}")]
    Produce {
        /// The row, for a person.
        row: String,
        /// Why.
        error: SinkError,
    },
    /// Nor does it take the dead letter in its place.
    #[error(
        "the dead letter of {row} can't be delivered either: {error}. It was to be one because: {reason}"
    )]
    DeadLetter {
        /// The row, for a person.
        row: String,
        /// Why it is not taken.
        error: Box<SinkError>,
        /// Why it is a dead letter.
        reason: String,
    },
    /// The sink can't go on.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The sink took a record and could not make it durable.
    #[error("{}", .0.reason)]
    Delivery(DeliveryFailure),
    /// A defect.
    #[error("the replay contradicts itself: {0}")]
    Order(#[from] OrderError),
}

impl ReplayError {
    /// The server refuses what the flag says; or it is something else.
    fn wrong(flag: &'static str, error: CatalogError) -> Self {
        match &error {
            // Data exception; syntax error or access rule violation, but for a missing right.
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

/// A run, before it is sent.
pub struct Plan<'s> {
    settings: &'s PipelineSettings,
    table: &'s TableName,
    columns: Vec<String>,
    mapping: Mapping,
    key: Key,
    /// Reads the rows, in a transaction of its own.
    reader: Catalog,
    /// Writes the journal.
    writer: Catalog,
    planned: Planned,
    /// Its id.
    pub run: Uuid,
    is_resumed: bool,
    /// The last row that Kafka has from before it was cut short.
    behind: Option<Vec<String>>,
    sent_before: u64,
    /// How many rows are to be sent.
    pub rows: u64,
    /// Entries of the journal about what was let go, which its end closes.
    closes: Vec<i64>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All rows are in Kafka.
    Complete,
    /// It was told to stop.
    Stopped,
}

impl<'s> Plan<'s> {
    /// Finds out which rows `selection` means, as of now. Nothing is changed.
    ///
    /// # Errors
    /// The selection does not fit the table, or something can't be asked.
    pub async fn new(
        settings: &'s PipelineSettings,
        selection: &Selection,
    ) -> Result<Self, ReplayError> {
        let table = table(settings)?;
        let writer = Catalog::open(&settings.postgres).await?;
        // Nothing is sent that can't be written down.
        writer
            .journal(&settings.name, &settings.target.slot)
            .await?;
        let plan = Self::begin(settings, table, writer).await?;
        let rows = Table {
            name: plan.table,
            columns: &plan.columns,
            key: &plan.key,
        };
        let condition = selection.sql(settings, &plan.reader, &rows).await?;
        plan.counted(condition).await
    }

    /// A run of its own, whose rows are not known yet.
    async fn begin(
        settings: &'s PipelineSettings,
        table: &'s TableName,
        writer: Catalog,
    ) -> Result<Self, ReplayError> {
        let run = uuid::Builder::from_random_bytes(fastrand::u128(..).to_ne_bytes()).into_uuid();
        lock(&writer, run).await?;
        Self::open(settings, table, settings.outbox.clone(), writer, run).await
    }

    /// With the rows that fulfil `condition`.
    async fn counted(mut self, condition: String) -> Result<Self, ReplayError> {
        self.planned.condition = condition;
        self.rows = self.count().await?;
        self.planned.rows = self.rows;
        self.planned.until = self.last().await?;
        Ok(self)
    }

    /// Finds out which rows may be missing after slots were let go, as of now. Nothing is changed.
    ///
    /// # Errors
    /// Nothing was let go, what is to be sent can't be known yet, or something can't be asked.
    pub async fn of_let_go(settings: &'s PipelineSettings) -> Result<Self, ReplayError> {
        let table = table(settings)?;
        let writer = Catalog::open(&settings.postgres).await?;
        let (closes, condition) = let_go::rows(settings, table, &writer).await?;
        let mut plan = Self::begin(settings, table, writer).await?;
        plan.planned.let_go.clone_from(&closes);
        plan.closes = closes;
        plan.counted(condition).await
    }

    /// Goes on with a run that the journal knows.
    ///
    /// # Errors
    /// It does not know it, or all of it was sent.
    pub async fn resume(settings: &'s PipelineSettings, run: Uuid) -> Result<Self, ReplayError> {
        let table = table(settings)?;
        let writer = Catalog::open(&settings.postgres).await?;
        let told = Told::find(&writer, settings, run).await?;
        lock(&writer, run).await?;
        let mut outbox = settings.outbox.clone();
        let planned = told.planned;
        outbox.topic = planned
            .topic
            .parse()
            .map_err(|error| told.entry.unreadable(format!("topic: {error}")))?;
        let mut plan = Self::open(settings, table, outbox, writer, run).await?;
        if planned.table != plan.planned.table {
            let reason = format!("it is about table {}", planned.table);
            return Err(told.entry.unreadable(reason));
        }
        if planned.order != plan.planned.order {
            return Err(ReplayError::OtherKey {
                run,
                found: plan.planned.order.join(", "),
                expected: planned.order.join(", "),
            });
        }
        plan.closes.clone_from(&planned.let_go);
        plan.planned = planned;
        plan.is_resumed = true;
        plan.behind = told.last;
        plan.sent_before = told.sent;
        plan.rows = plan.count().await?;
        Ok(plan)
    }

    async fn open(
        settings: &'s PipelineSettings,
        table: &'s TableName,
        outbox: OutboxSettings,
        writer: Catalog,
        run: Uuid,
    ) -> Result<Self, ReplayError> {
        let reader = Catalog::open_for_rows(&settings.postgres, settings.row_bytes_max).await?;
        let observed = reader.look(&settings.target).await?;
        let database = observed.database;
        let columns = observed
            .table
            .ok_or_else(|| Problem::NoTable {
                table: table.clone(),
                database,
            })?
            .columns;
        let typed: Vec<_> = columns
            .iter()
            .map(|(name, type_oid)| TableColumn {
                name,
                type_oid: *type_oid,
            })
            .collect();
        let mapping = Mapping::bind(&outbox, &table.to_string(), &typed)?;
        let key = reader.key(table).await?;
        let key = key.ok_or_else(|| ReplayError::NoKey(table.clone()))?;
        copy::prepare(reader.client()).await?;
        // No function of a condition can change anything, and all rows are as of one moment.
        let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
        let begun = reader.client().batch_execute(begin).await;
        begun.map_err(CatalogError::from)?;
        Ok(Self {
            settings,
            table,
            columns: columns.into_iter().map(|(name, _)| name).collect(),
            mapping,
            planned: Planned {
                table: table.to_string(),
                condition: String::new(),
                order: key.columns.clone(),
                until: None,
                topic: outbox.topic.to_string(),
                rows: 0,
                let_go: Vec::new(),
            },
            key,
            reader,
            writer,
            run,
            is_resumed: false,
            behind: None,
            sent_before: 0,
            rows: 0,
            closes: Vec::new(),
        })
    }

    /// Its end is written down even if there are no rows: something is closed by it.
    #[must_use]
    pub fn closes(&self) -> bool {
        !self.closes.is_empty()
    }

    /// Which rows, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let which = match self.planned.condition.as_str() {
            "" => "all".to_owned(),
            condition => format!("those with {}", condition.replace('\n', "")),
        };
        let rest = match self.is_resumed {
            true => format!(", behind the {} that were sent before", self.sent_before),
            false => String::new(),
        };
        let rows = if self.rows == 1 { "row" } else { "rows" };
        format!(
            "{} {rows} of table {}: {which}{rest}; in the order of {}",
            self.rows,
            self.planned.table,
            self.planned.order.join(", ")
        )
    }

    /// The topic's template.
    #[must_use]
    pub fn topic(&self) -> &str {
        &self.planned.topic
    }

    /// Makes dead letters, if the settings have any sent.
    fn dead_letters(&self) -> Option<DeadLetters> {
        let source = (SOURCE_TABLE, self.planned.table.clone());
        DeadLetters::new(&self.settings.name, source, &self.settings.dead_letters)
    }

    /// The condition for the rows that are to be sent.
    fn condition(&self) -> String {
        let mut all = Vec::new();
        if !self.planned.condition.is_empty() {
            all.push(self.planned.condition.clone());
        }
        // A run that is resumed has another snapshot than when it began.
        if let (Some(until), true) = (&self.planned.until, self.is_resumed) {
            all.push(self.key.compared("<=", until));
        }
        if let Some(behind) = &self.behind {
            all.push(self.key.compared(">", behind));
        }
        all.join(" AND ")
    }

    /// ` FROM` and ` WHERE` of the rows that are to be sent.
    fn from(&self) -> String {
        match self.condition().as_str() {
            "" => format!(" FROM {}", self.table.quoted()),
            condition => format!(" FROM {} WHERE {condition}", self.table.quoted()),
        }
    }

    async fn count(&self) -> Result<u64, ReplayError> {
        let sql = format!("SELECT count(*){}", self.from());
        let row = self.reader.client().query_one(&sql, &[]).await;
        let row = row.map_err(|error| {
            ReplayError::wrong("which rows", self.reader.denied_select(error, self.table))
        })?;
        let count: i64 = row.try_get(0).map_err(CatalogError::from)?;
        Ok(count.unsigned_abs())
    }

    /// The key of the last row.
    async fn last(&self) -> Result<Option<Vec<String>>, ReplayError> {
        let sql = format!(
            "SELECT {}{} ORDER BY {} LIMIT 1",
            self.key.texts(),
            self.from(),
            self.key.order(" DESC")
        );
        let row = self.reader.client().query_opt(&sql, &[]).await;
        let Some(row) = row.map_err(CatalogError::from)? else {
            return Ok(None);
        };
        Ok(Some(texts(&row)?))
    }

    /// Sends the rows, at most `rate` of them a second, until all are in Kafka or `stop` says true.
    /// `told` hears of rows that Kafka has.
    ///
    /// # Errors
    /// A row can't be read, routed or delivered. The journal says how far it came.
    pub async fn send(
        &self,
        sink: &mut impl Sink,
        watermark: Watermark,
        rate: Option<u32>,
        stop: &mut watch::Receiver<bool>,
        told: impl FnMut(u64),
    ) -> Result<Ended, ReplayError> {
        if !self.is_resumed {
            self.note(State::Begun, 0, None, Some(&self.planned))
                .await?;
        }
        let mut sender = Sender::new(self, sink, watermark, told);
        let ended = sender.send_all(rate, stop).await;
        if !matches!(ended, Ok(Ended::Complete)) {
            sender.settle().await;
        }
        self.tell_dead_letters(sender.dead_letters());
        let sent = self.sent_before + sender.acknowledged;
        match ended {
            Ok(Ended::Complete) => self.note(State::Done, sent, None, None).await?,
            Ok(Ended::Stopped) | Err(_) => {
                // Beside what went wrong it is of less interest that this does too.
                let last = sender.last.as_ref();
                let noted = self.note(
                    State::Going,
                    self.sent_before + sender.last_number(),
                    last,
                    None,
                );
                if let (Err(error), true) = (noted.await, ended.is_ok()) {
                    return Err(error);
                }
            }
        }
        ended
    }

    fn tell_dead_letters(&self, counts: DeadLetterCounts) {
        let DeadLetterCounts {
            oversize,
            unroutable,
        } = counts;
        if oversize + unroutable > 0 {
            let (pipeline, topic) = (&self.settings.name, &self.settings.dead_letters.topic);
            warn!(pipeline, run = %self.run, topic, oversize, unroutable, "some rows were sent as dead letters");
        }
    }

    async fn note(
        &self,
        state: State,
        sent: u64,
        last: Option<&(u64, Vec<String>)>,
        plan: Option<&Planned>,
    ) -> Result<(), ReplayError> {
        let note = Note {
            run: self.run,
            state,
            sent,
            plan: plan.cloned(),
            last: last
                .map(|(_, key)| key.clone())
                .or_else(|| self.behind.clone()),
            let_go: match state {
                State::Done => self.closes.clone(),
                State::Begun | State::Going => Vec::new(),
            },
        };
        let entry = Entry {
            pipeline: &self.settings.name,
            slot: &self.settings.target.slot,
            action: Action::Replay,
            from: None,
            to: None,
            detail: serde_json::to_value(note).expect("texts and numbers are JSON"),
        };
        self.writer.write_journal(&entry).await?;
        Ok(())
    }
}

fn table(settings: &PipelineSettings) -> Result<&TableName, ReplayError> {
    let outbox = &settings.target.outbox;
    let table = outbox.table();
    table.ok_or_else(|| ReplayError::NoTable(outbox.clone()))
}

/// The columns of a row, which are texts.
fn texts(row: &tokio_postgres::Row) -> Result<Vec<String>, CatalogError> {
    (0..row.len())
        .map(|index| Ok(row.try_get(index)?))
        .collect()
}
