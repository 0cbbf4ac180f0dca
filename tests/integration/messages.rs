//! The outbox without a table: behavior that an outbox table does not have. Delivery, order,
//! crashes and outages are tested for both kinds of outbox in the tests for tables.

use crate::support::event::Outbox;
use crate::support::scene::Scene;
use crate::support::session::Session;

mod foreign;
mod init;
mod publish;
mod rights;

fn as_messages() -> Scene<'static> {
    Scene::with_outbox(Outbox::Messages)
}

/// Returns a call of `walpost.publish` with these arguments and the scene's prefix.
fn publish(scene: &Scene, arguments: &str) -> String {
    format!(
        "SELECT walpost.publish({arguments}, prefix => 'walpost_{}');",
        scene.name
    )
}

/// Roles of one test, dropped with this value. Roles are shared by all databases of a server.
struct Roles<'s>(&'s Scene<'static>, Vec<String>);

impl<'s> Roles<'s> {
    fn new<const N: usize>(scene: &'s Scene<'static>, names: [&str; N]) -> (Self, [Session; N]) {
        let roles = names.map(|name| format!("{}_{name}", scene.name));
        let sessions = roles.each_ref().map(|role| {
            scene.db.run(&format!("CREATE ROLE {role} LOGIN"));
            scene.server.session_as(role, &scene.name)
        });
        (Self(scene, roles.to_vec()), sessions)
    }
}

impl Drop for Roles<'_> {
    fn drop(&mut self) {
        for role in &self.1 {
            self.0.db.drop_role(role);
        }
    }
}
