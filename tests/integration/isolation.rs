//! A batch that the brokers refuse: the record it is for is found, and nothing else is left out.

use std::collections::BTreeSet;

use crate::support::scene::Scene;

in_both_modes! {
    refused_record_is_named_alone_and_skipping_it_leaves_out_nothing_else
    refused_record_becomes_a_dead_letter_and_the_rest_is_delivered
    batches_over_the_limit_of_the_topic_are_delivered_in_smaller_ones
}

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";
const PLAIN: [&str; 2] = ["-X", "compression.type=none"];
const ROWS: usize = 1500;
const LARGE: usize = 700;

/// So many small transactions, one of which has a row that the topic does not take.
fn large_among_small(exactly_once: bool) -> (Scene<'static>, String) {
    let scene = Scene::with_table(TABLE).in_mode(exactly_once);
    let aggregate = format!("{}-limited", scene.name);
    let topic = format!("outbox.event.{aggregate}");
    scene.topic(&topic, 3, &[("max.message.bytes", "500000")]);
    scene.db.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{ROWS} LOOP
             INSERT INTO outbox VALUES (i, '{aggregate}', 'k' || i % 50,
                 repeat('x', CASE i WHEN {LARGE} THEN 900000 ELSE 200 END));
             COMMIT;
         END LOOP; END $$"
    ));
    (scene, topic)
}

fn ids(scene: &Scene, topic: &str) -> BTreeSet<usize> {
    let records = scene.records();
    let of_topic = records.iter().filter(|record| record.topic == topic);
    of_topic.map(|r| r.header("id").parse().unwrap()).collect()
}

fn all_but_the_large() -> BTreeSet<usize> {
    (1..=ROWS).filter(|id| *id != LARGE).collect()
}

fn refused_record_is_named_alone_and_skipping_it_leaves_out_nothing_else(exactly_once: bool) {
    let (scene, topic) = large_among_small(exactly_once);
    let halted = scene
        .run()
        .args(PLAIN)
        .finish()
        .expect_code(3)
        .expect_says(&[
            "halted",
            &format!("id {LARGE}"),
            "max.message.bytes",
            "walpost skip --to",
        ]);
    // At least once, other partitions may have some of what is behind it.
    let before: BTreeSet<usize> = (1..LARGE).collect();
    let delivered = ids(&scene, &topic);
    assert!(delivered.is_superset(&before) && !delivered.contains(&LARGE));
    assert!(!exactly_once || delivered == before, "{delivered:?}");
    assert_eq!(
        scene.confirmed(),
        scene.history()[LARGE - 2].end,
        "what is before it is confirmed"
    );
    let (_, at) = halted.stderr.split_once("walpost skip --to ").unwrap();
    let at = at.get(..28).expect("a position");
    let skipped = scene.skip(at).arg("--yes").finish().expect_code(0);
    skipped.expect_says(&["1 event would never be delivered"]);
    let walpost = scene.start_with(&PLAIN);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&scene, &topic), all_but_the_large());
}

fn refused_record_becomes_a_dead_letter_and_the_rest_is_delivered(exactly_once: bool) {
    let (scene, topic) = large_among_small(exactly_once);
    let dead = format!("{}.dead", scene.name);
    scene.topic(&dead, 3, &[]);
    let flags = ["--dead-letter-topic", &dead, "--on-oversize", "dead-letter"];
    let walpost = scene.start_with(&[&PLAIN[..], &flags].concat());
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&scene, &topic), all_but_the_large());
    assert_eq!(ids(&scene, &dead), BTreeSet::from([LARGE]));
}

fn batches_over_the_limit_of_the_topic_are_delivered_in_smaller_ones(exactly_once: bool) {
    let scene = Scene::with_table(TABLE).in_mode(exactly_once);
    let aggregate = format!("{}-limited", scene.name);
    let topic = format!("outbox.event.{aggregate}");
    scene.topic(&topic, 1, &[("max.message.bytes", "100000")]);
    scene.db.run(&format!(
        "INSERT INTO outbox SELECT i, '{aggregate}', 'k', repeat('x', 1000)
         FROM generate_series(1, 3000) i"
    ));
    let walpost = scene.start_with(&PLAIN);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&scene, &topic), (1..=3000).collect());
}
