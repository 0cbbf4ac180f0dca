//! A table that causes an error is set aside, while the other tables are still delivered.

use std::thread;
use std::time::Duration;

use super::{add, fixture_on, writer};
use crate::support::event::Event;
use crate::support::fixture::Fixture;
use crate::support::load::seed;
use crate::support::postgres::MAJOR;
use crate::support::records::Record;
use crate::support::wait::wait_until;

const SETTINGS: &str = "tables = [\"tenant_*.outbox\"]\non_table_error = \"set-aside\"\nmax_row_bytes = \"64KiB\"\n\
    headers = { id = \"{id}\", tenant = \"{table.schema}\" }\n";

in_both_modes! {
    undeliverable_row_sets_aside_its_own_table_and_no_others
    resumes_delivery_of_a_set_aside_table_after_a_replay
    loses_no_event_if_killed_while_setting_aside_a_table
    loses_no_row_committed_while_a_set_aside_table_is_replayed
}

fn event(table: &str, aggregate: &str, key: &str) -> String {
    writer(&[table]).insert_one(Event::new(aggregate, key, "{}"))
}

/// Returns the keys of a tenant's records in the order of their first delivery, without duplicates.
fn keys_of(records: &[Record], tenant: &str) -> Vec<String> {
    let mut keys = Vec::new();
    for record in records
        .iter()
        .filter(|record| record.header("tenant") == tenant)
    {
        if !keys.iter().any(|key| key == record.key()) {
            keys.push(record.key().to_owned());
        }
    }
    keys
}

fn open_entries(fixture: &Fixture, tenant: &str) -> i64 {
    fixture.db.number(&format!(
        "SELECT count(*) FROM walpost.journal j WHERE action = 'set aside' AND detail ->> 'state' = 'begun'
             AND detail ->> 'table' LIKE '%{tenant}%' AND NOT EXISTS (SELECT FROM walpost.journal c
                 WHERE c.action = 'set aside' AND c.detail -> 'closes' @> to_jsonb(j.id))"
    ))
}

fn fixture(tables: &[&str], exactly_once: bool) -> Fixture<'static> {
    let fixture = fixture_on(MAJOR, SETTINGS, tables).in_mode(exactly_once);
    for table in tables {
        fixture.accept_any_name(table);
    }
    fixture
}

fn undeliverable_row_sets_aside_its_own_table_and_no_others(exactly_once: bool) {
    let fixture = fixture(&["tenant_ok.outbox"], exactly_once);
    let aggregate = fixture.aggregate(1);
    let payload = format!("\"{}\"", "x".repeat(200_000));
    let large =
        writer(&["tenant_large.outbox"]).insert_one(Event::new(&aggregate, "bad", &payload));
    let bad = |table: &str| event(table, &aggregate, "bad");
    let causes = [
        ("tenant_large", large),
        ("tenant_table", {
            let rename = "ALTER TABLE tenant_table.outbox RENAME TO old;";
            format!("{rename} {}", bad("tenant_table.old"))
        }),
        ("tenant_schema", {
            let rename = "ALTER SCHEMA tenant_schema RENAME TO old_tenant_schema;
                ALTER TABLE old_tenant_schema.outbox ADD more int;";
            format!("{rename} {}", bad("old_tenant_schema.outbox"))
        }),
        ("tenant_drop", {
            let drop = "ALTER TABLE tenant_drop.outbox DROP aggregateid;";
            format!(
                "{drop} INSERT INTO tenant_drop.outbox (id, aggregatetype, type, payload)
                     VALUES (gen_random_uuid(), '{aggregate}', 't', '{{}}');"
            )
        }),
        ("tenant_type", {
            let change = "ALTER TABLE tenant_type.outbox DROP CONSTRAINT walpost_aggregatetype_fits_topic_name,
                ALTER aggregatetype TYPE text[] USING ARRAY[aggregatetype];";
            format!(
                "{change} INSERT INTO tenant_type.outbox (id, aggregatetype, aggregateid, type, payload)
                     VALUES (gen_random_uuid(), '{{{aggregate}}}', 'bad', 't', '{{}}');"
            )
        }),
        (
            "tenant_route",
            format!(
                "ALTER TABLE tenant_route.outbox DROP CONSTRAINT walpost_aggregatetype_fits_topic_name; {}",
                event("tenant_route.outbox", "no topic", "bad")
            ),
        ),
        (
            "tenant_topic",
            event(
                "tenant_topic.outbox",
                &format!("missing_{aggregate}"),
                "bad",
            ),
        ),
    ];
    for (tenant, _) in &causes {
        add(&fixture, &format!("{tenant}.outbox"), "");
    }
    let mut walpost = fixture.start();
    for (tenant, cause) in &causes {
        let table = format!("{tenant}.outbox");
        let before = event(&table, &aggregate, "before");
        // Commit the rows in the same transaction as a row of another tenant.
        fixture.db.run(&format!(
            "BEGIN; {before} {} COMMIT",
            event("tenant_ok.outbox", &aggregate, tenant)
        ));
        fixture.db.run(&format!(
            "BEGIN; {cause} {} COMMIT",
            event("tenant_ok.outbox", &aggregate, &format!("{tenant} again"))
        ));
    }
    let is_there = |key: &str| {
        keys_of(&fixture.records(), "tenant_ok")
            .iter()
            .any(|found| found == key)
    };
    wait_until("the other table's events", || {
        is_there("tenant_topic again")
    });
    for (tenant, _) in &causes {
        assert_eq!(
            open_entries(&fixture, tenant),
            1,
            "{tenant}: {}",
            walpost.log()
        );
    }
    // Once a table has been set aside, Walpost must not deliver any later event of that table, not
    // even after a restart.
    fixture
        .db
        .run(&event("tenant_large.outbox", &aggregate, "later"));
    fixture
        .db
        .run(&event("tenant_route.outbox", &aggregate, "later"));
    fixture.kill(walpost);
    walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    walpost.wait_for_log("table tenant_large.outbox is set aside");
    fixture
        .db
        .run(&event("tenant_ok.outbox", &aggregate, "last"));
    wait_until("the last event", || is_there("last"));
    let records = fixture.records();
    for (tenant, _) in &causes {
        assert_eq!(keys_of(&records, tenant), ["before"], "{tenant}");
        assert_eq!(open_entries(&fixture, tenant), 1, "{tenant}");
    }
    let http = walpost.http();
    wait_until("the metric", || {
        http.metric("walpost_tables_set_aside", &fixture.name) == Some(7.0)
    });
    let output = http.pipeline()["summary"]["reasons"].to_string();
    assert!(
        output.contains("walpost replay --set-aside --table tenant_large.outbox"),
        "{output}"
    );
    assert_eq!(walpost.logged("halted"), 0);
    let check = fixture.check().finish();
    check.expect_mentions(&["table tenant_drop.outbox is set aside"]);
    walpost.terminate().expect_code(0);
}

/// The changes after which PostgreSQL sends a table's definition again differ between PostgreSQL
/// versions.
#[test]
fn sets_aside_a_renamed_or_altered_table_on_every_server_version() {
    for major in [14, 16, 17, 18] {
        let fixture = fixture_on(major, SETTINGS, &["tenant_ok.outbox"]);
        let aggregate = fixture.aggregate(1);
        let bad = |table: &str| event(table, &aggregate, "bad");
        // Before version 16, PostgreSQL sends a schema's new name only after a reconnect, or if the
        // table changes too.
        let more = match major < 16 {
            true => "ALTER TABLE old_tenant_schema.outbox ADD more int;",
            false => "",
        };
        let causes = [
            (
                "tenant_table",
                format!(
                    "ALTER TABLE tenant_table.outbox RENAME TO old; {}",
                    bad("tenant_table.old")
                ),
            ),
            (
                "tenant_schema",
                format!(
                    "ALTER SCHEMA tenant_schema RENAME TO old_tenant_schema; {more} {}",
                    bad("old_tenant_schema.outbox")
                ),
            ),
            (
                "tenant_drop",
                format!(
                    "ALTER TABLE tenant_drop.outbox DROP aggregateid;
                     INSERT INTO tenant_drop.outbox (id, aggregatetype, type, payload)
                         VALUES (gen_random_uuid(), '{aggregate}', 't', '{{}}');"
                ),
            ),
        ];
        for (tenant, _) in &causes {
            add(&fixture, &format!("{tenant}.outbox"), "");
        }
        let walpost = fixture.start();
        for (tenant, cause) in &causes {
            let before = event(&format!("{tenant}.outbox"), &aggregate, "before");
            fixture.db.run(&before);
            fixture.db.run(&format!(
                "BEGIN; {cause} {} COMMIT",
                event("tenant_ok.outbox", &aggregate, tenant)
            ));
        }
        wait_until("the other table's events", || {
            keys_of(&fixture.records(), "tenant_ok") == causes.each_ref().map(|(tenant, _)| *tenant)
        });
        for (tenant, _) in &causes {
            let log = walpost.log();
            assert_eq!(
                open_entries(&fixture, tenant),
                1,
                "{major}, {tenant}: {log}"
            );
        }
        // Walpost must not deliver any row of a renamed table under the table's new name.
        let records = fixture.records();
        let others = records
            .iter()
            .filter(|record| record.header("tenant") != "tenant_ok");
        let others: Vec<_> = others
            .map(|record| (record.header("tenant"), record.key()))
            .collect();
        assert_eq!(
            others,
            causes.each_ref().map(|(tenant, _)| (*tenant, "before")),
            "{major}"
        );
        walpost.terminate().expect_code(0);
    }
}

/// If the pipeline started, it would deliver new events of the set-aside table before the older
/// events that have not been delivered yet.
#[test]
fn pipeline_does_not_start_if_its_only_table_is_set_aside() {
    const TABLE: &str = "tenant_1.outbox";
    let mut fixture = fixture(&[TABLE], false);
    let aggregate = fixture.aggregate(1);
    let payload = format!("\"{}\"", "x".repeat(200_000));
    let mut walpost = fixture.start();
    fixture
        .db
        .run(&writer(&[TABLE]).insert_one(Event::new(&aggregate, "bad", &payload)));
    walpost.wait_for_log("table set aside");
    walpost.terminate().expect_code(0);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} SET TABLE {TABLE}"
    ));
    fixture.db.run(&event(TABLE, &aggregate, "later"));
    fixture.use_settings(&format!("table = '{TABLE}'\n"));
    let expected = ["table tenant_1.outbox is set aside"];
    let halted = fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    halted.expect_mentions(&["Restore the previous definition"]);
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    assert_eq!(fixture.records().len(), 0);
}

fn resumes_delivery_of_a_set_aside_table_after_a_replay(exactly_once: bool) {
    const TABLE: &str = "tenant_1.outbox";
    let fixture = fixture(&[TABLE, "tenant_ok.outbox"], exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    let insert = |table: &str, key: &str| fixture.db.run(&event(table, &aggregate, key));
    insert(TABLE, "1");
    fixture
        .db
        .run("ALTER TABLE tenant_1.outbox RENAME aggregateid TO other");
    fixture
        .db
        .run(&event(TABLE, &aggregate, "2").replace("aggregateid", "other"));
    walpost.wait_for_log("table set aside");
    fixture
        .db
        .run("ALTER TABLE tenant_1.outbox RENAME other TO aggregateid");
    insert(TABLE, "3");
    insert("tenant_ok.outbox", "ok");
    wait_until("the other table", || {
        keys_of(&fixture.records(), "tenant_ok") == ["ok"]
    });
    assert_eq!(keys_of(&fixture.records(), "tenant_1"), ["1"]);
    let replay = || fixture.replay(&["--set-aside", "--yes", "--table", TABLE]);
    replay()
        .finish()
        .expect_code(0)
        .expect_mentions(&["has resumed delivering the table"]);
    assert_eq!(open_entries(&fixture, "tenant_1"), 0);
    insert(TABLE, "4");
    wait_until("the stream", || {
        keys_of(&fixture.records(), "tenant_1").len() == 4
    });
    replay()
        .finish()
        .expect_code(2)
        .expect_mentions(&["is not set aside"]);
    // If the stream sends the skipped rows again after a crash, Walpost skips them again.
    fixture.kill(walpost);
    walpost = fixture.start();
    insert(TABLE, "5");
    wait_until("the stream", || {
        keys_of(&fixture.records(), "tenant_1").len() == 5
    });
    let records = fixture.records();
    assert_eq!(keys_of(&records, "tenant_1"), ["1", "2", "3", "4", "5"]);
    for record in records
        .iter()
        .filter(|record| record.header("tenant") == "tenant_1")
    {
        let is_replayed = record.header_names().contains(&"walpost-replay");
        let sent_again = ["2", "3"].contains(&record.key());
        assert!(
            is_replayed == sent_again || record.key() == "1" && is_replayed,
            "{record:?}"
        );
    }
    walpost.terminate().expect_code(0);
}

/// A confirmed event must either be in Kafka or belong to a table that the journal records as set
/// aside.
fn loses_no_event_if_killed_while_setting_aside_a_table(exactly_once: bool) {
    let tenants: Vec<_> = (0..6).map(|number| format!("tenant_{number}")).collect();
    let tables: Vec<_> = tenants
        .iter()
        .map(|tenant| format!("{tenant}.outbox"))
        .collect();
    let mut all: Vec<_> = tables.iter().map(String::as_str).collect();
    all.push("tenant_ok.outbox");
    let fixture = fixture(&all, exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut rng = fastrand::Rng::with_seed(seed());
    let mut expected = Vec::new();
    for (tenant, table) in tenants.iter().zip(&tables) {
        let walpost = fixture.start();
        fixture.db.run(&format!(
            "BEGIN; {} {} {} COMMIT; {}",
            event(table, &aggregate, "before"),
            event(table, "no topic", "bad"),
            event("tenant_ok.outbox", &aggregate, tenant),
            event(table, &aggregate, "later"),
        ));
        expected.push(tenant.clone());
        let written = fixture.wal_position();
        // Sleep rather than wait for a condition, so that the process is killed at a random moment.
        thread::sleep(Duration::from_millis(rng.u64(0..400)));
        fixture.kill(walpost);
        assert!(
            fixture.confirmed() < written || open_entries(&fixture, tenant) == 1,
            "{tenant} is confirmed but not recorded"
        );
    }
    let walpost = fixture.start();
    fixture
        .db
        .run(&event("tenant_ok.outbox", &aggregate, "last"));
    expected.push("last".to_owned());
    wait_until("the last event", || {
        keys_of(&fixture.records(), "tenant_ok") == expected
    });
    for tenant in &tenants {
        assert_eq!(keys_of(&fixture.records(), tenant), ["before"], "{tenant}");
        assert_eq!(open_entries(&fixture, tenant), 1, "{tenant}");
    }
    walpost.terminate().expect_code(0);
}

/// Walpost must not deliver the table from the stream again until a replay has sent every row that
/// was skipped in the stream.
fn loses_no_row_committed_while_a_set_aside_table_is_replayed(exactly_once: bool) {
    const TABLE: &str = "tenant_1.outbox";
    let fixture = fixture(&[TABLE], exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    fixture.db.run(&event(TABLE, "no topic", "bad"));
    walpost.wait_for_log("table set aside");
    fixture
        .db
        .run("DELETE FROM tenant_1.outbox WHERE aggregatetype = 'no topic'");
    let replay = || fixture.replay(&["--set-aside", "--yes", "--table", TABLE]);
    let mut keys = Vec::new();
    let mut running = replay().start();
    while running.is_running() {
        let key = keys.len().to_string();
        fixture.db.run(&event(TABLE, &aggregate, &key));
        keys.push(key);
        thread::sleep(Duration::from_millis(20));
    }
    running
        .finish()
        .expect_code(1)
        .expect_mentions(&["remains set aside"]);
    assert_eq!(open_entries(&fixture, "tenant_1"), 1);
    replay().finish().expect_code(0);
    fixture.db.run(&event(TABLE, &aggregate, "last"));
    keys.push("last".to_owned());
    wait_until("the last event", || {
        let found = keys_of(&fixture.records(), "tenant_1");
        found.last().map(String::as_str) == Some("last")
    });
    assert_eq!(keys_of(&fixture.records(), "tenant_1"), keys);
    walpost.terminate().expect_code(0);
}

/// Creates a fixture with a table that was set aside and is now being delivered again.
pub(crate) fn fixture_with_resumed_table() -> Fixture<'static> {
    let fixture = fixture(&["tenant_1.outbox"], false);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    fixture.db.run(&event("tenant_1.outbox", "no topic", "bad"));
    walpost.wait_for_log("table set aside");
    fixture.db.run("DELETE FROM tenant_1.outbox");
    fixture.db.run(&event("tenant_1.outbox", &aggregate, "1"));
    fixture
        .replay(&["--set-aside", "--yes", "--table", "tenant_1.outbox"])
        .finish()
        .expect_code(0);
    walpost.terminate().expect_code(0);
    fixture
}

#[test]
fn retention_keeps_the_rows_of_a_table_that_is_set_aside() {
    let settings = format!("{SETTINGS}retention = \"1s\"\ndelete_rows = true\n");
    let fixture = fixture_on(MAJOR, &settings, &["tenant_1.outbox"]);
    fixture.accept_any_name("tenant_1.outbox");
    let mut walpost = fixture.start();
    fixture.db.run(&event("tenant_1.outbox", "no topic", "bad"));
    walpost.wait_for_log("table set aside");
    let maintain = fixture.invoke("maintain").finish();
    maintain.expect_mentions(&[
        "nothing is removed from table tenant_1.outbox",
        "walpost replay --set-aside --table tenant_1.outbox",
    ]);
    walpost.terminate().expect_code(0);
}

/// A replay of set-aside events reads the table that has the recorded name when the replay starts.
/// By then, another table may have that name.
#[test]
fn reports_a_table_that_was_replaced_while_it_was_set_aside() {
    let fixture = fixture(&["tenant_1.outbox"], false);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    fixture.db.run(&event("tenant_1.outbox", "no topic", "bad"));
    walpost.wait_for_log("table set aside");
    fixture
        .db
        .run(&event("tenant_1.outbox", &aggregate, "aside"));
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    fixture.db.run(&format!(
        "DELETE FROM tenant_1.outbox WHERE aggregatetype = 'no topic';
         ALTER TABLE tenant_1.outbox RENAME TO former; CREATE TABLE tenant_1.outbox (LIKE tenant_1.former INCLUDING ALL);
         ALTER PUBLICATION {} ADD TABLE tenant_1.outbox",
        fixture.slot()
    ));
    let command = "walpost replay --dropped-slots --table tenant_1.former";
    let mut walpost = fixture.run().start();
    walpost.wait_for_log(command);
    walpost.wait_for_log("streaming");
    let replay = fixture.replay(&["--set-aside", "--yes", "--table", "tenant_1.outbox"]);
    replay.finish().expect_code(0);
    walpost.terminate().expect_code(0);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["events of table tenant_1.former committed", command]);
    let mut fixture = fixture;
    fixture.use_settings(&SETTINGS.replace(
        "\"tenant_*.outbox\"",
        "\"tenant_*.outbox\", \"tenant_1.former\"",
    ));
    let replay = fixture.replay(&["--dropped-slots", "--yes", "--table", "tenant_1.former"]);
    replay.finish().expect_code(0);
    assert_eq!(keys_of(&fixture.records(), "tenant_1"), ["aside"]);
}
