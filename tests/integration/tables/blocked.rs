//! Calls `walpost.add_outbox` while another tenant's session holds a lock.

use super::*;

fn session_with_lock(fixture: &Fixture<'_>, statements: &str) -> Session {
    let session = fixture.server.session(&fixture.name);
    session.run(&format!(
        "SET application_name = 'tenant 1'; BEGIN; {statements}"
    ));
    session
}

fn add_second_table_sql(fixture: &Fixture<'_>) -> String {
    fixture.db.run(
        "CREATE SCHEMA tenant_2; CREATE TABLE tenant_2.outbox (LIKE tenant_1.outbox INCLUDING ALL);
         SET statement_timeout = '60s'",
    );
    let slot = fixture.slot();
    format!("SELECT walpost.add_outbox('tenant_2.outbox', '{slot}')")
}

#[test]
fn add_outbox_does_not_lock_tables_of_other_tenants() {
    for major in [14, MAJOR, 17, 18] {
        let fixture = fixture_on(major, SETTINGS, &["tenant_1.outbox"]);
        let add = add_second_table_sql(&fixture);
        let tenant = session_with_lock(
            &fixture,
            "LOCK TABLE tenant_1.outbox IN ACCESS EXCLUSIVE MODE",
        );
        assert_eq!(fixture.db.number(&add), 0, "{major}");
        assert_eq!(fixture.db.value("SHOW lock_timeout").as_deref(), Some("0"));
        tenant.run("ROLLBACK");
    }
}

#[test]
fn add_outbox_times_out_waiting_for_a_lock_and_reports_the_session_that_holds_it() {
    let fixture = fixture(&["tenant_1.outbox"]);
    let add = add_second_table_sql(&fixture);
    let publication = fixture.slot();
    let mut statements = vec![(
        "LOCK TABLE tenant_2.outbox IN ACCESS EXCLUSIVE MODE".to_owned(),
        "tenant_2.outbox".to_owned(),
    )];
    // In PostgreSQL 14, changing a publication does not lock it.
    if MAJOR >= 15 {
        statements.push((
            format!("ALTER PUBLICATION {publication} DROP TABLE tenant_1.outbox"),
            format!("publication {publication}"),
        ));
    }
    for (timeout, limit) in [("0", "10s"), ("200ms", "200ms")] {
        fixture.db.run(&format!("SET lock_timeout = '{timeout}'"));
        for (statement, object) in &statements {
            let tenant = session_with_lock(&fixture, statement);
            let pid = tenant.number("SELECT pg_backend_pid()");
            let error = fixture.db.try_run(&add).expect_err("a lock");
            let error = error.as_db_error().expect("PostgreSQL's");
            assert_eq!(error.code().code(), "55P03", "{error}");
            for part in [
                "table tenant_2.outbox was not added",
                &format!(
                    "within {limit}: PID {pid} of role postgres (application_name 'tenant 1')"
                ),
                object,
            ] {
                assert!(error.message().contains(part), "{part} in {error}");
            }
            tenant.run("ROLLBACK");
        }
    }
    assert_eq!(fixture.db.number(&add), 0);
    let timeout = fixture.db.value("SHOW lock_timeout");
    assert_eq!(timeout.as_deref(), Some("200ms"));
}
