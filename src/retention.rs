//! Retention of an outbox that is partitioned by time: partitions are created ahead, and those that
//! are delivered and old enough are detached and dropped. For a table without partitions, rows are
//! deleted according to the same rule, if the settings allow it.
//!
//! Positions in the WAL determine what is removed, never the time alone. When the time range of a
//! partition has ended, the partition is marked with the current WAL position. Once the slots have
//! passed that position, it is marked with the time. From then on, it is kept for the duration of
//! the retention, which leaves as much time to send events again if a slot was lost and replaced.
//! Then it is detached, and marked with the current WAL position: a late transaction that inserted
//! into it was committed before that position. Once the slots have passed that position too, it is
//! dropped. See [`mark`] for where marks are stored, and [`plan`] for their consequences.
//!
//! Writers never wait for Walpost for longer than [`LOCK_TIMEOUT`]: a statement whose lock they
//! would wait for ends by then, and is tried again.

pub(crate) mod maintenance;
pub(crate) mod mark;
pub(crate) mod plan;

mod ahead;
mod facts;
mod rows;

use std::time::{Duration, Instant};

use jiff::SignedDuration;

use self::facts::{Maintained, Partitioning};
use self::mark::{MarkKind, end_of_comment, other_lines};
use self::plan::{Detached, Partition, RemovalWait, RetentionFacts, RetentionStep, TimeRange};
use crate::model::dropped_slot::{DroppedSlot, replay_command};
use crate::model::lsn::Lsn;
use crate::pipeline::settings::{PipelineSettings, Retention};
use crate::postgres::catalog::slot_state::Moved;
use crate::postgres::catalog::{Catalog, CatalogError, Problem, Statement, examine_sql};
use crate::postgres::sql::{Client, escape_literal};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// How long a statement may wait for a lock, and how long it may take if writers wait for it.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// Maximum number of attempts of a statement whose lock is not available.
const LOCK_ATTEMPTS_MAX: u32 = 5;

/// How long a pass waits for slots that are about to pass a position.
const SLOT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the positions of slots are queried while waiting.
const SLOT_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long to wait for the claim on a table: the server may not have ended the session of the
/// previous pass yet.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(2);

/// The examination must see the state at the time when the lock is granted, not at the start of the
/// transaction.
const BEGIN_READ_COMMITTED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// Why a table can't be maintained as configured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetentionError {
    /// A catalog query failed, or the server rejects a statement.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The outbox, the publication or the slot does not meet the requirements.
    #[error("nothing is removed: {0}")]
    Problem(Problem),
    /// The table has no partitions.
    #[error(
        "table {table} is not partitioned. Have one that is, by day: {init}; or have its rows \
         deleted one by one, which costs a vacuum and WAL: delete_rows = true, or --delete-rows"
    )]
    NotPartitioned {
        table: TableName,
        /// The command that creates a partitioned table.
        init: String,
    },
    /// The table has no partitions, and no column that shows the age of its rows.
    #[error(
        "table {0} has no column created_at of type timestamptz, timestamp or date, so the age of its rows is not known. Delete \
         them by hand"
    )]
    NoTime(TableName),
    /// The table has partitions whose age can't be determined.
    #[error(
        "table {0} is not partitioned by range of one column of type timestamptz, timestamp or date, so the age of its \
         partitions is not known. Make and drop them by hand"
    )]
    NotByTime(TableName),
    /// The table has no partition that could serve as a model for others.
    #[error(
        "table {0} has no partition with a lower and an upper bound, so it is not known how long the next ones are to be. Make \
         the first by hand, as the owner of the table: CREATE TABLE ... PARTITION OF {0} FOR VALUES FROM (...) TO (...)"
    )]
    NoModel(TableName),
    /// The role lacks the owner's privileges.
    #[error(
        "role {user} lacks the rights of {owner}, the owner of table {table}, which making and dropping its partitions \
         requires. Grant them: GRANT {owner} TO {user}. docs/retention.md describes other ways"
    )]
    NotOwner {
        /// The role of the session.
        user: String,
        owner: String,
        table: TableName,
    },
    /// The owner is a superuser, whose privileges Walpost's role must not have.
    #[error(
        "table {table} belongs to {owner}, a superuser, whose rights {user} is not to have: making and dropping partitions requires \
         those of the owner. Give the table and its partitions to a role that is no superuser, like the application's: ALTER \
         TABLE {table} OWNER TO OWNER; then: GRANT OWNER TO {user}"
    )]
    SuperuserOwns {
        /// The role of the session.
        user: String,
        owner: String,
        table: TableName,
    },
    /// The role may not create tables in the schema.
    #[error(
        "role {user} may not create partitions in schema {schema}. Grant it: GRANT CREATE ON SCHEMA {schema} TO {user}"
    )]
    NoCreate {
        /// The role of the session.
        user: String,
        schema: String,
    },
    /// The default partition has rows that belong in a new partition.
    #[error(
        "partition {partition} can't be made: the default partition {default} has rows of {range}. They are delivered all the \
         same. To move them, see docs/retention.md#move-rows-out-of-the-default-partition"
    )]
    DefaultHasRows {
        partition: TableName,
        default: TableName,
        range: TimeRange,
    },
    /// Another object has the name.
    #[error(
        "partition {0} can't be made: there is something else of that name. Rename it: ALTER TABLE {0} RENAME TO ..."
    )]
    NameTaken(TableName),
    /// A lock was not available.
    #[error(
        "table {table} was in use each time: no lock within {limit:?}, tried {tries} times. A transaction has it open, or a \
         vacuum works on it: see pg_locks. It is tried again with the next pass"
    )]
    Busy {
        table: TableName,
        /// How long each attempt waited for the lock.
        limit: Duration,
        /// Number of attempts.
        tries: u32,
    },
    /// Events of the table may not be in any slot, and were not sent again.
    #[error(
        "nothing of table {table} is removed: {cause}, and {what} may be in the table only. Send them again: {replay}"
    )]
    DroppedSlots {
        table: TableName,
        /// The command that sends them.
        replay: String,
        /// Why they may be missing.
        cause: &'static str,
        /// The events that may be missing.
        what: String,
    },
    /// Events of the table may not be in the stream, and this is not recorded yet.
    #[error(
        "nothing of table {table} is removed: it is not in the publication, or was not for a while, so events may be in the table \
         only. walpost run records them when the table is in the publication, and names the command that sends them"
    )]
    NotPublished { table: TableName },
    /// Events of the table are not delivered, and were not sent again.
    #[error(
        "nothing of table {table} is removed: {what}. Fix the cause, then send its rows: {replay}"
    )]
    SetAside {
        table: TableName,
        /// The command that sends them.
        replay: String,
        /// A description of the journal entry.
        what: String,
    },
    /// The position of the slot does not show what was delivered.
    #[error("what may not be delivered is kept: {0}")]
    Moved(Moved),
    /// The recorded state of the slot describes another history of the database.
    #[error("nothing is removed that slot {slot:?} may not have delivered: {what}. {next_step}")]
    OtherHistory {
        slot: String,
        /// The events that may be missing.
        what: String,
        next_step: String,
    },
    /// Another Walpost has the claim.
    #[error("another Walpost is maintaining table {0}; nothing was done")]
    Claimed(TableName),
    /// A role without the privileges to maintain the table has the claim, which is an advisory
    /// lock.
    #[error(
        "table {table} is not maintained: PID {pid} of role {role}, which lacks the rights of the owner of the table, holds the \
         advisory lock that Walpost takes for that. End it: SELECT pg_catalog.pg_terminate_backend({pid})"
    )]
    ClaimedByOther {
        table: TableName,
        /// The role of the session that has the claim.
        role: String,
        /// PID of the server process of that session.
        pid: i32,
    },
}

/// The result of a pass.
#[derive(Debug, Default)]
pub(crate) struct RetentionReport {
    /// Number of tables that the pass covered.
    pub tables: usize,
    /// Steps that were performed, or would be in a dry run.
    pub done: Vec<String>,
    /// Steps that have to wait.
    pub waits: Vec<RemovalWait>,
    /// Problems that require an operator or another attempt.
    pub problems: Vec<RetentionError>,
}

/// Performs what is due for each table of `target`.
///
/// # Errors
/// Same as for [`pass_of_table`].
pub(crate) async fn pass(
    catalog: &Catalog,
    settings: &PipelineSettings,
    dry_run: bool,
) -> Result<RetentionReport, CatalogError> {
    let tables = tables(catalog, &settings.target).await?;
    let mut all = RetentionReport::default();
    for target in &tables {
        let pass = pass_of_table(catalog, settings, target, tables.len(), dry_run);
        let report = pass.await?;
        all.tables += report.tables;
        all.done.extend(report.done);
        all.waits.extend(report.waits);
        all.problems.extend(report.problems);
    }
    Ok(all)
}

/// Returns a target for each table of `target`. If the outbox consists of several tables, these are
/// the ones in the publication.
///
/// # Errors
/// A catalog query failed.
async fn tables(catalog: &Catalog, target: &Target) -> Result<Vec<Target>, CatalogError> {
    let outboxes = match &target.outbox {
        Outbox::Messages { .. } => Vec::new(),
        outbox @ (Outbox::Table(_) | Outbox::OneOf { .. }) => vec![outbox.clone()],
        Outbox::Tables(of) => {
            let publication = catalog.observe(target).await?.publication;
            let tables = publication.map(|found| found.tables).unwrap_or_default();
            let one = |table| Outbox::OneOf {
                table,
                of: of.clone(),
            };
            tables.into_iter().map(one).collect()
        }
    };
    let of = |outbox| Target {
        outbox,
        ..target.clone()
    };
    Ok(outboxes.into_iter().map(of).collect())
}

/// Performs what is due for the table of `target`. `among` is the number of tables in the whole
/// pass. Commands in the errors have the options of this process.
///
/// # Errors
/// The connection broke or a catalog query failed. Problems with the table or with individual
/// partitions are in the report instead.
async fn pass_of_table(
    catalog: &Catalog,
    settings: &PipelineSettings,
    target: &Target,
    among: usize,
    dry_run: bool,
) -> Result<RetentionReport, CatalogError> {
    let commands = &target.commands;
    let done = maintain(catalog, settings, target, among, dry_run).await;
    let mut report = done.map_err(|error| error.with_commands(commands))?;
    let troubles = report.problems.into_iter().map(|trouble| match trouble {
        RetentionError::Catalog(error) => error.with_commands(commands).into(),
        trouble => trouble,
    });
    report.problems = troubles.collect();
    Ok(report)
}

async fn maintain(
    catalog: &Catalog,
    settings: &PipelineSettings,
    target: &Target,
    among: usize,
    dry_run: bool,
) -> Result<RetentionReport, CatalogError> {
    let retention = settings.retention;
    let mut report = RetentionReport {
        tables: 1,
        ..RetentionReport::default()
    };
    let Some(table) = target.outbox.table() else {
        return Ok(report);
    };
    let client = catalog.client();
    facts::prepare(client, LOCK_TIMEOUT.as_millis()).await?;
    let problems = catalog.observe(target).await?.problems(target);
    let problem = problems.into_iter().next();
    let maintained = match facts::maintained(client, table).await? {
        Some(maintained) => maintained,
        None => {
            report.problems.extend(problem.map(RetentionError::Problem));
            return Ok(report);
        }
    };
    if let Some(trouble) = maintained.find_problem(target, retention) {
        report.problems.push(trouble);
        return Ok(report);
    }
    if let Some(refused) = refused(catalog, &maintained).await? {
        report.problems.push(refused);
        return Ok(report);
    }
    let until = Instant::now() + CLAIM_TIMEOUT;
    while !dry_run && !facts::claim(client, &maintained).await? {
        if Instant::now() >= until {
            report
                .problems
                .push(facts::claimed(client, &maintained).await?);
            return Ok(report);
        }
        tokio::time::sleep(SLOT_POLL_INTERVAL).await;
    }
    let keep = retention.keep.filter(|_| problem.is_none());
    let keep = keep.map(|keep| SignedDuration::try_from(keep).unwrap_or(SignedDuration::MAX));
    let mut pass = Pass {
        catalog,
        client,
        settings,
        outbox: &maintained,
        patience: SLOT_TIMEOUT / u32::try_from(among).unwrap_or(u32::MAX).max(1),
        report: &mut report,
        is_complete: false,
    };
    if maintained.partitioning.is_some() {
        let found = pass.query_table(None).await?;
        pass.make(&found, retention.ahead, dry_run).await?;
    }
    match (keep, maintained.partitioning) {
        (None, _) => {}
        (Some(keep), None) => pass.rows(target, keep, dry_run).await?,
        (Some(keep), Some(_)) => pass.partitions(target, keep, dry_run).await?,
    }
    if !dry_run {
        facts::release(client, &maintained).await?;
    }
    report.problems.extend(problem.map(RetentionError::Problem));
    Ok(report)
}

/// Returns why the table may not be used, if it may not. Each transaction of a pass checks this
/// again; this check is for a dry run, and for a pass that has nothing to do.
async fn refused(
    catalog: &Catalog,
    maintained: &Maintained,
) -> Result<Option<RetentionError>, CatalogError> {
    let client = catalog.client();
    client.batch_execute(BEGIN_READ_COMMITTED).await?;
    let examined = catalog
        .lock_and_examine(&maintained.name, maintained.statement())
        .await;
    client.batch_execute("ROLLBACK").await?;
    match examined {
        Err(error @ (CatalogError::CodeOfOthers { .. } | CatalogError::RowSecurity { .. })) => {
            Ok(Some(error.into()))
        }
        // The pass retries until the lock is available.
        Err(CatalogError::Server(error)) if is_busy(&error.code) => Ok(None),
        examined => examined.map(|()| None),
    }
}

/// Returns the tables that were partitions of this table and have not been dropped, or are being
/// detached. A query of the table does not return their rows.
///
/// # Errors
/// A catalog query failed.
pub(crate) async fn taken_off(
    catalog: &Catalog,
    table: &TableName,
) -> Result<Vec<TableName>, CatalogError> {
    let client = catalog.client();
    match facts::maintained(client, table).await? {
        Some(maintained) => facts::taken_off(client, &maintained.origin).await,
        None => Ok(Vec::new()),
    }
}

impl Maintained {
    /// Returns how a pass uses the table.
    fn statement(&self) -> Statement {
        match self.partitioning {
            Some(_) => Statement::Alter,
            None => Statement::Delete,
        }
    }

    /// Returns the problem that prevents partitions from being created or dropped, if any.
    fn find_problem(&self, target: &Target, retention: Retention) -> Option<RetentionError> {
        let table = self.name.clone();
        let user = || identifier(&self.user);
        let partitioned = match self.partitioning {
            None if retention.delete_rows => false,
            None => {
                let init = target.init(&["--partitioned", "--table", "NAME"]);
                return Some(RetentionError::NotPartitioned { table, init });
            }
            Some(Partitioning::Other) => return Some(RetentionError::NotByTime(table)),
            Some(Partitioning::Time) => true,
        };
        if !self.is_ours && self.owner_is_superuser {
            return Some(RetentionError::SuperuserOwns {
                user: user(),
                owner: identifier(&self.owner),
                table,
            });
        }
        if !self.is_ours {
            return Some(RetentionError::NotOwner {
                user: user(),
                owner: identifier(&self.owner),
                table,
            });
        }
        (partitioned && !self.may_create).then(|| RetentionError::NoCreate {
            user: user(),
            schema: identifier(&self.name.schema),
        })
    }
}

impl RetentionStep {
    /// Describes the step for a dry run.
    fn intent(&self) -> String {
        match self {
            Self::Make(name, range) => format!("make partition {name} for {range}"),
            Self::Close(partition) => format!("note that the time of {} is over", partition.name),
            Self::NoteDelivered(partition) => format!("note that {} is delivered", partition.name),
            Self::Detach(partition) => format!("detach {}", partition.name),
            Self::Finalize(partition) => format!("end the detaching of {}", partition.name),
            Self::NoteDetached(table) => format!("note that {} is detached", table.name),
            Self::Drop(table) => format!("drop {}", table.name),
        }
    }
}

/// One pass over one table.
struct Pass<'a> {
    catalog: &'a Catalog,
    client: &'a Client,
    settings: &'a PipelineSettings,
    outbox: &'a Maintained,
    /// How long to wait for slots that are about to pass a mark. With many tables, this is shorter
    /// for each, because the next pass finds that the slots have passed.
    patience: Duration,
    report: &'a mut RetentionReport,
    /// The table was found to lack no events. Events that go missing later are too recent to be
    /// removed in this pass.
    is_complete: bool,
}

impl Pass<'_> {
    async fn query_table(
        &mut self,
        target: Option<&Target>,
    ) -> Result<RetentionFacts, CatalogError> {
        let mut found = facts::query_facts(self.client, self.outbox).await?;
        if let Some(target) = target {
            found.slot = self.slowest(target).await?;
        }
        Ok(found)
    }

    /// Returns the slot with the lowest position, and that position, which counts only up to what
    /// Walpost has confirmed. Returns `None` if no slot shows what was delivered, because one was
    /// dropped.
    async fn slowest(&mut self, target: &Target) -> Result<Option<(String, Lsn)>, CatalogError> {
        let table = &self.outbox.name;
        let readers = self
            .catalog
            .slots_of_table(&self.settings.name, target, table);
        let readers = match readers.await {
            Ok(readers) => readers,
            Err(error @ CatalogError::Server(_)) => {
                self.report.problems.push(error.into());
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let slots = facts::slots(self.client, target, table, &readers).await?;
        // Must be queried after the slots: if a slot was dropped and replaced, the entry is written
        // before the new slot exists.
        let entries = match self.catalog.dropped_slots_of_table(target, table).await {
            Ok(entries) => entries,
            Err(error @ CatalogError::Server(_)) => {
                self.report.problems.push(error.into());
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if target.outbox.is_several() && self.is_set_aside(target).await? {
            return Ok(None);
        }
        if entries.is_empty() {
            if self.may_lack_events(target).await? {
                return Ok(None);
            }
            return self.least(target, slots).await;
        }
        let what: Vec<_> = entries.iter().map(DroppedSlot::describe).collect();
        self.report.problems.push(RetentionError::DroppedSlots {
            table: table.clone(),
            replay: replay_command(&target.commands, target.table_of_several().as_deref()),
            cause: entries.first().map_or("", DroppedSlot::cause),
            what: what.join("; "),
        });
        Ok(None)
    }

    /// Returns whether the table may lack events that were committed while it was not published, or
    /// whether this can't be determined. Adds the reason to the report.
    async fn may_lack_events(&mut self, target: &Target) -> Result<bool, CatalogError> {
        if self.is_complete {
            return Ok(false);
        }
        let table = &self.outbox.name;
        let trouble = match self.catalog.may_lack_events(target, table).await {
            Ok(false) => None,
            Ok(true) => Some(RetentionError::NotPublished {
                table: table.clone(),
            }),
            Err(error @ CatalogError::Server(_)) => Some(error.into()),
            Err(error) => return Err(error),
        };
        let may_lack = trouble.is_some();
        self.is_complete = !may_lack;
        self.report.problems.extend(trouble);
        Ok(may_lack)
    }

    /// Returns whether the table is set aside, or whether this can't be determined. Adds the reason
    /// to the report.
    async fn is_set_aside(&mut self, target: &Target) -> Result<bool, CatalogError> {
        let table = &self.outbox.name;
        let (name, relation) = (table.to_string(), self.outbox.origin.table);
        let entries = self.catalog.set_aside_of_table(target, &name, relation);
        let trouble = match entries.await {
            Ok(entries) => entries.first().map(|entry| RetentionError::SetAside {
                table: table.clone(),
                replay: target.replay_set_aside(&name),
                what: entry.describe(),
            }),
            Err(error @ CatalogError::Server(_)) => Some(error.into()),
            Err(error) => return Err(error),
        };
        let is_set_aside = trouble.is_some();
        self.report.problems.extend(trouble);
        Ok(is_set_aside)
    }

    async fn least(
        &mut self,
        target: &Target,
        mut slots: Vec<(String, Lsn)>,
    ) -> Result<Option<(String, Lsn)>, CatalogError> {
        for (slot, confirmed) in &mut slots {
            let is_own = *slot == target.slot;
            let target = Target {
                slot: slot.clone(),
                ..target.clone()
            };
            // The earlier slots of other pipelines are not known here.
            let pipeline = match is_own {
                true => self.settings.name.as_str(),
                false => "",
            };
            let first_start = self.settings.first_start();
            let moved = async {
                let of = self.catalog.slot_of(pipeline, &target).await?;
                let gap = self
                    .catalog
                    .gap_of_other_history(&of, *confirmed, first_start);
                Ok((gap.await?, self.catalog.moved(&of, *confirmed).await?))
            };
            match moved.await {
                Ok((None, None)) => {}
                Ok((Some(gap), _)) => {
                    let error = RetentionError::OtherHistory {
                        slot: slot.clone(),
                        what: gap.describe(*confirmed),
                        next_step: gap.next_step(&target),
                    };
                    self.report.problems.push(error);
                    return Ok(None);
                }
                Ok((None, Some(moved))) => {
                    *confirmed = moved.confirmed;
                    self.report.problems.push(RetentionError::Moved(moved));
                }
                Err(error @ CatalogError::Server(_)) => {
                    self.report.problems.push(error.into());
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(slots.into_iter().min_by_key(|(_, confirmed)| *confirmed))
    }

    /// Removes the partitions that are delivered and old enough.
    async fn partitions(
        &mut self,
        target: &Target,
        keep: SignedDuration,
        dry_run: bool,
    ) -> Result<(), CatalogError> {
        let until = Instant::now() + self.patience;
        let said = self.report.problems.len();
        loop {
            self.report.problems.truncate(said);
            let found = self.query_table(Some(target)).await?;
            let (steps, waits) = plan::removals(&found, keep);
            if dry_run {
                let would = steps.iter().map(|step| format!("would {}", step.intent()));
                self.report.done.extend(would);
                self.report.waits = waits;
                return Ok(());
            }
            let mut is_going_on = false;
            for step in &steps {
                is_going_on |= self.perform_step(step).await?;
            }
            let is_about_to = |wait: &RemovalWait| matches!(wait, RemovalWait::Slot { .. });
            is_going_on |= waits.iter().any(is_about_to);
            self.report.waits = waits;
            if !is_going_on || Instant::now() >= until {
                return Ok(());
            }
            tokio::time::sleep(SLOT_POLL_INTERVAL).await;
        }
    }

    /// Performs a step, and adds the result to the report. Returns false if it could not be
    /// performed.
    async fn perform_step(&mut self, step: &RetentionStep) -> Result<bool, CatalogError> {
        let (table, sql, done) = match step {
            RetentionStep::Make(name, range) => (
                name,
                self.make_sql(name, *range),
                Some(ahead::describe_created(name, *range)),
            ),
            RetentionStep::Close(Partition { name, .. }) => {
                let sql = self.mark_sql(name, MarkKind::Closed);
                (name, sql, None)
            }
            RetentionStep::NoteDelivered(Partition { name, .. }) => {
                let sql = self.mark_sql(name, MarkKind::Delivered);
                (name, sql, Some(format!("partition {name} is delivered")))
            }
            RetentionStep::Detach(partition) => {
                let name = &partition.name;
                let sql = self.detach_sql(partition);
                (name, sql, Some(format!("partition {name} detached")))
            }
            RetentionStep::Finalize(Partition { name, .. }) => {
                let root = self.outbox.name.quoted();
                let sql = format!(
                    "ALTER TABLE {root} DETACH PARTITION {} FINALIZE",
                    name.quoted()
                );
                (name, sql, Some(format!("partition {name} detached")))
            }
            RetentionStep::NoteDetached(Detached { name, .. }) => {
                let sql = self.mark_sql(name, MarkKind::Detached);
                (name, sql, None)
            }
            RetentionStep::Drop(table) => {
                let (name, sql) = (&table.name, drop_sql(table));
                (name, sql, Some(format!("table {name} dropped")))
            }
        };
        if matches!(step, RetentionStep::Finalize(_)) && !self.wait_for_users().await? {
            return Ok(false);
        }
        match self.attempt(&bounded(&sql)).await? {
            None => {
                self.commit().await?;
                self.report.done.extend(done);
                Ok(true)
            }
            Some(failed) => {
                let trouble = match is_busy(&failed.code) {
                    true => failed.busy(table),
                    false => self.step_error(step, failed),
                };
                self.report.problems.push(trouble);
                Ok(false)
            }
        }
    }

    /// Waits until every transaction that used the table before has ended. Such a transaction may
    /// still consider the table its partition, and FINALIZE waits only for statements in progress.
    async fn wait_for_users(&mut self) -> Result<bool, CatalogError> {
        let table = self.outbox.name.clone();
        let lock = format!(
            "LOCK TABLE ONLY {} IN ACCESS EXCLUSIVE MODE",
            table.quoted()
        );
        self.run(&table, &lock).await
    }

    /// Runs statements that concern only a table, and adds what prevents them to the report.
    /// Returns false if they could not be run.
    async fn run(&mut self, table: &TableName, sql: &str) -> Result<bool, CatalogError> {
        let failed = self.attempt(&bounded(sql)).await?;
        if failed.is_none() {
            self.commit().await?;
        }
        Ok(self.report_failed(table, failed))
    }

    /// Adds the failure of statements about this table to the report. Returns false if there was
    /// one.
    fn report_failed(&mut self, table: &TableName, failed: Option<Failed>) -> bool {
        let Some(failed) = failed else {
            return true;
        };
        self.report.problems.push(match is_busy(&failed.code) {
            true => failed.busy(table),
            false => failed.error.into(),
        });
        false
    }

    /// Begins a transaction in which no other session can change the table. Returns false if this
    /// is not possible, and adds the reason to the report.
    async fn begin_locked(&mut self) -> Result<bool, CatalogError> {
        let table = self.outbox.name.clone();
        let failed = self.attempt("").await?;
        Ok(self.report_failed(&table, failed))
    }

    async fn commit(&self) -> Result<(), CatalogError> {
        Ok(self.client.batch_execute("COMMIT").await?)
    }

    /// Runs statements in a transaction, which is left open. Retries several times if a lock is not
    /// available.
    async fn attempt(&self, sql: &str) -> Result<Option<Failed>, CatalogError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let Err(error) = self.begin_transaction(sql).await else {
                return Ok(None);
            };
            let code = match &error {
                CatalogError::Server(error) => error.code.clone(),
                CatalogError::CodeOfOthers { .. } | CatalogError::RowSecurity { .. } => {
                    String::new()
                }
                _ => return Err(error),
            };
            self.client.batch_execute("ROLLBACK").await?;
            let failed = Failed { code, error, tries };
            if !is_busy(&failed.code) || tries == LOCK_ATTEMPTS_MAX {
                return Ok(Some(failed));
            }
            tokio::time::sleep(LOCK_TIMEOUT / 2 * tries).await;
        }
    }

    async fn begin_transaction(&self, sql: &str) -> Result<(), CatalogError> {
        self.client.batch_execute(BEGIN_READ_COMMITTED).await?;
        self.catalog
            .lock_and_examine(&self.outbox.name, self.outbox.statement())
            .await?;
        // The examination locks the table only if an untrusted role can change it. A trusted role
        // can transfer it to another role.
        if self.outbox.partitioning.is_some() {
            let table = self.outbox.name.quoted();
            let lock = format!("LOCK TABLE ONLY {table} IN SHARE UPDATE EXCLUSIVE MODE");
            self.client.batch_execute(&lock).await?;
        }
        // The facts that the statements were composed from may have changed before the table was
        // locked.
        let now = facts::maintained(self.client, &self.outbox.name).await?;
        if now.as_ref() != Some(self.outbox) {
            return Err(CatalogError::TableChanged(self.outbox.name.clone()));
        }
        Ok(self.client.batch_execute(sql).await?)
    }

    fn step_error(&self, step: &RetentionStep, failed: Failed) -> RetentionError {
        match (step, failed.code.as_str(), &self.outbox.default) {
            // check_violation
            (RetentionStep::Make(name, range), "23514", Some(default)) => {
                RetentionError::DefaultHasRows {
                    partition: name.clone(),
                    default: default.clone(),
                    range: *range,
                }
            }
            // duplicate_table
            (RetentionStep::Make(name, _), "42P07", _) => RetentionError::NameTaken(name.clone()),
            _ => failed.error.into(),
        }
    }

    /// Detaches the partition and marks it. DETACH CONCURRENTLY would not block writers while it
    /// waits for its lock, but can't be part of the transaction that examines the table, and
    /// PostgreSQL rejects it if there is a default partition. Under the lock that is used instead,
    /// no transaction has uncommitted rows in the partition, so the mark can be set immediately.
    fn detach_sql(&self, partition: &Partition) -> String {
        let name = &partition.name;
        format!(
            "ALTER TABLE {} DETACH PARTITION {}; {}",
            self.outbox.name.quoted(),
            name.quoted(),
            self.mark_sql(name, MarkKind::Detached)
        )
    }

    /// Replaces Walpost's line of the comment. The other lines, which can have any length, never
    /// leave the server.
    fn mark_sql(&self, table: &TableName, kind: MarkKind) -> String {
        let (start, expression) = kind.parts();
        let start = escape_literal(&start);
        let suffix = escape_literal(&self.outbox.origin.suffix());
        let table = escape_literal(&table.quoted());
        let others = other_lines(&format!("{table}::regclass"));
        let block = format!(
            "BEGIN EXECUTE format('COMMENT ON TABLE %s IS %L', {table}, {others} || {start} || {expression} || {suffix}); END"
        );
        format!("DO {}", escape_literal(&block))
    }
}

/// Drops the table, if it is still the one that was examined.
fn drop_sql(table: &Detached) -> String {
    let Detached {
        oid,
        name,
        comment_end,
        ..
    } = table;
    let found = end_of_comment("oid");
    let expected = escape_literal(comment_end);
    let block = format!(
        "BEGIN IF NOT EXISTS (SELECT FROM pg_class WHERE oid = {oid} AND oid = {}::regclass AND NOT relispartition \
         AND {found} = {expected}) THEN \
         RAISE EXCEPTION 'it has changed, and is not dropped' USING ERRCODE = 'object_not_in_prerequisite_state'; \
         END IF; END",
        escape_literal(&name.quoted())
    );
    let block = escape_literal(&block);
    // The lock on the outbox no longer protects the schema of a table that is not its partition.
    format!(
        "{}LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE; DO {block}; DROP TABLE {name}",
        examine_sql(name, Statement::Alter),
        name = name.quoted(),
    )
}

/// Limits the duration of the statements to the lock timeout, because writers wait until they end.
fn bounded(statements: &str) -> String {
    let limit = LOCK_TIMEOUT.as_millis();
    format!("SET LOCAL statement_timeout = {limit}; {statements}")
}

/// The reason why statements could not be run.
struct Failed {
    /// SQLSTATE
    code: String,
    error: CatalogError,
    tries: u32,
}

impl Failed {
    fn busy(&self, table: &TableName) -> RetentionError {
        RetentionError::Busy {
            table: table.clone(),
            limit: LOCK_TIMEOUT,
            tries: self.tries,
        }
    }
}

/// lock_not_available, query_canceled (the statement took too long), deadlock_detected
fn is_busy(code: &str) -> bool {
    matches!(code, "55P03" | "57014" | "40P01")
}
