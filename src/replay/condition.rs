//! A condition in SQL that a person gives, before any of it is run.
//!
//! A transaction that can only read bounds little: a function that a condition calls can drop a
//! replication slot, end sessions, read files or reach out to another server, as far as its role may.
//! `SET ROLE` bounds nothing, since the function can set it back. So a condition runs where the session
//! itself has no such rights, and only as the one expression that it is shown as.

use super::ReplayError;
use crate::postgres::catalog::{Catalog, CatalogError, Statement, TableVersion};
use crate::postgres::table::TableName;

const FLAG: &str = "--where";

/// The roles that the session is, or can become at will, and that make whoever has them the master of the
/// server. `session_user` is what counts: every other role can be set back to it.
const MIGHTY: &str = "SELECT session_user::text, r.rolname::text FROM pg_catalog.pg_roles r \
     WHERE (r.rolsuper OR r.rolname IN ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files')) \
     AND pg_catalog.pg_has_role(session_user, r.oid, 'MEMBER') ORDER BY r.rolname <> session_user, r.rolname LIMIT 1";

/// Refuses a condition that must not, or can't, be run for rows of the table. Runs nothing of it.
pub(super) async fn examine(
    catalog: &Catalog,
    table: &TableName,
    version: &TableVersion,
    condition: &str,
) -> Result<(), ReplayError> {
    let mighty = catalog.client().query_opt(MIGHTY, &[]).await;
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
        let prepared = prepared
            .map_err(|error| ReplayError::wrong(FLAG, catalog.denied_select(error, table)))?;
        if !prepared.params().is_empty() {
            return Err(ReplayError::Parameters);
        }
    }
    drop(locked);
    Ok(())
}

/// Statements that the server can all parse only if the condition is one expression. To leave its place,
/// it would have to close a bracket that it did not open: a round one in the first statement, and in the
/// second, where the same bytes are the same words, a square one. What is one expression here is one
/// wherever it stands in round brackets, in the statements that are run.
fn statements(from_item: &str, condition: &str) -> [String; 2] {
    // A comment at its end ends with the line.
    [
        format!("SELECT FROM {from_item} WHERE (\n{condition}\n)"),
        format!("SELECT FROM {from_item} WHERE (ARRAY[\n{condition}\n])[1]"),
    ]
}
