//! Many pipelines in one process: each on a thread of its own, so that none waits for another.

use std::thread;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::cli::Exit;
use crate::pipeline::settings::PipelineSettings;
use crate::pipeline::{self, Order, PipelineError};

/// How a pipeline ended.
enum Ended {
    Stopped,
    Halted,
    Defect,
}

/// Runs `pipelines` until all have ended. The first SIGTERM or SIGINT drains them, the second stops
/// the process at once. A pipeline that halts is reported and leaves the others running.
#[must_use]
pub fn run(pipelines: Vec<PipelineSettings>) -> Exit {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => runtime.block_on(supervise(pipelines)),
        Err(reason) => {
            error!("the asynchronous runtime can't be started: {reason}");
            Exit::Failed
        }
    }
}

async fn supervise(pipelines: Vec<PipelineSettings>) -> Exit {
    let (orders, _) = watch::channel(Order::Run);
    let (mut terminate, mut interrupt) = match (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) {
        (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
        (Err(reason), _) | (_, Err(reason)) => {
            error!("signals can't be received: {reason}");
            return Exit::Failed;
        }
    };
    let (ended, mut endings) = mpsc::channel(pipelines.len().max(1));
    for settings in pipelines {
        start(settings, orders.subscribe(), ended.clone());
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

fn start(settings: PipelineSettings, orders: watch::Receiver<Order>, ended: mpsc::Sender<Ended>) {
    let name = settings.name.clone();
    let report = Report {
        name: name.clone(),
        ended,
        ending: Ended::Defect,
    };
    let spawned = thread::Builder::new().name(name.clone()).spawn(move || {
        let mut report = report;
        report.ending = match run_one(&settings, orders) {
            Ok(()) => Ended::Stopped,
            Err(reason) => {
                error!(pipeline = settings.name, "halted: {reason}");
                Ended::Halted
            }
        };
    });
    if let Err(reason) = spawned {
        error!(pipeline = name, "its thread can't be started: {reason}");
    }
}

fn run_one(
    settings: &PipelineSettings,
    orders: watch::Receiver<Order>,
) -> Result<(), PipelineError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| PipelineError::Connection(error.into()))?;
    let result = runtime.block_on(pipeline::run(settings, orders));
    // A look-up of metadata can be under way on a thread of the runtime; it is not waited for.
    runtime.shutdown_background();
    result
}

/// Says how a pipeline ended when it is dropped: also when its thread panics.
struct Report {
    name: String,
    ended: mpsc::Sender<Ended>,
    ending: Ended,
}

impl Drop for Report {
    fn drop(&mut self) {
        let ending = std::mem::replace(&mut self.ending, Ended::Stopped);
        if thread::panicking() {
            error!(
                pipeline = self.name,
                "stopped by a defect in walpost; please report it"
            );
        }
        // There is room for one ending per pipeline; nobody listens only when the process ends.
        let _ = self.ended.try_send(ending);
    }
}
