//! `walpost check`: everything that would make `run` fail or lose data later, each with its remedy.

use clap::Args;
use futures_util::{StreamExt, stream};
use serde::Serialize;
use tokio::sync::Mutex;

use super::out::{self, say};
use super::{AT_ONCE, FEW, loaded, runtime, variable, variables};
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::{self, Given};
use crate::delivery::checkpoint::HistoryError;
use crate::kafka::examine::Examined;
use crate::kafka::limits::compaction_warning;
use crate::kafka::probe::{self, BrokerFinding, ProducerFinding};
use crate::kafka::properties::{Properties, describe, unsuitable};
use crate::model::exit::Exit;
use crate::pipeline::recovery::{self, Remedy};
use crate::pipeline::settings::{Delivery, PipelineSettings, SinkSettings};
use crate::pipeline::snapshot::{self, Outlook};
use crate::pipeline::wal_budget::budget::OnMax;
use crate::postgres::catalog::failover::Note;
use crate::postgres::catalog::slot_state::FoundState;
use crate::postgres::catalog::{
    Catalog, CatalogError, Everybody, Limit, Observed, Problem, Statement, some_of,
    unpublished_warning,
};
use crate::postgres::replication::{BUFFER_WANTED, Connection, ConnectionError};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::Outbox;
use crate::retention;
use crate::retention::RetentionError;
use crate::sink::SinkError;

/// Flags of `walpost check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
    /// Check only the configuration, and connect to nothing
    #[arg(long)]
    offline: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// How a check came out, the worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    /// As it should be.
    Ok,
    /// `run` works, but data can be lost or repeated later.
    Warning,
    /// The server can't be asked now.
    Unreachable,
    /// `run` fails.
    Failure,
}

impl Outcome {
    fn mark(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "WARNING",
            Self::Unreachable => "UNREACHABLE",
            Self::Failure => "FAILED",
        }
    }
}

/// One check.
#[derive(Debug, Serialize)]
struct Finding {
    pipeline: String,
    check: &'static str,
    outcome: Outcome,
    /// What was found; where it isn't as it should be, with the remedy.
    message: String,
}

/// Checks the pipelines and prints what was found.
#[must_use]
pub(crate) fn run(args: &CheckArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: Some(&args.records),
        sink: None,
        takes_one_of: false,
    };
    if args.offline {
        return offline(&given, args.json);
    }
    let loaded = match loaded(config::load(&given, &variable, variables())) {
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
        .buffered(AT_ONCE);
    let found: Vec<_> = runtime.block_on(checked.collect());
    runtime.shutdown_background();
    let mut findings = sources(loaded.failures, Outcome::Failure);
    findings.extend(found.into_iter().flatten());
    told(&findings, args.json)
}

/// What pipelines that are checked at the same time have in common.
#[derive(Default)]
struct Shared<'s> {
    /// Whoever has it may open a connection for replication. A server has few of them, and those that run need theirs.
    turn: Mutex<()>,
    /// What is known of producers, by the properties that they were made with.
    producers: Mutex<Vec<(&'s Properties, ProducerFinding)>>,
}

async fn pipeline<'s>(settings: &'s PipelineSettings, shared: &Shared<'s>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut report = Report {
        pipeline: settings.name.clone(),
        findings: &mut findings,
    };
    postgres(settings, &shared.turn, &mut report).await;
    for exposure in settings.postgres.exposures() {
        report.add("encryption", Outcome::Warning, exposure);
    }
    retention(settings, &mut report).await;
    for open in settings.sink.warnings() {
        report.add("kafka encryption", Outcome::Warning, open);
    }
    if kafka(settings, &shared.producers, &mut report).await {
        exactly_once(settings, &mut report).await;
    }
    findings
}

/// Says what the configuration means. One that can't be used was refused before.
fn offline(given: &Given<'_>, json: bool) -> Exit {
    let loaded = match loaded(config::load_offline(given, &variable, variables())) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let mut findings = sources(loaded.failures, Outcome::Warning);
    for settings in &loaded.pipelines {
        let mut report = Report {
            pipeline: settings.name.clone(),
            findings: &mut findings,
        };
        let database = settings.postgres.describe();
        let target = &settings.target;
        let message = format!("{}, slot {:?}, of {database}", target.outbox, target.slot);
        report.add("outbox", Outcome::Ok, message);
        let outbox = &settings.outbox;
        let message = format!(
            "topic {}, key {}, payload {}",
            outbox.topic, outbox.key, outbox.payload
        );
        report.add("records", Outcome::Ok, message);
        for exposure in settings.postgres.exposures() {
            report.add("encryption", Outcome::Warning, exposure);
        }
        for open in settings.sink.warnings() {
            report.add("kafka encryption", Outcome::Warning, open);
        }
        let message = "the configuration is valid; neither PostgreSQL nor Kafka was asked";
        report.add("configuration", Outcome::Ok, message);
    }
    told(&findings, json)
}

/// The check of what is no pipeline.
const SOURCE: &str = "source";

/// What could not be used of the sources of pipelines.
fn sources(failures: Vec<String>, outcome: Outcome) -> Vec<Finding> {
    let finding = |message| Finding {
        pipeline: "walpost.toml".to_owned(),
        check: SOURCE,
        outcome,
        message,
    };
    failures.into_iter().map(finding).collect()
}

/// Prints what was found.
fn told(findings: &[Finding], json: bool) -> Exit {
    let any = |outcome| findings.iter().any(|finding| finding.outcome == outcome);
    let exit = if any(Outcome::Failure) {
        Exit::Halted
    } else if any(Outcome::Unreachable) {
        Exit::Failed
    } else {
        Exit::Done
    };
    if json {
        out::json(&serde_json::json!({ "ok": exit == Exit::Done, "checks": findings }));
    } else {
        let lines = match of_pipelines(findings) {
            pipelines if pipelines.len() > FEW => summary(&pipelines, findings),
            _ => findings.iter().map(|of| line(of, &of.pipeline)).collect(),
        };
        for line in lines {
            say!("{line}");
        }
    }
    exit
}

fn line(finding: &Finding, pipelines: &str) -> String {
    let mark = finding.outcome.mark();
    format!(
        "{mark:7} {pipelines}: {}: {}",
        finding.check, finding.message
    )
}

/// The pipelines in their order, each with the worst that was found of it.
fn of_pipelines(findings: &[Finding]) -> Vec<(&str, Outcome)> {
    let mut pipelines: Vec<(&str, Outcome)> = Vec::new();
    for finding in findings.iter().filter(|of| of.check != SOURCE) {
        match pipelines
            .iter_mut()
            .find(|(name, _)| *name == finding.pipeline)
        {
            Some((_, worst)) => *worst = finding.outcome.max(*worst),
            None => pipelines.push((&finding.pipeline, finding.outcome)),
        }
    }
    pipelines
}

/// How many pipelines are in which state, and then what is not as it should be: the worst first, and what several have in common
/// once.
fn summary(pipelines: &[(&str, Outcome)], findings: &[Finding]) -> Vec<String> {
    const WORST_FIRST: [Outcome; 4] = [
        Outcome::Failure,
        Outcome::Unreachable,
        Outcome::Warning,
        Outcome::Ok,
    ];
    let counts = WORST_FIRST.map(|outcome| {
        let count = pipelines
            .iter()
            .filter(|(_, worst)| *worst == outcome)
            .count();
        (count > 0).then(|| format!("{count} {}", outcome.mark()))
    });
    let counts: Vec<_> = counts.into_iter().flatten().collect();
    let mut lines = vec![format!(
        "{} pipelines: {}",
        pipelines.len(),
        counts.join(", ")
    )];
    for outcome in &WORST_FIRST[..3] {
        let mut alike: Vec<(&Finding, Vec<&str>)> = Vec::new();
        for finding in findings.iter().filter(|of| of.outcome == *outcome) {
            let same = alike.iter_mut().find(|(first, _)| {
                (first.check, &first.message) == (finding.check, &finding.message)
            });
            match same {
                Some((_, names)) => names.push(&finding.pipeline),
                None => alike.push((finding, vec![&finding.pipeline])),
            }
        }
        let lines_of = alike
            .iter()
            .map(|(first, names)| line(first, &some_names(names)));
        lines.extend(lines_of);
    }
    lines.push("each check of one pipeline: walpost check --pipeline NAME".to_owned());
    lines
}

fn some_names(names: &[&str]) -> String {
    match names.split_at_checked(FEW) {
        Some((some, others @ [_, _, ..])) => {
            format!("{} and {} others", some.join(", "), others.len())
        }
        _ => names.join(", "),
    }
}

struct Report<'f> {
    pipeline: String,
    findings: &'f mut Vec<Finding>,
}

impl Report<'_> {
    fn add(&mut self, check: &'static str, outcome: Outcome, message: impl ToString) {
        let (pipeline, message) = (self.pipeline.clone(), message.to_string());
        self.findings.push(Finding {
            pipeline,
            check,
            outcome,
            message,
        });
    }
}

/// The outcome of an error that calls for `remedy`.
fn of(remedy: Remedy) -> Outcome {
    match remedy {
        Remedy::Halt => Outcome::Failure,
        Remedy::Reconnect | Remedy::RebuildSink | Remedy::StandBy => Outcome::Unreachable,
    }
}

async fn postgres(settings: &PipelineSettings, turn: &Mutex<()>, report: &mut Report<'_>) {
    let database = settings.postgres.describe();
    let opened = match Catalog::open(&settings.postgres).await {
        Ok(catalog) => {
            report.add("connection", Outcome::Ok, format!("{database} accepts SQL"));
            let observed = catalog.look(&settings.target).await;
            observed.map(|observed| (catalog, observed))
        }
        Err(error) => Err(error),
    };
    let (catalog, observed) = match opened {
        Ok(opened) => opened,
        Err(error) => return report.add("connection", of(recovery::of_catalog(&error)), error),
    };
    // A pooler can accept the connection, and not have passed on what it is for.
    let opened = async {
        let turn = turn.lock().await;
        let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
        let mut connection = Connection::open(&settings.postgres, limit, row_bytes).await?;
        connection.identify().await?;
        Ok::<_, ConnectionError>((connection, turn))
    };
    match opened.await {
        Ok((connection, _turn)) => {
            let message = "a replication connection is accepted";
            report.add("replication", Outcome::Ok, message);
            buffer(&connection, report);
        }
        Err(mut error) => {
            let mut is_explained = false;
            if let Some(error) = error.server_mut() {
                catalog.explain_refusal(error).await;
                is_explained = error.hint.is_some();
            }
            let needs = match is_explained {
                true => "",
                false => ". The role needs REPLICATION, and pg_hba.conf a line for its database",
            };
            report.add("replication", Outcome::Failure, format!("{error}{needs}"));
        }
    }
    let problems = observed.problems(&settings.target);
    for problem in &problems {
        let outcome = match problem {
            Problem::InRecovery { .. } => Outcome::Unreachable,
            _ => Outcome::Failure,
        };
        report.add("database", outcome, problem);
    }
    if problems.is_empty() {
        report.add(
            "database",
            Outcome::Ok,
            "outbox, publication and slot exist and fit together",
        );
    }
    owners(settings, &observed, &catalog, report).await;
    columns(settings, &observed, report);
    budget(settings, &observed, &catalog, report).await;
    let mut needs_slot = observed.slot.is_none();
    if problems.is_empty() {
        match snapshot::outlook(settings, &catalog, &observed).await {
            Ok(Some(outlook)) => {
                // The snapshot takes a temporary one.
                needs_slot |= matches!(outlook, Outlook::Copies(_));
                report.add("older rows", Outcome::Ok, outlook);
            }
            Ok(None) => {}
            Err(error) => report.add("older rows", of(recovery::of_snapshot(&error)), error),
        }
    }
    if needs_slot {
        match catalog.used_up(Limit::Slots).await {
            Ok(Some(used_up)) => report.add("slots", Outcome::Failure, used_up),
            Ok(None) => {}
            Err(error) => report.add("slots", of(recovery::of_catalog(&error)), error),
        }
    }
    tables(settings, &observed, &catalog, report).await;
    risks(settings, &observed, report);
    failover(settings, &catalog, report).await;
    moved(settings, &observed, &catalog, report).await;
    if matches!(settings.target.outbox, Outbox::Messages { .. }) {
        match catalog.everybody().await {
            Ok(everybody) => forgery(&everybody, report),
            Err(error) => report.add("publish", of(recovery::of_catalog(&error)), error),
        }
    }
}

/// A small buffer costs time and nothing else.
fn buffer(connection: &Connection, report: &mut Report<'_>) {
    if let Some(bytes) = connection
        .unix_buffer()
        .filter(|bytes| *bytes < BUFFER_WANTED)
    {
        let message = format!(
            "the buffer of the unix-domain socket takes {bytes} bytes. A backlog is delivered faster over TCP (host=localhost), or \
             with more: sysctl -w net.core.wmem_default={BUFFER_WANTED}, and a line in /etc/sysctl.d to keep it; connections that \
             are opened then have it"
        );
        report.add("socket", Outcome::Ok, message);
    }
}

/// Who can write events that nobody meant.
fn forgery(everybody: &Everybody, report: &mut Report<'_>) {
    const FIRST: &str =
        "First let those that are to: walpost init --outbox messages --writer ROLE.";
    if everybody.publishes {
        let message = format!(
            "every role of the database may publish events. {FIRST} Then: REVOKE EXECUTE ON FUNCTION walpost.publish(text, \
             text, text, jsonb, jsonb, uuid, text), walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text) FROM \
             PUBLIC; REVOKE USAGE ON SCHEMA walpost FROM PUBLIC"
        );
        report.add("publish", Outcome::Warning, message);
    }
    if let Some(functions) = &everybody.emits {
        let message = format!(
            "every role of the database may write messages into WAL, and so forge events. {FIRST} Then, as a superuser: \
             REVOKE EXECUTE ON FUNCTION {functions} FROM PUBLIC"
        );
        report.add("messages", Outcome::Warning, message);
    }
    if everybody.any_bytes {
        let message = "the database's encoding is SQL_ASCII: a message of anybody, with any prefix that is not UTF-8, is one that \
                       the server refuses to send, and nothing behind it is ever sent. Have the outbox in a database in UTF8, or as \
                       a table";
        report.add("encoding", Outcome::Warning, message);
    }
}

/// What could have code of others run as us.
async fn owners(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    let target = &settings.target;
    if let Err(error) = catalog.examine_owners(target, true).await {
        report.add("owners", of(recovery::of_catalog(&error)), error);
    } else if let Err(error) = catalog.examine_owners(target, false).await {
        report.add("owners", Outcome::Warning, error);
    } else {
        let message =
            "what Walpost uses belongs to a superuser, this role or the owner of the outbox";
        report.add("owners", Outcome::Ok, message);
    }
    if let (Some(table), Some(_)) = (target.outbox.table(), &observed.table)
        && let Err(error) = catalog.examine_table(table, Statement::Select).await
    {
        report.add("owners", Outcome::Warning, error);
    }
}

/// What the WAL budget requires, and what came of it before.
async fn budget(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    if settings.wal_budget.on_max == OnMax::DropSlot {
        match settings.check_drop_slot(observed) {
            Ok(()) => report.add(
                "WAL budget",
                Outcome::Ok,
                "the slot can be dropped, and its events sent again from the table",
            ),
            Err(error) => report.add("WAL budget", Outcome::Failure, error),
        }
    }
    if !observed.has_journal || settings.target.outbox.table().is_none() {
        return;
    }
    // That the journal can't be read is said where it is needed.
    let entries = catalog
        .dropped_slots(&settings.name, &settings.target)
        .await;
    for entry in entries.unwrap_or_default() {
        let message = format!(
            "{} may be in the table only: a slot was dropped. Send them again: walpost replay --dropped-slots --pipeline {}",
            entry.describe(),
            settings.name
        );
        report.add("dropped slots", Outcome::Warning, message);
    }
}

/// Several tables that share the slot.
async fn tables(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    let (Outbox::Tables(patterns), Some(publication)) =
        (&settings.target.outbox, &observed.publication)
    else {
        return;
    };
    if !publication.has_outbox_row {
        let name = identifier(&settings.target.publication);
        let message = format!(
            "the publication lacks table walpost.outbox_row, so no table can be added with the rows that it has: walpost init, and \
             then: ALTER PUBLICATION {name} ADD TABLE walpost.outbox_row"
        );
        report.add("tables", Outcome::Warning, message);
    }
    let asked = async {
        let found = catalog.tables(&publication.tables).await?;
        let unpublished = catalog.unpublished(patterns, &publication.tables).await?;
        Ok::<_, CatalogError>((found, unpublished))
    };
    let (found, unpublished) = match asked.await {
        Ok(asked) => asked,
        Err(error) => {
            return report.add("tables", of(recovery::of_catalog(&error)), error);
        }
    };
    if let Some(warning) = unpublished_warning(&unpublished) {
        report.add("tables", Outcome::Warning, warning);
    }
    let is_there = |table: &TableName| {
        unpublished.contains(table) || found.iter().any(|(name, _)| name == table)
    };
    for table in patterns.named().filter(|table| !is_there(table)) {
        let message =
            format!("table {table} does not exist. Make it: walpost init --table {table}");
        report.add("tables", Outcome::Warning, message);
    }
    let several = |names: &[String]| match names {
        [] => "no table is in the publication yet. Add each: walpost init --table SCHEMA.TABLE"
            .to_owned(),
        [one] => format!("table {one} is in the publication"),
        names => format!(
            "{} tables are in the publication: {}",
            names.len(),
            some_of(names)
        ),
    };
    let mut names: Vec<_> = found.iter().map(|(name, _)| name.to_string()).collect();
    names.sort_unstable();
    let outcome = if names.is_empty() {
        Outcome::Warning
    } else {
        Outcome::Ok
    };
    report.add("tables", outcome, several(&names));
    let unfit = found
        .iter()
        .filter_map(|(name, table)| settings.mapping_of(name, Some(table)).err());
    let unfit: Vec<_> = unfit.collect();
    if let Some(first) = unfit.first() {
        let more = match unfit.len() {
            1 => String::new(),
            count => format!(" (and {} more tables that do not fit)", count - 1),
        };
        report.add("columns", Outcome::Failure, format!("{first}{more}"));
    } else if !found.is_empty() {
        let message = "topic, key, headers and payload have their columns in each table";
        report.add("columns", Outcome::Ok, message);
    }
    let accepting = found.iter().filter(|(_, table)| !table.refuses_update);
    let accepting: Vec<_> = accepting.map(|(name, _)| name.to_string()).collect();
    if !accepting.is_empty() {
        let message = format!(
            "tables accept UPDATE, and an updated row is not an event: INSERT ... ON CONFLICT DO UPDATE is lost so: {}. Forbid it \
             with the trigger of sql/no_update.sql",
            some_of(&accepting)
        );
        report.add("updates", Outcome::Warning, message);
    }
}

fn columns(settings: &PipelineSettings, observed: &Observed, report: &mut Report<'_>) {
    // Several tables have a finding of their own.
    if observed.table.is_none() && !settings.target.outbox.is_messages() {
        return;
    }
    match settings.check_columns(observed) {
        Ok(()) => report.add(
            "columns",
            Outcome::Ok,
            "topic, key, headers and payload have their columns",
        ),
        Err(error) => report.add("columns", Outcome::Failure, error),
    }
}

/// Whether somebody else has moved the slot, which halts `run` where no checkpoint knows better.
async fn moved(
    settings: &PipelineSettings,
    observed: &Observed,
    catalog: &Catalog,
    report: &mut Report<'_>,
) {
    let Some(slot) = observed.slot.as_ref().filter(|_| observed.has_slot_state) else {
        return;
    };
    let asked = async {
        let of = catalog.slot_of(&settings.name, &settings.target).await?;
        catalog.moved(&of, slot.confirmed).await
    };
    match asked.await {
        Ok(None) => {}
        Ok(Some(moved)) if moved.begun && settings.delivery == Delivery::AtLeastOnce => {
            report.add("slot", Outcome::Failure, moved);
        }
        Ok(Some(moved)) => report.add("slot", Outcome::Warning, moved),
        // It runs without, and says so.
        Err(error @ CatalogError::Server(_)) => report.add("slot state", Outcome::Warning, error),
        Err(error) => report.add("slot state", of(recovery::of_catalog(&error)), error),
    }
}

/// Whether the slot survives the server, and those who do not read it.
async fn failover(settings: &PipelineSettings, catalog: &Catalog, report: &mut Report<'_>) {
    let slot = &settings.target.slot;
    match catalog.failover(slot).await {
        Ok(found) => {
            for note in found.notes(slot, settings.postgres.dbname()) {
                match note {
                    Note::Ok(message) => report.add("failover", Outcome::Ok, message),
                    Note::Warning(message) => report.add("failover", Outcome::Warning, message),
                }
            }
        }
        Err(error) => report.add("failover", of(recovery::of_catalog(&error)), error),
    }
}

/// What works today and loses or repeats events some day.
fn risks(settings: &PipelineSettings, observed: &Observed, report: &mut Report<'_>) {
    let target = &settings.target;
    let outbox = &target.outbox;
    if let Some(table) = &observed.table
        && !table.refuses_update
    {
        report.add(
            "updates",
            Outcome::Warning,
            format!(
                "{outbox} accepts UPDATE, and an updated row is not an event: INSERT ... ON CONFLICT DO UPDATE \
                 is lost so. Forbid it with the trigger of sql/no_update.sql"
            ),
        );
    }
    if matches!(outbox, Outbox::Messages { .. }) {
        match observed.has_publish {
            true => report.add("publish", Outcome::Ok, "function walpost.publish exists"),
            false => report.add(
                "publish",
                Outcome::Warning,
                "function walpost.publish does not exist, so no role can write an event with it. Create it: walpost \
                 init --outbox messages",
            ),
        }
    }
    match observed.has_journal {
        true => report.add("journal", Outcome::Ok, "table walpost.journal exists"),
        false => report.add(
            "journal",
            Outcome::Warning,
            format!(
                "table walpost.journal does not exist, so nothing can be skipped or sent again: that is recorded in it. \
                 Create it: {}",
                outbox.init()
            ),
        ),
    }
    match observed.has_slot_state {
        true => report.add(
            "slot state",
            Outcome::Ok,
            "table walpost.slot_state exists",
        ),
        false => report.add(
            "slot state",
            Outcome::Warning,
            format!(
                "table walpost.slot_state does not exist, so a slot that is moved or re-created while no walpost run has \
                 it goes unnoticed. Create it: {}",
                outbox.init()
            ),
        ),
    }
    if let Some(publication) = &observed.publication
        && !outbox.is_messages()
    {
        let name = &target.publication;
        if let Some(filter) = &publication.row_filter {
            let remedy = match outbox.table() {
                Some(table) => format!("ALTER PUBLICATION {name} SET TABLE {table}"),
                None => "drop the table from it, and add it again without WHERE".to_owned(),
            };
            let message = format!(
                "publication {name:?} leaves out rows that don't fulfil {filter}. To have all: {remedy}"
            );
            report.add("row filter", Outcome::Warning, message);
        }
        if publication.more_than_inserts {
            let message = format!(
                "publication {name:?} publishes more than inserts, which is decoded and then left out. Change it: \
                 ALTER PUBLICATION {name} SET (publish = 'insert')"
            );
            report.add("publication", Outcome::Warning, message);
        }
    }
    match observed.slot_wal_keep.as_deref() {
        Some("-1") => report.add(
            "disk",
            Outcome::Warning,
            "max_slot_wal_keep_size is -1: while Kafka or walpost is down, the slot retains WAL until the \
             disk is full. Bound it: ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; beyond the bound the slot is \
             lost, and with it events that were not delivered",
        ),
        Some(bound) => {
            report.add("disk", Outcome::Ok, format!("max_slot_wal_keep_size is {bound}"));
        }
        None => {}
    }
    if let Some(slot) = &observed.slot {
        match slot.wal_status.as_deref() {
            Some("unreserved") => report.add(
                "slot",
                Outcome::Warning,
                format!(
                    "slot {:?} is unreserved: the server removes the WAL that it needs at the next checkpoint. Let walpost \
                     catch up now, or raise max_slot_wal_keep_size",
                    target.slot
                ),
            ),
            status => {
                let status = status.unwrap_or("unknown");
                let message = format!("confirmed up to {}, wal_status {status}", slot.confirmed);
                report.add("slot", Outcome::Ok, message);
            }
        }
    }
}

/// What would keep partitions from being made or dropped.
async fn retention(settings: &PipelineSettings, report: &mut Report<'_>) {
    if settings.retention.keep.is_none() {
        return;
    }
    // That it can't be asked was said of the connection.
    let Ok(catalog) = Catalog::open(&settings.postgres).await else {
        return;
    };
    let pass = retention::pass(&catalog, &settings.target, settings.retention, true);
    let troubles = match pass.await {
        Ok(found) => found.troubles,
        Err(error) => vec![error.into()],
    };
    // What is wrong with the slot and the like was said of the database.
    let troubles: Vec<_> = troubles
        .iter()
        .filter(|trouble| !matches!(trouble, RetentionError::Problem(_)))
        .collect();
    for trouble in &troubles {
        report.add("retention", Outcome::Warning, trouble);
    }
    if troubles.is_empty() {
        let message = "what is delivered and old enough can be removed";
        report.add("retention", Outcome::Ok, message);
    }
}

/// Says whether the brokers answer. `producers` are those whose brokers were asked before.
async fn kafka<'s>(
    settings: &'s PipelineSettings,
    producers: &Mutex<Vec<(&'s Properties, ProducerFinding)>>,
    report: &mut Report<'_>,
) -> bool {
    let SinkSettings::Kafka {
        properties,
        create_topics,
        credentials,
    } = &settings.sink
    else {
        return false;
    };
    if let Some(unsuitable) = unsuitable(properties) {
        report.add("kafka compression", Outcome::Failure, unsuitable);
    }
    // A template without columns names the one topic there is; others are known with their rows.
    let topic = settings.outbox.topic.constant().map(str::to_owned);
    let found = probe::look(properties, credentials, topic).await;
    let is_there = !matches!(
        found,
        BrokerFinding::Unreachable(_) | BrokerFinding::Refused(_)
    );
    let creates = create_topics.is_some();
    let is_topic_told = matches!(found, BrokerFinding::NoTopic(_));
    broker_finding("kafka", found, creates, settings, report);
    if is_there && !is_topic_told {
        // Whoever has the same properties waits for the answer.
        let mut producers = producers.lock().await;
        let known = producers.iter().find(|(asked, _)| *asked == properties);
        let found = match known {
            Some((_, found)) => found.clone(),
            None => {
                let found = probe::producer(properties, credentials).await;
                producers.push((properties, found.clone()));
                found
            }
        };
        drop(producers);
        match found {
            ProducerFinding::Taken => {}
            ProducerFinding::Refused(reason) => {
                report.add("kafka producer", Outcome::Failure, reason);
            }
            ProducerFinding::Unanswered(reason) => {
                report.add("kafka producer", Outcome::Unreachable, reason);
            }
        }
    }
    if is_there && settings.dead_letters.are_sent() {
        let topic = settings.dead_letters.topic.clone();
        let found = probe::look(properties, credentials, Some(topic)).await;
        match found {
            // Nothing waits for it before somebody writes a message that is no event.
            BrokerFinding::NoTopic(error) if !creates && !settings.dead_letters.are_of_events() => {
                let message = format!(
                    "a message that is no event, which every role that may write messages can write, halts the pipeline: {error}"
                );
                report.add("dead letters", Outcome::Warning, message);
            }
            found => broker_finding("dead letters", found, creates, settings, report),
        }
    }
    is_there
}

fn broker_finding(
    check: &'static str,
    found: BrokerFinding,
    creates: bool,
    settings: &PipelineSettings,
    report: &mut Report<'_>,
) {
    match found {
        BrokerFinding::Unreachable(reason) => report.add(check, Outcome::Unreachable, reason),
        BrokerFinding::Refused(error) => report.add(check, Outcome::Failure, error),
        BrokerFinding::Reachable { brokers } => {
            let message = format!(
                "{brokers} broker(s) reachable; topics and ACLs are not checked before the first record"
            );
            report.add(check, Outcome::Ok, message);
        }
        BrokerFinding::Topic {
            topic,
            partitions,
            limits,
        } => {
            let message = format!("topic {topic:?} has {partitions} partition(s){limits}");
            report.add(check, Outcome::Ok, message);
            if let Some(warning) = limits.warning(&topic, settings.row_bytes_max) {
                report.add(check, Outcome::Warning, warning);
            }
            let is_of_events = settings.outbox.topic.constant() == Some(topic.as_str());
            if is_of_events && limits.is_compacted && settings.outbox.has_unasked_tombstones() {
                report.add(check, Outcome::Warning, compaction_warning(&topic));
            }
        }
        BrokerFinding::NoTopic(SinkError::TopicMissing { .. }) if creates => {
            let message = "the topic is missing and will be created";
            report.add(check, Outcome::Ok, message);
        }
        BrokerFinding::NoTopic(error) => report.add(check, Outcome::Failure, error),
    }
}

/// What checks of that mode are called.
const EXACTLY_ONCE: &str = "exactly-once";

/// What the mode needs beside what every pipeline needs.
async fn exactly_once(settings: &PipelineSettings, report: &mut Report<'_>) {
    let Some(checkpoints) = settings.checkpoints() else {
        return;
    };
    let examined = match checkpoints.clone().examine().await {
        Ok(examined) => examined,
        Err(error) => return report.add(EXACTLY_ONCE, Outcome::Unreachable, describe(&error)),
    };
    brokers_for_transactions(&examined, report);
    let found = checkpoints.look().await;
    if matches!(found, Ok(None)) && is_untouched(settings).await {
        let message = "there is no checkpoint, and nothing was read from the slot since walpost init has made it: the first start \
             makes one";
        return report.add(EXACTLY_ONCE, Outcome::Ok, message);
    }
    if examined.topic_replicas.is_none() && matches!(found, Ok(None)) {
        let message =
            "the topic for checkpoints is missing and will be created by walpost checkpoint adopt";
        return report.add(EXACTLY_ONCE, Outcome::Failure, message);
    }
    match found {
        Ok(Some(checkpoint)) => {
            let slot = &settings.target.slot;
            if checkpoint.slot == *slot {
                let message = format!("there is a checkpoint, safe up to {}", checkpoint.safe_lsn);
                report.add(EXACTLY_ONCE, Outcome::Ok, message);
            } else {
                let (found, expected) = (slot.clone(), checkpoint.slot);
                let error = HistoryError::OtherSlot { found, expected };
                report.add(EXACTLY_ONCE, Outcome::Failure, error);
            }
        }
        Ok(None) => report.add(
            EXACTLY_ONCE,
            Outcome::Failure,
            format!(
                "there is no checkpoint. Before the first start: walpost checkpoint adopt --pipeline {}",
                settings.name
            ),
        ),
        Err(error) => report.add(EXACTLY_ONCE, of(recovery::of_sink(&error)), error),
    }
}

/// A start of this pipeline is the first one. Where that can't be asked, the reason is told elsewhere.
async fn is_untouched(settings: &PipelineSettings) -> bool {
    let asked = async {
        let catalog = Catalog::open(&settings.postgres).await?;
        let of = catalog.slot_of(&settings.name, &settings.target).await?;
        let slot = catalog.slot(&settings.target.slot).await?;
        let state = match catalog.slot_state(&of).await? {
            FoundState::State(state) => state,
            FoundState::Unusable(_) => None,
        };
        Ok::<_, CatalogError>(slot.zip(state))
    };
    let found = asked.await.ok().flatten();
    found.is_some_and(|(slot, state)| state.is_untouched(slot.confirmed))
}

fn brokers_for_transactions(examined: &Examined, report: &mut Report<'_>) {
    let Examined {
        brokers, timeout, ..
    } = *examined;
    if examined.timeout_max.is_some_and(|max| timeout > max) {
        let message = format!(
            "transaction.timeout.ms is {timeout}, and the brokers allow {}: lower it in [kafka], or raise \
             transaction.max.timeout.ms of the brokers",
            examined.timeout_max.unwrap_or_default()
        );
        report.add(EXACTLY_ONCE, Outcome::Failure, message);
    }
    let mut warnings = Vec::new();
    if brokers > 1 && examined.topic_replicas == Some(1) {
        warnings.push(
            "the topic for checkpoints has one replica: if its broker is lost, so is the checkpoint, and walpost \
             halts. Give it more: kafka-reassign-partitions.sh",
        );
    }
    if examined.topic_replicas > Some(1) && examined.topic_min_insync == Some(1) {
        warnings.push(
            "min.insync.replicas of the topic for checkpoints is 1: a checkpoint that one broker alone has can be \
             lost. Set 2: kafka-configs.sh --alter --add-config min.insync.replicas=2",
        );
    }
    if brokers > 1 && examined.state_replicas == Some(1) {
        warnings.push(
            "transaction.state.log.replication.factor of the brokers is 1: if the broker that has a transaction's state \
             is lost, nobody can end it. Set 3, before the first transaction",
        );
    }
    for warning in &warnings {
        report.add(EXACTLY_ONCE, Outcome::Warning, warning);
    }
    if warnings.is_empty() {
        report.add(
            EXACTLY_ONCE,
            Outcome::Ok,
            "the brokers' settings for transactions fit",
        );
    }
}
