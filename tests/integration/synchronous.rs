//! If `synchronous_standby_names` matches Walpost's application name, the server treats Walpost as
//! a synchronous standby.

use crate::snapshot::TABLE;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;

/// A setting that keeps sessions from waiting for standbys unless their database overrides it.
const NO_SYNCHRONOUS_COMMIT: &str = "synchronous_commit = local\n";
const WARNING: &str = "Walpost is a synchronous standby";

#[test]
fn warns_if_synchronous_standby_names_matches_walpost() {
    let server = Server::private(MAJOR, NO_SYNCHRONOUS_COMMIT);
    let fixture = Fixture::on_servers(&server, Broker::shared());
    for (names, is_synchronous) in [
        ("*", true),
        ("\"*\"", true),
        ("walpost", true),
        ("FIRST 1 (standby_1, \"Walpost\")", true),
        ("ANY 1 (standby_1,*)", true),
        ("", false),
        ("FIRST 1 (walpost_2, \"walpost 2\")", false),
        ("\"\"\"walpost\"\"\"", false),
    ] {
        fixture.db.run(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '{names}'"
        ));
        fixture.db.run("SELECT pg_catalog.pg_reload_conf()");
        wait_until("the setting", || {
            fixture.db.is_true(&format!(
                "SELECT current_setting('synchronous_standby_names') = '{names}'"
            ))
        });
        let check = fixture.check().finish().expect_code(0);
        let warns = check.stdout.contains(WARNING);
        assert_eq!(warns, is_synchronous, "{names}: {}", check.stdout);
        let walpost = fixture.start();
        let logged = walpost.logged(WARNING);
        assert_eq!(logged, usize::from(is_synchronous), "{names}");
        walpost.terminate().expect_code(0);
    }
}

in_both_modes! {
    does_not_deadlock_if_walpost_is_a_synchronous_standby
}

/// The first run copies rows, so it writes to the journal before it can confirm a position.
fn does_not_deadlock_if_walpost_is_a_synchronous_standby(exactly_once: bool) {
    let settings = format!("{NO_SYNCHRONOUS_COMMIT}synchronous_standby_names = '*'\n");
    let server = Server::private(MAJOR, &settings);
    let fixture = Fixture::bare_on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    fixture.db.run(TABLE);
    fixture.insert(&aggregate, "k");
    fixture.db.run(&format!(
        "ALTER DATABASE {} SET synchronous_commit = on",
        fixture.name
    ));
    fixture.init().finish().expect_code(0);
    let fixture = fixture.in_mode(exactly_once);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let topic = format!("outbox.event.{aggregate}");
    assert_eq!(fixture.broker.read(&[topic]).len(), 2);
}
