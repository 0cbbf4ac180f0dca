//! A role that `walpost init` has made: it has the rights that Walpost needs, and is no superuser.

use super::scene::Scene;
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

    /// A command as the role; the first of `words` is the subcommand.
    pub(crate) fn command(&self, words: &[&str]) -> Invocation {
        self.scene
            .at(&self.conninfo())
            .invoke_with_kafka(words[0])
            .args(&words[1..])
    }
}

impl Drop for Clerk<'_> {
    fn drop(&mut self) {
        self.scene.db.drop_role(&self.role);
    }
}
