//! Objects in the database or in Kafka are missing or incorrect. Walpost exits with code 3 and
//! prints the command that fixes the problem.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::secrets::SECRET;
use crate::support::walpost::{Finished, Invocation};

fn expect_halt(finished: Finished, texts: &[&str]) {
    finished
        .expect_code(3)
        .expect_mentions(&["halted"])
        .expect_mentions(texts);
}

#[test]
fn halts_if_the_outbox_table_is_missing() {
    let fixture = Fixture::bare();
    expect_halt(
        fixture.run().finish(),
        &["public.outbox", "does not exist", "walpost init"],
    );
    expect_halt(
        fixture.run().args(["--table", "shop.events"]).finish(),
        &["shop.events", "does not exist"],
    );
}

#[test]
fn halts_if_the_publication_is_missing() {
    let fixture = Fixture::new();
    let publication = fixture.slot();
    fixture.db.run(&format!("DROP PUBLICATION {publication}"));
    expect_halt(
        fixture.run().finish(),
        &[
            &publication,
            "publication",
            "does not exist",
            "walpost init",
        ],
    );
}

#[test]
fn halts_if_the_slot_is_missing() {
    let fixture = Fixture::new();
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{}')",
        fixture.slot()
    ));
    expect_halt(
        fixture.run().finish(),
        &[&fixture.slot(), "slot", "does not exist", "walpost init"],
    );
}

#[test]
fn halts_if_the_publication_lacks_the_table() {
    let fixture = Fixture::new();
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "CREATE TABLE other (); ALTER PUBLICATION {publication} SET TABLE other"
    ));
    let command = format!("ALTER PUBLICATION {publication} ADD TABLE public.outbox");
    expect_halt(fixture.run().finish(), &["public.outbox", &command]);
}

#[test]
fn halts_if_the_publication_does_not_publish_inserts() {
    let fixture = Fixture::new();
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} SET (publish = 'update')"
    ));
    let command = format!("ALTER PUBLICATION {publication} SET (publish = 'insert')");
    expect_halt(fixture.run().finish(), &["inserts", &command]);
}

#[test]
fn halts_if_the_publication_does_not_publish_via_the_partition_root() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text) PARTITION BY HASH (id)",
    );
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} SET (publish_via_partition_root = false)"
    ));
    expect_halt(
        fixture.run().finish(),
        &[&publication, "publish_via_partition_root = true"],
    );
}

#[test]
fn halts_if_the_slot_uses_a_different_output_plugin() {
    let fixture = Fixture::new();
    let slot = format!("oracle_{}", fixture.name);
    expect_halt(
        fixture.run().args(["--slot", &slot]).finish(),
        &[&slot, "test_decoding", "pgoutput"],
    );
}

#[test]
fn halts_if_the_slot_belongs_to_a_different_database() {
    let (fixture, other) = (Fixture::new(), Fixture::new());
    expect_halt(
        fixture.run().args(["--slot", &other.slot()]).finish(),
        &[&other.slot(), &other.name, &fixture.name],
    );
}

#[test]
fn halts_if_the_slot_is_lost() {
    let server = Server::private(MAJOR, "max_slot_wal_keep_size = 1MB\n");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    for _ in 0..3 {
        fixture
            .db
            .run("CREATE TABLE filler AS SELECT repeat('x', 900) FROM generate_series(1, 25000)");
        fixture
            .db
            .run("DROP TABLE filler; SELECT pg_switch_wal(); CHECKPOINT");
    }
    expect_halt(
        fixture.run().finish(),
        &[
            &fixture.slot(),
            "lost",
            "max_slot_wal_keep_size",
            "walpost init",
        ],
    );
    let end = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    let skip = fixture.skip(&end).arg("--yes").finish().expect_code(3);
    skip.expect_mentions(&[&fixture.slot(), "is lost"]);
}

#[test]
fn missing_topic_error_contains_the_command_that_creates_it() {
    let fixture = Fixture::new();
    let walpost = fixture.start();
    fixture.insert("nobody.made.this", "k");
    let topic = "outbox.event.nobody.made.this";
    expect_halt(
        walpost.finish(),
        &[
            topic,
            "does not exist",
            "kafka-topics",
            "--create",
            "create_topics",
        ],
    );
    let event = fixture.history().pop().unwrap();
    assert!(
        fixture.confirmed() < event.end,
        "the event is not confirmed"
    );
}

#[test]
fn creates_a_missing_topic_if_configured() {
    let fixture = Fixture::new();
    let topic = format!("outbox.event.{}", fixture.name);
    let walpost = fixture.start_with(&["--create-topics", "3:1"]);
    fixture.insert(&fixture.name, "k");
    fixture.wait_until_confirmed();
    fixture.expect_topic(&topic);
    assert_eq!(fixture.broker.partitions(&topic), 3);
    assert_eq!(fixture.records().len(), 1);
    walpost.terminate().expect_code(0);
}

in_both_modes! {
    waits_for_an_existing_topic_that_is_missing_from_broker_metadata
}

fn waits_for_an_existing_topic_that_is_missing_from_broker_metadata(exactly_once: bool) {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).in_mode(exactly_once);
    let aggregate = fixture.aggregate(2);
    let topic = format!("outbox.event.{aggregate}");
    let proxy = broker.proxy();
    proxy.hide_topic(Some(&topic));
    let far = format!("bootstrap.servers=127.0.0.1:{}", proxy.port());
    let mut walpost = fixture.start_with(&["--create-topics", "3:1", "-X", &far]);
    fixture.insert(&aggregate, "k");
    let line = walpost.wait_for_log("waiting for a topic to appear in the brokers' metadata");
    for part in ["WARN", &topic, "the brokers report that the topic exists"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    proxy.hide_topic(None);
    fixture.wait_until_confirmed();
    assert_eq!(fixture.broker.partitions(&topic), 2);
    fixture.settle(walpost, &[], fixture.resends(0));
}

#[test]
fn halts_if_a_template_names_a_missing_column() {
    let fixture = Fixture::new();
    let finished = fixture
        .run()
        .args(["--key", "{tenant}:{aggregateid}"])
        .finish();
    expect_halt(
        finished,
        &[
            "public.outbox",
            "tenant",
            "key",
            "aggregateid, type, payload",
        ],
    );
    let finished = fixture.run().args(["--payload", "body"]).finish();
    expect_halt(finished, &["public.outbox", "body", "payload"]);
}

#[test]
fn halts_if_the_server_has_no_logical_decoding() {
    let server = Server::private(MAJOR, "wal_level = replica\n");
    let session = server.session("postgres");
    session.run("CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)");
    let conninfo = server.conninfo("postgres");
    let run = Invocation::new(["run", "--kafka", "127.0.0.1:9", "--postgres", &conninfo]);
    expect_halt(
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
fn halts_if_the_role_has_no_replication_privilege() {
    let fixture = Fixture::new();
    let role = &fixture.name;
    fixture.db.run(&format!(
        "CREATE ROLE {role} LOGIN; GRANT SELECT ON outbox TO {role}"
    ));
    let conninfo = fixture.conninfo_as(role);
    let finished = fixture.with_conninfo(&conninfo).run().finish();
    expect_halt(finished, &[role, "REPLICATION", "ALTER ROLE"]);
    fixture
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

#[test]
fn halts_if_the_password_is_wrong_or_the_role_or_database_does_not_exist() {
    let fixture = Fixture::new();
    let port = fixture.server.port;
    let tcp = |user: &str| {
        format!(
            "host=127.0.0.1 port={port} user={user} password={SECRET}-wrong dbname={}",
            fixture.name
        )
    };
    let finished = fixture.with_conninfo(&tcp("nobody")).run().finish();
    expect_halt(finished, &["authentication failed", "nobody"]);
    let conninfo = fixture
        .conninfo()
        .replace(&fixture.name, "no_such_database");
    let finished = fixture.with_conninfo(&conninfo).run().finish();
    expect_halt(finished, &["no_such_database", "does not exist"]);
}
