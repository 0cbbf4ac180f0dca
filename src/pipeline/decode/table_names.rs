//! Ensures that the rows of a table are published only under names that were accepted for it.
//!
//! If names were not checked, a tenant that owns its schema could give the schema the name of a
//! former tenant's schema and, with `topic = "{table.schema}.{aggregatetype}"`, write to the former
//! tenant's topics. The tenant could do so at any time, for example while Walpost does not run, and
//! restore the name before Walpost reads the rows. Therefore, neither the current name in the
//! catalog nor the names in WAL can be trusted.
//!
//! Tables are identified by OID. `walpost.table_state` records the names that have been accepted
//! for each OID; the module of [`AcceptedNames`] describes how a name is accepted. A table that was
//! added while the pipeline was running is looked up when the stream describes it.
//!
//! The accepted names are also loaded if the pipeline's records do not contain table names. Loading
//! the names of a new table also records in `walpost.table_state` that the table's rows are being
//! delivered, which keeps `walpost.add_outbox` from sending them again.
//!
//! If no name is recorded for a table, because Walpost's role can't use `walpost.table_state`, the
//! name in the catalog is accepted instead. In this case, the names in WAL from before the start of
//! the pipeline can't be checked, because the table may have been renamed legitimately.

use std::collections::{HashMap, HashSet};

use crate::model::commands::Commands;
use crate::model::lsn::{Lsn, Position};
use crate::outbox::columns::MappingError;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::catalog::table_state::AcceptedNames;
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::Outbox;

/// Maximum number of tables whose names are kept. When this number is exceeded, the names of tables
/// that are not published are removed.
const NAMES_MAX: usize = 20_000;
/// Limit for the memory used by the names of tables that were not published when the pipeline
/// started.
const NEW_NAMES_BYTES_MAX: usize = 64 << 20;
/// Estimated memory used by an entry of a hash map, in addition to the text in its value.
pub(super) const ENTRY_BYTES: usize = 100;

/// The names under which the rows of tables may be published, by OID.
#[derive(Default)]
pub(crate) struct TableNames {
    /// Whether the outbox can consist of several tables. The name of a single table is fixed by the
    /// configuration.
    is_several: bool,
    /// The setting that adds table names to records; quoted in error messages. If it is `None`,
    /// table names have no effect and need not be checked.
    setting: Option<String>,
    known: HashMap<u32, KnownNames>,
    /// The memory used by the names added by [`Self::add_new_table`] since [`Self::add`] was called.
    new_bytes: usize,
    commands: Commands,
}

#[derive(Default)]
struct KnownNames {
    /// The names under which the table's rows may be published. If the list is empty, the first
    /// name in the stream is accepted.
    accepted: Vec<TableName>,
    /// Rows of transactions that committed before this position may be published under any name.
    unchecked_before: Lsn,
}

impl TableNames {
    pub(super) fn new(outbox: &Outbox, settings: &OutboxSettings) -> Self {
        let is_several = outbox.is_several();
        Self {
            is_several,
            setting: settings.setting_with_table_name().filter(|_| is_several),
            ..Self::default()
        }
    }

    /// Returns whether the accepted names of tables must be loaded from the catalog.
    pub(super) fn are_loaded(&self) -> bool {
        self.is_several
    }

    /// Sets the commands that error messages suggest.
    pub(super) fn set_commands(&mut self, commands: &Commands) {
        self.commands = commands.clone();
    }

    /// Sets the accepted names of the published tables. If no name is recorded for a table, any
    /// names from an earlier call are kept.
    pub(super) fn add(&mut self, tables: Vec<AcceptedNames>) {
        if !self.are_loaded() {
            return;
        }
        self.new_bytes = 0;
        if self.known.len() > NAMES_MAX {
            let oids: HashSet<_> = tables.iter().map(|table| table.oid).collect();
            self.known.retain(|oid, _| oids.contains(oid));
        }
        for table in tables {
            let is_recorded = table.unchecked_before == Lsn::ZERO;
            let names = KnownNames {
                accepted: table.names,
                unchecked_before: table.unchecked_before,
            };
            match is_recorded {
                true => drop(self.known.insert(table.oid, names)),
                false => drop(self.known.entry(table.oid).or_insert(names)),
            }
        }
    }

    /// Adds the accepted names of a table that was not published when the pipeline started. `found`
    /// is empty if the table does not exist and no name is recorded for it.
    pub(super) fn add_new_table(&mut self, oid: u32, found: Vec<AcceptedNames>) {
        if self.are_loaded() {
            let names = found.into_iter().flat_map(|table| table.names);
            let names: Vec<_> = names.collect();
            self.new_bytes += ENTRY_BYTES + names.iter().map(memory_bytes).sum::<usize>();
            self.known.entry(oid).or_default().accepted.extend(names);
        }
    }

    /// Returns whether the names of another table may be added before the next connection.
    pub(super) fn has_room(&self) -> bool {
        self.new_bytes < NEW_NAMES_BYTES_MAX
    }

    /// Returns whether the table's accepted names must be loaded before [`Self::check`] is called.
    /// If the table has no recorded name, loading them also records that the table's rows have been
    /// delivered, so that `add_outbox` does not send them again. Therefore, names are also loaded
    /// if they are not checked.
    pub(super) fn lacks(&self, oid: u32) -> bool {
        self.are_loaded() && !self.known.contains_key(&oid)
    }

    /// Returns `name` if it is accepted for the table or if names are not checked, and otherwise
    /// the name that was last accepted for the table. A name that is not accepted may belong to
    /// another table.
    pub(super) fn accepted_name(&self, oid: u32, name: TableName) -> TableName {
        if self.setting.is_none() {
            return name;
        }
        let accepted = self.known.get(&oid).map(|known| &known.accepted);
        match accepted.filter(|names| !names.contains(&name)) {
            Some(names) => names.last().cloned().unwrap_or(name),
            None => name,
        }
    }

    /// Checks the name that the stream uses for a table at `position`. `at` describes this position
    /// in error messages.
    ///
    /// # Errors
    /// Returns an error if the name is not accepted for this table.
    pub(super) fn check(
        &mut self,
        oid: u32,
        name: &TableName,
        position: Option<Position>,
        at: &str,
    ) -> Result<(), MappingError> {
        let Some(setting) = &self.setting else {
            return Ok(());
        };
        let known = self.known.entry(oid).or_default();
        let is_unchecked = position.is_some_and(|at| at.commit < known.unchecked_before);
        let Some(before) = known.accepted.last() else {
            known.accepted.push(name.clone());
            return Ok(());
        };
        if is_unchecked || known.accepted.contains(name) {
            return Ok(());
        }
        Err(MappingError::Renamed {
            before: before.to_string(),
            found: name.to_string(),
            at: at.to_owned(),
            setting: setting.clone(),
            remedy: format!(
                "If the table was not meant to be renamed, rename it back ({}) unless that has already happened, and skip the \
                 rows written in the meantime. Otherwise, accept the new name ({}) and restart the pipeline",
                rename_back(before, name),
                self.commands.print(["init", "--table", &name.to_string()])
            ),
        })
    }
}

fn memory_bytes(name: &TableName) -> usize {
    size_of::<TableName>() + name.schema.capacity() + name.name.capacity()
}

/// Returns the SQL statements that restore a table's previous name.
fn rename_back(before: &TableName, found: &TableName) -> String {
    let mut statements = Vec::new();
    if before.name != found.name {
        let name = identifier(&before.name);
        statements.push(format!("ALTER TABLE {found} RENAME TO {name}"));
    }
    if before.schema != found.schema {
        let [found, before] = [found, before].map(|table| identifier(&table.schema));
        statements.push(format!("ALTER SCHEMA {found} RENAME TO {before}"));
    }
    statements.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::table_pattern::TablePatterns;

    fn table(text: &str) -> TableName {
        text.parse().expect("a table")
    }

    fn names(topic: &str) -> TableNames {
        let patterns = TablePatterns::new(&["tenant_*.*".to_owned()]).expect("patterns");
        let settings = OutboxSettings {
            topic: topic
                .parse::<crate::outbox::template::Template>()
                .expect("a template")
                .into(),
            ..OutboxSettings::default()
        };
        TableNames::new(&Outbox::Tables(patterns), &settings)
    }

    fn accepted(names: &[&str], unchecked_before: u64) -> Vec<AcceptedNames> {
        vec![AcceptedNames {
            oid: 7,
            names: names.iter().map(|name| table(name)).collect(),
            unchecked_before: Lsn(unchecked_before),
        }]
    }

    fn check_at(names: &mut TableNames, name: &str, commit: u64) -> Result<(), String> {
        let position = Position {
            commit: Lsn(commit),
            index: 0,
        };
        let checked = names.check(7, &table(name), Some(position), "0/1");
        checked.map_err(|error| error.to_string())
    }

    fn check(names: &mut TableNames, name: &str) -> Result<(), String> {
        check_at(names, name, 0x100)
    }

    #[test]
    fn rejects_rows_of_a_renamed_table_until_its_new_name_is_accepted() {
        let mut names = names("{table.schema}.{aggregatetype}");
        names.add(accepted(&["tenant_a.outbox"], 0));
        let error = check(&mut names, "tenant_b.box").expect_err("renamed");
        for text in [
            "table tenant_b.box was named tenant_a.outbox",
            "topic = \"{table.schema}.{aggregatetype}\"",
            "ALTER TABLE tenant_b.box RENAME TO outbox; ALTER SCHEMA tenant_b RENAME TO tenant_a",
            "walpost init --table tenant_b.box",
        ] {
            assert!(error.contains(text), "{text} in {error}");
        }
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
        assert!(check(&mut names, "tenant_b.box").is_err());
        // The table is set aside under the name that was accepted for it.
        let name = names.accepted_name(7, table("tenant_b.box"));
        assert_eq!(name, table("tenant_a.outbox"));
    }

    #[test]
    fn accepts_all_recorded_names_of_a_table_in_any_order() {
        let mut names = names("{table.name}");
        names.add(accepted(&["tenant_a.outbox"], 0));
        assert!(check(&mut names, "tenant_b.outbox").is_err());
        // `walpost init --table` accepted the name, and the pipeline reconnected.
        names.add(accepted(&["tenant_a.outbox", "tenant_b.outbox"], 0));
        for name in ["tenant_a.outbox", "tenant_b.outbox", "tenant_a.outbox"] {
            assert_eq!(check(&mut names, name), Ok(()), "{name}");
        }
        assert!(check(&mut names, "tenant_c.outbox").is_err());
    }

    #[test]
    fn looks_up_tables_that_were_added_while_the_pipeline_was_running() {
        let mut names = names("{table.name}");
        assert!(names.lacks(7));
        names.add_new_table(7, accepted(&["tenant_a.outbox"], 0x200));
        assert!(!names.lacks(7));
        // Unlike at startup, earlier names of the table are not accepted.
        assert!(check(&mut names, "tenant_b.outbox").is_err());
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
    }

    #[test]
    fn accepts_any_table_name_in_wal_written_before_the_current_name_was_looked_up() {
        let mut names = names("{table.name}");
        names.add(accepted(&["tenant_b.outbox"], 0x200));
        assert_eq!(check_at(&mut names, "tenant_a.outbox", 0x1ff), Ok(()));
        assert_eq!(check_at(&mut names, "tenant_b.outbox", 0x1ff), Ok(()));
        assert!(check_at(&mut names, "tenant_a.outbox", 0x200).is_err());
        assert_eq!(check_at(&mut names, "tenant_b.outbox", 0x200), Ok(()));
        // When Walpost reconnects, the name in the catalog does not replace the name that was
        // accepted before.
        names.add(accepted(&["tenant_c.outbox"], 0x300));
        assert!(check_at(&mut names, "tenant_c.outbox", 0x200).is_err());
    }

    #[test]
    fn accepts_only_the_first_streamed_name_of_a_dropped_table_without_a_recorded_name() {
        let mut names = names("{table.name}");
        names.add_new_table(7, Vec::new());
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
        assert!(check(&mut names, "tenant_b.outbox").is_err());
    }

    #[test]
    fn ignores_renames_if_records_do_not_contain_table_names() {
        let mut names = names("{aggregatetype}");
        assert!(names.lacks(7));
        names.add_new_table(7, accepted(&["tenant_a.outbox"], 0x200));
        assert!(!names.lacks(7));
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
        assert_eq!(check(&mut names, "tenant_b.outbox"), Ok(()));
        let name = names.accepted_name(7, table("tenant_b.outbox"));
        assert_eq!(name, table("tenant_b.outbox"));
    }
}
