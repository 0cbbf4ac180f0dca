//! Many pipelines in one process: each on a thread of its own, so that none waits for another.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{self, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tracing::{error, info, warn};

use crate::delivery::isolation::Batching;
use crate::delivery::stats::PipelineStats;
use crate::kafka::limits::BatchLimit;
use crate::kafka::producer::KafkaSink;
use crate::model::exit::Exit;
use crate::model::lifecycle::{ErrorKind, State};
use crate::observe::http;
use crate::observe::registry::Registry;
use crate::pipeline;
use crate::pipeline::error::PipelineError;
use crate::pipeline::order::Order;
use crate::pipeline::recovery::Remedy;
use crate::pipeline::settings::PipelineSettings;
use crate::retention::maintenance;
use crate::sink::stdout::StdoutSink;

use self::systemd::Systemd;

mod systemd;

/// How a pipeline ended.
enum Ended {
    Stopped,
    Halted,
    Defect,
}

/// How often it is taken down how the pipelines are.
const SAMPLE: Duration = Duration::from_secs(1);

/// Runs `pipelines` until all have ended, and shows over HTTP how they are to whoever connects to
/// `listener`. The first SIGTERM or SIGINT drains them, the second stops the process at once;
/// SIGHUP is logged. A pipeline that halts is reported and leaves the others running.
#[must_use]
pub(crate) fn run(pipelines: Vec<PipelineSettings>, listener: Option<http::Listener>) -> Exit {
    match runtime() {
        Ok(runtime) => runtime.block_on(supervise(pipelines, listener)),
        Err(reason) => {
            error!("the asynchronous runtime can't be started: {reason}");
            Exit::Failed
        }
    }
}

/// A runtime on the calling thread.
pub(crate) fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_current_thread().enable_all().build()
}

async fn supervise(pipelines: Vec<PipelineSettings>, listener: Option<http::Listener>) -> Exit {
    let (orders, _) = watch::channel(Order::Run);
    let (mut terminate, mut interrupt, mut hangup) = match (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
        signal(SignalKind::hangup()),
    ) {
        (Ok(terminate), Ok(interrupt), Ok(hangup)) => (terminate, interrupt, hangup),
        (Err(reason), _, _) | (_, Err(reason), _) | (_, _, Err(reason)) => {
            error!("signals can't be received: {reason}");
            return Exit::Failed;
        }
    };
    let pipelines: Vec<_> = pipelines
        .into_iter()
        .map(|settings| (Arc::new(PipelineStats::new(settings.about())), settings))
        .collect();
    let registry = Registry::new(pipelines.iter().map(|(stats, _)| Arc::clone(stats)));
    let registry = Arc::new(registry);
    if let Some(listener) = listener
        && let Err(reason) = show(listener, Arc::clone(&registry))
    {
        error!("HTTP: {reason}");
        return Exit::Failed;
    }
    if let Some(systemd) = Systemd::from_env() {
        tokio::spawn(systemd.tell(Arc::clone(&registry), orders.subscribe()));
    }
    tokio::spawn(watch_over(registry));
    let (ended, mut endings) = mpsc::channel(pipelines.len().max(1));
    for (stats, settings) in pipelines {
        start(settings, stats, orders.subscribe(), ended.clone());
    }
    drop(ended);

    let mut exit = Exit::Done;
    loop {
        let asked = tokio::select! {
            ending = endings.recv() => {
                match ending {
                    None => return exit,
                    Some(Ended::Stopped) => {}
                    Some(Ended::Halted) => exit = Exit::Halted,
                    Some(Ended::Defect) if exit == Exit::Done => exit = Exit::Failed,
                    Some(Ended::Defect) => {}
                }
                continue;
            }
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
            _ = hangup.recv() => {
                warn!(
                    "SIGHUP ignored: settings are read at the start only. To have new ones, restart Walpost"
                );
                continue;
            }
        };
        if *orders.borrow() == Order::Drain {
            warn!(
                signal = asked,
                "second signal: stopping at once; what was in flight will be sent again"
            );
            // Without the runtime's and librdkafka's farewells, which can take seconds.
            std::process::exit(i32::from(Exit::Failed.code()));
        }
        info!(signal = asked, "stopping; a second signal stops at once");
        orders.send_replace(Order::Drain);
    }
}

/// Shows how the pipelines are, from here on.
fn show(listener: http::Listener, registry: Arc<Registry>) -> io::Result<()> {
    let address = listener.address()?;
    let serving = listener.serve(registry)?;
    info!("metrics, health and status at http://{address}");
    tokio::spawn(serving);
    Ok(())
}

/// Takes down how the pipelines are, and has the log say what is wrong with them.
async fn watch_over(registry: Arc<Registry>) {
    let mut interval = tokio::time::interval(SAMPLE);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        registry.sample();
    }
}

fn start(
    settings: PipelineSettings,
    stats: Arc<PipelineStats>,
    orders: watch::Receiver<Order>,
    ended: mpsc::Sender<Ended>,
) {
    let name = settings.name.clone();
    let report = Report {
        name: name.clone(),
        stats: Arc::clone(&stats),
        ended,
        ending: Ended::Defect,
    };
    let spawned = thread::Builder::new().name(name.clone()).spawn(move || {
        let mut report = report;
        match run_one(&settings, orders, Arc::clone(&stats)) {
            Ok(()) => {
                stats.entered(State::Stopped);
                report.ending = Ended::Stopped;
            }
            Err(reason) => {
                error!(pipeline = settings.name, "halted: {reason}");
                report.ending = Ended::Halted;
                drop(report);
                watch_halted(&settings, stats);
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
    orders: watch::Receiver<Order>,
    stats: Arc<PipelineStats>,
) -> Result<(), PipelineError> {
    let runtime = runtime().map_err(|error| PipelineError::Connection(error.into()))?;
    let result = runtime.block_on(run_into_sink(settings, orders, stats));
    // A look-up of metadata can be under way on a thread of the runtime; it is not waited for.
    runtime.shutdown_background();
    result
}

/// Runs the pipeline into the sink that its settings name, and maintains its table beside it.
async fn run_into_sink(
    settings: &PipelineSettings,
    orders: watch::Receiver<Order>,
    stats: Arc<PipelineStats>,
) -> Result<(), PipelineError> {
    let _maintenance = maintenance::beside(settings);
    let postgres = &settings.postgres;
    match settings.producer() {
        None => {
            let make = |deliveries, _: &Batching| Ok(StdoutSink::new(deliveries));
            pipeline::run(settings, postgres, orders, stats, make).await
        }
        Some(producer) => {
            let limit = BatchLimit::default();
            let make = |deliveries, batching: &Batching| {
                KafkaSink::for_pipeline(&producer, batching, &limit, deliveries)
            };
            pipeline::run(settings, postgres, orders, stats, make).await
        }
    }
}

/// Until the process ends, which it does when no pipeline is left.
fn watch_halted(settings: &PipelineSettings, stats: Arc<PipelineStats>) {
    match runtime() {
        Ok(runtime) => runtime.block_on(async {
            let _maintenance = maintenance::beside(settings);
            pipeline::watch_halted(settings, stats).await;
        }),
        Err(reason) => warn!(
            pipeline = settings.name,
            "the slot of the halted pipeline is not monitored: {reason}"
        ),
    }
}

/// Says how a pipeline ended when it is dropped: also when its thread panics.
struct Report {
    name: String,
    stats: Arc<PipelineStats>,
    ended: mpsc::Sender<Ended>,
    ending: Ended,
}

impl Drop for Report {
    fn drop(&mut self) {
        let ending = std::mem::replace(&mut self.ending, Ended::Stopped);
        if thread::panicking() {
            const DEFECT: &str = "stopped by a defect in walpost; please report it";
            error!(pipeline = self.name, "{DEFECT}");
            self.stats.entered(State::Halted);
            let remedy = Remedy::Halt.describe();
            self.stats
                .failed(ErrorKind::Defect, DEFECT.to_owned(), remedy);
        }
        // There is room for one ending per pipeline; nobody listens only when the process ends.
        let _ = self.ended.try_send(ending);
    }
}
