//! Queries the tables of a publication directly from the system catalogs. Since PostgreSQL 17, the
//! view `pg_publication_tables` locks each table, so an exclusive lock on one table would block
//! delivery for all tables of the slot. For the same reason, expressions are printed with
//! `pg_get_expr(expression, 0)`, which locks no table. It supports only expressions that do not
//! refer to columns, such as defaults and partition bounds.

use tokio_postgres::SimpleQueryMessage;

use super::text_limits::EXPRESSION_BYTES_MAX;
use super::{Catalog, CatalogError};
use crate::postgres::table::{TableName, identifier};

/// How long to wait for the lock that is required to read a table's row filter. The limit is low
/// because no position is confirmed in the meantime.
const LOCK_TIMEOUT: &str = "500ms";

/// SQLSTATE lock_not_available.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// A table in a publication.
pub(super) struct PublishedTable {
    pub(super) name: TableName,
    oid: u32,
    has_filter: bool,
}

/// A query for functions in the row filter `r.prqual` that are not safe to call as another role.
/// `sql/examine.sql` contains the same condition and explains it.
const UNSAFE_FUNCTIONS: &str = "SELECT coalesce(p.oid, called.oid)::regprocedure::text FROM (SELECT kind, number::oid \
     FROM regexp_matches(to_jsonb(r) ->> 'prqual', ' :(funcid|opfuncid|opno) (\\d+)', 'g') AS m, \
     unnest(m[1:1], m[2:2]) AS part (kind, number)) AS named \
     LEFT JOIN pg_operator o ON named.kind = 'opno' AND o.oid = number \
     CROSS JOIN LATERAL (SELECT CASE kind WHEN 'opno' THEN coalesce(o.oprcode::oid, number) ELSE number END) AS called (oid) \
     LEFT JOIN pg_proc p ON p.oid = called.oid \
     WHERE called.oid <> 0 AND (number >= 12000 OR p.oid IS NULL OR p.provolatile <> 'i' \
     OR p.prolang <> (SELECT oid FROM pg_language WHERE lanname = 'internal') \
     OR p.oid = 'pg_catalog.satisfies_hash_partition(oid, integer, integer, \"any\")'::regprocedure) LIMIT 1";

/// A query that returns the owner of publication `b` if the owner is not trusted to run code as the
/// current role. The server evaluates row filters with the privileges of the role that reads the
/// slot, and uses the filters that were defined when a row was written. Therefore, the owner
/// controls which code this session runs. A role is trusted if it can act as the current role
/// anyway. If the current role is not a superuser, roles with the REPLICATION privilege are also
/// trusted, because they can read all WAL and drop the slot. On Amazon RDS, members of the role
/// rds_replication have this privilege. Membership is taken into account only if the current role
/// is also a member, because on other servers, any role that is allowed to create roles could
/// create one with that name. Since PostgreSQL 16, a role can inherit the owner's privileges, and
/// therefore change the publication, without being able to act as the owner. Such roles must be
/// trusted as well.
pub(super) const UNTRUSTED_OWNER: &str = "SELECT pg_get_userbyid(b.pubowner)::text FROM pg_roles o \
     WHERE (o.oid = b.pubowner OR o.oid IN (SELECT member FROM pg_auth_members) AND pg_has_role(o.oid, b.pubowner, 'USAGE') \
         AND NOT pg_has_role(o.oid, b.pubowner, CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END) \
         AND pg_get_userbyid(b.pubowner) NOT IN (current_user, session_user)) \
     AND current_setting('server_version_num')::int >= 150000 \
     AND NOT coalesce((SELECT bool_and(pg_has_role(o.oid, us.oid, CASE WHEN current_setting('server_version_num')::int < 160000 \
         THEN 'MEMBER' ELSE 'SET' END) \
         OR EXISTS (SELECT FROM pg_auth_members m \
             WHERE m.roleid = us.oid AND m.admin_option AND NOT us.rolsuper AND pg_has_role(o.oid, m.member, 'USAGE')) \
         OR NOT us.rolsuper AND (o.rolreplication \
             OR o.rolcreaterole AND current_setting('server_version_num')::int < 160000 \
             OR NOT us.rolreplication AND EXISTS (SELECT FROM pg_roles r WHERE r.rolname = 'rds_replication' \
                 AND pg_has_role(o.oid, r.oid, 'USAGE') AND pg_has_role(us.oid, r.oid, 'USAGE')))) \
     FROM pg_roles us WHERE us.rolname IN (current_user, session_user)), false) LIMIT 1";

/// A row filter that could run another role's code as the role that evaluates the filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnsafeFilter {
    pub(crate) table: String,
    /// The unsafe function that the filter calls.
    pub(crate) function: String,
}

/// A publication's row filter for a table.
pub(super) enum RowFilter {
    None,
    Condition(String),
    Unsafe(UnsafeFilter),
    /// The filter could not be read because the table is locked.
    Locked,
}

/// Returns a query that produces the same result as `pg_get_publication_tables` would on a server
/// with this version. The parameter `$1` is the publication's name.
fn query(version: i32) -> String {
    // Since PostgreSQL 15, publications can contain schemas and row filters.
    let (schemas, filter) = match version >= 150_000 {
        true => (
            "UNION SELECT c.oid FROM found p JOIN pg_publication_namespace s ON s.pnpubid = p.oid \
             JOIN pg_class c ON c.relnamespace = s.pnnspid \
             WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'",
            "NOT p.puballtables AND NOT EXISTS (SELECT FROM pg_publication_namespace s \
             WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace) \
             AND EXISTS (SELECT FROM pg_publication_rel r \
             WHERE r.prpubid = p.oid AND r.prrelid = c.oid AND r.prqual IS NOT NULL)",
        ),
        false => ("", "false"),
    };
    // 16384 is the first OID that is not reserved for the server's own tables.
    format!(
        "WITH RECURSIVE found AS (SELECT oid, puballtables, pubviaroot FROM pg_publication WHERE pubname = $1), \
         member AS (SELECT r.prrelid AS oid FROM found p JOIN pg_publication_rel r ON r.prpubid = p.oid \
         UNION SELECT c.oid FROM found p JOIN pg_class c ON p.puballtables \
         WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384 {schemas}), \
         below AS (SELECT i.inhrelid AS oid FROM member m JOIN pg_class c ON c.oid = m.oid AND c.relkind = 'p' \
         JOIN pg_inherits i ON i.inhparent = m.oid \
         UNION SELECT i.inhrelid FROM below b JOIN pg_inherits i ON i.inhparent = b.oid) \
         SELECT n.nspname::text, c.relname::text, c.oid, {filter} FROM found p CROSS JOIN LATERAL ( \
         SELECT m.oid FROM member m WHERE p.pubviaroot AND m.oid NOT IN (SELECT oid FROM below) \
         UNION SELECT a.oid FROM (SELECT oid FROM member UNION SELECT oid FROM below) a \
         JOIN pg_class k ON k.oid = a.oid AND k.relkind <> 'p' WHERE NOT p.pubviaroot) t \
         JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace ORDER BY 1, 2"
    )
}

impl Catalog {
    /// Returns the tables that `pg_publication_tables` lists for the publication, without locking
    /// them.
    pub(super) async fn published_tables(
        &self,
        publication: &str,
        version: i32,
    ) -> Result<Vec<PublishedTable>, CatalogError> {
        let rows = self
            .client()
            .query(&query(version), &[&publication])
            .await?;
        let table = |row: &tokio_postgres::Row| {
            Ok(PublishedTable {
                name: TableName {
                    schema: row.try_get(0)?,
                    name: row.try_get(1)?,
                },
                oid: row.try_get(2)?,
                has_filter: row.try_get(3)?,
            })
        };
        rows.iter().map(table).collect()
    }

    /// Returns the first row filter in the publication that is not safe to evaluate. Does not lock
    /// any tables.
    pub(super) async fn unsafe_filter(
        &self,
        publication: &str,
    ) -> Result<Option<UnsafeFilter>, CatalogError> {
        let sql = format!(
            "SELECT r.prrelid::regclass::text, ({UNSAFE_FUNCTIONS}) FROM pg_publication_rel r \
             JOIN pg_publication b ON b.oid = r.prpubid WHERE b.pubname = $1 AND EXISTS ({UNSAFE_FUNCTIONS}) LIMIT 1"
        );
        let found = self.client().query_opt(&sql, &[&publication]).await?;
        let Some(row) = found else { return Ok(None) };
        Ok(Some(UnsafeFilter {
            table: row.try_get(0)?,
            function: row.try_get(1)?,
        }))
    }

    /// Returns the row filter that a publication has for a table.
    pub(super) async fn row_filter(
        &self,
        publication: &str,
        table: &PublishedTable,
    ) -> Result<RowFilter, CatalogError> {
        if !table.has_filter {
            return Ok(RowFilter::None);
        }
        // The filter refers to columns, so printing it locks the table.
        let sql = format!(
            "SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'; SELECT CASE WHEN octet_length(r.prqual::text) <= \
             {EXPRESSION_BYTES_MAX} THEN pg_get_expr(r.prqual, r.prrelid) END, ({UNSAFE_FUNCTIONS}) FROM pg_publication_rel r \
             JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = {} AND r.prrelid = {}",
            postgres_protocol::escape::escape_literal(publication),
            table.oid
        );
        let messages = match self.client().simple_query(&sql).await {
            Ok(messages) => messages,
            Err(error) => match CatalogError::from(error) {
                CatalogError::Server(error) if error.code == LOCK_NOT_AVAILABLE => {
                    return Ok(RowFilter::Locked);
                }
                error => return Err(error),
            },
        };
        let row = messages.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some((row.get(0), row.get(1))),
            _ => None,
        });
        // The row filter may have changed since the publication was examined, so the query that
        // reads the filter also checks whether the filter is safe.
        Ok(match row {
            None => RowFilter::None,
            Some((Some(filter), None)) => RowFilter::Condition(filter.to_owned()),
            Some((None, None)) => {
                return Err(CatalogError::Unexpected(format!(
                    "the row filter of table {} in publication {} is larger than {EXPRESSION_BYTES_MAX} bytes. Use a \
                     shorter filter: ALTER PUBLICATION ... SET TABLE",
                    table.name,
                    identifier(publication)
                )));
            }
            Some((_, Some(function))) => RowFilter::Unsafe(UnsafeFilter {
                table: table.name.to_string(),
                function: function.to_owned(),
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Functions and views that lock the tables they are applied to, each with a list of permitted
    /// calls. A call is permitted if it runs before any row is delivered, or if the same session
    /// reads the table right afterward.
    const LOCKING: [(&str, &[&str]); 6] = [
        ("pg_publication_tables", &[]),
        ("pg_get_publication_tables(", &[]),
        ("pg_partition_tree(", &["$1::text::regclass"]),
        ("pg_relation_size(", &["pg_relation_size(part)"]),
        ("pg_get_indexdef(", &[]),
        // `pg_get_expr` locks no table if its relation argument is 0.
        ("pg_get_expr(", &["r.prqual, r.prrelid", ", 0)"]),
    ];

    #[test]
    fn catalog_query_and_examine_script_use_the_same_condition_for_unsafe_functions() {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, condition) = UNSAFE_FUNCTIONS
            .split_once("called.oid <> 0 AND ")
            .expect("the condition");
        let condition = words(condition.trim_end_matches(" LIMIT 1"));
        let examine = words(include_str!("../../../sql/examine.sql"));
        assert!(examine.contains(&condition), "{condition}");
    }

    /// `lock_and_examine` runs with the privileges of its owner. It therefore contains its own copy
    /// of the query for trusted roles in `sql/examine.sql`.
    #[test]
    fn guard_and_examine_scripts_trust_the_same_roles() {
        let trusted_roles = |text: &'static str| {
            let (_, rest) = text.split_once("able AS MATERIALIZED (").expect("roles");
            let (trusted_roles, _) = rest.split_once(";\n").expect("the end");
            trusted_roles
                .trim_end_matches("$query$")
                .replace("$1", "act_as")
        };
        let examine = trusted_roles(include_str!("../../../sql/examine.sql"));
        assert!(
            examine.contains("'USAGE') AND NOT pg_has_role"),
            "{examine}"
        );
        assert_eq!(
            examine,
            trusted_roles(include_str!("../../../sql/guard.sql"))
        );
    }

    #[test]
    fn catalog_queries_do_not_lock_tables() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/postgres");
        let mut files = vec![folder.join("catalog.rs")];
        let listed = fs::read_dir(folder.join("catalog")).expect("a folder");
        files.extend(listed.map(|entry| entry.expect("an entry").path()));
        let mut found = Vec::new();
        for file in files.iter().filter(|file| file.is_file()) {
            let text = fs::read_to_string(file).expect("a file");
            let (code, _) = text.split_once("#[cfg(test)]").unwrap_or((&text, ""));
            for line in code.lines().filter(|line| !line.trim().starts_with("//")) {
                let locks = |(word, allowed): &(&str, &[&str])| {
                    line.contains(word) && !allowed.iter().any(|allowed| line.contains(allowed))
                };
                if LOCKING.iter().any(locks) {
                    found.push(format!("{}: {}", file.display(), line.trim()));
                }
            }
        }
        assert!(found.is_empty(), "locks a table: {found:#?}");
    }
}
