//! The differences between a message outbox and an outbox table. The tests of delivery, order,
//! crashes and outages cover both kinds of outbox.

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::session::Session;

mod foreign;
mod init;
mod publish;
mod rights;

fn message_fixture() -> Fixture<'static> {
    Fixture::with_outbox(Outbox::Messages)
}

/// Returns a statement that calls `walpost.publish` with the given arguments and the fixture's
/// prefix.
fn publish(fixture: &Fixture, arguments: &str) -> String {
    format!(
        "SELECT walpost.publish({arguments}, prefix => 'walpost_{}');",
        fixture.name
    )
}

/// The roles of one test, which are dropped when this value is dropped. Roles are shared by all
/// databases of a server, so dropping the test's database would not drop them.
struct TestRoles<'s>(&'s Fixture<'static>, Vec<String>);

impl<'s> TestRoles<'s> {
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

impl Drop for TestRoles<'_> {
    fn drop(&mut self) {
        for role in &self.1 {
            self.0.db.drop_role(role);
        }
    }
}
