//! Prints or runs the SQL files that create an outbox, role, publication and slot.

use std::fmt;
use std::time::Duration;

use super::catalog::slot_owner::{DefinedBy, UnknownOwner};
use super::catalog::slot_state::FirstStart;
use super::catalog::table_state::Refresh;
use super::catalog::{Catalog, CatalogError, ObservedTable};
use super::sql_file::{self, GUARD, PREREQUISITES, SessionKind, Variables};
use super::table::TableName;
use super::target::{Outbox, Target};

const OUTBOX: &str = include_str!("../../sql/outbox.sql");
const OUTBOX_PARTITIONED: &str = include_str!("../../sql/outbox_partitioned.sql");
const PUBLISH: &str = include_str!("../../sql/publish.sql");
const TABLES: &str = include_str!("../../sql/tables.sql");
const ADD_OUTBOX: &str = include_str!("../../sql/add_outbox.sql");
const JOURNAL: &str = include_str!("../../sql/journal.sql");
const WRITER: &str = include_str!("../../sql/writer.sql");
const OWNER: &str = include_str!("../../sql/owner.sql");
const ROLE: &str = include_str!("../../sql/role.sql");
const PUBLICATION: &str = include_str!("../../sql/publication.sql");
const SLOT: &str = include_str!("../../sql/slot.sql");
const SNAPSHOT: &str = include_str!("../../sql/snapshot.sql");

/// The oldest server version that supports failover slots, as `server_version_num`.
const FAILOVER_SINCE: i32 = 170_000;

/// Maximum number of attempts to run the transaction. Another attempt is made if another session
/// creates the same objects concurrently.
const ATTEMPTS: u32 = 5;

/// The database objects to create, and how to create them.
#[derive(Clone, Debug)]
pub(crate) struct Provision {
    /// The pipeline's name.
    pub pipeline: String,
    /// Whether the pipeline is defined by an operator or by a row of a query's result.
    pub defined_by: DefinedBy,
    /// Whether the pipeline is allowed to use the slot even if the slot belongs to another
    /// pipeline.
    pub takes_slot: bool,
    /// The outbox, publication and slot.
    pub target: Target,
    /// Whether the table is partitioned by day.
    pub partitioned: bool,
    /// The role to create for `walpost run`, or `None` to create none.
    pub role: Option<String>,
    /// The role that will own the table, or `None` for the current role.
    pub owner: Option<String>,
    /// The roles that will be allowed to send events.
    pub writers: Vec<String>,
    /// Whether to create a failover slot. `None` creates one if the server supports failover slots.
    pub failover: Option<bool>,
    /// The lock timeout for each statement. It also limits how long the creation of the slot waits
    /// for running transactions.
    pub lock_timeout: Duration,
    /// The pipeline's `max_row_bytes`.
    pub row_bytes_max: usize,
    /// Maximum size of an event in a new outbox, or `None` for the default.
    pub max_event_bytes: Option<u64>,
    /// Whether a pipeline's first run with the slot delivers existing rows.
    pub first_start: FirstStart,
}

/// All steps, in the order in which they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scripts {
    /// Steps that run together in one transaction.
    pub together: Vec<Script>,
    /// Steps that run after the transaction, one at a time, because PostgreSQL can't create a slot
    /// in a transaction that has performed writes.
    pub after: Vec<Script>,
}

/// One step: a batch of statements that creates an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Script {
    /// The object that the step creates.
    pub makes: String,
    /// The SQL statements of the step.
    pub sql: String,
}

/// The error that [`Provision::apply`] returns if a step fails.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {reason}")]
pub(crate) struct ProvisionError {
    /// The object that the step creates.
    pub step: String,
    /// The reason for the failure.
    pub reason: CatalogError,
    /// Which objects exist after the failure.
    pub left: LeftTables,
}

/// Which objects exist after a step has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftTables {
    /// The database was not changed.
    Nothing,
    /// The connection was lost during the commit, so it is unknown whether the transaction was
    /// committed.
    Unknown,
    /// Everything except the slot exists.
    NoSlot,
    /// All objects exist, including the slot, which now retains WAL, but the slot has not been
    /// recorded in Walpost's tables.
    Slot,
    /// All steps except the last one succeeded. The slot already existed, so a pipeline may be
    /// streaming from it.
    LastStep,
}

impl fmt::Display for LeftTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "Nothing was changed",
            Self::Unknown => {
                "The connection was lost during the commit, so the objects may or may not exist. Run the same command again: it leaves existing \
                 objects unchanged"
            }
            Self::NoSlot => {
                "Everything except the slot was created. To create the slot, run the same command again"
            }
            Self::Slot => {
                "The slot was created and retains WAL from now on. Run the same command again, which leaves existing objects \
                 unchanged; or drop the slot with sql/teardown.sql"
            }
            Self::LastStep => {
                "The slot already existed. Run the same command again, which leaves existing objects unchanged"
            }
        })
    }
}

impl Provision {
    /// Returns the steps in the required order. The slot's prerequisites are checked first. The
    /// journal is created before the role, which is granted privileges on it. Ownership is
    /// transferred only after everything that requires the owner's privileges has been created. The
    /// publication is created before the slot, so that it exists at every position that the slot
    /// decodes.
    #[must_use]
    pub(crate) fn scripts(&self) -> Scripts {
        self.scripts_for(0, SessionKind::Any)
    }

    /// Returns the same steps as [`Self::scripts`], for a server with this `server_version_num`.
    fn scripts_for(&self, version: i32, session: SessionKind) -> Scripts {
        let Target {
            outbox,
            publication,
            slot,
            ..
        } = &self.target;
        let fill_in = |file: &str| self.variables(session).fill_in(file);
        let mut together = vec![Script {
            makes: format!("prerequisites of slot {slot}"),
            sql: fill_in(PREREQUISITES),
        }];
        if !outbox.is_messages() {
            together.push(Script {
                makes: "function walpost.lock_and_examine".to_owned(),
                sql: fill_in(GUARD),
            });
        }
        together.extend(match outbox {
            Outbox::Table(_) | Outbox::OneOf { .. } => {
                let table = if self.partitioned {
                    OUTBOX_PARTITIONED
                } else {
                    OUTBOX
                };
                Some(Script {
                    makes: outbox.to_string(),
                    sql: fill_in(table),
                })
            }
            // Patterns do not specify a table to create. Each of the tables is created with a
            // separate command.
            Outbox::Tables(_) => None,
            Outbox::Messages { .. } => Some(Script {
                makes: "function walpost.publish".to_owned(),
                sql: fill_in(PUBLISH),
            }),
        });
        if let Some(table) = outbox.table() {
            // The following statements refer to the table by name. The lock ensures that the name
            // still refers to the table that was examined.
            together.push(Script {
                makes: format!("lock on {table}"),
                sql: sql_file::examine(&self.target, session, "owners read"),
            });
        }
        for writer in &self.writers {
            together.push(Script {
                makes: format!("privileges that allow role {writer} to send events"),
                sql: Variables {
                    writer: Some(writer),
                    ..self.variables(session)
                }
                .fill_in(WRITER),
            });
        }
        together.push(Script {
            makes: "table walpost.journal".to_owned(),
            sql: fill_in(JOURNAL),
        });
        if outbox.is_several() {
            together.push(Script {
                makes: "function walpost.add_outbox".to_owned(),
                sql: fill_in(TABLES),
            });
        }
        if let Some(role) = &self.role {
            together.push(Script {
                makes: format!("role {role}"),
                sql: fill_in(ROLE),
            });
        }
        together.push(Script {
            makes: format!("publication {publication}"),
            sql: fill_in(PUBLICATION),
        });
        if let Some(owner) = &self.owner {
            together.push(Script {
                makes: format!("ownership of {outbox} by role {owner}"),
                sql: fill_in(OWNER),
            });
        }
        together.push(Script {
            makes: "ownership of Walpost's objects".to_owned(),
            sql: sql_file::examine(
                &self.target,
                session,
                match outbox.is_several() {
                    true => "owners journal slot_state table_state outbox_row present",
                    false => "owners journal slot_state table_state present",
                },
            ),
        });
        let slot = Script {
            makes: format!("slot {slot}"),
            sql: Variables {
                failover: self.failover.unwrap_or(version >= FAILOVER_SINCE),
                ..self.variables(session)
            }
            .fill_in(SLOT),
        };
        let last = match outbox {
            // `walpost.add_outbox` makes the slot deliver the rows that the table already contains,
            // so `walpost run` does not have to copy them.
            Outbox::OneOf { table, .. } => Some(Script {
                makes: format!("{table} in publication {publication}"),
                sql: fill_in(ADD_OUTBOX),
            }),
            Outbox::Tables(_) => None,
            Outbox::Table(_) | Outbox::Messages { .. } => Some(Script {
                makes: "journal entry about rows older than the slot".to_owned(),
                sql: fill_in(SNAPSHOT),
            }),
        };
        let after = [slot].into_iter().chain(last).collect();
        Scripts { together, after }
    }

    /// Runs the steps. Existing objects are left unchanged. If a table is added to a slot that
    /// several tables share, `fits` checks whether the table is compatible with the settings, and
    /// returns the reason if it is not compatible. The check must happen before the commit, because
    /// an incompatible table would halt the pipeline for all tables.
    ///
    /// # Errors
    /// Returns an error if a step fails. The error states which objects exist after the failure.
    pub(crate) async fn apply(
        &self,
        catalog: &Catalog,
        fits: impl Fn(&TableName, &ObservedTable) -> Result<(), String>,
    ) -> Result<(), ProvisionError> {
        let timeout = format!("SET lock_timeout = {}", self.lock_timeout.as_millis());
        run(catalog, "session", &timeout, LeftTables::Nothing).await?;
        let locked = catalog.lock_init(self.lock_timeout).await;
        locked.map_err(failed("lock of walpost init", LeftTables::Nothing))?;
        let applied = self.apply_separately(catalog, fits).await;
        // Without an explicit unlock, the session would hold the lock until the server detects that
        // the connection was closed.
        catalog.unlock_init().await;
        applied
    }

    async fn apply_separately(
        &self,
        catalog: &Catalog,
        fits: impl Fn(&TableName, &ObservedTable) -> Result<(), String>,
    ) -> Result<(), ProvisionError> {
        let slot = &self.target.slot;
        let found = catalog.slot(slot).await;
        let is_new = found
            .map_err(failed(&format!("slot {slot}"), LeftTables::Nothing))?
            .is_none();
        let checked = self.check_slot_owner(catalog, is_new).await;
        checked.map_err(failed(&format!("slot {slot}"), LeftTables::Nothing))?;
        let version = catalog.version().await;
        let version = version.map_err(failed("version of the server", LeftTables::Nothing))?;
        if self.failover == Some(true) && version < FAILOVER_SINCE {
            let reason = CatalogError::Unexpected(format!(
                "server_version_num is {version}, but failover slots require PostgreSQL 17 or later. Remove --failover"
            ));
            return Err(failed(&format!("slot {slot}"), LeftTables::Nothing)(reason));
        }
        let Scripts { together, after } = self.scripts_for(version, SessionKind::Own);
        let mut attempt = 1;
        while let Err(error) = self.run_together(catalog, &together, &fits).await {
            if attempt == ATTEMPTS || !is_conflict(&error.reason) {
                return Err(error);
            }
            attempt += 1;
            tracing::info!(%error, "another session has just created the same object; trying again");
        }
        let mut left = LeftTables::NoSlot;
        for Script { makes, sql } in &after {
            tracing::info!("checking or creating {makes}");
            run(catalog, makes, sql, left).await?;
            if left == LeftTables::NoSlot && is_new {
                let step = "row for the new slot in walpost.slot_state";
                let recorded = catalog
                    .record_new_slot(&self.pipeline, &self.target, self.first_start)
                    .await;
                recorded.map_err(failed(step, LeftTables::Slot))?;
            }
            if left == LeftTables::NoSlot && !is_new {
                let step = "row for the slot in walpost.slot_state";
                let recorded = self.record_other_history(catalog).await;
                recorded.map_err(failed(step, LeftTables::LastStep))?;
                if self.takes_slot {
                    let taken = catalog.take_slot(&self.pipeline, &self.target).await;
                    taken.map_err(failed(step, LeftTables::LastStep))?;
                }
            }
            left = if is_new {
                LeftTables::Slot
            } else {
                LeftTables::LastStep
            };
            // Record how the tables are published after the slot has been created, because
            // walpost.add_outbox looks up the slot in walpost.table_state. Record it again after
            // walpost.add_outbox has run, because this function may have omitted rows.
            let recorded = self.record_tables(catalog).await;
            let step = "rows for the published tables in walpost.table_state";
            recorded.map_err(failed(step, left))?;
        }
        let accepted = self.accept_name(catalog).await;
        let step = "row for the renamed table in walpost.table_state";
        accepted.map_err(failed(step, LeftTables::LastStep))
    }

    /// If the pipeline is defined by a row of a query's result, checks that the slot belongs to the
    /// pipeline. If the slot is new, checks that no earlier slot with the same name is recorded as
    /// belonging to another pipeline. Skips these checks if an operator has allowed the pipeline to
    /// use the slot anyway.
    async fn check_slot_owner(&self, catalog: &Catalog, is_new: bool) -> Result<(), CatalogError> {
        if self.takes_slot {
            return Ok(());
        }
        let unknown = match is_new {
            true => UnknownOwner::Allowed,
            false => UnknownOwner::Rejected,
        };
        let checked =
            catalog.check_slot_owner(&self.pipeline, self.defined_by, &self.target, unknown);
        match checked.await {
            // A missing privilege is not an error here: without the privilege, nothing can be
            // recorded about the slot, and `run` halts unless the slot is recorded as belonging to
            // the pipeline.
            Err(CatalogError::Server(error)) if error.code == "42501" => Ok(()),
            checked => checked,
        }
    }

    /// Records that the table's rows are allowed to be published under its current name, which the
    /// operator specified. The table was possibly renamed.
    async fn accept_name(&self, catalog: &Catalog) -> Result<(), CatalogError> {
        let Outbox::OneOf { table, .. } = &self.target.outbox else {
            return Ok(());
        };
        match catalog.accept_name(&self.target, table).await {
            Ok(true) => tracing::info!(
                "accepted the new name of table {table}, which was renamed. Restart the pipeline if it has halted"
            ),
            Ok(false) => {}
            Err(CatalogError::Server(error)) if error.code == "42501" => tracing::warn!(
                "failed to record in walpost.table_state that the name of table {table} is accepted: {error}"
            ),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Records how the tables are published. If the current role lacks the privileges, logs a
    /// warning instead of returning an error.
    async fn record_tables(&self, catalog: &Catalog) -> Result<(), CatalogError> {
        let recorded = catalog.record_tables(&self.pipeline, &self.target, Refresh::Nothing);
        let why = match recorded.await {
            Ok(None) => return Ok(()),
            Ok(Some(why)) => why,
            // A missing privilege is not an error here, because `run` also records the tables,
            // using a role that has the privileges.
            Err(CatalogError::Server(error)) if error.code == "42501" => error.to_string(),
            Err(error) => return Err(error),
        };
        tracing::warn!(
            pipeline = self.pipeline,
            "failed to record the tables of the publication in walpost.table_state: {why}"
        );
        Ok(())
    }

    /// Runs the given steps in one transaction.
    async fn run_together(
        &self,
        catalog: &Catalog,
        steps: &[Script],
        fits: impl Fn(&TableName, &ObservedTable) -> Result<(), String>,
    ) -> Result<(), ProvisionError> {
        let roll_back = async || {
            // Errors are ignored: if the connection is lost, PostgreSQL rolls back the transaction
            // anyway.
            let _ = catalog.client().batch_execute("ROLLBACK").await;
        };
        run(catalog, "transaction", "BEGIN", LeftTables::Nothing).await?;
        for Script { makes, sql } in steps {
            tracing::info!("checking or creating {makes}");
            if let Err(error) = run(catalog, makes, sql, LeftTables::Nothing).await {
                roll_back().await;
                return Err(error);
            }
        }
        if let Outbox::OneOf { table, .. } = &self.target.outbox
            && let Err(reason) = self.check_columns(catalog, table, fits).await
        {
            roll_back().await;
            return Err(failed(&table.to_string(), LeftTables::Nothing)(reason));
        }
        let committed = run(catalog, "transaction", "COMMIT", LeftTables::Nothing).await;
        committed.map_err(|error| match error.reason {
            CatalogError::Lost(_) => ProvisionError {
                left: LeftTables::Unknown,
                ..error
            },
            _ => error,
        })
    }

    async fn check_columns(
        &self,
        catalog: &Catalog,
        table: &TableName,
        fits: impl Fn(&TableName, &ObservedTable) -> Result<(), String>,
    ) -> Result<(), CatalogError> {
        let found = catalog.tables(std::slice::from_ref(table), &self.target.publication);
        match found.await?.first() {
            Some((_, found)) => fits(table, found).map_err(CatalogError::Unfit),
            None => Ok(()),
        }
    }

    /// If events before the position of an existing slot may be missing, records these events and
    /// the slot. The slot may have been created manually, or by an `init` that failed before it
    /// recorded the slot.
    async fn record_other_history(&self, catalog: &Catalog) -> Result<(), CatalogError> {
        let Some(slot) = catalog.slot(&self.target.slot).await? else {
            return Ok(());
        };
        let of = catalog.slot_identity(&self.pipeline, &self.target).await?;
        let gap = catalog.gap_of_other_history(&of, slot.confirmed, self.first_start);
        match gap.await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => {
                catalog
                    .record_new_slot(&self.pipeline, &self.target, self.first_start)
                    .await
            }
            // A missing privilege is not an error here, because `run` also compares the slot with
            // `walpost.slot_state`, using a role that has the privileges.
            Err(CatalogError::Server(error)) if error.code == "42501" => {
                tracing::warn!(
                    pipeline = self.pipeline,
                    "failed to compare the slot with walpost.slot_state: {error}"
                );
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn variables(&self, session: SessionKind) -> Variables<'_> {
        Variables {
            pipeline: &self.pipeline,
            target: &self.target,
            role: self.role.as_deref(),
            owner: self.owner.as_deref(),
            writer: None,
            failover: false,
            row_bytes_max: self.row_bytes_max,
            max_event_bytes: self.max_event_bytes,
            session,
        }
    }
}

async fn run(
    catalog: &Catalog,
    makes: &str,
    sql: &str,
    left: LeftTables,
) -> Result<(), ProvisionError> {
    let ran = catalog.client().batch_execute(sql).await;
    ran.map_err(|error| failed(makes, left)(error.into()))
}

fn failed(step: &str, left: LeftTables) -> impl FnOnce(CatalogError) -> ProvisionError {
    let step = step.to_owned();
    move |reason| ProvisionError { step, reason, left }
}

/// Returns whether the error means that another session created the same object concurrently. The
/// next attempt will find that object.
fn is_conflict(error: &CatalogError) -> bool {
    let CatalogError::Server(error) = error else {
        return false;
    };
    match &*error.code {
        // unique_violation in a catalog index, duplicate_object, duplicate_schema, duplicate_table,
        // duplicate_function
        "23505" | "42710" | "42P06" | "42P07" | "42723" => true,
        "XX000" => error.message.starts_with("tuple concurrently"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::table_pattern::TablePatterns;

    fn provision() -> Provision {
        Provision {
            pipeline: "it's".to_owned(),
            defined_by: DefinedBy::Operator,
            takes_slot: false,
            target: Target {
                outbox: Outbox::Table("\"My Shop\".\"out'box\"".parse().expect("table")),
                publication: "pub".to_owned(),
                slot: "slot".to_owned(),
                commands: Default::default(),
            },
            partitioned: false,
            role: Some("carrier".to_owned()),
            owner: Some("table's owner".to_owned()),
            writers: vec!["shop's writer".to_owned()],
            failover: None,
            lock_timeout: Duration::from_secs(1),
            row_bytes_max: 64 << 20,
            max_event_bytes: None,
            first_start: FirstStart::CopiesTable,
        }
    }

    fn message_provision() -> Provision {
        let prefix = "events".to_owned();
        Provision {
            target: Target {
                outbox: Outbox::Messages { prefix },
                ..provision().target
            },
            ..provision()
        }
    }

    #[test]
    fn creates_the_given_table_and_no_others_if_several_tables_share_a_slot() {
        let patterns = TablePatterns::new(&["tenant_*.outbox".to_owned()]).expect("patterns");
        let table = "tenant_1.outbox".parse().expect("table");
        let with_outbox = |outbox| Provision {
            target: Target {
                outbox,
                ..provision().target
            },
            writers: Vec::new(),
            owner: None,
            ..provision()
        };
        let made = |provision: &Provision| {
            let Scripts { together, after } = provision.scripts();
            let made = together
                .iter()
                .chain(&after)
                .map(|script| script.makes.clone());
            made.collect::<Vec<_>>()
        };
        let all = with_outbox(Outbox::Tables(patterns.clone()));
        let one = with_outbox(Outbox::OneOf {
            table,
            of: patterns,
        });
        let shared = [
            "table walpost.journal",
            "function walpost.add_outbox",
            "role carrier",
            "publication pub",
            "ownership of Walpost's objects",
            "slot slot",
        ];
        assert_eq!(made(&all)[2..], shared);
        assert_eq!(made(&one)[2], "table tenant_1.outbox");
        assert_eq!(made(&one)[4..10], shared);
        assert_eq!(made(&one)[10..], ["tenant_1.outbox in publication pub"]);
        for (provision, several) in [(&all, "'on'"), (&one, "'on'"), (&provision(), "'off'")] {
            let Scripts { together, .. } = provision.scripts();
            let set = format!("SET walpost.several = {several};");
            assert!(
                together.iter().any(|script| script.sql.contains(&set)),
                "{set}"
            );
        }
    }

    #[test]
    fn substitutes_every_variable_in_the_sql_files() {
        let partitioned = Provision {
            partitioned: true,
            ..provision()
        };
        for provision in [provision(), partitioned, message_provision()] {
            let Scripts { together, after } = provision.scripts();
            for script in together.into_iter().chain(after) {
                for left in [":'", ":\"", "\n\\"] {
                    let code = script
                        .sql
                        .lines()
                        .filter(|line| !line.trim_start().starts_with("--"));
                    let code: Vec<_> = code.collect();
                    assert!(
                        !code.join("\n").contains(left),
                        "{left:?} in {}",
                        script.makes
                    );
                }
            }
        }
    }

    /// Returns the names and contents of the files in sql/.
    fn files() -> Vec<(String, String)> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let files = std::fs::read_dir(folder).expect("a folder").map(|entry| {
            let path = entry.expect("an entry").path();
            let text = std::fs::read_to_string(&path).expect("a text");
            (path.display().to_string(), text)
        });
        files.collect()
    }

    /// Returns the names and contents of the files in src/.
    fn sources() -> Vec<(String, String)> {
        let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => {
                        let text = std::fs::read_to_string(&path).expect("a text");
                        files.push((path.display().to_string(), text));
                    }
                }
            }
        }
        files
    }

    #[test]
    fn sql_files_set_the_search_path_before_any_other_statement() {
        for (name, text) in files() {
            let mut is_default = false;
            let statements = text.lines().filter(|line| {
                match line.split(' ').next() {
                    Some("\\if") => is_default = true,
                    Some("\\endif") => is_default = false,
                    _ => {}
                }
                let is_ours = line.starts_with("\\set") || line.starts_with("\\endif");
                !(line.is_empty() || line.starts_with("--") || is_default || is_ours)
            });
            let first: Vec<_> = statements.take(2).collect();
            match name.ends_with("session.sql") {
                true => {
                    let wanted = [
                        "SET search_path = pg_catalog, pg_temp;",
                        "SET row_security = off;",
                    ];
                    assert_eq!(first, wanted, "{name}");
                }
                false => assert_eq!(first.first(), Some(&"\\ir session.sql"), "{name}"),
            }
        }
    }

    #[test]
    fn sql_files_check_created_objects_before_they_commit() {
        for (name, text) in files() {
            let creates = [
                "CREATE SCHEMA",
                "CREATE TABLE",
                "CREATE OR REPLACE",
                "CREATE PUBLICATION",
            ];
            if !creates.iter().any(|word| text.contains(word)) {
                continue;
            }
            assert!(text.contains("\nBEGIN;\n"), "{name}");
            let (_, end) = text.rsplit_once("$walpost$;\n").unwrap_or_default();
            assert!(
                end.contains("\n\\ir examine.sql\n") && end.contains("\nCOMMIT;\n"),
                "{name}: {end}"
            );
        }
    }

    #[test]
    fn hints_refer_to_sql_files_without_a_relative_path() {
        for (name, text) in files() {
            let lines = text
                .lines()
                .filter(|line| !line.trim_start().starts_with("--"));
            for hint in lines
                .filter(|line| line.contains("reate it: ") || line.contains("reate it first: "))
            {
                // If the hint suggested `psql -f sql/guard.sql`, another user could create a file
                // with that name in the directory in which an operator runs the command.
                assert!(
                    hint.contains("Walpost in this database") && !hint.contains("-f sql/"),
                    "{name}: {hint:?}"
                );
            }
        }
    }

    #[test]
    fn function_bodies_do_not_depend_on_the_search_path_of_the_caller() {
        let mut functions = 0;
        for (name, text) in files() {
            for (at, _) in text.match_indices("CREATE OR REPLACE FUNCTION ") {
                functions += 1;
                let rest = &text[at..];
                let end = rest.find("$walpost$;\n").into_iter();
                let end = end.chain(rest.find("$ddl$, in_schema")).min();
                let function = &rest[..end.unwrap_or(rest.len())];
                let is_safe = function.contains("\nRETURN ")
                    || function.contains(" RETURN (")
                    || function.contains("SET search_path = pg_catalog, pg_temp")
                    || function.contains("OPERATOR(pg_catalog.");
                assert!(is_safe, "{name}: {function}");
            }
            assert!(
                !text.contains("CREATE FUNCTION"),
                "{name}: CREATE FUNCTION does not repair an existing function; use CREATE OR REPLACE"
            );
        }
        assert_eq!(functions, 7);
    }

    #[test]
    fn only_the_dial_module_opens_postgresql_connections() {
        for (path, text) in sources() {
            let is_listed = path.ends_with("dial/handover.rs") || path.ends_with("provision.rs");
            let connects =
                text.contains("tokio_postgres::connect") || text.contains("tokio_postgres::Config");
            assert!(is_listed || !connects, "{path}");
        }
    }

    /// Returns the part of a source file that is not a test, as one line with single spaces. A
    /// search for a statement then finds it even if its literal is split into several lines.
    fn code_on_one_line(path: &str, text: &str) -> String {
        let is_test = path.contains("/tests/") || path.ends_with("/tests.rs");
        let tests = "#[cfg(test)]\nmod tests {";
        let (code, _) = text.split_once(tests).unwrap_or((text, ""));
        let words = code.split_whitespace().filter(|word| *word != "\\");
        match is_test {
            true => String::new(),
            false => words.collect::<Vec<_>>().join(" "),
        }
    }

    /// Another role may have added a trigger or a rule to one of Walpost's tables, so each
    /// statement must examine the table first. Exceptions are listed with the reason why they are
    /// safe.
    #[test]
    fn walpost_tables_are_checked_before_each_statement_that_uses_them() {
        let listed = [
            // This file contains a condition for queries on the journal. The queries themselves are
            // in catalog/journal.rs.
            "catalog/drop_slot.rs",
            // This file contains the searched text only in an error message.
            "src/replay.rs",
        ];
        let mut statements = 0;
        for (path, text) in sources() {
            let code = code_on_one_line(&path, &text);
            let is_listed = listed.iter().any(|name| path.ends_with(name));
            for table in ["journal", "slot_state", "table_state", "outbox_row"] {
                for word in ["INTO", "UPDATE", "FROM", "JOIN", "LOCK TABLE", "COPY"] {
                    let named = format!("{word} walpost.{table}");
                    statements += code.matches(&named).count();
                    assert!(
                        is_listed || !code.contains(&named) || code.contains(".run_on_own_table("),
                        "{path} contains `{named}`, but does not call `Catalog::run_on_own_table`"
                    );
                }
            }
        }
        assert!(statements > 15, "{statements} statements");
    }

    /// Returns the words between `start` and the next `end` in `sql/examine.sql`.
    fn examined(start: &str, end: char) -> Vec<&'static str> {
        let (_, rest) = sql_file::EXAMINE.split_once(start).expect("the list");
        let (list, _) = rest.split_once(end).expect("a closing delimiter");
        let words = list.split(|c: char| !c.is_ascii_lowercase() && c != '_');
        words.filter(|word| !word.is_empty()).collect()
    }

    /// Another role could create an object in the schema walpost before Walpost does, or become the
    /// owner of an existing object.
    #[test]
    fn examine_script_checks_every_object_in_the_walpost_schema() {
        let tables = examined("own_tables CONSTANT name[] := '{", '}');
        let functions = examined("n.nspname = 'walpost' AND p.proname IN (", ')');
        let mut found = Vec::new();
        for (path, text) in files().into_iter().chain(sources()) {
            let code = code_on_one_line(&path, &text);
            for statement in code.split("CREATE ").skip(1) {
                let mut kind = Vec::new();
                for word in statement.split(' ').take(6) {
                    let Some(name) = word.strip_prefix("walpost.") else {
                        kind.push(word);
                        continue;
                    };
                    let end = name.find(|c: char| !c.is_ascii_lowercase() && c != '_');
                    let name = name[..end.unwrap_or(name.len())].to_owned();
                    let is_examined = match kind.contains(&"FUNCTION") {
                        true => functions.contains(&&*name),
                        false => kind.contains(&"TABLE") && tables.contains(&&*name),
                    };
                    let object = format!("{} walpost.{name}", kind.join(" "));
                    assert!(
                        is_examined,
                        "{path}: sql/examine.sql does not examine {object}"
                    );
                    found.push(name);
                    break;
                }
            }
        }
        for name in tables.into_iter().chain(functions) {
            assert!(found.iter().any(|found| found == name), "{name}: {found:?}");
        }
    }

    /// Only the module `table_guard` is allowed to read a table's rows. Exceptions are listed with
    /// the reason why they are safe.
    #[test]
    fn statements_use_a_table_only_after_it_has_been_checked() {
        // In these files, errors and warnings contain statements that an administrator can run.
        let messages = [
            "check/postgres.rs",
            "catalog/event_limits.rs",
            "catalog/hidden_rows.rs",
            "catalog/problem.rs",
            "decode/error.rs",
            "decode/table_names.rs",
            "session/publication.rs",
            "outbox/columns.rs",
            "src/replay.rs",
        ];
        let listed = [
            "catalog/table_guard.rs",
            // These files run their statements only while `table_guard` holds a lock on the table.
            "catalog/copy.rs",
            "catalog/table.rs",
            // This file runs its statements only in a transaction that examines the table first.
            "retention/rows.rs",
            // These files run DDL only if the current user owns the table, or after
            // `lock_and_examine` with `ALTER`.
            "src/retention.rs",
            "retention/ahead.rs",
            // In this file, the server only parses the statement, without planning or executing it,
            // and the table is locked while the server parses the statement.
            "replay/condition.rs",
        ];
        let reads = ["FROM {}", "FROM ONLY {", "FROM {table", "FROM {from_item"];
        let writes = ["INTO {", "UPDATE {", "UPDATE ONLY {", "COPY {", "JOIN {"];
        let ddl = [" TABLE {", " TABLE ONLY {", " TABLE IF EXISTS {"];
        for (path, text) in sources() {
            let is_in = |names: &[&str]| names.iter().any(|name| path.ends_with(name));
            if is_in(&listed) {
                continue;
            }
            let code = code_on_one_line(&path, &text);
            let ddl = ddl.iter().filter(|_| !is_in(&messages));
            for named in reads.iter().chain(&writes).chain(ddl) {
                assert!(!code.contains(named), "{path}: {named}");
            }
        }
    }

    /// Without an alias, the owner of a table could make a statement run a cast: the owner renames
    /// a column and gives the table the column's former name, and then an expression that names the
    /// column refers to the whole row. The owner can define casts for the table's row type.
    #[test]
    fn statements_use_an_alias_for_tables_owned_by_other_roles() {
        let mut found = Vec::new();
        for (name, text) in sources().into_iter().chain(files()) {
            let (code, _) = text.split_once("#[cfg(test)]").unwrap_or((&text, ""));
            for item in [
                "FROM ONLY {table}",
                "FROM {table}",
                "FROM %I.%I",
                "SELECT FROM %s",
            ] {
                for (at, _) in code.match_indices(item) {
                    if !code[at + item.len()..].starts_with(" AS ") {
                        found.push(format!("{name}: {item}"));
                    }
                }
            }
        }
        assert!(found.is_empty(), "{found:#?}");
    }

    /// The table may have changed since the statement was composed. `Catalog::lock_table` detects
    /// such a change. Code that only examines a table must detect the change itself, and is
    /// therefore listed here.
    #[test]
    fn only_listed_source_files_call_lock_and_examine_directly() {
        let listed = ["catalog/table_guard.rs", "src/retention.rs", "provision.rs"];
        for (path, text) in sources() {
            let is_listed = listed.iter().any(|name| path.ends_with(name));
            assert!(is_listed || !text.contains(".lock_and_examine("), "{path}");
        }
    }

    #[test]
    fn creates_a_failover_slot_if_the_server_supports_it_unless_disabled() {
        let is_failover_slot = |failover, version| {
            let provision = Provision {
                failover,
                ..provision()
            };
            let slot = provision
                .scripts_for(version, SessionKind::Any)
                .after
                .remove(0);
            let is_failover = slot.sql.contains("'slot', 'pgoutput', failover => true)");
            assert_ne!(
                is_failover,
                slot.sql.contains("'slot', 'pgoutput')"),
                "{}",
                slot.sql
            );
            is_failover
        };
        assert!(is_failover_slot(None, 170_000));
        assert!(!is_failover_slot(None, 160_009));
        assert!(!is_failover_slot(None, 0), "unknown version");
        assert!(!is_failover_slot(Some(false), 180_000));
        assert!(is_failover_slot(Some(true), 0));
    }

    #[test]
    fn sql_files_contain_the_default_event_size_limit() {
        let default = format!("\\set max_event_bytes {}\n", sql_file::MAX_EVENT_BYTES);
        for file in [OUTBOX, OUTBOX_PARTITIONED] {
            assert!(file.contains(&default), "{file}");
        }
        let default = format!("coalesce(max_event_bytes, {})", sql_file::MAX_EVENT_BYTES);
        assert!(PUBLISH.contains(&default));
        let filled = |provision: &Provision| {
            provision
                .variables(SessionKind::Any)
                .fill_in(":'max_event_bytes'")
        };
        assert_eq!(filled(&provision()), "'990000'\n");
        assert_eq!(filled(&message_provision()), "''\n");
        for provision in [provision(), message_provision()] {
            let max_event_bytes = Some(5);
            let limited = Provision {
                max_event_bytes,
                ..provision
            };
            assert_eq!(filled(&limited), "'5'\n");
        }
    }

    /// The SQL files can't contain the options that a suggested command needs to find the server.
    /// They contain a placeholder instead, which Walpost replaces with its own options.
    #[test]
    fn commands_suggested_by_sql_files_contain_a_configuration_placeholder() {
        let mut found = Vec::new();
        for (name, text) in files() {
            let lines = text.lines().filter(|line| !line.trim().starts_with("--"));
            for line in lines {
                for command in [
                    ": walpost init",
                    ": walpost check",
                    ": walpost replay",
                    ": walpost skip",
                ] {
                    if line.contains(command) && !line.contains("--config FILE") {
                        found.push(format!("{name}: {line}"));
                    }
                }
            }
        }
        assert!(found.is_empty(), "{found:#?}");
    }

    #[test]
    fn quotes_names_and_keeps_casts_unchanged() {
        let filled = provision()
            .variables(SessionKind::Any)
            .fill_in("\\set x y\nSELECT :'table', :\"schema\"::text, :'what';\n");
        assert_eq!(filled, "SELECT 'out''box', \"My Shop\"::text, :'what';\n");
    }

    /// Returns two lists of objects: those that the transaction creates, and those that later steps
    /// create.
    fn created_objects(provision: &Provision) -> [Vec<String>; 2] {
        let Scripts { together, after } = provision.scripts();
        [together, after].map(|scripts| scripts.into_iter().map(|script| script.makes).collect())
    }

    #[test]
    fn creates_the_publication_before_the_slot_and_the_journal_before_the_role() {
        let [together, after] = created_objects(&provision());
        assert_eq!(
            together,
            [
                "prerequisites of slot slot",
                "function walpost.lock_and_examine",
                "table \"My Shop\".\"out'box\"",
                "lock on \"My Shop\".\"out'box\"",
                "privileges that allow role shop's writer to send events",
                "table walpost.journal",
                "role carrier",
                "publication pub",
                "ownership of table \"My Shop\".\"out'box\" by role table's owner",
                "ownership of Walpost's objects",
            ]
        );
        assert_eq!(
            after,
            ["slot slot", "journal entry about rows older than the slot"]
        );
        let without = Provision {
            role: None,
            owner: None,
            writers: Vec::new(),
            ..provision()
        };
        assert_eq!(created_objects(&without)[0].len(), 7);
        assert_eq!(
            created_objects(&message_provision())[0][1],
            "function walpost.publish"
        );
    }
}
