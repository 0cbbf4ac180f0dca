//! Events that are rows of a table.

use std::collections::HashMap;

use crate::outbox::columns::{COLUMNS_MAX, Mapping, MappingError, Row, TableColumn};
use crate::outbox::settings::OutboxSettings;
use crate::pipeline::PipelineError;
use crate::postgres::lsn::Position;
use crate::postgres::pgoutput::{Relation, Tuple, Value};
use crate::postgres::table::TableName;

/// The outbox table, as the stream has described it.
pub(super) struct TableSource {
    table: TableName,
    settings: OutboxSettings,
    /// Mappings of the outbox by its OID. There is one, until the table is made anew.
    mappings: Vec<(u32, Mapping)>,
}

impl TableSource {
    pub(super) fn new(table: TableName, settings: OutboxSettings) -> Self {
        Self {
            table,
            settings,
            mappings: Vec::new(),
        }
    }

    pub(super) fn table(&self) -> &TableName {
        &self.table
    }

    pub(super) fn reconnected(&mut self) {
        self.mappings.clear();
    }

    /// Takes the shape of the outbox; says whether the relation is that.
    pub(super) fn relation(&mut self, relation: &Relation<'_>) -> Result<bool, MappingError> {
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
        let mapping = Mapping::bind(&self.settings, &self.table.to_string(), &columns)?;
        self.mappings.retain(|(oid, _)| *oid != relation.oid);
        self.mappings.push((relation.oid, mapping));
        Ok(true)
    }

    /// The row, and what it means. `others` are the names of relations that are not the outbox.
    pub(super) fn row<'a>(
        &self,
        at: Position,
        relation: u32,
        tuple: &Tuple<'a>,
        others: &HashMap<u32, String>,
    ) -> Result<(&Mapping, Row<'a>), PipelineError> {
        let Some((_, mapping)) = self.mappings.iter().find(|(oid, _)| *oid == relation) else {
            return Err(match others.get(&relation) {
                Some(name) => PipelineError::ForeignTable {
                    at,
                    found: name.clone(),
                    expected: self.table.clone(),
                },
                None => PipelineError::UnknownRelation { at, oid: relation },
            });
        };
        let row = lay_out(mapping, tuple).map_err(|found| PipelineError::BadTuple {
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
            Value::Binary(_) => return Err("a value in binary form, which was not asked for"),
            Value::UnchangedToast => return Err("an inserted row without its out-of-line value"),
        };
    }
    Ok(row)
}
