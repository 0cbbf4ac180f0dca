//! The database is put back to an earlier state on the same timeline, as by a snapshot of its disk:
//! nothing but the log itself tells that it is another history. Exactly-once halts before anything is
//! confirmed, instead of taking new events for those that it has delivered.

use std::path::PathBuf;
use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, Stop};
use crate::support::scene::Scene;
use crate::support::wait::{stays, wait_until};

/// Events that are in Kafka, and not in the copy.
const DELIVERED: usize = 3 * 500;
/// Events of the other history.
const NEW: usize = 20;

/// A scene whose server has lost what it delivered last.
struct Restored<'a> {
    scene: Scene<'a>,
    aggregate: String,
    copy: PathBuf,
    /// What the checkpoint says is in Kafka.
    safe: u64,
}

impl<'a> Restored<'a> {
    /// One event is in the copy, and [`DELIVERED`] come after it.
    fn deliver(server: &'a Server, outbox: Outbox) -> Self {
        let mut scene = Scene::of_on(outbox, server, Broker::shared()).exactly_once();
        let aggregate = scene.aggregate(2);
        let walpost = scene.start_and_confirm_one(&aggregate, "k");
        walpost.terminate().expect_code(0);
        server.stop(Stop::Fast);
        let copy = server.copy_data();
        server.start();
        scene.reconnect();
        let walpost = scene.start();
        for _ in 0..10 {
            scene
                .db
                .run(&scene.events().many(&aggregate, DELIVERED / 10, "'{}'"));
        }
        scene.wait_for_records(1 + DELIVERED);
        scene.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        let safe = scene.safe_lsn();
        Self {
            scene,
            aggregate,
            copy,
            safe,
        }
    }

    /// Puts the copy back.
    fn put_back(&mut self) {
        self.scene.server.stop(Stop::Fast);
        self.scene.server.put_back(&self.copy);
        self.scene.server.start();
        self.scene.reconnect();
    }

    fn insert_new(&self) {
        for _ in 0..NEW {
            self.scene.insert(&self.aggregate, "new");
        }
        assert!(self.scene.wal_position() < self.safe);
    }

    /// Writes what is no event, until the log is longer than that of the history that was left.
    fn outgrow(&self) {
        while self.scene.wal_position() <= self.safe {
            self.scene
                .db
                .run("CREATE TABLE other AS SELECT generate_series(1, 10000); DROP TABLE other");
        }
    }

    /// It halts, and says so; nothing was confirmed or delivered.
    fn expect_halt(&self, says: &[&str]) {
        let confirmed = self.scene.confirmed();
        for _ in 0..2 {
            let finished = self.scene.run().finish().expect_code(3);
            finished.expect_says(says).expect_says(&[
                "nothing was delivered or confirmed",
                "walpost checkpoint adopt",
            ]);
            assert_eq!(self.scene.confirmed(), confirmed);
            assert_eq!(self.scene.records().len(), 1 + DELIVERED);
        }
    }

    /// A person accepts the log as it is, and what the slot has is delivered.
    fn adopt(self, count: usize) {
        let adopted = self.scene.checkpoint("adopt").arg("--yes").finish();
        adopted.expect_code(0);
        let walpost = self.scene.start();
        let records = self.scene.wait_for_records(1 + DELIVERED + count);
        // Before 17 a server that stops may not have written where the slot stood last.
        assert!(records.len() <= 2 + DELIVERED + count);
        walpost.terminate().expect_code(0);
    }
}

fn database_put_back_to_an_earlier_copy_halts_and_nothing_is_confirmed(major: u32, outbox: Outbox) {
    let server = Server::private(major, "");
    let mut restored = Restored::deliver(&server, outbox);
    restored.put_back();
    restored.insert_new();
    restored.expect_halt(&[
        "ends at",
        "was put back to an earlier state",
        &restored.scene.slot(),
    ]);
    restored.adopt(NEW);
}

#[test]
fn database_put_back_halts_on_14() {
    database_put_back_to_an_earlier_copy_halts_and_nothing_is_confirmed(14, Outbox::Table);
}

#[test]
fn database_put_back_halts_on_18() {
    database_put_back_to_an_earlier_copy_halts_and_nothing_is_confirmed(18, Outbox::Messages);
}

/// By then the end of WAL tells nothing.
#[test]
fn database_that_has_outgrown_what_was_delivered_halts_where_the_last_event_is_missing() {
    let server = Server::private(MAJOR, "");
    let mut restored = Restored::deliver(&server, Outbox::Table);
    restored.put_back();
    restored.insert_new();
    restored.outgrow();
    restored.expect_halt(&["the last that was published", "is not in WAL any more"]);
    // With an event behind the place of the last one, instead of nothing.
    restored.scene.insert(&restored.aggregate, "new");
    restored.expect_halt(&["the last that was published", "is not in WAL any more"]);
    restored.adopt(NEW + 1);
}

#[test]
fn idle_database_that_has_outgrown_what_was_delivered_halts_on_18() {
    let server = Server::private(18, "");
    let mut restored = Restored::deliver(&server, Outbox::Messages);
    restored.put_back();
    restored.insert_new();
    restored.outgrow();
    restored.expect_halt(&["the last that was published", "is not in WAL any more"]);
    restored.adopt(NEW);
}

/// As after a base backup, which has no slots, that was started without recovery.
#[test]
fn database_put_back_whose_slot_init_has_made_again_halts() {
    let server = Server::private(MAJOR, "");
    let mut restored = Restored::deliver(&server, Outbox::Table);
    restored.put_back();
    let slot = restored.scene.slot();
    let drop = format!("SELECT pg_catalog.pg_drop_replication_slot('{slot}')");
    restored.scene.db.run(&drop);
    restored.insert_new();
    restored.scene.init().finish().expect_code(0);
    restored.expect_halt(&["ends at", "was put back to an earlier state"]);
    // The slot is at a place that the records in Kafka are beyond.
    restored.outgrow();
    restored.expect_halt(&["the last that was published", "is not in WAL any more"]);
    restored.scene.insert(&restored.aggregate, "seen");
    restored.adopt(1);
}

/// A pipeline that waits for PostgreSQL meanwhile.
#[test]
fn database_put_back_under_a_running_pipeline_halts() {
    let server = Server::private(MAJOR, "");
    let mut restored = Restored::deliver(&server, Outbox::Table);
    let walpost = restored.scene.start();
    restored.put_back();
    let confirmed = restored.scene.confirmed();
    walpost
        .finish()
        .expect_code(3)
        .expect_says(&["was put back to an earlier state"]);
    restored.insert_new();
    assert_eq!(restored.scene.confirmed(), confirmed);
    restored.adopt(NEW);
}

/// The place of the slot may be old although nothing was put back: it is on disk since the last
/// checkpoint of PostgreSQL only, and all that was delivered since comes again.
#[test]
fn server_that_crashed_is_confirmed_again_without_a_new_event() {
    let server = Server::private(MAJOR, "");
    let mut scene = Scene::on(&server, Broker::shared()).exactly_once();
    let aggregate = scene.aggregate(2);
    let mut sent = 0;
    let safe = loop {
        let walpost = scene.start();
        scene.db.run("CHECKPOINT");
        // The server saves the slot at the first position confirmed beyond the running transactions that a checkpoint
        // writes down: that is the first event. What is confirmed after it is in the server's memory alone.
        for events in [1, 50] {
            for _ in 0..events {
                scene.insert(&aggregate, "k");
            }
            sent += events;
            scene.wait_for_records(sent);
            scene.wait_until_confirmed();
        }
        let (before, safe) = (scene.confirmed(), scene.safe_lsn());
        walpost.kill();
        server.stop(Stop::Immediate);
        server.start();
        scene.reconnect();
        if scene.confirmed() < before {
            break safe;
        }
        // The server has written down which transactions run, as it does four times a minute, and the slot with that.
        assert!(sent < 500, "the slot never goes back");
    };
    let walpost = scene.start();
    wait_until("the slot to be confirmed again", || {
        scene.confirmed() >= safe
    });
    stays("delivered once", Duration::from_millis(300), || {
        scene.records().len() == sent
    });
    assert_eq!(scene.settle(walpost, &[], Resends::Never).repeated, 0);
}
