//! Explains why the server rejected a replication connection. Whether a role may replicate is known
//! only after opening such a connection: on Amazon RDS, the privilege comes from membership in a
//! role, and the role's own REPLICATION attribute is not set.

use super::Catalog;
use crate::postgres::connect::dial::ServerError;
use crate::postgres::table::identifier;

/// Queries whether the role has the REPLICATION attribute, and whether the server grants the
/// privilege by role membership.
const LOGIN_PRIVILEGES: &str = "SELECT coalesce((SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user), false), \
     EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication')";

impl Catalog {
    /// Adds a hint to an error with which the server rejected a replication connection, if the
    /// catalog shows the remedy.
    pub(crate) async fn explain_rejection(&self, error: &mut ServerError) {
        self.add_limit_hint(error).await;
        // insufficient_privilege. The message text can't be matched, because it may be in a
        // different language.
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
