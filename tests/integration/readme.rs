//! The examples of README.md, run in the order in which a reader would.

mod markdown;
mod place;
mod reference;

use std::fs;

use self::markdown::{README, blocks, examples};
use self::place::{Place, Service};
use crate::support::kafka::Broker;
use crate::support::postgres::Stop;
use crate::support::scene::Scene;
use crate::support::secrets::SECRET;
use crate::support::wait::{wait_until, within_a_day};

/// Everything that a fenced block in a language may be, by the heading it stands under; each is run
/// by a test below, but for pictures.
const RUN: [(&str, &str); 35] = [
    ("text", "Why not poll the table"),
    ("sql", "1. Settings of the server"),
    ("sh", "2. Table, role, publication, slot"),
    ("text", "3. Let the role in"),
    ("sh", "4. Topics"),
    ("toml", "5. Configuration"),
    ("sh", "6. Check"),
    ("sql", "8. Send an event"),
    ("sql", "Look after it"),
    ("sh", "Remove it"),
    ("sh", "Coming from Debezium's outbox event router"),
    ("sql", "Coming from Debezium's outbox event router"),
    ("sh", "A partitioned outbox"),
    ("sql", "A partitioned outbox"),
    ("toml", "Retention"),
    ("sql", "Retention"),
    ("sh", "Retention"),
    ("sql", "A partition for rows of the default partition"),
    ("sql", "An outbox without a table"),
    ("sh", "An outbox without a table"),
    ("toml", "An outbox without a table"),
    ("toml", "Several pipelines"),
    ("sh", "Several pipelines"),
    ("toml", "When Kafka is away for long"),
    ("sh", "Exactly once"),
    ("sql", "The journal"),
    ("toml", "Dead letters"),
    ("sh", "Verify"),
    ("text", "Verify"),
    ("sh", "walpost status"),
    ("toml", "Kafka"),
    ("sql", "What a consumer sees"),
    ("sql", "Other trouble"),
    ("sh", "Leave events out"),
    ("sh", "Send events again"),
];

#[test]
fn every_example_is_one_that_a_test_runs() {
    for block in blocks() {
        let (language, heading) = (&*block.language, &*block.heading);
        let is_run = RUN.contains(&(language, heading));
        assert!(is_run, "no test runs the {language} under {heading:?}");
    }
    for (language, heading) in RUN {
        examples(heading, language);
    }
}

/// The one example in that language under that heading.
fn example(heading: &str, language: &str) -> String {
    let mut found = examples(heading, language);
    assert_eq!(found.len(), 1, "{language} under {heading:?}");
    found.remove(0)
}

/// What systemd runs.
fn run_line() -> String {
    let unit = include_str!("../../deploy/systemd/walpost.service");
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    line.expect("a line ExecStart").to_owned()
}

/// Starts the service of the README with its configuration.
fn run(place: &Place) -> Service {
    place.write("walpost.toml", &example("5. Configuration", "toml"));
    place.start(&run_line())
}

fn create_topic(place: &Place) {
    Broker::shared().create_topic(&place.topic(), 1, &[]);
}

/// Goes all the steps; `make` is how table, role, publication and slot are made.
fn deploy(make: impl Fn(&Place)) {
    let place = Place::new("wal_level = replica\n");
    place.sql(&example("1. Settings of the server", "sql"));
    place.server.stop(Stop::Fast);
    place.server.start();
    let db = place.shop();
    assert_eq!(db.value("SHOW wal_level").unwrap(), "logical");

    make(&place);

    let file = db.value("SHOW hba_file").unwrap();
    let lines = fs::read_to_string(&file).unwrap() + &example("3. Let the role in", "text");
    fs::write(&file, lines).unwrap();
    let rules = db.rows("SELECT error FROM pg_hba_file_rules WHERE database = '{shop}'");
    assert_eq!(rules, [vec![None], vec![None]]);

    place.sh(&example("4. Topics", "sh"));
    assert_eq!(Broker::shared().partitions(&place.topic()), 12);
    place.write("walpost.toml", &example("5. Configuration", "toml"));
    let found = place.sh(&example("6. Check", "sh"));
    assert!(!found.contains("WARNING"), "{found}");

    let mut walpost = place.start(&run_line());
    place.sql(&example("8. Send an event", "sql"));
    let records = place.wait_for_records(&mut walpost, 1);
    assert_eq!(records[0].key(), "4711");
    assert_eq!(records[0].text(), r#"{"total": "12.50"}"#);
    let slot = place.sql(&example("Look after it", "sql"));
    assert!(slot.starts_with("walpost_outbox|t|reserved|"), "{slot}");
    walpost.stop();

    place.sh(&example("Remove it", "sh"));
    assert_eq!(db.number("SELECT count(*) FROM pg_replication_slots"), 0);
}

#[test]
fn deploying_with_walpost_init_ends_with_an_event_in_kafka() {
    deploy(|place| {
        let made = examples("2. Table, role, publication, slot", "sh");
        assert!(made[0].contains("walpost init"), "{made:?}");
        place.sh(&made[0]);
    });
}

#[test]
fn deploying_with_the_sql_files_ends_with_an_event_in_kafka() {
    deploy(|place| {
        let made = examples("2. Table, role, publication, slot", "sh");
        assert!(made[1].contains("psql"), "{made:?}");
        place.sh(&made[1]);
    });
}

#[test]
fn configuration_files_fit_what_init_makes() {
    let place = Place::new("");
    let server = &place.server;
    let db = server.session("postgres");
    db.run("CREATE DATABASE billing");
    db.run(&format!(
        "CREATE ROLE walpost LOGIN REPLICATION PASSWORD '{SECRET}'"
    ));
    // With the columns that the examples add to the usual ones.
    for (database, table) in [("shop", "public.outbox"), ("billing", "accounts.outbox")] {
        server.session(database).run(&format!(
            "CREATE SCHEMA IF NOT EXISTS accounts;
             CREATE TABLE {table} (id uuid PRIMARY KEY, tenant text, aggregatetype text,
                 aggregateid text, type text, payload jsonb, created_at timestamptz)"
        ));
    }
    Broker::shared().create_topic("walpost-dead-letters", 1, &[]);
    let blocks = blocks()
        .into_iter()
        .filter(|block| block.language == "toml");
    let mut files: Vec<_> = blocks.map(|block| block.text).collect();
    assert!(files.len() >= 4, "{files:?}");
    files.push(in_config_map());
    for text in files {
        place.write("walpost.toml", &text);
        // Two of them use the same names for different kinds of outbox.
        place.sh(&example("Remove it", "sh"));
        let file: toml::Table = place.fill_in(&text).parse().unwrap();
        for pipeline in file["pipeline"].as_array().unwrap() {
            let name = pipeline
                .get("name")
                .map_or("outbox", |name| name.as_str().unwrap());
            let database = if name == "billing" { "billing" } else { "shop" };
            let init = example("Several pipelines", "sh")
                .replace("--pipeline orders", &format!("--pipeline {name}"))
                .replace("@/shop?", &format!("@/{database}?"));
            place.sh(&init);
        }
        place.sh_as_walpost("walpost check --config /etc/walpost/walpost.toml");
    }
}

/// The configuration that the manifests for Kubernetes have.
fn in_config_map() -> String {
    let map = include_str!("../../deploy/kubernetes/configmap.yaml");
    let (_, file) = map.split_once("walpost.toml: |\n").unwrap();
    let lines = file
        .lines()
        .map(|line| line.strip_prefix("    ").unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn switching_from_debezium_leaves_no_gap() {
    let heading = "Coming from Debezium's outbox event router";
    let place = Place::new("");
    create_topic(&place);
    let db = place.shop();
    db.run(
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL,
             aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb);
         CREATE PUBLICATION dbz_publication FOR ALL TABLES;",
    );
    db.rows("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')");
    let insert = |key: &str| {
        db.run(&place.fill_in(&format!(
            "INSERT INTO outbox VALUES (gen_random_uuid(), 'order', '{key}', 'Placed', '{{}}')"
        )));
    };
    insert("before");
    place.sh(&example(heading, "sh"));
    let queries = examples(heading, "sql");
    insert("between");
    assert_eq!(place.sql(&queries[0]), "f");
    db.rows("SELECT pg_replication_slot_advance('debezium', pg_current_wal_lsn())");
    assert_eq!(place.sql(&queries[0]), "t");
    insert("after");
    place.write("walpost.toml", &example("5. Configuration", "toml"));
    let mut walpost = place.start(&format!("{} --snapshot never", run_line()));
    let records = place.wait_for_records(&mut walpost, 2);
    let keys: Vec<_> = records.iter().map(|record| record.key()).collect();
    assert_eq!(keys, ["between", "after"]);
    place.sql(&queries[1]);
    let slots = db.rows("SELECT slot_name FROM pg_replication_slots");
    assert_eq!(slots, [vec![Some("walpost_outbox".to_owned())]]);
    walpost.stop();
}

#[test]
fn partition_that_is_dropped_as_described_was_delivered() {
    within_a_day();
    let heading = "A partitioned outbox";
    let place = Place::new("");
    create_topic(&place);
    let db = place.shop();
    let commands = examples(heading, "sh");
    commands.iter().for_each(|command| drop(place.sh(command)));
    let queries = examples(heading, "sql");
    let today = db.value("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')");
    let today = |query: &str| query.replace("20251101", today.as_deref().unwrap());
    place.sql(&example("8. Send an event", "sql"));
    let position = place.sql(&today(&queries[0]));
    let may_be_dropped = queries[1].replace("0/16B3748", &position);
    assert_eq!(place.sql(&may_be_dropped), "f");
    let mut walpost = run(&place);
    assert_eq!(place.wait_for_records(&mut walpost, 1)[0].key(), "4711");
    wait_until("the slot to pass", || place.sql(&may_be_dropped) == "t");
    place.sql(&today(&queries[2]));
    walpost.stop();
    assert_eq!(db.number("SELECT count(*) FROM outbox"), 0);
}

#[test]
fn partitions_are_kept_by_run_as_described() {
    within_a_day();
    let place = Place::new("");
    create_topic(&place);
    let db = place.shop();
    place.sh(&examples("A partitioned outbox", "sh")[0]);
    place.sql(&example("Retention", "sql"));
    let would = place.sh(&example("Retention", "sh"));
    assert!(
        !would.contains("would"),
        "nothing is old or missing: {would}"
    );
    db.run("DROP TABLE outbox_default; CREATE TABLE outbox_default PARTITION OF outbox DEFAULT");
    let last = "SELECT to_char(now() AT TIME ZONE 'UTC' + interval '7 days', 'YYYYMMDD')";
    let last = format!("outbox_p{}", db.value(last).unwrap());
    db.run(&format!("DROP TABLE {last}"));
    place.write(
        "walpost.toml",
        &example("When Kafka is away for long", "toml"),
    );
    let found = place.sh(&example("6. Check", "sh"));
    assert!(found.contains("the slot can be let go"), "{found}");
    place.write("walpost.toml", &example("Retention", "toml"));
    let mut walpost = place.start(&run_line());
    let made = format!("SELECT to_regclass('{last}') IS NOT NULL");
    wait_until("the last partition to be made", || db.is_true(&made));

    // Rows that came before their partition.
    let sql = example("A partition for rows of the default partition", "sql");
    place.sql(&example("8. Send an event", "sql"));
    let insert = "INSERT INTO outbox (aggregatetype, aggregateid, type, created_at) VALUES ('order', 'k', 't', '2025-11-01 12:00+00')";
    place.sql(insert);
    place.wait_for_records(&mut walpost, 2);
    assert_eq!(db.number("SELECT count(*) FROM outbox_default"), 1);
    place.sql(&sql);
    assert_eq!(db.number("SELECT count(*) FROM outbox_default"), 0);
    assert_eq!(db.number("SELECT count(*) FROM outbox_p20251101"), 1);
    place.sql(&example("8. Send an event", "sql"));
    let records = place.wait_for_records(&mut walpost, 3);
    assert_eq!(records.len(), 3, "moving a row publishes nothing");
    walpost.stop();
}

#[test]
fn event_that_is_published_without_a_table_arrives() {
    let heading = "An outbox without a table";
    let made = examples(heading, "sh");
    assert_eq!(made.len(), 2);
    let queries = examples(heading, "sql");
    let [publish, revoke] = &queries[..] else {
        panic!("{queries:?}");
    };
    for make in made {
        let place = Place::new("");
        create_topic(&place);
        place.sh(&make);
        place.write("walpost.toml", &example(heading, "toml"));
        let mut walpost = place.start(&run_line());
        place.sql(revoke);
        place.sql(publish);
        let records = place.wait_for_records(&mut walpost, 1);
        assert_eq!(records[0].key(), "4711");
        assert_eq!(records[0].text(), r#"{"total": "12.50"}"#);
        walpost.stop();
        place.sh(&example("Remove it", "sh"));
        let kept = place
            .shop()
            .number("SELECT count(*) FROM pg_replication_slots");
        assert_eq!(kept, 0);
    }
}

#[test]
fn pipeline_that_delivers_exactly_once_begins_at_an_adopted_checkpoint() {
    let place = Place::new("");
    create_topic(&place);
    place.sh(&examples("2. Table, role, publication, slot", "sh")[0]);
    place.write("walpost.toml", &example("5. Configuration", "toml"));
    let adopt = example("Exactly once", "sh");
    let shown = place.sh(&format!("echo outbox | {adopt}"));
    assert!(shown.contains("no checkpoint"), "{shown}");
    let mut walpost = place.start(&format!("{} --exactly-once", run_line()));
    place.sql(&example("8. Send an event", "sql"));
    let records = place.wait_for_records(&mut walpost, 1);
    assert_eq!(records[0].key(), "4711");
    walpost.stop();
}

#[test]
fn event_that_halts_is_left_out_as_described() {
    let place = Place::new("");
    create_topic(&place);
    place.sh(&examples("2. Table, role, publication, slot", "sh")[0]);
    place.write("walpost.toml", &example("5. Configuration", "toml"));
    let event = example("8. Send an event", "sql");
    place.sql(&event.replace("'order'", "'not a topic'"));
    place.sql(&event);
    let halted = place.sh(&format!("{} 2>&1 || test $? = 3", run_line()));
    let (_, rest) = halted.split_once("halted: ").unwrap();
    let (_, rest) = rest.split_once(" at ").unwrap();
    let position = rest.split(' ').next().unwrap();
    let skip = example("Leave events out", "sh").replace("00000000/016B3748:0000000002", position);
    place.sh(&format!("echo outbox | {skip}"));
    let mut walpost = run(&place);
    assert_eq!(place.wait_for_records(&mut walpost, 1)[0].key(), "4711");
    walpost.stop();
}

#[test]
fn status_shows_a_running_pipeline() {
    let place = Place::new("");
    place.sh(&examples("2. Table, role, publication, slot", "sh")[0]);
    let mut walpost = run(&place);
    let address = walpost.wait_for_log("status at http://");
    let address = address.rsplit_once("http://").unwrap().1.trim();
    walpost.wait_for_log("streaming");
    let example = example("walpost status", "sh");
    let shown = place.sh_as_walpost(&format!("{} --http {address}", example.trim()));
    assert!(shown.contains("streaming"), "{shown}");
    walpost.stop();
}

#[test]
fn events_that_are_sent_again_keep_their_ids() {
    let place = Place::new("");
    create_topic(&place);
    place.sh(&examples("2. Table, role, publication, slot", "sh")[0]);
    for _ in 0..3 {
        place.sql(&example("8. Send an event", "sql"));
    }
    // A slot that is lost, and made anew.
    place.sh(&example("Remove it", "sh"));
    place.sh(&examples("2. Table, role, publication, slot", "sh")[0]);
    let mut walpost = run(&place);
    let db = place.shop();
    let ids = "SELECT id FROM outbox ORDER BY created_at, id";
    let before = db.rows(ids);
    let replay = example("Send events again", "sh");
    let shown = place.sh(&replay);
    assert!(shown.contains("3 rows of table public.outbox"), "{shown}");
    let replay = replay.replace("--dry-run", "");
    place.sh(&format!("echo outbox | {replay}"));
    assert_eq!(db.rows(ids), before);
    let records = place.wait_for_records(&mut walpost, 3);
    let delivered: Vec<_> = records
        .iter()
        .map(|record| vec![Some(record.header("id").to_owned())])
        .collect();
    assert_eq!(delivered, before);
    walpost.stop();
}

#[test]
fn what_was_delivered_can_be_verified() {
    let place = Place::new("");
    create_topic(&place);
    place.sh(&examples("2. Table, role, publication, slot", "sh")[0]);
    let mut walpost = run(&place);
    for _ in 0..3 {
        place.sql(&example("8. Send an event", "sql"));
    }
    place.wait_for_records(&mut walpost, 3);
    let found = place.sh(&example("Verify", "sh"));
    let shown = example("Verify", "text");
    let lines = |text: &str, from: &str| {
        let lines: Vec<_> = text
            .lines()
            .skip_while(|line| !line.starts_with(from))
            .collect();
        lines
            .join("\n")
            .replace(|c: char| c.is_ascii_digit(), "")
            .replace(' ', "")
    };
    let shown = lines(&shown, "outbox:").replace("NOTOK", "ok");
    assert_eq!(lines(&found, "outbox:"), shown);
    walpost.stop();
}

#[test]
fn other_queries_answer_what_they_are_for() {
    let scene = Scene::new();
    let journal = scene.db.rows(&example("The journal", "sql"));
    let [entry] = &journal[..] else {
        panic!("not one entry: {journal:?}");
    };
    assert_eq!(entry[2].as_deref(), Some("snapshot"));
    let position = scene.db.rows(&example("What a consumer sees", "sql"));
    assert_eq!(position, [vec![Some("0/16B3748".to_owned())]]);
    let other = scene.server.session(&scene.name);
    other.run("BEGIN; CREATE TABLE held_open ()");
    let open = scene.db.rows(&example("Other trouble", "sql"));
    let held =
        |row: &Vec<Option<String>>| row[4].as_deref().is_some_and(|q| q.contains("held_open"));
    assert!(open.iter().any(held), "{open:?}");
}

#[test]
fn words_of_dev_are_words_that_dev_has() {
    let help = std::process::Command::new("./dev")
        .arg("help")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let words: Vec<_> = README
        .split("./dev ")
        .skip(1)
        .map(|rest| rest.split(['\n', '`']).next().unwrap())
        .collect();
    assert!(words.len() >= 2);
    for word in words {
        let listed = |line: &str| line.trim_start().starts_with(&format!("{word} "));
        assert!(help.lines().any(listed), "{word}");
    }
}
