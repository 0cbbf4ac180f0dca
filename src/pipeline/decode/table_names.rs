//! Checks the names of tables: a table that is renamed while Walpost runs is not published under
//! its new name.
//!
//! With `topic = "{table.schema}.{aggregatetype}"`, the owner of a tenant's schema could rename it
//! to the name of a tenant that no longer exists, and write to that tenant's topics. Tables are
//! identified by their OID. Names that tables have when the pipeline starts are accepted, as are
//! names in older WAL; later names are rejected.

use std::collections::{HashMap, HashSet};

use crate::outbox::columns::MappingError;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::Outbox;

/// Maximum number of names. If it is exceeded, tables that no longer exist are removed.
const NAMES_MAX: usize = 20_000;
/// Maximum number of earlier names for each table, which occur in WAL that is older than the name
/// in the catalog.
const EARLIER_MAX: usize = 100;

/// The names of tables since the pipeline started, by OID.
#[derive(Default)]
pub(crate) struct TableNames {
    /// The setting that uses table names in records; `None` if records do not contain table names.
    setting: Option<String>,
    known: HashMap<u32, KnownName>,
}

struct KnownName {
    /// The name of the table in the catalog, or in the stream, when the table was first found.
    name: TableName,
    /// Whether the stream has described the table with `name`.
    is_reached: bool,
    /// Names with which the stream described the table before it used `name`.
    earlier: Vec<TableName>,
}

impl TableNames {
    pub(super) fn new(outbox: &Outbox, settings: &OutboxSettings) -> Self {
        // A single table is identified by its name alone.
        let setting = match outbox.is_several() {
            true => settings.setting_with_table_name(),
            false => None,
        };
        Self {
            setting,
            known: HashMap::new(),
        }
    }

    /// Accepts the names that `tables` have in the catalog, unless a different name is known.
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

    /// Checks the name with which the stream describes a table at position `at`.
    ///
    /// # Errors
    /// Returns an error if the table was renamed after its name became known.
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

/// Returns the statements that change the name of a table back to its previous name.
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
    fn rejects_a_new_name_of_a_known_table() {
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
        // Names from the catalog do not replace a known name when Walpost reconnects.
        names.add(vec![(7, table("tenant_b.outbox"))]);
        assert!(check(&mut names, "tenant_b.outbox").is_err());
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
    }

    #[test]
    fn accepts_names_from_the_catalog_and_earlier_names_from_the_stream() {
        let mut names = names("{table.name}");
        names.add(vec![(7, table("tenant_c.outbox"))]);
        for name in [
            "tenant_a.outbox",
            "tenant_b.outbox",
            "tenant_c.outbox",
            // The stream is read again from an earlier position.
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
