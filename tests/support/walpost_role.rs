//! A role that `walpost init` creates. It has the permissions that Walpost needs, but is not a
//! superuser.

use super::fixture::{Commands, Fixture};
use super::walpost::Invocation;

/// A role that is dropped when this value is dropped. Otherwise, it would remain, because roles are
/// shared by all databases of the server.
pub(crate) struct WalpostRole<'s> {
    fixture: &'s Fixture<'s>,
    pub(crate) role: String,
}

impl<'s> WalpostRole<'s> {
    pub(crate) fn new(fixture: &'s Fixture<'s>, role: String) -> Self {
        let init = fixture.invoke("init").args(["--role", &role]);
        init.finish().expect_code(0);
        Self { fixture, role }
    }

    pub(crate) fn conninfo(&self) -> String {
        self.fixture.conninfo_as(&self.role)
    }

    /// Returns a builder that prepares subcommands that connect as the role.
    pub(crate) fn commands(&self) -> Commands<'_> {
        self.fixture.with_conninfo(&self.conninfo())
    }

    /// Prepares a subcommand that connects as the role. The first of `words` is the subcommand.
    pub(crate) fn command(&self, words: &[&str]) -> Invocation {
        self.commands()
            .invoke_with_kafka(words[0])
            .args(&words[1..])
    }

    pub(crate) fn replay(&self, arguments: &[&str]) -> Invocation {
        self.commands().replay(arguments)
    }
}

impl Drop for WalpostRole<'_> {
    fn drop(&mut self) {
        self.fixture.db.drop_role(&self.role);
    }
}
