//! The contents of the catalog, and which of them keep a pipeline from running. Does no I/O.

use super::problem::{Holder, Problem, lost};
use super::{TableVersion, UnsafeFilter, synchronous};
use crate::model::dropped_slot::replay_command;
use crate::model::lsn::Lsn;
use crate::outbox::connect::ColumnFacts;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// The oldest supported version, as `server_version_num`.
const VERSION_MIN: i32 = 140_000;

/// A managed service, which does not allow ALTER SYSTEM.
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
    /// Each service, with a setting that only its servers have.
    pub(super) const SETTINGS: [(Self, &str); 4] = [
        (Self::Rds, "rds.logical_replication"),
        (Self::CloudSql, "cloudsql.logical_decoding"),
        (Self::AlloyDb, "alloydb.logical_decoding"),
        (Self::Azure, "azure.extensions"),
    ];

    /// Describes how to enable logical decoding on its servers.
    fn logical_decoding(self) -> &'static str {
        match self {
            Self::Rds => {
                "This is Amazon RDS or Aurora: set rds.logical_replication = 1 in the parameter group, of the cluster for Aurora, \
                 and reboot"
            }
            Self::CloudSql => {
                "This is Cloud SQL: set the flag cloudsql.logical_decoding = on, which restarts the instance"
            }
            Self::AlloyDb => {
                "This is AlloyDB: set the flag alloydb.logical_decoding = on, which restarts the instance"
            }
            Self::Azure => {
                "This is Azure Database: set the server parameter wal_level = logical, and restart the server"
            }
        }
    }
}

/// The contents of the catalog that concern a pipeline.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// `server_version_num`.
    pub version: i32,
    /// When the server was started, and when it last lost its statistics, which are deleted when
    /// one of its processes crashes.
    pub starts: ServerStarts,
    /// The current database.
    pub database: String,
    /// The encoding of the database, as PostgreSQL calls it.
    pub encoding: String,
    /// The current role.
    pub user: String,
    /// `application_name` of this session and of Walpost's other sessions.
    pub application_name: String,
    /// `wal_level`.
    pub wal_level: String,
    /// `effective_wal_level`, since PostgreSQL 19: creating the first logical slot raises it.
    pub effective_wal_level: Option<String>,
    /// `synchronous_standby_names`, if it matches Walpost's `application_name`.
    pub synchronous_standby_names: Option<String>,
    /// The managed service that the server belongs to, if it can be recognized; queried only if
    /// `wal_level` is insufficient.
    pub provider: Option<Provider>,
    /// Whether the server is a standby that was not promoted (`pg_is_in_recovery`).
    pub in_recovery: bool,
    /// `max_slot_wal_keep_size`; -1 means no limit.
    pub slot_wal_keep: Option<String>,
    /// The table, if the outbox is one and it exists.
    pub table: Option<ObservedTable>,
    /// Whether `walpost.publish` exists; queried only for an outbox of messages.
    pub has_publish: bool,
    /// Whether the journal exists.
    pub has_journal: bool,
    /// Whether `walpost.slot_state` exists, so that confirmed positions can be recorded.
    pub has_slot_state: bool,
    /// Whether `walpost.table_state` exists, so that it can be recorded how tables are published.
    pub has_table_state: bool,
    /// The publication, if it exists.
    pub publication: Option<ObservedPublication>,
    /// The slot, if it exists.
    pub slot: Option<ObservedSlot>,
}

/// When a server was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServerStarts {
    /// `pg_postmaster_start_time()`.
    pub postmaster: String,
    /// `stats_reset` of `pg_stat_bgwriter`: if one of its processes crashes, the server restarts
    /// all others and discards its statistics, but the postmaster keeps running.
    pub statistics: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedTable {
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_class.relkind`: r is an ordinary table, p a partitioned one.
    pub kind: String,
    /// `pg_class.relpersistence`: p is permanent.
    pub persistence: String,
    /// Names and type OIDs of the columns that are published.
    pub columns: Vec<(String, u32)>,
    /// Names of their types, for messages.
    pub types: Vec<String>,
    /// Other properties of these columns.
    pub facts: Vec<ColumnFacts>,
    /// Whether the table has the trigger of `sql/no_update.sql`.
    pub refuses_update: bool,
    /// Whether the table has a primary key.
    pub has_key: bool,
    /// The version of the table, read before everything else here.
    pub version: TableVersion,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObservedPublication {
    /// Whether it publishes inserts.
    pub inserts: bool,
    /// Whether it publishes other changes as well.
    pub more_than_inserts: bool,
    /// Whether it publishes partitions under the name of their root.
    pub via_root: bool,
    /// Whether it contains the table of the outbox.
    pub has_table: bool,
    /// The tables that it contains and that belong to the outbox, if that consists of several.
    pub tables: Vec<TableName>,
    /// Whether it contains `walpost.outbox_row`, which carries rows of several tables from before
    /// these were added.
    pub has_outbox_row: bool,
    /// Other tables that it contains: for an outbox of messages, any table.
    pub other_tables: Vec<String>,
    /// Its row filter for the table of the outbox, if it has one.
    pub row_filter: Option<String>,
    /// A row filter for any of its tables that must not be evaluated.
    pub unsafe_filter: Option<UnsafeFilter>,
    /// Whether there is a row filter that could not be read because the table is locked.
    pub has_locked_filter: bool,
    /// The owner, if that role could have code executed as the role that reads the slot, using a
    /// row filter that it removes afterwards.
    pub untrusted_owner: Option<String>,
}

impl ObservedPublication {
    /// Returns the table of the outbox, whether published or not. For several tables, returns those
    /// that are published; for messages, none.
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
    /// Its output plugin; `None` for a physical slot.
    pub plugin: Option<String>,
    /// Its database; `None` for a physical slot.
    pub database: Option<String>,
    /// The process that uses it.
    pub active_pid: Option<i32>,
    /// The session of that process, if the role may see it.
    pub holder: Option<Holder>,
    /// The position confirmed last.
    pub confirmed: Lsn,
    /// `wal_status`: reserved, extended, unreserved or lost.
    pub wal_status: Option<String>,
    /// `invalidation_reason`: why it is lost; since PostgreSQL 17.
    pub invalidation_reason: Option<String>,
    /// Whether it is a copy of a slot of the primary, which the server synchronizes (`synced`);
    /// since PostgreSQL 17.
    pub synced: bool,
    /// Whether it is dropped at the end of its session.
    pub temporary: bool,
    /// Whether prepared transactions are sent when they are prepared.
    pub two_phase: bool,
}

impl Observed {
    /// Returns everything that keeps a pipeline with this `target` from running, starting with the
    /// most fundamental problem.
    #[must_use]
    pub(crate) fn problems(&self, target: &Target) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.version < VERSION_MIN {
            problems.push(Problem::Version {
                found: self.version,
            });
        }
        // A standby may not have replayed everything that is checked below.
        if let Some(problem) = self.recovery_problem(target) {
            problems.push(problem);
            return problems;
        }
        if !self.has_logical_decoding() {
            problems.push(Problem::WalLevel {
                found: self.wal_level.clone(),
                remedy: self.provider.map_or(
                    "Set it and restart the server: ALTER SYSTEM SET wal_level = logical",
                    Provider::logical_decoding,
                ),
            });
        }
        problems.extend(self.table_problem(target));
        problems.extend(self.publication_problem(target));
        problems.extend(self.slot_problem(target));
        problems
    }

    /// Returns the warning that Walpost is a synchronous standby of the server, if it is.
    #[must_use]
    pub(crate) fn synchronous_warning(&self) -> Option<String> {
        let names = self.synchronous_standby_names.as_deref()?;
        Some(synchronous::warning(names, &self.application_name))
    }

    /// Returns whether WAL contains, or will contain once the slot exists, what logical decoding
    /// needs.
    #[must_use]
    pub(super) fn has_logical_decoding(&self) -> bool {
        match self.effective_wal_level.as_deref() {
            None => self.wal_level == "logical",
            Some("logical") => true,
            // No logical slot exists yet; creating one raises the level.
            Some(_) => self.wal_level != "minimal" && self.slot.is_none(),
        }
    }

    /// Returns why a standby can't be streamed from. Since PostgreSQL 16, a standby can have a slot
    /// of its own and stream from it.
    fn recovery_problem(&self, target: &Target) -> Option<Problem> {
        let found = match &self.slot {
            _ if !self.in_recovery => return None,
            None => "is not there",
            // A synchronized slot is temporary until its first synchronization completes.
            Some(slot) if slot.synced || slot.temporary => "is a copy of the primary's",
            Some(_) => return None,
        };
        let slot = target.slot.clone();
        Some(Problem::InRecovery { slot, found })
    }

    /// Returns what is wrong with the publication so that rows would be left out.
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
                return found.problem_of_several(target, tables.to_string());
            }
            Outbox::Messages { .. } => {
                return (!found.other_tables.is_empty()).then(|| Problem::NotEmpty {
                    publication,
                    init: target.init(&["--publication", "NAME"]),
                    tables: format_some(&found.other_tables),
                    removed: only_first_of(&found.other_tables),
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
                of: table.to_string(),
            })
        } else if !found.has_table {
            Some(Problem::NotPublished {
                publication,
                table,
                remedy: format!(
                    "Send them once the pipeline runs: {}; or, if the table was never in the publication: {}",
                    dropped(),
                    target.replay_from()
                ),
            })
        } else if !found.other_tables.is_empty() {
            Some(Problem::OtherTables {
                publication,
                init: target.init(&["--publication", "NAME"]),
                of: table.to_string(),
                others: format_some(&found.other_tables),
                removed: only_first_of(&found.other_tables),
            })
        } else {
            None
        }
    }

    /// Returns why the slot must not be read as the current role: the owner of the publication is
    /// not sufficiently trusted.
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
    /// Returns why the publication does not work for an outbox of several tables. Missing tables
    /// are not an error, because there may be no tables yet.
    fn problem_of_several(&self, target: &Target, of: String) -> Option<Problem> {
        let publication = target.publication.clone();
        if !self.inserts {
            Some(Problem::NoInserts {
                publication,
                dropped: replay_command(&target.commands, Some("TABLE")),
            })
        } else if !self.via_root {
            // Any table that is added later may have partitions.
            Some(Problem::NotViaRoot { publication, of })
        } else if !self.other_tables.is_empty() {
            // Checked last: a pipeline that sets tables aside runs despite this.
            Some(Problem::OtherTables {
                publication,
                init: target.init(&["--publication", "NAME"]),
                of,
                others: format_some(&self.other_tables),
                removed: only_first_of(&self.other_tables),
            })
        } else {
            None
        }
    }
}

impl ObservedSlot {
    /// Returns a problem if a program other than Walpost is reading the slot `slot`. Walpost's
    /// sessions use this `application_name`.
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

/// Returns the warning about `tables` whose names match the outbox and that are not published, if
/// there are any.
#[must_use]
pub(crate) fn unpublished_warning(target: &Target, tables: &[TableName]) -> Option<String> {
    let first = tables.first()?;
    let names: Vec<_> = tables.iter().map(TableName::to_string).collect();
    let init = target.init_table(first);
    Some(format!(
        "tables that are outboxes by their names are not in the publication, so their events are not delivered: {}. Add each: \
         {init}; or leave it out of the patterns in tables",
        format_some(&names)
    ))
}

/// Returns the error about `tables` that were delivered and are no longer published, if there are
/// any.
#[must_use]
pub(crate) fn left_publication_error(target: &Target, tables: &[TableName]) -> Option<String> {
    let first = tables.first()?;
    let names: Vec<_> = tables.iter().map(TableName::to_string).collect();
    Some(format!(
        "tables that were in the publication before are no longer in it, so their events are not delivered: {}. Add each: {}; \
         or, if its events are not wanted any more, rename it or leave it out of the patterns in tables",
        format_some(&names),
        target.init_table(first)
    ))
}

/// Formats the first few names of a list that can be as long as the database has tables.
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
fn only_first_of(names: &[String]) -> String {
    let names = names[..names.len().min(LISTED_MAX)].iter();
    let names: Vec<_> = names.map(|name| format!("ONLY {name}")).collect();
    names.join(", ")
}

/// Number of names in a message.
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

    fn sound() -> Observed {
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
    fn a_sound_database_has_no_problems() {
        assert_eq!(sound().problems(&target()), []);
        let standby = Observed {
            in_recovery: true,
            ..sound()
        };
        assert_eq!(standby.problems(&target()), [], "with a slot of its own");
    }

    #[test]
    fn effective_wal_level_counts_where_there_is_one() {
        let lacks = |level: &str, effective: Option<&str>, has_slot: bool| {
            let mut observed = Observed {
                wal_level: level.to_owned(),
                effective_wal_level: effective.map(str::to_owned),
                ..sound()
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
            "the slot raises it"
        );
        assert!(lacks("replica", Some("replica"), true));
        assert!(lacks("minimal", Some("minimal"), false));
    }

    #[test]
    fn remedy_is_the_one_of_the_provider() {
        for (provider, setting) in Provider::SETTINGS {
            let observed = Observed {
                wal_level: "replica".to_owned(),
                provider: Some(provider),
                ..sound()
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
    fn another_instance_with_the_slot_is_not_a_problem() {
        let held = |ours: &str, theirs: Option<&str>| {
            let mut observed = sound();
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
    fn each_problem_is_found_and_names_its_remedy() {
        let check = |change: fn(&mut Observed), words: &[&str]| {
            let mut observed = sound();
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
            &["standby in recovery", "\"slot\" is not there", "promoted"],
        );
        check(
            |o| (o.in_recovery, slot(o).synced) = (true, true),
            &["is a copy of the primary's", "target_session_attrs"],
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
            ("of_a_later_version", "of_a_later_version"),
        ] {
            let mut observed = sound();
            let slot = slot(&mut observed);
            slot.wal_status = Some("lost".to_owned());
            slot.invalidation_reason = Some(reason.to_owned());
            let text = observed.problems(&target())[0].to_string();
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
    }

    #[test]
    fn publication_of_an_owner_who_is_not_trusted_is_a_problem_of_those_who_read_the_slot() {
        let mut observed = sound();
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
    fn an_outbox_of_messages_has_a_publication_without_tables() {
        let target = Target {
            outbox: Outbox::Messages {
                prefix: "p".to_owned(),
            },
            ..target()
        };
        let mut observed = Observed {
            table: None,
            ..sound()
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
            &["walpost init --outbox messages", "in no table"],
        );
        observed.slot = None;
        check(&observed, &["walpost init --outbox messages --slot slot"]);
    }

    #[test]
    fn an_outbox_of_several_tables_has_no_others_and_may_have_none_yet() {
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
                ..sound()
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
            "contains other tables than tenant_*.outbox: shop.orders",
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
