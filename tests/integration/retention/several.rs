//! Retention for an outbox that consists of several tables.

use std::time::Duration;

use super::{COLUMNS, is_gone, maintain, old_and_new};
use crate::support::event::{Event, Writer};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::{assert_stays, wait_until, within_a_day};

const SETTINGS: &str = "tables = [\"tenant_*.outbox\"]\nretention = \"1s\"\ndelete_rows = true\n";

/// Creates a table with a partition whose time range has passed, one without partitions, one that
/// can't be maintained, and one that is not in the publication.
fn fixture(major: u32) -> Fixture<'static> {
    within_a_day();
    let mut fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
    fixture.use_settings(SETTINGS);
    fixture.init().finish().expect_code(0);
    let tables = ["cut", "whole", "listed", "left"];
    for tenant in tables {
        let by = match tenant {
            "cut" => "PARTITION BY RANGE (created_at)",
            "listed" => "PARTITION BY LIST (created_at)",
            _ => "",
        };
        fixture.db.run(&format!(
            "CREATE SCHEMA tenant_{tenant}; CREATE TABLE tenant_{tenant}.outbox ({COLUMNS}) {by}"
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
    fixture.write_to(Writer::Tables {
        like: "tenant%".to_owned(),
        tables: tables[..3]
            .iter()
            .map(|tenant| format!("tenant_{tenant}.outbox"))
            .collect(),
    });
    fixture
}

/// Commits an event of that age.
fn insert(fixture: &Fixture, tenant: &str, aggregate: &str, age: &str) {
    let writer = Writer::Table(format!("tenant_{tenant}.outbox"));
    let insert = writer.insert_one(Event::new(aggregate, tenant, "{}"));
    let aged = insert.replace("payload)", "payload, created_at)");
    let aged = aged.replace(
        "'{}')",
        &format!("'{{}}', date_trunc('day', now(), 'UTC') - interval '{age}')"),
    );
    assert!(aged.contains("interval"), "{aged}");
    fixture.db.run(&aged);
}

fn rows(fixture: &Fixture, tenant: &str) -> i64 {
    let count = format!("SELECT count(*) FROM tenant_{tenant}.outbox");
    fixture.db.number(&count)
}

#[test]
fn each_table_is_kept_by_its_own_kind_beside_run() {
    for major in [14, MAJOR, 18] {
        let fixture = fixture(major);
        let aggregate = fixture.aggregate(1);
        for tenant in ["cut", "whole", "listed", "left"] {
            insert(&fixture, tenant, &aggregate, "2 days");
        }
        insert(&fixture, "cut", &aggregate, "0");
        // Nothing is delivered yet, so nothing is removed, however old it is, not even by the
        // command.
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
        wait_until("the old partition and row to go", || {
            // WAL written by maintenance is confirmed soon only if there is much of it.
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

/// A table that can't be examined does not affect the following tables.
#[test]
fn table_that_is_locked_keeps_no_other_from_being_kept() {
    let fixture = fixture(MAJOR);
    let aggregate = fixture.aggregate(1);
    insert(&fixture, "whole", &aggregate, "2 days");
    let holder = fixture.server.session(&fixture.name);
    holder.run("BEGIN; LOCK TABLE tenant_cut.outbox IN ACCESS EXCLUSIVE MODE");
    let mut walpost = fixture.start();
    fixture.wait_for_records(1);
    walpost.wait_for_log("maintenance failed: ");
    wait_until("the row to go", || {
        fixture.write_other_wal(1);
        rows(&fixture, "whole") == 0
    });
    holder.run("ROLLBACK");
    walpost.terminate().expect_code(0);
}

#[test]
fn one_table_of_several_is_kept_by_a_command_and_the_others_are_not() {
    let fixture = fixture(MAJOR);
    let aggregate = fixture.aggregate(1);
    insert(&fixture, "cut", &aggregate, "2 days");
    insert(&fixture, "whole", &aggregate, "2 days");
    let walpost = fixture.start_with(&["--retention", "1000h"]);
    fixture.wait_for_records(2);
    wait_until("the row to go", || {
        fixture.write_other_wal(1);
        maintain(&fixture, &["--table", "tenant_whole.outbox"]).expect_code(0);
        rows(&fixture, "whole") == 0
    });
    assert!(!is_gone(&fixture, "outbox_old"));
    walpost.terminate().expect_code(0);
}
