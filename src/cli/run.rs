//! `walpost run`: delivers events until a signal stops the process.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tracing::{error, warn};

use super::{init, variable, variables};
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::file::SinkName;
use crate::config::{self, Configured};
use crate::model::exit::Exit;
use crate::observe::http;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::provision::Provision;
use crate::supervisor;
use crate::supervisor::control::{self, Control};
use crate::supervisor::definitions::Definitions;
use crate::supervisor::watched_files::WatchedFiles;

/// How long `--init` waits for a lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Flags of `walpost run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Where to write records: kafka or stdout [default: kafka]
    #[arg(long, env = "WALPOST_SINK", value_enum, hide_possible_values = true)]
    sink: Option<SinkName>,
    /// Address for metrics, health checks and status: HOST:PORT (port 0 selects a free port), or off
    /// [default: 127.0.0.1:9464]
    #[arg(long, env = "WALPOST_HTTP", value_name = "ADDRESS")]
    http: Option<String>,
    /// A host name that HTTP requests may use, in addition to localhost and IP addresses; "*" allows
    /// any
    #[arg(
        long,
        env = "WALPOST_HTTP_HOST",
        value_name = "NAME",
        value_delimiter = ',',
        hide_short_help = true
    )]
    http_host: Vec<String>,
    /// Unix-domain socket for `walpost pipeline` commands, or off. With systemd's RuntimeDirectory,
    /// a socket is created there by default
    #[arg(
        long,
        env = "WALPOST_CONTROL",
        value_name = "PATH",
        hide_short_help = true
    )]
    control: Option<PathBuf>,
    /// First create the table or functions, the publication and the slot if they don't exist
    #[arg(long)]
    init: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// Runs the pipelines until a signal stops the process or no pipeline can continue.
#[must_use]
pub(crate) fn run(args: &RunArgs) -> Exit {
    let mut definitions = Configured::new(
        args.connection.clone(),
        args.records.clone(),
        args.sink,
        variable,
        || variables().collect(),
    );
    let places = WatchedFiles::capture(definitions.places());
    let first = match definitions.read() {
        Ok(first) => first,
        Err(reason) => {
            error!("{reason}");
            return Exit::Usage;
        }
    };
    if first.defined.is_empty() {
        warn!("no pipeline is defined yet; waiting for one");
    }
    let listener = match listen(args) {
        Ok(listener) => listener,
        Err(exit) => return exit,
    };
    let control = match control(args) {
        Ok(control) => control,
        Err(exit) => return exit,
    };
    if args.init {
        let attempts = first
            .defined
            .iter()
            .map(|pipeline| init_as_own_role(&pipeline.settings));
        let failures: Vec<Exit> = attempts.filter_map(Result::err).collect();
        // If there are several pipelines, don't exit, because the owner of one database must not be
        // able to stop the other pipelines. Pipelines that could not be initialized halt on their
        // own.
        if let (Some(exit), 1) = (failures.first(), first.defined.len()) {
            return *exit;
        }
    }
    supervisor::run(definitions, places, first, listener, control)
}

/// Creates the pipeline's database objects like `walpost init`, but as the pipeline's own role.
fn init_as_own_role(settings: &PipelineSettings) -> Result<(), Exit> {
    let provision = Provision {
        pipeline: settings.name.clone(),
        defined_by: settings.defined_by,
        takes_slot: false,
        target: settings.target.clone(),
        partitioned: false,
        // The role already exists, because this connection uses it.
        role: None,
        owner: None,
        writers: Vec::new(),
        failover: None,
        lock_timeout: LOCK_TIMEOUT,
        row_bytes_max: settings.row_bytes_max,
        max_event_bytes: None,
        first_start: settings.first_start(),
    };
    init::apply(settings, &provision, init::Columns::Compared).map(drop)
}

fn control(args: &RunArgs) -> Result<Option<Control>, Exit> {
    let config = args.connection.config.as_deref();
    let path = config::control(args.control.as_deref(), config, &variable).map_err(|reason| {
        error!("{reason}");
        Exit::Usage
    })?;
    let control = path.map(|path| control::listen(&path)).transpose();
    control.map_err(|reason| {
        error!("{reason}");
        Exit::Usage
    })
}

/// Starts listening for HTTP requests. Call this before pipelines start, so that no pipeline runs
/// unless it can be monitored as configured.
fn listen(args: &RunArgs) -> Result<Option<http::Listener>, Exit> {
    let address = config::http(args.http.as_deref(), args.connection.config.as_deref());
    let hosts = config::http_hosts(&args.http_host, args.connection.config.as_deref());
    let (address, hosts) = address
        .and_then(|address| Ok((address, hosts?)))
        .map_err(|reason| {
            error!("{reason}");
            Exit::Usage
        })?;
    let listening = match address {
        Some(address) => http::listen(&address, &hosts),
        None => http::listen_by_default(&hosts),
    };
    listening.map_err(|reason| {
        error!("{reason}");
        match reason {
            // The address may be in use only temporarily, so exit with a code for which systemd
            // restarts Walpost.
            http::ListenError::InUse(_) => Exit::Failed,
            http::ListenError::Other { .. } | http::ListenError::Host(_) => Exit::Usage,
        }
    })
}
