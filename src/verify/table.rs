//! Reads the rows of the table, and determines the topic and key of each row.

use std::collections::HashMap;

use crate::postgres::sql::escape_identifier;

use super::entry::{Entry, EntryKind, Row};
use super::report::Finding;
use super::spill::{Spill, hash};
use super::{Range, Reporter, VerifyError};
use crate::model::lsn::Lsn;
use crate::outbox::columns::{COLUMNS_MAX, Mapping, TableColumn};
use crate::outbox::route::Router;
use crate::outbox::template::Template;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::snapshot::Snapshot;
use crate::postgres::catalog::{
    Catalog, CatalogError, ObservedTable, SelectedRows, Statement, TableVersion,
};
use crate::postgres::table::TableName;
use crate::progress::Progress;

/// The `pg_type.oid` of timestamp and timestamptz.
const TIMESTAMP_OIDS: [u32; 2] = [1114, 1184];
/// Progress is updated each time this many rows have been read.
const PROGRESS_ROWS: u64 = 1024;

/// A plan for reading the rows.
pub(super) struct Plan {
    version: TableVersion,
    /// See [`Catalog::select`].
    columns: String,
    rest: String,
    mapping: Mapping,
    /// For each column of the query except the time column, the index of the column's value in the
    /// row that is passed to the router.
    slots: Vec<usize>,
    has_time: bool,
    /// The header that contains the event's ID.
    pub(super) id: String,
}

/// The result of reading the table.
pub(super) struct Read {
    /// The topics. `Row::topic` is an index into this list.
    pub(super) topics: Vec<String>,
    /// See [`Snapshot::before`].
    pub(super) before: Lsn,
    /// See [`Snapshot::after`].
    pub(super) after: Lsn,
}

impl Plan {
    /// Creates a plan for reading a table that has the columns in `observed`.
    pub(super) fn new(
        settings: &PipelineSettings,
        table: &TableName,
        observed: &ObservedTable,
        range: &Range,
    ) -> Result<Self, VerifyError> {
        let columns = TableColumn::list(&observed.columns);
        let outbox = &settings.outbox;
        let mapping = Mapping::bind_with(
            outbox,
            table.rows(&table.to_string()),
            &columns,
            &observed.facts,
        )?;
        let (id, template) = outbox.id_header().ok_or(VerifyError::NoIdHeader)?;
        // Payloads and other headers are not needed, and can be large.
        let templates = [&outbox.key, template].into_iter();
        let mut names: Vec<&str> = templates
            .flat_map(Template::columns)
            .chain(outbox.topic.columns())
            .chain(outbox.partition.as_deref())
            .collect();
        names.sort_unstable();
        names.dedup();
        let slot = |name: &str| {
            let index = columns.iter().position(|column| column.name == name)?;
            mapping.slot(index)
        };
        let slots = names.iter().filter_map(|name| slot(name)).collect();
        let time = time_column(table, &columns, range)?;
        let mut values: Vec<String> = names.iter().map(|name| escape_identifier(name)).collect();
        if let Some(time) = &time {
            values.push(format!(
                "CASE WHEN isfinite({time}) THEN (extract(epoch FROM {time}) * 1000)::int8 END"
            ));
        }
        let mut rest = String::new();
        if let Some(time) = &time {
            let bound = |sign, at: Option<jiff::Timestamp>| {
                at.map(|at| format!("{time} {sign} '{at}'::timestamptz"))
            };
            let bounds = [bound(">=", range.since), bound("<", range.until)];
            let bounds: Vec<_> = bounds.into_iter().flatten().collect();
            if !bounds.is_empty() {
                rest = format!(" WHERE {}", bounds.join(" AND "));
            }
        }
        Ok(Self {
            version: observed.version.clone(),
            columns: values.join(", "),
            rest,
            mapping,
            slots,
            has_time: time.is_some(),
            id: id.to_owned(),
        })
    }

    /// Reads the table's current rows.
    pub(super) async fn read(
        &self,
        catalog: &Catalog,
        mut progress: Progress,
        into: &mut Spill,
        reporter: &mut Reporter<'_>,
    ) -> Result<Read, VerifyError> {
        let snapshot = Snapshot::begin(catalog).await?;
        // The lock ensures that the names and types of columns have not changed since the statement
        // was composed.
        let locked = catalog.lock_table(&self.version, Statement::Select).await?;
        let rows = catalog.select(locked, &self.columns, &self.rest).await?;
        let topics = self.route(rows, &mut progress, into, reporter).await?;
        let (before, after) = (snapshot.before, snapshot.after);
        snapshot.end().await?;
        progress.finish();
        Ok(Read {
            topics,
            before,
            after,
        })
    }

    async fn route(
        &self,
        mut rows: SelectedRows,
        progress: &mut Progress,
        into: &mut Spill,
        reporter: &mut Reporter<'_>,
    ) -> Result<Vec<String>, VerifyError> {
        let mut topics = Topics::default();
        let mut router = Router::default();
        let mut bytes = Vec::new();
        while let Some(values) = rows.next().await? {
            reporter.counts.rows += 1;
            if reporter.counts.rows.is_multiple_of(PROGRESS_ROWS) {
                progress.advance(PROGRESS_ROWS);
            }
            let mut row = [None; COLUMNS_MAX];
            for (at, slot) in self.slots.iter().enumerate() {
                let value = values.try_get(at).map_err(CatalogError::from)?;
                row[*slot] = value.map(str::as_bytes);
            }
            let created = match self.has_time {
                true => values
                    .try_get(self.slots.len())
                    .map_err(CatalogError::from)?
                    .and_then(|text| text.parse().ok()),
                false => None,
            };
            let record = match router.route(&self.mapping, &row, b"") {
                Ok(record) => record,
                Err(error) => {
                    reporter.counts.unroutable += 1;
                    reporter.add_finding(Finding::Unroutable {
                        row: self.mapping.describe(&row),
                        reason: error.to_string(),
                    })?;
                    continue;
                }
            };
            let mut headers = record.headers.iter();
            let id = headers.find_map(|(name, value)| value.filter(|_| name == self.id));
            let Some(id) = id else {
                reporter.counts.without_id += 1;
                continue;
            };
            let kind = EntryKind::Row(Row {
                topic: topics.number(record.topic),
                partition: record.partition,
                key: hash_of_key(record.key),
                created,
            });
            Entry { kind, id }.encode(&mut bytes);
            into.push(hash(id), &bytes)?;
        }
        progress.advance(reporter.counts.rows % PROGRESS_ROWS);
        Ok(topics.names)
    }
}

/// Returns the hash of a key. A missing key and an empty key have different hashes.
pub(super) fn hash_of_key(key: Option<&[u8]>) -> u64 {
    key.map_or(0, hash)
}

/// Assigns numbers to topic names.
#[derive(Default)]
struct Topics {
    names: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl Topics {
    fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        // The topic number can't overflow in practice, because brokers don't support that many
        // topics.
        let number = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        self.names.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }
}

/// Returns the quoted name of the column that contains the time of a row.
fn time_column(
    table: &TableName,
    columns: &[TableColumn<'_>],
    range: &Range,
) -> Result<Option<String>, VerifyError> {
    let name = range.column.as_deref().unwrap_or("created_at");
    let found = columns.iter().find(|column| column.name == name);
    match found {
        Some(column) if TIMESTAMP_OIDS.contains(&column.type_oid) => {
            Ok(Some(escape_identifier(name)))
        }
        None if range.column.is_none() && !range.is_bounded() => Ok(None),
        Some(_) if range.column.is_none() && !range.is_bounded() => Ok(None),
        found => Err(VerifyError::NoTime {
            found: match found {
                Some(_) => format!(
                    "column {name:?} of table {table} has a type other than timestamptz and timestamp"
                ),
                None => format!("column {name:?} of table {table} does not exist"),
            },
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinguishes_keys_by_value_and_a_missing_key_from_an_empty_one() {
        assert_ne!(hash_of_key(None), hash_of_key(Some(b"")));
        assert_ne!(hash_of_key(Some(b"a")), hash_of_key(Some(b"b")));
        assert_eq!(hash_of_key(Some(b"a")), hash_of_key(Some(b"a")));
    }
}
