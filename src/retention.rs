//! Applies the retention period to an outbox that is partitioned by time: creates partitions ahead
//! of time, and detaches and drops partitions that have been delivered and are old enough. In a
//! table without partitions, rows are deleted according to the same rules if the settings allow it.
//!
//! Removal depends on WAL positions, never on time alone. When the time range of a partition has
//! ended, Walpost records the current WAL position in the partition's comment. Once every slot that
//! reads the table has confirmed this position, Walpost replaces the position with the current
//! time. The partition is then kept for the retention period, which leaves time to resend events if
//! a slot was lost and replaced. After this period, Walpost detaches the partition and records the
//! current WAL position in its comment: even a long-running transaction that inserted into the
//! partition must have been committed before this position. Once every slot that reads the table
//! has confirmed this second position, Walpost drops the partition. See [`mark`] for the text in
//! the comment, and [`plan`] for how the comment determines the next step.
//!
//! Writers never wait for Walpost longer than [`LOCK_TIMEOUT`]: a statement that holds or waits for
//! a conflicting lock is canceled after this timeout and retried.

pub(crate) mod maintenance;
pub(crate) mod mark;
pub(crate) mod plan;

mod ahead;
mod facts;
mod rows;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use jiff::SignedDuration;

use self::facts::{MaintainedTable, Partitioning};
use self::mark::{MarkKind, end_of_comment, other_lines};
use self::plan::{Detached, Partition, RemovalWait, RetentionFacts, RetentionStep, TimeRange};
use crate::model::dropped_slot::{DroppedSlot, replay_command};
use crate::model::lsn::Lsn;
use crate::pipeline::settings::{PipelineSettings, Retention};
use crate::postgres::catalog::slot_state::Moved;
use crate::postgres::catalog::{
    AdvisoryLockHolder, Catalog, CatalogError, Problem, Statement, examine_sql,
};
use crate::postgres::sql::{Client, escape_literal};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// How long a statement may wait for a lock, and how long it may run while it blocks writers.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// Maximum number of partitions that one transaction creates, or whose comments it changes. Each
/// transaction first examines the table and all of its partitions, so handling partitions one by
/// one would be slow.
const STEPS_PER_TRANSACTION: usize = 20;

/// Maximum number of times that a maintenance pass attempts a transaction if a lock is not
/// available.
const LOCK_ATTEMPTS_MAX: u32 = 5;

/// How long a maintenance pass waits for slots to confirm the WAL position that a removal step
/// requires. After this timeout, the step is left to the next pass.
const SLOT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a maintenance pass queries the slots' confirmed positions while it waits for the slots
/// to confirm a WAL position.
const SLOT_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long to wait for the advisory lock with which a process claims a table for maintenance. If
/// the server has not ended the session of the previous maintenance pass yet, the lock is not
/// available immediately.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(2);

/// A statement that starts a transaction with isolation level READ COMMITTED. At this level, a
/// table that is examined after a lock has been granted is examined in its current state, not in
/// its state at the start of the transaction.
const BEGIN_READ_COMMITTED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// A problem that prevents a table from being maintained as configured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetentionError {
    /// A catalog query failed, or the server rejected a statement.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The outbox, the publication or the slot does not meet the requirements.
    #[error("nothing is removed: {0}")]
    Problem(Problem),
    /// The table has no partitions.
    #[error(
        "table {table} is not partitioned. Create a table with daily partitions: {init}; or have Walpost delete \
         individual rows, which generates WAL and requires VACUUM: delete_rows = true, or --delete-rows"
    )]
    NotPartitioned {
        table: TableName,
        /// The command that creates a partitioned table.
        init: String,
    },
    /// The table has no partitions, and no column that indicates the age of its rows.
    #[error(
        "table {0} has no column created_at of type timestamptz, timestamp or date, so Walpost can't determine the age \
         of its rows. Delete the rows manually"
    )]
    NoTime(TableName),
    /// The table has partitions whose age can't be determined.
    #[error(
        "table {0} is not partitioned by range of one column of type timestamptz, timestamp or date, so Walpost can't \
         determine the age of its partitions. Create and drop the partitions manually"
    )]
    NotByTime(TableName),
    /// The table has no partition from which to derive the length of new partitions.
    #[error(
        "table {0} has no partition with both a lower and an upper bound, so Walpost can't determine the length of new \
         partitions. Create the first partition manually, as the owner of the table: CREATE TABLE ... PARTITION OF {0} \
         FOR VALUES FROM (...) TO (...)"
    )]
    NoModel(TableName),
    /// The session's role lacks the privileges of the table's owner.
    #[error(
        "role {user} lacks the privileges of {owner}, the owner of table {table}, which are required to create and drop \
         its partitions. Grant them: GRANT {owner} TO {user}. docs/retention.md describes alternatives"
    )]
    NotOwner {
        /// The session's role.
        user: String,
        owner: String,
        table: TableName,
    },
    /// The owner is a superuser, whose privileges Walpost's role must not have.
    #[error(
        "table {table} belongs to the superuser {owner}: creating and dropping partitions requires the owner's \
         privileges, but role {user} must not have the privileges of a superuser. Transfer the table and its partitions \
         to a role that is not a superuser, such as the application's role: ALTER TABLE {table} OWNER TO OWNER; then: \
         GRANT OWNER TO {user}"
    )]
    SuperuserOwns {
        /// The session's role.
        user: String,
        owner: String,
        table: TableName,
    },
    /// The role is not allowed to create tables in the schema.
    #[error(
        "role {user} is not allowed to create partitions in schema {schema}. Grant the privilege: GRANT CREATE ON \
         SCHEMA {schema} TO {user}"
    )]
    NoCreate {
        /// The session's role.
        user: String,
        schema: String,
    },
    /// The default partition has rows that belong in a new partition.
    #[error(
        "can't create partition {partition}: the default partition {default} contains rows from {range}. These rows are \
         delivered as usual. To move them, see docs/retention.md#move-rows-out-of-the-default-partition"
    )]
    DefaultHasRows {
        partition: TableName,
        default: TableName,
        range: TimeRange,
    },
    /// Another object already has the name of a partition that would be created.
    #[error(
        "can't create partition {0}: another object has this name. Rename that object: ALTER TABLE {0} RENAME TO ..."
    )]
    NameTaken(TableName),
    /// A lock could not be acquired, even after several attempts.
    #[error(
        "table {table} was in use: {attempts} attempts to lock it within {limit:?} failed. A transaction or a VACUUM is \
         using the table (see pg_locks). Walpost will try again in the next pass"
    )]
    Busy {
        table: TableName,
        /// How long each attempt waited for the lock.
        limit: Duration,
        /// Number of attempts.
        attempts: u32,
    },
    /// Some of the table's events may be missing, for example because a slot was dropped. These
    /// events have not been resent.
    #[error(
        "nothing is removed from table {table}: {cause}, and {what} may exist only in the table. Send these events \
         again: {replay}"
    )]
    DroppedSlots {
        table: TableName,
        /// The command that resends the events.
        replay: String,
        /// The reason why the events may be missing.
        cause: &'static str,
        /// The events that may be missing.
        what: String,
    },
    /// Some of the table's events may not have been delivered because the table was not in the
    /// publication, and the journal does not contain an entry for them yet.
    #[error(
        "nothing is removed from table {table}: the table is not in the publication, or was temporarily missing from \
         it, so some events may exist only in the table. walpost run records these events when the table is in the \
         publication, and logs the command that sends them"
    )]
    NotPublished { table: TableName },
    /// The table was set aside after an error (`on_table_error`), and its rows have not been sent
    /// since.
    #[error(
        "nothing is removed from table {table}: {what}. Fix the cause, then send the rows of the table: {replay}"
    )]
    SetAside {
        table: TableName,
        /// The command that sends the rows that have not been delivered.
        replay: String,
        /// A description of the journal entry.
        what: String,
    },
    /// Another process has moved the slot, so the slot's position does not show which rows were
    /// delivered.
    #[error("rows that might not have been delivered are kept: {0}")]
    Moved(Moved),
    /// The recorded state of the slot belongs to a different history of the database, for example
    /// because a backup was restored.
    #[error("rows that slot {slot:?} might not have delivered are kept: {what}. {next_step}")]
    OtherHistory {
        slot: String,
        /// The events that may be missing.
        what: String,
        next_step: String,
    },
    /// Another Walpost process has claimed the table for maintenance.
    #[error("another Walpost process is maintaining table {0}; nothing was done")]
    Claimed(TableName),
    /// The advisory lock with which processes claim the table is held by a role that lacks the
    /// privileges to maintain the table.
    #[error(
        "table {table} is not maintained: {holder} holds the advisory lock that Walpost requires for maintenance, but \
         lacks the privileges of the table's owner. Release the lock: {release}",
        release = holder.release()
    )]
    ClaimedByOther {
        table: TableName,
        holder: AdvisoryLockHolder,
    },
}

/// The result of a maintenance pass.
#[derive(Debug, Default)]
pub(crate) struct RetentionReport {
    /// Number of tables that the maintenance pass covered.
    pub tables: usize,
    /// Descriptions of the maintenance steps that were performed or, in a dry run, would be
    /// performed.
    pub done: Vec<String>,
    /// The reasons why some removal steps can't be performed yet.
    pub waits: Vec<RemovalWait>,
    /// Problems that need operator intervention or a retry.
    pub problems: Vec<RetentionError>,
}

/// Performs the maintenance steps that are due for each outbox table of the pipeline.
///
/// # Errors
/// Returns an error if the connection is lost or a catalog query fails. Problems with individual
/// tables or partitions are added to the report instead.
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

/// Returns a target for each of the outbox's tables. If the outbox can consist of several tables,
/// only the tables in the publication are included.
///
/// # Errors
/// Returns an error if a catalog query fails.
async fn tables(catalog: &Catalog, target: &Target) -> Result<Vec<Target>, CatalogError> {
    let outboxes = match &target.outbox {
        Outbox::Messages { .. } => Vec::new(),
        outbox @ (Outbox::Table(_) | Outbox::OneOf { .. }) => vec![outbox.clone()],
        Outbox::Tables(patterns) => {
            let publication = catalog.observe(target).await?.publication;
            let tables = publication.map(|found| found.tables).unwrap_or_default();
            let one = |table| Outbox::OneOf {
                table,
                of: patterns.clone(),
            };
            tables.into_iter().map(one).collect()
        }
    };
    let with_outbox = |outbox| Target {
        outbox,
        ..target.clone()
    };
    Ok(outboxes.into_iter().map(with_outbox).collect())
}

/// Performs the maintenance steps that are due for the outbox table of `target`. `table_count` is
/// the number of tables that the maintenance pass covers. Commands suggested in errors include this
/// process's command-line options.
///
/// # Errors
/// Returns an error if the connection is lost or a catalog query fails. Problems with the table or
/// with individual partitions are added to the report instead.
async fn pass_of_table(
    catalog: &Catalog,
    settings: &PipelineSettings,
    target: &Target,
    table_count: usize,
    dry_run: bool,
) -> Result<RetentionReport, CatalogError> {
    let commands = &target.commands;
    let done = maintain(catalog, settings, target, table_count, dry_run).await;
    let mut report = done.map_err(|error| error.with_commands(commands))?;
    let problems = report.problems.into_iter().map(|problem| match problem {
        RetentionError::Catalog(error) => error.with_commands(commands).into(),
        problem => problem,
    });
    report.problems = problems.collect();
    Ok(report)
}

async fn maintain(
    catalog: &Catalog,
    settings: &PipelineSettings,
    target: &Target,
    table_count: usize,
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
    let maintained = match facts::query_maintained_table(client, table).await? {
        Some(maintained) => maintained,
        None => {
            report.problems.extend(problem.map(RetentionError::Problem));
            return Ok(report);
        }
    };
    if let Some(problem) = maintained.find_problem(target, retention) {
        report.problems.push(problem);
        return Ok(report);
    }
    if let Some(error) = examine_table(catalog, &maintained).await? {
        report.problems.push(error);
        return Ok(report);
    }
    let deadline = Instant::now() + CLAIM_TIMEOUT;
    while !dry_run && !facts::claim(client, &maintained).await? {
        if Instant::now() >= deadline {
            report
                .problems
                .push(facts::claim_error(catalog, &maintained).await?);
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
        slot_timeout: SLOT_TIMEOUT / u32::try_from(table_count).unwrap_or(u32::MAX).max(1),
        report: &mut report,
        is_complete: false,
    };
    if maintained.partitioning.is_some() {
        let found = pass.query_table(None).await?;
        pass.create_partitions(&found, retention.ahead, dry_run)
            .await?;
    }
    match (keep, maintained.partitioning) {
        (None, _) => {}
        (Some(keep), None) => pass.delete_rows(target, keep, dry_run).await?,
        (Some(keep), Some(_)) => pass.remove_partitions(target, keep, dry_run).await?,
    }
    if !dry_run {
        facts::release(client, &maintained).await?;
    }
    report.problems.extend(problem.map(RetentionError::Problem));
    Ok(report)
}

/// Examines the table, and returns an error if statements on it would run other roles' code, or if
/// row-level security hides rows. Each transaction that changes the table during a maintenance pass
/// examines the table again. This function also covers dry runs, and passes in which no step is
/// due, because these run no such transactions.
async fn examine_table(
    catalog: &Catalog,
    maintained: &MaintainedTable,
) -> Result<Option<RetentionError>, CatalogError> {
    let client = catalog.client();
    client.batch_execute(BEGIN_READ_COMMITTED).await?;
    let examined = catalog
        .lock_and_examine(&maintained.name, maintained.statement())
        .await;
    client.batch_execute("ROLLBACK").await?;
    match examined {
        Err(error @ (CatalogError::ForeignCode { .. } | CatalogError::RowSecurity { .. })) => {
            Ok(Some(error.into()))
        }
        // Failing to acquire the lock is not an error here, because the transactions of the
        // maintenance pass are retried.
        Err(CatalogError::Server(error)) if is_busy(&error.code) => Ok(None),
        examined => examined.map(|()| None),
    }
}

/// Returns partitions of this table that are being detached, or that have been detached but not
/// dropped. Queries of the table do not return the rows of these partitions.
///
/// # Errors
/// Returns an error if a catalog query fails.
pub(crate) async fn detached_partitions(
    catalog: &Catalog,
    table: &TableName,
) -> Result<Vec<TableName>, CatalogError> {
    let client = catalog.client();
    match facts::query_maintained_table(client, table).await? {
        Some(maintained) => facts::detached_partitions(client, &maintained.origin).await,
        None => Ok(Vec::new()),
    }
}

impl MaintainedTable {
    /// Returns the kind of statement that maintenance of the table requires.
    fn statement(&self) -> Statement {
        match self.partitioning {
            Some(_) => Statement::Alter,
            None => Statement::Delete,
        }
    }

    /// Returns the first problem, if any, that prevents maintenance of the table.
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
        if !self.has_owner_privileges && self.owner_is_superuser {
            return Some(RetentionError::SuperuserOwns {
                user: user(),
                owner: identifier(&self.owner),
                table,
            });
        }
        if !self.has_owner_privileges {
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
    /// Returns the table that this maintenance step creates, changes or drops.
    fn table(&self) -> &TableName {
        match self {
            Self::Create(name, _) => name,
            Self::MarkClosed(Partition { name, .. })
            | Self::MarkDelivered(Partition { name, .. })
            | Self::Detach(Partition { name, .. })
            | Self::Finalize(Partition { name, .. }) => name,
            Self::MarkDetached(Detached { name, .. }) | Self::Drop(Detached { name, .. }) => name,
        }
    }

    /// Returns whether this step only updates the comment that records how far the removal of a
    /// partition has progressed, and therefore does not block writers.
    fn is_mark(&self) -> bool {
        matches!(
            self,
            Self::MarkClosed(_) | Self::MarkDelivered(_) | Self::MarkDetached(_)
        )
    }

    /// Returns a description of what this maintenance step would do, to be displayed in a dry run.
    fn intent(&self) -> String {
        match self {
            Self::Create(name, range) => format!("create partition {name} for {range}"),
            Self::MarkClosed(partition) => {
                format!(
                    "record in the comment on {} that its time range has ended",
                    partition.name
                )
            }
            Self::MarkDelivered(partition) => {
                format!(
                    "record in the comment on {} that its rows have been delivered",
                    partition.name
                )
            }
            Self::Detach(partition) => format!("detach {}", partition.name),
            Self::Finalize(partition) => format!("finish detaching {}", partition.name),
            Self::MarkDetached(table) => {
                format!(
                    "record in the comment on {} that it has been detached",
                    table.name
                )
            }
            Self::Drop(table) => format!("drop {}", table.name),
        }
    }
}

/// The statements that perform a [`RetentionStep`].
struct StepStatements {
    /// Statements that do not block writers and therefore have no time limit: the inspection of a
    /// table before it is dropped, or CREATE TABLE. The text is empty or ends with a semicolon.
    preparation: String,
    /// The statements that lock a table.
    locking: String,
    /// A description of the completed step, which is added to the report. `None` if the step is not
    /// reported.
    done: Option<String>,
}

/// A maintenance pass over one table.
struct Pass<'a> {
    catalog: &'a Catalog,
    client: &'a Client,
    settings: &'a PipelineSettings,
    outbox: &'a MaintainedTable,
    /// How long to wait for slots to reach the WAL position that is recorded in a table's comment.
    /// The more tables the maintenance pass covers, the shorter the timeout. A timeout does no
    /// harm, because the next pass continues where this pass stopped.
    slot_timeout: Duration,
    report: &'a mut RetentionReport,
    /// Whether this maintenance pass has verified that none of the table's events are missing from
    /// the stream. The check is performed only once, because rows that are inserted later are too
    /// recent to be removed in this pass.
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

    /// Returns the slot with the lowest position, and that position. If another process has moved a
    /// slot, the last position that Walpost confirmed is used in place of the slot's current
    /// position. Returns `None` if the slots don't show which rows were delivered, for example
    /// because a slot was dropped.
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
        // Query the journal after the slots: if a slot is dropped and replaced, its journal entry
        // is written before the new slot exists.
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
            return self.lowest_verified(target, slots).await;
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

    /// Returns true if events that were committed while the table was not published may be missing,
    /// or if the query for such events fails. In both cases, adds the reason to the report.
    async fn may_lack_events(&mut self, target: &Target) -> Result<bool, CatalogError> {
        if self.is_complete {
            return Ok(false);
        }
        let table = &self.outbox.name;
        let problem = match self.catalog.may_lack_events(target, table).await {
            Ok(false) => None,
            Ok(true) => Some(RetentionError::NotPublished {
                table: table.clone(),
            }),
            Err(error @ CatalogError::Server(_)) => Some(error.into()),
            Err(error) => return Err(error),
        };
        let may_lack = problem.is_some();
        self.is_complete = !may_lack;
        self.report.problems.extend(problem);
        Ok(may_lack)
    }

    /// Returns true if the table is set aside, or if this can't be determined. In both cases, adds
    /// the reason to the report.
    async fn is_set_aside(&mut self, target: &Target) -> Result<bool, CatalogError> {
        let table = &self.outbox.name;
        let (name, relation) = (table.to_string(), self.outbox.origin.table);
        let entries = self.catalog.set_aside_of_table(target, &name, relation);
        let problem = match entries.await {
            Ok(entries) => entries.first().map(|entry| RetentionError::SetAside {
                table: table.clone(),
                replay: target.replay_set_aside(&name),
                what: entry.describe(),
            }),
            Err(error @ CatalogError::Server(_)) => Some(error.into()),
            Err(error) => return Err(error),
        };
        let is_set_aside = problem.is_some();
        self.report.problems.extend(problem);
        Ok(is_set_aside)
    }

    async fn lowest_verified(
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
            // The names of other pipelines are unknown here, so it is not possible to query which
            // slots those pipelines used earlier.
            let pipeline = match is_own {
                true => self.settings.name.as_str(),
                false => "",
            };
            let first_start = self.settings.first_start();
            let moved = async {
                let identity = self.catalog.slot_identity(pipeline, &target).await?;
                let gap = self
                    .catalog
                    .gap_of_other_history(&identity, *confirmed, first_start);
                Ok((gap.await?, self.catalog.moved(&identity, *confirmed).await?))
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

    /// Removes partitions whose rows have been delivered and whose retention period has ended.
    async fn remove_partitions(
        &mut self,
        target: &Target,
        keep: SignedDuration,
        dry_run: bool,
    ) -> Result<(), CatalogError> {
        let deadline = Instant::now() + self.slot_timeout;
        let problem_count = self.report.problems.len();
        loop {
            self.report.problems.truncate(problem_count);
            let found = self.query_table(Some(target)).await?;
            let (steps, waits) = plan::plan_removals(&found, keep);
            if dry_run {
                let would = steps.iter().map(|step| format!("would {}", step.intent()));
                self.report.done.extend(would);
                self.report.waits = waits;
                return Ok(());
            }
            let mut has_progress = self.perform_steps(&steps).await?;
            let waits_for_slot = |wait: &RemovalWait| matches!(wait, RemovalWait::Slot { .. });
            has_progress |= waits.iter().any(waits_for_slot);
            self.report.waits = waits;
            if !has_progress || Instant::now() >= deadline {
                return Ok(());
            }
            tokio::time::sleep(SLOT_POLL_INTERVAL).await;
        }
    }

    /// Performs maintenance steps and adds their results to the report. Returns true if at least
    /// one of the steps was performed.
    async fn perform_steps(&mut self, steps: &[RetentionStep]) -> Result<bool, CatalogError> {
        let (marks, others): (Vec<_>, Vec<_>) = steps.iter().partition(|step| step.is_mark());
        let mut has_progress = self.perform_in_batches(&marks).await?;
        for step in others {
            has_progress |= self.perform_step(step).await?;
        }
        Ok(has_progress)
    }

    /// Performs maintenance steps, several in each transaction, and adds their results to the
    /// report. Returns true if at least one of the steps was performed.
    async fn perform_in_batches(&mut self, steps: &[&RetentionStep]) -> Result<bool, CatalogError> {
        let mut has_progress = false;
        let mut remaining = steps;
        let mut count = STEPS_PER_TRANSACTION;
        while !remaining.is_empty() {
            let (batch, rest) = remaining.split_at(count.min(remaining.len()));
            if let [step] = batch {
                has_progress |= self.perform_step(step).await?;
            } else if let Some(failed) = self.perform_together(batch).await? {
                // A smaller batch takes less time, and may not include the step that fails.
                count = batch.len() / 2;
                if is_busy(&failed.code) {
                    tokio::time::sleep(LOCK_TIMEOUT / 2).await;
                }
                continue;
            } else {
                has_progress = true;
            }
            remaining = rest;
            count = (2 * count).min(STEPS_PER_TRANSACTION);
        }
        Ok(has_progress)
    }

    /// Performs several maintenance steps in one transaction. Returns the error if the transaction
    /// fails or takes too long.
    async fn perform_together(
        &mut self,
        steps: &[&RetentionStep],
    ) -> Result<Option<Failed>, CatalogError> {
        let statements: Vec<_> = steps.iter().map(|step| self.statements(step)).collect();
        let (mut preparation, mut block) = (String::new(), String::new());
        for of_step in &statements {
            preparation.push_str(&of_step.preparation);
            let _ = write!(block, "EXECUTE {}; ", escape_literal(&of_step.locking));
        }
        // Combine all statements that lock a table into one DO statement, because the timeout
        // applies to each statement separately.
        let block = escape_literal(&format!("BEGIN {block}END"));
        let sql = format!("{preparation}{}", bounded(&format!("DO {block}")));
        let failed = self.attempt_once(&sql).await?;
        if failed.is_none() {
            self.commit().await?;
            let done = statements.into_iter().filter_map(|of_step| of_step.done);
            self.report.done.extend(done);
        }
        Ok(failed)
    }

    /// Performs a maintenance step and adds its result to the report. Returns false if the step
    /// fails.
    async fn perform_step(&mut self, step: &RetentionStep) -> Result<bool, CatalogError> {
        let statements = self.statements(step);
        if matches!(step, RetentionStep::Finalize(_)) && !self.wait_for_users().await? {
            return Ok(false);
        }
        let locking = bounded(&statements.locking);
        let sql = format!("{}{locking}", statements.preparation);
        let Some(failed) = self.attempt(&sql).await? else {
            self.commit().await?;
            self.report.done.extend(statements.done);
            return Ok(true);
        };
        let problem = match is_busy(&failed.code) {
            true => failed.busy(step.table()),
            false => self.step_error(step, failed),
        };
        self.report.problems.push(problem);
        Ok(false)
    }

    /// Returns the SQL statements that perform a maintenance step.
    fn statements(&self, step: &RetentionStep) -> StepStatements {
        let name = step.table();
        let (locking, done) = match step {
            RetentionStep::Create(_, range) => (
                self.attach_sql(name, *range),
                Some(ahead::describe_created(name, *range)),
            ),
            RetentionStep::MarkClosed(_) => (self.mark_sql(name, MarkKind::Closed), None),
            RetentionStep::MarkDelivered(_) => (
                self.mark_sql(name, MarkKind::Delivered),
                Some(format!("partition {name} is delivered")),
            ),
            RetentionStep::Detach(partition) => (
                self.detach_sql(partition),
                Some(format!("partition {name} detached")),
            ),
            RetentionStep::Finalize(_) => (
                format!(
                    "ALTER TABLE {} DETACH PARTITION {} FINALIZE",
                    self.outbox.name.quoted(),
                    name.quoted()
                ),
                Some(format!("partition {name} detached")),
            ),
            RetentionStep::MarkDetached(_) => (self.mark_sql(name, MarkKind::Detached), None),
            RetentionStep::Drop(table) => (drop_sql(table), Some(format!("table {name} dropped"))),
        };
        let preparation = match step {
            RetentionStep::Create(..) => format!("{}; ", self.create_sql(name)),
            RetentionStep::Drop(_) => examine_sql(name, Statement::Alter),
            _ => String::new(),
        };
        StepStatements {
            preparation,
            locking,
            done,
        }
    }

    /// Waits until every transaction that has used the table has ended. Such a transaction may
    /// still treat the partition being detached as part of the table, and FINALIZE waits only for
    /// running statements.
    async fn wait_for_users(&mut self) -> Result<bool, CatalogError> {
        let table = self.outbox.name.clone();
        let lock = format!(
            "LOCK TABLE ONLY {} IN ACCESS EXCLUSIVE MODE",
            table.quoted()
        );
        self.run(&table, &lock).await
    }

    /// Runs statements on a table in one transaction. If the statements fail, adds the error to the
    /// report and returns false.
    async fn run(&mut self, table: &TableName, sql: &str) -> Result<bool, CatalogError> {
        let failed = self.attempt(&bounded(sql)).await?;
        if failed.is_none() {
            self.commit().await?;
        }
        Ok(self.report_failed(table, failed))
    }

    /// If `failed` contains an error, adds it to the report and returns false.
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

    /// Begins a transaction that locks the table against changes by other sessions. On failure,
    /// adds the reason to the report and returns false.
    async fn begin_locked(&mut self) -> Result<bool, CatalogError> {
        let table = self.outbox.name.clone();
        let failed = self.attempt("").await?;
        Ok(self.report_failed(&table, failed))
    }

    async fn commit(&self) -> Result<(), CatalogError> {
        Ok(self.client.batch_execute("COMMIT").await?)
    }

    /// Runs statements in a transaction and leaves the transaction open. Retries several times if a
    /// lock is not available.
    async fn attempt(&self, sql: &str) -> Result<Option<Failed>, CatalogError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let Some(failed) = self.attempt_once(sql).await? else {
                return Ok(None);
            };
            if !is_busy(&failed.code) || attempts == LOCK_ATTEMPTS_MAX {
                return Ok(Some(Failed { attempts, ..failed }));
            }
            tokio::time::sleep(LOCK_TIMEOUT / 2 * attempts).await;
        }
    }

    /// Runs statements in a transaction and leaves the transaction open. Does not retry.
    async fn attempt_once(&self, sql: &str) -> Result<Option<Failed>, CatalogError> {
        let Err(error) = self.begin_transaction(sql).await else {
            return Ok(None);
        };
        let code = match &error {
            CatalogError::Server(error) => error.code.clone(),
            CatalogError::ForeignCode { .. } | CatalogError::RowSecurity { .. } => String::new(),
            _ => return Err(error),
        };
        self.client.batch_execute("ROLLBACK").await?;
        Ok(Some(Failed {
            code,
            error,
            attempts: 1,
        }))
    }

    async fn begin_transaction(&self, sql: &str) -> Result<(), CatalogError> {
        self.client.batch_execute(BEGIN_READ_COMMITTED).await?;
        self.catalog
            .lock_and_examine(&self.outbox.name, self.outbox.statement())
            .await?;
        // The statements were composed from properties that may have changed before the table was
        // locked, so query the properties again.
        let now = facts::query_maintained_table(self.client, &self.outbox.name).await?;
        if now.as_ref() != Some(self.outbox) {
            return Err(CatalogError::TableChanged(self.outbox.name.clone()));
        }
        Ok(self.client.batch_execute(sql).await?)
    }

    fn step_error(&self, step: &RetentionStep, failed: Failed) -> RetentionError {
        match (step, failed.code.as_str(), &self.outbox.default) {
            // SQLSTATE check_violation: rows in the default partition belong in the new partition.
            (RetentionStep::Create(name, range), "23514", Some(default)) => {
                RetentionError::DefaultHasRows {
                    partition: name.clone(),
                    default: default.clone(),
                    range: *range,
                }
            }
            // SQLSTATE duplicate_table.
            (RetentionStep::Create(name, _), "42P07", _) => RetentionError::NameTaken(name.clone()),
            _ => failed.error.into(),
        }
    }

    /// Returns statements that detach the partition and record this in its comment. DETACH
    /// CONCURRENTLY would not block writers while it waits for its lock, but it can't run in the
    /// transaction that examines the table, and PostgreSQL rejects it if a default partition
    /// exists. While plain DETACH holds its lock, no transaction has uncommitted rows in the
    /// partition, so the comment can be written immediately.
    fn detach_sql(&self, partition: &Partition) -> String {
        let name = &partition.name;
        format!(
            "ALTER TABLE {} DETACH PARTITION {}; {}",
            self.outbox.name.quoted(),
            name.quoted(),
            self.mark_sql(name, MarkKind::Detached)
        )
    }

    /// Returns a statement that updates the removal progress that the table's comment records. The
    /// server copies the comment's other lines, which can have any length, so Walpost never reads
    /// them.
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

/// Returns statements that drop a detached partition, provided that it has not changed since its
/// comment was read. The partition must have been inspected in the same transaction.
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
         RAISE EXCEPTION 'the detached partition has changed since it was inspected, and was not dropped' \
         USING ERRCODE = 'object_not_in_prerequisite_state'; \
         END IF; END",
        escape_literal(&name.quoted())
    );
    let block = escape_literal(&block);
    // Lock the detached table itself. The lock on the outbox does not prevent changes to the
    // detached table.
    format!(
        "LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE; DO {block}; DROP TABLE {name}",
        name = name.quoted(),
    )
}

/// Limits the duration of each statement to the lock timeout, because the statements block writers.
fn bounded(statements: &str) -> String {
    let limit = LOCK_TIMEOUT.as_millis();
    format!("SET LOCAL statement_timeout = {limit}; {statements}")
}

/// The error from statements that failed.
struct Failed {
    /// The SQLSTATE error code.
    code: String,
    error: CatalogError,
    attempts: u32,
}

impl Failed {
    fn busy(&self, table: &TableName) -> RetentionError {
        RetentionError::Busy {
            table: table.clone(),
            limit: LOCK_TIMEOUT,
            attempts: self.attempts,
        }
    }
}

/// Returns whether the SQLSTATE is lock_not_available, query_canceled (the statement took too long)
/// or deadlock_detected.
fn is_busy(code: &str) -> bool {
    matches!(code, "55P03" | "57014" | "40P01")
}
