//! Runs many pipelines in one process, each on its own thread, so that no pipeline has to wait for
//! another.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{self, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;
use tracing::{error, info, warn};

use self::configuration::{ReloadRequest, ReloadResult};
use self::control::{Answer, Control, ControlRequest, Request};
use self::definitions::{Defined, Definitions, Reading, SuspectRemoval};
use self::pipelines::{Pipelines, STOPPING};
use self::systemd::Systemd;
use self::watched_files::WatchedFiles;
use crate::model::exit::Exit;
use crate::observe::http;
use crate::observe::logging;
use crate::observe::registry::Registry;
use crate::pipeline::order::Order;

mod configuration;
pub(crate) mod control;
pub(crate) mod definitions;
mod pipelines;
mod systemd;
pub(crate) mod watched_files;

/// How often the pipelines' state is sampled.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the pipelines in `first`, and any pipelines that `definitions` returns later, until all of
/// them have ended.
///
/// `watched` is the state of the configuration files before `first` was read. The pipelines' state
/// is served over HTTP on `listener`, and requests that arrive on `control` are carried out. The
/// first SIGTERM or SIGINT drains the pipelines, and a second signal stops the process immediately.
/// SIGHUP reloads the definitions. A pipeline that halts is reported and does not affect the other
/// pipelines.
#[must_use]
pub(crate) fn run<D: Definitions>(
    definitions: D,
    watched: WatchedFiles,
    first: Reading<D::Definition>,
    listener: Option<http::Listener>,
    control: Option<Control>,
) -> Exit {
    match runtime() {
        Ok(runtime) => runtime.block_on(supervise(definitions, watched, first, listener, control)),
        Err(reason) => {
            error!("failed to start the asynchronous runtime: {reason}");
            Exit::Failed
        }
    }
}

/// Creates a single-threaded runtime for the calling thread.
pub(crate) fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_current_thread().enable_all().build()
}

async fn supervise<D: Definitions>(
    definitions: D,
    watched: WatchedFiles,
    first: Reading<D::Definition>,
    listener: Option<http::Listener>,
    control: Option<Control>,
) -> Exit {
    let (orders, _) = watch::channel(Order::Run);
    let (mut terminate, mut interrupt, mut hangup) = match (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
        signal(SignalKind::hangup()),
    ) {
        (Ok(terminate), Ok(interrupt), Ok(hangup)) => (terminate, interrupt, hangup),
        (Err(reason), _, _) | (_, Err(reason), _) | (_, _, Err(reason)) => {
            error!("failed to install signal handlers: {reason}");
            return Exit::Failed;
        }
    };
    let registry = Arc::new(Registry::new([]));
    let (ended_tx, mut ended_rx) = mpsc::unbounded_channel();
    let (reloaded_tx, mut reloaded_rx) = mpsc::channel(1);
    let reload_tx = match configuration::watch(definitions, watched, reloaded_tx) {
        Ok(reload_tx) => reload_tx,
        Err(reason) => {
            error!("failed to watch the configuration: {reason}");
            return Exit::Failed;
        }
    };
    let mut supervisor = Supervisor {
        reload_tx,
        pipelines: Pipelines::new(Arc::clone(&registry), ended_tx),
        registry: Arc::clone(&registry),
    };
    let (request_tx, mut request_rx) = mpsc::channel(1);
    let http = listener.map_or(Ok(()), |listener| {
        serve_http(listener, Arc::clone(&registry))
    });
    let controlled = control
        .as_ref()
        .map_or(Ok(()), |control| control.serve(request_tx));
    if let Err((what, reason)) = http
        .map_err(|error| ("HTTP", error))
        .and(controlled.map_err(|error| ("control socket", error)))
    {
        error!("{what}: {reason}");
        return Exit::Failed;
    }
    supervisor.start_pipelines(first);
    if let Some(systemd) = Systemd::from_env() {
        tokio::spawn(systemd.report_state(Arc::clone(&registry), orders.subscribe()));
    }
    tokio::spawn(sample_periodically(registry));
    while !supervisor.pipelines.all_ended() {
        let signal = tokio::select! {
            Some(ended) = ended_rx.recv() => {
                supervisor.pipelines.handle_ended(ended);
                continue;
            }
            request = next_request(&mut request_rx) => {
                supervisor.handle_request(request);
                continue;
            }
            Some(result) = reloaded_rx.recv() => {
                supervisor.apply_reload(result);
                continue;
            }
            _ = hangup.recv() => {
                supervisor.request_reload(ReloadRequest { cause: "SIGHUP", is_accepted: false, answer: None });
                continue;
            }
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        if *orders.borrow() == Order::Drain {
            warn!(
                signal,
                "second signal: stopping immediately; events in flight will be sent again"
            );
            drop(control);
            // Skip shutting down the runtime and librdkafka, because that can take seconds.
            logging::flush();
            std::process::exit(i32::from(Exit::Failed.code()));
        }
        info!(
            signal,
            "stopping; to stop immediately, send a second signal"
        );
        orders.send_replace(Order::Drain);
        supervisor.pipelines.drain();
    }
    supervisor.pipelines.exit()
}

/// Waits for the next request. Never returns if there is no control socket.
async fn next_request(request_rx: &mut mpsc::Receiver<ControlRequest>) -> ControlRequest {
    match request_rx.recv().await {
        Some(request) => request,
        None => pending().await,
    }
}

/// The supervisor's mutable state.
struct Supervisor<D> {
    /// The channel through which reloads of the configuration are requested.
    reload_tx: std::sync::mpsc::Sender<ReloadRequest>,
    pipelines: Pipelines<D>,
    registry: Arc<Registry>,
}

impl<D: PartialEq> Supervisor<D> {
    fn start_pipelines(&mut self, first: Reading<D>) {
        let Reading { defined, failures } = first;
        if !failures.is_empty() {
            let failures = failures.join("; ");
            error!("some pipelines are missing because their sources can't be used: {failures}");
            self.registry.reloaded(Some(failures));
        }
        self.pipelines.apply(defined, Vec::new());
    }

    fn request_reload(&self, request: ReloadRequest) {
        // Sending can't fail, because the receiving thread runs until the process ends.
        let _ = self.reload_tx.send(request);
    }

    /// Applies a reloaded configuration. If the new configuration would remove most of a source's
    /// pipelines, all pipelines of this source are kept unchanged, unless the request explicitly
    /// accepts the removal.
    fn apply_reload(&mut self, ReloadResult { request, result }: ReloadResult<D>) {
        let cause = request.cause;
        let mut response = Answer::default();
        let mut failed = Vec::new();
        match result.and_then(|Reading { defined, failures }| {
            failed = failures;
            self.apply(defined, request.is_accepted)
        }) {
            Ok((changes, doubtful)) => {
                info!("configuration reloaded after {cause}: {changes}");
                for failure in &failed {
                    error!("{failure}; pipelines already started from this source keep running");
                }
                for removal in doubtful {
                    error!(
                        "configuration not reloaded from {}; pipelines already started from this source keep running: {removal}",
                        removal.source
                    );
                    failed.push(removal.to_string());
                }
                response.done.push(changes);
            }
            Err(reason) => {
                error!(
                    "configuration not reloaded after {cause}; the pipelines keep running unchanged: {reason}"
                );
                failed.push(reason);
            }
        }
        self.registry
            .reloaded((!failed.is_empty()).then(|| failed.join("; ")));
        response.refused = failed;
        if let Some(answer) = request.answer {
            let _ = answer.send(response);
        }
    }

    /// Returns a description of the changes, and the sources whose pipelines were kept unchanged.
    fn apply(
        &mut self,
        mut next: Vec<Defined<D>>,
        is_accepted: bool,
    ) -> Result<(String, Vec<SuspectRemoval>), String> {
        if self.pipelines.is_stopping() {
            return Err(STOPPING.to_owned());
        }
        let changes = self.pipelines.changes(&next);
        if is_accepted || changes.doubtful.is_empty() {
            self.pipelines.apply(next, Vec::new());
            return Ok((changes.to_string(), Vec::new()));
        }
        let doubtful = changes.doubtful;
        let Some((kept, changes)) = self.pipelines.postpone_doubtful(&mut next, &doubtful) else {
            let reasons: Vec<_> = doubtful.iter().map(ToString::to_string).collect();
            return Err(reasons.join("; "));
        };
        self.pipelines.apply(next, kept);
        Ok((changes.to_string(), doubtful))
    }

    fn handle_request(&mut self, (request, answer): ControlRequest) {
        let names = match &request {
            Request::Stop(names) | Request::Start(names) | Request::Restart(names) => names.clone(),
            Request::List => {
                let list = self.pipelines.list().into_iter();
                let done = list
                    .map(|(name, state)| format!("{name} {state}"))
                    .collect();
                let refused = Vec::new();
                let _ = answer.send(Answer { done, refused });
                return;
            }
            Request::Reload { accept } => {
                return self.request_reload(ReloadRequest {
                    cause: "walpost pipeline reload",
                    is_accepted: *accept,
                    answer: Some(answer),
                });
            }
        };
        let mut results = Vec::new();
        for name in names {
            let (result_tx, result_rx) = oneshot::channel();
            match &request {
                Request::Stop(_) => self.pipelines.stop(&name, result_tx),
                Request::Start(_) => self.pipelines.start_again(&name, result_tx),
                _ => self.pipelines.restart(&name, result_tx),
            }
            results.push(result_rx);
        }
        tokio::spawn(async move {
            let mut response = Answer::default();
            for result in results {
                match result.await {
                    Ok(Ok(done)) => response.done.push(done),
                    Ok(Err(refused)) => response.refused.push(refused),
                    Err(_) => response
                        .refused
                        .push("Walpost exited before the request was completed".to_owned()),
                }
            }
            let _ = answer.send(response);
        });
    }
}

/// Starts serving the pipelines' state over HTTP.
fn serve_http(listener: http::Listener, registry: Arc<Registry>) -> io::Result<()> {
    let address = listener.address()?;
    let serving = listener.serve(registry)?;
    info!("metrics, health and status at http://{address}");
    tokio::spawn(serving);
    Ok(())
}

/// Samples the pipelines' state periodically and logs their problems.
async fn sample_periodically(registry: Arc<Registry>) {
    let mut interval = tokio::time::interval(SAMPLE_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        registry.sample();
    }
}
