//! Kafka ACLs: the permissions that each mode needs, and the error message if one is missing.

use std::sync::LazyLock;

use crate::support::fixture::Fixture;
use crate::support::kafka::{Broker, SASL_USER, sasl_password};
use crate::support::postgres::{MAJOR, Server};
use crate::support::walpost::{Finished, Invocation, config_file};

/// A broker on which the SASL user has no permissions by default.
static BROKER: LazyLock<Broker> = LazyLock::new(Broker::with_rights);

struct RestrictedBroker {
    fixture: Fixture<'static>,
    /// The topic to which the fixture's events are sent.
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

    /// Returns a Walpost command that connects to Kafka as the SASL user.
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

    /// Runs a command that fails because of a missing permission, then grants the permission as the
    /// error message suggests. Returns the granted operation and its resource, as arguments of
    /// kafka-acls.sh.
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

/// Runs kafka-acls.sh as a user who may change ACLs.
fn acls(arguments: &str) {
    let arguments: Vec<_> = arguments.split_whitespace().collect();
    BROKER.tool("org.apache.kafka.tools.AclCommand", &arguments);
}

/// Returns the kafka-acls.sh command that the output contains.
fn command_in(finished: &Finished) -> String {
    let output = format!("{}\n{}", finished.stdout, finished.stderr);
    let start = output
        .find("kafka-acls.sh")
        .unwrap_or_else(|| panic!("no command: {output}"));
    let line = output[start..].lines().next().unwrap();
    // In a log line, fields follow the command and have to be removed.
    line.split(" pipeline=").next().unwrap().trim().to_owned()
}

#[test]
fn at_least_once_mode_requires_write_permission_on_its_topics() {
    let restricted = RestrictedBroker::new();
    let topic = format!("--topic {}", restricted.topic);
    let needed = format!("--operation Write {topic}");
    let check = ["check", "--topic", &restricted.topic];
    assert_eq!(restricted.grant_missing_right(&check), needed);
    restricted.command(&check).finish().expect_code(0);
    restricted.revoke("Write", &topic);
    assert_eq!(restricted.grant_missing_right(&["run"]), needed);
    restricted.expect_delivery(&["run"]);

    // The user may now describe the topic, but may not write to it.
    restricted.revoke("Write", &topic);
    restricted.grant("Describe", &topic);
    restricted.fixture.insert(
        restricted.topic.strip_prefix("outbox.event.").unwrap(),
        "again",
    );
    assert_eq!(restricted.grant_missing_right(&["run"]), needed);
    restricted.expect_delivery(&["run"]);
}

#[test]
fn creating_topics_requires_the_create_permission() {
    let restricted = RestrictedBroker::new();
    acls(&format!(
        "--add --allow-principal User:{SASL_USER} --operation Write --topic {}",
        restricted.topic
    ));
    let aggregate = format!("{}.new", restricted.fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    restricted.grant("Describe", &format!("--topic {topic}"));
    restricted.fixture.insert(&aggregate, "k");
    let run = ["run", "--create-topics", "1:1"];
    let needed = format!("--operation Create --operation Write --topic {topic}");
    assert_eq!(restricted.grant_missing_right(&run), needed);
    restricted.expect_delivery(&run);
}

/// Without the DescribeConfigs permission, Walpost can't query the topic's `max.message.bytes`, so
/// some batches are rejected. Everything else works.
#[test]
fn avoids_rejected_batches_if_the_describe_configs_permission_is_granted() {
    let restricted = RestrictedBroker::new();
    let topic = format!("--topic {}", restricted.topic);
    restricted.grant("Write", &topic);
    BROKER.limit_batches(&restricted.topic, "100000");
    let check = ["check", "--topic", &restricted.topic];
    let delivers_a_backlog = |refused: usize| {
        restricted.fixture.db.run(&format!(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
             SELECT gen_random_uuid(), '{}', 'k', 't', to_jsonb(string_agg(md5(random()::text), ''))
             FROM generate_series(1, 1000) i, generate_series(1, 32) GROUP BY i",
            restricted.topic.strip_prefix("outbox.event.").unwrap()
        ));
        let walpost = restricted
            .command(&["run", "-X", "compression.type=none"])
            .start_streaming();
        restricted.fixture.wait_until_confirmed();
        let log = walpost.terminate().expect_code(0).stderr;
        assert_eq!(
            log.matches("Kafka rejected the rows").count(),
            refused,
            "{log}"
        );
    };
    let checked = restricted.command(&check).finish().expect_code(0);
    checked.expect_mentions(&["failed to look up the topic's max.message.bytes"]);
    delivers_a_backlog(1);
    restricted.grant("DescribeConfigs", &topic);
    let checked = restricted.command(&check).finish().expect_code(0);
    checked.expect_mentions(&["accepts batches of at most 100000 bytes (max.message.bytes)"]);
    delivers_a_backlog(0);
}

#[test]
fn dead_letters_require_write_permission_on_their_topic() {
    let restricted = RestrictedBroker::new();
    restricted.grant("Write", &format!("--topic {}", restricted.topic));
    let dead = format!("{}.dead", restricted.fixture.name);
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
    assert_eq!(restricted.grant_missing_right(&check), needed);
    restricted.revoke("Write", &format!("--topic {dead}"));
    restricted.fixture.accept_any_name("outbox");
    restricted.fixture.insert("no topic", "k");
    assert_eq!(restricted.grant_missing_right(&run), needed);
    restricted.expect_delivery(&run);
    assert_eq!(BROKER.count(&[dead]), 1);
}

#[test]
fn exactly_once_mode_requires_permissions_on_the_checkpoint_topic_and_transactional_id() {
    let restricted = RestrictedBroker::new();
    let checkpoints = format!("{}-checkpoints", restricted.fixture.name);
    let text = format!(
        "[[pipeline]]\nname = '{}'\ncheckpoint = {{ topic = '{checkpoints}' }}\n",
        restricted.fixture.name
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
        restricted.fixture.name,
        restricted.fixture.slot()
    );
    BROKER.create_topic(&checkpoints, 1, &[("cleanup.policy", "compact")]);
    let keeps = format!("--operation Read --operation Write --operation DescribeConfigs {topic}");
    let transacts = format!("--operation Write {id}");
    assert_eq!(restricted.grant_missing_right(&adopt), keeps);
    assert_eq!(restricted.grant_missing_right(&adopt), transacts);
    restricted.command(&adopt).finish().expect_code(0);
    let writes = format!("--operation Write --topic {}", restricted.topic);
    assert_eq!(restricted.grant_missing_right(&run), writes);
    restricted.expect_delivery(&run);
    restricted.command(&check).finish().expect_code(0);
    restricted.command(&show).finish().expect_code(0);

    for operation in ["Read", "Write", "DescribeConfigs"] {
        restricted.revoke(operation, &topic);
        restricted.insert_event();
        assert_eq!(restricted.grant_missing_right(&run), keeps, "{operation}");
    }
    for command in [&check[..], &show] {
        restricted.revoke("Read", &topic);
        assert_eq!(
            restricted.grant_missing_right(command),
            keeps,
            "{command:?}"
        );
    }
    restricted.revoke("Write", &id);
    assert_eq!(restricted.grant_missing_right(&run), transacts);
    restricted.revoke("Write", &format!("--topic {}", restricted.topic));
    restricted.grant("Describe", &format!("--topic {}", restricted.topic));
    restricted.fixture.insert(
        restricted.topic.strip_prefix("outbox.event.").unwrap(),
        "again",
    );
    assert_eq!(restricted.grant_missing_right(&run), writes);
    restricted.expect_delivery(&run);
}

#[test]
fn verify_requires_read_permission_on_the_topics() {
    let restricted = RestrictedBroker::new();
    let topic = format!("--topic {}", restricted.topic);
    let needed = format!("--operation Read {topic}");
    // First, the user can't even describe the topic. Later, the user can describe it, but not read
    // it.
    assert_eq!(restricted.grant_missing_right(&["verify"]), needed);
    restricted.revoke("Read", &topic);
    restricted.grant("Write", &topic);
    restricted.expect_delivery(&["run"]);
    assert_eq!(restricted.grant_missing_right(&["verify"]), needed);
    restricted.command(&["verify"]).finish().expect_code(0);
}
