//! A role that `walpost init` has made: it has the rights that Walpost needs, and is no superuser.

use super::scene::{Commands, Scene};
use super::walpost::Invocation;

/// The role goes when dropped: roles belong to the whole server.
pub(crate) struct Clerk<'s> {
    scene: &'s Scene<'s>,
    pub(crate) role: String,
}

impl<'s> Clerk<'s> {
    pub(crate) fn new(scene: &'s Scene<'s>, role: String) -> Self {
        let init = scene.invoke("init").args(["--role", &role]);
        init.finish().expect_code(0);
        Self { scene, role }
    }

    pub(crate) fn conninfo(&self) -> String {
        self.scene.conninfo_as(&self.role)
    }

    /// The subcommands as the role.
    pub(crate) fn commands(&self) -> Commands<'_> {
        self.scene.at(&self.conninfo())
    }

    /// The first of `words` is the subcommand.
    pub(crate) fn command(&self, words: &[&str]) -> Invocation {
        self.commands()
            .invoke_with_kafka(words[0])
            .args(&words[1..])
    }

    pub(crate) fn replay(&self, arguments: &[&str]) -> Invocation {
        self.commands().replay(arguments)
    }
}

impl Drop for Clerk<'_> {
    fn drop(&mut self) {
        self.scene.db.drop_role(&self.role);
    }
}
