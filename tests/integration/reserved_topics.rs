//! A row that names one of Walpost's own topics, or a topic internal to Kafka, is never sent to
//! that topic, however the topic name is composed.

use serde_json::{Value, json};

use crate::support::checker::Resends;
use crate::support::event::{Event, Outbox};
use crate::support::fixture::Fixture;
use crate::support::records::Record;
use crate::support::walpost::Invocation;

const CHECKPOINTS: &str = "walpost-checkpoints";
/// Values of `aggregatetype` that name a reserved topic if the topic template is `{aggregatetype}`,
/// and the expected error for each.
const RESERVED: [(&str, &str); 4] = [
    (CHECKPOINTS, "reserved for checkpoints"),
    ("walpost-dead-letters", "reserved for dead letters"),
    ("__consumer_offsets", "Kafka's internal topics"),
    ("__transaction_state", "Kafka's internal topics"),
];

for_each_outbox! {
    halts_on_a_row_for_a_reserved_topic
    writes_a_row_for_a_reserved_topic_as_a_dead_letter
}

/// Returns a checkpoint according to which everything committed so far has been delivered.
pub(crate) fn forged(fixture: &Fixture) -> String {
    let last = fixture.checkpoints().pop().expect("a checkpoint");
    let mut checkpoint: Value = serde_json::from_str(last.text()).unwrap();
    let end = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    checkpoint["safe_lsn"] = json!(end);
    checkpoint["delivered"] = json!({ "before": end });
    checkpoint.to_string()
}

/// Returns the number of records with the given key in the checkpoint topic.
fn checkpoints_of(fixture: &Fixture, key: &str) -> usize {
    // Wait first, because records that follow an open transaction, which may belong to another
    // pipeline, can't be read yet.
    fixture.broker.wait_for_markers(CHECKPOINTS);
    let records = fixture.broker.read(&[CHECKPOINTS.to_owned()]);
    records.iter().filter(|record| record.key() == key).count()
}

/// A role that can only insert into one pipeline's outbox tries to forge a checkpoint for another
/// pipeline.
#[test]
fn row_cannot_forge_a_checkpoint_of_another_pipeline() {
    let victim = Fixture::new().exactly_once();
    let aggregate = victim.aggregate(1);
    let walpost = victim.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    for _ in 0..5 {
        victim.insert(&aggregate, "k");
    }
    let before = checkpoints_of(&victim, &victim.name);

    let fixture = Fixture::new();
    let mallory = format!("{}_mallory", fixture.name);
    fixture.db.run(&format!(
        "CREATE ROLE {mallory} LOGIN; GRANT INSERT ON public.outbox TO {mallory}"
    ));
    let forged = forged(&victim);
    let row = Event::new(CHECKPOINTS, &victim.name, &forged);
    let session = fixture.server.session_as(&mallory, &fixture.name);
    session.run(&fixture.events().insert_one(row));
    let position = fixture.history()[0].end;
    let halted = fixture.run().args(["--topic", "{aggregatetype}"]).finish();
    halted.expect_code(3).expect_mentions(&[
        "topic \"walpost-checkpoints\" is reserved for checkpoints",
        "topic = \"{aggregatetype}\"",
        "row with id",
        " at 00000000/",
    ]);
    assert!(fixture.confirmed() < position);
    fixture
        .db
        .run(&format!("DROP OWNED BY {mallory}; DROP ROLE {mallory}"));

    assert_eq!(checkpoints_of(&victim, &victim.name), before);
    let walpost = victim.start();
    victim.settle(walpost, &[], Resends::Never);
    assert_eq!(victim.records().len(), 6);
}

fn halts_on_a_row_for_a_reserved_topic(outbox: Outbox) {
    for (topic, why) in RESERVED {
        let fixture = Fixture::with_outbox(outbox);
        fixture.insert(topic, "k");
        let position = fixture.history()[0].end;
        let found = fixture.run().args(["--topic", "{aggregatetype}"]).finish();
        let error = format!("{topic:?} is reserved for");
        found
            .expect_code(3)
            .expect_mentions(&[&error, why, "at 00000000/"]);
        assert!(fixture.confirmed() < position, "{topic}");
    }
}

fn writes_a_row_for_a_reserved_topic_as_a_dead_letter(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox).exactly_once();
    let (good, letters) = (fixture.name.clone(), format!("{}.dead", fixture.name));
    let checkpoints = format!("{}.checkpoints", fixture.name);
    fixture.topic(&good, 1, &[]);
    fixture.topic(&letters, 1, &[]);
    let settings = format!(
        "topic = \"{{aggregatetype}}\"\ndelivery = \"exactly-once\"\non_unroutable = \"dead-letter\"\n\
         dead_letter_topic = \"{letters}\"\n"
    );
    // Define another pipeline in the process, with a different dead-letter topic. Its topics are
    // reserved as well.
    let others = format!(
        "\n[[pipeline]]\nname = \"other\"\npostgres = \"host=/nowhere\"\ndelivery = \"exactly-once\"\n\
         checkpoint = {{ topic = \"{checkpoints}\" }}\non_unroutable = \"dead-letter\"\n\
         dead_letter_topic = \"{good}.other\"\n"
    );
    let file = fixture.file(&(settings + &others));
    let walpost = Invocation::new(["run", "--config"])
        .arg(&file)
        .args(["--pipeline", &fixture.name])
        .start_streaming();
    let others = format!("{good}.other");
    let reserved = RESERVED.map(|(topic, _)| topic);
    // Kafka treats `.` and `_` as equal when it checks whether the name of a new topic collides
    // with the name of an existing topic, so these names are also reserved.
    let colliding = [&letters, &checkpoints, &others].map(|topic| topic.replace('.', "_"));
    let [first, second, third] = &colliding;
    let reserved = [
        &reserved[..],
        &[&letters, &checkpoints, &others, first, second, third],
        &["_.consumer_offsets"],
    ]
    .concat();
    fixture.insert(&good, "first");
    for topic in &reserved {
        fixture.insert(topic, topic);
        fixture.insert(&good, "good");
    }
    let records = fixture.wait_for_records(1 + 2 * reserved.len());
    fixture.wait_until_confirmed();
    let (found, delivered): (Vec<_>, Vec<_>) =
        records.iter().partition(|record| record.topic == letters);
    assert_eq!(delivered.len(), reserved.len() + 1);
    let keys: Vec<_> = found.iter().map(|letter| letter.key()).collect();
    assert_eq!(keys, reserved);
    for letter in found {
        assert_eq!(letter.header("walpost-error"), "unroutable");
        assert_eq!(letter.header("walpost-source-topic"), letter.key());
        let message = letter.header("walpost-error-message");
        assert!(message.contains("is reserved for"), "{message}");
    }
    for topic in [CHECKPOINTS, &checkpoints] {
        assert_eq!(checkpoints_of(&fixture, topic), 0);
    }
    walpost.terminate().expect_code(0);
}

/// A regular expression derives the topic, as Debezium's `route.topic.regex` does.
#[test]
fn topic_derived_by_a_regular_expression_cannot_be_a_reserved_topic() {
    for (column, replacement) in [("post-checkpoints", "wal$1"), ("__consumer_offsets", "$1")] {
        let mut fixture = Fixture::new();
        fixture.use_settings(&format!(
            "route = {{ column = \"aggregatetype\", regex = \"(.*)\", replacement = \"{replacement}\" }}\n"
        ));
        fixture.insert(column, "k");
        let found = fixture.run().finish().expect_code(3);
        found.expect_mentions(&["is reserved for", "route = \"{aggregatetype} =~ (.*)"]);
        let checked = fixture.verify().args(["--since", "1h"]).finish();
        assert_ne!(checked.code, Some(0));
    }
}

#[test]
fn no_table_in_a_pipeline_can_write_to_reserved_topics() {
    let mut fixture = Fixture::bare();
    let tables = ["a", "b"].map(|schema| format!("{schema}.outbox"));
    for table in &tables {
        let schema = &table[..1];
        fixture.db.run(&format!(
            "CREATE SCHEMA {schema};
             CREATE TABLE {table} (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)"
        ));
    }
    fixture.use_settings("tables = [\"a.outbox\", \"b.outbox\"]\ntopic = \"{aggregatetype}\"\n");
    fixture.init().finish().expect_code(0);
    for table in &tables {
        fixture
            .init()
            .args(["--table", table])
            .finish()
            .expect_code(0);
    }
    for table in &tables {
        fixture.db.run(&format!(
            "INSERT INTO {table} VALUES (gen_random_uuid(), '{CHECKPOINTS}', 'k', 't', '{{}}')"
        ));
    }
    let found = fixture.run().finish().expect_code(3);
    found.expect_mentions(&["is reserved for checkpoints", "row with id"]);
}

#[test]
fn replay_and_verify_reject_rows_for_reserved_topics() {
    let fixture = Fixture::new();
    fixture.insert(CHECKPOINTS, "forged");
    let template = ["--topic", "{aggregatetype}"];
    let replay = |arguments: &[&str]| {
        let replay = fixture.replay(&["--all", "--yes"]).args(template);
        replay.args(arguments).finish()
    };
    let found = replay(&[]).expect_code(3);
    found.expect_mentions(&["is reserved for checkpoints", "row with id"]);
    let letters = format!("{}.dead", fixture.name);
    fixture.topic(&letters, 1, &[]);
    let flags = [
        "--on-unroutable",
        "dead-letter",
        "--dead-letter-topic",
        &letters,
    ];
    replay(&flags).expect_code(0);
    let records = fixture.wait_for_records(1);
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["forged"]);
    assert_eq!(checkpoints_of(&fixture, "forged"), 0);
    let verified = fixture.verify().args(template).finish();
    assert_ne!(verified.code, Some(0));
    verified.expect_mentions(&["is reserved for checkpoints"]);
}

/// Because the topic is part of the configuration, the command fails before it connects to a
/// server.
#[test]
fn rejects_a_reserved_topic_in_the_configuration() {
    let fixture = Fixture::bare();
    for (topic, why) in RESERVED {
        let refused = fixture.run().args(["--topic", topic]).finish();
        refused
            .expect_code(2)
            .expect_mentions(&[topic, why, "choose another topic"]);
        let refused = fixture
            .replay(&["--all", "--yes", "--topic", topic])
            .finish();
        refused.expect_code(2).expect_mentions(&[topic, why]);
    }
}

/// Kafka does not create a topic whose name collides with the name of an existing topic, and treats
/// `.` and `_` as equal in this check.
#[test]
fn row_cannot_create_a_topic_that_collides_with_a_reserved_one() {
    let mut fixture = Fixture::new();
    let letters = format!("{}.dead", fixture.name);
    fixture.use_settings(&format!(
        "topic = \"{{aggregatetype}}\"\non_unroutable = \"dead-letter\"\ndead_letter_topic = \"{letters}\"\n\
         create_topics = {{ partitions = 1, replication = 1 }}\n"
    ));
    fixture.expect_topic(&letters);
    let walpost = fixture.start();
    let colliding = letters.replace('.', "_");
    fixture.insert(&colliding, "collides");
    fixture.insert("__x", "another");
    let records = fixture.wait_for_records(2);
    let found: Vec<_> = records.iter().map(|letter| letter.key()).collect();
    assert_eq!(found, ["collides", "another"]);
    walpost.terminate().expect_code(0);
}
