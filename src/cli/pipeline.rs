//! `walpost pipeline`: sends a request to the running process through its control socket.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use tracing::error;

use super::out::say;
use super::variable;
use crate::config;
use crate::model::exit::Exit;
use crate::supervisor::control::{self, Request};

/// Subcommands of `walpost pipeline`.
#[derive(Debug, Subcommand)]
pub(crate) enum PipelineCommand {
    /// List the pipelines of the running process and their states
    List(SocketArgs),
    /// Drain and stop pipelines; while they are stopped, PostgreSQL retains WAL for their slots
    Stop(NamesArgs),
    /// Start pipelines that were stopped or have halted
    Start(NamesArgs),
    /// Drain pipelines, and start them again
    Restart(NamesArgs),
    /// Reload the configuration, like SIGHUP, and show the changes
    Reload(ReloadArgs),
}

/// The flags that determine the path of the control socket.
#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// The control socket of the running process; if neither this flag nor the configuration file
    /// sets it, /run/walpost/control.sock
    #[arg(long, env = "WALPOST_CONTROL", value_name = "PATH")]
    control: Option<PathBuf>,
    /// Configuration file (walpost.toml), which can name the control socket
    #[arg(long, env = "WALPOST_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct NamesArgs {
    /// Names of pipelines
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ReloadArgs {
    /// Reload even if this removes more than half of the pipelines of a source
    #[arg(long)]
    accept: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// Sends the request to the running process and prints the result.
#[must_use]
pub(crate) fn run(command: &PipelineCommand) -> Exit {
    let (socket, request) = match command {
        PipelineCommand::List(socket) => (socket, Request::List),
        PipelineCommand::Stop(args) => (&args.socket, Request::Stop(args.names.clone())),
        PipelineCommand::Start(args) => (&args.socket, Request::Start(args.names.clone())),
        PipelineCommand::Restart(args) => (&args.socket, Request::Restart(args.names.clone())),
        PipelineCommand::Reload(ReloadArgs { accept, socket }) => {
            (socket, Request::Reload { accept: *accept })
        }
    };
    let named = config::control(
        socket.control.as_deref(),
        socket.config.as_deref(),
        &variable,
    );
    let path = match named {
        Ok(named) => named.unwrap_or_else(|| PathBuf::from(config::CONTROL_BY_SYSTEMD)),
        Err(reason) => {
            error!("{reason}");
            return Exit::Usage;
        }
    };
    let answer = match control::send_request(&path, &request) {
        Ok(answer) => answer,
        Err(reason) => {
            error!("{}", connection_error(&path, &reason));
            return Exit::Failed;
        }
    };
    for line in &answer.done {
        say!("{line}");
    }
    for line in &answer.refused {
        error!("{line}");
    }
    match answer.refused.is_empty() {
        true => Exit::Done,
        false => Exit::Failed,
    }
}

fn connection_error(path: &Path, reason: &std::io::Error) -> String {
    if reason.kind() == std::io::ErrorKind::PermissionDenied {
        return format!(
            "control socket {}: {reason}. Run the command as root, or as the user that runs Walpost: sudo -u walpost ...",
            path.display()
        );
    }
    format!(
        "control socket {}: {reason}. A running Walpost process must be listening on the socket, and this command must be run as \
         root or as Walpost's user. To find the path, search Walpost's log for \"walpost pipeline\"; to set it, use --control \
         PATH, or control at the top of walpost.toml",
        path.display()
    )
}
