//! Examines an SQL condition that the operator specifies, before any part of the condition runs.
//!
//! A read-only transaction is not sufficient protection: if the role has the privileges, a function
//! that the condition calls can still drop a replication slot, terminate sessions, read files or
//! connect to another server. `SET ROLE` is not sufficient either, because the function can reset
//! the role. Therefore a condition runs only if the session itself lacks these privileges, and only
//! if the condition is a single expression.

use super::ReplayError;
use crate::postgres::catalog::{Catalog, CatalogError, Statement, TableVersion};
use crate::postgres::table::TableName;

const WHERE_FLAG: &str = "--where";

/// A query that returns a role that gives control over the server, such as a superuser role, if the
/// session has or can assume such a role. The query checks `session_user`, because a session can
/// always switch back to this role.
const PRIVILEGED_ROLES: &str = "SELECT session_user::text, r.rolname::text FROM pg_catalog.pg_roles r \
     WHERE (r.rolsuper OR r.rolname IN ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files')) \
     AND pg_catalog.pg_has_role(session_user, r.oid, 'MEMBER') ORDER BY r.rolname <> session_user, r.rolname LIMIT 1";

/// Rejects a condition that is not safe or not valid for the table. Does not run any part of the
/// condition.
pub(super) async fn examine(
    catalog: &Catalog,
    table: &TableName,
    version: &TableVersion,
    condition: &str,
) -> Result<(), ReplayError> {
    let privileged = catalog.client().query_opt(PRIVILEGED_ROLES, &[]).await;
    if let Some(row) = privileged.map_err(CatalogError::from)? {
        let role = |column| row.try_get(column).map_err(CatalogError::from);
        return Err(ReplayError::TooPrivileged {
            role: role(0)?,
            through: role(1)?,
        });
    }
    // The table must be locked even for parsing, because parsing a literal calls the input function
    // of the type that the literal is compared with.
    let locked = catalog.lock_table(version, Statement::Condition).await?;
    let statements = statements(&locked.source(), condition);
    let parsed = async {
        let mut has_parameters = false;
        for statement in statements {
            let prepared = catalog.client().prepare(&statement).await?;
            has_parameters |= !prepared.params().is_empty();
        }
        Ok(has_parameters)
    };
    let has_parameters = locked.until_planned(parsed).await?.map_err(|error| {
        ReplayError::from_statement_error(WHERE_FLAG, catalog.denied_select(error, table))
    })?;
    match has_parameters {
        true => Err(ReplayError::Parameters),
        false => Ok(()),
    }
}

/// Returns two statements with the condition in brackets. If the server can parse both statements,
/// the condition is a single expression. Otherwise, the condition would have to close a bracket
/// that it did not open: a parenthesis in the first statement and, with the same tokens, a square
/// bracket in the second statement. A condition that is a single expression in both statements is
/// also a single expression inside the parentheses of the statements that Walpost runs.
fn statements(from_item: &str, condition: &str) -> [String; 2] {
    // The line feed terminates any SQL comment at the end of the condition.
    [
        format!("SELECT FROM {from_item} WHERE (\n{condition}\n)"),
        format!("SELECT FROM {from_item} WHERE (ARRAY[\n{condition}\n])[1]"),
    ]
}
