//! Several outbox tables that share one slot.

mod blocked;
mod early;
mod inherited;
mod left;
mod locked;
mod long_texts;
mod names;
mod new_slot;
mod older_rows;
mod published;
pub(crate) mod set_aside;

use std::thread;

use crate::support::checker::Resends;
use crate::support::event::{Event, EventWriter};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::parse_position;
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::{Record, keys};
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost_role::WalpostRole;

const SETTINGS: &str = "tables = [\"tenant_*.outbox\", \"tenant_odd.\\\"Out-\\\"*\"]\n\
    headers = { id = \"{id}\", tenant = \"{table.schema}\", table = \"{table.name}\" }\n";

fn writer(tables: &[&str]) -> EventWriter {
    EventWriter::Tables {
        name_pattern: "tenant%".to_owned(),
        tables: tables.iter().map(|&table| table.to_owned()).collect(),
    }
}

/// Creates a database with a slot for several tables, and adds the given tables with
/// `walpost init`.
fn fixture_on(major: u32, settings: &str, tables: &[&str]) -> Fixture<'static> {
    let mut fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
    fixture.use_settings(settings);
    fixture.write_to(writer(tables));
    fixture.init().finish().expect_code(0);
    for table in tables {
        add(&fixture, table, "");
    }
    fixture
}

fn fixture(tables: &[&str]) -> Fixture<'static> {
    fixture_on(MAJOR, SETTINGS, tables)
}

/// Creates the table's schema, runs `create`, and adds the table with `walpost init`.
fn add(fixture: &Fixture<'_>, table: &str, create: &str) {
    let (schema, _) = table.split_once('.').unwrap();
    fixture
        .db
        .run(&format!("CREATE SCHEMA IF NOT EXISTS {schema}; {create}"));
    fixture
        .init()
        .args(["--table", table])
        .finish()
        .expect_code(0);
}

fn walsender(fixture: &Fixture<'_>) -> i64 {
    let slot = fixture.slot();
    fixture.db.number(&format!(
        "SELECT coalesce((SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'), 0)"
    ))
}

in_both_modes! {
    delivers_events_of_all_tables_in_commit_order_when_killed_under_load
    delivery_continues_while_tables_are_added_dropped_and_renamed
    delivers_existing_rows_of_an_added_table_before_its_new_rows
    verifies_and_replays_one_of_several_tables
    add_outbox_does_not_send_rows_again_that_the_slot_has_already_sent
    never_publishes_under_the_wrong_tenant_after_a_schema_rename
}

/// The tables have their columns in different orders, and some have additional columns. Some have
/// partitions or names that must be quoted.
fn delivers_events_of_all_tables_in_commit_order_when_killed_under_load(exactly_once: bool) {
    const TABLES: [&str; 4] = [
        "tenant_1.outbox",
        "tenant_2.outbox",
        "tenant_3.outbox",
        "tenant_odd.\"Out-box\"",
    ];
    let fixture = fixture(&TABLES[..1]);
    add(
        &fixture,
        TABLES[1],
        "CREATE TABLE tenant_2.outbox (more int, payload jsonb, type text, aggregateid text, aggregatetype text, id uuid)",
    );
    add(
        &fixture,
        TABLES[2],
        "CREATE TABLE tenant_3.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload text, part int DEFAULT 1)
            PARTITION BY LIST (part);
         CREATE TABLE tenant_3.one PARTITION OF tenant_3.outbox FOR VALUES IN (1)",
    );
    add(&fixture, TABLES[3], "");
    let mut fixture = fixture.in_mode(exactly_once);
    fixture.write_to(writer(&TABLES));
    let aggregate = fixture.aggregate(3);
    fixture.check().finish().expect_code(0);
    let mut walpost = fixture.start();
    let load = fixture.load(&[&aggregate]);
    let mut deaths = Vec::new();
    for _ in 0..2 {
        load.wait_for_transactions(60);
        deaths.push(fixture.kill(walpost));
        walpost = fixture.start();
    }
    load.wait_for_transactions(30);
    load.stop();
    fixture.settle(walpost, &deaths, fixture.resends(2));
    let records = fixture.records();
    for (schema, name) in [
        ("tenant_1", "outbox"),
        ("tenant_2", "outbox"),
        ("tenant_3", "outbox"),
        ("tenant_odd", "Out-box"),
    ] {
        let has = records
            .iter()
            .any(|record| record.header("tenant") == schema && record.header("table") == name);
        assert!(has, "{schema}.{name}");
    }
}

/// While Walpost streams, tables are added with `walpost init`, dropped together with their
/// schemas, renamed and re-created.
fn delivery_continues_while_tables_are_added_dropped_and_renamed(exactly_once: bool) {
    let mut fixture = fixture(&["tenant_1.outbox"]).in_mode(exactly_once);
    let aggregate = fixture.aggregate(3);
    let walpost = fixture.start();
    let holder = walsender(&fixture);
    let load = fixture.load(&[&aggregate]);
    let publication = fixture.slot();
    for number in 2..5 {
        let table = format!("tenant_{number}.outbox");
        add(&fixture, &table, "");
        let here = writer(&[&table]);
        let insert = |key: &str| here.insert_one(Event::new(&aggregate, key, "{}"));
        fixture.db.run(&insert("first"));
        load.wait_for_transactions(10);
        match number {
            2 => fixture.db.run(&format!(
                "BEGIN; {} DROP SCHEMA tenant_2 CASCADE; COMMIT",
                insert("with its schema")
            )),
            3 => fixture.db.run(&format!(
                "BEGIN; {} ALTER TABLE tenant_3.outbox RENAME TO old; ALTER PUBLICATION {publication} DROP TABLE tenant_3.old; COMMIT",
                insert("before its name")
            )),
            _ => fixture.db.run(&format!(
                "BEGIN; {} DROP TABLE tenant_4.outbox;
                 CREATE TABLE tenant_4.outbox (payload text, id uuid, aggregateid text, aggregatetype text, type text);
                 ALTER PUBLICATION {publication} ADD TABLE tenant_4.outbox; {} COMMIT",
                insert("of the old one"),
                insert("of the new one")
            )),
        }
    }
    load.wait_for_transactions(10);
    load.stop();
    wait_until("the stream to continue", || walsender(&fixture) == holder);
    assert_eq!(walpost.logged("reconnecting"), 0, "{}", walpost.log());
    fixture.write_to(writer(&["tenant_1.outbox"]));
    fixture.settle(walpost, &[], Resends::Never);
    let records = fixture.records();
    let records_of_tenant = |tenant: &str| {
        records
            .iter()
            .filter(|record| record.header("tenant") == tenant)
            .count()
    };
    assert_eq!(
        [2, 3, 4].map(|number| records_of_tenant(&format!("tenant_{number}"))),
        [2, 2, 3]
    );
}

#[test]
fn init_creates_the_slot_and_adds_tables_on_every_version() {
    for major in [14, 15, 16, 17, 18] {
        let fixture = fixture_on(major, SETTINGS, &["tenant_1.outbox"]);
        // A second `init` has no effect, whether Walpost is streaming or not.
        fixture.init().finish().expect_code(0);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start();
        add(&fixture, "tenant_2.outbox", "");
        fixture
            .init()
            .args(["--table", "tenant_2.outbox"])
            .finish()
            .expect_code(0);
        for table in ["tenant_1.outbox", "tenant_2.outbox"] {
            let event = Event::new(&aggregate, table, "{}");
            fixture.db.run(&writer(&[table]).insert_one(event));
        }
        fixture.wait_for_records(2);
        let refused = fixture.init().args(["--table", "shop.outbox"]).finish();
        refused
            .expect_code(2)
            .expect_mentions(&["shop.outbox", "tenant_*.outbox"]);
        walpost.terminate().expect_code(0);
    }
}

/// WAL contains the existing rows exactly once, before any later row of the table, so they are
/// delivered first even if the process is killed.
fn delivers_existing_rows_of_an_added_table_before_its_new_rows(exactly_once: bool) {
    let fixture = fixture(&["tenant_1.outbox"]).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    fixture.db.run(
        "CREATE SCHEMA tenant_2;
         CREATE TABLE tenant_2.outbox (more bool DEFAULT true, id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text,
             payload jsonb, created_at timestamptz DEFAULT clock_timestamp())",
    );
    let events = writer(&["tenant_2.outbox"]);
    let event = |key| {
        let payload = "{\"a\": \"quote \\\" and \\u00fc\"}";
        events.insert_one(Event::new(&aggregate, key, payload))
    };
    for key in ["1", "2", "3"] {
        fixture.db.run(&event(key));
    }
    let check = fixture.check().finish().expect_code(0);
    check.expect_mentions(&[
        "not in the publication",
        "walpost init --table tenant_2.outbox",
    ]);

    // `init` must wait for a transaction that has already written to the table, and treat its rows
    // as existing rows.
    let open = fixture.server.session(&fixture.name);
    open.run(&format!("BEGIN; {}", event("4")));
    let init = fixture.init().args(["--table", "tenant_2.outbox"]).start();
    wait_until("init to wait", || {
        fixture.db.is_true(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'tenant_2.outbox'::regclass)",
        )
    });
    open.run("COMMIT");
    init.finish().expect_code(0);
    fixture.db.run(&event("5"));

    // Kill the process several times during delivery.
    let mut walpost = fixture.start();
    for _ in 0..2 {
        fixture.kill(walpost);
        walpost = fixture.start();
    }
    let last = |record: &Record| record.key() == "5";
    wait_until("the last event", || fixture.records().iter().any(last));
    walpost.terminate().expect_code(0);
    let records = fixture.records();
    let mut seen = Vec::new();
    for record in &records {
        assert_eq!(
            (record.header("tenant"), record.header("table")),
            ("tenant_2", "outbox")
        );
        assert_eq!(record.text(), "{\"a\": \"quote \\\" and \u{fc}\"}");
        if !seen.contains(&record.key()) {
            seen.push(record.key());
        }
    }
    assert_eq!(seen, ["1", "2", "3", "4", "5"]);
    assert!(records.len() == 5 || !exactly_once, "{}", records.len());
    let left = fixture.db.number("SELECT count(*) FROM walpost.outbox_row");
    assert_eq!(left, 0);
}

/// Neither `verify` nor `replay` of one table is affected by the rows of another table, which go to
/// a different topic.
fn verifies_and_replays_one_of_several_tables(exactly_once: bool) {
    const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];
    let fixture = fixture(&TABLES).in_mode(exactly_once);
    fixture.accept_any_name(TABLES[1]);
    let aggregates = [fixture.aggregate(1), fixture.aggregate(1)];
    let dead = format!("{}.dead", fixture.name);
    fixture.topic(&dead, 1, &[]);
    let event = |table: usize, key: &str| {
        let event = Event::new(&aggregates[table], key, "{}");
        writer(&TABLES[table..=table]).insert_one(event)
    };
    let flags = [
        "--on-unroutable",
        "dead-letter",
        "--dead-letter-topic",
        &dead,
    ];
    let mut walpost = fixture.start_with(&[&flags[..], &["--http", "127.0.0.1:0"]].concat());
    let http = walpost.http();
    let both = format!("BEGIN; {} {} COMMIT", event(0, "1"), event(1, "2"));
    fixture.db.run(&both);
    fixture.db.run(
        "INSERT INTO tenant_2.outbox (id, aggregatetype, aggregateid, type, payload)
             VALUES (gen_random_uuid(), 'no topic', 'k', 't', '{}')",
    );
    let records = fixture.wait_for_records(3);
    let letter = records.iter().find(|record| record.topic == dead);
    let letter = letter.expect("a dead letter");
    assert_eq!(letter.header("walpost-source-table"), TABLES[1]);
    fixture
        .db
        .run("DELETE FROM tenant_2.outbox WHERE aggregatetype = 'no topic'");
    let rows = |table: &str| http.pipeline()["tables"][table].as_u64();
    wait_until("the rows of each table to be counted", || {
        TABLES.map(rows) == [Some(1), Some(2)]
    });
    let metrics = http.metrics();
    let series = format!(
        "walpost_table_rows_total{{pipeline=\"{}\",table=",
        fixture.name
    );
    let of_tables = metrics.iter().filter(|(name, _)| name.starts_with(&series));
    let of_tables: Vec<_> = of_tables.map(|(_, rows)| *rows).collect();
    assert_eq!(of_tables, [1.0, 2.0], "{metrics:?}");
    // In exactly-once mode, an idle slot is confirmed only up to its last event, so rows of the
    // verified table count as pending for a while.
    let wait = if exactly_once { "1s" } else { "60s" };
    let verify = |table: &str| {
        let verify = fixture.verify().args(["--wait", wait, "--table", table]);
        verify.finish()
    };
    for table in TABLES {
        verify(table)
            .expect_code(0)
            .expect_mentions(&["1 rows, 1 records"]);
    }
    // Write this row while the table is not in the publication.
    let publication = fixture.slot();
    for statement in [
        &format!("ALTER PUBLICATION {publication} DROP TABLE tenant_2.outbox"),
        &event(1, "lost"),
        &format!("ALTER PUBLICATION {publication} ADD TABLE tenant_2.outbox"),
        &event(0, "last"),
    ] {
        fixture.db.run(statement);
    }
    verify(TABLES[0])
        .expect_code(0)
        .expect_mentions(&["2 rows, 2 records"]);
    if !exactly_once {
        verify(TABLES[1])
            .expect_code(1)
            .expect_mentions(&["MISSING"]);
    }
    let again = fixture.replay(&["--all", "--yes", "--table", TABLES[1]]);
    again.finish().expect_code(0);
    verify(TABLES[1]).expect_code(0);
    let records = fixture.records();
    let replayed = records
        .iter()
        .filter(|record| record.header_names().contains(&"walpost-replay"));
    let mut replayed: Vec<_> = replayed
        .map(|record| (record.key(), record.header("tenant"), &record.topic))
        .collect();
    replayed.sort();
    let topic = format!("outbox.event.{}", aggregates[1]);
    assert_eq!(
        replayed,
        [("2", "tenant_2", &topic), ("lost", "tenant_2", &topic)]
    );
    fixture.db.run(
        "CREATE SCHEMA tenant_3; CREATE TABLE tenant_3.outbox (LIKE tenant_2.outbox); INSERT INTO tenant_3.outbox TABLE tenant_2.outbox",
    );
    verify("tenant_3.outbox").expect_mentions(&["does not contain table tenant_3.outbox"]);
    walpost.terminate().expect_code(0);
}

fn never_publishes_under_the_wrong_tenant_after_a_schema_rename(exactly_once: bool) {
    schema_is_renamed(MAJOR, exactly_once);
}

#[test]
fn never_publishes_under_the_wrong_tenant_after_a_schema_rename_on_any_version() {
    for major in [14, 16, 17, 18] {
        schema_is_renamed(major, false);
    }
}

/// The owner of a schema renames it to the name of a removed tenant's schema, and then writes to
/// the table in the renamed schema.
fn schema_is_renamed(major: u32, exactly_once: bool) {
    let tables = ["tenant_1.outbox", "tenant_2.outbox"];
    let mut fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
    // All tests share the broker, so the topics need a unique prefix.
    let prefix = &fixture.name.clone();
    let topic = format!("{prefix}.{{table.schema}}.{{aggregatetype}}");
    fixture.use_settings(&format!(
        "tables = [\"tenant_*.outbox\"]\ntopic = \"{topic}\"\n"
    ));
    fixture.write_to(writer(&tables));
    fixture.init().finish().expect_code(0);
    for table in tables {
        add(&fixture, table, "");
    }
    let fixture = fixture.in_mode(exactly_once);
    for tenant in [1, 2] {
        fixture.topic(&format!("{prefix}.tenant_{tenant}.orders"), 1, &[]);
    }
    let insert = |table: &str, key: &str| {
        let event = writer(&[table]).insert_one(Event::new("orders", key, "{}"));
        fixture.db.run(&event);
    };
    let mut walpost = fixture.start();
    insert(tables[0], "first");
    insert(tables[1], "second");
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    fixture
        .db
        .run("DROP SCHEMA tenant_2 CASCADE; ALTER SCHEMA tenant_1 RENAME TO tenant_2");
    if major < 16 {
        // Before version 16, PostgreSQL sends a schema's new name only after a reconnect.
        fixture.end_walsender();
    }
    wait_until("the renamed table to be detected", || {
        insert(tables[1], "forged");
        let is_forged =
            |record: &Record| record.topic.contains("tenant_2") && record.key() == "forged";
        !walpost.is_running() || fixture.records().iter().any(is_forged)
    });
    let finished = walpost.finish().expect_code(3);
    finished.expect_mentions(&[
        "halted",
        "table tenant_2.outbox was named tenant_1.outbox",
        "ALTER SCHEMA tenant_2 RENAME TO tenant_1",
        "walpost skip --to",
    ]);
    let is_forged =
        |record: &&Record| record.topic.contains("tenant_2") && record.key() == "forged";
    assert_eq!(fixture.records().iter().filter(is_forged).count(), 0);
    // A restart alone does not make Walpost accept the schema's new name.
    let mut walpost = fixture.start();
    wait_until("the pipeline to halt again", || !walpost.is_running());
    walpost.finish().expect_code(3);
    let init = fixture.init().args(["--table", tables[1]]);
    init.finish().expect_code(0);
    let walpost = fixture.start();
    wait_until("the rows under the accepted name", || {
        fixture.records().iter().any(|record| is_forged(&record))
    });
    walpost.terminate().expect_code(0);
}

/// With the topic `{table.schema}.{aggregatetype}`, a row of the schema `tenant_1.eu` with the
/// aggregatetype `orders` would go to the same topic as a row of the schema `tenant_1` with the
/// aggregatetype `eu.orders`.
#[test]
fn schema_name_with_dots_does_not_produce_the_topic_of_another_tenant() {
    const EU: &str = "\"tenant_1.eu\".outbox";
    for sets_aside in [false, true] {
        let mut fixture = Fixture::bare_on_servers(Server::shared(MAJOR), Broker::shared());
        let prefix = fixture.name.clone();
        let topic = format!("{prefix}.{{table.schema}}.{{aggregatetype}}");
        let on_error = if sets_aside { "set-aside" } else { "halt" };
        fixture.use_settings(&format!(
            "tables = [\"tenant_*.outbox\"]\ntopic = \"{topic}\"\non_table_error = \"{on_error}\"\n"
        ));
        fixture.write_to(writer(&["tenant_1.outbox"]));
        fixture.init().finish().expect_code(0);
        add(&fixture, "tenant_1.outbox", "");
        fixture.topic(&format!("{prefix}.tenant_1.eu.orders"), 1, &[]);
        let insert = |table: &str, aggregate: &str, key: &str| {
            let event = writer(&[table]).insert_one(Event::new(aggregate, key, "{}"));
            fixture.db.run(&event);
        };
        let mut walpost = fixture.start();
        insert("tenant_1.outbox", "eu.orders", "own");
        fixture.wait_for_records(1);
        fixture.db.run(&format!(
            "CREATE SCHEMA \"tenant_1.eu\"; CREATE TABLE {EU} (LIKE tenant_1.outbox INCLUDING ALL);
             SELECT walpost.add_outbox('{EU}', '{}')",
            fixture.slot()
        ));
        insert(EU, "orders", "forged");
        wait_until("the row to be read", || {
            let is_forged = |record: &Record| record.key() == "forged";
            assert!(
                !fixture.records().iter().any(is_forged),
                "published as another tenant"
            );
            !walpost.is_running() || walpost.logged("table set aside") > 0
        });
        let expected = ["\"tenant_1.eu\".outbox", "in its schema"];
        if sets_aside {
            walpost.wait_for_log("table set aside");
            insert("tenant_1.outbox", "eu.orders", "last");
            fixture.wait_for_records(2);
            walpost.terminate().expect_code(0);
        } else {
            walpost.finish().expect_code(3).expect_mentions(&expected);
            fixture
                .run()
                .finish()
                .expect_code(3)
                .expect_mentions(&expected);
        }
        let replay = fixture.replay(&["--all", "--yes", "--table", EU]).finish();
        replay.expect_mentions(&expected);
        let verify = fixture.verify().args(["--table", EU]).finish();
        verify.expect_mentions(&expected);
        let records = fixture.records();
        assert!(
            records.iter().all(|record| record.key() != "forged"),
            "{records:?}"
        );
    }
}

/// The owner of the publication removes a table from it, and later adds the table again.
#[test]
fn reports_a_table_removed_from_the_publication_until_it_is_added_again() {
    let fixture = fixture(&["tenant_1.outbox", "tenant_2.outbox"]);
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    let publication = fixture.slot();
    wait_until("readiness", || http.get("/readyz").code == 200);
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} SET TABLE tenant_1.outbox, walpost.outbox_row"
    ));
    let line = walpost.wait_for_log("watchdog: tables were removed from publication");
    for text in [
        "not delivered: tenant_2.outbox",
        &format!("ALTER PUBLICATION {publication} ADD TABLE tenant_2.outbox"),
        "walpost replay --dropped-slots --table tenant_2.outbox",
    ] {
        assert!(line.contains(text), "{text} in {line}");
    }
    let readiness = http.get("/readyz");
    assert_eq!(readiness.code, 503, "{}", readiness.body);
    assert!(
        readiness.body.contains("tenant_2.outbox"),
        "{}",
        readiness.body
    );
    let status = http.pipeline();
    assert_eq!(status["problems"][0]["kind"], "rows_left_out", "{status}");
    assert_eq!(status["summary"]["severity"], "critical", "{status}");
    assert_eq!(status["summary"]["state"], "streaming", "{status}");
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} ADD TABLE tenant_2.outbox"
    ));
    walpost.wait_for_log("rows_left_out resolved");
    walpost.wait_for_log("table tenant_2.outbox was temporarily missing from publication");
    wait_until("readiness", || http.get("/readyz").code == 200);
    // A dropped table must not be reported as missing from the publication.
    fixture.db.run("DROP SCHEMA tenant_2 CASCADE");
    walpost.terminate().expect_code(0);
}

/// The table was removed from the publication before Walpost started, but the slot still sends the
/// row that was committed before the removal. Found by `./dev soak --shapes` with seed
/// 16911906047223.
fn add_outbox_does_not_send_rows_again_that_the_slot_has_already_sent(exactly_once: bool) {
    const TABLE: &str = "tenant_2.outbox";
    // The records of this pipeline contain no table names.
    let settings = "tables = [\"tenant_*.outbox\"]\n";
    let mut fixture = fixture_on(MAJOR, settings, &["tenant_1.outbox"]).in_mode(exactly_once);
    fixture.write_to(writer(&[TABLE]));
    let aggregate = fixture.aggregate(1);
    let publication = fixture.slot();
    let event = |key| writer(&[TABLE]).insert_one(Event::new(&aggregate, key, "{}"));
    fixture.db.run(&format!(
        "CREATE SCHEMA tenant_2; CREATE TABLE {TABLE} (LIKE tenant_1.outbox INCLUDING ALL);
         ALTER PUBLICATION {publication} ADD TABLE {TABLE}"
    ));
    fixture.db.run(&event("published"));
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} DROP TABLE {TABLE}"
    ));
    fixture.db.run(&event("unpublished"));
    let walpost = fixture.start();
    fixture.wait_for_records(1);
    let add = format!("SELECT walpost.add_outbox('{TABLE}', '{publication}')");
    assert_eq!(fixture.db.number(&add), 0);
    fixture.db.run(&event("after"));
    assert_eq!(keys(&fixture.wait_for_records(2)), ["published", "after"]);
    walpost.terminate().expect_code(0);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["temporarily missing from publication", TABLE]);
}

/// Prometheus parses /metrics, and users display it in a terminal, so control characters must not
/// appear in it.
#[test]
fn metrics_escape_control_characters_in_table_names() {
    let fixture = fixture_on(MAJOR, SETTINGS, &["tenant_1.outbox"]);
    let aggregate = fixture.aggregate(1);
    let table = "\"tenant_\u{1b}[2J\u{202e}\u{9b}\".outbox";
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    fixture.db.run(&format!(
        "CREATE SCHEMA \"tenant_\u{1b}[2J\u{202e}\u{9b}\"; CREATE TABLE {table} (LIKE tenant_1.outbox INCLUDING ALL);
         SELECT walpost.add_outbox('{table}', '{}')",
        fixture.slot()
    ));
    fixture
        .db
        .run(&writer(&[table]).insert_one(Event::new(&aggregate, "k", "{}")));
    let label = r#"table="\"tenant_\\u{1b}[2J\\u{202e}\\u{9b}\".outbox"} 1"#;
    let mut text = String::new();
    wait_until("the table's rows in /metrics", || {
        text = http.get("/metrics").body;
        text.contains("walpost_table_rows_total{")
    });
    assert!(text.contains(label), "{label} in {text}");
    let is_evil = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
    assert!(!text.contains(is_evil), "{text:?}");
    walpost.terminate().expect_code(0);
}

#[test]
fn migration_adds_a_table_with_all_its_rows_or_not_at_all() {
    let fixture = fixture(&["tenant_1.outbox"]);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let event = |key| writer(&["tenant_2.outbox"]).insert_one(Event::new(&aggregate, key, "{}"));
    let add = format!(
        "SELECT walpost.add_outbox('tenant_2.outbox', 'walpost_{}')",
        fixture.name
    );
    let migrate = format!(
        "BEGIN; CREATE SCHEMA tenant_2; CREATE TABLE tenant_2.outbox (LIKE tenant_1.outbox INCLUDING ALL); {} {add}; {}",
        event("before"),
        event("after")
    );
    fixture.db.run(&format!("{migrate} ROLLBACK"));
    fixture.db.run(&format!("{migrate} COMMIT"));
    // The second call of `walpost.add_outbox` returns null, because the table was already added.
    assert_eq!(fixture.db.value(&add), None);
    assert_eq!(keys(&fixture.wait_for_records(2)), ["before", "after"]);
    for (statement, word) in [
        (
            "SELECT walpost.add_outbox('tenant_1.outbox', 'nothing')",
            "nothing",
        ),
        (
            "SELECT walpost.add_outbox('pg_stat_activity', 'walpost_x')",
            "pg_stat_activity",
        ),
    ] {
        let error = fixture.db.try_run(statement).expect_err(statement);
        let message = error.as_db_error().expect(statement).message();
        assert!(message.contains(word), "{message}");
    }
    let replay = fixture.replay(&["--all", "--yes"]).finish();
    replay
        .expect_code(2)
        .expect_mentions(&["several tables", "--table SCHEMA.TABLE"]);
    let replay = fixture.replay(&["--all", "--yes", "--table", "tenant_2.outbox"]);
    replay.finish().expect_code(0);
    assert_eq!(fixture.wait_for_records(4)[3].header("tenant"), "tenant_2");
    let verify = fixture.verify().finish();
    verify
        .expect_code(2)
        .expect_mentions(&["several tables", "--table"]);
    let verify = fixture
        .verify()
        .args(["--table", "tenant_2.outbox"])
        .finish();
    verify.expect_code(0);
    walpost.terminate().expect_code(0);
}

/// Calls `walpost.add_outbox` directly, because `walpost init` would lock the table first.
#[test]
fn add_outbox_waits_for_writers_and_preserves_row_order() {
    let fixture = fixture(&["tenant_1.outbox"]);
    let aggregate = fixture.aggregate(1);
    fixture.db.run(
        "CREATE SCHEMA tenant_2;
         CREATE TABLE tenant_2.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb,
             created_at timestamptz DEFAULT clock_timestamp(), n int GENERATED ALWAYS AS IDENTITY, PRIMARY KEY (n))",
    );
    let events = writer(&["tenant_2.outbox"]);
    let event = |key| events.insert_one(Event::new(&aggregate, key, "{}"));
    for key in ["4", "3", "2"] {
        let insert = event(key);
        // Make the physical order of the rows differ from the order in which they were created.
        fixture.db.run(&format!(
            "BEGIN; {insert} UPDATE tenant_2.outbox SET created_at = '2020-01-0{key}' WHERE aggregateid = '{key}'; COMMIT"
        ));
    }
    let open = fixture.server.session(&fixture.name);
    open.run(&format!(
        "BEGIN; {} UPDATE tenant_2.outbox SET created_at = '2020-01-01' WHERE aggregateid = '1'",
        event("1")
    ));
    thread::scope(|threads| {
        let added = threads.spawn(|| {
            let session = fixture.server.session(&fixture.name);
            session.number(&format!(
                "SELECT walpost.add_outbox('tenant_2.outbox', 'walpost_{}')",
                fixture.name
            ))
        });
        wait_until("add_outbox to wait or to end", || {
            added.is_finished()
                || fixture.db.is_true(
                    "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'tenant_2.outbox'::regclass)",
                )
        });
        open.run("COMMIT");
        assert_eq!(added.join().unwrap(), 4);
    });
    fixture.db.run(&event("5"));
    let walpost = fixture.start();
    assert_eq!(
        keys(&fixture.wait_for_records(5)),
        ["1", "2", "3", "4", "5"]
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn rejects_adding_partitions_that_are_already_published() {
    let fixture = fixture(&["tenant_1.outbox"]);
    fixture.db.run(
        "CREATE SCHEMA tenant_2; CREATE TABLE tenant_2.outbox (LIKE tenant_1.outbox INCLUDING DEFAULTS) PARTITION BY LIST (type);
         CREATE TABLE tenant_2.rest PARTITION OF tenant_2.outbox DEFAULT;
         CREATE SCHEMA tenant_3; CREATE TABLE tenant_3.outbox (LIKE tenant_1.outbox INCLUDING DEFAULTS) PARTITION BY LIST (type);
         CREATE TABLE tenant_3.rest PARTITION OF tenant_3.outbox DEFAULT",
    );
    let add = |table| {
        format!(
            "SELECT walpost.add_outbox('{table}', 'walpost_{}')",
            fixture.name
        )
    };
    fixture.db.run(&add("tenant_2.outbox"));
    fixture.db.run(&add("tenant_3.rest"));
    for (table, expected) in [
        (
            "tenant_2.rest",
            "tenant_2.rest is a partition of table tenant_2.outbox",
        ),
        (
            "tenant_3.outbox",
            "partition tenant_3.rest of table tenant_3.outbox is already in publication",
        ),
    ] {
        let error = fixture.db.try_run(&add(table)).expect_err(table);
        let message = error.as_db_error().expect(table).message();
        assert!(message.contains(expected), "{message}");
    }
    // If a table has already been added, adding it again has no effect.
    assert_eq!(fixture.db.value(&add("tenant_2.outbox")), None);
}

/// Sets up the roles as described in docs/tables.md, with no other privileges.
#[test]
fn only_members_of_the_publication_owner_role_can_add_their_tables() {
    for major in [14, MAJOR, 18] {
        let fixture = fixture_on(major, SETTINGS, &["tenant_1.outbox"]);
        let aggregate = fixture.aggregate(1);
        let (name, publication) = (&fixture.name, fixture.slot());
        let [publisher, migrator, other] =
            ["publisher", "migrator", "other"].map(|role| format!("{role}_{name}"));
        let walpost_role = WalpostRole::new(&fixture, format!("walpost_{name}"));
        let role = &walpost_role.role;
        fixture.db.run(&format!(
            "CREATE ROLE {publisher} NOLOGIN; CREATE ROLE {migrator} LOGIN; CREATE ROLE {other} LOGIN;
             GRANT CREATE ON DATABASE {name} TO {publisher}, {other};
             GRANT USAGE ON SCHEMA walpost TO {publisher};
             GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO {publisher};
             GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {publisher};
             GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {publisher};
             ALTER PUBLICATION {publication} OWNER TO {publisher};
             GRANT {role} TO {publisher};
             GRANT {publisher} TO {migrator}"
        ));
        let walpost = walpost_role.commands().run().start_streaming();
        let session = |role| Session::connect(&fixture.conninfo_as(role)).unwrap();
        let migrate = |number| {
            let table = format!("tenant_{number}.outbox");
            let event = writer(&[&table]).insert_one(Event::new(&aggregate, &table, "{}"));
            format!(
                "BEGIN; CREATE SCHEMA tenant_{number};
                 CREATE TABLE {table} (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
                 {event} SELECT walpost.add_outbox('{table}', '{publication}'); COMMIT"
            )
        };
        session(&migrator).run(&migrate(2));
        assert_eq!(keys(&fixture.wait_for_records(1)), ["tenant_2.outbox"]);
        let error = session(&other).try_run(&migrate(3)).expect_err("no rights");
        let message = error.as_db_error().expect("an answer").message();
        assert!(message.contains("permission denied"), "{message}");
        fixture.db.run(&format!(
            "GRANT USAGE ON SCHEMA walpost TO {other}; GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {other};
             GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {other}"
        ));
        let error = session(&other).try_run(&migrate(3)).expect_err("no owner");
        let message = error.as_db_error().expect("an answer").message();
        assert!(
            message.contains("must be owner of publication"),
            "{message}"
        );
        // The migrator is not the owner of this table.
        let add = format!("SELECT walpost.add_outbox('tenant_4.outbox', '{publication}')");
        fixture
            .db
            .run("CREATE SCHEMA tenant_4; CREATE TABLE tenant_4.outbox (LIKE tenant_1.outbox)");
        session(&migrator).try_run(&add).expect_err("no owner");
        let init = fixture.init().args(["--table", "tenant_4.outbox"]).finish();
        let message = format!("publication {publication} belongs to role {publisher}");
        init.expect_code(3).expect_mentions(&[&message]);
        walpost.terminate().expect_code(0);
        fixture.db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO CURRENT_USER; DROP OWNED BY {publisher}, {migrator}, {other} CASCADE;
             DROP ROLE {publisher}, {migrator}, {other}"
        ));
    }
}

#[test]
fn halts_on_a_published_table_that_matches_no_configured_pattern() {
    let fixture = fixture(&["tenant_1.outbox"]);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "before");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    let before = fixture.confirmed();
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "CREATE TABLE foreign_table (id int); ALTER PUBLICATION {publication} ADD TABLE foreign_table; INSERT INTO foreign_table VALUES (1)"
    ));
    let lost = fixture.wal_position();
    let finished = walpost.finish().expect_code(3);
    finished.expect_mentions(&["halted", "public.foreign_table", "tenant_*.outbox"]);
    assert!(before <= fixture.confirmed() && fixture.confirmed() < lost);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&[
        "FAILED",
        "tables other than tenant_*.outbox",
        "public.foreign_table",
    ]);
}

#[test]
fn halts_on_a_table_whose_columns_do_not_match_the_settings() {
    let fixture = fixture(&["tenant_1.outbox", "tenant_2.outbox"]);
    fixture
        .db
        .run("ALTER TABLE tenant_2.outbox RENAME aggregateid TO other");
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&[
        "FAILED",
        "tenant_2.outbox",
        "aggregateid",
        "2 tables are in the publication",
    ]);
    let finished = fixture.run().finish().expect_code(3);
    finished.expect_mentions(&["halted", "tenant_2.outbox", "aggregateid"]);
}

#[test]
fn queries_the_columns_of_an_added_table_if_the_record_format_requires_them() {
    let settings = format!(
        "{SETTINGS}null_default = true\nkey = \"{{table.schema}}\"\npayload = \"payload\"\n"
    );
    let fixture = fixture_on(MAJOR, &settings, &["tenant_1.outbox"]);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    for number in 2..4 {
        let table = format!("tenant_{number}.outbox");
        add(
            &fixture,
            &table,
            &format!(
                "CREATE TABLE {table} (id uuid, aggregatetype text, payload text DEFAULT 'default of {number}')"
            ),
        );
        fixture.db.run(&format!(
            "INSERT INTO {table} VALUES (gen_random_uuid(), '{aggregate}', NULL)"
        ));
    }
    let records = fixture.wait_for_records(2);
    let found = records.iter().map(|record| (record.key(), record.text()));
    assert_eq!(
        found.collect::<Vec<_>>(),
        [("tenant_2", "default of 2"), ("tenant_3", "default of 3")]
    );
    let positions = records
        .iter()
        .map(|record| parse_position(record.header("walpost-position")));
    assert!(positions.is_sorted());
    walpost.terminate().expect_code(0);
}

#[test]
fn commands_that_apply_to_all_tables_reject_single_table_options() {
    let fixture = fixture(&["tenant_1.outbox"]);
    for command in ["run", "check"] {
        let refused = fixture
            .invoke(command)
            .args(["--table", "tenant_1.outbox"])
            .finish();
        refused
            .expect_code(2)
            .expect_mentions(&["--table", "all of them"]);
    }
    let refused = fixture.init().arg("--partitioned").finish();
    refused
        .expect_code(2)
        .expect_mentions(&["--partitioned", "--table"]);
}

/// Without `--table`, `init` adds every existing table that matches, just as `init --table` adds a
/// single table.
#[test]
fn init_adds_and_lists_all_matching_tables() {
    let mut fixture = Fixture::bare();
    fixture.use_settings(SETTINGS);
    fixture.write_to(writer(&["tenant_1.outbox", "tenant_2.outbox"]));
    let columns =
        "(id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)";
    fixture.db.run(&format!(
        "CREATE SCHEMA tenant_1; CREATE TABLE tenant_1.outbox {columns};
         CREATE SCHEMA tenant_2; CREATE TABLE tenant_2.outbox {columns};
         CREATE SCHEMA tenant_3; CREATE TABLE tenant_3.outbox (id uuid);
         CREATE SCHEMA other; CREATE TABLE other.outbox {columns}"
    ));
    let aggregate = fixture.aggregate(1);
    for table in ["tenant_1.outbox", "tenant_2.outbox"] {
        let event = Event::new(&aggregate, table, "{}");
        fixture.db.run(&writer(&[table]).insert_one(event));
    }
    let printed = fixture.init().arg("--print").finish().expect_code(0);
    for table in ["tenant_1.outbox", "tenant_2.outbox", "tenant_3.outbox"] {
        let line = format!("-- {table} exists and is not in the publication");
        assert!(printed.stdout.contains(&line), "{}", printed.stdout);
    }
    assert!(!printed.stdout.contains("other.outbox"));
    // If a table does not match the settings, the other tables are still added.
    let init = fixture.init().finish().expect_code(3);
    init.expect_mentions(&[
        "tenant_1.outbox",
        "tenant_2.outbox",
        "table tenant_3.outbox has no column \"aggregatetype\"",
    ]);
    let published = fixture.db.value(&format!(
        "SELECT string_agg(schemaname, ' ' ORDER BY schemaname) FROM pg_publication_tables
         WHERE pubname = '{}' AND schemaname LIKE 'tenant%'",
        fixture.slot()
    ));
    assert_eq!(published.as_deref(), Some("tenant_1 tenant_2"));
    let walpost = fixture.start();
    let records = fixture.wait_for_records(2);
    assert_eq!(keys(&records), ["tenant_1.outbox", "tenant_2.outbox"]);
    walpost.terminate().expect_code(0);
}
