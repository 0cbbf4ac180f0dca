//! Re-exports the types and functions that other modules need to compose a statement and read its
//! result.

pub(crate) use postgres_protocol::escape::{escape_identifier, escape_literal};
pub(crate) use tokio_postgres::types::ToSql;
pub(crate) use tokio_postgres::{Client, Row, SimpleQueryRow};

use crate::model::lsn::Lsn;

/// Returns an SQL literal with the type `text`. Without a type, the server would convert the
/// literal to the type that the literal is compared with. The conversion calls the input function
/// of that type, and checks the constraints if the type is a domain. It takes place while the
/// server parses the statement, even if the statement is only prepared.
pub(crate) fn text_literal(value: &str) -> String {
    format!("{}::text", escape_literal(value))
}

/// Returns an SQL literal with the type `pg_lsn`. See [`text_literal`].
pub(crate) fn lsn_literal(lsn: Lsn) -> String {
    format!("'{lsn}'::pg_lsn")
}

/// Returns the first string literal in `sql` that is not followed by `::` and a type. See
/// [`text_literal`].
pub(crate) fn find_untyped_literal(sql: &str) -> Option<&str> {
    let bytes = sql.as_bytes();
    let end_of = |start: usize| {
        let rest = bytes.get(start + 1..)?;
        let length = rest.iter().position(|byte| *byte == bytes[start])?;
        Some(start + length + 2)
    };
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at = match bytes[start] {
            b'\'' | b'"' => end_of(start).unwrap_or(bytes.len()),
            _ => start + 1,
        };
        // A quote within a literal is doubled.
        while at > start + 1 && bytes.get(at) == Some(&bytes[start]) {
            at = end_of(at).unwrap_or(bytes.len());
        }
        if bytes[start] == b'\'' && !sql[at..].starts_with("::") {
            return sql.get(start..at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_literal_without_a_type() {
        assert_eq!(find_untyped_literal("SELECT a = 'b'"), Some("'b'"));
        assert_eq!(
            find_untyped_literal("('it''s'::text, 'c''d')"),
            Some("'c''d'")
        );
        assert_eq!(find_untyped_literal("a = '' AND b"), Some("''"));
        assert_eq!(find_untyped_literal("a = 'open"), Some("'open"));
        let typed = format!(
            "\"it's\" = {} AND a = '0/0'::pg_lsn AND b = {} AND c = ''::text",
            text_literal(r"a'\b"),
            text_literal("ü")
        );
        assert_eq!(find_untyped_literal(&typed), None);
    }
}
