//! `walpost check`: reports problems that would make `run` fail or lose data later, with a remedy
//! for each problem.

mod exactly_once;
mod findings;
mod kafka;
mod postgres;

use clap::Args;
use futures_util::{StreamExt, stream};
use tokio::sync::Mutex;

use self::exactly_once::exactly_once;
use self::findings::{Finding, Outcome, Report, SOURCE, print_findings};
use self::kafka::kafka;
use self::postgres::{postgres, unused_slots};
use super::{CONCURRENT_QUERIES_MAX, log_loaded, runtime, variable, variables};
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::{self, Given, GivenSink};
use crate::kafka::probe::ProducerFinding;
use crate::kafka::properties::{Properties, check_files, client_config, invalid_login};
use crate::model::exit::Exit;
use crate::pipeline::settings::{PipelineSettings, SinkSettings};
use crate::postgres::catalog::Catalog;
use crate::retention::{self, RetentionError};

/// Flags of `walpost check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Print a JSON document instead of text
    #[arg(long)]
    json: bool,
    /// Check only the configuration, without connecting to PostgreSQL or Kafka
    #[arg(long)]
    offline: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// Checks the pipelines and prints the findings.
#[must_use]
pub(crate) fn run(args: &CheckArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: Some(&args.records),
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    if args.offline {
        return offline(&given, args.json);
    }
    let loaded = match log_loaded(config::load(&given, &variable, variables())) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(exit) => return exit,
    };
    let shared = Shared::default();
    let checked = stream::iter(&loaded.pipelines)
        .map(|settings| pipeline(settings, &shared))
        .buffered(CONCURRENT_QUERIES_MAX);
    let found: Vec<_> = runtime.block_on(checked.collect());
    // Unless all pipelines were checked, a slot that seems unused may belong to a pipeline that was
    // not selected or failed to load.
    let is_complete = args.connection.pipeline.is_empty() && loaded.failures.is_empty();
    let mut findings = source_findings(loaded.failures, Outcome::Failure);
    findings.extend(found.into_iter().flatten());
    if is_complete && args.connection.config.is_some() {
        runtime.block_on(unused_slots(&loaded.pipelines, &mut findings));
    }
    runtime.shutdown_background();
    print_findings(&findings, args.json)
}

/// State shared by pipelines that are checked concurrently.
#[derive(Default)]
struct Shared<'s> {
    /// Held while a replication connection is open, so that `walpost check` opens at most one such
    /// connection at a time. A server limits the number of replication connections
    /// (max_wal_senders), and each running pipeline needs one.
    replication: Mutex<()>,
    /// The librdkafka properties of each producer that has already been checked, and the resulting
    /// finding.
    producers: Mutex<Vec<(&'s Properties, ProducerFinding)>>,
}

async fn pipeline<'s>(settings: &'s PipelineSettings, shared: &Shared<'s>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut report = Report {
        pipeline: settings.name.clone(),
        findings: &mut findings,
    };
    let largest_event = postgres(settings, &shared.replication, &mut report).await;
    for exposure in settings.postgres.exposures() {
        report.add("encryption", Outcome::Warning, exposure);
    }
    retention(settings, &mut report).await;
    for warning in settings.sink.warnings() {
        report.add("kafka encryption", Outcome::Warning, warning);
    }
    if kafka(settings, largest_event, &shared.producers, &mut report).await {
        exactly_once(settings, &mut report).await;
    }
    findings
}

/// Checks the configuration and reports how Walpost interprets it, without connecting to any
/// server.
fn offline(given: &Given<'_>, json: bool) -> Exit {
    let loaded = match log_loaded(config::load_offline(given, &variable, variables())) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let mut findings = source_findings(loaded.failures, Outcome::Warning);
    for settings in &loaded.pipelines {
        let mut report = Report {
            pipeline: settings.name.clone(),
            findings: &mut findings,
        };
        let database = settings.postgres.describe();
        let target = &settings.target;
        let message = format!("{}, slot {:?}, in {database}", target.outbox, target.slot);
        report.add("outbox", Outcome::Ok, message);
        let outbox = &settings.outbox;
        let message = format!(
            "topic {}, key {}, payload {}",
            outbox.topic, outbox.key, outbox.payload
        );
        report.add("records", Outcome::Ok, message);
        let is_column = |key: &str| ["aggregateid", "aggregatetype", "id", "type"].contains(&key);
        if let Some(warning) = outbox.key_without_braces(is_column) {
            report.add("key", Outcome::Warning, warning);
        }
        for exposure in settings.postgres.exposures() {
            report.add("encryption", Outcome::Warning, exposure);
        }
        for warning in settings.sink.warnings() {
            report.add("kafka encryption", Outcome::Warning, warning);
        }
        if let SinkSettings::Kafka { properties, .. } = &settings.sink {
            if let Some(invalid) = invalid_login(|name| properties.get(name).map(String::as_str)) {
                report.add("kafka login", Outcome::Warning, invalid);
            }
            // Missing files cause only a warning, because they may exist on the machine that will
            // use this configuration.
            if let Err(error) = check_files(&client_config(properties, "walpost-check")) {
                report.add("kafka files", Outcome::Warning, error);
            }
        }
        let message = "the configuration is valid; PostgreSQL and Kafka were not contacted";
        report.add("configuration", Outcome::Ok, message);
    }
    print_findings(&findings, json)
}

/// Converts the errors of pipeline sources to findings.
fn source_findings(failures: Vec<String>, outcome: Outcome) -> Vec<Finding> {
    let finding = |message| Finding {
        pipeline: "walpost.toml".to_owned(),
        check: SOURCE,
        outcome,
        message,
    };
    failures.into_iter().map(finding).collect()
}

/// Reports problems that would prevent partitions from being created or dropped.
async fn retention(settings: &PipelineSettings, report: &mut Report<'_>) {
    if settings.retention.keep.is_none() {
        return;
    }
    // The connection check has already reported the error.
    let Ok(catalog) = Catalog::open(&settings.postgres).await else {
        return;
    };
    let pass = retention::pass(&catalog, settings, true);
    let errors = match pass.await {
        Ok(found) => found.problems,
        Err(error) => vec![error.into()],
    };
    // The database checks have already reported problems such as a missing slot.
    let errors: Vec<_> = errors
        .iter()
        .filter(|error| !matches!(error, RetentionError::Problem(_)))
        .collect();
    for error in &errors {
        report.add("retention", Outcome::Warning, error);
    }
    if errors.is_empty() {
        let message = "delivered rows that are older than the retention period can be removed";
        report.add("retention", Outcome::Ok, message);
    }
}
