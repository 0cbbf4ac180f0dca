//! The outbox without a table: behavior that an outbox table does not have. Delivery, order,
//! crashes and outages are tested for both kinds of outbox in the tests for tables.

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::session::Session;

mod foreign;
mod init;
mod publish;
mod rights;

fn as_messages() -> Fixture<'static> {
    Fixture::with_outbox(Outbox::Messages)
}

/// Returns a call of `walpost.publish` with these arguments and the fixture's prefix.
fn publish(fixture: &Fixture, arguments: &str) -> String {
    format!(
        "SELECT walpost.publish({arguments}, prefix => 'walpost_{}');",
        fixture.name
    )
}

/// Roles of one test, dropped with this value. Roles are shared by all databases of a server.
struct Roles<'s>(&'s Fixture<'static>, Vec<String>);

impl<'s> Roles<'s> {
    fn new<const N: usize>(
        fixture: &'s Fixture<'static>,
        names: [&str; N],
    ) -> (Self, [Session; N]) {
        let roles = names.map(|name| format!("{}_{name}", fixture.name));
        let sessions = roles.each_ref().map(|role| {
            fixture.db.run(&format!("CREATE ROLE {role} LOGIN"));
            fixture.server.session_as(role, &fixture.name)
        });
        (Self(fixture, roles.to_vec()), sessions)
    }
}

impl Drop for Roles<'_> {
    fn drop(&mut self) {
        for role in &self.1 {
            self.0.db.drop_role(role);
        }
    }
}
