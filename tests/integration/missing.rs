//! Objects that are missing or wrong in the database or in Kafka cause exit code 3 and a message
//! with the command that fixes it.

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::scene::Scene;
use crate::support::secrets::SECRET;
use crate::support::walpost::{Finished, Invocation};

fn halts(finished: Finished, texts: &[&str]) {
    finished
        .expect_code(3)
        .expect_mentions(&["halted"])
        .expect_mentions(texts);
}

#[test]
fn missing_table() {
    let scene = Scene::bare();
    halts(
        scene.run().finish(),
        &["public.outbox", "does not exist", "walpost init"],
    );
    halts(
        scene.run().args(["--table", "shop.events"]).finish(),
        &["shop.events", "does not exist"],
    );
}

#[test]
fn missing_publication() {
    let scene = Scene::new();
    let publication = scene.slot();
    scene.db.run(&format!("DROP PUBLICATION {publication}"));
    halts(
        scene.run().finish(),
        &[
            &publication,
            "publication",
            "does not exist",
            "walpost init",
        ],
    );
}

#[test]
fn missing_slot() {
    let scene = Scene::new();
    scene.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{}')",
        scene.slot()
    ));
    halts(
        scene.run().finish(),
        &[&scene.slot(), "slot", "does not exist", "walpost init"],
    );
}

#[test]
fn publication_without_the_table() {
    let scene = Scene::new();
    let publication = scene.slot();
    scene.db.run(&format!(
        "CREATE TABLE other (); ALTER PUBLICATION {publication} SET TABLE other"
    ));
    let command = format!("ALTER PUBLICATION {publication} ADD TABLE public.outbox");
    halts(scene.run().finish(), &["public.outbox", &command]);
}

#[test]
fn publication_without_inserts() {
    let scene = Scene::new();
    let publication = scene.slot();
    scene.db.run(&format!(
        "ALTER PUBLICATION {publication} SET (publish = 'update')"
    ));
    let command = format!("ALTER PUBLICATION {publication} SET (publish = 'insert')");
    halts(scene.run().finish(), &["inserts", &command]);
}

#[test]
fn publication_of_partitions_under_their_own_names() {
    let scene = Scene::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text) PARTITION BY HASH (id)",
    );
    let publication = scene.slot();
    scene.db.run(&format!(
        "ALTER PUBLICATION {publication} SET (publish_via_partition_root = false)"
    ));
    halts(
        scene.run().finish(),
        &[&publication, "publish_via_partition_root = true"],
    );
}

#[test]
fn slot_of_another_plugin() {
    let scene = Scene::new();
    let slot = format!("oracle_{}", scene.name);
    halts(
        scene.run().args(["--slot", &slot]).finish(),
        &[&slot, "test_decoding", "pgoutput"],
    );
}

#[test]
fn slot_of_another_database() {
    let (scene, other) = (Scene::new(), Scene::new());
    halts(
        scene.run().args(["--slot", &other.slot()]).finish(),
        &[&other.slot(), &other.name, &scene.name],
    );
}

#[test]
fn slot_that_lost_its_log() {
    let server = Server::private(MAJOR, "max_slot_wal_keep_size = 1MB\n");
    let scene = Scene::on_servers(&server, Broker::shared());
    for _ in 0..3 {
        scene
            .db
            .run("CREATE TABLE filler AS SELECT repeat('x', 900) FROM generate_series(1, 25000)");
        scene
            .db
            .run("DROP TABLE filler; SELECT pg_switch_wal(); CHECKPOINT");
    }
    halts(
        scene.run().finish(),
        &[
            &scene.slot(),
            "lost",
            "max_slot_wal_keep_size",
            "walpost init",
        ],
    );
    let end = scene.db.value("SELECT pg_current_wal_flush_lsn()").unwrap();
    let skip = scene.skip(&end).arg("--yes").finish().expect_code(3);
    skip.expect_mentions(&[&scene.slot(), "is lost"]);
}

#[test]
fn missing_topic_error_names_the_command_that_creates_it() {
    let scene = Scene::new();
    let walpost = scene.start();
    scene.insert("nobody.made.this", "k");
    let topic = "outbox.event.nobody.made.this";
    halts(
        walpost.finish(),
        &[
            topic,
            "does not exist",
            "kafka-topics",
            "--create",
            "create_topics",
        ],
    );
    let event = scene.history().pop().unwrap();
    assert!(
        scene.confirmed() < event.end,
        "the event is still to be sent"
    );
}

#[test]
fn missing_topic_is_made_where_that_is_configured() {
    let scene = Scene::new();
    let topic = format!("outbox.event.{}", scene.name);
    let walpost = scene.start_with(&["--create-topics", "3:1"]);
    scene.insert(&scene.name, "k");
    scene.wait_until_confirmed();
    scene.expect_topic(&topic);
    assert_eq!(scene.broker.partitions(&topic), 3);
    assert_eq!(scene.records().len(), 1);
    walpost.terminate().expect_code(0);
}

in_both_modes! {
    topic_that_exists_and_is_not_in_the_metadata_is_waited_for
}

fn topic_that_exists_and_is_not_in_the_metadata_is_waited_for(exactly_once: bool) {
    let broker = Broker::borrowed();
    let scene = Scene::on_servers(Server::shared(MAJOR), &broker).in_mode(exactly_once);
    let aggregate = scene.aggregate(2);
    let topic = format!("outbox.event.{aggregate}");
    let proxy = broker.proxy();
    proxy.hide_topic(Some(&topic));
    let far = format!("bootstrap.servers=127.0.0.1:{}", proxy.port());
    let mut walpost = scene.start_with(&["--create-topics", "3:1", "-X", &far]);
    scene.insert(&aggregate, "k");
    let said = walpost.wait_for_log("waiting for a topic to exist");
    for part in ["WARN", &topic, "the brokers say that it exists"] {
        assert!(said.contains(part), "{part} in {said}");
    }
    proxy.hide_topic(None);
    scene.wait_until_confirmed();
    assert_eq!(scene.broker.partitions(&topic), 2);
    scene.settle(walpost, &[], scene.resends(0));
}

#[test]
fn column_that_a_template_names_and_the_table_has_not() {
    let scene = Scene::new();
    let finished = scene
        .run()
        .args(["--key", "{tenant}:{aggregateid}"])
        .finish();
    halts(
        finished,
        &[
            "public.outbox",
            "tenant",
            "key",
            "aggregateid, type, payload",
        ],
    );
    let finished = scene.run().args(["--payload", "body"]).finish();
    halts(finished, &["public.outbox", "body", "payload"]);
}

#[test]
fn server_without_logical_decoding() {
    let server = Server::private(MAJOR, "wal_level = replica\n");
    let session = server.session("postgres");
    session.run("CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)");
    let conninfo = server.conninfo("postgres");
    let run = Invocation::new(["run", "--kafka", "127.0.0.1:9", "--postgres", &conninfo]);
    halts(
        run.finish(),
        &[
            "wal_level",
            "replica",
            "ALTER SYSTEM SET wal_level = logical",
        ],
    );
    let init = Invocation::new(["init", "--no-role", "--postgres", &conninfo]);
    init.finish()
        .expect_code(3)
        .expect_mentions(&["wal_level", "logical"]);
}

#[test]
fn role_without_the_right_to_replicate() {
    let scene = Scene::new();
    let role = &scene.name;
    scene.db.run(&format!(
        "CREATE ROLE {role} LOGIN; GRANT SELECT ON outbox TO {role}"
    ));
    let conninfo = scene.conninfo_as(role);
    let finished = scene.with_conninfo(&conninfo).run().finish();
    halts(finished, &[role, "REPLICATION", "ALTER ROLE"]);
    scene
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

#[test]
fn wrong_password_and_unknown_role_and_database() {
    let scene = Scene::new();
    let port = scene.server.port;
    let tcp = |user: &str| {
        format!(
            "host=127.0.0.1 port={port} user={user} password={SECRET}-wrong dbname={}",
            scene.name
        )
    };
    let finished = scene.with_conninfo(&tcp("nobody")).run().finish();
    halts(finished, &["authentication failed", "nobody"]);
    let conninfo = scene.conninfo().replace(&scene.name, "no_such_database");
    let finished = scene.with_conninfo(&conninfo).run().finish();
    halts(finished, &["no_such_database", "does not exist"]);
}
