//! Common mistakes of new users. Each message explains what to do next, and the command that it
//! suggests works.

use std::io::Write;
use std::net::TcpListener;
use std::thread;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::reaper;
use crate::support::walpost::Invocation;

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";

#[test]
fn init_shows_a_statement_to_run_instead_of_raw_server_notices() {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text)",
    );
    let first = fixture.init().finish().expect_code(0).expect_mentions(&[
        "it accepts UPDATE, which is never published. To reject UPDATE: CREATE TRIGGER",
    ]);
    let second = fixture.init().finish().expect_code(0);
    for raw in ["NOTICE: ", "already exists, skipping"] {
        assert!(!second.stderr.contains(raw), "{raw}: {}", second.stderr);
    }
    let suggested = "To reject UPDATE: ";
    let from = first.stderr.find(suggested).unwrap() + suggested.len();
    let statement = first.stderr[from..].lines().next().unwrap();
    fixture.db.run(statement);
    let refused = fixture.db.try_run("UPDATE outbox SET type = 'x'");
    assert!(refused.is_ok(), "the table has no row to refuse");
    fixture
        .db
        .run("INSERT INTO outbox VALUES (1, 'a', 'k', 't', 'p')");
    let refused = fixture.db.try_run("UPDATE outbox SET type = 'x'");
    refused.expect_err("the trigger refuses it");
}

#[test]
fn commands_suggested_by_init_include_the_role_and_brokers() {
    let fixture = Fixture::bare();
    let role = format!("{}_role", fixture.name);
    let init = fixture.invoke("init").args(["--role", &role]);
    let output = init.finish().expect_code(0).stderr;
    fixture
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    assert!(
        output.contains(&format!("role {role}, publication")),
        "{output}"
    );
    let next = output
        .lines()
        .find(|line| line.contains("next: walpost check"));
    let next = next.expect("the next command");
    for text in [
        &*format!("user={role}"),
        "--kafka HOST:PORT",
        "walpost run ",
    ] {
        assert!(next.contains(text), "{text}: {next}");
    }
}

#[test]
fn suggests_a_remedy_for_a_missing_database_or_unreachable_server() {
    let fixture = Fixture::new();
    let elsewhere = |postgres: &str| {
        let check = Invocation::new(["check", "--postgres", postgres]);
        check.args(["--kafka", fixture.kafka()]).finish()
    };
    let missing = fixture.conninfo().replace(&fixture.name, "not_there");
    elsewhere(&missing).expect_code(3).expect_mentions(&[
        "database \"not_there\" does not exist",
        "CREATE DATABASE not_there",
    ]);
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = nowhere.local_addr().unwrap().port();
    drop(nowhere);
    elsewhere(&format!("host=127.0.0.1 port={port} user=u dbname=d"))
        .expect_code(1)
        .expect_mentions(&[
            "can't connect",
            "Start PostgreSQL at this address",
            "listen_addresses",
        ]);
    let folder = reaper::folder("no_socket").display().to_string();
    elsewhere(&format!("host={folder} user=u dbname=d"))
        .expect_code(1)
        .expect_mentions(&["can't connect", "unix_socket_directories"]);
}

#[test]
fn verify_finds_dead_letters_written_by_a_run_with_different_settings() {
    // Uses a private broker, because all tests that share a broker also share its default
    // dead-letter topic.
    let broker = Broker::private();
    let fixture = Fixture::bare_on_servers(Server::shared(MAJOR), &broker);
    fixture.db.run(TABLE);
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    fixture.topic("walpost-dead-letters", 1, &[]);
    let walpost = fixture.start_with(&["--on-oversize", "dead-letter"]);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', 'small'), (2, '{aggregate}', 'k', repeat('x', 2000000))"
    ));
    fixture.wait_until_confirmed();
    let found = fixture.verify().finish().expect_code(1);
    assert!(!found.stdout.contains("MISSING"), "{}", found.stdout);
    found.expect_mentions(&["DEAD LETTER", "walpost-dead-letters"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_suggests_that_missing_events_may_be_dead_letters() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(1);
    let topic = format!("{}.dead", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let flags = [
        "--on-oversize",
        "dead-letter",
        "--dead-letter-topic",
        &topic,
    ];
    let walpost = fixture.start_with(&flags);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', 'small'), (2, '{aggregate}', 'k', repeat('x', 2000000))"
    ));
    fixture.wait_until_confirmed();
    let found = fixture.verify().finish().expect_code(1);
    found.expect_mentions(&[
        "MISSING",
        "dead_letter_topic",
        "verify with the same settings",
    ]);
    let finished = fixture.verify().args(flags).finish().expect_code(1);
    assert!(!finished.stdout.contains("MISSING"), "{}", finished.stdout);
    walpost.terminate().expect_code(0);
}

#[test]
fn suggests_another_directory_if_the_control_socket_path_is_unusable() {
    let fixture = Fixture::new();
    let folder = reaper::folder("control").join("none");
    let path = folder.join("control.sock").display().to_string();
    let run = fixture.run().args(["--control", &path]).finish();
    let command = format!(
        " {}; then start Walpost with --control {path}",
        folder.display()
    );
    run.expect_code(2)
        .expect_mentions(&["install -d -m 0700 -o ", &command]);
}

#[test]
fn configuration_file_errors_show_the_correct_syntax() {
    for (line, expected) in [
        ("postgres = postgresql://w@/shop", "Strings must be quoted"),
        (
            "partitions_ahead = \"3\"",
            "expected an integer without quotes",
        ),
        (
            "brokers = \"localhost:9092\"",
            "unknown field `brokers`: set the brokers in [kafka]",
        ),
        (
            "password = \"secret\"",
            "unknown field `password`: specify the connection as a single string: postgres = ",
        ),
        ("retention = 7", "expected a quoted string"),
        (
            "postgres = \"postgresql://w@/shop\"\nkafka = { \"bootstrap.servers\" = \"http://k:9092\" }",
            "without http://",
        ),
    ] {
        let file = reaper::folder("mistake").join("walpost.toml");
        std::fs::write(&file, format!("[[pipeline]]\n{line}\n")).unwrap();
        let check = Invocation::new(["check", "--config"]).arg(&file);
        check.finish().expect_code(2).expect_mentions(&[expected]);
    }
}

#[test]
fn suggests_the_nearest_name_for_a_misspelled_kafka_property() {
    let check = ["check", "--postgres", "postgresql://w@/shop?host=/nowhere"];
    for (property, expected) in [
        (
            "linger.mss=5",
            "linger.mss: librdkafka has no such property; did you mean linger.ms?",
        ),
        // The value may be a password, so the message must not contain it.
        ("sasl.pasword=hunter2", "did you mean sasl.password?"),
        (
            "bootstrap.server=localhost:9092",
            "did you mean bootstrap.servers?",
        ),
        (
            "key.serializer=x",
            "key.serializer: librdkafka has no such property",
        ),
    ] {
        let found = Invocation::new(check).args(["-X", property]).finish();
        let found = found.expect_code(2).expect_mentions(&[expected]);
        assert!(!found.mentions("hunter2"), "{}", found.stderr);
    }
}

#[test]
fn insert_error_explains_why_a_topic_name_is_invalid() {
    for arguments in [&[][..], &["--partitioned"]] {
        let fixture = Fixture::bare();
        fixture.init().args(arguments).finish().expect_code(0);
        let refused = fixture
            .db
            .try_run(&fixture.insert_sql("no topic", "k"))
            .unwrap_err();
        let message = refused.as_db_error().unwrap().message();
        assert!(
            message
                .ends_with("violates check constraint \"walpost_aggregatetype_fits_topic_name\""),
            "{message}"
        );
        for (constraint, text) in [
            (
                "walpost_aggregatetype_fits_topic_name",
                "1 to 236 characters of a to z",
            ),
            (
                "walpost_event_size",
                "The maximum size of payload and headers as text",
            ),
        ] {
            let comment = fixture.db.value(&format!(
                "SELECT obj_description(oid, 'pg_constraint') FROM pg_constraint
                 WHERE conrelid = 'outbox'::regclass AND conname = '{constraint}'"
            ));
            assert!(comment.unwrap().contains(text), "{constraint}");
        }
    }
}

#[test]
fn check_reports_that_the_broker_address_belongs_to_another_program() {
    let fixture = Fixture::new();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    // Nothing stops this thread, so it runs until the test program exits.
    thread::spawn(move || {
        for connection in other.incoming() {
            let _ = connection
                .unwrap()
                .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let check = Invocation::new(["check", "--postgres", &fixture.conninfo()]);
    let broker = format!("127.0.0.1:{port}");
    let check = check.args(["--kafka", &broker, "--pipeline", &fixture.name]);
    let found = check.finish().expect_code(1).expect_mentions(&[
        "no broker at 127.0.0.1:",
        "the response does not use Kafka's protocol: another program is listening at this address, or the broker expects TLS",
    ]);
    assert!(
        !found.mentions("receive.message.max.bytes"),
        "{}",
        found.stderr
    );
}

#[test]
fn reports_that_no_postgresql_server_responded() {
    let fixture = Fixture::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let postgres = format!("host=127.0.0.1 port={port} user=u dbname=d connect_timeout=2");
    let check = Invocation::new(["check", "--postgres", &postgres]);
    let found = check.args(["--kafka", fixture.kafka()]).finish();
    found.expect_code(1).expect_mentions(&[
        "no PostgreSQL server responded within 2s",
        "Correct the host and port",
    ]);
}

#[test]
fn does_not_use_the_operating_system_user_as_the_role() {
    let fixture = Fixture::new();
    let named = fixture.conninfo();
    let nameless = named.replace(" user=postgres", "");
    assert_ne!(nameless, named);
    let halted = Invocation::new(["run", "--postgres", &nameless, "--kafka", fixture.kafka()])
        .env("USER", "nobody_of_this_name")
        .finish()
        .expect_code(3)
        .expect_mentions(&["No user is configured", "PGUSER=walpost"]);
    // Without a user, Walpost can't connect to the database to record the halt. That failure is not
    // logged, because the log already contains the reason.
    assert!(
        !halted.mentions("failed to record the halt"),
        "{}",
        halted.stderr
    );
}

#[test]
fn check_suggests_granting_only_the_missing_schema_privilege() {
    let fixture = Fixture::bare();
    let role = format!("{}_role", fixture.name);
    let init = fixture.invoke("init").args(["--role", &role]);
    init.finish().expect_code(0);
    fixture
        .db
        .run(&format!("REVOKE USAGE ON SCHEMA walpost FROM {role}"));
    let check = Invocation::new(["check", "--postgres", &fixture.conninfo_as(&role)]);
    let check = check.args(["--kafka", fixture.kafka(), "--pipeline", &fixture.name]);
    let found = check.finish().expect_code(3);
    let mut lines = found.stdout.lines();
    let owners = lines.find(|line| line.starts_with("WARNING") && line.contains(": owners: "));
    let grant = format!("GRANT USAGE ON SCHEMA walpost TO {role}");
    assert!(
        owners.is_some_and(|line| line.ends_with(&grant)),
        "{}",
        found.stdout
    );
    fixture
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

/// Exactly-once delivery requires a Kafka sink, but commands that access only the database work
/// without one.
#[test]
fn commands_that_use_only_the_database_accept_an_exactly_once_pipeline() {
    let fixture = Fixture::new();
    let file = fixture.file("delivery = \"exactly-once\"\n");
    let invoke = |words: &[&str]| Invocation::new(words).arg("--config").arg(&file);
    let init = invoke(&["init"]).finish().expect_code(0);
    let init = init.expect_mentions(&["next: walpost check"]);
    // `init` must not suggest at-least-once mode, which would resend events that exactly-once mode
    // has delivered.
    assert!(!init.stderr.contains("--delivery"), "{init:?}");
    let status = invoke(&["status", "--http", "off"]).finish();
    status
        .expect_code(1)
        .expect_mentions(&["no process is reading slot"]);
    invoke(&[
        "maintain",
        "--retention",
        "1d",
        "--delete-rows",
        "--dry-run",
    ])
    .finish()
    .expect_code(0);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let replayed = invoke(&["replay", "--all", "--yes", "--sink", "stdout"]).finish();
    let replayed = replayed.expect_code(0);
    assert!(replayed.stdout.contains(&aggregate), "{replayed:?}");
    invoke(&["run", "--sink", "stdout"])
        .finish()
        .expect_code(2)
        .expect_mentions(&["exactly-once requires Kafka transactions, but the sink is stdout"]);
}
