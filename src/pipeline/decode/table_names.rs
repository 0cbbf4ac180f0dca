//! Determines which names a table may have: a table that is renamed while Walpost runs is not
//! published under its new name.
//!
//! With `topic = "{table.schema}.{aggregatetype}"`, the owner of a tenant's schema could rename it
//! to the name of a tenant that no longer exists, and write to that tenant's topics. Tables are
//! identified by their OID. Names that tables have when the pipeline starts are accepted, as are
//! names in older WAL; later names are not.

use std::collections::{HashMap, HashSet};

use crate::outbox::columns::MappingError;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::Outbox;

/// If more names than this are known, tables that no longer exist are forgotten.
const NAMES_MAX: usize = 20_000;
/// Maximum number of names that a table can have had in the WAL before it was first seen.
const EARLIER_MAX: usize = 100;

/// The names of tables since the pipeline started, by OID.
#[derive(Default)]
pub(crate) struct TableNames {
    /// The setting that puts names into records. If `None`, names do not matter.
    setting: Option<String>,
    known: HashMap<u32, KnownName>,
}

struct KnownName {
    /// The name in the catalog, or in the stream, when the table was first seen.
    name: TableName,
    /// The stream has described the table by that name.
    is_reached: bool,
    /// Names that the stream contained for the table before that.
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

    /// Accepts the names that `tables` have in the catalog, unless another name is known.
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

    /// Checks the name by which the stream describes a table at position `at`.
    ///
    /// # Errors
    /// The table was renamed after it was last seen.
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

/// Returns the statements that give a table its previous name.
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
    fn refuses_a_name_that_a_table_is_given_after_it_was_seen() {
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
        // A new connection does not change the known names.
        names.add(vec![(7, table("tenant_b.outbox"))]);
        assert!(check(&mut names, "tenant_b.outbox").is_err());
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
    }

    #[test]
    fn accepts_names_that_the_catalog_has_at_the_start_and_earlier_ones_in_the_stream() {
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
    fn ignores_names_that_are_in_no_record() {
        let mut names = names("{aggregatetype}");
        assert_eq!(check(&mut names, "tenant_a.outbox"), Ok(()));
        assert_eq!(check(&mut names, "tenant_b.outbox"), Ok(()));
    }
}
