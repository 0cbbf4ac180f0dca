//! A database, topics and a pipeline that belong to one test.

use std::collections::HashSet;
use std::time::Duration;

use super::event::{EventWriter, Outbox};
use super::kafka::Broker;
use super::names::unique_name;
use super::oracle::Oracle;
use super::postgres::{MAJOR, Server};
use super::proxy::Proxy;
use super::session::Session;
use super::wait::poll_until;

mod commands;
mod delivery_checks;
mod events;
mod exactly_once;
mod slot;
mod topics;

pub(crate) use commands::Commands;

use topics::Topics;

/// A test's database, outbox, topics and pipeline settings. When this value is dropped, the
/// database and its slots are dropped as well.
pub(crate) struct Fixture<'a> {
    pub(crate) server: &'a Server,
    pub(crate) broker: &'a Broker,
    /// The `bootstrap.servers` that Walpost uses to connect to the broker.
    kafka: String,
    /// Name of both the database and the pipeline.
    pub(crate) name: String,
    /// A superuser session in the database.
    pub(crate) db: Session,
    /// Writes events to the outbox. The oracle observes the same outbox.
    events: EventWriter,
    oracle: Oracle,
    topics: Topics,
    /// Pipeline settings that are written to a walpost.toml for every command. If empty, commands
    /// run without a configuration file.
    settings: String,
    exactly_once: bool,
    /// IDs of events that were lost in a failover but may have been delivered to Kafka before the
    /// failover.
    lost_ids: HashSet<String>,
}

impl Fixture<'static> {
    /// Creates a fixture on the shared servers, with the outbox table, publication and slot that
    /// `walpost init` creates.
    pub(crate) fn new() -> Self {
        Self::with_outbox(Outbox::Table)
    }

    /// Like [`Fixture::new`], but with the given kind of outbox.
    pub(crate) fn with_outbox(outbox: Outbox) -> Self {
        Self::with_outbox_on(outbox, Server::shared(MAJOR), Broker::shared())
    }

    /// Creates a fixture on the shared servers, with an empty database.
    pub(crate) fn bare() -> Self {
        Self::bare_on_servers(Server::shared(MAJOR), Broker::shared())
    }

    /// Creates a fixture on the shared servers. The statement `create` creates the table, and
    /// `walpost init` creates the publication and the slot.
    pub(crate) fn with_table(create: &str) -> Self {
        let fixture = Self::bare();
        fixture.db.run(create);
        fixture.init().finish().expect_code(0);
        fixture
    }
}

impl<'a> Fixture<'a> {
    /// Like [`Fixture::new`], but on the given servers.
    pub(crate) fn on_servers(server: &'a Server, broker: &'a Broker) -> Self {
        Self::with_outbox_on(Outbox::Table, server, broker)
    }

    /// Like [`Fixture::with_outbox`], but on the given servers.
    pub(crate) fn with_outbox_on(outbox: Outbox, server: &'a Server, broker: &'a Broker) -> Self {
        let fixture = Self::bare_with(outbox, server, broker, "");
        fixture.init().finish().expect_code(0);
        fixture
    }

    /// Like [`Fixture::bare`], but on the given servers.
    pub(crate) fn bare_on_servers(server: &'a Server, broker: &'a Broker) -> Self {
        Self::bare_with(Outbox::Table, server, broker, "")
    }

    /// Like [`Fixture::bare`], but with the given kind of outbox, servers and options for CREATE
    /// DATABASE.
    pub(crate) fn bare_with(
        outbox: Outbox,
        server: &'a Server,
        broker: &'a Broker,
        options: &str,
    ) -> Self {
        let name = unique_name();
        // The file_copy strategy takes half as long as the default. It also avoids writing the
        // copied pages to WAL, which the walsenders of all tests would have to read.
        let strategy = if server.major >= 15 {
            "STRATEGY file_copy"
        } else {
            ""
        };
        server.session("postgres").run(&format!(
            "CREATE DATABASE {name} TEMPLATE template0 {strategy} {options}"
        ));
        let db = server.session(&name);
        let oracle = Oracle::new(&db, &format!("oracle_{name}"));
        let events = match outbox {
            Outbox::Table => EventWriter::Table("public.outbox".to_owned()),
            Outbox::Messages => EventWriter::Messages(format!("walpost_{name}")),
        };
        Self {
            server,
            broker,
            kafka: broker.address(),
            name,
            db,
            events,
            oracle,
            topics: Topics::default(),
            settings: String::new(),
            exactly_once: false,
            lost_ids: HashSet::new(),
        }
    }

    /// Configures Walpost to connect to the broker through a [proxy](Broker::proxy).
    pub(crate) fn behind_proxy(mut self, proxy: &Proxy) -> Self {
        self.kafka = format!("127.0.0.1:{}", proxy.port());
        self
    }

    /// Makes every command use a walpost.toml that contains these pipeline settings.
    pub(crate) fn use_settings(&mut self, settings: &str) {
        settings.clone_into(&mut self.settings);
    }

    /// Changes the outbox to which later events are written.
    pub(crate) fn write_to(&mut self, events: EventWriter) {
        self.events = events;
    }

    /// Returns the `bootstrap.servers` that Walpost uses.
    pub(crate) fn kafka(&self) -> &str {
        &self.kafka
    }

    /// Reopens the session in the database after a server restart.
    pub(crate) fn reconnect(&mut self) {
        self.db = self.server.session(&self.name);
    }

    /// Switches to a server that was promoted to primary. It lacks the events whose ids are in
    /// `lost`.
    pub(crate) fn fail_over(&mut self, to: &'a Server, lost: impl IntoIterator<Item = String>) {
        self.server = to;
        self.lost_ids.extend(lost);
        self.reconnect();
    }

    /// Switches to a different Kafka cluster.
    pub(crate) fn change_cluster(&mut self, to: &'a Broker) {
        self.broker = to;
        self.kafka = to.address();
    }

    /// Returns the superuser's connection string for the database over the Unix-domain socket.
    pub(crate) fn conninfo(&self) -> String {
        self.server.conninfo(&self.name)
    }

    /// Like [`Fixture::conninfo`], but for another role, which needs no password on the Unix-domain
    /// socket.
    pub(crate) fn conninfo_as(&self, role: &str) -> String {
        self.server.conninfo_as(role, &self.name)
    }
}

impl Drop for Fixture<'_> {
    fn drop(&mut self) {
        let Ok(session) = Session::connect(&self.server.conninfo("postgres")) else {
            return;
        };
        let name = &self.name;
        for what in [
            "pg_catalog.pg_terminate_backend(active_pid)",
            "pg_catalog.pg_drop_replication_slot(slot_name)",
        ] {
            poll_until(Duration::from_secs(5), || {
                let slots = format!("FROM pg_replication_slots WHERE database = '{name}'");
                session.try_run(&format!("SELECT {what} {slots}")).ok()
            });
        }
        let _ = session.try_run(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"));
    }
}
