//! Rows that SELECT returns as those of the outbox, and that PostgreSQL does not send.

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::scene::Scene;
use crate::support::wait::wait_until;

#[test]
fn tables_that_inherit_from_the_outbox_are_reported_until_they_are_gone() {
    for major in MAJORS {
        let scene = Scene::on(Server::shared(major), Broker::shared());
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
