//! Explains why the server does not open a connection for replication. Only opening one proves that
//! the role may replicate: on Amazon RDS, the privilege comes from membership in a role, and the
//! role's own attribute is not set.

use super::Catalog;
use crate::postgres::connect::dial::ServerError;
use crate::postgres::table::identifier;

/// Queries whether the role has the attribute, and whether the server grants the privilege by
/// membership.
const LOGIN_PRIVILEGES: &str = "SELECT coalesce((SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user), false), \
     EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication')";

impl Catalog {
    /// Adds a hint to the error with which the server rejected a replication connection, if the
    /// catalog shows how to fix it.
    pub(crate) async fn explain_refusal(&self, error: &mut ServerError) {
        self.name_users(error).await;
        // insufficient_privilege. The message itself may be in another language.
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

/// Returns the statement that allows the role to replicate, if it lacks the privilege.
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
    fn statement_is_the_one_that_the_server_has_for_the_right() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            grant("a b", false, false),
            some("ALTER ROLE \"a b\" REPLICATION")
        );
        assert_eq!(
            grant("a b", false, true),
            some("GRANT rds_replication TO \"a b\"")
        );
        assert_eq!(grant("a b", true, true), None);
    }
}
