//! Rows inserted by a malicious role that has only the INSERT privilege on the outbox. If dead
//! letters are enabled, none of these rows delays other roles' events.

use std::time::{Duration, Instant};

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::{Broker, SASL_USER, sasl_password};
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::Record;
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, Walpost};

const TABLE: &str = "CREATE TABLE outbox (id text, aggregatetype text, aggregateid text, payload text, headers json,
    at timestamptz, shard int)";

in_both_modes! {
    rows_inserted_with_only_insert_privilege_cannot_halt_the_pipeline
    topic_names_in_rows_cannot_halt_the_pipeline
    waits_while_brokers_do_not_report_whether_a_topic_exists
}

/// Creates a role that may only insert into the outbox, and opens a session as that role.
fn attacker(fixture: &Fixture) -> Session {
    let role = format!("{}_attacker", fixture.name);
    fixture.db.run(&format!(
        "CREATE ROLE {role} LOGIN; GRANT INSERT ON outbox TO {role}"
    ));
    fixture.server.session_as(&role, &fixture.name)
}

fn drop_attacker(fixture: &Fixture, session: Session) {
    drop(session);
    let role = format!("{}_attacker", fixture.name);
    fixture
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

fn dead_letter_topic(fixture: &Fixture) -> String {
    let topic = format!("{}.dead", fixture.name);
    fixture.topic(&topic, 3, &[]);
    topic
}

/// Starts Walpost with dead letters enabled for all kinds of undeliverable events.
fn start(fixture: &Fixture, dead: &str, more: &str) -> Walpost {
    let mode = if fixture.is_exactly_once() {
        "exactly-once"
    } else {
        "at-least-once"
    };
    fixture.start_with_file(&format!(
        "on_unroutable = 'dead-letter'\non_oversize = 'dead-letter'\ndead_letter_topic = '{dead}'\n\
         delivery = '{mode}'\n{more}"
    ))
}

/// Returns the payloads of the records in the topic.
fn payloads<'r>(records: &'r [Record], topic: &str) -> Vec<&'r str> {
    let of_topic = records.iter().filter(|record| record.topic == topic);
    of_topic.map(Record::text).collect()
}

/// Returns the error messages of the dead letters in the topic.
fn errors<'r>(records: &'r [Record], topic: &str) -> Vec<&'r str> {
    let of_topic = records.iter().filter(|record| record.topic == topic);
    of_topic
        .map(|record| record.header("walpost-error-message"))
        .collect()
}

/// Inserts each of the rows, followed by a row of another tenant. Asserts that all of the other
/// tenant's events are delivered.
fn expect_delivery_despite(
    fixture: &Fixture,
    more: &str,
    good: &str,
    topic: &str,
    rows: &[&str],
) -> Vec<Record> {
    let dead = dead_letter_topic(fixture);
    let attacker = attacker(fixture);
    let walpost = start(fixture, &dead, more);
    for (number, row) in rows.iter().enumerate() {
        attacker.run(&format!("INSERT INTO outbox VALUES {row}"));
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ('good', '{good}', 'k', '{number}', NULL, NULL, 0)"
        ));
    }
    let records = fixture.wait_for_records(rows.len() * 2);
    fixture.wait_until_confirmed();
    let expected: Vec<_> = (0..rows.len()).map(|number| number.to_string()).collect();
    assert_eq!(payloads(&records, topic), expected);
    assert_eq!(errors(&records, &dead).len(), rows.len());
    walpost.terminate().expect_code(0);
    drop_attacker(fixture, attacker);
    records
}

fn rows_inserted_with_only_insert_privilege_cannot_halt_the_pipeline(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let row = |values: &str| values.replace("GOOD", &format!("'{aggregate}'"));
    let rows = [
        "('1', 'nobody.made.this', 'k', 'p', NULL, NULL, 0)",
        "('2', NULL, 'k', 'p', NULL, NULL, 0)",
        "('3', '', 'k', 'p', NULL, NULL, 0)",
        "('4', repeat('t', 300), 'k', 'p', NULL, NULL, 0)",
        "('5', repeat('t', 236), 'k', 'p', NULL, NULL, 0)",
        "('6', repeat('t', 5242880), 'k', 'p', NULL, NULL, 0)",
        // In each of the following rows, some field is larger than the largest record that Kafka
        // accepts.
        "('7', GOOD, repeat('k', 5242880), 'p', NULL, NULL, 0)",
        "('8', GOOD, repeat('ü', 20971520), 'p', NULL, NULL, 0)",
        "(repeat('i', 5242880), GOOD, 'k', 'p', NULL, NULL, 0)",
        "('10', GOOD, 'k', repeat('p', 5242880), NULL, NULL, 0)",
        "('11', GOOD, 'k', 'p', json_build_object('h', repeat('h', 5242880)), NULL, 0)",
        "('12', GOOD, 'k', 'p', json_build_object(repeat('h', 5242880), 1), NULL, 0)",
        "('13', GOOD, 'k', 'p', (SELECT json_object_agg('header ' || i, i) FROM generate_series(1, 100000) i), NULL, 0)",
        "('14', 'no topic', repeat('k', 5242880), repeat('p', 5242880), json_build_array(repeat('h', 5242880)), NULL, 0)",
        // The headers of the following rows are invalid.
        r#"('15', GOOD, 'k', 'p', '{"\u0000": 1}', NULL, 0)"#,
        r#"('16', GOOD, 'k', 'p', '{"walpost-position": "0/0"}', NULL, 0)"#,
        "('17', GOOD, 'k', 'p', '[1]', NULL, 0)",
        // The timestamps or partitions of the following rows are invalid, either for every topic or
        // for this one.
        "('18', GOOD, 'k', 'p', NULL, 'infinity', 0)",
        "('19', GOOD, 'k', 'p', NULL, '1900-01-01', 0)",
        "('20', GOOD, 'k', 'p', NULL, '9999-12-31', 0)",
        "('21', NULL, 'k', 'p', NULL, '9999-12-31', 0)",
        "('22', GOOD, 'k', 'p', NULL, NULL, -1)",
        "('23', GOOD, 'k', 'p', NULL, NULL, 2147483647)",
    ]
    .map(row);
    let topic = format!("outbox.event.{aggregate}");
    let rows: Vec<_> = rows.iter().map(String::as_str).collect();
    let more = "timestamp = 'at'\npartition = 'shard'\nmax_row_bytes = '64MiB'";
    let records = expect_delivery_despite(&fixture, more, &aggregate, &topic, &rows);
    let letter = |id: &str| {
        let found = records.iter().find(|record| {
            record.header_names().contains(&"walpost-error") && record.header("id") == id
        });
        found.unwrap_or_else(|| panic!("no dead letter for {id}"))
    };
    assert!(
        letter("1")
            .header("walpost-error-message")
            .contains("does not exist")
    );
    assert_eq!(letter("1").text(), "p");
    let cut = letter("8");
    assert_eq!(cut.key(), "ü".repeat(512), "truncated between characters");
    assert_eq!(cut.header("walpost-truncated"), r#"{"key":41943040}"#);
    let many = letter("13").header("walpost-truncated");
    assert!(many.contains("dropped_headers"), "{many}");
}

fn topic_names_in_rows_cannot_halt_the_pipeline(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let topic = format!("outbox.event.{}", fixture.aggregate(1));
    let rows = [
        "('1', '', 'k', 'p', NULL, NULL, 0)",
        "('2', '.', 'k', 'p', NULL, NULL, 0)",
        "('3', '..', 'k', 'p', NULL, NULL, 0)",
        "('4', '...', 'k', 'p', NULL, NULL, 0)",
        "('5', repeat('t', 249), 'k', 'p', NULL, NULL, 0)",
        "('6', repeat('t', 250), 'k', 'p', NULL, NULL, 0)",
        "('7', 'nobody.made.this', 'k', 'p', NULL, NULL, 0)",
        "('8', E'a\\nb', 'k', 'p', NULL, NULL, 0)",
    ];
    expect_delivery_despite(&fixture, "topic = '{aggregatetype}'", &topic, &topic, &rows);
}

/// Each row names a different topic, so waiting for the topics one at a time would take hours.
#[test]
fn delivers_other_topics_while_thousands_of_topics_are_missing() {
    const ROWS: usize = 5000;
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(1);
    let topic = format!("outbox.event.{aggregate}");
    let dead = dead_letter_topic(&fixture);
    let attacker = attacker(&fixture);
    let walpost = start(&fixture, &dead, "");
    let good = |number: usize| {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ('good', '{aggregate}', 'k', '{number}', NULL, NULL, 0)"
        ));
    };
    good(0);
    fixture.wait_until_confirmed();
    let memory = walpost.resident_bytes();
    let started = Instant::now();
    attacker.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{ROWS} LOOP
             INSERT INTO outbox VALUES (i, gen_random_uuid() || repeat('x', 190), 'k', 'p', NULL, NULL, 0);
             COMMIT;
         END LOOP; END $$"
    ));
    good(1);
    fixture.wait_until_confirmed();
    let duration = started.elapsed();
    let records = fixture.wait_for_records(ROWS + 2);
    assert_eq!(payloads(&records, &topic), ["0", "1"]);
    assert_eq!(errors(&records, &dead).len(), ROWS);
    // Walpost waits for the first missing topic. It looks up the other topics at the same time or
    // shortly afterwards.
    assert!(duration < Duration::from_secs(60), "{duration:?}");
    let grown = walpost.resident_bytes().saturating_sub(memory);
    assert!(grown < 64 << 20, "{grown} bytes");
    walpost.terminate().expect_code(0);
    drop_attacker(&fixture, attacker);
}

#[test]
fn needs_no_restart_to_use_a_topic_that_is_created_later() {
    let fixture = Fixture::with_table(TABLE);
    let dead = dead_letter_topic(&fixture);
    let aggregate = format!("{}.later", fixture.name);
    let walpost = start(&fixture, &dead, "");
    let insert = || {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ('1', '{aggregate}', 'k', 'p', NULL, NULL, 0)"
        ));
        fixture.wait_until_confirmed();
    };
    insert();
    assert_eq!(errors(&fixture.records(), &dead).len(), 1);
    let topic = format!("outbox.event.{aggregate}");
    fixture.topic(&topic, 1, &[]);
    wait_until("the topic to be used", || {
        insert();
        !payloads(&fixture.records(), &topic).is_empty()
    });
    walpost.terminate().expect_code(0);
}

/// While the brokers don't respond, Walpost can't determine whether the topic exists.
fn waits_while_brokers_do_not_report_whether_a_topic_exists(exactly_once: bool) {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).in_mode(exactly_once);
    let [first, second] = [fixture.aggregate(1), fixture.aggregate(1)];
    let dead = dead_letter_topic(&fixture);
    let mut walpost = start(&fixture, &dead, "");
    fixture.insert(&first, "k");
    fixture.wait_until_confirmed();
    broker.freeze();
    fixture.insert(&second, "k");
    // The outage lasts longer than Walpost would wait for a missing topic.
    walpost.wait_for_log("Kafka is unreachable");
    broker.thaw();
    fixture.wait_until_confirmed();
    assert_eq!(errors(&fixture.records(), &dead), Vec::<&str>::new());
    walpost.terminate().expect_code(0);
    fixture.check_delivered(&[], fixture.resends(0));
}

#[test]
fn topic_without_write_permission_does_not_delay_other_topics() {
    static BROKER: std::sync::LazyLock<Broker> = std::sync::LazyLock::new(Broker::with_rights);
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &BROKER);
    let [allowed, denied, describable] = [(); 3].map(|()| fixture.aggregate(1));
    let dead = dead_letter_topic(&fixture);
    let acls = |rights: &str| {
        let rights = format!("--add --allow-principal User:{SASL_USER} {rights}");
        let rights: Vec<_> = rights.split_whitespace().collect();
        BROKER.tool("org.apache.kafka.tools.AclCommand", &rights);
    };
    acls(&format!(
        "--operation Write --topic outbox.event.{allowed} --topic {dead}"
    ));
    acls(&format!(
        "--operation Describe --topic outbox.event.{describable}"
    ));
    let run = Invocation::new(["run", "--pipeline", &fixture.name])
        .args(["--postgres", &fixture.conninfo()])
        .args(["--kafka", &BROKER.sasl_address()])
        .args(["-X", "security.protocol=sasl_plaintext"])
        .args(["-X", "sasl.mechanism=PLAIN"])
        .args(["-X", &format!("sasl.username={SASL_USER}")])
        .args([
            "--on-unroutable",
            "dead-letter",
            "--dead-letter-topic",
            &dead,
        ])
        .env("WALPOST_KAFKA_SASL_PASSWORD", sasl_password());
    let walpost = run.start_streaming();
    for aggregate in [&allowed, &denied, &describable, &allowed] {
        fixture.insert(aggregate, "k");
    }
    fixture.wait_until_confirmed();
    let records = fixture.records();
    let good = format!("outbox.event.{allowed}");
    assert_eq!(payloads(&records, &good).len(), 2);
    let errors = errors(&records, &dead);
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(
        errors.iter().all(|error| error.contains("kafka-acls.sh")),
        "{errors:?}"
    );
    walpost.terminate().expect_code(0);
}

/// Kafka rejects a new topic whose name differs from an existing one only in `.` and `_`, because
/// the names of their metrics would collide.
#[test]
fn topic_that_brokers_refuse_to_create_does_not_delay_other_topics() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = format!("{}.a", fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    let dead = dead_letter_topic(&fixture);
    let attacker = attacker(&fixture);
    let more = "create_topics = { partitions = 1, replication = 1 }";
    let walpost = start(&fixture, &dead, more);
    let insert = |session: &Session, aggregate: &str, payload: &str| {
        session.run(&format!(
            "INSERT INTO outbox VALUES ('1', '{aggregate}', 'k', '{payload}', NULL, NULL, 0)"
        ));
    };
    insert(&fixture.db, &aggregate, "0");
    // Waits until the first topic exists: brokers reject the second of two colliding names, and one
    // request could contain both.
    fixture.wait_until_confirmed();
    insert(&attacker, &aggregate.replace('.', "_"), "p");
    insert(&fixture.db, &aggregate, "1");
    fixture.wait_until_confirmed();
    fixture.expect_topic(&topic);
    let records = fixture.records();
    assert_eq!(payloads(&records, &topic), ["0", "1"]);
    let errors = errors(&records, &dead);
    assert!(
        matches!(errors[..], [error] if error.contains("could not be created")),
        "{errors:?}"
    );
    walpost.terminate().expect_code(0);
    drop_attacker(&fixture, attacker);
}

/// The configuration names a topic that does not exist, so only the operator can fix the problem.
#[test]
fn halts_if_a_topic_from_the_configuration_is_missing() {
    let fixture = Fixture::with_table(TABLE);
    let dead = dead_letter_topic(&fixture);
    let walpost = start(&fixture, &dead, "topic = 'nobody.made.this'");
    fixture
        .db
        .run("INSERT INTO outbox VALUES ('1', 'a', 'k', 'p', NULL, NULL, 0)");
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["nobody.made.this", "does not exist"]);
}

#[test]
fn outbox_table_limits_the_length_of_its_text_columns() {
    for partitioned in [false, true] {
        let fixture = Fixture::bare();
        let mut init = fixture.init();
        if partitioned {
            init = init.arg("--partitioned");
        }
        init.finish().expect_code(0);
        let attacker = attacker(&fixture);
        let insert = |kind: usize, id: usize, name: usize| {
            attacker.try_run(&format!(
                "INSERT INTO outbox (aggregatetype, aggregateid, type)
                 VALUES (repeat('x', {kind}), repeat('x', {id}), repeat('x', {name}))"
            ))
        };
        insert(236, 1024, 1024).unwrap();
        // The size of a column is limited if a CHECK constraint on the column mentions its length.
        // Columns of a fixed size need no limit.
        let without_limit = fixture.db.value(
            "SELECT string_agg(attname, ', ') FROM pg_attribute AS a
                 WHERE attrelid = 'outbox'::regclass AND attnum > 0 AND NOT attisdropped AND attlen = -1
                 AND NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = attrelid AND contype = 'c'
                     AND attnum = ANY (conkey) AND (pg_get_constraintdef(oid) ~ 'octet_length'
                         OR conname = 'walpost_aggregatetype_fits_topic_name'))",
        );
        assert_eq!(without_limit, None, "columns without a limit");
        for (kind, id, name, constraint) in [
            (0, 1, 1, "walpost_aggregatetype_fits_topic_name"),
            (237, 1, 1, "walpost_aggregatetype_fits_topic_name"),
            (1, 1025, 1, "walpost_aggregateid_up_to_1024_bytes"),
            (1, 1, 1025, "walpost_type_up_to_1024_bytes"),
        ] {
            let refused = insert(kind, id, name).unwrap_err();
            assert_eq!(
                refused.as_db_error().unwrap().constraint(),
                Some(constraint)
            );
        }
        drop_attacker(&fixture, attacker);
    }
}

#[test]
fn publish_limits_the_length_of_each_event_field() {
    for major in [14, MAJOR, 18] {
        let fixture =
            Fixture::with_outbox_on(Outbox::Messages, Server::shared(major), Broker::shared());
        let publish = |kind: usize, id: usize, name: usize| {
            fixture.db.try_run(&format!(
                "SELECT walpost.publish(repeat('x', {kind}), repeat('x', {id}), repeat('x', {name}), '1')"
            ))
        };
        publish(236, 1024, 1024).unwrap();
        for (kind, id, name) in [(237, 1, 1), (1, 1025, 1), (1, 1, 1025)] {
            let refused = publish(kind, id, name).unwrap_err();
            let refused = refused.as_db_error().unwrap().message();
            assert!(
                refused.contains("at most 236, 1024 and 1024 are allowed"),
                "{refused}"
            );
        }
    }
}

/// Expanding a JSON payload requires several times the payload's size in memory. The manifests in
/// deploy/ limit a process to 256 MiB.
#[test]
fn expands_large_json_objects_within_the_memory_limit_in_the_deployment_manifests() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload json)",
    );
    let dead = dead_letter_topic(&fixture);
    let aggregate = fixture.aggregate(1);
    let session = attacker(&fixture);
    session.run(&format!(
        "INSERT INTO outbox SELECT 1, '{aggregate}', 'k', jsonb_object_agg('k' || i, jsonb_build_array(jsonb_build_object('a', i)))::json
         FROM generate_series(1, 550000) i;
         INSERT INTO outbox VALUES (2, '{aggregate}', 'k', '{{\"a\": 1}}')"
    ));
    let walpost = start(
        &fixture,
        &dead,
        "expand_payload = true\nvalue_format = 'json-schema'\n",
    );
    fixture.wait_until_confirmed();
    let records = fixture.records();
    let delivered = records.iter().filter(|record| record.topic != dead);
    let texts: Vec<_> = delivered.map(Record::text).collect();
    assert_eq!(texts.len(), 1);
    assert!(texts[0].ends_with("\"payload\":{\"a\":1}}"), "{texts:?}");
    // This is a test build, which uses more memory than a release build.
    let peak = walpost.peak_memory();
    assert!(peak < 200 << 20, "Walpost used {peak} bytes");
    // Arrays of arrays require the most memory per byte. The larger payload is almost as large as
    // the default `max_row_bytes` permits.
    for bytes in [16_000_000, 60_000_000] {
        session.run(&format!(
            "INSERT INTO outbox VALUES (3, '{aggregate}', 'k', ('{{\"a\": [' || repeat('[1],', {bytes} / 4) || '1]}}')::json)"
        ));
        fixture.wait_until_confirmed();
        let peak = walpost.peak_memory();
        assert!(
            peak < 256 << 20,
            "Walpost used {peak} bytes for a row of {bytes}"
        );
    }
    assert_eq!(errors(&fixture.records(), &dead).len(), 3);
    walpost.terminate().expect_code(0);
    drop_attacker(&fixture, session);
}

/// `walpost verify` treats a record with the header `walpost-replay` as resent by an operator, so a
/// row must not be able to set this header.
#[test]
fn writes_a_dead_letter_for_a_row_that_sets_the_replay_header() {
    let fixture = Fixture::with_table(TABLE);
    let dead = dead_letter_topic(&fixture);
    let aggregate = fixture.aggregate(1);
    let session = attacker(&fixture);
    let walpost = start(&fixture, &dead, "");
    for header in ["walpost-replay", "walpost-error"] {
        session.run(&format!(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, payload, headers)
             VALUES ('{header}', '{aggregate}', 'k', 'x', '{{\"{header}\": \"1\"}}')"
        ));
    }
    fixture.wait_until_confirmed();
    let records = fixture.records();
    assert_eq!(records.len(), 2, "{records:?}");
    for record in &records {
        assert_eq!(record.topic, dead);
        assert!(
            !record.header_names().contains(&"walpost-replay"),
            "{record:?}"
        );
    }
    walpost.terminate().expect_code(0);
    drop_attacker(&fixture, session);
}

/// Walpost limits all batches to the smallest `max.message.bytes` of the topics that it has used so
/// far. The warning names the topic with the very small limit.
#[test]
fn warns_about_a_topic_with_a_very_small_message_limit() {
    let fixture = Fixture::with_table(TABLE);
    let dead = dead_letter_topic(&fixture);
    let narrow = format!("{}-narrow", fixture.name);
    let topic = format!("outbox.event.{narrow}");
    fixture.topic(&topic, 1, &[("max.message.bytes", "300")]);
    let mut walpost = start(&fixture, &dead, "");
    fixture.db.run(&format!(
        "INSERT INTO outbox (id, aggregatetype, aggregateid, payload)
         SELECT i, '{narrow}', 'k', repeat('x', 100) FROM generate_series(1, 20) i"
    ));
    let line = walpost.wait_for_log("slows down delivery to all topics");
    assert!(line.contains("WARN") && line.contains(&topic), "{line}");
    fixture.wait_until_confirmed();
    let records = fixture.records();
    assert_eq!(
        records
            .iter()
            .filter(|record| record.topic == topic)
            .count(),
        20
    );
    walpost.terminate().expect_code(0);
}
