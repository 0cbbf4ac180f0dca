//! A pipeline's state, last error and outages. These values change rarely, so protecting them with
//! a lock costs little.

use std::collections::VecDeque;

use crate::model::lifecycle::{ErrorKind, Failure, Omission, Outage, SnapshotStage, State};
use crate::model::statistics::Statistics;
use crate::model::time::unix_micros;
use crate::model::vitals::Vitals;

/// Maximum number of stored outages.
const OUTAGES_MAX: usize = 20;

/// Lifecycle state, which changes rarely.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    pub(crate) state: State,
    pub(crate) since_micros: u64,
    pub(crate) last_error: Option<Failure>,
    pub(crate) outages: VecDeque<Outage>,
    pub(crate) database: Option<(Vitals, u64)>,
    pub(crate) statistics: Option<Statistics>,
    pub(crate) kafka_down: Option<String>,
    pub(crate) left_out: Option<Omission>,
    pub(crate) snapshot: Option<SnapshotStage>,
}

/// A copy of the lifecycle state at one point in time.
#[derive(Clone, Debug, Default)]
pub struct LifecycleSnapshot {
    /// Current state of the pipeline.
    pub state: State,
    /// When this state was entered, in microseconds since 1970.
    pub since_micros: u64,
    pub last_error: Option<Failure>,
    /// The most recent outages, latest first.
    pub outages: Vec<Outage>,
    /// The last [`Vitals`] queried from the database, and the time of the query in microseconds
    /// since 1970.
    pub database: Option<(Vitals, u64)>,
    /// The last statistics from librdkafka.
    pub statistics: Option<Statistics>,
    /// The reason why no broker can be reached; `None` if a broker can be reached.
    pub kafka_down: Option<String>,
    /// The tables or rows of the outbox that the publication omits; `None` if nothing is omitted.
    pub left_out: Option<Omission>,
    /// The stage of the last snapshot; `None` if no snapshot has been created since this process
    /// started.
    pub snapshot: Option<SnapshotStage>,
}

impl Lifecycle {
    /// Records the start of an outage, or another failed attempt during an ongoing outage. At most
    /// two outages are ongoing at a time: one for the brokers, and one for everything else.
    pub(crate) fn record_outage(&mut self, kind: ErrorKind, reason: &str) {
        let open = |outage: &&mut Outage| {
            outage.ended_micros.is_none()
                && (outage.kind == ErrorKind::KafkaBroker) == (kind == ErrorKind::KafkaBroker)
        };
        if let Some(outage) = self.outages.iter_mut().rev().find(open) {
            outage.attempts += 1;
            outage.kind = kind;
            reason.clone_into(&mut outage.reason);
            return;
        }
        if self.outages.len() == OUTAGES_MAX {
            self.outages.pop_front();
        }
        self.outages.push_back(Outage {
            kind,
            reason: reason.to_owned(),
            began_micros: unix_micros(),
            ended_micros: None,
            attempts: 1,
        });
    }

    /// Records the end of each ongoing outage for which the predicate `which` returns true.
    pub(crate) fn end_outages(&mut self, now: u64, which: impl Fn(&&mut Outage) -> bool) {
        for outage in self.outages.iter_mut().filter(which) {
            outage.ended_micros.get_or_insert(now);
        }
    }
}
