//! Another session holds an exclusive lock on a table, as a migration does while it waits for
//! another lock.

use std::time::Duration;

use super::*;
use crate::support::wait::assert_stays;

/// To list the tables in a publication, PostgreSQL 17 and later lock each of them.
const TESTED_MAJORS: [u32; 4] = [14, MAJOR, 17, 18];

fn lock(fixture: &Fixture, table: &str) -> Session {
    let session = fixture.server.session(&fixture.name);
    session.run(&format!(
        "BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"
    ));
    session
}

#[test]
fn locked_table_does_not_delay_other_tables() {
    for major in TESTED_MAJORS {
        let mut fixture = fixture_on(major, SETTINGS, &["tenant_1.outbox", "tenant_2.outbox"]);
        // Add a row filter, because the server must lock the table to print the names of the
        // filter's columns.
        if major >= 15 {
            let publication = fixture.slot();
            fixture.db.run(&format!(
                "ALTER PUBLICATION {publication} SET TABLE walpost.outbox_row, tenant_1.outbox WHERE (aggregateid <> 'x'), tenant_2.outbox"
            ));
            // Changing the filter removed the table from the publication and added it again.
            // Discard the recorded state, as if the table had been added with the filter.
            fixture.db.run("DELETE FROM walpost.table_state");
        }
        fixture.write_to(writer(&["tenant_2.outbox"]));
        let aggregate = fixture.aggregate(1);
        let migration = lock(&fixture, "tenant_1.outbox");
        let mut walpost = fixture.start();
        fixture.insert(&aggregate, "k");
        fixture.wait_for_records(1);
        fixture.wait_until_confirmed();
        // Force a reconnect, because a new catalog connection inspects every object again.
        fixture.end_walsender();
        walpost.wait_for_logs("streaming", 2);
        fixture.insert(&aggregate, "k");
        fixture.wait_for_records(2);
        fixture.wait_until_confirmed();
        fixture.check().finish().expect_code(0);
        migration.run("ROLLBACK");
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn confirms_positions_while_a_partitioned_outbox_is_locked() {
    for major in TESTED_MAJORS {
        let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.db.run(
            "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb,
                 created_at timestamptz NOT NULL DEFAULT now()) PARTITION BY RANGE (created_at);
             CREATE TABLE outbox_now PARTITION OF outbox FOR VALUES FROM ('2020-01-01') TO ('2100-01-01')",
        );
        fixture.init().finish().expect_code(0);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "k");
        let migration = lock(&fixture, "outbox");
        // Keep checking for longer than the slot monitor's interval.
        assert_stays("confirmed", Duration::from_secs(7), || {
            fixture.write_other_wal(2);
            fixture.wait_until_confirmed();
            true
        });
        migration.run("ROLLBACK");
        walpost.terminate().expect_code(0);
    }
}

/// Walpost can't start streaming without the journal, but it must log the reason.
#[test]
fn logs_that_the_journal_is_locked() {
    let fixture = fixture(&["tenant_1.outbox"]);
    let holder = lock(&fixture, "walpost.journal");
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("lock timeout");
    holder.run("ROLLBACK");
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
}
