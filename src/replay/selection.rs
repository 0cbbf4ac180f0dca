//! Determines which rows are resent: converts the operator's selection to values that the journal
//! can store, and converts these values to an SQL condition.

use std::str::FromStr;

use crate::postgres::sql::escape_literal;
use serde::{Deserialize, Serialize};

use super::{ReplayError, condition, position};
use crate::model::lsn::Position;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{
    Catalog, CatalogError, CreatedAt, RowOrder, Statement, TableVersion,
};
use crate::postgres::table::TableName;

/// One end of a range of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// The start time of the transaction that wrote the row, from `created_at`.
    Time(String),
    /// The row with this ID.
    Id(String),
    /// The row whose record has this position.
    Position(Position),
}

impl FromStr for Bound {
    type Err = String;

    /// Parses a bound. Text that starts like a date is parsed as a time, text in the format of a
    /// position as a position, and any other text as an ID.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let begins_with = |pattern: &str| {
            text.len() >= pattern.len()
                && text.bytes().zip(pattern.bytes()).all(|(b, p)| match p {
                    b'0' => b.is_ascii_digit(),
                    p => b == p,
                })
        };
        match text {
            "" => Err("expected a time such as 2025-11-01T03:00:00Z, or an id".to_owned()),
            _ if begins_with("0000-00-00") => Ok(Self::Time(text.to_owned())),
            _ => Ok(match text.parse() {
                Ok(position) => Self::Position(position),
                Err(_) => Self::Id(text.to_owned()),
            }),
        }
    }
}

/// An aggregate type, or a single aggregate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Aggregate {
    #[serde(rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    id: Option<String>,
}

impl FromStr for Aggregate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, id) = match text.split_once('/') {
            Some((kind, id)) => (kind, Some(id.to_owned())),
            None => (text, None),
        };
        match kind {
            "" => Err("expected TYPE or TYPE/ID, such as order/4711".to_owned()),
            kind => Ok(Self {
                kind: kind.to_owned(),
                id,
            }),
        }
    }
}

/// The operator's selection of rows. A row is selected only if it matches every field that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// The start of a range of rows, inclusive.
    pub from: Option<Bound>,
    /// The end of the range, inclusive.
    pub to: Option<Bound>,
    /// An SQL condition.
    pub condition: Option<String>,
    /// If not empty, only rows of these aggregates are selected.
    pub aggregates: Vec<Aggregate>,
    /// If not empty, only rows with these IDs are selected.
    pub ids: Vec<String>,
}

/// A resolved selection, which is stored in a journal entry. The selection contains only values,
/// except for the operator's condition. Unknown fields are rejected, because ignoring an unknown
/// field would select more rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Selected {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from: Option<Edge>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) to: Option<Edge>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) aggregates: Vec<Aggregate>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) ids: Vec<String>,
    /// The operator's SQL condition. If it was read from the journal, it is only compared with the
    /// operator's condition, and never run.
    #[serde(rename = "where", skip_serializing_if = "Option::is_none")]
    pub(super) condition: Option<String>,
}

/// One end of a range of rows, as values from the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Edge {
    /// A value of `created_at`.
    CreatedAt(String),
    /// The key of a row.
    Key(Vec<String>),
}

impl Selected {
    /// Returns the SQL condition, which is empty if all rows are selected.
    pub(super) fn sql(&self, order: &RowOrder<'_>) -> String {
        let mut all = Vec::new();
        for (edge, operator) in [(&self.from, ">="), (&self.to, "<=")] {
            match edge {
                None => {}
                Some(Edge::CreatedAt(time)) => {
                    all.push(format!("created_at {operator} {}", escape_literal(time)));
                }
                Some(Edge::Key(values)) => all.push(order.compared(operator, values)),
            }
        }
        if !self.aggregates.is_empty() {
            let any = self.aggregates.iter().map(|Aggregate { kind, id }| {
                let kind = format!("aggregatetype = {}", escape_literal(kind));
                match id {
                    None => kind,
                    Some(id) => format!("({kind} AND aggregateid = {})", escape_literal(id)),
                }
            });
            let any: Vec<_> = any.collect();
            all.push(format!("({})", any.join(" OR ")));
        }
        if !self.ids.is_empty() {
            let ids: Vec<_> = self.ids.iter().map(|id| escape_literal(id)).collect();
            all.push(format!("id IN ({})", ids.join(", ")));
        }
        if let Some(condition) = &self.condition {
            // The line feed terminates any SQL comment at the end of the condition.
            all.push(format!("({condition}\n)"));
        }
        all.join(" AND ")
    }

    /// Returns the flag to name in an error message if the server rejects the selection.
    pub(super) fn flag(&self) -> &'static str {
        match (&self.condition, &self.ids[..], &self.aggregates[..]) {
            (Some(_), ..) => "--where",
            (None, [_, ..], _) => "--id",
            (None, [], [_, ..]) => "--aggregate",
            (None, [], []) => "row selection",
        }
    }

    /// Returns the kind of statement that this selection requires. The kind determines how the
    /// table is examined before the statement runs.
    pub(super) fn statement(&self) -> Statement {
        match self.aggregates.is_empty() && self.ids.is_empty() {
            _ if self.condition.is_some() => Statement::Condition,
            true => Statement::Select,
            false => Statement::Compare,
        }
    }

    /// Returns whether the range starts or ends at a key whose number of values differs from
    /// `key_columns`, the table's number of key columns.
    pub(super) fn has_other_key_length(&self, key_columns: usize) -> bool {
        let mut edges = [&self.from, &self.to].into_iter().flatten();
        edges.any(|edge| matches!(edge, Edge::Key(values) if values.len() != key_columns))
    }
}

/// The table from which rows are selected.
pub(super) struct Table<'t> {
    pub(super) name: &'t TableName,
    pub(super) columns: &'t [String],
    pub(super) version: &'t TableVersion,
}

impl Selection {
    /// Resolves the rows and positions that the selection refers to.
    pub(super) async fn resolve(
        &self,
        settings: &PipelineSettings,
        catalog: &Catalog,
        table: &Table<'_>,
    ) -> Result<Selected, ReplayError> {
        let mut edges = [None, None];
        for ((bound, flag), edge) in [(&self.from, "--from"), (&self.to, "--to")]
            .into_iter()
            .zip(&mut edges)
        {
            *edge = match bound {
                None => None,
                Some(Bound::Time(text)) => {
                    table.require_column("created_at", flag)?;
                    Some(Edge::CreatedAt(time(catalog, text, flag).await?))
                }
                Some(Bound::Id(id)) => Some(Edge::Key(query_key(catalog, table, id, flag).await?)),
                Some(Bound::Position(at)) => {
                    let id =
                        position::find_row_id(settings, catalog, table.name, *at, flag).await?;
                    Some(Edge::Key(query_key(catalog, table, &id, flag).await?))
                }
            };
        }
        for Aggregate { id, .. } in &self.aggregates {
            table.require_column("aggregatetype", "--aggregate")?;
            if id.is_some() {
                table.require_column("aggregateid", "--aggregate")?;
            }
        }
        if !self.ids.is_empty() {
            table.require_column("id", "--id")?;
        }
        if let Some(condition) = &self.condition {
            condition::examine(catalog, table.name, table.version, condition).await?;
        }
        let [from, to] = edges;
        Ok(Selected {
            from,
            to,
            aggregates: self.aggregates.clone(),
            ids: self.ids.clone(),
            condition: self.condition.clone(),
        })
    }
}

impl Table<'_> {
    fn require_column(&self, column: &str, flag: &'static str) -> Result<(), ReplayError> {
        match self.columns.iter().any(|found| found == column) {
            true => Ok(()),
            false => Err(ReplayError::NoColumn {
                table: self.name.clone(),
                column: column.to_owned(),
                flag,
            }),
        }
    }
}

/// Returns the time as parsed by the server.
async fn time(catalog: &Catalog, text: &str, flag: &'static str) -> Result<String, ReplayError> {
    let sql = "SELECT $1::text::timestamptz::text";
    match catalog.client().query_one(sql, &[&text]).await {
        Ok(row) => Ok(row.try_get(0).map_err(CatalogError::from)?),
        Err(error) => Err(ReplayError::from_statement_error(flag, error.into())),
    }
}

/// Returns the key values of the row with this ID.
async fn query_key(
    catalog: &Catalog,
    table: &Table<'_>,
    id: &str,
    flag: &'static str,
) -> Result<Vec<String>, ReplayError> {
    table.require_column("id", flag)?;
    let locked = catalog
        .lock_table(table.version, Statement::Compare)
        .await?;
    let order = locked.row_order(CreatedAt::First).await?;
    let rest = format!(
        " WHERE id = {} ORDER BY {} LIMIT 1",
        escape_literal(id),
        order.sql(""),
    );
    let columns = order.selected();
    let row = catalog.select_first(locked, &columns, &rest).await;
    let row = row.map_err(|error| match error {
        // Data exception: the value is not valid for the type of the column.
        CatalogError::Server(server) if server.code.starts_with("22") => ReplayError::NoBound {
            flag,
            text: id.to_owned(),
            error: server,
        },
        error => ReplayError::from_statement_error(flag, error),
    })?;
    let Some(row) = row else {
        return Err(ReplayError::NoRow {
            table: table.name.clone(),
            id: id.to_owned(),
            flag,
        });
    };
    Ok(super::key_values(&row)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lsn::Lsn;

    #[test]
    fn distinguishes_times_from_positions_and_ids() {
        let check = |text: &str, is_time: bool| {
            let bound: Bound = text.parse().expect(text);
            assert_eq!(matches!(bound, Bound::Time(_)), is_time, "{text}");
        };
        for time in ["2025-11-01", "2025-11-01 03:00+00", "2025-11-01T03:00:00Z"] {
            check(time, true);
        }
        for id in [
            "1",
            "20251101",
            "2025-11-0x",
            "0198c1a2-7b3e-7000-8000-000000000000",
        ] {
            check(id, false);
        }
        let position = Position {
            commit: Lsn(0x016B_3748),
            index: 2,
        };
        assert_eq!(
            "00000000/016B3748:0000000002".parse(),
            Ok(Bound::Position(position))
        );
        assert!("".parse::<Bound>().is_err());
    }

    #[test]
    fn parses_aggregate_types_with_and_without_an_id() {
        let aggregate = |text: &str| text.parse::<Aggregate>();
        let parsed = |kind: &str, id: Option<&str>| {
            let (kind, id) = (kind.to_owned(), id.map(str::to_owned));
            Ok(Aggregate { kind, id })
        };
        assert_eq!(aggregate("order"), parsed("order", None));
        assert_eq!(aggregate("order/4711"), parsed("order", Some("4711")));
        assert_eq!(aggregate("order/a/b"), parsed("order", Some("a/b")));
        assert!(aggregate("").is_err() && aggregate("/1").is_err());
    }
}
