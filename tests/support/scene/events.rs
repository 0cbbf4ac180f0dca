//! Events that the test writes to the outbox, and the history of committed events.

use std::time::Duration;

use super::super::checker::Committed;
use super::super::event::{Event, Writer};
use super::super::load::{Load, Profile};
use super::super::secrets::PAYLOAD_MARK;
use super::Scene;

impl Scene<'_> {
    /// Returns the writer that builds statements for the outbox.
    pub(crate) fn events(&self) -> &Writer {
        &self.events
    }

    /// Commits one event whose payload must not appear in any log.
    pub(crate) fn insert(&self, aggregate: &str, key: &str) {
        self.db.run(&self.insert_sql(aggregate, key));
    }

    /// Removes the constraint that `init` adds to a table to reject names that are not valid in
    /// topics, because tables that Walpost did not create lack it.
    pub(crate) fn accept_any_name(&self, table: &str) {
        self.db.run(&format!(
            "ALTER TABLE {table} DROP CONSTRAINT walpost_aggregatetype_fits_topic_name"
        ));
    }

    /// Removes the limit on the event size from a table that `init` created.
    pub(crate) fn accept_any_size(&self, table: &str) {
        self.db.run(&format!(
            "ALTER TABLE {table} DROP CONSTRAINT walpost_event_size"
        ));
    }

    /// Returns the statement of [`Scene::insert`] for use in another session.
    pub(crate) fn insert_sql(&self, aggregate: &str, key: &str) -> String {
        let payload = format!("{{\"mark\": \"{PAYLOAD_MARK}\"}}");
        self.events.insert_one(Event::new(aggregate, key, &payload))
    }

    /// Starts writers on this database that write events for the given aggregates.
    pub(crate) fn load(&self, aggregates: &[&str]) -> Load {
        self.load_with_pauses(aggregates, Duration::from_millis(20))
    }

    /// Like [`Scene::load`], with the given pause between transactions.
    pub(crate) fn load_with_pauses(&self, aggregates: &[&str], rest: Duration) -> Load {
        Load::start(&Profile {
            conninfo: self.conninfo(),
            events: self.events.clone(),
            aggregates: aggregates
                .iter()
                .map(|&aggregate| aggregate.to_owned())
                .collect(),
            keys: 50,
            writers: 3,
            rest,
        })
    }

    /// Returns all events committed so far, in commit order.
    pub(crate) fn history(&self) -> Vec<Committed> {
        self.oracle.history(&self.db, &self.events)
    }
}
