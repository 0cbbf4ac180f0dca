//! Rows that SELECT returns for the outbox but that PostgreSQL does not send.

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::scene::Scene;
use crate::support::wait::wait_until;

#[test]
fn tables_that_inherit_from_the_outbox_are_reported_until_removed() {
    for major in MAJORS {
        let scene = Scene::on_servers(Server::shared(major), Broker::shared());
        let aggregate = scene.aggregate(1);
        let mut walpost = scene.start_with(&["--http", "127.0.0.1:0"]);
        let http = walpost.http();
        wait_until("readiness", || http.get("/readyz").code == 200);
        scene.check().finish().expect_code(0);
        scene.db.run(&format!(
            "CREATE TABLE public.child () INHERITS (public.outbox);
             INSERT INTO public.child (id, aggregatetype, aggregateid, type)
                 VALUES (gen_random_uuid(), '{aggregate}', 'k', 't')"
        ));
        let what = "those of table public.child, which inherits from public.outbox";
        let check = scene.check().finish().expect_code(3);
        assert!(check.stdout.contains(what), "{}", check.stdout);
        let remedy = "ALTER TABLE public.child NO INHERIT public.outbox";
        assert!(check.stdout.contains(remedy), "{}", check.stdout);
        let line = walpost.wait_for_log("watchdog: SELECT returns rows");
        assert!(line.contains(what), "{line}");
        assert_eq!(http.get("/readyz").code, 503);
        scene.db.run(remedy);
        walpost.wait_for_log("rows_left_out resolved");
        walpost.terminate().expect_code(0);
        scene.check().finish().expect_code(0);
    }
}

#[test]
fn unlogged_partitions_are_reported() {
    let scene = Scene::with_table(
        "CREATE TABLE public.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)
             PARTITION BY LIST (type);
         CREATE TABLE public.logged PARTITION OF public.outbox FOR VALUES IN ('a')",
    );
    scene.check().finish().expect_code(0);
    scene
        .db
        .run("CREATE UNLOGGED TABLE public.fast PARTITION OF public.outbox DEFAULT");
    let check = scene.check().finish().expect_code(3);
    let what = "public.fast, an unlogged partition of public.outbox";
    assert!(check.stdout.contains(what), "{}", check.stdout);
    let remedy = "ALTER TABLE public.fast SET LOGGED";
    assert!(check.stdout.contains(remedy), "{}", check.stdout);
    scene.db.run(remedy);
    scene.check().finish().expect_code(0);
}

const PARENT: &str = "CREATE TABLE public.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)";
const CHILD: &str = "CREATE TABLE public.child () INHERITS (public.outbox)";
const END_INHERITANCE: &str = "ALTER TABLE public.child NO INHERIT public.outbox";

#[test]
fn init_refuses_a_table_that_another_one_inherits_from() {
    for major in MAJORS {
        let scene = Scene::bare_on_servers(Server::shared(major), Broker::shared());
        scene.db.run(&format!("{PARENT}; {CHILD}"));
        scene.init().finish().expect_code(3).expect_mentions(&[
            "table public.child inherits from table public.outbox",
            END_INHERITANCE,
            "Nothing was changed",
        ]);
        let made = "SELECT count(*) FROM pg_publication";
        assert_eq!(scene.db.number(made), 0);
        scene.db.run(END_INHERITANCE);
        scene.init().finish().expect_code(0);
        deliver_one(&scene);
    }
}

fn deliver_one(scene: &Scene) {
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    scene.check().finish().expect_code(0);
}

#[test]
fn add_outbox_refuses_a_table_that_another_one_inherits_from() {
    let mut scene = Scene::bare();
    scene.use_settings("tables = [\"public.outbox\"]\n");
    scene.init().finish().expect_code(0);
    scene.db.run(&format!("{PARENT}; {CHILD}"));
    let add = format!(
        "SELECT walpost.add_outbox('public.outbox', '{}')",
        scene.slot()
    );
    let error = scene.db.try_run(&add).expect_err("it has a child");
    let error = error.as_db_error().expect("an answer");
    let expected = "table public.child inherits from table public.outbox";
    assert!(error.message().starts_with(expected), "{error}");
    assert!(
        error
            .hint()
            .is_some_and(|hint| hint.ends_with(END_INHERITANCE)),
        "{error:?}"
    );
    scene
        .init()
        .finish()
        .expect_code(3)
        .expect_mentions(&[expected]);
    scene.db.run(END_INHERITANCE);
    scene.db.run(&add);
    deliver_one(&scene);
}

/// The publication was created manually, and also contains the child table.
#[test]
fn each_remedy_for_a_publication_with_a_child_leads_to_the_next_and_to_delivery() {
    let scene = Scene::with_table(PARENT);
    let publication = scene.slot();
    let aggregate = scene.aggregate(1);
    scene.db.run(&format!(
        "{CHILD}; ALTER PUBLICATION {publication} SET TABLE public.outbox"
    ));
    let take_out = format!("ALTER PUBLICATION {publication} DROP TABLE ONLY public.child");
    scene
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&["contains other tables than public.outbox", &take_out]);
    scene
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[&take_out]);
    scene
        .init()
        .finish()
        .expect_code(3)
        .expect_mentions(&[END_INHERITANCE]);
    scene.db.run(&take_out);
    let check = scene.check().finish().expect_code(3);
    check.expect_mentions(&[END_INHERITANCE]);
    scene.db.run(END_INHERITANCE);
    scene.init().finish().expect_code(0);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    scene.check().finish().expect_code(0);
}

#[test]
fn publication_of_only_the_parent_is_reported() {
    let scene = Scene::with_table(PARENT);
    let publication = scene.slot();
    scene.db.run(&format!(
        "{CHILD}; ALTER PUBLICATION {publication} SET TABLE ONLY public.outbox"
    ));
    let what = "those of table public.child, which inherits from public.outbox";
    scene
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[what, END_INHERITANCE]);
    let init = scene.init().finish().expect_code(3);
    init.expect_mentions(&[what, END_INHERITANCE]);
    let mut walpost = scene.run().start();
    let line = walpost.wait_for_log("watchdog: SELECT returns rows");
    assert!(line.contains(END_INHERITANCE), "{line}");
    scene.db.run(END_INHERITANCE);
    walpost.wait_for_log("rows_left_out resolved");
    walpost.terminate().expect_code(0);
    deliver_one(&scene);
}

/// FOR TABLE ONLY does not exclude partitions.
#[test]
fn publication_of_only_a_partitioned_table_delivers_its_partitions() {
    for major in MAJORS {
        let scene = Scene::bare_on_servers(Server::shared(major), Broker::shared());
        let publication = scene.slot();
        scene.db.run(&format!(
            "{PARENT} PARTITION BY LIST (type); CREATE TABLE public.part PARTITION OF public.outbox DEFAULT;
             CREATE PUBLICATION {publication} FOR TABLE ONLY public.outbox
                 WITH (publish = 'insert', publish_via_partition_root = true)"
        ));
        scene.init().finish().expect_code(0);
        deliver_one(&scene);
    }
}
