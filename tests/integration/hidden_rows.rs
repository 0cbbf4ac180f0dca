//! Rows that a SELECT from the outbox returns although PostgreSQL does not publish them.

use std::thread;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::wait::wait_until;

#[test]
fn reports_tables_that_inherit_from_the_outbox_until_they_are_removed() {
    // The watchdog looks for tables that inherit from the outbox once every 30 seconds. To save
    // time, test all server versions concurrently.
    thread::scope(|scope| {
        for major in MAJORS {
            scope.spawn(move || expect_report_until_removed(major));
        }
    });
}

fn expect_report_until_removed(major: u32) {
    let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    wait_until("readiness", || http.get("/readyz").code == 200);
    fixture.check().finish().expect_code(0);
    fixture.db.run(&format!(
        "CREATE TABLE public.child () INHERITS (public.outbox);
         INSERT INTO public.child (id, aggregatetype, aggregateid, type)
             VALUES (gen_random_uuid(), '{aggregate}', 'k', 't')"
    ));
    let what = "table public.child, which inherits from public.outbox";
    let check = fixture.check().finish().expect_code(3);
    assert!(check.stdout.contains(what), "{}", check.stdout);
    let remedy = "ALTER TABLE public.child NO INHERIT public.outbox";
    assert!(check.stdout.contains(remedy), "{}", check.stdout);
    let line = walpost.wait_for_log("watchdog: a SELECT from the outbox also returns rows");
    assert!(line.contains(what), "{line}");
    assert_eq!(http.get("/readyz").code, 503);
    fixture.db.run(remedy);
    walpost.wait_for_log("rows_left_out resolved");
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

#[test]
fn reports_unlogged_partitions() {
    let fixture = Fixture::with_table(
        "CREATE TABLE public.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)
             PARTITION BY LIST (type);
         CREATE TABLE public.logged PARTITION OF public.outbox FOR VALUES IN ('a')",
    );
    fixture.check().finish().expect_code(0);
    fixture
        .db
        .run("CREATE UNLOGGED TABLE public.fast PARTITION OF public.outbox DEFAULT");
    let check = fixture.check().finish().expect_code(3);
    let what = "public.fast, an unlogged partition of public.outbox";
    assert!(check.stdout.contains(what), "{}", check.stdout);
    let remedy = "ALTER TABLE public.fast SET LOGGED";
    assert!(check.stdout.contains(remedy), "{}", check.stdout);
    fixture.db.run(remedy);
    fixture.check().finish().expect_code(0);
}

const PARENT: &str = "CREATE TABLE public.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)";
const CHILD: &str = "CREATE TABLE public.child () INHERITS (public.outbox)";
const END_INHERITANCE: &str = "ALTER TABLE public.child NO INHERIT public.outbox";

#[test]
fn init_rejects_a_table_with_an_inheritance_child() {
    for major in MAJORS {
        let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.db.run(&format!("{PARENT}; {CHILD}"));
        fixture.init().finish().expect_code(3).expect_mentions(&[
            "table public.child inherits from table public.outbox",
            END_INHERITANCE,
            "Nothing was changed",
        ]);
        let made = "SELECT count(*) FROM pg_publication";
        assert_eq!(fixture.db.number(made), 0);
        fixture.db.run(END_INHERITANCE);
        fixture.init().finish().expect_code(0);
        deliver_one(&fixture);
    }
}

fn deliver_one(fixture: &Fixture) {
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

#[test]
fn add_outbox_rejects_a_table_with_an_inheritance_child() {
    let mut fixture = Fixture::bare();
    fixture.use_settings("tables = [\"public.outbox\"]\n");
    fixture.init().finish().expect_code(0);
    fixture.db.run(&format!("{PARENT}; {CHILD}"));
    let add = format!(
        "SELECT walpost.add_outbox('public.outbox', '{}')",
        fixture.slot()
    );
    let error = fixture.db.try_run(&add).expect_err("it has a child");
    let error = error.as_db_error().expect("an answer");
    let expected = "table public.child inherits from table public.outbox";
    assert!(error.message().starts_with(expected), "{error}");
    assert!(
        error
            .hint()
            .is_some_and(|hint| hint.ends_with(END_INHERITANCE)),
        "{error:?}"
    );
    fixture
        .init()
        .finish()
        .expect_code(3)
        .expect_mentions(&[expected]);
    fixture.db.run(END_INHERITANCE);
    fixture.db.run(&add);
    deliver_one(&fixture);
}

/// The publication was changed manually and also contains the child table.
#[test]
fn each_remedy_suggested_for_a_published_child_table_restores_delivery() {
    let fixture = Fixture::with_table(PARENT);
    let publication = fixture.slot();
    let aggregate = fixture.aggregate(1);
    fixture.db.run(&format!(
        "{CHILD}; ALTER PUBLICATION {publication} SET TABLE public.outbox"
    ));
    let take_out = format!("ALTER PUBLICATION {publication} DROP TABLE ONLY public.child");
    fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&["contains tables other than public.outbox", &take_out]);
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[&take_out]);
    fixture
        .init()
        .finish()
        .expect_code(3)
        .expect_mentions(&[END_INHERITANCE]);
    fixture.db.run(&take_out);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&[END_INHERITANCE]);
    fixture.db.run(END_INHERITANCE);
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

#[test]
fn reports_a_child_table_if_only_the_parent_is_published() {
    let fixture = Fixture::with_table(PARENT);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "{CHILD}; ALTER PUBLICATION {publication} SET TABLE ONLY public.outbox"
    ));
    let what = "table public.child, which inherits from public.outbox";
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[what, END_INHERITANCE]);
    let init = fixture.init().finish().expect_code(3);
    init.expect_mentions(&[what, END_INHERITANCE]);
    let mut walpost = fixture.run().start();
    let line = walpost.wait_for_log("watchdog: a SELECT from the outbox also returns rows");
    assert!(line.contains(END_INHERITANCE), "{line}");
    fixture.db.run(END_INHERITANCE);
    walpost.wait_for_log("rows_left_out resolved");
    walpost.terminate().expect_code(0);
    deliver_one(&fixture);
}

/// FOR TABLE ONLY does not exclude partitions.
#[test]
fn delivers_rows_of_partitions_if_the_publication_uses_for_table_only() {
    for major in MAJORS {
        let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        let publication = fixture.slot();
        fixture.db.run(&format!(
            "{PARENT} PARTITION BY LIST (type); CREATE TABLE public.part PARTITION OF public.outbox DEFAULT;
             CREATE PUBLICATION {publication} FOR TABLE ONLY public.outbox
                 WITH (publish = 'insert', publish_via_partition_root = true)"
        ));
        fixture.init().finish().expect_code(0);
        deliver_one(&fixture);
    }
}
