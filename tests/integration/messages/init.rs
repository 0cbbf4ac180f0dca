//! The objects that `walpost init` creates for a message outbox, and the errors that `run` and
//! `check` report if they are missing.

use std::fs;

use super::message_fixture;
use crate::init::psql;
use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::reaper;

#[test]
fn init_creates_functions_and_an_empty_publication_on_every_version() {
    for major in MAJORS {
        let fixture =
            Fixture::with_outbox_on(Outbox::Messages, Server::shared(major), Broker::shared());
        fixture.init().finish().expect_code(0);
        let functions = "SELECT count(*) FROM pg_proc WHERE pronamespace = 'walpost'::regnamespace";
        assert_eq!(fixture.db.number(functions), 3, "{major}");
        let tables = "SELECT count(*) FROM pg_publication_tables";
        assert_eq!(fixture.db.number(tables), 0, "{major}");
        let relations = "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace";
        assert_eq!(fixture.db.number(relations), 0, "{major}: no table");
        fixture
            .check()
            .finish()
            .expect_code(0)
            .expect_mentions(&["walpost.publish exists", "exist and are consistent"]);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start();
        fixture.insert(&aggregate, "k");
        fixture.settle(walpost, &[], Resends::Never);
    }
}

#[test]
fn init_with_the_print_flag_prints_equivalent_sql_without_changing_the_database() {
    let fixture = Fixture::bare_with(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        "",
    );
    let finished = fixture.init().arg("--print").finish().expect_code(0);
    assert!(
        !fixture
            .db
            .is_true("SELECT to_regnamespace('walpost') IS NOT NULL")
    );
    let file = reaper::folder("printed").join("init.sql");
    fs::write(&file, finished.stdout).unwrap();
    psql(&fixture, &file);
    fixture.check().finish().expect_code(0);
}

#[test]
fn halts_if_the_publication_contains_tables() {
    let fixture = message_fixture();
    let publication = fixture.slot();
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "CREATE TABLE intruder (id int); ALTER PUBLICATION {publication} ADD TABLE intruder;
         INSERT INTO intruder VALUES (1)"
    ));
    walpost.finish().expect_code(3).expect_mentions(&[
        "halted",
        "public.intruder",
        "DROP TABLE ONLY public.intruder",
    ]);
    fixture.run().finish().expect_code(3).expect_mentions(&[
        &publication,
        "public.intruder",
        "walpost init --outbox messages",
    ]);
    let finished = fixture.init().finish().expect_code(3);
    finished.expect_mentions(&["contains tables"]);
}

#[test]
fn suggests_the_command_that_creates_missing_objects() {
    let fixture = Fixture::bare_with(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        "",
    );
    let finished = fixture.check().finish().expect_code(3);
    finished.expect_mentions(&[
        "walpost init --outbox messages --publication",
        "walpost init --outbox messages --slot",
        "walpost.publish does not exist",
    ]);
    let finished = fixture.run().finish().expect_code(3);
    finished.expect_mentions(&["halted", "walpost init --outbox messages --publication"]);
}

#[test]
fn run_with_the_init_flag_creates_missing_objects_first() {
    let fixture = Fixture::bare_with(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        "",
    );
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&["--init"]);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    walpost.terminate().expect_code(0);
}

#[test]
fn check_warns_about_a_sql_ascii_database() {
    let ascii = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'";
    let fixture = Fixture::bare_with(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        ascii,
    );
    fixture.init().finish().expect_code(0);
    let output = fixture.check().finish().expect_code(0);
    output.expect_mentions(&["warning", "SQL_ASCII", "does not validate text"]);
    let output = message_fixture().check().finish().expect_code(0).stdout;
    assert!(!output.contains("SQL_ASCII"), "{output}");
}
