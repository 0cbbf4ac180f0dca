//! Queries that run before the outbox table is read. They determine whether the role is allowed to
//! read the table, how many rows the table has, and how to order the rows.

use std::marker::PhantomData;

use postgres_protocol::escape::{escape_identifier, escape_literal};
use tokio_postgres::{Row, SimpleQueryMessage};

use super::text_limits::EXPRESSION_BYTES_MAX;
use super::{Catalog, CatalogError, Statement};
use crate::postgres::table::{TableName, identifier};

/// Whether the table has rows, and approximately how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    None,
    /// The planner's estimate of the number of rows.
    About(u64),
    /// The table is not empty, but this role is not allowed to read it.
    Denied {
        /// The statement that grants the privilege.
        grant: String,
    },
}

/// Returns the table with an alias, for use in FROM. The alias prevents a condition from referring
/// to a whole row by the table's name. A reference to a whole row would be unsafe, because the
/// table's owner also owns its row type and can add casts from that type at any time.
pub(super) fn from_item(table: &TableName) -> String {
    format!("{} AS walpost_row", table.quoted())
}

/// OIDs of built-in types, as defined in PostgreSQL 18, `src/include/catalog/pg_type.dat`.
mod oid {
    pub(super) const INT8: u32 = 20;
    pub(super) const INT2: u32 = 21;
    pub(super) const INT4: u32 = 23;
    pub(super) const TEXT: u32 = 25;
    pub(super) const VARCHAR: u32 = 1043;
}

/// The place of `created_at` in the sort order of rows. Relevant only if the table has a column
/// with this name that is NOT NULL and has a timestamp type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CreatedAt {
    /// `created_at` comes first, so that the rows of any time range are consecutive. A table
    /// without a primary key has no sort order, because `created_at` alone does not distinguish
    /// rows.
    First,
    /// `created_at` comes first, unless the primary key itself increases over time, in which case
    /// the key's index already returns rows in this order.
    UnlessKeyAscends,
}

/// The columns by which rows are ordered, most significant first. The columns are never null. `'t`
/// is the lifetime of the lock on the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowOrder<'t> {
    columns: Vec<OrderColumn>,
    /// Whether text is compared byte by byte instead of using the database's collation.
    by_bytes: bool,
    locked: PhantomData<&'t ()>,
}

/// A column by which rows are ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OrderColumn {
    pub name: String,
    pub type_oid: u32,
    /// The operators that compare values, if the column's type is not a built-in type. Otherwise,
    /// the operators in pg_catalog are used.
    comparison: Option<Comparison>,
    /// Whether the column's values increase with the time of insertion, at least approximately.
    rises: bool,
}

/// The B-tree operators of a type outside pg_catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Comparison {
    /// The operator class's input type, quoted. Values are cast to this type because a column's
    /// type can be a domain over it, and any role could create an operator that matches the domain
    /// better.
    input_type: String,
    /// The operators as `OPERATOR(schema.name)`, ordered by strategy number: `<`, `<=`, `=`, `>=`,
    /// `>`.
    operators: [String; 5],
}

impl Comparison {
    /// Returns the operator that corresponds to the pg_catalog operator with this name.
    fn operator(&self, name: &str) -> &str {
        let strategy = match name {
            "<" => 0,
            "<=" => 1,
            "=" => 2,
            ">=" => 3,
            _ => 4,
        };
        &self.operators[strategy]
    }
}

impl OrderColumn {
    /// Creates a column that has a built-in type.
    #[must_use]
    pub(crate) fn built_in(name: String, type_oid: u32) -> Self {
        Self {
            name,
            type_oid,
            comparison: None,
            rises: false,
        }
    }
}

impl<'t> RowOrder<'t> {
    pub(super) fn new(columns: Vec<OrderColumn>) -> Self {
        Self {
            columns,
            by_bytes: false,
            locked: PhantomData,
        }
    }

    /// Creates a sort order from columns with built-in types. The order can't outlive `_table`,
    /// which represents the lock on the table.
    #[must_use]
    pub(crate) fn from_columns<T>(
        _table: &'t T,
        columns: impl IntoIterator<Item = (String, u32)>,
    ) -> Self {
        let columns = columns.into_iter();
        Self::new(
            columns
                .map(|(name, type_oid)| OrderColumn::built_in(name, type_oid))
                .collect(),
        )
    }

    /// Returns this sort order with text compared byte by byte, which is required if keys are also
    /// compared outside the server.
    #[must_use]
    pub(crate) fn by_bytes(self) -> Self {
        Self {
            by_bytes: true,
            ..self
        }
    }

    /// Returns whether the sort order has no columns.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// Returns the number of columns.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.columns.len()
    }

    /// Returns the column names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().map(|column| column.name.as_str())
    }

    /// Returns a condition that compares a row's key with these values. For example, the operator
    /// `>` selects the rows with a greater key.
    #[must_use]
    pub(crate) fn compared(&self, operator: &str, values: &[String]) -> String {
        let literals: Vec<_> = values.iter().map(|value| escape_literal(value)).collect();
        if self
            .columns
            .iter()
            .all(|column| column.comparison.is_none())
        {
            return format!(
                "({}) {operator} ({})",
                self.expressions("").join(", "),
                literals.join(", ")
            );
        }
        // The result depends on the first column whose values differ.
        let strict = operator.trim_end_matches('=');
        let mut condition = String::new();
        for (column, literal) in self.columns.iter().zip(literals).rev() {
            let name = self.expression(column);
            let compared = |operator: &str| match &column.comparison {
                None => format!("{name} OPERATOR(pg_catalog.{operator}) {literal}"),
                Some(comparison) => format!(
                    "{name}::{input} {} {literal}::{input}",
                    comparison.operator(operator),
                    input = comparison.input_type
                ),
            };
            condition = match condition.as_str() {
                "" => compared(operator),
                rest => format!("({} OR {} AND {rest})", compared(strict), compared("=")),
            };
        }
        condition
    }

    /// Returns the expressions for ORDER BY. `direction` is empty, or ` DESC` to reverse the order.
    #[must_use]
    pub(crate) fn sql(&self, direction: &str) -> String {
        self.expressions(direction).join(", ")
    }

    /// Returns the columns as a SELECT list.
    #[must_use]
    pub(crate) fn selected(&self) -> String {
        let names = self.names().map(escape_identifier);
        names.collect::<Vec<_>>().join(", ")
    }

    fn expressions(&self, direction: &str) -> Vec<String> {
        let columns = self.columns.iter();
        let columns = columns.map(|column| format!("{}{direction}", self.expression(column)));
        columns.collect()
    }

    fn expression(&self, column: &OrderColumn) -> String {
        let name = escape_identifier(&column.name);
        let is_text = matches!(column.type_oid, oid::TEXT | oid::VARCHAR);
        match is_text && self.by_bytes {
            true => format!("{name} COLLATE \"C\""),
            false => name,
        }
    }
}

impl Catalog {
    /// Returns the statement that grants this role the privilege to read the table, or `None` if
    /// the role already has it.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn select_grant(
        &self,
        table: &TableName,
    ) -> Result<Option<String>, CatalogError> {
        let row = self
            .client()
            .query_one(
                "SELECT has_schema_privilege($1, 'USAGE') AND \
                 coalesce(has_table_privilege((SELECT c.oid FROM pg_class c JOIN pg_namespace n \
                 ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2), 'SELECT'), false), \
                 current_user::text",
                &[&table.schema, &table.name],
            )
            .await?;
        if row.try_get(0)? {
            return Ok(None);
        }
        let role = identifier(row.try_get(1)?);
        let schema = identifier(&table.schema);
        Ok(Some(format!(
            "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {table} TO {role}"
        )))
    }

    /// Returns whether the table has rows, and approximately how many.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn rows(&self, table: &TableName) -> Result<Rows, CatalogError> {
        if !self.has_storage(table).await? {
            return Ok(Rows::None);
        }
        if let Some(grant) = self.select_grant(table).await? {
            return Ok(Rows::Denied { grant });
        }
        let version = self.table_version(table).await?;
        let locked = self.lock_table(&version, Statement::Select).await?;
        if self.select_first(locked, "", " LIMIT 1").await?.is_none() {
            return Ok(Rows::None);
        }
        Ok(Rows::About(self.estimate(table).await?))
    }

    /// Returns whether the table or any of its partitions has pages. A table without pages has no
    /// rows.
    pub(super) async fn has_storage(&self, table: &TableName) -> Result<bool, CatalogError> {
        let found = self
            .client()
            .query_one(
                "SELECT coalesce(sum(pg_relation_size(part)), 0) > 0 FROM (SELECT $1::text::regclass AS part \
                 UNION SELECT relid FROM pg_partition_tree($1::text::regclass)) AS parts",
                &[&table.quoted()],
            )
            .await?;
        Ok(found.try_get(0)?)
    }

    /// Returns the planner's estimate of the number of rows.
    async fn estimate(&self, table: &TableName) -> Result<u64, CatalogError> {
        let version = self.table_version(table).await?;
        let locked = self.lock_table(&version, Statement::Select).await?;
        let plan = format!("EXPLAIN (FORMAT JSON) SELECT FROM {}", from_item(table));
        let planned = self.client().simple_query(&plan);
        let messages = locked.until_planned(planned).await??;
        let text: String = messages
            .iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => row.get(0),
                _ => None,
            })
            .collect();
        let plan: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let rows = plan[0]["Plan"]["Plan Rows"].as_f64().unwrap_or(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an estimate"
        )]
        Ok(rows as u64)
    }

    /// Returns the columns that can be used to order the table's rows: the columns of the primary
    /// key, and the column `created_at`, which is placed as the parameter `created_at` specifies.
    /// To use the order in SQL, call [`LockedTable::row_order`](super::LockedTable::row_order),
    /// which requires a lock on the table.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn order_columns(
        &self,
        table: &TableName,
        created_at: CreatedAt,
    ) -> Result<Vec<OrderColumn>, CatalogError> {
        let rows = self
            .client()
            .query(
                &format!("SELECT a.attname::text, a.atttypid, e.input_type, e.operators, \
                 CASE WHEN octet_length(d.adbin::text) <= {EXPRESSION_BYTES_MAX} THEN pg_get_expr(d.adbin, 0) LIKE '%uuidv7(%' \
                 ELSE false END, \
                 k.place IS NOT NULL, a.attname = 'created_at' AND a.attnotnull \
                 AND a.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype) \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped \
                 LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
                 LEFT JOIN (SELECT i.indrelid, k.number, k.place FROM pg_index i \
                 CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (number, place) WHERE i.indisprimary) AS k \
                 ON k.indrelid = c.oid AND k.number = a.attnum \
                 LEFT JOIN LATERAL (WITH RECURSIVE base (oid) AS (SELECT a.atttypid UNION \
                 SELECT typbasetype FROM base JOIN pg_type t ON t.oid = base.oid WHERE typbasetype <> 0) \
                 SELECT format('%I.%I', tn.nspname, t.typname) AS input_type, \
                 array_agg(format('OPERATOR(%I.%s)', o.nspname, g.oprname) ORDER BY s.amopstrategy) AS operators \
                 FROM base JOIN pg_type t ON t.oid = base.oid JOIN pg_namespace tn ON tn.oid = t.typnamespace \
                 JOIN pg_opclass p ON p.opcintype = t.oid AND p.opcdefault \
                 JOIN pg_am m ON m.oid = p.opcmethod AND m.amname = 'btree' \
                 JOIN pg_amop s ON s.amopfamily = p.opcfamily AND s.amoplefttype = p.opcintype \
                 AND s.amoprighttype = p.opcintype AND s.amoppurpose = 's' \
                 JOIN pg_operator g ON g.oid = s.amopopr JOIN pg_namespace o ON o.oid = g.oprnamespace \
                 WHERE tn.nspname <> 'pg_catalog' GROUP BY 1) AS e ON true \
                 WHERE n.nspname = $1 AND c.relname = $2 AND (k.place IS NOT NULL OR a.attname = 'created_at') \
                 ORDER BY k.place"),
                &[&table.schema, &table.name],
            )
            .await?;
        let (mut key, mut time) = (Vec::new(), None);
        for row in &rows {
            let column = parse_order_column(row)?;
            if row.try_get(6)? {
                time = Some(column.clone());
            }
            if row.try_get(5)? {
                key.push(column);
            }
        }
        Ok(ordered(key, time, created_at))
    }
}

fn parse_order_column(row: &Row) -> Result<OrderColumn, CatalogError> {
    let type_oid = row.try_get(1)?;
    let is_integer = matches!(type_oid, oid::INT2 | oid::INT4 | oid::INT8);
    let operators: Option<Vec<String>> = row.try_get(3)?;
    let operators = operators.and_then(|operators| operators.try_into().ok());
    let input_type: Option<String> = row.try_get(2)?;
    Ok(OrderColumn {
        name: row.try_get(0)?,
        type_oid,
        comparison: input_type
            .zip(operators)
            .map(|(input_type, operators)| Comparison {
                input_type,
                operators,
            }),
        rises: is_integer || row.try_get(4)?,
    })
}

/// Returns the columns of the key, preceded by the time column if the parameter `created_at`
/// requires it.
fn ordered(
    mut key: Vec<OrderColumn>,
    time: Option<OrderColumn>,
    created_at: CreatedAt,
) -> Vec<OrderColumn> {
    let is_first = match created_at {
        CreatedAt::First => !key.is_empty(),
        CreatedAt::UnlessKeyAscends => !key.first().is_some_and(|first| first.rises),
    };
    if let Some(time) = time.filter(|_| is_first) {
        key.retain(|column| column.name != time.name);
        key.insert(0, time);
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, rises: bool) -> OrderColumn {
        OrderColumn {
            name: name.to_owned(),
            type_oid: oid::TEXT,
            comparison: None,
            rises,
        }
    }

    #[test]
    fn sorts_rows_by_creation_time_first_unless_it_is_missing_or_the_key_is_ascending() {
        let time = || Some(column("created_at", false));
        let names = |key: &[OrderColumn], time, created_at| {
            let ordered = ordered(key.to_vec(), time, created_at);
            let names: Vec<_> = ordered.into_iter().map(|column| column.name).collect();
            names.join(" ")
        };
        use CreatedAt::{First, UnlessKeyAscends};
        let (rising, random) = ([column("id", true)], [column("id", false)]);
        assert_eq!(names(&rising, time(), First), "created_at id");
        assert_eq!(names(&rising, time(), UnlessKeyAscends), "id");
        assert_eq!(names(&random, time(), UnlessKeyAscends), "created_at id");
        assert_eq!(names(&random, None, First), "id");
        assert_eq!(names(&[], time(), First), "");
        assert_eq!(names(&[], time(), UnlessKeyAscends), "created_at");
        let both = [column("id", false), column("created_at", false)];
        assert_eq!(names(&both, time(), First), "created_at id");
    }

    #[test]
    fn compares_keys_as_row_values() {
        let order = RowOrder::from_columns(
            &(),
            [("created_at".to_owned(), 1184), ("x\"y".to_owned(), 25)],
        );
        let values = ["2025-01-01 00:00:00+00".to_owned(), "it's".to_owned()];
        assert_eq!(
            order.compared(">", &values),
            "(\"created_at\", \"x\"\"y\") > ('2025-01-01 00:00:00+00', 'it''s')"
        );
        assert_eq!(order.sql(" DESC"), "\"created_at\" DESC, \"x\"\"y\" DESC");
        assert_eq!(order.selected(), "\"created_at\", \"x\"\"y\"");
        let by_bytes = order.by_bytes();
        assert_eq!(by_bytes.sql(""), "\"created_at\", \"x\"\"y\" COLLATE \"C\"");
    }

    #[test]
    fn compares_extension_types_with_their_own_operators() {
        let id = OrderColumn {
            comparison: Some(Comparison {
                input_type: "my.code".to_owned(),
                operators: ["#<#", "#<=#", "=", "#>=#", "#>#"]
                    .map(|name| format!("OPERATOR(my.{name})")),
            }),
            ..column("id", false)
        };
        let order = RowOrder::new(vec![column("t", false), id]);
        assert_eq!(
            order.compared(">=", &["1".to_owned(), "a".to_owned()]),
            "(\"t\" OPERATOR(pg_catalog.>) '1' OR \"t\" OPERATOR(pg_catalog.=) '1' \
             AND \"id\"::my.code OPERATOR(my.#>=#) 'a'::my.code)"
        );
    }
}
