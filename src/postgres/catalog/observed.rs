//! Holds the results of the catalog queries, and finds problems that prevent a pipeline from
//! running. Does no I/O.

use super::problem::{Holder, Problem, lost};
use super::slot_owner::UnknownOwner;
use super::{TableVersion, UnsafeFilter, synchronous};
use crate::model::dropped_slot::replay_command;
use crate::model::lsn::Lsn;
use crate::outbox::connect::ColumnFacts;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// The oldest supported version, as `server_version_num`.
const VERSION_MIN: i32 = 140_000;

/// A managed PostgreSQL service that does not allow ALTER SYSTEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Provider {
    /// Amazon RDS and Aurora.
    Rds,
    CloudSql,
    AlloyDb,
    /// Azure Database, Flexible Server.
    Azure,
}

impl Provider {
    /// For each service, a setting that exists only on its servers.
    pub(super) const SETTINGS: [(Self, &str); 4] = [
        (Self::Rds, "rds.logical_replication"),
        (Self::CloudSql, "cloudsql.logical_decoding"),
        (Self::AlloyDb, "alloydb.logical_decoding"),
        (Self::Azure, "azure.extensions"),
    ];

    /// Describes how to enable logical decoding on the service's servers.
    fn logical_decoding(self) -> &'static str {
        match self {
            Self::Rds => {
                "This server is Amazon RDS or Aurora: set rds.logical_replication = 1 in the parameter group (for \
                 Aurora, in the cluster parameter group), and reboot"
            }
            Self::CloudSql => {
                "This server is Cloud SQL: set the flag cloudsql.logical_decoding = on, which restarts the instance"
            }
            Self::AlloyDb => {
                "This server is AlloyDB: set the flag alloydb.logical_decoding = on, which restarts the instance"
            }
            Self::Azure => {
                "This server is Azure Database: set the server parameter wal_level = logical, and restart the server"
            }
        }
    }
}

/// The state of the server and of a pipeline's database objects, according to the catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// `server_version_num`.
    pub version: i32,
    /// When the server was started, and when its statistics were last reset. A crash of a server
    /// process also resets the statistics.
    pub starts: ServerStarts,
    /// The current database.
    pub database: String,
    /// PostgreSQL's name for the database encoding.
    pub encoding: String,
    /// The current role.
    pub user: String,
    /// The `application_name` of this session. Walpost's other sessions use the same name.
    pub application_name: String,
    /// `wal_level`.
    pub wal_level: String,
    /// `effective_wal_level`, which was added in PostgreSQL 19. Creating the first logical slot
    /// raises this level.
    pub effective_wal_level: Option<String>,
    /// `synchronous_standby_names`, if it matches Walpost's `application_name`.
    pub synchronous_standby_names: Option<String>,
    /// The managed service that runs the server, if detected. Queried only if `wal_level` is
    /// insufficient.
    pub provider: Option<Provider>,
    /// Whether the server is a standby that has not been promoted (`pg_is_in_recovery`).
    pub in_recovery: bool,
    /// `max_slot_wal_keep_size`; -1 means no limit.
    pub slot_wal_keep: Option<String>,
    /// The outbox table, if the outbox is a single table and the table exists.
    pub table: Option<ObservedTable>,
    /// Whether `walpost.publish` exists. Queried only for an outbox that uses logical messages.
    pub has_publish: bool,
    /// Whether the journal exists.
    pub has_journal: bool,
    /// Whether `walpost.slot_state` exists. If it does not exist, Walpost can't record confirmed
    /// positions.
    pub has_slot_state: bool,
    /// Whether `walpost.table_state` exists. If it does not exist, Walpost can't record how tables
    /// are published.
    pub has_table_state: bool,
    /// The publication, if it exists.
    pub publication: Option<ObservedPublication>,
    /// The slot, if it exists.
    pub slot: Option<ObservedSlot>,
}

/// When a server was started, and when its statistics were last reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServerStarts {
    /// `pg_postmaster_start_time()`, in seconds since 1970.
    pub postmaster: String,
    /// `stats_reset` in `pg_stat_bgwriter`. If a server process crashes, the server restarts all
    /// other processes and discards its statistics, but the postmaster keeps running.
    pub statistics: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedTable {
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_class.relkind`: `r` for an ordinary table, `p` for a partitioned table.
    pub kind: String,
    /// `pg_class.relpersistence`: `p` for a permanent table.
    pub persistence: String,
    /// Names and type OIDs of the published columns.
    pub columns: Vec<(String, u32)>,
    /// Type names of the published columns, for messages.
    pub types: Vec<String>,
    /// Other properties of the published columns.
    pub facts: Vec<ColumnFacts>,
    /// Whether the table has the trigger that `sql/no_update.sql` creates.
    pub rejects_update: bool,
    /// Whether the table has a primary key.
    pub has_key: bool,
    /// The version of the table. It is read before the columns are, so a later change to the
    /// columns is detected.
    pub version: TableVersion,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedPublication {
    /// Whether the publication publishes inserts.
    pub inserts: bool,
    /// Whether the publication also publishes changes other than inserts.
    pub more_than_inserts: bool,
    /// Whether the publication publishes partitions under the name of their root table.
    pub via_root: bool,
    /// Whether the publication contains the outbox table.
    pub has_table: bool,
    /// The outbox's tables that the publication contains, if the outbox consists of several tables.
    pub tables: Vec<TableName>,
    /// Whether the publication contains `walpost.outbox_row`. When a table is added to an outbox of
    /// several tables, its existing rows are written to `walpost.outbox_row`, so that the slot
    /// sends them.
    pub has_outbox_row: bool,
    /// Tables in the publication that do not belong to the outbox. If the outbox uses logical
    /// messages, these are all the tables in the publication.
    pub other_tables: Vec<String>,
    /// The publication's row filter for the outbox table, if any.
    pub row_filter: Option<String>,
    /// The first row filter in the publication that is not safe to evaluate, if any.
    pub unsafe_filter: Option<UnsafeFilter>,
    /// Whether a row filter could not be read because its table is locked.
    pub has_locked_filter: bool,
    /// The publication's owner, if the owner is not trusted to run code as the current role. An
    /// untrusted owner could add a row filter and remove it again, and the filter would still run
    /// code as the role that reads the slot.
    pub untrusted_owner: Option<String>,
}

impl ObservedPublication {
    /// Returns the outbox's table, even if it is not published. If the outbox consists of several
    /// tables, returns the published ones. If the outbox uses logical messages, returns no tables.
    #[must_use]
    pub(crate) fn outbox_tables(&self, outbox: &Outbox) -> Vec<TableName> {
        match outbox.table() {
            Some(table) => vec![table.clone()],
            None => self.tables.clone(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedSlot {
    /// The output plugin; `None` for a physical slot.
    pub plugin: Option<String>,
    /// The database of the slot; `None` for a physical slot.
    pub database: Option<String>,
    /// The PID of the server process that uses the slot.
    pub active_pid: Option<i32>,
    /// The session that uses the slot, if the role is allowed to see it.
    pub holder: Option<Holder>,
    /// The last WAL position that was confirmed for the slot.
    pub confirmed: Lsn,
    /// `wal_status`: `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// `invalidation_reason`, which states why the slot is lost. Reported since PostgreSQL 17.
    pub invalidation_reason: Option<String>,
    /// Whether the slot was synchronized from the primary (`synced`). Reported since PostgreSQL 17.
    pub synced: bool,
    /// Whether the slot is dropped when its session ends.
    pub temporary: bool,
    /// Whether a prepared transaction is sent when it is prepared instead of when it is committed.
    pub two_phase: bool,
}

impl Observed {
    /// Returns the problems that prevent a pipeline with this `target` from running, starting with
    /// the most fundamental one.
    #[must_use]
    pub(crate) fn problems(&self, target: &Target) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.version < VERSION_MIN {
            problems.push(Problem::Version {
                found: self.version,
            });
        }
        // Skip the remaining checks: the objects that they require may exist on the primary even
        // though the standby has not replayed their creation yet.
        if let Some(problem) = self.recovery_problem(target) {
            problems.push(problem);
            return problems;
        }
        if !self.has_logical_decoding() {
            problems.push(Problem::WalLevel {
                found: self.wal_level.clone(),
                remedy: self.provider.map_or(
                    "Set wal_level and restart the server: ALTER SYSTEM SET wal_level = logical",
                    Provider::logical_decoding,
                ),
            });
        }
        problems.extend(self.table_problem(target));
        problems.extend(self.publication_problem(target));
        problems.extend(self.slot_problem(target));
        problems
    }

    /// Returns a warning if Walpost is a synchronous standby of the server.
    #[must_use]
    pub(crate) fn synchronous_warning(&self) -> Option<String> {
        let names = self.synchronous_standby_names.as_deref()?;
        Some(synchronous::warning(names, &self.application_name))
    }

    /// Returns whether WAL contains the information that logical decoding requires, or will contain
    /// it once the slot exists.
    #[must_use]
    pub(super) fn has_logical_decoding(&self) -> bool {
        match self.effective_wal_level.as_deref() {
            None => self.wal_level == "logical",
            Some("logical") => true,
            // No logical slot exists yet. Creating a logical slot raises `effective_wal_level`.
            Some(_) => self.wal_level != "minimal" && self.slot.is_none(),
        }
    }

    /// Returns a problem if the server is a standby that can't stream from the slot. Since
    /// PostgreSQL 16, a standby can have its own slot, from which it can stream.
    fn recovery_problem(&self, target: &Target) -> Option<Problem> {
        let name = &target.slot;
        let found = match &self.slot {
            _ if !self.in_recovery => return None,
            None => format!("slot {name:?} does not exist on this server"),
            // A synchronized slot is temporary until its first synchronization completes.
            Some(slot) if slot.synced || slot.temporary => {
                format!("slot {name:?} is a copy of the primary's slot")
            }
            Some(_) => return None,
        };
        Some(Problem::InRecovery { found })
    }

    /// Returns whether a pipeline is allowed to use the slot even if Walpost can't determine which
    /// pipeline the slot belongs to. The pipeline is allowed to do so only if nothing can be read
    /// from the slot, because the slot does not exist in this database or can't be read on this
    /// server.
    #[must_use]
    pub(crate) fn unknown_owner(&self, target: &Target) -> UnknownOwner {
        let is_here = |slot: &ObservedSlot| slot.database.as_ref() == Some(&self.database);
        match self.slot.as_ref().is_some_and(is_here) && self.recovery_problem(target).is_none() {
            true => UnknownOwner::Rejected,
            false => UnknownOwner::Allowed,
        }
    }

    /// Returns a problem with the publication that would cause rows to be omitted, if there is one.
    #[must_use]
    pub(crate) fn publication_problem(&self, target: &Target) -> Option<Problem> {
        let publication = target.publication.clone();
        let Some(found) = &self.publication else {
            return Some(Problem::NoPublication {
                publication,
                init: target.init(&["--publication", &target.publication]),
                database: self.database.clone(),
            });
        };
        if let Some(filter) = &found.unsafe_filter {
            let filter = filter.clone();
            return Some(Problem::UnsafeFilter {
                publication,
                filter,
            });
        }
        let table = match &target.outbox {
            Outbox::Table(table) | Outbox::OneOf { table, .. } => table.clone(),
            Outbox::Tables(tables) => {
                return found.multi_table_problem(target, tables.to_string());
            }
            Outbox::Messages { .. } => {
                return (!found.other_tables.is_empty()).then(|| Problem::NotEmpty {
                    publication,
                    init: target.init(&["--publication", "NAME"]),
                    tables: format_some(&found.other_tables),
                    removed: format_first_for_drop(&found.other_tables),
                });
            }
        };
        let partitioned = self.table.as_ref().is_some_and(|table| table.kind == "p");
        let dropped = || replay_command(&target.commands, target.table_of_several().as_deref());
        if !found.inserts {
            Some(Problem::NoInserts {
                publication,
                dropped: dropped(),
            })
        } else if partitioned && found.has_table && !found.via_root {
            Some(Problem::NotViaRoot {
                publication,
                outbox: table.to_string(),
            })
        } else if !found.has_table {
            Some(Problem::NotPublished {
                publication,
                table,
                remedy: format!(
                    "Once the pipeline is running, send the rows that are missing from Kafka: {}; or, if the table \
                     was never in the publication: {}",
                    dropped(),
                    target.replay_from()
                ),
            })
        } else if !found.other_tables.is_empty() {
            Some(Problem::OtherTables {
                publication,
                init: target.init(&["--publication", "NAME"]),
                outbox: table.to_string(),
                others: format_some(&found.other_tables),
                removed: format_first_for_drop(&found.other_tables),
            })
        } else {
            None
        }
    }

    /// Returns a problem if the publication's owner is not trusted. In that case, the current role
    /// must not read the slot.
    #[must_use]
    pub(crate) fn publisher_problem(&self, target: &Target) -> Option<Problem> {
        let owner = self.publication.as_ref()?.untrusted_owner.clone()?;
        Some(Problem::UntrustedPublisher {
            publication: target.publication.clone(),
            owner,
            user: self.user.clone(),
        })
    }

    fn table_problem(&self, target: &Target) -> Option<Problem> {
        let table = target.outbox.table()?.clone();
        match &self.table {
            None => Some(Problem::NoTable {
                init: target.init_table(&table),
                table,
                database: self.database.clone(),
            }),
            Some(found) if found.kind != "r" && found.kind != "p" => Some(Problem::NotATable {
                table,
                kind: found.kind.clone(),
            }),
            Some(found) if found.persistence != "p" => Some(Problem::Unlogged { table }),
            Some(_) => None,
        }
    }

    fn slot_problem(&self, target: &Target) -> Option<Problem> {
        let slot = target.slot.clone();
        let Some(found) = &self.slot else {
            let init = target.init_slot();
            return Some(Problem::NoSlot { slot, init });
        };
        let other = || target.init(&["--slot", "NAME"]);
        let none = || "none (a physical slot)".to_owned();
        match (&found.plugin, &found.database) {
            (plugin, _) if plugin.as_deref() != Some("pgoutput") => Some(Problem::WrongPlugin {
                slot,
                init: other(),
                found: plugin.clone().unwrap_or_else(none),
            }),
            (_, database) if database.as_ref() != Some(&self.database) => {
                let found = database.clone().unwrap_or_else(none);
                Some(Problem::WrongDatabase {
                    slot,
                    found,
                    expected: self.database.clone(),
                })
            }
            _ if found.temporary => Some(Problem::Temporary {
                slot,
                init: other(),
            }),
            _ if found.two_phase => Some(Problem::TwoPhase {
                slot,
                init: other(),
            }),
            _ if found.wal_status.as_deref() == Some("lost") => Some(Problem::Lost {
                slot,
                init: target.init_slot(),
                resend: target.resend(),
                confirmed: found.confirmed,
                reason: lost(found.invalidation_reason.as_deref(), found.confirmed),
            }),
            _ => found.held_by_other(&target.slot, &self.application_name),
        }
    }
}

impl ObservedPublication {
    /// Checks the publication of an outbox that consists of several tables, and returns a problem
    /// if there is one. A publication without tables is not a problem, because the tables may not
    /// exist yet.
    fn multi_table_problem(&self, target: &Target, outbox: String) -> Option<Problem> {
        let publication = target.publication.clone();
        if !self.inserts {
            Some(Problem::NoInserts {
                publication,
                dropped: replay_command(&target.commands, Some("TABLE")),
            })
        } else if !self.via_root {
            // `publish_via_partition_root` is required even if no table is partitioned now, because
            // a partitioned table may be added later.
            Some(Problem::NotViaRoot {
                publication,
                outbox,
            })
        } else if !self.other_tables.is_empty() {
            // Tables that do not belong to the outbox are checked last, because they do not halt a
            // pipeline with `on_table_error = "set-aside"`.
            Some(Problem::OtherTables {
                publication,
                init: target.init(&["--publication", "NAME"]),
                outbox,
                others: format_some(&self.other_tables),
                removed: format_first_for_drop(&self.other_tables),
            })
        } else {
            None
        }
    }
}

impl ObservedSlot {
    /// If a program other than Walpost is reading this slot, returns a problem that names the slot
    /// as `slot`. `application_name` is the name that Walpost's own sessions use.
    #[must_use]
    pub(crate) fn held_by_other(&self, slot: &str, application_name: &str) -> Option<Problem> {
        let (pid, holder) = (self.active_pid?, self.holder.as_ref()?);
        (!holder.may_be_ours(application_name)).then(|| Problem::HeldByOther {
            slot: slot.to_owned(),
            pid,
            holder: holder.clone(),
        })
    }
}

/// Returns a warning about `tables`, which match the patterns of the outbox but are not published.
/// Returns `None` if `tables` is empty.
#[must_use]
pub(crate) fn unpublished_warning(target: &Target, tables: &[TableName]) -> Option<String> {
    let first = tables.first()?;
    let names: Vec<_> = tables.iter().map(TableName::to_string).collect();
    let init = target.init_table(first);
    Some(format!(
        "some tables match the configured patterns but are not in the publication, so their events are not delivered: \
         {}. Add each one: {init}; or change the patterns to exclude it",
        format_some(&names)
    ))
}

/// Returns an error about `tables`, which were delivered earlier and are no longer published.
/// Returns `None` if `tables` is empty.
#[must_use]
pub(crate) fn left_publication_error(target: &Target, tables: &[TableName]) -> Option<String> {
    let first = tables.first()?;
    let names: Vec<_> = tables.iter().map(TableName::to_string).collect();
    Some(format!(
        "some tables were removed from the publication, so their events are not delivered: {}. Add each one: {}; \
         or, if its events are no longer needed, rename the table or change the patterns to exclude it",
        format_some(&names),
        target.init_table(first)
    ))
}

/// Formats the first few names in a list. The list may be long: it can contain every table in the
/// database.
pub(crate) fn format_some(names: &[String]) -> String {
    match names.len().saturating_sub(LISTED_MAX) {
        0 => names.join(", "),
        more => format!("{} and {more} more", format_first(names)),
    }
}

fn format_first(names: &[String]) -> String {
    names[..names.len().min(LISTED_MAX)].join(", ")
}

/// Formats the first few names as a list for ALTER PUBLICATION ... DROP TABLE. Without ONLY, the
/// command fails if a table has a child that is not in the publication.
fn format_first_for_drop(names: &[String]) -> String {
    let names = names[..names.len().min(LISTED_MAX)].iter();
    let names: Vec<_> = names.map(|name| format!("ONLY {name}")).collect();
    names.join(", ")
}

/// Maximum number of names in a message.
const LISTED_MAX: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::table_pattern::TablePatterns;

    fn target() -> Target {
        Target {
            outbox: Outbox::Table("public.outbox".parse().expect("table")),
            publication: "pub".to_owned(),
            slot: "slot".to_owned(),
            commands: Default::default(),
        }
    }

    fn healthy() -> Observed {
        let text = |text: &str| text.to_owned();
        Observed {
            version: 150_018,
            starts: ServerStarts::default(),
            database: text("shop"),
            encoding: text("UTF8"),
            user: text("walpost"),
            application_name: text("walpost"),
            wal_level: text("logical"),
            effective_wal_level: None,
            synchronous_standby_names: None,
            provider: None,
            in_recovery: false,
            slot_wal_keep: Some(text("-1")),
            has_publish: false,
            has_journal: true,
            has_slot_state: true,
            has_table_state: true,
            table: Some(ObservedTable {
                kind: text("r"),
                persistence: text("p"),
                ..ObservedTable::default()
            }),
            publication: Some(ObservedPublication {
                inserts: true,
                has_table: true,
                ..ObservedPublication::default()
            }),
            slot: Some(ObservedSlot {
                plugin: Some(text("pgoutput")),
                database: Some(text("shop")),
                confirmed: Lsn(1),
                wal_status: Some(text("reserved")),
                invalidation_reason: None,
                ..ObservedSlot::default()
            }),
        }
    }

    #[test]
    fn reports_no_problems_for_a_correctly_configured_database() {
        assert_eq!(healthy().problems(&target()), []);
        let standby = Observed {
            in_recovery: true,
            ..healthy()
        };
        assert_eq!(
            standby.problems(&target()),
            [],
            "a standby with its own slot has no problems"
        );
    }

    #[test]
    fn uses_effective_wal_level_if_the_server_reports_it() {
        let lacks = |level: &str, effective: Option<&str>, has_slot: bool| {
            let mut observed = Observed {
                wal_level: level.to_owned(),
                effective_wal_level: effective.map(str::to_owned),
                ..healthy()
            };
            observed.slot = observed.slot.filter(|_| has_slot);
            let problems = observed.problems(&target());
            problems
                .iter()
                .any(|problem| matches!(problem, Problem::WalLevel { .. }))
        };
        assert!(lacks("replica", None, true));
        assert!(lacks("replica", None, false));
        assert!(!lacks("replica", Some("logical"), true));
        assert!(
            !lacks("replica", Some("replica"), false),
            "creating the slot raises effective_wal_level"
        );
        assert!(lacks("replica", Some("replica"), true));
        assert!(lacks("minimal", Some("minimal"), false));
    }

    #[test]
    fn suggests_the_remedy_for_the_detected_managed_service() {
        for (provider, setting) in Provider::SETTINGS {
            let observed = Observed {
                wal_level: "replica".to_owned(),
                provider: Some(provider),
                ..healthy()
            };
            let text = observed.problems(&target())[0].to_string();
            let setting = match provider {
                Provider::Azure => "server parameter wal_level",
                _ => setting,
            };
            assert!(text.contains(setting), "{text}");
            assert!(!text.contains("ALTER SYSTEM"), "{text}");
        }
    }

    fn held_by(slot: &mut ObservedSlot, application_name: &str) {
        slot.active_pid = Some(7);
        slot.holder = Some(Holder {
            application_name: application_name.to_owned(),
            ..Holder::default()
        });
    }

    #[test]
    fn does_not_report_a_slot_in_use_by_another_walpost_instance() {
        let held = |ours: &str, theirs: Option<&str>| {
            let mut observed = healthy();
            observed.application_name = ours.to_owned();
            let slot = observed.slot.as_mut().expect("slot");
            slot.active_pid = Some(7);
            if let Some(theirs) = theirs {
                held_by(slot, theirs);
            }
            !observed.problems(&target()).is_empty()
        };
        assert!(!held("walpost", Some("walpost")));
        assert!(!held("shop connector", Some("shop connector")));
        assert!(!held("walpost-a", Some("walpost-b")));
        assert!(!held("walpost", None), "not known");
        assert!(held("walpost", Some("shop connector")));
        assert!(held("walpost", Some("")));
    }

    #[test]
    fn reports_each_problem_with_its_remedy() {
        let check = |change: fn(&mut Observed), words: &[&str]| {
            let mut observed = healthy();
            change(&mut observed);
            let problems = observed.problems(&target());
            assert_eq!(problems.len(), 1, "{problems:?}");
            let text = problems[0].to_string();
            words
                .iter()
                .for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
        };
        fn publication(o: &mut Observed) -> &mut ObservedPublication {
            o.publication.as_mut().expect("publication")
        }
        fn slot(o: &mut Observed) -> &mut ObservedSlot {
            o.slot.as_mut().expect("slot")
        }
        check(|o| o.version = 130_022, &["130022", "14"]);
        check(
            |o| o.wal_level = "replica".to_owned(),
            &["\"replica\"", "ALTER SYSTEM"],
        );
        check(
            |o| o.table = None,
            &["public.outbox", "\"shop\"", "walpost init"],
        );
        check(
            |o| o.table.as_mut().expect("table").kind = "v".to_owned(),
            &["\"v\""],
        );
        check(
            |o| o.table.as_mut().expect("table").persistence = "u".to_owned(),
            &["SET LOGGED"],
        );
        check(|o| o.publication = None, &["\"pub\"", "walpost init"]);
        check(
            |o| publication(o).has_table = false,
            &["ADD TABLE public.outbox"],
        );
        check(|o| publication(o).inserts = false, &["publish = 'insert'"]);
        check(
            |o| publication(o).other_tables = vec!["public.x".to_owned()],
            &["public.x"],
        );
        check(
            |o| o.table.as_mut().expect("table").kind = "p".to_owned(),
            &["via_partition_root"],
        );
        check(
            |o| (o.in_recovery, o.slot, o.publication) = (true, None, None),
            &["standby in recovery", "\"slot\" does not exist", "promoted"],
        );
        check(
            |o| (o.in_recovery, slot(o).synced) = (true, true),
            &["copy of the primary's", "target_session_attrs"],
        );
        check(|o| o.slot = None, &["\"slot\"", "walpost init"]);
        check(
            |o| slot(o).plugin = Some("wal2json".to_owned()),
            &["wal2json", "pgoutput"],
        );
        check(|o| slot(o).plugin = None, &["physical"]);
        check(
            |o| slot(o).database = Some("other".to_owned()),
            &["other", "shop"],
        );
        check(|o| slot(o).temporary = true, &["temporary"]);
        check(
            |o| held_by(slot(o), "pg_recvlogical"),
            &[
                "PID 7",
                "pg_recvlogical",
                "pg_catalog.pg_terminate_backend(7)",
            ],
        );
        check(|o| slot(o).two_phase = true, &["two_phase"]);
        check(
            |o| slot(o).wal_status = Some("lost".to_owned()),
            &["0/1", "pg_drop_replication_slot"],
        );
        for (reason, word) in [
            ("wal_removed", "max_slot_wal_keep_size"),
            ("idle_timeout", "idle_replication_slot_timeout = 0"),
            ("rows_removed", "hot_standby_feedback = on"),
            ("wal_level_insufficient", "wal_level = logical"),
            ("reason_of_a_later_version", "reason_of_a_later_version"),
        ] {
            let mut observed = healthy();
            let slot = slot(&mut observed);
            slot.wal_status = Some("lost".to_owned());
            slot.invalidation_reason = Some(reason.to_owned());
            let text = observed.problems(&target())[0].to_string();
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
    }

    #[test]
    fn reports_an_untrusted_publication_owner_only_if_the_slot_will_be_read() {
        let mut observed = healthy();
        assert_eq!(observed.publisher_problem(&target()), None);
        let publication = observed.publication.as_mut().expect("publication");
        publication.untrusted_owner = Some("My shop".to_owned());
        assert_eq!(observed.problems(&target()), []);
        let problem = observed.publisher_problem(&target()).expect("a problem");
        let text = problem.to_string();
        assert!(text.contains("GRANT walpost TO \"My shop\""), "{text}");
        observed.publication = None;
        assert_eq!(observed.publisher_problem(&target()), None);
    }

    #[test]
    fn requires_an_empty_publication_for_an_outbox_with_logical_messages() {
        let target = Target {
            outbox: Outbox::Messages {
                prefix: "p".to_owned(),
            },
            ..target()
        };
        let mut observed = Observed {
            table: None,
            ..healthy()
        };
        let publication = observed.publication.as_mut().expect("publication");
        *publication = ObservedPublication::default();
        assert_eq!(observed.problems(&target), []);

        let with_tables = ObservedPublication {
            other_tables: vec!["public.x".to_owned()],
            ..ObservedPublication::default()
        };
        let lost = ObservedSlot {
            wal_status: Some("lost".to_owned()),
            ..observed.slot.clone().expect("slot")
        };
        let check = |observed: &Observed, words: &[&str]| {
            let problems = observed.problems(&target);
            assert_eq!(problems.len(), 1, "{problems:?}");
            let text = problems[0].to_string();
            words
                .iter()
                .for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
        };
        observed.publication = Some(with_tables);
        check(
            &observed,
            &["public.x", "ALTER PUBLICATION pub DROP TABLE ONLY public.x"],
        );
        observed.publication = None;
        check(
            &observed,
            &["walpost init --outbox messages --publication pub"],
        );
        observed.publication = Some(ObservedPublication::default());
        observed.slot = Some(lost);
        check(
            &observed,
            &["walpost init --outbox messages", "are not stored in"],
        );
        observed.slot = None;
        check(&observed, &["walpost init --outbox messages --slot slot"]);
    }

    #[test]
    fn accepts_an_empty_publication_but_rejects_unrelated_tables_for_a_multi_table_outbox() {
        let patterns = TablePatterns::new(&["tenant_*.outbox".to_owned()]).expect("patterns");
        let target = Target {
            outbox: Outbox::Tables(patterns),
            ..target()
        };
        let observed = |change: fn(&mut ObservedPublication)| {
            let mut publication = ObservedPublication {
                inserts: true,
                via_root: true,
                ..ObservedPublication::default()
            };
            change(&mut publication);
            Observed {
                table: None,
                publication: Some(publication),
                ..healthy()
            }
        };
        assert_eq!(observed(|_| {}).problems(&target), []);
        let check = |change: fn(&mut ObservedPublication), word: &str| {
            let problems = observed(change).problems(&target);
            let texts: Vec<_> = problems.iter().map(ToString::to_string).collect();
            assert!(
                texts.len() == 1 && texts[0].contains(word),
                "{word}: {texts:?}"
            );
        };
        check(|p| p.inserts = false, "does not publish inserts");
        check(|p| p.via_root = false, "publish_via_partition_root = true");
        check(
            |p| p.other_tables.push("shop.orders".to_owned()),
            "tenant_*.outbox: shop.orders. Rows of",
        );
        let warning = unpublished_warning(&target, &["tenant_7.outbox".parse().expect("table")]);
        let warning = warning.expect("one is not published");
        assert!(
            warning.contains("walpost init --table tenant_7.outbox"),
            "{warning}"
        );
        assert_eq!(unpublished_warning(&target, &[]), None);
    }
}
