//! Tests the test support itself: whether it starts real servers, and whether the oracle that
//! verifies Walpost's deliveries is reliable.

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::init::psql_file;
use crate::support::event::EventWriter;
use crate::support::fixture::Fixture;
use crate::support::kafka::{Broker, SASL_USER, sasl_password};
use crate::support::names::unique_name;
use crate::support::oracle::Oracle;
use crate::support::postgres::{AUTHORITY, MAJOR, MAJORS, Server, StopMode};
use crate::support::wait::WAIT_TIMEOUT;

#[test]
fn every_supported_postgresql_version_starts_and_has_test_decoding() {
    for major in MAJORS {
        let session = Server::shared(major).session("postgres");
        let version = session.number("SELECT current_setting('server_version_num')::int / 10000");
        assert_eq!(version, i64::from(major));
        let oracle = Oracle::new(&session, &unique_name());
        oracle.drop_slot(&session);
    }
}

#[test]
fn test_oracle_lists_events_in_commit_order() {
    let server = Server::private(15, "");
    let session = server.session("postgres");
    session.run("CREATE TABLE public.outbox (id bigint, note text)");
    let oracle = Oracle::new(&session, "oracle");
    let other = server.session("postgres");
    other.run("BEGIN; INSERT INTO outbox VALUES (1, 'x id[bigint]:9'), (2, 'y')");
    session.run("INSERT INTO outbox VALUES (3, 'z')");
    session.run("BEGIN; INSERT INTO outbox VALUES (4, 'never'); ROLLBACK");
    other.run("COMMIT");
    let events = EventWriter::Table("public.outbox".to_owned());
    let history = oracle.history(&session, &events);
    let ids: Vec<(&str, u32)> = history
        .iter()
        .map(|event| (event.id.as_str(), event.index))
        .collect();
    assert_eq!(ids, [("3", 0), ("1", 0), ("2", 1)]);
    assert!(history[0].end < history[1].end && history[1].end == history[2].end);

    server.stop(StopMode::Immediate);
    server.start();
    let session = server.session("postgres");
    assert_eq!(oracle.history(&session, &events), history);
}

#[test]
fn test_oracle_lists_messages_with_one_prefix_and_their_index_among_all_messages() {
    let fixture = Fixture::bare();
    let oracle = Oracle::new(&fixture.db, &format!("second_{}", fixture.name));
    let id = "406c07f3-26f0-4eea-a50c-109940064b8f";
    let message = |transactional: bool, prefix: &str, id: &str| {
        format!(
            "SELECT pg_logical_emit_message({transactional}, '{prefix}', '\\x01'::bytea || uuid_send('{id}') || '\\xff');"
        )
    };
    let other = id.replace('4', "5");
    fixture.db.run(&format!(
        "BEGIN; {} {} {} COMMIT; BEGIN; {} ROLLBACK",
        message(true, "theirs", &other),
        message(false, "ours", &other),
        message(true, "ours", id),
        message(true, "ours", &other),
    ));
    let history = oracle.history(&fixture.db, &EventWriter::Messages("ours".to_owned()));
    let ids: Vec<_> = history.iter().map(|e| (e.id.as_str(), e.index)).collect();
    assert_eq!(ids, [(id, 1)]);
}

#[test]
fn broker_keeps_its_topics_when_killed_and_restarted() {
    let broker = Broker::private();
    broker.create_topic("kept", 3, &[]);
    broker.kill();
    broker.start();
    assert_eq!(broker.partitions("kept"), 3);
    broker.stop();
}

#[test]
fn record_reader_distinguishes_empty_values_from_null_values() {
    let broker = Broker::shared();
    let topic = unique_name();
    broker.create_topic(&topic, 1, &[]);
    let producer: BaseProducer = broker.client().create().unwrap();
    producer
        .send(BaseRecord::<[u8], [u8]>::to(&topic).key(b"").payload(b""))
        .unwrap();
    producer.send(BaseRecord::<[u8], [u8]>::to(&topic)).unwrap();
    producer.flush(WAIT_TIMEOUT).unwrap();
    let records = broker.read(&[topic]);
    let seen: Vec<_> = records
        .into_iter()
        .map(|record| (record.key, record.payload))
        .collect();
    assert_eq!(seen, [(Some(vec![]), Some(vec![])), (None, None)]);
}

#[test]
fn secured_listeners_respond_to_authorized_clients() {
    let broker = Broker::shared();
    let asks = |address: String, properties: &[(&str, &str)]| {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", address);
        properties
            .iter()
            .for_each(|(key, value)| _ = config.set(*key, *value));
        let client: BaseConsumer = config.create().unwrap();
        client
            .fetch_metadata(None, WAIT_TIMEOUT)
            .unwrap_or_else(|error| panic!("{error}\n{}", broker.log()));
    };
    for mechanism in ["PLAIN", "SCRAM-SHA-256"] {
        let sasl = [
            ("security.protocol", "sasl_plaintext"),
            ("sasl.mechanism", mechanism),
            ("sasl.username", SASL_USER),
            ("sasl.password", &sasl_password()),
        ];
        asks(broker.sasl_address(), &sasl);
    }
    let root = AUTHORITY.root.to_str().unwrap();
    asks(
        broker.tls_address(),
        &[("security.protocol", "ssl"), ("ssl.ca.location", root)],
    );
}

#[test]
fn test_oracle_lists_exactly_the_events_committed_under_load() {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    let load = fixture.load(&["order"]);
    load.wait_for_transactions(100);
    load.stop();
    let stored = fixture.db.rows("SELECT id FROM outbox");
    let mut stored: Vec<&str> = stored
        .iter()
        .map(|row| row[0].as_deref().unwrap())
        .collect();
    let history = fixture.history();
    let mut events: Vec<&str> = history.iter().map(|event| event.id.as_str()).collect();
    stored.sort_unstable();
    events.sort_unstable();
    assert!(stored.len() > 100);
    assert_eq!(stored, events);
}

#[test]
fn init_and_check_list_the_slots_if_all_replication_slots_are_in_use() {
    // Allow two slots, of which the oracle uses one.
    let server = Server::private(MAJOR, "max_replication_slots = 2\n");
    let fixture = Fixture::bare_on_servers(&server, Broker::shared());
    fixture
        .db
        .rows("SELECT pg_create_physical_replication_slot('of_a_standby')");
    let named = "max_replication_slots is 2, and all are in use: of_a_standby (not read), oracle_";
    let remedy = "ALTER SYSTEM SET max_replication_slots = 10";
    let expected = &[named, "pg_drop_replication_slot", remedy];
    fixture
        .init()
        .finish()
        .expect_code(1)
        .expect_mentions(expected);
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(expected);

    // If some rows are older than the slot, `init` temporarily needs one more slot.
    psql_file(&fixture, "outbox.sql");
    fixture.insert(&fixture.aggregate(1), "k");
    fixture
        .db
        .rows("SELECT pg_catalog.pg_drop_replication_slot('of_a_standby')");
    fixture.init().finish().expect_code(0);
    let own = format!("{} (not read)", fixture.slot());
    let expected = &["max_replication_slots is 2, and all are in use: ", &own];
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(expected);
    let mut walpost = fixture.run().start();
    let line = walpost.wait_for_log(expected[0]);
    for text in ["WARN", &own] {
        assert!(line.contains(text), "{text} in {line}");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn init_and_check_list_the_clients_when_all_walsenders_are_in_use() {
    let server = Server::private(MAJOR, "max_wal_senders = 1\n");
    let first = Fixture::on_servers(&server, Broker::shared());
    let second = Fixture::on_servers(&server, Broker::shared());
    let active = first.start();
    let pid = first.db.number("SELECT pid FROM pg_stat_replication");
    let named =
        format!("max_wal_senders is 1, and all are in use: PID {pid} (application_name walpost)");
    let remedy = "ALTER SYSTEM SET max_wal_senders = 10";
    let mut walpost = second.run().start();
    let line = walpost.wait_for_log(&named);
    for text in ["WARN", remedy] {
        assert!(line.contains(text), "{text} in {line}");
    }
    let check = second.check().finish().expect_code(3);
    check.expect_mentions(&[&named, remedy]);
    active.terminate().expect_code(0);
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
}
