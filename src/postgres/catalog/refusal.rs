//! Explains why the server rejected a replication connection. The catalog alone does not show in
//! advance whether a role may replicate: on Amazon RDS, roles obtain the privilege as members of
//! another role, without having the REPLICATION attribute themselves.

use super::Catalog;
use crate::postgres::connect::dial::ServerError;
use crate::postgres::table::identifier;

/// A query that returns whether the role has the REPLICATION attribute or is a superuser, and
/// whether the server grants the replication privilege through membership in the role
/// `rds_replication`.
const LOGIN_PRIVILEGES: &str = "SELECT coalesce((SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user), false), \
     EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication')";

impl Catalog {
    /// Adds a hint to the error that the server returned when it rejected a replication connection.
    /// Does nothing if no remedy can be determined from the catalog.
    pub(crate) async fn explain_rejection(&self, error: &mut ServerError) {
        self.add_limit_hint(error).await;
        // 42501 is insufficient_privilege. The message text can't be matched, because it may be in
        // a different language.
        if error.code != "42501" {
            return;
        }
        // If the query fails, the error is left unchanged.
        let Ok(row) = self.client.query_one(LOGIN_PRIVILEGES, &[]).await else {
            return;
        };
        if let (Ok(has_attribute), Ok(is_membership)) = (row.try_get(0), row.try_get(1))
            && let Some(grant) = grant(self.conninfo.user(), has_attribute, is_membership)
        {
            error.hint = Some(grant);
        }
    }
}

/// Returns the statement that grants the role the replication privilege, or `None` if the role
/// already has it.
fn grant(role: &str, has_attribute: bool, is_membership: bool) -> Option<String> {
    let role = identifier(role);
    match (has_attribute, is_membership) {
        (true, _) => None,
        (false, true) => Some(format!("GRANT rds_replication TO {role}")),
        (false, false) => Some(format!("ALTER ROLE {role} REPLICATION")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_replication_with_the_statement_that_the_server_supports() {
        let statement = |text: &str| Some(text.to_owned());
        assert_eq!(
            grant("a b", false, false),
            statement("ALTER ROLE \"a b\" REPLICATION")
        );
        assert_eq!(
            grant("a b", false, true),
            statement("GRANT rds_replication TO \"a b\"")
        );
        assert_eq!(grant("a b", true, true), None);
    }
}
