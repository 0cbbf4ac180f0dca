//! Rows that a table contained when it was added to the outboxes of a publication.
//! `walpost.add_outbox` in `sql/tables.sql` writes them to `walpost.outbox_row`, in the transaction
//! that adds the table. They therefore appear in the stream like any other row, before all later
//! rows of the table.

use crate::outbox::columns::{COLUMNS_MAX, Mapping, MappingError, Row, TableColumn};
use crate::postgres::table::TableName;
use crate::postgres::target::OUTBOX_ROW;
use crate::postgres::wire::pgoutput::{Relation, Tuple, Value};

/// The columns of `walpost.outbox_row` that are read.
const COLUMNS: [&str; 6] = [
    "publication",
    "relation",
    "table_schema",
    "table_name",
    "column_list",
    "row_values",
];

/// `walpost.outbox_row`, as described by the stream.
pub(super) struct RowTable {
    oid: u32,
    /// Index of each of [`COLUMNS`].
    places: [usize; COLUMNS.len()],
}

impl RowTable {
    pub(super) fn name() -> TableName {
        let [schema, name] = OUTBOX_ROW;
        TableName::from_catalog(schema, name)
    }

    pub(super) fn is(relation: &Relation<'_>) -> bool {
        [relation.namespace, relation.name] == OUTBOX_ROW
    }

    pub(super) fn from_relation(relation: &Relation<'_>) -> Result<Self, MappingError> {
        let mut places = [0; COLUMNS.len()];
        for (place, name) in places.iter_mut().zip(COLUMNS) {
            let mut columns = relation.columns.iter();
            let found = columns.position(|column| column.name == name);
            *place = found.ok_or_else(|| {
                let columns = relation.columns.iter().map(|column| column.name);
                MappingError::MissingColumn {
                    table: Self::name().to_string(),
                    column: name.to_owned(),
                    setting: "walpost.add_outbox".to_owned(),
                    found: columns.collect::<Vec<_>>().join(", "),
                }
            })?;
        }
        Ok(Self {
            oid: relation.oid,
            places,
        })
    }

    pub(super) fn matches(&self, relation: u32) -> bool {
        self.oid == relation
    }

    /// Returns the OID and name of the table that contained the row, given the values of a row of
    /// `walpost.outbox_row`.
    pub(super) fn table_of(&self, values: &[&[u8]]) -> Option<(u32, TableName)> {
        let [_, relation, schema, name, ..] = self.places;
        let text = |place: usize| str::from_utf8(values.get(place)?).ok();
        let relation = text(relation)?.parse().ok()?;
        Some((
            relation,
            TableName::from_catalog(text(schema)?, text(name)?),
        ))
    }

    /// Reads the row that a row of `walpost.outbox_row` contains. The error describes what was
    /// found instead.
    pub(super) fn read(&self, tuple: &Tuple<'_>) -> Result<OlderRow, &'static str> {
        let text = |place: usize| match tuple.values().nth(place) {
            Some(Value::Text(text)) => str::from_utf8(text).map_err(|_| "text that is not UTF-8"),
            _ => Err("a row without one of its values"),
        };
        let [publication, relation, schema, name, columns, values] = self.places.map(text);
        let json = "a list of columns or values that is none";
        let row = OlderRow {
            publication: publication?.to_owned(),
            oid: relation?.parse().map_err(|_| "an OID that is none")?,
            table: TableName::from_catalog(schema?, name?),
            columns: serde_json::from_str(columns?).map_err(|_| json)?,
            values: serde_json::from_str(values?).map_err(|_| json)?,
        };
        match row.columns.len() == row.values.len() {
            true => Ok(row),
            false => Err("a row with another number of values than columns"),
        }
    }
}

/// A row that its table contained when it was added to the publication.
pub(super) struct OlderRow {
    pub(super) publication: String,
    /// OID of the row's table.
    pub(super) oid: u32,
    pub(super) table: TableName,
    /// Names of its columns, and OIDs of their types.
    columns: Vec<(String, u32)>,
    values: Vec<Option<String>>,
}

impl OlderRow {
    pub(super) fn columns(&self) -> Vec<TableColumn<'_>> {
        TableColumn::list(&self.columns)
    }

    /// Puts the values that `mapping` needs into their slots.
    pub(super) fn lay_out(&self, mapping: &Mapping) -> Row<'_> {
        let mut row = [None; COLUMNS_MAX];
        for (index, value) in self.values.iter().enumerate() {
            if let Some(slot) = mapping.slot(index) {
                row[slot] = value.as_deref().map(str::as_bytes);
            }
        }
        row
    }
}
