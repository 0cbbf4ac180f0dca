//! Retention for an outbox that consists of several tables.

use std::time::Duration;

use super::{COLUMNS, is_gone, maintain, old_and_new};
use crate::support::event::{Event, EventWriter};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::{assert_stays, avoid_utc_midnight, wait_until};

const SETTINGS: &str = "tables = [\"tenant_*.outbox\"]\nretention = \"1s\"\ndelete_rows = true\n";

/// Creates four tables: one with a partition whose time range has passed, one without partitions,
/// one whose partitioning is not supported, and one that is not published.
fn fixture(major: u32) -> Fixture<'static> {
    avoid_utc_midnight();
    let mut fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
    fixture.use_settings(SETTINGS);
    fixture.init().finish().expect_code(0);
    let tables = ["cut", "whole", "listed", "left"];
    for tenant in tables {
        let partitioning = match tenant {
            "cut" => "PARTITION BY RANGE (created_at)",
            "listed" => "PARTITION BY LIST (created_at)",
            _ => "",
        };
        fixture.db.run(&format!(
            "CREATE SCHEMA tenant_{tenant}; CREATE TABLE tenant_{tenant}.outbox ({COLUMNS}) {partitioning}"
        ));
    }
    fixture.db.run(&format!(
        "CREATE TABLE tenant_listed.others PARTITION OF tenant_listed.outbox DEFAULT; {}",
        old_and_new("tenant_cut.outbox")
    ));
    for tenant in &tables[..3] {
        let table = format!("tenant_{tenant}.outbox");
        let init = fixture.init().args(["--table", &table]);
        init.finish().expect_code(0);
    }
    fixture.write_to(EventWriter::Tables {
        name_pattern: "tenant%".to_owned(),
        tables: tables[..3]
            .iter()
            .map(|tenant| format!("tenant_{tenant}.outbox"))
            .collect(),
    });
    fixture
}

/// Commits an event whose row is as old as the interval `age`.
fn insert(fixture: &Fixture, tenant: &str, aggregate: &str, age: &str) {
    let writer = EventWriter::Table(format!("tenant_{tenant}.outbox"));
    let insert = writer.insert_one(Event::new(aggregate, tenant, "{}"));
    let old_insert = insert.replace("payload)", "payload, created_at)");
    let old_insert = old_insert.replace(
        "'{}')",
        &format!("'{{}}', date_trunc('day', now(), 'UTC') - interval '{age}')"),
    );
    assert!(old_insert.contains("interval"), "{old_insert}");
    fixture.db.run(&old_insert);
}

fn rows(fixture: &Fixture, tenant: &str) -> i64 {
    let count = format!("SELECT count(*) FROM tenant_{tenant}.outbox");
    fixture.db.number(&count)
}

#[test]
fn run_maintains_each_table_according_to_its_partitioning() {
    for major in [14, MAJOR, 18] {
        let fixture = fixture(major);
        let aggregate = fixture.aggregate(1);
        for tenant in ["cut", "whole", "listed", "left"] {
            insert(&fixture, tenant, &aggregate, "2 days");
        }
        insert(&fixture, "cut", &aggregate, "0");
        // No event has been delivered yet, so `walpost maintain` must not remove any of them,
        // however old they are.
        let (old, whole) = ("outbox_old", "whole");
        assert_stays("what is not delivered", Duration::from_secs(4), || {
            let finished = maintain(&fixture, &[]);
            finished
                .expect_code(3)
                .expect_mentions(&["tenant_listed.outbox is not partitioned by range"]);
            !is_gone(&fixture, old) && rows(&fixture, whole) == 1
        });
        let mut walpost = fixture.start();
        fixture.wait_for_records(4);
        wait_until("the old partition and row to be removed", || {
            // Generate some WAL, because Walpost otherwise takes a long time to confirm the WAL
            // that maintenance generates.
            fixture.write_other_wal(1);
            is_gone(&fixture, old) && rows(&fixture, whole) == 0
        });
        walpost.wait_for_log(
            "maintenance failed: table tenant_listed.outbox is not partitioned by range",
        );
        let left = ["cut", "listed", "left"].map(|tenant| rows(&fixture, tenant));
        assert_eq!(left, [1, 1, 1], "PostgreSQL {major}");
        walpost.terminate().expect_code(0);
    }
}

/// If a table can't be inspected, the remaining tables are still maintained.
#[test]
fn locked_table_does_not_stop_maintenance_of_other_tables() {
    let fixture = fixture(MAJOR);
    let aggregate = fixture.aggregate(1);
    insert(&fixture, "whole", &aggregate, "2 days");
    let holder = fixture.server.session(&fixture.name);
    holder.run("BEGIN; LOCK TABLE tenant_cut.outbox IN ACCESS EXCLUSIVE MODE");
    let mut walpost = fixture.start();
    fixture.wait_for_records(1);
    walpost.wait_for_log("maintenance failed: ");
    wait_until("the row to be deleted", || {
        fixture.write_other_wal(1);
        rows(&fixture, "whole") == 0
    });
    holder.run("ROLLBACK");
    walpost.terminate().expect_code(0);
}

#[test]
fn maintain_command_can_be_limited_to_one_table() {
    let fixture = fixture(MAJOR);
    let aggregate = fixture.aggregate(1);
    insert(&fixture, "cut", &aggregate, "2 days");
    insert(&fixture, "whole", &aggregate, "2 days");
    let walpost = fixture.start_with(&["--retention", "1000h"]);
    fixture.wait_for_records(2);
    wait_until("the row to be deleted", || {
        fixture.write_other_wal(1);
        maintain(&fixture, &["--table", "tenant_whole.outbox"]).expect_code(0);
        rows(&fixture, "whole") == 0
    });
    assert!(!is_gone(&fixture, "outbox_old"));
    walpost.terminate().expect_code(0);
}
