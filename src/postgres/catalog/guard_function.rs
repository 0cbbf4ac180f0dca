//! Compares the function that `sql/guard.sql` created in the database with the version that is
//! built into Walpost.

use super::{Catalog, CatalogError};
use crate::postgres::sql_file::GUARD;
use crate::postgres::target::Target;

/// The state of `walpost.lock_and_examine` in a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuardFunction {
    Missing,
    /// The function was created by a different version of Walpost, or has been changed since it was
    /// created.
    Different,
    Current,
}

impl Catalog {
    /// Compares `walpost.lock_and_examine` with the function that `sql/guard.sql` creates.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn guard_function(&self) -> Result<GuardFunction, CatalogError> {
        let sql = "SELECT p.prosrc = $1::text AND p.prosecdef AND p.provolatile = 'v' \
             AND p.proconfig = ARRAY['search_path=pg_catalog, pg_temp', 'standard_conforming_strings=on', 'row_security=off', 'jit=off'] \
             FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
             WHERE n.nspname = 'walpost' AND p.proname = 'lock_and_examine' AND p.proargtypes = '25 25 25'::oidvector";
        let found = self.client().query_opt(sql, &[&expected_body()]).await?;
        Ok(match found {
            None => GuardFunction::Missing,
            Some(row) if row.try_get::<_, Option<bool>>(0)? == Some(true) => GuardFunction::Current,
            Some(_) => GuardFunction::Different,
        })
    }
}

impl GuardFunction {
    /// Describes the problem and the command that fixes it. Returns `None` if there is no problem.
    #[must_use]
    pub(crate) fn warning(self, target: &Target) -> Option<String> {
        let problem = match self {
            Self::Current => return None,
            Self::Missing => {
                "function walpost.lock_and_examine does not exist, and Walpost can't read tables without it: older rows are not \
                 copied, and walpost verify, walpost replay and the removal of old rows (retention) fail. Create the function \
                 as a superuser"
            }
            Self::Different => {
                "function walpost.lock_and_examine differs from the function that this version of Walpost creates, so it may fail \
                 to detect that statements on a table would run code owned by other roles. Replace the function as a superuser"
            }
        };
        Some(format!("{problem}: {}", target.init(&[])))
    }
}

/// Returns the body of the function that is built into Walpost. The server stores function bodies
/// unchanged, so the two bodies can be compared as text.
fn expected_body() -> &'static str {
    const QUOTE: &str = "$walpost$";
    let function = GUARD.split_once("CREATE OR REPLACE FUNCTION walpost.lock_and_examine");
    let body = function.and_then(|(_, rest)| rest.split(QUOTE).nth(1));
    body.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_function_body_is_complete_and_contains_only_ascii() {
        let body = expected_body();
        assert!(body.starts_with("\nDECLARE\n"), "{body:.40}");
        assert!(body.ends_with("\nEND\n"), "{}", body.len());
        assert!(body.is_ascii());
    }
}
