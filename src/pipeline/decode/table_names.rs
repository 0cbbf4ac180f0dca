//! Ensures that a table that is renamed while Walpost runs is not published under its new name.
//!
//! With `topic = "{table.schema}.{aggregatetype}"`, a tenant that owns its schema could otherwise
//! give the schema the name of a former tenant's schema, and write to the former tenant's topics.
//! Tables are identified by OID. The name that a table has when the pipeline starts is accepted,
//! and so are names that it had in older WAL. Any later name is rejected.

use std::collections::{HashMap, HashSet};

use crate::outbox::columns::MappingError;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::Outbox;

/// Maximum number of tables remembered. When it is exceeded, tables that no longer exist are
/// forgotten.
const NAMES_MAX: usize = 20_000;
/// Maximum number of earlier names remembered for each table. WAL that has yet to be read may
/// contain names from before a rename.
const EARLIER_MAX: usize = 100;

/// The names that tables have had since the pipeline started, by OID.
#[derive(Default)]
pub(crate) struct TableNames {
    /// The setting that adds table names to records; quoted in error messages. If it is `None`,
    /// table names have no effect and need not be checked.
    setting: Option<String>,
    known: HashMap<u32, KnownName>,
}

struct KnownName {
    /// The table's name in the catalog or in the stream, whichever was seen first.
    name: TableName,
    /// Whether the stream has used `name` for the table.
    is_reached: bool,
    /// Other names that the stream used for the table before it first used `name`.
    earlier: Vec<TableName>,
}

impl TableNames {
    pub(super) fn new(outbox: &Outbox, settings: &OutboxSettings) -> Self {
        // If the outbox is a single table, its name is fixed by the configuration, so there is
        // nothing to check.
        let setting = match outbox.is_several() {
            true => settings.setting_with_table_name(),
            false => None,
        };
        Self {
            setting,
            known: HashMap::new(),
        }
    }

    /// Accepts the names in `tables`, which come from the catalog. A table whose name is already
    /// known keeps that name.
    pub(super) fn add(&mut self, tables: Vec<(u32, TableName)>) {
        if self.setting.is_none() {
            return;
        }
        if self.known.len() > NAMES_MAX {
            let oids: HashSet<_> = tables.iter().map(|(oid, _)| *oid).collect();
            self.known.retain(|oid, _| oids.contains(oid));
        }
        for (oid, name) in tables {
            self.known.entry(oid).or_insert(KnownName {
                name,
                is_reached: false,
                earlier: Vec::new(),
            });
        }
    }

    /// Checks the name that the stream uses for a table at position `at`.
    ///
    /// # Errors
    /// Returns an error if the table was renamed after the stream had used its known name.
    pub(super) fn check(
        &mut self,
        oid: u32,
        name: &TableName,
        at: &str,
    ) -> Result<(), MappingError> {
        let Some(setting) = &self.setting else {
            return Ok(());
        };
        let known = self.known.entry(oid).or_insert_with(|| KnownName {
            name: name.clone(),
            is_reached: true,
            earlier: Vec::new(),
        });
        if known.name == *name {
            known.is_reached = true;
        } else if (known.is_reached || known.earlier.len() >= EARLIER_MAX)
            && !known.earlier.contains(name)
        {
            return Err(MappingError::Renamed {
                before: known.name.to_string(),
                found: name.to_string(),
                at: at.to_owned(),
                setting: setting.clone(),
                remedy: rename_back(&known.name, name),
            });
        } else if !known.earlier.contains(name) {
            known.earlier.push(name.clone());
        }
        Ok(())
    }
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

    fn check(names: &mut TableNames, name: &str) -> Result<(), String> {
        let checked = names.check(7, &table(name), "0/1");
        checked.map_err(|error| error.to_string())
    }

    #[test]
    fn rejects_a_different_name_for_a_known_table() {
        let mut names = names("{table.schema}.{aggregatetype}");
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
        let error = check(&mut names, "tenant_b.box").expect_err("renamed");
        for text in [
            "table tenant_b.box was named tenant_a.outbox",
            "topic = \"{table.schema}.{aggregatetype}\"",
            "ALTER TABLE tenant_b.box RENAME TO outbox; ALTER SCHEMA tenant_b RENAME TO tenant_a",
        ] {
            assert!(error.contains(text), "{text} in {error}");
        }
        // When Walpost reconnects, the name in the catalog does not replace the known name.
        names.add(vec![(7, table("tenant_b.outbox"))]);
        assert!(check(&mut names, "tenant_b.outbox").is_err());
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
    }

    #[test]
    fn accepts_table_names_from_the_catalog_and_names_seen_earlier_in_the_stream() {
        let mut names = names("{table.name}");
        names.add(vec![(7, table("tenant_c.outbox"))]);
        for name in [
            "tenant_a.outbox",
            "tenant_b.outbox",
            "tenant_c.outbox",
            // After a reconnect, the stream starts over from an earlier position.
            "tenant_a.outbox",
            "tenant_c.outbox",
        ] {
            assert_eq!(check(&mut names, name), Ok(()), "{name}");
        }
        assert!(check(&mut names, "tenant_d.outbox").is_err());
    }

    #[test]
    fn ignores_renames_if_records_do_not_contain_table_names() {
        let mut names = names("{aggregatetype}");
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
        assert_eq!(check(&mut names, "tenant_b.outbox"), Ok(()));
    }
}
