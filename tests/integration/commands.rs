//! `init`, `check`, `run --init` and the small things beside them.

use serde_json::Value;

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::scene::Scene;
use crate::support::walpost::Invocation;

/// Everything in the database that `init` could make.
fn objects(scene: &Scene) -> Vec<Vec<Option<String>>> {
    scene.db.rows(
        "SELECT 'table', c.oid::regclass::text FROM pg_class c
             WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'i')
         UNION ALL SELECT 'function', p.oid::regprocedure::text FROM pg_proc p
             WHERE pronamespace = 'public'::regnamespace
         UNION ALL SELECT 'trigger', tgname::text FROM pg_trigger
         UNION ALL SELECT 'publication', pubname::text FROM pg_publication
         UNION ALL SELECT 'slot', slot_name::text FROM pg_replication_slots
             WHERE database = current_database() AND plugin = 'pgoutput'
         ORDER BY 1, 2",
    )
}

#[test]
fn init_makes_everything_and_twice_does_no_harm() {
    for major in MAJORS {
        let scene = Scene::bare_on(Server::shared(major), Broker::shared());
        assert_eq!(objects(&scene), Vec::<Vec<_>>::new());
        scene.init().finish().expect_code(0);
        let made = objects(&scene);
        for (kind, name) in [
            ("table", "outbox"),
            ("publication", &*scene.slot()),
            ("slot", &*scene.slot()),
        ] {
            let wanted = vec![Some(kind.to_owned()), Some(name.to_owned())];
            assert!(
                made.contains(&wanted),
                "{major}: no {kind} {name} in {made:?}"
            );
        }
        let confirmed = scene.confirmed();
        scene.insert("kept", "k");
        scene.init().finish().expect_code(0);
        assert_eq!(objects(&scene), made, "{major}");
        assert_eq!(
            scene.confirmed(),
            confirmed,
            "{major}: the slot was touched"
        );
        assert_eq!(scene.db.number("SELECT count(*) FROM outbox"), 1);
        let publication = scene.db.rows(
            "SELECT pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot FROM pg_publication",
        );
        assert_eq!(
            publication[0].iter().flatten().cloned().collect::<String>(),
            "tffft"
        );
    }
}

#[test]
fn init_print_shows_sql_that_does_the_same_and_changes_nothing() {
    let scene = Scene::bare();
    let finished = scene.init().arg("--print").finish().expect_code(0);
    assert_eq!(objects(&scene), Vec::<Vec<_>>::new());
    let sql = finished.stdout;
    for part in [
        "CREATE TABLE",
        "CREATE PUBLICATION",
        "pg_create_logical_replication_slot",
        &scene.slot(),
    ] {
        assert!(sql.contains(part), "no {part} in:\n{sql}");
    }
}

#[test]
fn init_refuses_an_update_of_an_event() {
    let scene = Scene::new();
    scene.insert("a", "k");
    let refused = scene
        .db
        .try_run("UPDATE outbox SET type = 'changed'")
        .unwrap_err();
    let message = refused.as_db_error().unwrap().message().to_owned();
    assert!(
        message.contains("UPDATE") && message.contains("outbox"),
        "{message}"
    );
    let conflict = scene
        .insert_sql("a", "k")
        .replace("gen_random_uuid()", "(SELECT id FROM outbox LIMIT 1)");
    let conflict = conflict.trim_end_matches(';');
    scene
        .db
        .try_run(&format!(
            "{conflict} ON CONFLICT (id) DO UPDATE SET type = 'changed'"
        ))
        .unwrap_err();
    scene
        .db
        .run(&format!("{conflict} ON CONFLICT (id) DO NOTHING"));
}

#[test]
fn init_makes_a_role_that_is_enough_to_run() {
    let server = Server::private(MAJOR, "");
    let scene = Scene::bare_on(&server, Broker::shared());
    scene
        .invoke("init")
        .args(["--role", "connector"])
        .finish()
        .expect_code(0);
    scene
        .invoke("init")
        .args(["--role", "connector"])
        .finish()
        .expect_code(0);
    let rights = scene.db.rows(
        "SELECT rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolcanlogin FROM pg_roles WHERE rolname = 'connector'",
    );
    assert_eq!(
        rights[0].iter().flatten().cloned().collect::<String>(),
        "ffftt"
    );
    let insert = "has_table_privilege('connector', 'outbox', 'INSERT, UPDATE, DELETE')";
    assert!(!scene.db.is_true(&format!("SELECT {insert}")));

    let aggregate = scene.aggregate(1);
    let conninfo = scene.conninfo().replace("user=postgres", "user=connector");
    let kafka = scene.broker.address();
    let check = scene.invoke_as("check", &conninfo);
    check.args(["--kafka", &kafka]).finish().expect_code(0);
    let mut walpost = scene.run_as(&conninfo).start();
    walpost.wait_for_log("streaming");
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    walpost.terminate().expect_code(0);
}

#[test]
fn init_gives_up_on_a_lock_and_leaves_no_half_made_slot() {
    let server = Server::private(MAJOR, "");
    let scene = Scene::bare_on(&server, Broker::shared());
    let other = server.session(&scene.name);
    other.run("CREATE TABLE busy (); BEGIN; INSERT INTO busy DEFAULT VALUES");
    let finished = scene.init().args(["--lock-timeout", "1s"]).finish();
    finished
        .expect_code(3)
        .expect_says(&["transaction", "slot"]);
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE plugin = 'pgoutput'";
    assert_eq!(scene.db.number(slots), 0);
    other.run("COMMIT");
    scene.init().finish().expect_code(0);
    assert_eq!(scene.db.number(slots), 1);
}

#[test]
fn init_and_check_say_that_the_server_cannot_be_reached() {
    let nowhere = "host=/nowhere user=postgres dbname=postgres";
    for command in ["init", "check"] {
        let mut invocation = Invocation::new([command, "--postgres", nowhere]);
        if command == "check" {
            invocation = invocation.args(["--kafka", "127.0.0.1:9"]);
        }
        invocation
            .finish()
            .expect_code(1)
            .expect_says(&["/nowhere"]);
    }
}

#[test]
fn run_init_makes_what_is_missing_first() {
    let scene = Scene::bare();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_with(&["--init"]);
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    walpost.terminate().expect_code(0);
}

#[test]
fn check_is_content_with_what_init_made() {
    for major in MAJORS {
        let scene = Scene::on(Server::shared(major), Broker::shared());
        scene.check().finish().expect_code(0);
        let finished = scene.check().arg("--json").finish().expect_code(0);
        serde_json::from_str::<Value>(&finished.stdout).expect("one JSON document");
    }
}

#[test]
fn check_tells_everything_that_is_wrong_with_its_remedy() {
    let scene = Scene::bare();
    scene.check().finish().expect_code(3).expect_says(&[
        "public.outbox",
        "publication",
        "slot",
        "walpost init",
    ]);
    let finished = scene.check().arg("--json").finish().expect_code(3);
    let report: Value = serde_json::from_str(&finished.stdout).expect("one JSON document");
    assert!(report.to_string().contains("walpost init"), "{report}");
    assert!(objects(&scene).is_empty(), "check changes nothing");
}

#[test]
fn check_finds_a_broker_that_does_not_answer() {
    let scene = Scene::new();
    let finished = scene
        .invoke("check")
        .args(["--kafka", "127.0.0.1:9"])
        .finish();
    assert!(matches!(finished.code, Some(1 | 3)), "{finished:?}");
    finished.expect_says(&["127.0.0.1:9"]);
}

#[test]
fn completions_are_made_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let finished = Invocation::new(["completions", shell])
            .finish()
            .expect_code(0);
        assert!(finished.stdout.contains("null-payload"), "{shell}");
    }
}

#[test]
fn version_and_help_are_given() {
    let finished = Invocation::new(["--version"]).finish().expect_code(0);
    assert_eq!(
        finished.stdout.trim(),
        concat!("walpost ", env!("CARGO_PKG_VERSION"))
    );
    Invocation::new(["run", "--help"])
        .finish()
        .expect_code(0)
        .expect_says(&["--null-payload", "WALPOST_KAFKA"]);
}

#[test]
fn logs_are_json_where_that_is_asked() {
    let scene = Scene::new();
    let mut walpost = scene.run().args(["--log-format", "json"]).start();
    walpost.wait_for_log("streaming");
    let finished = walpost.terminate().expect_code(0);
    for line in finished.stderr.lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
}
