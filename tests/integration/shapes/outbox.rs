//! Changes to the publication and to the tables with their child tables, partitions and columns.

use super::walk::{TABLES, Walk};

impl Walk<'_> {
    pub(super) fn add_any_table(&mut self) {
        let table = self.any_table();
        self.add_table(table);
    }

    /// Runs `walpost init` for the table, which creates the table if it does not exist and
    /// publishes it.
    pub(super) fn add_table(&mut self, table: &'static str) {
        if self.definition.is_single() && table != TABLES[0] {
            return;
        }
        let (schema, _) = table.split_once('.').expect("a schema");
        self.sql(&format!("CREATE SCHEMA IF NOT EXISTS {schema}"));
        let arguments: &[&str] = match self.rng.u32(..3) {
            0 => &["--table", table, "--partitioned"],
            _ => &["--table", table],
        };
        if self.init(arguments) && !self.tables.contains(&table) {
            self.tables.push(table);
        }
    }

    /// Creates the table in the same way as a migration of the application would.
    pub(super) fn create_manually(&mut self, table: &str) {
        let (schema, _) = table.split_once('.').expect("a schema");
        self.sql(&format!(
            "CREATE SCHEMA IF NOT EXISTS {schema};
             CREATE TABLE {table} (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text NOT NULL, type text NOT NULL,
                 payload jsonb, created_at timestamptz NOT NULL DEFAULT now())"
        ));
    }

    pub(super) fn change_publication(&mut self) {
        match self.rng.u32(..5) {
            0 => self.alter_publication("DROP"),
            1..=2 => self.alter_publication("ADD"),
            _ => self.swap_table(),
        }
    }

    fn alter_publication(&mut self, word: &str) {
        let publication = self.publication();
        let table = self.any_table();
        self.sql(&format!(
            "ALTER PUBLICATION {publication} {word} TABLE {table}"
        ));
    }

    /// Replaces a table with a new one of the same name, as a migration would. The new table may or
    /// may not be published.
    fn swap_table(&mut self) {
        let table = self.any_table();
        let publication = self.publication();
        let publish = match self.rng.bool() {
            true => format!("ALTER PUBLICATION {publication} ADD TABLE {table};"),
            false => String::new(),
        };
        let (schema, name) = table.split_once('.').expect("a schema");
        // Don't replace a table that is neither published nor recorded in walpost.table_state. If
        // such a table were renamed, nothing would distinguish it from any other table: `check` and
        // `run` report its rows only while it has the name of an outbox.
        let slot = self.slot();
        let is_lost_sight_of = !self.fixture.db.is_true(&format!(
            "SELECT EXISTS (SELECT FROM pg_publication_tables
                 WHERE pubname = '{publication}' AND schemaname = '{schema}' AND tablename = '{name}')"
        )) && !self.is_recorded(table, &slot);
        if is_lost_sight_of || self.has_unreported_child(table) {
            return;
        }
        let old = format!("old_{}", self.count);
        self.sql(&format!(
            "BEGIN; ALTER TABLE {table} RENAME TO {old}; CREATE TABLE {schema}.{name} (LIKE {schema}.{old} INCLUDING ALL);
             {publish} COMMIT"
        ));
    }

    /// Returns whether Walpost has recorded that the table was published for the slot.
    fn is_recorded(&self, table: &str, slot: &str) -> bool {
        let rows = self.fixture.db.try_rows(&format!(
            "SELECT FROM walpost.table_state WHERE slot = '{slot}' AND relation = to_regclass('{table}')"
        ));
        rows.is_ok_and(|rows| !rows.is_empty())
    }

    /// Returns whether the table has a child table that Walpost has not reported yet. Walpost
    /// reports child tables only while the parent table has the name of an outbox.
    fn has_unreported_child(&self, table: &str) -> bool {
        let prefix = format!("{table}_child_");
        let mut events = self.written.values();
        events.any(|event| event.table.starts_with(&prefix) && !self.is_reported_child(event))
    }

    /// Adds a child table. A SELECT from the parent also returns the rows of the child table.
    pub(super) fn add_child(&mut self) {
        let Some(table) = self.table() else { return };
        let child = format!("{table}_child_{}", self.count);
        if self.sql(&format!("CREATE TABLE {child} () INHERITS ({table})")) {
            self.insert_into(&child, 2);
        }
    }

    pub(super) fn add_column(&mut self) {
        let table = self.any_table();
        let number = self.count;
        self.sql(&format!(
            "ALTER TABLE {table} ADD note_{number} text DEFAULT 'n'"
        ));
    }

    /// Renames a table, writes events to an outbox, and then restores the name.
    pub(super) fn rename(&mut self) {
        let table = self.any_table();
        let (schema, name) = table.split_once('.').expect("a schema");
        let new = format!("renamed_{}", self.count);
        if self.sql(&format!("ALTER TABLE {table} RENAME TO {new}")) {
            self.insert();
            self.sql(&format!("ALTER TABLE {schema}.{new} RENAME TO {name}"));
        }
    }

    /// Detaches a partition, and may attach it again afterwards.
    pub(super) fn detach_partition(&mut self) {
        let table = self.any_table();
        let found = self.fixture.db.try_rows(&format!(
            "SELECT c.oid::regclass, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = to_regclass('{table}') AND c.relispartition ORDER BY c.relname"
        ));
        let Some(row) = found.ok().and_then(|rows| rows.into_iter().next()) else {
            return;
        };
        let [Some(partition), Some(bound)] = &row[..] else {
            return;
        };
        let is_detached = self.sql(&format!("ALTER TABLE {table} DETACH PARTITION {partition}"));
        if is_detached && self.rng.bool() {
            self.sql(&format!(
                "ALTER TABLE {table} ATTACH PARTITION {partition} {bound}"
            ));
        }
    }
}
