//! A pipeline that delivers under load while a test injects faults.

use std::time::Duration;

use super::fixture::Fixture;
use super::kafka::Broker;
use super::load::Load;
use super::postgres::Server;
use super::walpost::Walpost;

/// A fixture, writers that commit events, and a Walpost process that streams them.
pub(crate) struct UnderLoad<'a> {
    pub(crate) fixture: Fixture<'a>,
    pub(crate) walpost: Walpost,
    load: Option<Load>,
    aggregates: [String; 2],
}

impl<'a> UnderLoad<'a> {
    /// Starts one stream in at-least-once mode and one in exactly-once mode, so that a single fault
    /// tests both.
    pub(crate) fn in_both_modes(server: &'a Server, broker: &'a Broker) -> [Self; 2] {
        [false, true].map(|exactly_once| {
            let fixture = Fixture::on_servers(server, broker).in_mode(exactly_once);
            let conninfo = fixture.conninfo();
            Self::start(fixture, &conninfo, &[], &[])
        })
    }

    /// Creates topics with the given settings, starts Walpost with the given connection string and
    /// flags, and starts the writers.
    pub(crate) fn start(
        fixture: Fixture<'a>,
        conninfo: &str,
        flags: &[&str],
        settings: &[(&str, &str)],
    ) -> Self {
        let aggregates = [("many", 3), ("one", 1)].map(|(name, partitions)| {
            let aggregate = format!("{}.{name}", fixture.name);
            fixture.topic(&format!("outbox.event.{aggregate}"), partitions, settings);
            aggregate
        });
        let walpost = fixture
            .with_conninfo(conninfo)
            .run()
            .args(flags)
            .start_streaming();
        let mut stream = Self {
            fixture,
            walpost,
            load: None,
            aggregates,
        };
        stream.start_load();
        stream
    }

    /// Starts the writers, for example after [`UnderLoad::stop_load`].
    pub(crate) fn start_load(&mut self) {
        let [many, one] = &self.aggregates;
        self.load = Some(
            self.fixture
                .load_with_pauses(&[many, one], Duration::from_millis(20)),
        );
    }

    /// Stops the writers.
    pub(crate) fn stop_load(&mut self) {
        if let Some(load) = self.load.take() {
            load.stop();
        }
    }

    /// Waits until this many more transactions have been committed.
    pub(crate) fn wait_for_transactions(&self, more: usize) {
        let load = self.load.as_ref().expect("running writers");
        load.wait_for_transactions(more);
    }

    /// Stops the writers and Walpost, and checks everything that was delivered. In at-least-once
    /// mode, records may be repeated once for each of the `failures`.
    fn settle(mut self, failures: usize) {
        self.stop_load();
        let resends = self.fixture.resends(failures);
        self.fixture.settle(self.walpost, &[], resends);
    }
}

/// Stops both streams, and checks the events that each of them delivered. `failures` is the number
/// of failures that the test has injected.
pub(crate) fn settle(streams: [UnderLoad; 2], failures: usize) {
    for stream in streams {
        stream.settle(failures);
    }
}

/// Waits until this many more transactions have been committed in each mode.
pub(crate) fn wait_for_transactions(streams: &[UnderLoad], more: usize) {
    for stream in streams {
        stream.wait_for_transactions(more);
    }
}
