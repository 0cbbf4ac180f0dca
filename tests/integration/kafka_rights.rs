//! Kafka's ACLs: which rights each mode needs, and the error when one is missing.

use std::sync::LazyLock;

use crate::support::fixture::Fixture;
use crate::support::kafka::{Broker, SASL_USER, sasl_password};
use crate::support::postgres::{MAJOR, Server};
use crate::support::walpost::{Finished, Invocation, config_file};

/// A broker that grants the SASL user nothing by default.
static BROKER: LazyLock<Broker> = LazyLock::new(Broker::with_rights);

struct RestrictedBroker {
    fixture: Fixture<'static>,
    /// The topic of the events.
    topic: String,
}

impl RestrictedBroker {
    fn new() -> Self {
        let fixture = Fixture::on_servers(Server::shared(MAJOR), &BROKER);
        let aggregate = fixture.aggregate(1);
        fixture.insert(&aggregate, "k");
        let topic = format!("outbox.event.{aggregate}");
        Self { fixture, topic }
    }

    fn insert_event(&self) {
        let aggregate = self.topic.strip_prefix("outbox.event.").unwrap();
        self.fixture.insert(aggregate, "again");
    }

    /// Returns a command that connects as the SASL user.
    fn command(&self, words: &[&str]) -> Invocation {
        Invocation::new(words)
            .args(["--pipeline", &self.fixture.name])
            .args(["--postgres", &self.fixture.conninfo()])
            .args(["--kafka", &BROKER.sasl_address()])
            .args(["-X", "security.protocol=sasl_plaintext"])
            .args(["-X", "sasl.mechanism=PLAIN"])
            .args(["-X", &format!("sasl.username={SASL_USER}")])
            .env("WALPOST_KAFKA_SASL_PASSWORD", sasl_password())
    }

    fn expect_delivery(&self, words: &[&str]) {
        let walpost = self.command(words).start_streaming();
        self.fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        assert!(BROKER.count(std::slice::from_ref(&self.topic)) > 0);
    }

    /// Runs a command that halts because a right is missing, grants that right as the error
    /// suggests, and returns what was granted.
    fn grant_missing_right(&self, words: &[&str]) -> String {
        let finished = self.command(words).finish().expect_code(3);
        let command = command_in(&finished);
        let address = BROKER.sasl_address();
        let start = format!("kafka-acls.sh --bootstrap-server {address} ");
        let arguments = command.strip_prefix(&start);
        let arguments = arguments.unwrap_or_else(|| panic!("{command}"));
        acls(arguments);
        arguments
            .strip_prefix(&format!("--add --allow-principal User:{SASL_USER} "))
            .unwrap_or_else(|| panic!("{arguments}"))
            .to_owned()
    }

    fn revoke(&self, operation: &str, resource: &str) {
        acls(&format!(
            "--remove --force --allow-principal User:{SASL_USER} --operation {operation} {resource}"
        ));
    }

    fn grant(&self, operation: &str, resource: &str) {
        acls(&format!(
            "--add --allow-principal User:{SASL_USER} --operation {operation} {resource}"
        ));
    }
}

/// Runs kafka-acls.sh as a user with the right to change ACLs.
fn acls(arguments: &str) {
    let arguments: Vec<_> = arguments.split_whitespace().collect();
    BROKER.tool("org.apache.kafka.tools.AclCommand", &arguments);
}

/// Returns the command in the output.
fn command_in(finished: &Finished) -> String {
    let said = format!("{}\n{}", finished.stdout, finished.stderr);
    let at = said
        .find("kafka-acls.sh")
        .unwrap_or_else(|| panic!("no command: {said}"));
    let line = said[at..].lines().next().unwrap();
    // In a log line, fields follow the command.
    line.split(" pipeline=").next().unwrap().trim().to_owned()
}

#[test]
fn at_least_once_needs_write_on_its_topics() {
    let guest = RestrictedBroker::new();
    let topic = format!("--topic {}", guest.topic);
    let needed = format!("--operation Write {topic}");
    let check = ["check", "--topic", &guest.topic];
    assert_eq!(guest.grant_missing_right(&check), needed);
    guest.command(&check).finish().expect_code(0);
    guest.revoke("Write", &topic);
    assert_eq!(guest.grant_missing_right(&["run"]), needed);
    guest.expect_delivery(&["run"]);

    // The user may describe the topic, but not write to it.
    guest.revoke("Write", &topic);
    guest.grant("Describe", &topic);
    guest
        .fixture
        .insert(guest.topic.strip_prefix("outbox.event.").unwrap(), "again");
    assert_eq!(guest.grant_missing_right(&["run"]), needed);
    guest.expect_delivery(&["run"]);
}

#[test]
fn create_topics_needs_create_on_them() {
    let guest = RestrictedBroker::new();
    acls(&format!(
        "--add --allow-principal User:{SASL_USER} --operation Write --topic {}",
        guest.topic
    ));
    let aggregate = format!("{}.new", guest.fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    guest.grant("Describe", &format!("--topic {topic}"));
    guest.fixture.insert(&aggregate, "k");
    let run = ["run", "--create-topics", "1:1"];
    let needed = format!("--operation Create --operation Write --topic {topic}");
    assert_eq!(guest.grant_missing_right(&run), needed);
    guest.expect_delivery(&run);
}

/// Without the right, batches are refused, but nothing else fails.
#[test]
fn describe_configs_on_a_topic_spares_it_batches_that_are_refused() {
    let guest = RestrictedBroker::new();
    let topic = format!("--topic {}", guest.topic);
    guest.grant("Write", &topic);
    BROKER.limit_batches(&guest.topic, "100000");
    let check = ["check", "--topic", &guest.topic];
    let delivers_a_backlog = |refused: usize| {
        guest.fixture.db.run(&format!(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
             SELECT gen_random_uuid(), '{}', 'k', 't', to_jsonb(string_agg(md5(random()::text), ''))
             FROM generate_series(1, 1000) i, generate_series(1, 32) GROUP BY i",
            guest.topic.strip_prefix("outbox.event.").unwrap()
        ));
        let walpost = guest
            .command(&["run", "-X", "compression.type=none"])
            .start_streaming();
        guest.fixture.wait_until_confirmed();
        let log = walpost.terminate().expect_code(0).stderr;
        assert_eq!(
            log.matches("Kafka rejected the rows").count(),
            refused,
            "{log}"
        );
    };
    let checked = guest.command(&check).finish().expect_code(0);
    checked.expect_mentions(&["failed to look up its max.message.bytes"]);
    delivers_a_backlog(1);
    guest.grant("DescribeConfigs", &topic);
    let checked = guest.command(&check).finish().expect_code(0);
    checked.expect_mentions(&["batches are limited to its max.message.bytes, 100000"]);
    delivers_a_backlog(0);
}

#[test]
fn dead_letters_need_write_on_their_topic() {
    let guest = RestrictedBroker::new();
    guest.grant("Write", &format!("--topic {}", guest.topic));
    let dead = format!("{}.dead", guest.fixture.name);
    BROKER.create_topic(&dead, 1, &[]);
    let letters = [
        "--on-unroutable",
        "dead-letter",
        "--dead-letter-topic",
        &dead,
    ];
    let run = [&["run"], &letters[..]].concat();
    let check = [&["check"], &letters[..]].concat();
    let needed = format!("--operation Write --topic {dead}");
    assert_eq!(guest.grant_missing_right(&check), needed);
    guest.revoke("Write", &format!("--topic {dead}"));
    guest.fixture.accept_any_name("outbox");
    guest.fixture.insert("no topic", "k");
    assert_eq!(guest.grant_missing_right(&run), needed);
    guest.expect_delivery(&run);
    assert_eq!(BROKER.count(&[dead]), 1);
}

#[test]
fn exactly_once_needs_its_checkpoints_and_its_transactional_id_too() {
    let guest = RestrictedBroker::new();
    let checkpoints = format!("{}-checkpoints", guest.fixture.name);
    let text = format!(
        "[[pipeline]]\nname = '{}'\ncheckpoint = {{ topic = '{checkpoints}' }}\n",
        guest.fixture.name
    );
    let config = config_file(text);
    let config = config.display().to_string();
    let adopt = ["checkpoint", "adopt", "--yes", "--config", &config];
    let run = ["run", "--exactly-once", "--config", &config];
    let check = ["check", "--exactly-once", "--config", &config];
    let show = ["checkpoint", "show", "--config", &config];

    let topic = format!("--topic {checkpoints}");
    let id = format!(
        "--transactional-id walpost-{}-{}",
        guest.fixture.name,
        guest.fixture.slot()
    );
    BROKER.create_topic(&checkpoints, 1, &[("cleanup.policy", "compact")]);
    let keeps = format!("--operation Read --operation Write --operation DescribeConfigs {topic}");
    let transacts = format!("--operation Write {id}");
    assert_eq!(guest.grant_missing_right(&adopt), keeps);
    assert_eq!(guest.grant_missing_right(&adopt), transacts);
    guest.command(&adopt).finish().expect_code(0);
    let writes = format!("--operation Write --topic {}", guest.topic);
    assert_eq!(guest.grant_missing_right(&run), writes);
    guest.expect_delivery(&run);
    guest.command(&check).finish().expect_code(0);
    guest.command(&show).finish().expect_code(0);

    for operation in ["Read", "Write", "DescribeConfigs"] {
        guest.revoke(operation, &topic);
        guest.insert_event();
        assert_eq!(guest.grant_missing_right(&run), keeps, "{operation}");
    }
    for command in [&check[..], &show] {
        guest.revoke("Read", &topic);
        assert_eq!(guest.grant_missing_right(command), keeps, "{command:?}");
    }
    guest.revoke("Write", &id);
    assert_eq!(guest.grant_missing_right(&run), transacts);
    guest.revoke("Write", &format!("--topic {}", guest.topic));
    guest.grant("Describe", &format!("--topic {}", guest.topic));
    guest
        .fixture
        .insert(guest.topic.strip_prefix("outbox.event.").unwrap(), "again");
    assert_eq!(guest.grant_missing_right(&run), writes);
    guest.expect_delivery(&run);
}

#[test]
fn verify_needs_read_on_the_topics() {
    let guest = RestrictedBroker::new();
    let topic = format!("--topic {}", guest.topic);
    let needed = format!("--operation Read {topic}");
    // At first the user can't describe the topic, then can describe it but not read it.
    assert_eq!(guest.grant_missing_right(&["verify"]), needed);
    guest.revoke("Read", &topic);
    guest.grant("Write", &topic);
    guest.expect_delivery(&["run"]);
    assert_eq!(guest.grant_missing_right(&["verify"]), needed);
    guest.command(&["verify"]).finish().expect_code(0);
}
