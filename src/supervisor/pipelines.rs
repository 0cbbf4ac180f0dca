//! The pipelines of the process: each on a thread of its own, started, stopped and replaced while the others go on.

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

/// How a pipeline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Stopped,
    Halted,
    Defect,
}

/// Which start of a pipeline has ended, and how.
pub(super) type Ending = (u64, Ended);

/// So many pipelines have a client of Kafka from the beginning, so that what is wrong with it is known before the first event.
/// Those behind them have one when they need it.
const EAGER: usize = 10;

/// Why nothing is done any more.
pub(super) const STOPPING: &str = "walpost is stopping";

/// What was said to who asked: done, or why not.
pub(super) type Said = Result<String, String>;

/// All of them.
pub(super) struct Pipelines<D> {
    all: Vec<Entry<D>>,
    registry: Arc<Registry>,
    endings: mpsc::UnboundedSender<Ending>,
    /// How many were started by now.
    starts: u64,
    is_stopping: bool,
}

struct Entry<D> {
    /// Its number among all starts: what an earlier one says is not of this one.
    start: u64,
    settings: PipelineSettings,
    definition: D,
    source: String,
    stats: Arc<PipelineStats>,
    /// Its thread ends once this is gone.
    orders: watch::Sender<Order>,
    phase: Phase,
    /// Who has asked for its end.
    waiting: Vec<oneshot::Sender<Said>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// It drains, and what comes then.
    Draining(Then),
    /// By itself, or as a person has asked.
    Over(Ended),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Stop,
    Start,
    Remove,
}

impl Phase {
    /// What to do with a pipeline that has ended in this phase. Nothing if it ended by itself, or halted when it was to stop.
    fn next(self, ended: Ended) -> Option<Then> {
        match (self, ended) {
            (Self::Draining(Then::Stop), Ended::Halted | Ended::Defect) => None,
            // What it halted for may be what the new definition corrects.
            (Self::Draining(then), _) => Some(then),
            (Self::Running | Self::Over(_), _) => None,
        }
    }

    /// A pipeline in this phase continues under a definition that `is_same` as before.
    fn continues(self, is_same: bool) -> bool {
        // One that was removed and is added again has to be started again.
        is_same && self != Self::Draining(Then::Remove)
    }
}

impl<D: PartialEq> Pipelines<D> {
    /// None yet. Each that is started is in the registry, and says at `endings` how it has ended.
    pub(super) fn new(registry: Arc<Registry>, endings: mpsc::UnboundedSender<Ending>) -> Self {
        Self {
            all: Vec::new(),
            registry,
            endings,
            starts: 0,
            is_stopping: false,
        }
    }

    /// What `next` would change.
    pub(super) fn changes(&self, next: &[Defined<D>]) -> Changes {
        let is_going = |entry: &&Entry<D>| entry.phase == Phase::Draining(Then::Remove);
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

    /// Starts what is new, drains what is gone, drains and starts again what has changed, and leaves alone what is as it was.
    pub(super) fn apply(&mut self, next: Vec<Defined<D>>) {
        let names: Vec<_> = next.iter().map(|of| of.settings.name.clone()).collect();
        for gone in 0..self.all.len() {
            let name = &self.all[gone].settings.name;
            if !names.contains(name) {
                let slot = &self.all[gone].settings.target.slot;
                if self.all[gone].phase == Phase::Draining(Then::Remove) {
                    continue;
                }
                warn!(
                    pipeline = name,
                    "removed from the configuration: it is stopped, and its slot {slot:?} stays, for which PostgreSQL retains WAL. \
                     Where it is not needed any more: SELECT pg_drop_replication_slot('{slot}')"
                );
                self.end(gone, Then::Remove, None);
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
                     it is not needed any more: SELECT pg_drop_replication_slot('{slot}')",
                    before.postgres.describe()
                );
            }
            let waits_for_copy = waits_for_copy(before, now);
            (entry.settings, entry.definition) = (defined.settings, defined.definition);
            // What a person has stopped they start again.
            let then = match entry.phase {
                Phase::Over(Ended::Stopped) | Phase::Draining(Then::Stop) => continue,
                Phase::Running if waits_for_copy => {
                    entry.phase = Phase::Draining(Then::Start);
                    entry.orders.send_replace(Order::DrainAfterCopy);
                    continue;
                }
                Phase::Draining(Then::Start) => continue,
                _ => Then::Start,
            };
            self.end(at, then, None);
        }
        let order = |entry: &Entry<D>| names.iter().position(|name| *name == entry.settings.name);
        self.all
            .sort_by_key(|entry| order(entry).unwrap_or(usize::MAX));
        self.show();
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
        let is_eager = at < EAGER;
        spawn(entry.settings.clone(), is_eager, receiver, report);
    }

    /// For those who watch: what there is now.
    fn show(&self) {
        let stats = self.all.iter().map(|entry| Arc::clone(&entry.stats));
        self.registry.replace(stats);
    }

    /// As a person asks. Who waits is told once it is so.
    pub(super) fn stop(&mut self, name: &str, waits: oneshot::Sender<Said>) {
        self.asked(name, Then::Stop, waits);
    }

    /// As [`Self::stop`], and then it is started.
    pub(super) fn restart(&mut self, name: &str, waits: oneshot::Sender<Said>) {
        self.asked(name, Then::Start, waits);
    }

    /// Starts what has halted or was stopped.
    pub(super) fn start_again(&mut self, name: &str, waits: oneshot::Sender<Said>) {
        let at = self.position(name);
        if at.is_some_and(|at| self.all[at].phase == Phase::Running) {
            let _ = waits.send(Ok(format!("{name} is running already")));
            return;
        }
        self.asked(name, Then::Start, waits);
    }

    fn asked(&mut self, name: &str, then: Then, waits: oneshot::Sender<Said>) {
        let found = self.position(name).filter(|&at| {
            // It is in no configuration any more.
            self.all[at].phase != Phase::Draining(Then::Remove)
        });
        let refused = match found {
            _ if self.is_stopping => STOPPING.to_owned(),
            Some(at) => {
                info!(
                    pipeline = name,
                    "{} on request",
                    match then {
                        Then::Stop | Then::Remove => "stopping",
                        Then::Start => "starting again",
                    }
                );
                return self.end(at, then, Some(waits));
            }
            None => format!("there is no pipeline {name:?}; there are: {}", self.names()),
        };
        let _ = waits.send(Err(refused));
    }

    fn names(&self) -> String {
        let names: Vec<_> = self
            .all
            .iter()
            .map(|of| of.settings.name.as_str())
            .collect();
        names.join(", ")
    }

    /// Ends it, if it has not ended, and goes on with `then`.
    fn end(&mut self, at: usize, then: Then, waits: Option<oneshot::Sender<Said>>) {
        let entry = &mut self.all[at];
        entry.waiting.extend(waits);
        match entry.phase {
            Phase::Running | Phase::Draining(_) => {
                entry.phase = Phase::Draining(then);
                entry.orders.send_replace(match then {
                    Then::Stop => Order::Pause,
                    Then::Start | Then::Remove => Order::Drain,
                });
            }
            Phase::Over(_) => self.go_on(at, then),
        }
    }

    /// It has ended: goes on with `then`, and tells who waits for it.
    fn go_on(&mut self, at: usize, then: Then) {
        let entry = &mut self.all[at];
        let name = entry.settings.name.clone();
        let waiting = std::mem::take(&mut entry.waiting);
        let said = match then {
            Then::Stop => {
                entry.phase = Phase::Over(Ended::Stopped);
                entry.stats.entered(State::Stopped);
                format!(
                    "{name} is stopped, until it is started again or walpost is. Meanwhile PostgreSQL retains WAL for its slot \
                     {:?}",
                    entry.settings.target.slot
                )
            }
            Then::Start => {
                self.start(at);
                self.show();
                format!("{name} is started; its counters begin again at 0")
            }
            Then::Remove => {
                // It is taken out by who goes through all of them.
                entry.phase = Phase::Over(Ended::Stopped);
                format!("{name} was removed from the configuration")
            }
        };
        for waits in waiting {
            let _ = waits.send(Ok(said.clone()));
        }
    }

    /// One has ended.
    pub(super) fn ended(&mut self, (start, ended): Ending) {
        let Some(at) = self.all.iter().position(|entry| entry.start == start) else {
            return;
        };
        let entry = &mut self.all[at];
        let phase = std::mem::replace(&mut entry.phase, Phase::Over(ended));
        match phase.next(ended) {
            Some(Then::Remove) => {
                self.go_on(at, Then::Remove);
                self.all.remove(at);
                self.show();
            }
            Some(then) => self.go_on(at, then),
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

    /// Has all of them drain, and none start any more.
    pub(super) fn drain(&mut self) {
        self.is_stopping = true;
        for entry in &mut self.all {
            if matches!(entry.phase, Phase::Running | Phase::Draining(_)) {
                entry.phase = Phase::Draining(Then::Stop);
                entry.orders.send_replace(Order::Drain);
            }
        }
    }

    /// They drain, for the process ends.
    pub(super) fn are_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Nothing is left that could go on by itself, or that a person has stopped to start it again.
    pub(super) fn are_over(&self) -> bool {
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

    /// How the process ends.
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

    /// Each with what it is at.
    pub(super) fn list(&self) -> Vec<(String, &'static str)> {
        let at = |entry: &Entry<D>| {
            let state = entry.stats.lifecycle_snapshot().state;
            (entry.settings.name.clone(), state.name())
        };
        self.all.iter().map(at).collect()
    }
}

/// The sink has to exist before the first record. A transaction of exactly-once takes over what was produced before it.
fn needs_sink_at_once(delivery: &Delivery) -> bool {
    *delivery != Delivery::AtLeastOnce
}

/// A copy of older rows is completed under the definition `before`, because under `now` it would begin again or could not be
/// continued.
fn waits_for_copy(before: &PipelineSettings, now: &PipelineSettings) -> bool {
    let has_same_slot = before.target.slot == now.target.slot
        && before.postgres.describe() == now.postgres.describe();
    let is_resumed = now.delivery != Delivery::AtLeastOnce
        && before.delivery == now.delivery
        && before.target.outbox == now.target.outbox;
    has_same_slot && !is_resumed
}

/// Runs a pipeline on a thread of its own.
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
                // Before the report, after which the process may end.
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
    // A look-up of metadata can be under way on a thread of the runtime; it is not waited for.
    runtime.shutdown_background();
    result
}

/// Runs the pipeline into the sink that its settings name, and maintains its table beside it.
async fn run_into_sink(
    settings: &PipelineSettings,
    is_eager: bool,
    orders: watch::Receiver<Order>,
    stats: Arc<PipelineStats>,
) -> Result<(), PipelineError> {
    let _maintenance = maintenance::beside(settings);
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

/// Until it is started again or removed, or the process ends, which it does when no pipeline is left.
fn watch_ended(
    settings: &PipelineSettings,
    stats: Arc<PipelineStats>,
    mut orders: watch::Receiver<Order>,
) {
    match runtime() {
        Ok(runtime) => {
            runtime.block_on(async {
                let _maintenance = maintenance::beside(settings);
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

/// Says how a pipeline ended when it is dropped: also when its thread panics.
struct Report {
    name: String,
    start: u64,
    stats: Arc<PipelineStats>,
    endings: mpsc::UnboundedSender<Ending>,
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
        // Nobody listens only when the process ends.
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
    fn pipeline_that_has_ended_does_what_it_was_asked_for() {
        use Ended::{Defect, Halted, Stopped};
        use Then::{Remove, Start, Stop};
        for (then, ended, expected) in [
            (Start, Stopped, Some(Start)),
            (Start, Halted, Some(Start)),
            (Start, Defect, Some(Start)),
            (Remove, Stopped, Some(Remove)),
            (Remove, Halted, Some(Remove)),
            (Stop, Stopped, Some(Stop)),
            // It is not stopped but halted, and counts as that.
            (Stop, Halted, None),
            (Stop, Defect, None),
        ] {
            let found = Phase::Draining(then).next(ended);
            assert_eq!(found, expected, "{then:?} {ended:?}");
        }
        for ended in [Stopped, Halted, Defect] {
            assert_eq!(Phase::Running.next(ended), None);
        }
    }

    #[test]
    fn pipeline_that_is_added_again_while_it_is_removed_starts_again() {
        assert!(!Phase::Draining(Then::Remove).continues(true));
        for phase in [
            Phase::Running,
            Phase::Draining(Then::Start),
            Phase::Draining(Then::Stop),
            Phase::Over(Ended::Halted),
        ] {
            assert!(phase.continues(true), "{phase:?}");
            assert!(!phase.continues(false), "{phase:?}");
        }
    }

    /// Transactions of one that is made with the first record would have nothing to take over with.
    #[test]
    fn exactly_once_has_its_sink_from_the_beginning() {
        assert!(needs_sink_at_once(&exactly_once()));
        assert!(!needs_sink_at_once(&Delivery::AtLeastOnce));
    }
}
