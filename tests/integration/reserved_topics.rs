//! Rows that name one of Walpost's own topics or Kafka's internal topics are never sent there,
//! however the name is composed.

use serde_json::{Value, json};

use crate::support::checker::Resends;
use crate::support::event::{Event, Outbox};
use crate::support::records::Record;
use crate::support::scene::Scene;
use crate::support::walpost::Invocation;

const CHECKPOINTS: &str = "walpost-checkpoints";
/// The value with which a row names each reserved topic, if the topic is `{aggregatetype}`, and the
/// expected error.
const RESERVED: [(&str, &str); 4] = [
    (CHECKPOINTS, "reserved for checkpoints"),
    ("walpost-dead-letters", "reserved for dead letters"),
    ("__consumer_offsets", "Kafka's internal topics"),
    ("__transaction_state", "Kafka's internal topics"),
];

for_each_outbox! {
    row_that_names_a_reserved_topic_halts
    row_that_names_a_reserved_topic_becomes_a_dead_letter
}

/// Returns a checkpoint that claims that everything committed by now has been delivered.
pub(crate) fn forged(scene: &Scene) -> String {
    let last = scene.checkpoints().pop().expect("a checkpoint");
    let mut checkpoint: Value = serde_json::from_str(last.text()).unwrap();
    let end = scene.db.value("SELECT pg_current_wal_flush_lsn()").unwrap();
    checkpoint["safe_lsn"] = json!(end);
    checkpoint["delivered"] = json!({ "before": end });
    checkpoint.to_string()
}

/// Returns how many records of the checkpoint topic have the key.
fn checkpoints_of(scene: &Scene, key: &str) -> usize {
    // Records after an open transaction, possibly of another pipeline, can't be read yet.
    scene.broker.wait_for_markers(CHECKPOINTS);
    let records = scene.broker.read(&[CHECKPOINTS.to_owned()]);
    records.iter().filter(|record| record.key() == key).count()
}

/// A role with no right except to insert into the outbox of pipeline a tries to write a checkpoint
/// of pipeline b.
#[test]
fn row_does_not_forge_a_checkpoint_of_another_pipeline() {
    let victim = Scene::new().exactly_once();
    let aggregate = victim.aggregate(1);
    let walpost = victim.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    for _ in 0..5 {
        victim.insert(&aggregate, "k");
    }
    let before = checkpoints_of(&victim, &victim.name);

    let scene = Scene::new();
    let mallory = format!("{}_mallory", scene.name);
    scene.db.run(&format!(
        "CREATE ROLE {mallory} LOGIN; GRANT INSERT ON public.outbox TO {mallory}"
    ));
    let forged = forged(&victim);
    let row = Event::new(CHECKPOINTS, &victim.name, &forged);
    let session = scene.server.session_as(&mallory, &scene.name);
    session.run(&scene.events().insert_one(row));
    let position = scene.history()[0].end;
    let halted = scene.run().args(["--topic", "{aggregatetype}"]).finish();
    halted.expect_code(3).expect_mentions(&[
        "topic \"walpost-checkpoints\" is reserved for checkpoints",
        "topic = \"{aggregatetype}\"",
        "row with id",
        " at 00000000/",
    ]);
    assert!(scene.confirmed() < position);
    scene
        .db
        .run(&format!("DROP OWNED BY {mallory}; DROP ROLE {mallory}"));

    assert_eq!(checkpoints_of(&victim, &victim.name), before);
    let walpost = victim.start();
    victim.settle(walpost, &[], Resends::Never);
    assert_eq!(victim.records().len(), 6);
}

fn row_that_names_a_reserved_topic_halts(outbox: Outbox) {
    for (topic, why) in RESERVED {
        let scene = Scene::with_outbox(outbox);
        scene.insert(topic, "k");
        let position = scene.history()[0].end;
        let found = scene.run().args(["--topic", "{aggregatetype}"]).finish();
        let at = format!("{topic:?} is reserved for");
        found
            .expect_code(3)
            .expect_mentions(&[&at, why, "at 00000000/"]);
        assert!(scene.confirmed() < position, "{topic}");
    }
}

fn row_that_names_a_reserved_topic_becomes_a_dead_letter(outbox: Outbox) {
    let scene = Scene::with_outbox(outbox).exactly_once();
    let (good, letters) = (scene.name.clone(), format!("{}.dead", scene.name));
    let checkpoints = format!("{}.checkpoints", scene.name);
    scene.topic(&good, 1, &[]);
    scene.topic(&letters, 1, &[]);
    let settings = format!(
        "topic = \"{{aggregatetype}}\"\ndelivery = \"exactly-once\"\non_unroutable = \"dead-letter\"\n\
         dead_letter_topic = \"{letters}\"\n"
    );
    // The pipeline's own topics, and those of other pipelines in the process with other names.
    let others = format!(
        "\n[[pipeline]]\nname = \"other\"\npostgres = \"host=/nowhere\"\ndelivery = \"exactly-once\"\n\
         checkpoint = {{ topic = \"{checkpoints}\" }}\non_unroutable = \"dead-letter\"\n\
         dead_letter_topic = \"{good}.other\"\n"
    );
    let file = scene.file(&(settings + &others));
    let walpost = Invocation::new(["run", "--config"])
        .arg(&file)
        .args(["--pipeline", &scene.name])
        .start_streaming();
    let others = format!("{good}.other");
    let reserved = RESERVED.map(|(topic, _)| topic);
    // Kafka refuses to create a topic whose name differs from these only in . and _.
    let colliding = [&letters, &checkpoints, &others].map(|topic| topic.replace('.', "_"));
    let [first, second, third] = &colliding;
    let reserved = [
        &reserved[..],
        &[&letters, &checkpoints, &others, first, second, third],
        &["_.consumer_offsets"],
    ]
    .concat();
    scene.insert(&good, "first");
    for topic in &reserved {
        scene.insert(topic, topic);
        scene.insert(&good, "good");
    }
    let records = scene.wait_for_records(1 + 2 * reserved.len());
    scene.wait_until_confirmed();
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
        assert_eq!(checkpoints_of(&scene, topic), 0);
    }
    walpost.terminate().expect_code(0);
}

/// As with Debezium's `route.topic.regex`.
#[test]
fn regular_expression_does_not_lead_to_a_reserved_topic() {
    for (column, replacement) in [("post-checkpoints", "wal$1"), ("__consumer_offsets", "$1")] {
        let mut scene = Scene::new();
        scene.use_settings(&format!(
            "route = {{ column = \"aggregatetype\", regex = \"(.*)\", replacement = \"{replacement}\" }}\n"
        ));
        scene.insert(column, "k");
        let found = scene.run().finish().expect_code(3);
        found.expect_mentions(&["is reserved for", "route = \"{aggregatetype} =~ (.*)"]);
        let checked = scene.verify().args(["--since", "1h"]).finish();
        assert_ne!(checked.code, Some(0));
    }
}

#[test]
fn each_of_several_tables_is_kept_from_reserved_topics() {
    let mut scene = Scene::bare();
    let tables = ["a", "b"].map(|schema| format!("{schema}.outbox"));
    for table in &tables {
        let schema = &table[..1];
        scene.db.run(&format!(
            "CREATE SCHEMA {schema};
             CREATE TABLE {table} (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)"
        ));
    }
    scene.use_settings("tables = [\"a.outbox\", \"b.outbox\"]\ntopic = \"{aggregatetype}\"\n");
    scene.init().finish().expect_code(0);
    for table in &tables {
        scene
            .init()
            .args(["--table", table])
            .finish()
            .expect_code(0);
    }
    for table in &tables {
        scene.db.run(&format!(
            "INSERT INTO {table} VALUES (gen_random_uuid(), '{CHECKPOINTS}', 'k', 't', '{{}}')"
        ));
    }
    let found = scene.run().finish().expect_code(3);
    found.expect_mentions(&["is reserved for checkpoints", "row with id"]);
}

#[test]
fn replay_and_verify_keep_rows_from_reserved_topics() {
    let scene = Scene::new();
    scene.insert(CHECKPOINTS, "forged");
    let template = ["--topic", "{aggregatetype}"];
    let replay = |arguments: &[&str]| {
        let replay = scene.replay(&["--all", "--yes"]).args(template);
        replay.args(arguments).finish()
    };
    let found = replay(&[]).expect_code(3);
    found.expect_mentions(&["is reserved for checkpoints", "row with id"]);
    let letters = format!("{}.dead", scene.name);
    scene.topic(&letters, 1, &[]);
    let flags = [
        "--on-unroutable",
        "dead-letter",
        "--dead-letter-topic",
        &letters,
    ];
    replay(&flags).expect_code(0);
    let records = scene.wait_for_records(1);
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["forged"]);
    assert_eq!(checkpoints_of(&scene, "forged"), 0);
    let verified = scene.verify().args(template).finish();
    assert_ne!(verified.code, Some(0));
    verified.expect_mentions(&["is reserved for checkpoints"]);
}

/// The topic is known from the configuration, so no command connects.
#[test]
fn fixed_topic_that_is_reserved_is_refused() {
    let scene = Scene::bare();
    for (topic, why) in RESERVED {
        let refused = scene.run().args(["--topic", topic]).finish();
        refused
            .expect_code(2)
            .expect_mentions(&[topic, why, "name another"]);
        let refused = scene.replay(&["--all", "--yes", "--topic", topic]).finish();
        refused.expect_code(2).expect_mentions(&[topic, why]);
    }
}

/// Kafka refuses to create a topic whose name differs from an existing one only in `.` and `_`.
#[test]
fn row_creates_no_topic_that_keeps_a_reserved_one_from_being_created() {
    let mut scene = Scene::new();
    let letters = format!("{}.dead", scene.name);
    scene.use_settings(&format!(
        "topic = \"{{aggregatetype}}\"\non_unroutable = \"dead-letter\"\ndead_letter_topic = \"{letters}\"\n\
         create_topics = {{ partitions = 1, replication = 1 }}\n"
    ));
    scene.expect_topic(&letters);
    let walpost = scene.start();
    let colliding = letters.replace('.', "_");
    scene.insert(&colliding, "collides");
    scene.insert("__x", "another");
    let records = scene.wait_for_records(2);
    let found: Vec<_> = records.iter().map(|letter| letter.key()).collect();
    assert_eq!(found, ["collides", "another"]);
    walpost.terminate().expect_code(0);
}
