//! Runs many pipelines in one process, each on its own thread, so that none waits for another.

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
use self::definitions::{Defined, Definitions, Reading};
use self::pipelines::{Pipelines, RequestResult, STOPPING};
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

/// How often the state of the pipelines is sampled.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the pipelines in `first`, and those that `definitions` returns later, until all have ended.
///
/// `places` is the state of the configuration files before `first` was read. The state of the pipelines is served over HTTP
/// on `listener`, and requests from `control` are carried out. The first SIGTERM or SIGINT drains the pipelines and the
/// second stops the process at once; SIGHUP reloads the definitions. A pipeline that halts is reported and does not affect
/// the others.
#[must_use]
pub(crate) fn run<D: Definitions>(
    definitions: D,
    places: WatchedFiles,
    first: Reading<D::Definition>,
    listener: Option<http::Listener>,
    control: Option<Control>,
) -> Exit {
    match runtime() {
        Ok(runtime) => runtime.block_on(supervise(definitions, places, first, listener, control)),
        Err(reason) => {
            error!("the asynchronous runtime can't be started: {reason}");
            Exit::Failed
        }
    }
}

/// Creates a runtime on the calling thread.
pub(crate) fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_current_thread().enable_all().build()
}

async fn supervise<D: Definitions>(
    definitions: D,
    places: WatchedFiles,
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
            error!("signals can't be received: {reason}");
            return Exit::Failed;
        }
    };
    let registry = Arc::new(Registry::new([]));
    let (ended, mut endings) = mpsc::unbounded_channel();
    let (reread, mut readings) = mpsc::channel(1);
    let asks_to_read = match configuration::watch(definitions, places, reread) {
        Ok(asks) => asks,
        Err(reason) => {
            error!("the configuration can't be watched: {reason}");
            return Exit::Failed;
        }
    };
    let mut supervisor = Supervisor {
        asks_to_read,
        pipelines: Pipelines::new(Arc::clone(&registry), ended),
        registry: Arc::clone(&registry),
    };
    let (asks, mut asked) = mpsc::channel(1);
    let shown = listener.map_or(Ok(()), |listener| {
        serve_http(listener, Arc::clone(&registry))
    });
    let controlled = control
        .as_ref()
        .map_or(Ok(()), |control| control.serve(asks));
    if let Err((what, reason)) = shown
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
    tokio::spawn(watch_over(registry));
    while !supervisor.pipelines.all_ended() {
        let signal = tokio::select! {
            Some(ending) = endings.recv() => {
                supervisor.pipelines.handle_ended(ending);
                continue;
            }
            request = next_request(&mut asked) => {
                supervisor.handle_request(request);
                continue;
            }
            Some(reread) = readings.recv() => {
                supervisor.apply_reread(reread);
                continue;
            }
            _ = hangup.recv() => {
                supervisor.request_reading(ReloadRequest { why: "SIGHUP", is_accepted: false, answer: None });
                continue;
            }
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        if *orders.borrow() == Order::Drain {
            warn!(
                signal,
                "second signal: stopping at once; what was in flight will be sent again"
            );
            drop(control);
            // Skips the shutdown of the runtime and of librdkafka, which can take seconds.
            logging::flush();
            std::process::exit(i32::from(Exit::Failed.code()));
        }
        info!(signal, "stopping; a second signal stops at once");
        orders.send_replace(Order::Drain);
        supervisor.pipelines.drain();
    }
    supervisor.pipelines.exit()
}

/// Returns the next request, or waits indefinitely if there is no control socket.
async fn next_request(asked: &mut mpsc::Receiver<ControlRequest>) -> ControlRequest {
    match asked.recv().await {
        Some(request) => request,
        None => pending().await,
    }
}

/// The state that changes while the process runs.
struct Supervisor<D> {
    /// Receives requests to reload the configuration.
    asks_to_read: std::sync::mpsc::Sender<ReloadRequest>,
    pipelines: Pipelines<D>,
    registry: Arc<Registry>,
}

impl<D: PartialEq> Supervisor<D> {
    fn start_pipelines(&mut self, first: Reading<D>) {
        let Reading { defined, failures } = first;
        if !failures.is_empty() {
            let failures = failures.join("; ");
            error!("pipelines are missing until their source can be used: {failures}");
            self.registry.reloaded(Some(failures));
        }
        self.pipelines.apply(defined);
    }

    fn request_reading(&self, ask: ReloadRequest) {
        // Sending can't fail while the process runs: the receiving thread lives as long as the process.
        let _ = self.asks_to_read.send(ask);
    }

    /// Applies a configuration that was read. Refuses to remove most pipelines of a source unless the request accepts that.
    fn apply_reread(&mut self, ReloadResult { ask, result }: ReloadResult<D>) {
        let why = ask.why;
        let mut said = Answer::default();
        let mut failed = Vec::new();
        match result.and_then(|Reading { defined, failures }| {
            failed = failures;
            self.apply(defined, ask.is_accepted)
        }) {
            Ok(changes) => {
                info!("configuration reloaded after {why}: {changes}");
                for failure in &failed {
                    error!("{failure}; its pipelines go on as they are");
                }
                said.done.push(changes);
            }
            Err(reason) => {
                error!(
                    "configuration not reloaded after {why}, and the pipelines go on as they are: {reason}"
                );
                failed.push(reason);
            }
        }
        self.registry
            .reloaded((!failed.is_empty()).then(|| failed.join("; ")));
        said.refused = failed;
        if let Some(answer) = ask.answer {
            let _ = answer.send(said);
        }
    }

    fn apply(&mut self, next: Vec<Defined<D>>, is_accepted: bool) -> RequestResult {
        if self.pipelines.is_stopping() {
            return Err(STOPPING.to_owned());
        }
        let changes = self.pipelines.changes(&next);
        if let Some(doubtful) = changes.doubtful.as_ref().filter(|_| !is_accepted) {
            return Err(format!(
                "{} pipelines would be removed ({}), and {} of {} would be left. If that is meant, run pipeline reload --accept",
                doubtful.removed.len(),
                doubtful.removed.join(", "),
                doubtful.left,
                doubtful.source
            ));
        }
        self.pipelines.apply(next);
        Ok(changes.to_string())
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
                return self.request_reading(ReloadRequest {
                    why: "walpost pipeline reload",
                    is_accepted: *accept,
                    answer: Some(answer),
                });
            }
        };
        let mut waiting = Vec::new();
        for name in names {
            let (waits, waited) = oneshot::channel();
            match &request {
                Request::Stop(_) => self.pipelines.stop(&name, waits),
                Request::Start(_) => self.pipelines.start_again(&name, waits),
                _ => self.pipelines.restart(&name, waits),
            }
            waiting.push(waited);
        }
        tokio::spawn(async move {
            let mut said = Answer::default();
            for waited in waiting {
                match waited.await {
                    Ok(Ok(done)) => said.done.push(done),
                    Ok(Err(refused)) => said.refused.push(refused),
                    Err(_) => said.refused.push("walpost has ended meanwhile".to_owned()),
                }
            }
            let _ = answer.send(said);
        });
    }
}

/// Starts to serve the state of the pipelines over HTTP.
fn serve_http(listener: http::Listener, registry: Arc<Registry>) -> io::Result<()> {
    let address = listener.address()?;
    let serving = listener.serve(registry)?;
    info!("metrics, health and status at http://{address}");
    tokio::spawn(serving);
    Ok(())
}

/// Samples the state of the pipelines periodically, and logs their problems.
async fn watch_over(registry: Arc<Registry>) {
    let mut interval = tokio::time::interval(SAMPLE_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        registry.sample();
    }
}
