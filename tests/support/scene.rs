//! A test's own database, topics and pipeline on a server and a broker.

use std::collections::HashSet;
use std::time::Duration;

use super::event::{Outbox, Writer};
use super::kafka::Broker;
use super::names::unique_name;
use super::oracle::Oracle;
use super::postgres::{MAJOR, Server};
use super::proxy::Proxy;
use super::session::Session;
use super::wait::poll_until;

mod commands;
mod events;
mod exactly_once;
mod judge;
mod slot;
mod topics;

pub(crate) use commands::Commands;

use topics::Topics;

/// Everything one test works with. The database and its slots go when dropped.
pub(crate) struct Scene<'a> {
    pub(crate) server: &'a Server,
    pub(crate) broker: &'a Broker,
    /// Where Walpost finds the broker.
    kafka: String,
    /// Name of the database and of the pipeline.
    pub(crate) name: String,
    /// A superuser session in the database.
    pub(crate) db: Session,
    /// Writes to the outbox that the oracle watches.
    events: Writer,
    oracle: Oracle,
    topics: Topics,
    /// Lines of walpost.toml for every command; none means that there is no such file.
    settings: String,
    exactly_once: bool,
    /// Events that a failover has lost: they may have been delivered.
    taken_back: HashSet<String>,
}

impl Scene<'static> {
    /// On the shared servers, with the outbox table, publication and slot that `walpost init`
    /// makes.
    pub(crate) fn new() -> Self {
        Self::of(Outbox::Table)
    }

    /// As [`Scene::new`], with the kind of outbox.
    pub(crate) fn of(outbox: Outbox) -> Self {
        Self::of_on(outbox, Server::shared(MAJOR), Broker::shared())
    }

    /// On the shared servers, with an empty database.
    pub(crate) fn bare() -> Self {
        Self::bare_on(Server::shared(MAJOR), Broker::shared())
    }

    /// On the shared servers, with a table of the test's own, for which `walpost init` has made the
    /// rest.
    pub(crate) fn with_table(create: &str) -> Self {
        let scene = Self::bare();
        scene.db.run(create);
        scene.init().finish().expect_code(0);
        scene
    }
}

impl<'a> Scene<'a> {
    /// As [`Scene::new`], on other servers.
    pub(crate) fn on(server: &'a Server, broker: &'a Broker) -> Self {
        Self::of_on(Outbox::Table, server, broker)
    }

    /// As [`Scene::of`], on other servers.
    pub(crate) fn of_on(outbox: Outbox, server: &'a Server, broker: &'a Broker) -> Self {
        let scene = Self::bare_of(outbox, server, broker, "");
        scene.init().finish().expect_code(0);
        scene
    }

    /// As [`Scene::bare`], on other servers.
    pub(crate) fn bare_on(server: &'a Server, broker: &'a Broker) -> Self {
        Self::bare_of(Outbox::Table, server, broker, "")
    }

    /// As [`Scene::bare`], with the kind of outbox, on other servers; `options` are those of CREATE
    /// DATABASE.
    pub(crate) fn bare_of(
        outbox: Outbox,
        server: &'a Server,
        broker: &'a Broker,
        options: &str,
    ) -> Self {
        let name = unique_name();
        // Half the work, and no WAL that the walsenders of all tests would read.
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
            Outbox::Table => Writer::Table("public.outbox".to_owned()),
            Outbox::Messages => Writer::Messages(format!("walpost_{name}")),
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
            taken_back: HashSet::new(),
        }
    }

    /// Has Walpost find the broker behind a [proxy](Broker::proxy).
    pub(crate) fn behind(mut self, proxy: &Proxy) -> Self {
        self.kafka = format!("127.0.0.1:{}", proxy.port());
        self
    }

    /// Has every command find these settings of the pipeline in walpost.toml.
    pub(crate) fn use_settings(&mut self, settings: &str) {
        settings.clone_into(&mut self.settings);
    }

    /// Has events written there from here on.
    pub(crate) fn write_to(&mut self, events: Writer) {
        self.events = events;
    }

    /// `bootstrap.servers` of Walpost.
    pub(crate) fn kafka(&self) -> &str {
        &self.kafka
    }

    /// Opens the session in the database again, after the server was restarted.
    pub(crate) fn reconnect(&mut self) {
        self.db = self.server.session(&self.name);
    }

    /// Has it go on with another server of the cluster, which has become the primary and lacks some
    /// events.
    pub(crate) fn fail_over(&mut self, to: &'a Server, lost: impl IntoIterator<Item = String>) {
        self.server = to;
        self.taken_back.extend(lost);
        self.reconnect();
    }

    /// Has it continue with another Kafka cluster.
    pub(crate) fn change_cluster(&mut self, to: &'a Broker) {
        self.broker = to;
        self.kafka = to.address();
    }

    /// key=value conninfo of the superuser over the unix-domain socket.
    pub(crate) fn conninfo(&self) -> String {
        self.server.conninfo(&self.name)
    }

    /// As [`Scene::conninfo`], of a role that needs no password there.
    pub(crate) fn conninfo_as(&self, role: &str) -> String {
        self.server.conninfo_as(role, &self.name)
    }
}

impl Drop for Scene<'_> {
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
