//! What becomes of a pipeline: its state, its last error, its outages. It changes seldom, so it
//! stands behind a lock.

use std::collections::VecDeque;

use crate::model::lifecycle::{ErrorKind, Failure, LeftOut, Outage, SnapshotStage, State};
use crate::model::statistics::Statistics;
use crate::model::time::unix_micros;
use crate::model::vitals::Vitals;

/// So many outages are remembered.
const OUTAGES: usize = 20;

/// What happens seldom.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    pub(crate) state: State,
    pub(crate) since_micros: u64,
    pub(crate) last_error: Option<Failure>,
    pub(crate) outages: VecDeque<Outage>,
    pub(crate) database: Option<(Vitals, u64)>,
    pub(crate) statistics: Option<Statistics>,
    pub(crate) kafka_down: Option<String>,
    pub(crate) left_out: Option<LeftOut>,
    pub(crate) snapshot: Option<SnapshotStage>,
}

/// What happens seldom, as it was at one moment.
#[derive(Clone, Debug, Default)]
pub struct LifecycleSnapshot {
    /// What the pipeline is at.
    pub state: State,
    /// Since when, in microseconds since 1970.
    pub since_micros: u64,
    pub last_error: Option<Failure>,
    /// The last outages, the latest first.
    pub outages: Vec<Outage>,
    /// What the database said last, and when.
    pub database: Option<(Vitals, u64)>,
    /// What librdkafka said last.
    pub statistics: Option<Statistics>,
    /// Why no broker can be reached.
    pub kafka_down: Option<String>,
    /// What the publication leaves out.
    pub left_out: Option<LeftOut>,
    /// The snapshot, where one was made in this process's life.
    pub snapshot: Option<SnapshotStage>,
}

impl Lifecycle {
    /// Something is away, or still is: for PostgreSQL and the producer one at a time, for the brokers
    /// another.
    pub(crate) fn note_outage(&mut self, kind: ErrorKind, reason: &str) {
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
        if self.outages.len() == OUTAGES {
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

    /// It is back.
    pub(crate) fn end_outages(&mut self, now: u64, which: impl Fn(&&mut Outage) -> bool) {
        for outage in self.outages.iter_mut().filter(which) {
            outage.ended_micros.get_or_insert(now);
        }
    }
}
