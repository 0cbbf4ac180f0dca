//! Older rows: rows that a table already contained when it was added to a publication as an outbox.
//! `walpost.add_outbox` in `sql/tables.sql` copies these rows to `walpost.outbox_row` in the same
//! transaction that adds the table. They therefore appear in the stream like any other rows, and
//! before all later rows of the table.

use crate::outbox::columns::{COLUMNS_MAX, Mapping, MappingError, Row, TableColumn, list_names};
use crate::postgres::table::TableName;
use crate::postgres::target::OUTBOX_ROW;
use crate::postgres::wire::pgoutput::{Relation, Tuple, Value};

/// The columns of `walpost.outbox_row` that Walpost reads.
const COLUMNS: [&str; 6] = [
    "publication",
    "relation",
    "table_schema",
    "table_name",
    "column_list",
    "row_values",
];

/// The table `walpost.outbox_row`, as described by the stream.
pub(super) struct RowTable {
    oid: u32,
    /// For each column in [`COLUMNS`], its index among the table's columns.
    indexes: [usize; COLUMNS.len()],
}

impl RowTable {
    pub(super) fn name() -> TableName {
        let [schema, name] = OUTBOX_ROW;
        TableName::from_catalog(schema, name)
    }

    pub(super) fn is_row_table(relation: &Relation<'_>) -> bool {
        [relation.namespace, relation.name] == OUTBOX_ROW
    }

    pub(super) fn from_relation(relation: &Relation<'_>) -> Result<Self, MappingError> {
        let mut indexes = [0; COLUMNS.len()];
        for (index, name) in indexes.iter_mut().zip(COLUMNS) {
            let mut columns = relation.columns.iter();
            let found = columns.position(|column| column.name == name);
            *index = found.ok_or_else(|| {
                let columns = relation.columns.iter().map(|column| column.name);
                MappingError::MissingColumn {
                    table: Self::name().to_string(),
                    column: name.to_owned(),
                    setting: "walpost.add_outbox".to_owned(),
                    found: list_names(columns),
                }
            })?;
        }
        Ok(Self {
            oid: relation.oid,
            indexes,
        })
    }

    pub(super) fn matches(&self, relation: u32) -> bool {
        self.oid == relation
    }

    /// Returns the OID and name of the table that an older row comes from. `values` are the columns
    /// of the row of `walpost.outbox_row` in which the older row is stored.
    pub(super) fn original_table(&self, values: &[&[u8]]) -> Option<(u32, TableName)> {
        let [_, relation, schema, name, ..] = self.indexes;
        let text = |index: usize| str::from_utf8(values.get(index)?).ok();
        let relation = text(relation)?.parse().ok()?;
        Some((
            relation,
            TableName::from_catalog(text(schema)?, text(name)?),
        ))
    }

    /// Decodes the older row stored in a row of `walpost.outbox_row`. If the stored row is invalid,
    /// the error describes the invalid contents.
    pub(super) fn read(&self, tuple: &Tuple<'_>) -> Result<OlderRow, &'static str> {
        let text = |index: usize| match tuple.values().nth(index) {
            Some(Value::Text(text)) => str::from_utf8(text).map_err(|_| "non-UTF-8 text"),
            _ => Err("an incomplete row"),
        };
        let [publication, relation, schema, name, columns, values] = self.indexes.map(text);
        let json = "invalid columns or values";
        let row = OlderRow {
            publication: publication?.to_owned(),
            oid: relation?.parse().map_err(|_| "an invalid OID")?,
            table: TableName::from_catalog(schema?, name?),
            columns: serde_json::from_str(columns?).map_err(|_| json)?,
            values: serde_json::from_str(values?).map_err(|_| json)?,
        };
        match row.columns.len() == row.values.len() {
            true => Ok(row),
            false => Err("a row whose number of values differs from its number of columns"),
        }
    }
}

/// A row that was already in its table when the table was added to the publication.
pub(super) struct OlderRow {
    pub(super) publication: String,
    /// OID of the table that the row comes from.
    pub(super) oid: u32,
    pub(super) table: TableName,
    /// The name and the type OID of each column.
    columns: Vec<(String, u32)>,
    values: Vec<Option<String>>,
}

impl OlderRow {
    pub(super) fn columns(&self) -> Vec<TableColumn<'_>> {
        TableColumn::list(&self.columns)
    }

    /// Returns the values that `mapping` requires, each at the index that the mapping assigns to
    /// it.
    pub(super) fn to_row(&self, mapping: &Mapping) -> Row<'_> {
        let mut row = [None; COLUMNS_MAX];
        for (index, value) in self.values.iter().enumerate() {
            if let Some(slot) = mapping.slot(index) {
                row[slot] = value.as_deref().map(str::as_bytes);
            }
        }
        row
    }
}
