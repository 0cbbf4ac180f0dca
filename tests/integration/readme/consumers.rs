//! Runs the consumers of docs/consumers.md.

use std::fs;

use super::environment::{ExampleEnvironment, Service};
use super::markdown::in_repository;
use crate::support::names::unique_name;
use crate::support::postgres::dependencies;
use crate::support::secrets::SECRET;
use crate::support::wait::wait_until;

/// A consumer that issues invoices.
pub(super) struct Consumer<'p> {
    pub(super) environment: &'p ExampleEnvironment,
    /// The text of the documentation page.
    pub(super) text: String,
    pub(super) file: &'static str,
    /// Shell commands to run before `command`, in the folder that contains the consumer's source
    /// file.
    pub(super) prepare: String,
    pub(super) command: String,
    /// Runs a statement in the consumer's database and returns its output.
    pub(super) sql: &'p dyn Fn(&str) -> String,
}

impl Consumer<'_> {
    /// Starts the consumer in a new consumer group, so that it reads from the beginning of the
    /// topic.
    fn start(&self) -> Service {
        let environment = self.environment;
        let port = environment.server.port;
        let text = environment
            .fill_in(&self.text)
            .replace("\"billing\"", &format!("\"{}\"", unique_name()))
            .replace(
                "//billing@localhost/",
                &format!("//billing:{SECRET}@localhost:{port}/"),
            )
            .replace(
                "//localhost/billing?user=billing",
                &format!("//localhost:{port}/billing?user=billing&password={SECRET}"),
            );
        fs::write(environment.etc(self.file), text).unwrap();
        let folder = environment.etc("");
        let lines = format!("cd '{}'\n{}", folder.display(), self.prepare);
        environment.start_after(&lines, &self.command)
    }

    fn count(&self, condition: &str) -> usize {
        let count = (self.sql)(&format!("SELECT count(*) FROM invoices WHERE {condition}"));
        count.trim().parse().unwrap_or_default()
    }

    fn wait_for_invoices(&self, count: usize) {
        wait_until("the invoices", || self.count("true") == count);
    }

    /// Lets the consumer read two events, then the same two events and a third, and finally the
    /// replayed events. Before the second step, deletes the invoices that the consumer has created,
    /// to show whether the consumer recognizes a repeated event by its position.
    pub(super) fn skips_duplicates(&self, insert: &dyn Fn(), replay: &dyn Fn()) {
        insert();
        insert();
        let consumer = self.start();
        self.wait_for_invoices(2);
        drop(consumer);
        (self.sql)("DELETE FROM invoices");
        insert();
        let third = self
            .environment
            .shop()
            .value("SELECT id FROM outbox ORDER BY created_at DESC LIMIT 1")
            .expect("an event");
        let _consumer = self.start();
        // The topic has only one partition, so the consumer has already skipped the first two
        // events when it reads the third.
        wait_until("the invoice of the third event", || {
            self.count(&format!("event = '{third}'")) == 1
        });
        assert_eq!(self.count("true"), 1);
        replay();
        self.wait_for_invoices(3);
    }
}

/// Creates the database in PostgreSQL that the consumer writes to.
pub(super) fn create_database(environment: &ExampleEnvironment, tables: &str) {
    let postgres = environment.server.session("postgres");
    postgres.run(&format!("CREATE ROLE billing LOGIN PASSWORD '{SECRET}'"));
    postgres.run("CREATE DATABASE billing OWNER billing");
    let billing = environment.server.session_as("billing", "billing");
    billing.run(tables);
}

pub(super) fn java() -> String {
    let library = dependencies().join("kafka/lib");
    format!(
        "java -XX:TieredStopAtLevel=1 -cp '{}/*' Billing.java",
        library.display()
    )
}

/// Compiles the program from sources that `./dev setup` has fetched.
pub(super) fn build_go() -> String {
    let (deps, repository) = (dependencies(), in_repository("tests/support/consumers"));
    let (deps, repository) = (deps.display(), repository.display());
    format!(
        "cp '{repository}/go.mod' '{repository}/go.sum' .
         export GOROOT='{deps}/go/go' GOCACHE='{deps}/go-cache' GOMODCACHE='{deps}/go-modules' GOPROXY=off GOTOOLCHAIN=local
         export GOFLAGS='-mod=readonly -modcacherw'
         '{deps}/go/go/bin/go' build -o billing ."
    )
}

pub(super) fn python() -> String {
    let library = dependencies().join("confluent-kafka");
    format!(
        "env PYTHONPATH='{}' python3 -B billing.py",
        library.display()
    )
}
