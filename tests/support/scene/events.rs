//! Events that the test writes to the outbox, and what was committed.

use std::time::Duration;

use super::super::checker::Committed;
use super::super::event::{Event, Writer};
use super::super::load::{Load, Profile};
use super::super::secrets::PAYLOAD_MARK;
use super::Scene;

impl Scene<'_> {
    /// The statements that write to the outbox.
    pub(crate) fn events(&self) -> &Writer {
        &self.events
    }

    /// Commits one event with a payload that must not reach a log.
    pub(crate) fn insert(&self, aggregate: &str, key: &str) {
        self.db.run(&self.insert_sql(aggregate, key));
    }

    /// Lets a table that `init` made accept names that no topic can have, as tables of other origin do.
    pub(crate) fn accept_any_name(&self, table: &str) {
        self.db.run(&format!(
            "ALTER TABLE {table} DROP CONSTRAINT walpost_aggregatetype_fits_topic_name"
        ));
    }

    /// Lets a table that `init` made accept events of any size.
    pub(crate) fn accept_any_size(&self, table: &str) {
        self.db.run(&format!(
            "ALTER TABLE {table} DROP CONSTRAINT walpost_event_size"
        ));
    }

    /// The statement of [`Scene::insert`], for a session of the test's own.
    pub(crate) fn insert_sql(&self, aggregate: &str, key: &str) -> String {
        let payload = format!("{{\"mark\": \"{PAYLOAD_MARK}\"}}");
        self.events.one(Event::new(aggregate, key, &payload))
    }

    /// Writers on this database, events for the aggregates.
    pub(crate) fn load(&self, aggregates: &[&str]) -> Load {
        self.load_that_rests(aggregates, Duration::from_millis(20))
    }

    /// As [`Scene::load`], with rests of that length between transactions.
    pub(crate) fn load_that_rests(&self, aggregates: &[&str], rest: Duration) -> Load {
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

    /// Everything committed so far, in commit order.
    pub(crate) fn history(&self) -> Vec<Committed> {
        self.oracle.history(&self.db, &self.events)
    }
}
