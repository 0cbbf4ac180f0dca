//! `walpost.add_outbox` while another tenant's session holds a lock.

use super::*;

fn locked(scene: &Scene<'_>, statements: &str) -> Session {
    let session = scene.server.session(&scene.name);
    session.run(&format!(
        "SET application_name = 'tenant 1'; BEGIN; {statements}"
    ));
    session
}

fn add_second(scene: &Scene<'_>) -> String {
    scene.db.run(
        "CREATE SCHEMA tenant_2; CREATE TABLE tenant_2.outbox (LIKE tenant_1.outbox INCLUDING ALL);
         SET statement_timeout = '60s'",
    );
    let slot = scene.slot();
    format!("SELECT walpost.add_outbox('tenant_2.outbox', '{slot}')")
}

#[test]
fn add_outbox_locks_no_table_of_another_tenant() {
    for major in [14, MAJOR, 17, 18] {
        let scene = scene_on(major, SETTINGS, &["tenant_1.outbox"]);
        let add = add_second(&scene);
        let tenant = locked(
            &scene,
            "LOCK TABLE tenant_1.outbox IN ACCESS EXCLUSIVE MODE",
        );
        assert_eq!(scene.db.number(&add), 0, "{major}");
        assert_eq!(scene.db.value("SHOW lock_timeout").as_deref(), Some("0"));
        tenant.run("ROLLBACK");
    }
}

#[test]
fn add_outbox_waits_for_a_lock_no_longer_than_its_timeout_and_names_the_session() {
    let scene = scene(&["tenant_1.outbox"]);
    let add = add_second(&scene);
    let publication = scene.slot();
    let mut statements = vec![(
        "LOCK TABLE tenant_2.outbox IN ACCESS EXCLUSIVE MODE".to_owned(),
        "tenant_2.outbox".to_owned(),
    )];
    // PostgreSQL 14 does not lock a publication.
    if MAJOR >= 15 {
        statements.push((
            format!("ALTER PUBLICATION {publication} DROP TABLE tenant_1.outbox"),
            format!("publication {publication}"),
        ));
    }
    for (timeout, limit) in [("0", "10s"), ("200ms", "200ms")] {
        scene.db.run(&format!("SET lock_timeout = '{timeout}'"));
        for (statement, object) in &statements {
            let tenant = locked(&scene, statement);
            let pid = tenant.number("SELECT pg_backend_pid()");
            let error = scene.db.try_run(&add).expect_err("a lock");
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
    assert_eq!(scene.db.number(&add), 0);
    let timeout = scene.db.value("SHOW lock_timeout");
    assert_eq!(timeout.as_deref(), Some("200ms"));
}
