//! `walpost init`

use clap::Args;
use tracing::{error, info};

use super::out::{self, say};
use super::{load, runtime};
use crate::config::Given;
use crate::config::args::{ConnectionArgs, RecordArgs, RetentionArgs};
use crate::config::file::SinkName;
use crate::config::values::duration;
use crate::model::exit::Exit;
use crate::pipeline::recovery::{self, Remedy};
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{Catalog, CatalogError};
use crate::postgres::provision::Provision;

/// Flags of `walpost init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    /// Show the SQL and change nothing
    #[arg(long)]
    print: bool,
    /// Partition the table by day
    #[arg(long)]
    partitioned: bool,
    /// The role to make for `walpost run`
    #[arg(
        long,
        env = "WALPOST_ROLE",
        default_value = "walpost",
        value_name = "NAME"
    )]
    role: String,
    /// Make no role
    #[arg(long)]
    no_role: bool,
    /// A role that may send events, and is there already; repeated, each of them
    #[arg(
        long,
        env = "WALPOST_WRITER",
        value_name = "NAME",
        value_delimiter = ','
    )]
    writer: Vec<String>,
    /// How long a statement may wait for a lock. A slot also waits for running transactions
    #[arg(
        long,
        env = "WALPOST_LOCK_TIMEOUT",
        default_value = "10s",
        value_name = "DURATION"
    )]
    lock_timeout: String,
}

/// Makes what the pipelines need.
#[must_use]
pub fn run(args: &InitArgs) -> Exit {
    let lock_timeout = match duration(&args.lock_timeout) {
        Ok(timeout) => timeout,
        Err(reason) => {
            error!("--lock-timeout: {reason}");
            return Exit::Usage;
        }
    };
    let records = RecordArgs::of_no_sink(RetentionArgs::default());
    let given = Given {
        connection: &args.connection,
        records: Some(&records),
        sink: Some(SinkName::Stdout),
    };
    let pipelines = match load(&given) {
        Ok(pipelines) => pipelines,
        Err(exit) => return exit,
    };
    if args.partitioned
        && let Some(settings) = pipelines.iter().find(|s| s.target.outbox.table().is_none())
    {
        error!(
            "pipeline {:?}: --partitioned is for a table, and this outbox is in the log; leave it out",
            settings.name
        );
        return Exit::Usage;
    }
    for settings in &pipelines {
        let provision = Provision {
            pipeline: settings.name.clone(),
            target: settings.target.clone(),
            partitioned: args.partitioned,
            role: (!args.no_role).then(|| args.role.clone()),
            // A variable that is empty names none.
            writers: args
                .writer
                .iter()
                .filter(|name| !name.is_empty())
                .cloned()
                .collect(),
            lock_timeout,
        };
        if args.print {
            for script in provision.scripts() {
                say!("-- {}", script.makes);
                out::script(&format!("{}\n", script.sql));
            }
        } else if let Err(exit) = apply(settings, &provision) {
            return exit;
        }
    }
    Exit::Done
}

/// Makes what one pipeline needs, or logs why not.
///
/// # Errors
/// How the program is to end.
pub(super) fn apply(settings: &PipelineSettings, provision: &Provision) -> Result<(), Exit> {
    let database = settings.postgres.describe();
    let applied = runtime()?.block_on(async {
        let catalog = Catalog::open(&settings.postgres)
            .await
            .map_err(|error| ("connection".to_owned(), error))?;
        let mut applied = provision.apply(&catalog).await;
        if let Err((_, CatalogError::Server(error))) = &mut applied {
            catalog.name_users(error).await;
        }
        applied
    });
    let Err((step, reason)) = applied else {
        let target = &settings.target;
        info!(%database, outbox = %target.outbox, publication = target.publication, slot = target.slot, "ready");
        return Ok(());
    };
    let hint = match &reason {
        _ if is_lock_timeout(&reason) => {
            ". A slot waits for every transaction that was running: see pg_stat_activity; then run \
             init again, or raise --lock-timeout"
        }
        CatalogError::Server(error) if error.code == "42501" => {
            ". Run init as the owner of the table or functions, with REPLICATION, or as a superuser"
        }
        _ => "",
    };
    error!(%database, "{step}: {reason}{hint}");
    Err(match recovery::of_catalog(&reason) {
        Remedy::Reconnect if is_lock_timeout(&reason) => Exit::Halted,
        remedy => remedy.into(),
    })
}

/// `lock_timeout` has passed.
fn is_lock_timeout(error: &CatalogError) -> bool {
    matches!(error, CatalogError::Server(error) if error.code == "55P03")
}
