//! Events that are rows of a table.

use std::collections::HashMap;

use crate::delivery::chunks::{CopyProgress, KeyError, KeyType};
use crate::model::lsn::Position;
use crate::outbox::columns::{COLUMNS_MAX, Mapping, MappingError, Row, TableColumn};
use crate::outbox::connect::ColumnFacts;
use crate::outbox::settings::OutboxSettings;
use crate::pipeline::decode::error::CoreError;
use crate::postgres::table::TableName;
use crate::postgres::wire::pgoutput::{Relation, Tuple, Value};

/// The outbox table, as the stream has described it.
pub(crate) struct TableSource {
    table: TableName,
    settings: OutboxSettings,
    /// What the catalog says of the table's columns.
    pub(crate) facts: Vec<ColumnFacts>,
    /// Mappings of the outbox by its OID. There is one, until the table is re-created.
    mappings: Vec<(u32, Mapping)>,
    /// Older rows that were copied; what of them the stream has too is left out.
    pub(crate) copied: Option<Box<CopyProgress>>,
    /// Where the columns of their key are, and what they are, by the table's OID.
    keys: Vec<(u32, Vec<(usize, KeyType)>)>,
}

impl TableSource {
    pub(crate) fn new(table: TableName, settings: OutboxSettings) -> Self {
        Self {
            table,
            settings,
            facts: Vec::new(),
            mappings: Vec::new(),
            copied: None,
            keys: Vec::new(),
        }
    }

    pub(crate) fn table(&self) -> &TableName {
        &self.table
    }

    pub(crate) fn reconnected(&mut self) {
        self.mappings.clear();
        self.keys.clear();
        self.copied = None;
    }

    /// Takes the shape of the outbox; says whether the relation is that.
    pub(crate) fn relation(&mut self, relation: &Relation<'_>) -> Result<bool, MappingError> {
        if !self.table.is(relation.namespace, relation.name) {
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
        let mapping = Mapping::bind_with(
            &self.settings,
            &self.table.to_string(),
            &columns,
            &self.facts,
        )?;
        self.mappings.retain(|(oid, _)| *oid != relation.oid);
        self.mappings.push((relation.oid, mapping));
        self.keys.retain(|(oid, _)| *oid != relation.oid);
        let place = |name: &String| {
            let mut columns = relation.columns.iter().enumerate();
            let (index, column) = columns.find(|(_, column)| column.name == name)?;
            Some((index, KeyType::of(column.type_oid)?))
        };
        let key = self.copied.iter().flat_map(|copied| &copied.key);
        if let Some(key) = key.map(place).collect() {
            self.keys.push((relation.oid, key));
        }
        Ok(true)
    }

    /// Whether the row was copied already, though its transaction is one of the stream's: in another
    /// chunk than the first.
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
        let key = self.keys.iter().find(|(oid, _)| *oid == relation);
        let key = key.and_then(|(_, key)| {
            let value = |(index, kind): &(usize, KeyType)| match tuple.values().nth(*index) {
                Some(Value::Text(text)) => Some((text, *kind)),
                _ => None,
            };
            key.iter().map(value).collect::<Option<Vec<_>>>()
        });
        let has = key
            .ok_or(KeyError)
            .and_then(|key| copied.has(at.commit, &key));
        has.map_err(|error| CoreError::BadLine {
            at,
            table: self.table.clone(),
            error: error.into(),
        })
    }

    /// The row, and what it means. `others` are the names of relations that are not the outbox.
    pub(crate) fn row<'a>(
        &self,
        at: Position,
        relation: u32,
        tuple: &Tuple<'a>,
        others: &HashMap<u32, String>,
    ) -> Result<(&Mapping, Row<'a>), CoreError> {
        let Some((_, mapping)) = self.mappings.iter().find(|(oid, _)| *oid == relation) else {
            return Err(match others.get(&relation) {
                Some(name) => CoreError::ForeignTable {
                    at,
                    found: name.clone(),
                    expected: self.table.clone(),
                },
                None => CoreError::UnknownRelation { at, oid: relation },
            });
        };
        let row = lay_out(mapping, tuple).map_err(|found| CoreError::BadTuple {
            at,
            table: self.table.clone(),
            found,
        })?;
        Ok((mapping, row))
    }
}

/// Puts the values that `mapping` needs into their slots.
fn lay_out<'a>(mapping: &Mapping, tuple: &Tuple<'a>) -> Result<Row<'a>, &'static str> {
    if tuple.len() != mapping.width() {
        return Err("a row with another number of columns than the table's");
    }
    let mut row = [None; COLUMNS_MAX];
    for (index, value) in tuple.values().enumerate() {
        let Some(slot) = mapping.slot(index) else {
            continue;
        };
        row[slot] = match value {
            Value::Null => None,
            Value::Text(text) => Some(text),
            Value::Binary(_) => return Err("a value in binary form, which was not requested"),
            Value::UnchangedToast => return Err("an inserted row without its out-of-line value"),
        };
    }
    Ok(row)
}
