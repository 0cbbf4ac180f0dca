//! The pipelines of the process. Each runs on its own thread and can be started, stopped and replaced while the others continue.

use std::sync::Arc;
use std::thread;

use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use super::definitions::{Changes, Defined, Known};
use super::runtime;
use crate::delivery::isolation::Batching;
use crate::delivery::stats::PipelineStats;
use crate::delivery::watermark::Deliveries;
use crate::kafka::limits::BatchLimit;
use crate::kafka::producer::KafkaSink;
use crate::kafka::seen_topics::SeenTopics;
use crate::model::exit::Exit;
use crate::model::lifecycle::{ErrorKind, State};
use crate::observe::registry::Registry;
use crate::pipeline;
use crate::pipeline::error::PipelineError;
use crate::pipeline::halt::record_halt;
use crate::pipeline::order::Order;
use crate::pipeline::recovery::Remedy;
use crate::pipeline::settings::{Delivery, PipelineSettings};
use crate::retention::maintenance;
use crate::sink::on_demand::OnDemand;
use crate::sink::stdout::StdoutSink;

/// The way in which a pipeline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Stopped,
    Halted,
    Defect,
}

/// The number of the start that ended, and how it ended.
pub(super) type EndedStart = (u64, Ended);

/// Number of pipelines that create their Kafka client at startup, so that problems with it are detected before the first
/// event. The remaining pipelines create theirs when they need it.
const EAGER_PIPELINES: usize = 10;

/// The error returned for requests that arrive during shutdown.
pub(super) const STOPPING: &str = "walpost is stopping";

/// The result of a request: what was done, or why it was refused.
pub(super) type RequestResult = Result<String, String>;

/// All pipelines.
pub(super) struct Pipelines<D> {
    all: Vec<Entry<D>>,
    registry: Arc<Registry>,
    endings: mpsc::UnboundedSender<EndedStart>,
    /// Number of pipeline starts so far.
    starts: u64,
    is_stopping: bool,
}

struct Entry<D> {
    /// The number of the pipeline's latest start. Reports from earlier starts are ignored.
    start: u64,
    settings: PipelineSettings,
    definition: D,
    source: String,
    stats: Arc<PipelineStats>,
    /// The pipeline's thread ends once this sender is dropped.
    orders: watch::Sender<Order>,
    phase: Phase,
    /// Requests that wait for the pipeline to end.
    waiting: Vec<oneshot::Sender<RequestResult>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// The pipeline is draining; then follows the given step.
    Draining(NextStep),
    /// The pipeline has ended, by itself or on request.
    Over(Ended),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextStep {
    Stop,
    Start,
    Remove,
}

impl Phase {
    /// Returns the next step for a pipeline that ended in this phase. `None` if it ended by itself, or if it halted while it
    /// was being stopped.
    fn next_step(self, ended: Ended) -> Option<NextStep> {
        match (self, ended) {
            (Self::Draining(NextStep::Stop), Ended::Halted | Ended::Defect) => None,
            // The new definition may fix the cause of a halt.
            (Self::Draining(then), _) => Some(then),
            (Self::Running | Self::Over(_), _) => None,
        }
    }

    /// Returns whether a pipeline in this phase keeps running under a new definition. `is_same` tells whether the definition
    /// is unchanged.
    fn continues(self, is_same: bool) -> bool {
        // A pipeline that was removed and added again has to be restarted.
        is_same && self != Self::Draining(NextStep::Remove)
    }
}

impl<D: PartialEq> Pipelines<D> {
    /// Creates an empty set of pipelines. Pipelines are listed in `registry`, and report to `endings` when they end.
    pub(super) fn new(registry: Arc<Registry>, endings: mpsc::UnboundedSender<EndedStart>) -> Self {
        Self {
            all: Vec::new(),
            registry,
            endings,
            starts: 0,
            is_stopping: false,
        }
    }

    /// Returns the changes that applying `next` would make.
    pub(super) fn changes(&self, next: &[Defined<D>]) -> Changes {
        let is_going = |entry: &&Entry<D>| entry.phase == Phase::Draining(NextStep::Remove);
        let stay = self.all.iter().filter(|entry| !is_going(entry));
        let now: Vec<_> = stay
            .map(|entry| Known {
                name: &entry.settings.name,
                definition: &entry.definition,
                source: &entry.source,
            })
            .collect();
        Changes::between(&now, next)
    }

    /// Starts pipelines that were added, drains those that were removed, and restarts those that have changed. The others keep
    /// running.
    pub(super) fn apply(&mut self, next: Vec<Defined<D>>) {
        let names: Vec<_> = next.iter().map(|of| of.settings.name.clone()).collect();
        for gone in 0..self.all.len() {
            let name = &self.all[gone].settings.name;
            if !names.contains(name) {
                let slot = &self.all[gone].settings.target.slot;
                if self.all[gone].phase == Phase::Draining(NextStep::Remove) {
                    continue;
                }
                warn!(
                    pipeline = name,
                    "removed from the configuration: it is stopped, and its slot {slot:?} stays, for which PostgreSQL retains WAL. \
                     Where it is not needed any more: SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
                );
                self.end_pipeline(gone, NextStep::Remove, None);
            }
        }
        self.all.retain(|entry| {
            entry.phase != Phase::Over(Ended::Stopped) || names.contains(&entry.settings.name)
        });
        for defined in next {
            let name = &defined.settings.name;
            let Some(at) = self.position(name) else {
                self.add(defined);
                continue;
            };
            let entry = &mut self.all[at];
            let is_same = entry.definition == defined.definition;
            entry.source = defined.source;
            if entry.phase.continues(is_same) {
                continue;
            }
            let (before, now) = (&entry.settings, &defined.settings);
            let slot = &before.target.slot;
            if (slot, before.postgres.describe()) != (&now.target.slot, now.postgres.describe()) {
                warn!(
                    pipeline = before.name,
                    "has another slot or database from here on: slot {slot:?} in {} stays, for which PostgreSQL retains WAL. Where \
                     it is not needed any more: SELECT pg_catalog.pg_drop_replication_slot('{slot}')",
                    before.postgres.describe()
                );
            }
            let waits_for_copy = waits_for_copy(before, now);
            (entry.settings, entry.definition) = (defined.settings, defined.definition);
            // A pipeline that was stopped by the operator stays stopped until the operator starts it.
            let then = match entry.phase {
                Phase::Over(Ended::Stopped) | Phase::Draining(NextStep::Stop) => continue,
                Phase::Running if waits_for_copy => {
                    entry.phase = Phase::Draining(NextStep::Start);
                    entry.orders.send_replace(Order::DrainAfterCopy);
                    continue;
                }
                Phase::Draining(NextStep::Start) => continue,
                _ => NextStep::Start,
            };
            self.end_pipeline(at, then, None);
        }
        let order = |entry: &Entry<D>| names.iter().position(|name| *name == entry.settings.name);
        self.all
            .sort_by_key(|entry| order(entry).unwrap_or(usize::MAX));
        self.publish();
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.all
            .iter()
            .position(|entry| entry.settings.name == name)
    }

    fn add(&mut self, defined: Defined<D>) {
        let Defined {
            settings,
            definition,
            source,
        } = defined;
        self.all.push(Entry {
            start: 0,
            stats: Arc::new(PipelineStats::new(settings.about())),
            orders: watch::Sender::new(Order::Run),
            phase: Phase::Running,
            waiting: Vec::new(),
            settings,
            definition,
            source,
        });
        self.start(self.all.len() - 1);
    }

    fn start(&mut self, at: usize) {
        self.starts += 1;
        let entry = &mut self.all[at];
        entry.settings.log_exposures();
        entry.start = self.starts;
        entry.stats = Arc::new(PipelineStats::new(entry.settings.about()));
        let (orders, receiver) = watch::channel(Order::Run);
        entry.orders = orders;
        entry.phase = Phase::Running;
        let report = Report {
            name: entry.settings.name.clone(),
            start: entry.start,
            stats: Arc::clone(&entry.stats),
            endings: self.endings.clone(),
            ending: Ended::Defect,
        };
        let is_eager = at < EAGER_PIPELINES;
        spawn(entry.settings.clone(), is_eager, receiver, report);
    }

    /// Publishes the current set of pipelines in the registry.
    fn publish(&self) {
        let stats = self.all.iter().map(|entry| Arc::clone(&entry.stats));
        self.registry.replace(stats);
    }

    /// Stops a pipeline on request. The result is sent to `waits` once it has stopped.
    pub(super) fn stop(&mut self, name: &str, waits: oneshot::Sender<RequestResult>) {
        self.handle_request(name, NextStep::Stop, waits);
    }

    /// Like [`Self::stop`], but starts the pipeline again afterwards.
    pub(super) fn restart(&mut self, name: &str, waits: oneshot::Sender<RequestResult>) {
        self.handle_request(name, NextStep::Start, waits);
    }

    /// Starts a pipeline that has halted or was stopped.
    pub(super) fn start_again(&mut self, name: &str, waits: oneshot::Sender<RequestResult>) {
        let at = self.position(name);
        if at.is_some_and(|at| self.all[at].phase == Phase::Running) {
            let _ = waits.send(Ok(format!("{name} is running already")));
            return;
        }
        self.handle_request(name, NextStep::Start, waits);
    }

    fn handle_request(
        &mut self,
        name: &str,
        then: NextStep,
        waits: oneshot::Sender<RequestResult>,
    ) {
        let found = self.position(name).filter(|&at| {
            // This pipeline is no longer in the configuration.
            self.all[at].phase != Phase::Draining(NextStep::Remove)
        });
        let refused = match found {
            _ if self.is_stopping => STOPPING.to_owned(),
            Some(at) => {
                info!(
                    pipeline = name,
                    "{} on request",
                    match then {
                        NextStep::Stop | NextStep::Remove => "stopping",
                        NextStep::Start => "starting again",
                    }
                );
                return self.end_pipeline(at, then, Some(waits));
            }
            None => format!(
                "there is no pipeline {name:?}; there are: {}",
                self.joined_names()
            ),
        };
        let _ = waits.send(Err(refused));
    }

    fn joined_names(&self) -> String {
        let names: Vec<_> = self
            .all
            .iter()
            .map(|of| of.settings.name.as_str())
            .collect();
        names.join(", ")
    }

    /// Ends the pipeline if it has not ended yet, then takes the step `then`.
    fn end_pipeline(
        &mut self,
        at: usize,
        then: NextStep,
        waits: Option<oneshot::Sender<RequestResult>>,
    ) {
        let entry = &mut self.all[at];
        entry.waiting.extend(waits);
        match entry.phase {
            Phase::Running | Phase::Draining(_) => {
                entry.phase = Phase::Draining(then);
                entry.orders.send_replace(match then {
                    NextStep::Stop => Order::Pause,
                    NextStep::Start | NextStep::Remove => Order::Drain,
                });
            }
            Phase::Over(_) => self.take_step(at, then),
        }
    }

    /// Takes the step `then` after the pipeline has ended, and answers the requests that waited for it.
    fn take_step(&mut self, at: usize, then: NextStep) {
        let entry = &mut self.all[at];
        let name = entry.settings.name.clone();
        let waiting = std::mem::take(&mut entry.waiting);
        let said = match then {
            NextStep::Stop => {
                entry.phase = Phase::Over(Ended::Stopped);
                entry.stats.entered(State::Stopped);
                format!(
                    "{name} is stopped, until it is started again or walpost is. Meanwhile PostgreSQL retains WAL for its slot \
                     {:?}",
                    entry.settings.target.slot
                )
            }
            NextStep::Start => {
                self.start(at);
                self.publish();
                format!("{name} is started; its counters begin again at 0")
            }
            NextStep::Remove => {
                // The caller removes the entry, because it may be iterating over all of them.
                entry.phase = Phase::Over(Ended::Stopped);
                format!("{name} was removed from the configuration")
            }
        };
        for waits in waiting {
            let _ = waits.send(Ok(said.clone()));
        }
    }

    /// Handles the end of a pipeline.
    pub(super) fn handle_ended(&mut self, (start, ended): EndedStart) {
        let Some(at) = self.all.iter().position(|entry| entry.start == start) else {
            return;
        };
        let entry = &mut self.all[at];
        let phase = std::mem::replace(&mut entry.phase, Phase::Over(ended));
        match phase.next_step(ended) {
            Some(NextStep::Remove) => {
                self.take_step(at, NextStep::Remove);
                self.all.remove(at);
                self.publish();
            }
            Some(then) => self.take_step(at, then),
            None if ended == Ended::Stopped => {}
            None => {
                let name = entry.settings.name.clone();
                for waits in std::mem::take(&mut entry.waiting) {
                    let why = format!("{name} has halted while it was stopped: see the log");
                    let _ = waits.send(Err(why));
                }
            }
        }
    }

    /// Drains all pipelines and prevents further starts.
    pub(super) fn drain(&mut self) {
        self.is_stopping = true;
        for entry in &mut self.all {
            if matches!(entry.phase, Phase::Running | Phase::Draining(_)) {
                entry.phase = Phase::Draining(NextStep::Stop);
                entry.orders.send_replace(Order::Drain);
            }
        }
    }

    /// Returns whether the pipelines are draining because the process is stopping.
    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Returns whether no pipeline is left that could run again. Before shutdown, a pipeline stopped by the operator counts
    /// as one that could, because it can be started again.
    pub(super) fn all_ended(&self) -> bool {
        let mut all = self.all.iter();
        match self.is_stopping {
            true => all.all(|entry| matches!(entry.phase, Phase::Over(_))),
            false => {
                !self.all.is_empty()
                    && all.all(|entry| {
                        matches!(entry.phase, Phase::Over(Ended::Halted | Ended::Defect))
                    })
            }
        }
    }

    /// Returns the outcome of the process.
    pub(super) fn exit(&self) -> Exit {
        let has = |ended| {
            let mut all = self.all.iter();
            all.any(|entry| entry.phase == Phase::Over(ended))
        };
        match () {
            () if has(Ended::Halted) => Exit::Halted,
            () if has(Ended::Defect) => Exit::Failed,
            () => Exit::Done,
        }
    }

    /// Returns the name and state of each pipeline.
    pub(super) fn list(&self) -> Vec<(String, &'static str)> {
        let at = |entry: &Entry<D>| {
            let state = entry.stats.lifecycle_snapshot().state;
            (entry.settings.name.clone(), state.name())
        };
        self.all.iter().map(at).collect()
    }
}

/// Returns whether the sink has to exist before the first record. With exactly-once delivery, the sink's first transaction
/// takes over from earlier producers.
fn needs_sink_at_once(delivery: &Delivery) -> bool {
    *delivery != Delivery::AtLeastOnce
}

/// Returns whether a copy of older rows has to finish under the definition `before`, because under `now` it would start over
/// or could not be resumed.
fn waits_for_copy(before: &PipelineSettings, now: &PipelineSettings) -> bool {
    let has_same_slot = before.target.slot == now.target.slot
        && before.postgres.describe() == now.postgres.describe();
    let is_resumed = now.delivery != Delivery::AtLeastOnce
        && before.delivery == now.delivery
        && before.target.outbox == now.target.outbox;
    has_same_slot && !is_resumed
}

/// Runs a pipeline on its own thread.
fn spawn(
    settings: PipelineSettings,
    is_eager: bool,
    orders: watch::Receiver<Order>,
    report: Report,
) {
    let name = settings.name.clone();
    let spawned = thread::Builder::new().name(name.clone()).spawn(move || {
        let mut report = report;
        let stats = Arc::clone(&report.stats);
        match run_one(&settings, is_eager, orders.clone(), Arc::clone(&stats)) {
            Ok(()) => {
                stats.entered(State::Stopped);
                report.ending = Ended::Stopped;
                drop(report);
                if *orders.borrow() == Order::Pause {
                    watch_ended(&settings, stats, orders);
                }
            }
            Err(reason) => {
                let reason = reason.message(&settings.target.commands);
                error!(pipeline = settings.name, "halted: {reason}");
                // Recorded before the report is dropped, because the process may exit after that.
                if let Ok(runtime) = runtime() {
                    runtime.block_on(record_halt(&settings, &reason));
                    runtime.shutdown_background();
                }
                report.ending = Ended::Halted;
                drop(report);
                watch_ended(&settings, stats, orders);
            }
        }
    });
    if let Err(reason) = spawned {
        error!(
            pipeline = name,
            "the pipeline's thread can't be started: {reason}"
        );
    }
}

fn run_one(
    settings: &PipelineSettings,
    is_eager: bool,
    orders: watch::Receiver<Order>,
    stats: Arc<PipelineStats>,
) -> Result<(), PipelineError> {
    let runtime = runtime().map_err(|error| PipelineError::Connection(error.into()))?;
    let result = runtime.block_on(run_into_sink(settings, is_eager, orders, stats));
    // A metadata query may still be running on one of the runtime's threads; don't wait for it.
    runtime.shutdown_background();
    result
}

/// Runs the pipeline with the sink named in its settings, and maintains its table concurrently.
async fn run_into_sink(
    settings: &PipelineSettings,
    is_eager: bool,
    orders: watch::Receiver<Order>,
    stats: Arc<PipelineStats>,
) -> Result<(), PipelineError> {
    let _maintenance = maintenance::start(settings);
    let postgres = &settings.postgres;
    match settings.producer() {
        None => {
            let make = |deliveries, _: &Batching| StdoutSink::new(deliveries);
            pipeline::run(settings, postgres, orders, stats, make).await
        }
        Some(producer) => {
            let (limit, seen) = (BatchLimit::default(), SeenTopics::default());
            let is_eager = is_eager || needs_sink_at_once(&settings.delivery);
            let make = |deliveries: Arc<Deliveries>, batching: &Batching| {
                let (producer, batching) = (&producer, batching.clone());
                let (limit, seen) = (&limit, &seen);
                let make = move || {
                    let deliveries = Arc::clone(&deliveries);
                    KafkaSink::for_pipeline(producer, &batching, limit, seen, deliveries)
                };
                Ok(match is_eager {
                    true => OnDemand::at_once(make()?),
                    false => OnDemand::later(make),
                })
            };
            pipeline::run(settings, postgres, orders, stats, make).await
        }
    }
}

/// Monitors an ended pipeline until it is started again or removed, or until the process exits, which happens when no
/// pipeline is left.
fn watch_ended(
    settings: &PipelineSettings,
    stats: Arc<PipelineStats>,
    mut orders: watch::Receiver<Order>,
) {
    match runtime() {
        Ok(runtime) => {
            runtime.block_on(async {
                let _maintenance = maintenance::start(settings);
                tokio::select! {
                    () = pipeline::watch_ended(settings, stats) => {}
                    () = async { while orders.changed().await.is_ok() {} } => {}
                }
            });
            runtime.shutdown_background();
        }
        Err(reason) => warn!(
            pipeline = settings.name,
            "the slot of the pipeline, which has ended, is not monitored: {reason}"
        ),
    }
}

/// Reports how a pipeline ended when dropped, including when its thread panics.
struct Report {
    name: String,
    start: u64,
    stats: Arc<PipelineStats>,
    endings: mpsc::UnboundedSender<EndedStart>,
    ending: Ended,
}

impl Drop for Report {
    fn drop(&mut self) {
        if thread::panicking() {
            const DEFECT: &str = "stopped by a defect in walpost; please report it";
            error!(pipeline = self.name, "{DEFECT}");
            self.stats.entered(State::Halted);
            let remedy = Remedy::Halt.describe();
            self.stats
                .failed(ErrorKind::Defect, DEFECT.to_owned(), remedy);
        }
        // Sending fails only while the process is exiting.
        let _ = self.endings.send((self.start, self.ending));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kafka::settings::CheckpointSettings;

    fn exactly_once() -> Delivery {
        Delivery::ExactlyOnce(CheckpointSettings {
            topic: "walpost-checkpoints".to_owned(),
            replication: 1,
        })
    }

    #[test]
    fn ended_pipeline_performs_the_requested_step() {
        use Ended::{Defect, Halted, Stopped};
        use NextStep::{Remove, Start, Stop};
        for (then, ended, expected) in [
            (Start, Stopped, Some(Start)),
            (Start, Halted, Some(Start)),
            (Start, Defect, Some(Start)),
            (Remove, Stopped, Some(Remove)),
            (Remove, Halted, Some(Remove)),
            (Stop, Stopped, Some(Stop)),
            // The pipeline is halted, not stopped, and counts as halted.
            (Stop, Halted, None),
            (Stop, Defect, None),
        ] {
            let found = Phase::Draining(then).next_step(ended);
            assert_eq!(found, expected, "{then:?} {ended:?}");
        }
        for ended in [Stopped, Halted, Defect] {
            assert_eq!(Phase::Running.next_step(ended), None);
        }
    }

    #[test]
    fn pipeline_that_is_added_again_while_it_is_removed_starts_again() {
        assert!(!Phase::Draining(NextStep::Remove).continues(true));
        for phase in [
            Phase::Running,
            Phase::Draining(NextStep::Start),
            Phase::Draining(NextStep::Stop),
            Phase::Over(Ended::Halted),
        ] {
            assert!(phase.continues(true), "{phase:?}");
            assert!(!phase.continues(false), "{phase:?}");
        }
    }

    /// A sink that is created with the first record could not take over from an earlier producer's transactions.
    #[test]
    fn exactly_once_has_its_sink_from_the_beginning() {
        assert!(needs_sink_at_once(&exactly_once()));
        assert!(!needs_sink_at_once(&Delivery::AtLeastOnce));
    }
}
