//! Names of tables and other SQL identifiers.

use std::fmt;
use std::str::FromStr;

use postgres_protocol::escape::escape_identifier;

use crate::outbox::columns::SourceTable;

/// A schema-qualified table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TableName {
    pub schema: String,
    pub name: String,
}

/// The error for text that is not the name of a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the name of a table: expected SCHEMA.TABLE, like public.outbox, with \"double quotes\" around names that require them"
)]
pub struct TableNameError(String);

impl TableName {
    /// Returns the name for use in SQL. Both parts are always quoted, so they can be keywords.
    #[must_use]
    pub fn quoted(&self) -> String {
        let Self { schema, name } = self;
        format!("{}.{}", escape_identifier(schema), escape_identifier(name))
    }

    /// Creates a name from a schema and a name as stored in the catalog.
    pub(crate) fn from_catalog(schema: &str, name: &str) -> Self {
        Self {
            schema: schema.to_owned(),
            name: name.to_owned(),
        }
    }

    /// Returns a [`SourceTable`] with this name. `sql_name` is the name in SQL syntax.
    #[must_use]
    pub(crate) fn rows<'a>(&'a self, sql_name: &'a str) -> SourceTable<'a> {
        SourceTable {
            schema: &self.schema,
            name: &self.name,
            sql_name,
        }
    }

    /// Returns whether the table has this schema and name, as stored in the catalog.
    #[must_use]
    pub fn is(&self, schema: &str, name: &str) -> bool {
        self.schema == schema && self.name == name
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", identifier(&self.schema), identifier(&self.name))
    }
}

/// Keywords that may have to be quoted when used as names: all keywords that `pg_get_keywords()`
/// returns in PostgreSQL 18, except those in the category "unreserved".
const KEYWORDS: &str = "all analyse analyze and any array as asc asymmetric authorization between bigint binary bit \
    boolean both case cast char character check coalesce collate collation column concurrently \
    constraint create cross current_catalog current_date current_role current_schema current_time \
    current_timestamp current_user dec decimal default deferrable desc distinct do else end except \
    exists extract false fetch float for foreign freeze from full grant greatest group grouping \
    having ilike in initially inner inout int integer intersect interval into is isnull join json \
    json_array json_arrayagg json_exists json_object json_objectagg json_query json_scalar \
    json_serialize json_table json_value lateral leading least left like limit localtime \
    localtimestamp merge_action national natural nchar none normalize not notnull null nullif \
    numeric offset on only or order out outer overlaps overlay placing position precision primary \
    real references returning right row select session_user setof similar smallint some substring \
    symmetric system_user table tablesample then time timestamp to trailing treat trim true union \
    unique user using values varchar variadic verbose when where window with xmlattributes \
    xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize \
    xmltable";

/// Formats a name for SQL, with double quotes if necessary, as `quote_ident` does.
#[must_use]
pub fn identifier(name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    match plain && !KEYWORDS.split(' ').any(|word| word == name) {
        true => name.to_owned(),
        false => escape_identifier(name),
    }
}

impl FromStr for TableName {
    type Err = TableNameError;

    /// Parses a name as in SQL, so letters outside double quotes are folded to lower case. The
    /// default schema is `public`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || TableNameError(text.to_owned());
        let (first, rest) = part(text).ok_or_else(error)?;
        if rest.is_empty() {
            return Ok(Self {
                schema: "public".to_owned(),
                name: first,
            });
        }
        let (second, rest) = rest.strip_prefix('.').and_then(part).ok_or_else(error)?;
        match rest {
            "" => Ok(Self {
                schema: first,
                name: second,
            }),
            _ => Err(error()),
        }
    }
}

/// Parses the identifier at the beginning of `text`. Returns the identifier and the remaining text.
fn part(text: &str) -> Option<(String, &str)> {
    let Some(mut rest) = text.strip_prefix('"') else {
        let end = text.find('.').unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        let plain = !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name
                .chars()
                .all(|c| c.is_alphanumeric() || c == '_' || c == '$');
        return plain.then(|| (name.to_lowercase(), rest));
    };
    let mut name = String::new();
    loop {
        let (before, after) = rest.split_once('"')?;
        name.push_str(before);
        match after.strip_prefix('"') {
            Some(after) => {
                name.push('"');
                rest = after;
            }
            None => return (!name.is_empty()).then_some((name, after)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_table_names_like_postgresql() {
        let check = |text: &str, schema: &str, name: &str, sql_name: &str| {
            let table: TableName = text.parse().expect(text);
            assert!(table.is(schema, name), "{text}: {table:?}");
            assert_eq!(table.to_string(), sql_name);
            assert_eq!(sql_name.parse(), Ok(table));
        };
        check("outbox", "public", "outbox", "public.outbox");
        check("Shop.Outbox", "shop", "outbox", "shop.outbox");
        check(
            "\"Shop\".\"out.box\"",
            "Shop",
            "out.box",
            "\"Shop\".\"out.box\"",
        );
        check("s.\"a\"\"b\"", "s", "a\"b", "s.\"a\"\"b\"");
        check("_s.\"1a\"", "_s", "1a", "_s.\"1a\"");
        check(
            "order.user_events",
            "order",
            "user_events",
            "\"order\".user_events",
        );
    }

    #[test]
    fn rejects_text_that_is_not_a_table_name() {
        for text in [
            "", ".", "a.", ".b", "a.b.c", "a b", "\"a", "\"\"", "1a", "a;b", "\"a\"b",
        ] {
            assert_eq!(
                text.parse::<TableName>(),
                Err(TableNameError(text.to_owned()))
            );
        }
    }
}
