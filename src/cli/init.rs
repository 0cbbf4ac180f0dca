//! `walpost init`: creates the pipelines' objects in the database.

mod created_objects;

use clap::Args;
use tracing::{error, info, warn};

use self::created_objects::describe_created;
use super::out::{self, say};
use super::{load_to_administer, runtime};
use crate::config::args::ConnectionArgs;
use crate::config::file::SinkName;
use crate::config::values::{parse_duration, parse_size};
use crate::config::{Given, GivenSink};
use crate::model::commands::Commands;
use crate::model::exit::Exit;
use crate::pipeline::recovery::{self, Remedy};
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{
    Catalog, CatalogError, EventLimit, ObservedTable, hidden_rows_warning,
};
use crate::postgres::connect::conninfo::syntax::quote_value;
use crate::postgres::connect::conninfo::{Host, Place};
use crate::postgres::connect::dial::DialError;
use crate::postgres::provision::{LeftTables, Provision, ProvisionError, Script, Scripts};
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// Flags of `walpost init`.
#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Print the SQL statements without running them
    #[arg(long)]
    print: bool,
    /// Partition the table by day
    #[arg(long)]
    partitioned: bool,
    /// The role to create for `walpost run`
    #[arg(
        long,
        env = "WALPOST_ROLE",
        default_value = "walpost",
        value_name = "NAME"
    )]
    role: String,
    /// Don't create a role
    #[arg(long)]
    no_role: bool,
    /// The role that will own the table. It must exist, and the current role must be able to SET
    /// ROLE to it [default: the current role]
    #[arg(long, env = "WALPOST_OWNER", value_name = "NAME")]
    owner: Option<String>,
    /// A role that may send events. The role must exist. Can be repeated to name several roles
    #[arg(
        long,
        env = "WALPOST_WRITER",
        value_name = "NAME",
        value_delimiter = ','
    )]
    writer: Vec<String>,
    /// Enable the slot for failover, which requires PostgreSQL 17 or later [default: if the server
    /// supports it]
    #[arg(long, conflicts_with = "no_failover")]
    failover: bool,
    /// Don't enable the slot for failover
    #[arg(long)]
    no_failover: bool,
    /// Let the pipeline use a slot that belongs to another pipeline, or that walpost init did not
    /// create. Stop the other pipeline first. Pipelines that are defined in files don't need this
    #[arg(long, requires = "pipeline", conflicts_with = "print")]
    take_slot: bool,
    /// Maximum size of an event's payload and headers in a new outbox. Kafka must also accept events
    /// of this size [default: 990000]
    #[arg(long, env = "WALPOST_MAX_EVENT_BYTES", value_name = "SIZE")]
    max_event_bytes: Option<String>,
    /// How long a statement may wait for a lock, and how long creating a slot may wait for running
    /// transactions
    #[arg(
        long,
        env = "WALPOST_LOCK_TIMEOUT",
        default_value = "10s",
        value_name = "DURATION"
    )]
    lock_timeout: String,
    #[command(flatten)]
    connection: ConnectionArgs,
}

/// Creates the pipelines' objects, or prints the SQL that creates them.
#[must_use]
pub(crate) fn run(args: &InitArgs) -> Exit {
    let lock_timeout = match parse_duration(&args.lock_timeout) {
        Ok(timeout) => timeout,
        Err(reason) => {
            error!("--lock-timeout: {reason}");
            return Exit::Usage;
        }
    };
    let max_event_bytes = args
        .max_event_bytes
        .as_deref()
        .filter(|text| !text.is_empty());
    let max_event_bytes = match max_event_bytes.map(event_size).transpose() {
        Ok(limit) => limit,
        Err(reason) => {
            error!("--max-event-bytes: {reason}");
            return Exit::Usage;
        }
    };
    let given = Given {
        connection: &args.connection,
        records: None,
        sink: GivenSink::Instead(SinkName::Stdout),
        accepts_single_table: true,
    };
    let pipelines = match load_to_administer(&given) {
        Ok(pipelines) => pipelines,
        Err(exit) => return exit,
    };
    // Treat an empty environment variable as if it were not set.
    let owner = args.owner.clone().filter(|name| !name.is_empty());
    let writers = args.writer.iter().filter(|name| !name.is_empty());
    let writers: Vec<_> = writers.cloned().collect();
    for (flag, is_given) in [
        ("--partitioned", args.partitioned),
        ("--owner", owner.is_some()),
        ("--writer", !writers.is_empty()),
        ("--max-event-bytes", max_event_bytes.is_some()),
    ] {
        let rejects_flag = |settings: &&PipelineSettings| match settings.target.outbox {
            Outbox::Table(_) | Outbox::OneOf { .. } => false,
            Outbox::Tables(_) => true,
            Outbox::Messages { .. } => !matches!(flag, "--writer" | "--max-event-bytes"),
        };
        if is_given && let Some(settings) = pipelines.iter().find(rejects_flag) {
            let remedy = match settings.target.outbox.is_messages() {
                true => format!("this outbox uses logical decoding messages. Remove {flag}"),
                false => {
                    "this outbox consists of several tables. Select one with --table".to_owned()
                }
            };
            error!(
                "pipeline {:?}: {flag} applies to a single table, but {remedy}",
                settings.name
            );
            return Exit::Usage;
        }
    }
    let several = pipelines.len() > 1;
    let mut exit = Exit::Done;
    for settings in &pipelines {
        let provision = Provision {
            pipeline: settings.name.clone(),
            defined_by: settings.defined_by,
            takes_slot: args.take_slot,
            target: settings.target.clone(),
            partitioned: args.partitioned,
            role: (!args.no_role).then(|| args.role.clone()),
            owner: owner.clone(),
            writers: writers.clone(),
            failover: match (args.failover, args.no_failover) {
                (true, _) => Some(true),
                (_, true) => Some(false),
                _ => None,
            },
            lock_timeout,
            row_bytes_max: settings.row_bytes_max,
            max_event_bytes,
            first_start: settings.first_start(),
        };
        // `init` does not accept flags of `run` such as `--payload`, so the pipeline's settings are
        // complete only if there is a configuration file.
        let columns = match args.connection.config {
            Some(_) => Columns::Compared,
            None => Columns::Unknown,
        };
        let done = match args.print {
            true => print(settings, &provision, several),
            false => apply(settings, &provision, columns).and_then(|readiness| {
                add_tables(settings, &provision, columns)?;
                log_next(settings, args);
                readiness.exit()
            }),
        };
        if let Err(ended) = done {
            exit = exit.and(ended);
        }
    }
    exit
}

/// Logs the commands to run next. Without a configuration file, these commands connect as the new
/// role and name the Kafka brokers, or a placeholder for them.
fn log_next(settings: &PipelineSettings, args: &InitArgs) {
    let role = (!args.no_role).then_some(&*args.role);
    let commands = settings.target.commands.after_init(role);
    info!(
        pipeline = settings.name,
        "next: {}; then: {}",
        commands.print(["check"]),
        commands.print(["run"])
    );
}

/// Prints the SQL scripts for psql, including the scripts for each table that `init` would add to
/// the publication.
///
/// # Errors
/// Returns an error if the tables can't be listed.
fn print(settings: &PipelineSettings, provision: &Provision, several: bool) -> Result<(), Exit> {
    print_session_settings();
    if several {
        let database = settings.postgres.dbname();
        say!("-- pipeline {:?}, in database {database:?}", settings.name);
        // Quote the name twice: as a value in a connection string, and then as an argument to a
        // psql meta-command.
        let value = quote_value(database).replace('"', "\"\"");
        say!("\\connect -reuse-previous=on \"dbname={value}\"");
        print_session_settings();
    }
    print_scripts(provision);
    for table in unpublished(settings)? {
        say!("-- {table} exists and is not in the publication");
        print_scripts(&for_table(provision, &table));
    }
    Ok(())
}

/// Prints settings that make psql stop at the first error and make PostgreSQL parse literals as
/// intended. Otherwise, the database's owner could use ALTER DATABASE ... SET to change how the
/// script is parsed.
fn print_session_settings() {
    say!("\\set ON_ERROR_STOP on");
    say!("\\encoding UTF8");
    say!("SET backslash_quote = 'safe_encoding';");
    say!("SET standard_conforming_strings = on;");
    say!("SET search_path = pg_catalog, pg_temp;");
}

/// Prints the scripts. As in [`apply`], each script runs in the same transaction as the statements
/// that examine the objects it uses.
fn print_scripts(provision: &Provision) {
    let Scripts { together, after } = provision.scripts();
    print_transaction(&together);
    for script in &after {
        print_transaction(std::slice::from_ref(script));
    }
}

fn print_transaction(scripts: &[Script]) {
    say!("BEGIN;");
    for script in scripts {
        print_script(script);
    }
    say!("COMMIT;");
}

fn print_script(script: &Script) {
    say!("-- {}", script.makes);
    out::script(&format!("{}\n", script.sql));
}

/// Whether all settings that determine a table's columns are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Columns {
    /// The settings are complete, so each added table's columns are compared with them.
    Compared,
    /// The settings may be incomplete, because some may be passed to `walpost run` as flags.
    Unknown,
}

/// Whether the pipeline is ready to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// Not ready, because child tables of an outbox table contain rows that are not delivered. An
    /// error about these rows has already been logged.
    HasHiddenRows,
}

impl Readiness {
    fn exit(self) -> Result<(), Exit> {
        match self {
            Self::Ready => Ok(()),
            Self::HasHiddenRows => Err(Exit::Halted),
        }
    }
}

/// Creates the objects of one pipeline. Logs the error if this fails.
///
/// # Errors
/// Returns the program's exit code if the objects can't be created.
pub(super) fn apply(
    settings: &PipelineSettings,
    provision: &Provision,
    columns: Columns,
) -> Result<Readiness, Exit> {
    let database = settings.postgres.describe();
    let pipeline = &settings.name;
    let mut unfit = None;
    let applied = runtime()?.block_on(async {
        let catalog = Catalog::open(&settings.postgres.for_init())
            .await
            .map_err(|reason| ProvisionError {
                step: "connection".to_owned(),
                reason,
                left: LeftTables::Nothing,
            })?;
        let fits = |table: &TableName, found: &ObservedTable| match columns {
            Columns::Compared => settings
                .mapping_for(table, Some(found))
                .map(|_| ())
                .map_err(|error| error.to_string()),
            Columns::Unknown => Ok(()),
        };
        let role = provision.role.as_deref();
        let had_role = has_role(&catalog, role).await;
        let before = catalog.observe(&provision.target).await;
        let applied = provision.apply(&catalog, fits).await;
        if applied.is_ok()
            && let (Ok(before), Ok(after)) = (before, catalog.observe(&provision.target).await)
        {
            let role = role.zip(had_role);
            info!(
                pipeline,
                "{}",
                describe_created(&provision.target, role, &before, &after)
            );
            if columns == Columns::Unknown {
                unfit = settings.check_columns(&after).err();
            }
        }
        let mut applied = match applied {
            Ok(()) => {
                warn_of_unchanged_limit(provision, &catalog).await;
                hidden_rows(&catalog, &provision.target).await
            }
            Err(error) => Err(error),
        };
        if let Err(ProvisionError {
            reason: CatalogError::Server(error),
            ..
        }) = &mut applied
        {
            catalog.add_limit_hint(error).await;
            error.complete_commands(&provision.target.commands);
        }
        applied
    });
    let error = match applied {
        Ok(None) => {
            if let Some(error) = unfit {
                warn!(
                    pipeline, %database,
                    "the outbox is not ready yet: {error}. To use the table unchanged, specify its columns with the walpost run \
                     options --payload, --topic, --key and --header"
                );
                return Ok(Readiness::Ready);
            }
            let target = &settings.target;
            info!(pipeline, %database, outbox = %target.outbox, publication = target.publication, slot = target.slot, "ready");
            return Ok(Readiness::Ready);
        }
        Ok(Some((what, remedy))) => {
            error!(pipeline, %database, "{what}. {remedy}");
            return Ok(Readiness::HasHiddenRows);
        }
        Err(error) => error,
    };
    let hint = match (&error.reason, error.left) {
        (reason, LeftTables::NoSlot) if is_lock_timeout(reason) => {
            "A slot can be created only after all transactions that are already running have ended (see \
             pg_stat_activity). Run init again, or raise --lock-timeout"
        }
        (reason, _) if is_lock_timeout(reason) => {
            "Another transaction holds the lock (see pg_locks). Run init again, or raise --lock-timeout"
        }
        (CatalogError::Server(error), _) if error.code == "42501" => &format!(
            "Run init as a role that has REPLICATION and owns the table or functions, or as a superuser{}",
            as_superuser(settings)
        ),
        (CatalogError::Dial(DialError::Server { error, .. }), _)
            if error.code.starts_with("28") && settings.postgres.user() != SUPERUSER =>
        {
            &format!(
                "Run init as a superuser, or as the owner of the table{}",
                as_superuser(settings)
            )
        }
        _ => "",
    };
    let ProvisionError { reason, left, .. } = &error;
    // The error may end with a hint from the server. A hint is a sentence or an SQL statement, and
    // has its own punctuation.
    let error = error.to_string();
    let error = error.trim_end_matches(['.', ';']);
    let separator = if hint.is_empty() { "" } else { ". " };
    error!(pipeline, %database, "{error}{separator}{hint}. {left}");
    Err(match recovery::catalog_remedy(reason) {
        Remedy::Reconnect if is_lock_timeout(reason) => Exit::Halted,
        remedy => remedy.into(),
    })
}

/// The superuser that PostgreSQL packages create, both as a database role and as an operating
/// system user.
const SUPERUSER: &str = "postgres";

/// Returns the suffix of an error message: a colon, followed by the command that runs `init` as the
/// superuser over a Unix-domain socket. Returns an empty string unless the pipeline has a single
/// table and connects to a single Unix-domain socket. The command does not use the configuration
/// file, because the operating system user `postgres` may not be able to read it.
fn as_superuser(settings: &PipelineSettings) -> String {
    let target = &settings.target;
    let [Host { place, port }] = &settings.postgres.hosts[..] else {
        return String::new();
    };
    let (Outbox::Table(table), Place::Socket(folder)) = (&target.outbox, place) else {
        return String::new();
    };
    let connection = format!(
        "host={} port={port} dbname={} user={SUPERUSER}",
        quote_value(folder),
        quote_value(settings.postgres.dbname())
    );
    let table = table.to_string();
    let init = Commands::for_pipeline(&settings.name).print([
        "init",
        "--postgres",
        &connection,
        "--table",
        &table,
        "--publication",
        &target.publication,
        "--slot",
        &target.slot,
    ]);
    format!(": sudo -u {SUPERUSER} {init}")
}

/// Returns whether the role exists, or `None` if there is no role to create or the query fails.
async fn has_role(catalog: &Catalog, role: Option<&str>) -> Option<bool> {
    catalog.has_role(role?).await.ok()
}

/// Parses the maximum size of an event.
fn event_size(text: &str) -> Result<u64, String> {
    // PostgreSQL's protocol messages are limited to about 1 GB.
    const MAX: u64 = 1_000_000_000;
    match parse_size(text)?.0 {
        size @ 1..=MAX => Ok(size),
        size => Err(format!("found {size} bytes, expected 1 to {MAX}")),
    }
}

/// Warns if the table already existed with a limit other than the requested limit, because `init`
/// does not change existing tables.
async fn warn_of_unchanged_limit(provision: &Provision, catalog: &Catalog) {
    let (Some(requested), Some(table)) = (
        provision.max_event_bytes,
        provision.target.outbox.table().cloned(),
    ) else {
        return;
    };
    let Ok(found) = catalog.event_limits(std::slice::from_ref(&table)).await else {
        return;
    };
    let found = found.first();
    if found.is_some_and(|limit| limit.bytes == requested) {
        return;
    }
    let limit = match found {
        Some(limit) => format!(
            "table {table} already existed and still limits events to {} bytes",
            limit.bytes
        ),
        None => {
            format!("table {table} already existed and still has no limit on the size of an event")
        }
    };
    warn!(
        pipeline = provision.pipeline,
        "{limit}. As the table's owner, change the limit: {}",
        EventLimit {
            table: table.clone(),
            bytes: found.map_or(0, |limit| limit.bytes)
        }
        .change_to(requested)
    );
}

/// Returns a description of rows that queries of an outbox table return but that are not part of
/// the replication stream, and the command that fixes the problem.
async fn hidden_rows(
    catalog: &Catalog,
    target: &Target,
) -> Result<Option<(String, String)>, ProvisionError> {
    let queried = async {
        let observed = catalog.observe(target).await?;
        if let Some(warning) = observed.encoding_warning() {
            warn!("{warning}");
        }
        let publication = observed.publication;
        let tables = publication.map(|found| found.outbox_tables(&target.outbox));
        let hidden = catalog.hidden_rows(&tables.unwrap_or_default()).await?;
        Ok::<_, CatalogError>(hidden_rows_warning(target, &hidden))
    };
    queried.await.map_err(|reason| ProvisionError {
        step: "failed to check whether any tables inherit from an outbox table".to_owned(),
        reason,
        left: LeftTables::Slot,
    })
}

/// Adds to the publication every existing table that matches the outbox's patterns but is not yet
/// published, as `walpost init --table` does for a single table. A table that can't be added does
/// not prevent other tables from being added.
///
/// # Errors
/// Returns the program's exit code if the tables can't be listed or one of them can't be added.
fn add_tables(
    settings: &PipelineSettings,
    provision: &Provision,
    columns: Columns,
) -> Result<(), Exit> {
    let mut exit = Exit::Done;
    for table in unpublished(settings)? {
        info!(pipeline = settings.name, %table, "adding an existing table");
        let applied = apply(settings, &for_table(provision, &table), columns);
        if let Err(ended) = applied.and_then(Readiness::exit) {
            exit = exit.and(ended);
        }
    }
    match exit {
        Exit::Done => Ok(()),
        exit => Err(exit),
    }
}

/// Returns the existing tables that match the outbox's patterns but are not in the publication.
fn unpublished(settings: &PipelineSettings) -> Result<Vec<TableName>, Exit> {
    let target = &settings.target;
    let Outbox::Tables(patterns) = &target.outbox else {
        return Ok(Vec::new());
    };
    let listed = runtime()?.block_on(async {
        let catalog = Catalog::open(&settings.postgres).await?;
        let published = catalog.observe(target).await?.publication;
        let published = published.map_or_else(Vec::new, |publication| publication.tables);
        catalog.unpublished(patterns, &published).await
    });
    listed.map_err(|error| {
        let pipeline = &settings.name;
        error!(
            pipeline,
            "failed to list the tables to add to the publication ({patterns}): {error}"
        );
        recovery::catalog_remedy(&error).into()
    })
}

fn for_table(provision: &Provision, table: &TableName) -> Provision {
    let target = &provision.target;
    Provision {
        target: Target {
            outbox: target.outbox.narrow_to(table),
            ..target.clone()
        },
        ..provision.clone()
    }
}

/// Returns whether the error means that `lock_timeout` has expired.
fn is_lock_timeout(error: &CatalogError) -> bool {
    matches!(error, CatalogError::Server(error) if error.code == "55P03")
}
