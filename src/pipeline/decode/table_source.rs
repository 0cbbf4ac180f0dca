//! Events that are inserted as rows into one or several tables.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::delivery::chunks::{CopyProgress, KeyError, KeyType};
use crate::delivery::stats::PipelineStats;
use crate::model::commands::Commands;
use crate::model::lsn::Position;
use crate::outbox::columns::{Mapping, MappingError, Row, TableColumn, is_user_defined};
use crate::outbox::connect::ColumnFacts;
use crate::outbox::settings::OutboxSettings;
use crate::pipeline::decode::error::CoreError;
use crate::pipeline::decode::older_rows::{OlderRow, RowTable};
use crate::pipeline::decode::other_tables::OtherTables;
use crate::pipeline::decode::set_aside::SetAsideTables;
use crate::pipeline::decode::table_names::{ENTRY_BYTES, TableNames};
use crate::postgres::catalog::table_state::AcceptedNames;
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::{Relation, Tuple, Value};

/// Maximum number of outbox tables that the server may describe on one connection; after that,
/// Walpost reconnects. The limit bounds memory, because the server can describe any number of
/// tables. Only tables that have received rows since the connection was opened count, because the
/// server describes a table when it sends the table's first row. A table that was dropped and
/// re-created counts once for each definition.
pub(crate) const TABLES_MAX: usize = 10_000;

/// Limit for the memory used by the column descriptions from the catalog. If a new description
/// would exceed the limit, all others are discarded, and each is queried again when it is needed.
const FACTS_BYTES_MAX: usize = 64 << 20;

/// The outbox tables that the stream has described.
pub(crate) struct TableSource {
    outbox: Outbox,
    settings: Box<OutboxSettings>,
    /// The catalog's description of each table's columns, by table OID; empty for a table that no
    /// longer exists.
    facts: HashMap<u32, Vec<ColumnFacts>>,
    /// The memory used by the descriptions that were added since [`Self::describe`] was called.
    facts_bytes: usize,
    /// The OIDs of `tables`, in ascending order. Kept in a separate array, so that a search touches
    /// few cache lines.
    oids: Vec<u32>,
    /// The tables, in the order of `oids`. A table that was dropped and re-created occurs more than
    /// once, with the same name but different OIDs.
    tables: Vec<Table>,
    /// The names under which tables may be published, if the outbox consists of several tables.
    names: TableNames,
    /// The publication for which older rows are read from `walpost.outbox_row`, if the outbox
    /// consists of several tables.
    publication: Option<String>,
    /// The table `walpost.outbox_row`, which contains older rows. `None` until the stream has
    /// described it.
    row_table: Option<RowTable>,
    /// The rows that were already copied and must be skipped in the stream.
    pub(crate) copied: Option<Box<CopyProgress>>,
    /// Tables whose rows are skipped because of an error.
    pub(super) set_aside: SetAsideTables,
}

/// An outbox table that the stream has described.
pub(super) struct Table {
    name: TableName,
    mapping: Mapping,
    /// Whether the journal has entries about the table, in which case each row must be checked
    /// against them.
    is_set_aside: bool,
    /// The index and type of each key column by which a copy orders the rows; `None` if a column is
    /// missing or has an unsupported type.
    key: Option<Vec<(usize, KeyType)>>,
    /// Number of rows processed since the last report. Only one thread writes this counter, so
    /// incrementing it takes only a load and a store.
    rows: AtomicU64,
}

impl Table {
    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Counts one processed row.
    #[inline]
    pub(super) fn count_row(&self) {
        let rows = self.rows.load(Ordering::Relaxed);
        self.rows.store(rows + 1, Ordering::Relaxed);
    }

    /// Returns the table's name and the number of rows counted since the last call, or `None` if no
    /// rows were counted.
    fn take_row_count(&self) -> Option<(&TableName, u64)> {
        let rows = self.rows.swap(0, Ordering::Relaxed);
        (rows > 0).then_some((&self.name, rows))
    }
}

impl TableSource {
    pub(crate) fn new(outbox: Outbox, settings: OutboxSettings) -> Self {
        Self {
            names: TableNames::new(&outbox, &settings),
            outbox,
            settings: Box::new(settings),
            facts: HashMap::new(),
            facts_bytes: 0,
            oids: Vec::new(),
            tables: Vec::new(),
            publication: None,
            row_table: None,
            copied: None,
            set_aside: SetAsideTables::default(),
        }
    }

    /// Enables delivery of the rows that a table already contained when it was added to
    /// `publication`. Applies only to an outbox of several tables.
    pub(crate) fn read_older_rows_of(&mut self, publication: &str) {
        let is_several = self.outbox.is_several();
        self.publication = is_several.then(|| publication.to_owned());
    }

    pub(crate) fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Sets the catalog's description of each table's columns, by table OID.
    pub(crate) fn describe(&mut self, facts: HashMap<u32, Vec<ColumnFacts>>) {
        (self.facts, self.facts_bytes) = (facts, 0);
    }

    pub(super) fn names(&self) -> &TableNames {
        &self.names
    }

    /// Sets the names under which the rows of tables may be published.
    pub(super) fn accept_names(&mut self, tables: Vec<AcceptedNames>, commands: &Commands) {
        self.names.set_commands(commands);
        self.names.add(tables);
    }

    /// Replaces all known table names, and returns the previous ones.
    pub(crate) fn replace_names(&mut self, names: TableNames) -> TableNames {
        std::mem::replace(&mut self.names, names)
    }

    /// Adds the description of the columns of one table, and the names under which its rows may be
    /// published.
    pub(super) fn describe_table(
        &mut self,
        oid: u32,
        facts: Vec<ColumnFacts>,
        names: Vec<AcceptedNames>,
    ) {
        let facts_bytes = facts.iter().map(ColumnFacts::memory_bytes).sum::<usize>() + ENTRY_BYTES;
        if self.facts_bytes + facts_bytes > FACTS_BYTES_MAX {
            // A table's description is used only when the stream describes the table.
            self.facts = HashMap::new();
            self.facts_bytes = 0;
        }
        self.facts_bytes += facts_bytes;
        self.facts.insert(oid, facts);
        self.names.add_new_table(oid, names);
    }

    pub(crate) fn reconnected(&mut self) {
        self.row_table = None;
        self.oids.clear();
        self.tables.clear();
        self.copied = None;
        self.set_aside.reconnected();
    }

    /// Updates `is_set_aside` of all tables. Must be called after `set_aside` has changed.
    pub(super) fn mark_set_aside(&mut self) {
        for (oid, table) in self.oids.iter().zip(&mut self.tables) {
            table.is_set_aside = self.set_aside.has_entries(*oid);
        }
    }

    /// Returns whether the relation is an outbox table whose column descriptions must be loaded
    /// from the catalog before its rows can be processed.
    pub(crate) fn lacks_facts(&self, relation: &Relation<'_>) -> bool {
        let has_domains = || {
            let mut columns = relation.columns.iter();
            columns.any(|column| is_user_defined(column.type_oid))
        };
        (self.settings.needs_column_facts() || has_domains())
            && self.lacks_facts_of(relation.oid)
            && self.outbox.includes(relation.namespace, relation.name)
    }

    /// Returns whether the relation is an outbox table whose accepted names must be loaded before
    /// its rows can be processed.
    pub(super) fn lacks_names(&self, relation: &Relation<'_>) -> bool {
        self.names.lacks(relation.oid) && self.outbox.includes(relation.namespace, relation.name)
    }

    /// Like [`Self::lacks_facts`], but for the table that an older row comes from.
    pub(super) fn lacks_facts_for(&self, row: &OlderRow) -> bool {
        let has_domains = || {
            row.columns()
                .iter()
                .any(|column| is_user_defined(column.type_oid))
        };
        (self.settings.needs_column_facts() || has_domains()) && self.lacks_facts_of(row.oid)
    }

    fn lacks_facts_of(&self, oid: u32) -> bool {
        self.outbox.is_several() && !self.facts.contains_key(&oid)
    }

    /// Returns whether the relation is `walpost.outbox_row`, which contains older rows of other
    /// tables.
    #[inline]
    pub(super) fn has_older_rows(&self, relation: u32) -> bool {
        let row_table = self.row_table.as_ref();
        row_table.is_some_and(|row_table| row_table.matches(relation))
    }

    /// Decodes the older row that is stored in a row of `walpost.outbox_row`. Returns `None` if the
    /// row was written for a different publication.
    pub(super) fn older(
        &self,
        at: Position,
        tuple: &Tuple<'_>,
    ) -> Result<Option<OlderRow>, CoreError> {
        let (Some(row_table), Some(publication)) = (&self.row_table, &self.publication) else {
            return Ok(None);
        };
        let row = row_table.read(tuple).map_err(|found| CoreError::BadTuple {
            at,
            table: RowTable::name(),
            found,
        })?;
        if row.publication != *publication {
            return Ok(None);
        }
        match self.outbox.includes(&row.table.schema, &row.table.name) {
            true => Ok(Some(row)),
            false => Err(CoreError::ForeignTable {
                at,
                found: row.table.to_string(),
                expected: Box::new(self.outbox.clone()),
            }),
        }
    }

    /// Returns the mapping for the columns of an older row.
    pub(super) fn mapping_for(&self, row: &OlderRow) -> Result<Mapping, MappingError> {
        self.bind(&row.table, row.oid, &row.columns())
    }

    fn bind(
        &self,
        table: &TableName,
        oid: u32,
        columns: &[TableColumn<'_>],
    ) -> Result<Mapping, MappingError> {
        let mut facts = self.facts.get(&oid);
        if facts.is_none() && !self.outbox.is_several() {
            // The table may have been re-created under a new OID. Assume that it has the same
            // columns as before.
            facts = self.facts.values().next();
        }
        let facts = facts.map_or(&[][..], Vec::as_slice);
        Mapping::bind_with(
            &self.settings,
            table.rows(&table.to_string()),
            columns,
            facts,
        )
    }

    #[inline]
    fn table(&self, oid: u32) -> Option<&Table> {
        // Fast path: usually there is only one table.
        let index = match self.oids.first() {
            Some(first) if *first == oid => 0,
            _ => self.oids.binary_search(&oid).ok()?,
        };
        self.tables.get(index)
    }

    /// Returns the name of the table, or `None` if the table is not an outbox.
    pub(crate) fn name(&self, oid: u32) -> Option<&TableName> {
        self.table(oid).map(|table| &table.name)
    }

    /// Returns whether there is space for a description of this relation: neither [`TABLES_MAX`]
    /// nor the memory limit for table names has been reached, or the table is already in `oids`.
    pub(crate) fn has_room_for(&self, oid: u32) -> bool {
        let described = self.oids.len() + self.set_aside.relations();
        described < TABLES_MAX && self.names.has_room() || self.oids.binary_search(&oid).is_ok()
    }

    /// Processes a relation message at `position`. `at` describes this position in error messages.
    /// The columns in the message apply to all later rows of the relation. Returns whether the
    /// relation is an outbox table or `walpost.outbox_row`.
    pub(crate) fn relation(
        &mut self,
        relation: &Relation<'_>,
        position: Option<Position>,
        at: &str,
    ) -> Result<bool, MappingError> {
        if self.publication.is_some() && RowTable::is_row_table(relation) {
            self.row_table = Some(RowTable::from_relation(relation)?);
            return Ok(true);
        }
        let found = self.oids.binary_search(&relation.oid);
        let name = TableName::from_catalog(relation.namespace, relation.name);
        let is_set_aside = self.set_aside.add_relation(relation.oid, &name);
        if !self.outbox.includes(relation.namespace, relation.name) {
            // The relation may have been an outbox table under a previous name.
            self.remove(found);
            if self.outbox.is_several() {
                self.facts.remove(&relation.oid);
            }
            return Ok(false);
        }
        let columns: Vec<_> = relation
            .columns
            .iter()
            .map(|column| TableColumn {
                name: column.name,
                type_oid: column.type_oid,
            })
            .collect();
        let accepted = self.names.check(relation.oid, &name, position, at);
        let mapping = match accepted.and_then(|()| self.bind(&name, relation.oid, &columns)) {
            Ok(mapping) => mapping,
            Err(error) if self.set_aside.is_enabled || is_set_aside => {
                self.remove(found);
                let name = self.names.accepted_name(relation.oid, name);
                self.set_aside.unmapped(relation.oid, name, error);
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        let column = |name: &String| {
            let mut columns = relation.columns.iter().enumerate();
            let (index, column) = columns.find(|(_, column)| column.name == name)?;
            Some((index, KeyType::from_type_oid(column.type_oid)?))
        };
        let key = self.copied.iter().flat_map(|copied| &copied.key);
        let table = Table {
            name,
            mapping,
            is_set_aside,
            key: key.map(column).collect(),
            rows: AtomicU64::new(0),
        };
        match found {
            Ok(index) => self.tables[index] = table,
            Err(index) => {
                self.oids.insert(index, relation.oid);
                self.tables.insert(index, table);
            }
        }
        Ok(true)
    }

    /// Removes the table that a binary search of `oids` found. Does nothing if the search found no
    /// table.
    fn remove(&mut self, found: Result<usize, usize>) {
        if let Ok(index) = found {
            self.oids.remove(index);
            self.tables.remove(index);
        }
    }

    /// Returns whether the row was already copied by a snapshot. The stream contains such rows if a
    /// copy was resumed: the stream starts at the consistent point of the first snapshot, but later
    /// snapshots also contain newer transactions.
    pub(crate) fn has_copied(
        &self,
        at: Position,
        relation: u32,
        tuple: &Tuple<'_>,
    ) -> Result<bool, CoreError> {
        let Some(copied) = &self.copied else {
            return Ok(false);
        };
        if at.commit >= copied.last_snapshot_lsn() {
            return Ok(false);
        }
        let Some(table) = self.table(relation) else {
            return Err(CoreError::UnknownRelation { at, oid: relation });
        };
        let key = table.key.as_ref().and_then(|key| {
            let value = |(index, kind): &(usize, KeyType)| match tuple.values().nth(*index) {
                Some(Value::Text(text)) => Some((text, *kind)),
                _ => None,
            };
            key.iter().map(value).collect::<Option<Vec<_>>>()
        });
        let has = key
            .ok_or(KeyError)
            .and_then(|key| copied.contains(at.commit, &key));
        has.map_err(|error| CoreError::BadLine {
            at,
            table: table.name.to_string(),
            error: error.into(),
        })
    }

    /// Reports how many rows of each table have arrived since the last call. Does nothing unless
    /// the outbox consists of several tables.
    pub(super) fn report_rows(&self, stats: &PipelineStats) {
        if self.outbox.is_several() {
            stats.rows_of_tables(self.tables.iter().filter_map(Table::take_row_count));
        }
    }

    /// Like [`Self::report_rows`], but only for one table. Used whenever the stream describes a
    /// table. Checking all tables each time would be slow, because the stream can describe
    /// thousands of tables one after another.
    pub(super) fn report_rows_of(&self, oid: u32, stats: &PipelineStats) {
        if self.outbox.is_several() {
            stats.rows_of_tables(self.table(oid).and_then(Table::take_row_count));
        }
    }

    /// Stores the row's values in `row`, and returns the row's table. Returns `None` if the row
    /// must be skipped because its table is set aside. `others` contains the names of other
    /// relations, for error messages.
    pub(super) fn row<'a>(
        &self,
        at: Position,
        relation: u32,
        tuple: &Tuple<'a>,
        others: &OtherTables,
        row: &mut Row<'a>,
    ) -> Result<Option<&Table>, CoreError> {
        let Some(table) = self.table(relation) else {
            return match self.set_aside.covers(relation, at) {
                true => Ok(None),
                false => Err(self.missing_mapping_error(at, relation, others)),
            };
        };
        if table.is_set_aside && self.set_aside.covers(relation, at) {
            return Ok(None);
        }
        fill_row(&table.mapping, tuple, row).map_err(|found| CoreError::BadTuple {
            at,
            table: table.name.clone(),
            found,
        })?;
        Ok(Some(table))
    }

    /// Returns the error for a row whose relation has no mapping.
    #[cold]
    fn missing_mapping_error(
        &self,
        at: Position,
        relation: u32,
        others: &OtherTables,
    ) -> CoreError {
        if let Some(error) = self.set_aside.mapping_error(relation) {
            return CoreError::mapping(at)(error.clone());
        }
        match others.name(relation) {
            Some(name) => CoreError::ForeignTable {
                at,
                found: name.clone(),
                expected: Box::new(self.outbox.clone()),
            },
            None => CoreError::UnknownRelation { at, oid: relation },
        }
    }

    /// Returns the leading values of a row of `walpost.outbox_row`, stopping before the first value
    /// that is not text.
    pub(super) fn leading_texts<'t>(&self, tuple: &Tuple<'t>) -> Vec<&'t [u8]> {
        let text = |value| match value {
            Value::Text(text) => Some(text),
            _ => None,
        };
        tuple.values().map_while(text).collect()
    }

    /// Returns whether an older row must be skipped, and counts the row if so. `values` are the
    /// columns of the row of `walpost.outbox_row` in which the older row is stored.
    pub(super) fn omits_older_row(&self, at: Position, values: &[&[u8]]) -> bool {
        self.older_table(values)
            .is_some_and(|(oid, table)| self.set_aside.count_older(oid, &table, at))
    }

    /// Returns the OID and name of the table that an older row comes from. `values` are the columns
    /// of the row of `walpost.outbox_row` in which the older row is stored.
    pub(super) fn older_table(&self, values: &[&[u8]]) -> Option<(u32, TableName)> {
        self.row_table.as_ref()?.original_table(values)
    }
}

/// Fills `row`, which must be empty, with the values that `mapping` requires.
fn fill_row<'a>(
    mapping: &Mapping,
    tuple: &Tuple<'a>,
    row: &mut Row<'a>,
) -> Result<(), &'static str> {
    if tuple.len() != mapping.width() {
        return Err("a row whose number of columns differs from that of the table");
    }
    for (index, value) in tuple.values().enumerate() {
        let Some(slot) = mapping.slot(index) else {
            continue;
        };
        row[slot] = match value {
            Value::Null => None,
            Value::Text(text) => Some(text),
            Value::Binary(_) => return Err("a value in binary format, which was not requested"),
            Value::UnchangedToast => {
                return Err("an inserted row without one of its TOASTed values");
            }
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lsn::Lsn;
    use crate::postgres::table_pattern::TablePatterns;

    fn source(topic: &str) -> TableSource {
        let patterns = TablePatterns::new(&["*.outbox".to_owned()]).expect("a pattern");
        let settings = OutboxSettings {
            topic: topic.parse().expect("a topic"),
            ..OutboxSettings::default()
        };
        TableSource::new(Outbox::Tables(patterns), settings)
    }

    #[test]
    fn limits_the_memory_for_column_descriptions() {
        let mut source = source("{aggregatetype}");
        let facts = |bytes| ColumnFacts {
            default: Some("x".repeat(bytes)),
            ..ColumnFacts::default()
        };
        let used_bytes = |source: &TableSource| {
            let facts = source.facts.values().flatten();
            facts.map(ColumnFacts::memory_bytes).sum::<usize>()
        };
        for oid in 0..200 {
            source.describe_table(oid, vec![facts(1 << 20)], Vec::new());
            assert!(source.facts.contains_key(&oid));
            assert!(used_bytes(&source) <= FACTS_BYTES_MAX, "after table {oid}");
        }
        // Tables without columns use memory too.
        let tables_max = u32::try_from(FACTS_BYTES_MAX / ENTRY_BYTES).expect("few");
        for oid in 0..=tables_max {
            source.describe_table(oid, Vec::new(), Vec::new());
        }
        assert!(source.facts.len() < FACTS_BYTES_MAX / ENTRY_BYTES);
    }

    #[test]
    fn requires_a_reconnect_if_table_names_use_too_much_memory() {
        let mut source = source("{table.schema}.{aggregatetype}");
        let names = |oid| AcceptedNames {
            oid,
            names: vec![TableName::from_catalog(&"x".repeat(1 << 20), "outbox")],
            unchecked_before: Lsn::ZERO,
        };
        let described = (0..100).take_while(|oid| {
            source.describe_table(*oid, Vec::new(), vec![names(*oid)]);
            source.has_room_for(1000)
        });
        assert_eq!(described.count(), 63);
        source.accept_names(Vec::new(), &Commands::default());
        assert!(source.has_room_for(1000));
    }
}
