//! Manages the pipelines of the process. Each pipeline runs on its own thread, and can be started,
//! stopped and replaced without affecting other pipelines.

use std::sync::Arc;
use std::thread;

use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use super::definitions::{Changes, Defined, Known, SuspectRemoval, postpone_doubtful};
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
use crate::postgres::catalog::slot_owner::DefinedBy;
use crate::retention::maintenance;
use crate::sink::on_demand::OnDemand;
use crate::sink::stdout::StdoutSink;

/// How a pipeline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndCause {
    Stopped,
    Halted,
    Defect,
}

/// The number that a pipeline was assigned when it was started, and how it ended.
pub(super) type EndedStart = (u64, EndCause);

/// Number of pipelines that create their Kafka client at startup, so that problems with the client
/// are detected before the first event. The other pipelines create their clients only when they
/// need them, which saves threads.
const EAGER_PIPELINES: usize = 10;

/// The error returned for requests that arrive during shutdown.
pub(super) const STOPPING: &str = "Walpost is stopping";

/// The result of a request: a description of the completed action, or the reason the request was
/// rejected.
pub(super) type RequestResult = Result<String, String>;

/// All pipelines of the process, including those that have ended.
pub(super) struct Pipelines<D> {
    all: Vec<Entry<D>>,
    registry: Arc<Registry>,
    ended_tx: mpsc::UnboundedSender<EndedStart>,
    /// Total number of pipeline starts, including restarts.
    starts: u64,
    is_stopping: bool,
}

struct Entry<D> {
    /// The number of the pipeline's most recent start. Reports from earlier starts are ignored.
    start: u64,
    settings: PipelineSettings,
    definition: D,
    source: String,
    stats: Arc<PipelineStats>,
    /// The pipeline's thread ends once this sender is dropped.
    orders: watch::Sender<Order>,
    phase: Phase,
    /// Requests that are waiting for the pipeline to end.
    waiting: Vec<oneshot::Sender<RequestResult>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// The pipeline is draining. Once the pipeline has ended, the contained [`NextStep`] is
    /// performed.
    Draining(NextStep),
    /// The pipeline has ended, on its own or on request.
    Ended(EndCause),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextStep {
    Stop,
    Start,
    Remove,
}

impl Phase {
    /// Returns the step to perform for a pipeline that ended in this phase. Returns `None` if the
    /// pipeline ended on its own, or halted while it was being stopped.
    fn next_step(self, ended: EndCause) -> Option<NextStep> {
        match (self, ended) {
            (Self::Draining(NextStep::Stop), EndCause::Halted | EndCause::Defect) => None,
            // Perform the step even if the pipeline halted, because a new definition may fix the
            // cause.
            (Self::Draining(then), _) => Some(then),
            (Self::Running | Self::Ended(_), _) => None,
        }
    }

    /// Returns whether a pipeline in this phase keeps running after a reload. `is_same` indicates
    /// whether its definition is unchanged.
    fn continues(self, is_same: bool) -> bool {
        // If a pipeline is added again while it is being removed, it must be restarted.
        is_same && self != Self::Draining(NextStep::Remove)
    }
}

impl<D: PartialEq> Pipelines<D> {
    /// Creates an empty set of pipelines. Pipelines added later are listed in `registry`, and
    /// report to `ended_tx` when they end.
    pub(super) fn new(
        registry: Arc<Registry>,
        ended_tx: mpsc::UnboundedSender<EndedStart>,
    ) -> Self {
        Self {
            all: Vec::new(),
            registry,
            ended_tx,
            starts: 0,
            is_stopping: false,
        }
    }

    /// Returns the changes that [`Self::apply`] would make.
    pub(super) fn changes(&self, next: &[Defined<D>]) -> Changes {
        Changes::between(&self.known(), next)
    }

    /// Removes the pipelines of the sources in `doubtful` from `next`. Returns the names of the
    /// pipelines that must be kept instead, and the remaining changes. Returns `None` if there are
    /// no remaining changes, or if the kept pipelines can't run together with the pipelines that
    /// remain in `next`.
    pub(super) fn postpone_doubtful(
        &self,
        next: &mut Vec<Defined<D>>,
        doubtful: &[SuspectRemoval],
    ) -> Option<(Vec<String>, Changes)> {
        let known = self.known();
        let kept = postpone_doubtful(&known, next, doubtful)?;
        let is_kept = |name: &String| kept.contains(name);
        let others = known.into_iter();
        let others: Vec<_> = others
            .filter(|known| !is_kept(&known.settings.name))
            .collect();
        let mut changes = Changes::between(&others, next);
        changes.unchanged += kept.len();
        (!changes.is_empty()).then_some((kept, changes))
    }

    /// Returns all pipelines, except those that are being removed.
    fn known(&self) -> Vec<Known<'_, D>> {
        let is_removed = |entry: &&Entry<D>| entry.phase == Phase::Draining(NextStep::Remove);
        let remaining = self.all.iter().filter(|entry| !is_removed(entry));
        remaining
            .map(|entry| Known {
                settings: &entry.settings,
                definition: &entry.definition,
                source: &entry.source,
            })
            .collect()
    }

    /// Starts added pipelines, drains removed pipelines, and restarts changed pipelines. Unchanged
    /// pipelines keep running, as do the pipelines in `kept`, which must not be in `next`.
    pub(super) fn apply(&mut self, next: Vec<Defined<D>>, kept: Vec<String>) {
        let mut names: Vec<_> = next
            .iter()
            .map(|defined| defined.settings.name.clone())
            .collect();
        names.extend(kept);
        for index in 0..self.all.len() {
            let name = &self.all[index].settings.name;
            if !names.contains(name) {
                let settings = &self.all[index].settings;
                if self.all[index].phase == Phase::Draining(NextStep::Remove) {
                    continue;
                }
                warn!(
                    pipeline = name,
                    "the pipeline was removed from the configuration and is being stopped. {}",
                    describe_kept_slot(settings)
                );
                self.end_pipeline(index, NextStep::Remove, None);
            }
        }
        self.all.retain(|entry| {
            entry.phase != Phase::Ended(EndCause::Stopped) || names.contains(&entry.settings.name)
        });
        for defined in next {
            let name = &defined.settings.name;
            let Some(index) = self.position(name) else {
                self.add(defined);
                continue;
            };
            let entry = &mut self.all[index];
            let is_same = entry.definition == defined.definition;
            entry.source = defined.source;
            if entry.phase.continues(is_same) {
                continue;
            }
            let (before, now) = (&entry.settings, &defined.settings);
            let (former, next) = (&before.target.slot, &now.target.slot);
            if (former, before.postgres.describe()) != (next, now.postgres.describe()) {
                warn!(
                    pipeline = before.name,
                    "the pipeline now uses a different slot or database. {}",
                    describe_kept_slot(before)
                );
            }
            let waits_for_copy = waits_for_copy(before, now);
            (entry.settings, entry.definition) = (defined.settings, defined.definition);
            // A pipeline that the operator has stopped remains stopped until the operator starts
            // it.
            let then = match entry.phase {
                Phase::Ended(EndCause::Stopped) | Phase::Draining(NextStep::Stop) => continue,
                Phase::Running if waits_for_copy => {
                    entry.phase = Phase::Draining(NextStep::Start);
                    entry.orders.send_replace(Order::DrainAfterCopy);
                    continue;
                }
                Phase::Draining(NextStep::Start) => continue,
                _ => NextStep::Start,
            };
            self.end_pipeline(index, then, None);
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

    fn start(&mut self, index: usize) {
        self.starts += 1;
        let entry = &mut self.all[index];
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
            ended_tx: self.ended_tx.clone(),
            ended: EndCause::Defect,
        };
        let is_eager = index < EAGER_PIPELINES;
        spawn(entry.settings.clone(), is_eager, receiver, report);
    }

    /// Publishes the current set of pipelines in the registry.
    fn publish(&self) {
        let stats = self.all.iter().map(|entry| Arc::clone(&entry.stats));
        self.registry.replace(stats);
    }

    /// Stops a pipeline on request. Sends the result to `result_tx` once the pipeline has stopped.
    pub(super) fn stop(&mut self, name: &str, result_tx: oneshot::Sender<RequestResult>) {
        self.handle_request(name, NextStep::Stop, result_tx);
    }

    /// Stops a pipeline like [`Self::stop`], and then starts it again.
    pub(super) fn restart(&mut self, name: &str, result_tx: oneshot::Sender<RequestResult>) {
        self.handle_request(name, NextStep::Start, result_tx);
    }

    /// Starts a pipeline that has halted or was stopped.
    pub(super) fn start_again(&mut self, name: &str, result_tx: oneshot::Sender<RequestResult>) {
        let index = self.position(name);
        if index.is_some_and(|index| self.all[index].phase == Phase::Running) {
            let _ = result_tx.send(Ok(format!("{name} is already running")));
            return;
        }
        self.handle_request(name, NextStep::Start, result_tx);
    }

    fn handle_request(
        &mut self,
        name: &str,
        then: NextStep,
        result_tx: oneshot::Sender<RequestResult>,
    ) {
        let found = self.position(name).filter(|&index| {
            // Ignore a pipeline that is being removed: it is no longer in the configuration.
            self.all[index].phase != Phase::Draining(NextStep::Remove)
        });
        let refused = match found {
            _ if self.is_stopping => STOPPING.to_owned(),
            Some(index) => {
                info!(
                    pipeline = name,
                    "{} on request",
                    match then {
                        NextStep::Stop | NextStep::Remove => "stopping",
                        NextStep::Start => "restarting",
                    }
                );
                return self.end_pipeline(index, then, Some(result_tx));
            }
            None => format!(
                "pipeline {name:?} does not exist; available pipelines: {}",
                self.joined_names()
            ),
        };
        let _ = result_tx.send(Err(refused));
    }

    fn joined_names(&self) -> String {
        let names: Vec<_> = self
            .all
            .iter()
            .map(|entry| entry.settings.name.as_str())
            .collect();
        names.join(", ")
    }

    /// Drains the pipeline if it has not ended yet, and performs the step `then` once the pipeline
    /// has ended.
    fn end_pipeline(
        &mut self,
        index: usize,
        then: NextStep,
        result_tx: Option<oneshot::Sender<RequestResult>>,
    ) {
        let entry = &mut self.all[index];
        entry.waiting.extend(result_tx);
        match entry.phase {
            Phase::Running | Phase::Draining(_) => {
                entry.phase = Phase::Draining(then);
                entry.orders.send_replace(match then {
                    NextStep::Stop => Order::Pause,
                    NextStep::Start | NextStep::Remove => Order::Drain,
                });
            }
            Phase::Ended(_) => self.perform_step(index, then),
        }
    }

    /// Performs the step `then` for a pipeline that has ended, and sends the result to waiting
    /// requests.
    fn perform_step(&mut self, index: usize, then: NextStep) {
        let entry = &mut self.all[index];
        let name = entry.settings.name.clone();
        let waiting = std::mem::take(&mut entry.waiting);
        let result = match then {
            NextStep::Stop => {
                entry.phase = Phase::Ended(EndCause::Stopped);
                entry.stats.entered(State::Stopped);
                format!(
                    "{name} has stopped, and remains stopped until you start it again or restart Walpost. Meanwhile, \
                     PostgreSQL retains WAL for its slot {:?}",
                    entry.settings.target.slot
                )
            }
            NextStep::Start => {
                self.start(index);
                self.publish();
                format!("{name} has started; its counters were reset to 0")
            }
            NextStep::Remove => {
                // Don't remove the entry here, because the caller may be iterating over the
                // entries. The caller removes the entry.
                entry.phase = Phase::Ended(EndCause::Stopped);
                format!("{name} was removed from the configuration")
            }
        };
        for result_tx in waiting {
            let _ = result_tx.send(Ok(result.clone()));
        }
    }

    /// Records that a pipeline has ended. If the pipeline was draining, performs the requested
    /// step, such as a restart. If the pipeline halted while it was being stopped, sends an error
    /// to the waiting requests instead.
    pub(super) fn handle_ended(&mut self, (start, ended): EndedStart) {
        let Some(index) = self.all.iter().position(|entry| entry.start == start) else {
            return;
        };
        let entry = &mut self.all[index];
        let phase = std::mem::replace(&mut entry.phase, Phase::Ended(ended));
        match phase.next_step(ended) {
            Some(NextStep::Remove) => {
                self.perform_step(index, NextStep::Remove);
                self.all.remove(index);
                self.publish();
            }
            Some(then) => self.perform_step(index, then),
            None if ended == EndCause::Stopped => {}
            None => {
                let name = entry.settings.name.clone();
                for result_tx in std::mem::take(&mut entry.waiting) {
                    let reason = format!("{name} halted while it was being stopped: see the log");
                    let _ = result_tx.send(Err(reason));
                }
            }
        }
    }

    /// Drains all pipelines, and prevents pipelines from being started again.
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

    /// Returns whether all pipelines have ended, so that the process can exit. Unless the process
    /// is stopping, a pipeline that the operator has stopped does not count as ended, because it
    /// can be started again.
    pub(super) fn all_ended(&self) -> bool {
        let mut all = self.all.iter();
        match self.is_stopping {
            true => all.all(|entry| matches!(entry.phase, Phase::Ended(_))),
            false => {
                !self.all.is_empty()
                    && all.all(|entry| {
                        matches!(
                            entry.phase,
                            Phase::Ended(EndCause::Halted | EndCause::Defect)
                        )
                    })
            }
        }
    }

    /// Returns the process's exit code, which depends on how the pipelines ended.
    pub(super) fn exit(&self) -> Exit {
        let has = |ended| {
            let mut all = self.all.iter();
            all.any(|entry| entry.phase == Phase::Ended(ended))
        };
        match () {
            () if has(EndCause::Halted) => Exit::Halted,
            () if has(EndCause::Defect) => Exit::Failed,
            () => Exit::Done,
        }
    }

    /// Returns the name and state of each pipeline.
    pub(super) fn list(&self) -> Vec<(String, &'static str)> {
        let name_and_state = |entry: &Entry<D>| {
            let state = entry.stats.lifecycle_snapshot().state;
            (entry.settings.name.clone(), state.name())
        };
        self.all.iter().map(name_and_state).collect()
    }
}

/// Returns whether the sink must be created before the first record. With exactly-once delivery,
/// the sink must be created at startup, because it has to fence earlier producers.
fn needs_eager_sink(delivery: &Delivery) -> bool {
    *delivery != Delivery::AtLeastOnce
}

/// Returns whether the settings must not change from `before` to `now` until the copy of rows that
/// are older than the slot has finished. If the settings changed during the copy, the copy would
/// start over or fail to resume.
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
                report.ended = EndCause::Stopped;
                drop(report);
                if *orders.borrow() == Order::Pause {
                    monitor_slot_of_ended_pipeline(&settings, stats, orders);
                }
            }
            Err(reason) => {
                let reason = reason.message(&settings.target.commands);
                error!(pipeline = settings.name, "halted: {reason}");
                // Record the halt in the database before dropping `report`: the drop notifies the
                // supervisor that the pipeline has ended, and the process may then exit.
                if let Ok(runtime) = runtime() {
                    runtime.block_on(record_halt(&settings, &reason));
                    runtime.shutdown_background();
                }
                report.ended = EndCause::Halted;
                drop(report);
                monitor_slot_of_ended_pipeline(&settings, stats, orders);
            }
        }
    });
    if let Err(reason) = spawned {
        error!(
            pipeline = name,
            "failed to start the pipeline's thread: {reason}"
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
    // Don't wait for a metadata query that may still be running on a thread of the runtime.
    runtime.shutdown_background();
    result
}

/// Runs the pipeline with the sink from its settings, and maintains the pipeline's tables
/// concurrently.
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
            let is_eager = is_eager || needs_eager_sink(&settings.delivery);
            let make = |deliveries: Arc<Deliveries>, batching: &Batching| {
                let (producer, batching) = (&producer, batching.clone());
                let (limit, seen) = (&limit, &seen);
                let make = move || {
                    let deliveries = Arc::clone(&deliveries);
                    KafkaSink::for_pipeline(producer, &batching, limit, seen, deliveries)
                };
                Ok(match is_eager {
                    true => OnDemand::eager(make()?),
                    false => OnDemand::lazy(make),
                })
            };
            pipeline::run(settings, postgres, orders, stats, make).await
        }
    }
}

/// Monitors the slot of a pipeline that has ended, until the pipeline is started again or removed,
/// or the process exits.
fn monitor_slot_of_ended_pipeline(
    settings: &PipelineSettings,
    stats: Arc<PipelineStats>,
    mut orders: watch::Receiver<Order>,
) {
    match runtime() {
        Ok(runtime) => {
            runtime.block_on(async {
                let _maintenance = maintenance::start(settings);
                tokio::select! {
                    () = pipeline::monitor_slot_of_ended_pipeline(settings, stats) => {}
                    () = async { while orders.changed().await.is_ok() {} } => {}
                }
            });
            runtime.shutdown_background();
        }
        Err(reason) => warn!(
            pipeline = settings.name,
            "the pipeline has ended, and its slot is not monitored: {reason}"
        ),
    }
}

/// Reports how a pipeline ended. The report is sent when this value is dropped, even if the
/// pipeline's thread panics.
struct Report {
    name: String,
    start: u64,
    stats: Arc<PipelineStats>,
    ended_tx: mpsc::UnboundedSender<EndedStart>,
    ended: EndCause,
}

impl Drop for Report {
    fn drop(&mut self) {
        if thread::panicking() {
            const DEFECT: &str =
                "the pipeline stopped because of a bug in Walpost; please report this bug";
            error!(pipeline = self.name, "{DEFECT}");
            self.stats.entered(State::Halted);
            let remedy = Remedy::Halt.describe();
            self.stats
                .failed(ErrorKind::Defect, DEFECT.to_owned(), remedy);
        }
        // Sending fails only while the process is exiting.
        let _ = self.ended_tx.send((self.start, self.ended));
    }
}

/// Describes the slot of a pipeline that no longer uses it, and how to drop the slot. If a row
/// defined the pipeline, the text contains no command, because the row may have named a slot that
/// belongs to another pipeline.
fn describe_kept_slot(settings: &PipelineSettings) -> String {
    let (slot, database) = (&settings.target.slot, settings.postgres.describe());
    match settings.defined_by {
        DefinedBy::Operator => format!(
            "Slot {slot:?} in {database} is kept, so PostgreSQL retains WAL for it. If the slot is no longer needed: \
             SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
        ),
        DefinedBy::Row => format!(
            "If slot {slot:?} in {database} still exists, PostgreSQL retains WAL for it. The slot may belong to another pipeline: \
             see walpost.slot_state in this database before dropping the slot"
        ),
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
    fn applies_the_requested_action_when_a_draining_pipeline_ends() {
        use EndCause::{Defect, Halted, Stopped};
        use NextStep::{Remove, Start, Stop};
        for (then, ended, expected) in [
            (Start, Stopped, Some(Start)),
            (Start, Halted, Some(Start)),
            (Start, Defect, Some(Start)),
            (Remove, Stopped, Some(Remove)),
            (Remove, Halted, Some(Remove)),
            (Stop, Stopped, Some(Stop)),
            // A pipeline that halts while it is being stopped does not count as stopped.
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
    fn restarts_a_pipeline_that_is_added_again_during_its_removal() {
        assert!(!Phase::Draining(NextStep::Remove).continues(true));
        for phase in [
            Phase::Running,
            Phase::Draining(NextStep::Start),
            Phase::Draining(NextStep::Stop),
            Phase::Ended(EndCause::Halted),
        ] {
            assert!(phase.continues(true), "{phase:?}");
            assert!(!phase.continues(false), "{phase:?}");
        }
    }

    /// If the sink were created only when the first record arrives, it could not fence earlier
    /// producers until then.
    #[test]
    fn creates_the_sink_at_startup_in_exactly_once_mode() {
        assert!(needs_eager_sink(&exactly_once()));
        assert!(!needs_eager_sink(&Delivery::AtLeastOnce));
    }
}
