//! Examines a condition in SQL that the operator specifies, before any part of it runs.
//!
//! A read-only transaction prevents little: within the privileges of its role, a function called by
//! a condition can drop a replication slot, end sessions, read files or connect to another server.
//! `SET ROLE` prevents nothing, because the function can reset the role. Therefore a condition runs
//! only if the session itself lacks such privileges, and only as the single expression that it
//! appears to be.

use super::ReplayError;
use crate::postgres::catalog::{Catalog, CatalogError, Statement, TableVersion};
use crate::postgres::table::TableName;

const WHERE_FLAG: &str = "--where";

/// The roles that the session has or can assume and that give control over the server.
/// `session_user` is decisive, because the session can return to it from any other role.
const PRIVILEGED_ROLES: &str = "SELECT session_user::text, r.rolname::text FROM pg_catalog.pg_roles r \
     WHERE (r.rolsuper OR r.rolname IN ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files')) \
     AND pg_catalog.pg_has_role(session_user, r.oid, 'MEMBER') ORDER BY r.rolname <> session_user, r.rolname LIMIT 1";

/// Rejects a condition that must not or can't run for rows of the table. Runs no part of it.
pub(super) async fn examine(
    catalog: &Catalog,
    table: &TableName,
    version: &TableVersion,
    condition: &str,
) -> Result<(), ReplayError> {
    let mighty = catalog.client().query_opt(PRIVILEGED_ROLES, &[]).await;
    if let Some(row) = mighty.map_err(CatalogError::from)? {
        let role = |column| row.try_get(column).map_err(CatalogError::from);
        return Err(ReplayError::Mighty {
            role: role(0)?,
            through: role(1)?,
        });
    }
    // Parsing a literal calls the input function of the type that it is compared with.
    let locked = catalog.lock_table(version, Statement::Condition).await?;
    for statement in statements(&locked.source(), condition) {
        let prepared = catalog.client().prepare(&statement).await;
        let prepared = prepared.map_err(|error| {
            ReplayError::from_statement_error(WHERE_FLAG, catalog.denied_select(error, table))
        })?;
        if !prepared.params().is_empty() {
            return Err(ReplayError::Parameters);
        }
    }
    drop(locked);
    Ok(())
}

/// Returns statements that the server can all parse only if the condition is a single expression.
/// To escape from its place, it would have to close a bracket that it did not open: a round one in
/// the first statement and, with the same bytes parsed as the same tokens, a square one in the
/// second. A single expression here is a single expression anywhere in round brackets, as in the
/// statements that are run.
fn statements(from_item: &str, condition: &str) -> [String; 2] {
    // The line feed ends a comment at the end of the condition.
    [
        format!("SELECT FROM {from_item} WHERE (\n{condition}\n)"),
        format!("SELECT FROM {from_item} WHERE (ARRAY[\n{condition}\n])[1]"),
    ]
}
