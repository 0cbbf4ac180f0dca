//! The database is restored to an earlier state on the same timeline, for example from a disk
//! snapshot. Only the contents of WAL then show that the database was restored. In exactly-once
//! mode, Walpost must halt before it confirms a position. Otherwise, it would treat new events as
//! already delivered.

use std::path::PathBuf;
use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::wait::{assert_stays, wait_until};

/// Number of events that are in Kafka but not in the restored copy.
const LOST_EVENTS: usize = 3 * 500;
/// Number of events committed after the restore.
const NEW_EVENTS: usize = 20;

/// A fixture whose server can be restored from a copy of its data directory. The copy lacks the
/// last delivered events.
struct Restored<'a> {
    fixture: Fixture<'a>,
    aggregate: String,
    copy: PathBuf,
    /// The safe LSN of the checkpoint: all events up to this LSN are in Kafka.
    safe: u64,
}

impl<'a> Restored<'a> {
    /// Copies the data directory after one event is delivered, and then delivers [`LOST_EVENTS`]
    /// more.
    fn deliver(server: &'a Server, outbox: Outbox) -> Self {
        let mut fixture = Fixture::with_outbox_on(outbox, server, Broker::shared()).exactly_once();
        let aggregate = fixture.aggregate(2);
        let walpost = fixture.start_and_confirm_one(&aggregate, "k");
        walpost.terminate().expect_code(0);
        server.stop(StopMode::Fast);
        let copy = server.copy_data();
        server.start();
        fixture.reconnect();
        let walpost = fixture.start();
        for _ in 0..10 {
            fixture.db.run(
                &fixture
                    .events()
                    .insert_many(&aggregate, LOST_EVENTS / 10, "'{}'"),
            );
        }
        fixture.wait_for_records(1 + LOST_EVENTS);
        fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        let safe = fixture.safe_lsn();
        Self {
            fixture,
            aggregate,
            copy,
            safe,
        }
    }

    /// Replaces the server's data directory with the copy, and starts the server.
    fn restore_copy(&mut self) {
        self.fixture.server.stop(StopMode::Fast);
        self.fixture.server.restore_data(&self.copy);
        self.fixture.server.start();
        self.fixture.reconnect();
    }

    fn insert_new(&self) {
        for _ in 0..NEW_EVENTS {
            self.fixture.insert(&self.aggregate, "new");
        }
        assert!(self.fixture.wal_position() < self.safe);
    }

    /// Generates WAL that contains no events, until the end of WAL is past the end of the discarded
    /// history.
    fn write_past_discarded_history(&self) {
        while self.fixture.wal_position() <= self.safe {
            self.fixture
                .db
                .run("CREATE TABLE other AS SELECT generate_series(1, 10000); DROP TABLE other");
        }
    }

    /// Asserts that Walpost halts with a message that contains each of `expected`, and that it
    /// confirmed and delivered nothing.
    fn expect_halt(&self, expected: &[&str]) {
        let confirmed = self.fixture.confirmed();
        for _ in 0..2 {
            let finished = self.fixture.run().finish().expect_code(3);
            finished.expect_mentions(expected).expect_mentions(&[
                "nothing has been delivered or confirmed",
                "walpost checkpoint adopt",
            ]);
            assert_eq!(self.fixture.confirmed(), confirmed);
            assert_eq!(self.fixture.records().len(), 1 + LOST_EVENTS);
        }
    }

    /// Runs `walpost checkpoint adopt`, which makes Walpost accept the server's current WAL.
    /// Asserts that Walpost then delivers the events that follow the slot's position.
    fn adopt(self, count: usize) {
        let adopted = self.fixture.checkpoint("adopt").arg("--yes").finish();
        adopted.expect_code(0);
        let walpost = self.fixture.start();
        let records = self.fixture.wait_for_records(1 + LOST_EVENTS + count);
        // One event may be repeated: before version 17, a server does not always save the slot's
        // last position when it shuts down.
        assert!(records.len() <= 2 + LOST_EVENTS + count);
        walpost.terminate().expect_code(0);
    }
}

fn expect_halt_after_restore(major: u32, outbox: Outbox) {
    let server = Server::private(major, "");
    let mut restored = Restored::deliver(&server, outbox);
    restored.restore_copy();
    restored.insert_new();
    restored.expect_halt(&[
        "ends at",
        "was restored to an earlier state",
        &restored.fixture.slot(),
    ]);
    restored.adopt(NEW_EVENTS);
}

#[test]
fn halts_after_a_database_is_restored_on_postgresql_14() {
    expect_halt_after_restore(14, Outbox::Table);
}

#[test]
fn halts_after_a_database_is_restored_on_postgresql_18() {
    expect_halt_after_restore(18, Outbox::Messages);
}

/// The restored server's WAL extends past the position in Walpost's checkpoint, so the position of
/// the end of WAL no longer shows that the database was restored.
#[test]
fn halts_if_restored_wal_extends_past_the_checkpoint_but_lacks_its_last_event() {
    let server = Server::private(MAJOR, "");
    let mut restored = Restored::deliver(&server, Outbox::Table);
    restored.restore_copy();
    restored.insert_new();
    restored.write_past_discarded_history();
    restored.expect_halt(&["the last published transaction", "is missing from the WAL"]);
    // Check that Walpost also halts if an event was committed after the checkpoint's position.
    restored.fixture.insert(&restored.aggregate, "new");
    restored.expect_halt(&["the last published transaction", "is missing from the WAL"]);
    restored.adopt(NEW_EVENTS + 1);
}

#[test]
fn halts_if_new_wal_on_an_idle_restored_postgresql_18_server_passes_the_checkpoint() {
    let server = Server::private(18, "");
    let mut restored = Restored::deliver(&server, Outbox::Messages);
    restored.restore_copy();
    restored.insert_new();
    restored.write_past_discarded_history();
    restored.expect_halt(&["the last published transaction", "is missing from the WAL"]);
    restored.adopt(NEW_EVENTS);
}

/// A server that is started from a base backup without recovery has no slots, so `init` has to
/// re-create the slot.
#[test]
fn halts_if_init_recreated_the_slot_in_a_restored_database() {
    let server = Server::private(MAJOR, "");
    let mut restored = Restored::deliver(&server, Outbox::Table);
    restored.restore_copy();
    let slot = restored.fixture.slot();
    let drop = format!("SELECT pg_catalog.pg_drop_replication_slot('{slot}')");
    restored.fixture.db.run(&drop);
    restored.insert_new();
    restored.fixture.init().finish().expect_code(0);
    restored.expect_halt(&["ends at", "was restored to an earlier state"]);
    // The new slot's position is lower than the positions of the records in Kafka.
    restored.write_past_discarded_history();
    restored.expect_halt(&["the last published transaction", "is missing from the WAL"]);
    restored.fixture.insert(&restored.aggregate, "seen");
    restored.adopt(1);
}

/// The database is restored while a pipeline waits to reconnect to PostgreSQL.
#[test]
fn halts_if_the_database_is_restored_while_the_pipeline_runs() {
    let server = Server::private(MAJOR, "");
    let mut restored = Restored::deliver(&server, Outbox::Table);
    let walpost = restored.fixture.start();
    restored.restore_copy();
    let confirmed = restored.fixture.confirmed();
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["was restored to an earlier state"]);
    restored.insert_new();
    assert_eq!(restored.fixture.confirmed(), confirmed);
    restored.adopt(NEW_EVENTS);
}

/// If a PostgreSQL server crashes, the slot can return to the position that the server last saved
/// to disk. The server then resends all events after that position.
#[test]
fn confirms_the_position_again_after_a_server_crash_without_new_events() {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared()).exactly_once();
    let aggregate = fixture.aggregate(2);
    let mut sent = 0;
    let safe = loop {
        let walpost = fixture.start();
        fixture.db.run("CHECKPOINT");
        // A PostgreSQL checkpoint logs the running transactions. When the first event's position is
        // confirmed after that, the server saves the slot to disk. Positions that are confirmed
        // later exist only in the server's memory.
        for events in [1, 50] {
            for _ in 0..events {
                fixture.insert(&aggregate, "k");
            }
            sent += events;
            fixture.wait_for_records(sent);
            fixture.wait_until_confirmed();
        }
        let (before, safe) = (fixture.confirmed(), fixture.safe_lsn());
        walpost.kill();
        server.stop(StopMode::Immediate);
        server.start();
        fixture.reconnect();
        if fixture.confirmed() < before {
            break safe;
        }
        // The slot did not move backwards, because the server had saved it again after logging the
        // running transactions, which happens four times a minute. Repeat the attempt.
        assert!(sent < 500, "the slot never moves backwards");
    };
    let walpost = fixture.start();
    wait_until("the slot to be confirmed again", || {
        fixture.confirmed() >= safe
    });
    assert_stays("delivered once", Duration::from_millis(300), || {
        fixture.records().len() == sent
    });
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}
