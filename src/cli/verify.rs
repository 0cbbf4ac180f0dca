//! `walpost verify`: compares the table with the topics.

use std::fs::{File, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::OFlags;
use rustix::process::geteuid;
use serde::Serialize;
use tracing::error;

use super::load_with_runtime;
use super::out::{self, say};
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::values::{parse_duration, parse_size, parse_time};
use crate::config::{Given, GivenSink};
use crate::escape;
use crate::file_error;
use crate::model::exit::Exit;
use crate::pipeline::recovery::{self, Remedy};
use crate::pipeline::settings::{Delivery, PipelineSettings};
use crate::trusted_path;
use crate::verify::{Counts, Finding, Options, Range, Report, VerifyError, verify};

/// Minimum for `--memory`. With less memory, reading the rows would take too many passes.
const MEMORY_MIN: u64 = 4 << 20;

/// Flags of `walpost verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Compare only rows from this time or later: 2026-11-21T09:05:00Z, 2026-11-21 (UTC), or 24h for
    /// 24 hours ago
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Compare only rows from before this time
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// The column that contains the rows' times [default: created_at]
    #[arg(long, value_name = "COLUMN")]
    time_column: Option<String>,
    /// Also read this topic, even if no row belongs to it
    #[arg(long, value_name = "TOPIC")]
    also_topic: Vec<String>,
    /// How long to wait for rows that have not been delivered yet, if the slot is in use
    #[arg(long, default_value = "30s", value_name = "DURATION")]
    wait: String,
    /// Memory for rows and records; the rest is stored in temporary files
    #[arg(long, default_value = "256MiB", value_name = "SIZE")]
    memory: String,
    /// Maximum number of findings to print
    #[arg(long, default_value_t = 20, value_name = "COUNT")]
    limit: usize,
    /// Write all findings to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print a JSON document instead of text
    #[arg(long)]
    json: bool,
    /// Count repeated events without treating them as errors: the default with at-least-once
    #[arg(long, conflicts_with = "forbid_repeats")]
    allow_repeats: bool,
    /// Treat repeated events as errors: the default with exactly-once
    #[arg(long)]
    forbid_repeats: bool,
    /// Treat records whose events are not in the table as errors
    #[arg(long, conflicts_with_all = ["since", "until"])]
    strict: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// The result of verifying one pipeline.
#[derive(Serialize)]
struct Outcome {
    pipeline: String,
    ok: bool,
    #[serde(flatten)]
    report: Report,
    /// The first findings, up to the requested maximum.
    findings: Vec<Finding>,
}

/// Creates a file that only the current user can read, because findings identify rows. Truncates
/// the file if it exists and belongs to the current user. Rejects directories that other users can
/// write to: such users could have placed a file there that they can read, or a link to another
/// file.
fn create_private(path: &PathBuf) -> io::Result<File> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    trusted_path::check_folder_path(folder.unwrap_or(Path::new(".")))
        .map_err(|error| io::Error::other(error.to_string()))?;
    let no_follow = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    #[expect(
        clippy::disallowed_methods,
        reason = "the folder was checked, and the file is checked below"
    )]
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(no_follow.bits().cast_signed())
        .open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != geteuid().as_raw() || found.nlink() != 1 {
        return Err(io::Error::other(
            "the path exists, but it is not a regular file, is not owned by this user, or has more than one hard link. Remove \
             it, or choose another file",
        ));
    }
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(0)?;
    Ok(file)
}

/// Verifies the pipelines and prints the findings.
#[must_use]
pub(crate) fn run(args: &VerifyArgs) -> Exit {
    let options = match options(args) {
        Ok(options) => options,
        Err(reason) => {
            error!("{reason}");
            return Exit::Usage;
        }
    };
    let given = Given {
        connection: &args.connection,
        records: Some(&args.records),
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: true,
    };
    let (pipelines, runtime) = match load_with_runtime(&given) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let mut output = match args.output.as_ref().map(create_private).transpose() {
        Ok(file) => file.map(BufWriter::new),
        Err(reason) => {
            error!("{}", output_error(args, &reason));
            return Exit::Usage;
        }
    };
    let mut exit = Exit::Done;
    let mut outcomes = Vec::new();
    for settings in &pipelines {
        let found = verify_pipeline(settings, args, &options, &runtime, output.as_mut());
        match found {
            Ok(outcome) => {
                if !args.json {
                    print(settings, &outcome, args);
                }
                if !outcome.ok && exit == Exit::Done {
                    exit = Exit::Failed;
                }
                outcomes.push(outcome);
            }
            Err(reason) => {
                error!(pipeline = settings.name, "{reason}");
                exit = exit_for_error(&reason);
            }
        }
    }
    runtime.shutdown_background();
    if let Some(Err(reason)) = output.map(|mut output| output.flush()) {
        error!("{}", output_error(args, &reason));
        exit = Exit::Failed;
    }
    if args.json {
        let ok = exit == Exit::Done;
        out::json(&serde_json::json!({ "ok": ok, "pipelines": outcomes }));
    }
    exit
}

fn output_error(args: &VerifyArgs, error: &io::Error) -> io::Error {
    let file = args.output.as_deref().unwrap_or(Path::new(""));
    file_error::explained(&format!("--output {}", file.display()), error)
}

fn options(args: &VerifyArgs) -> Result<Options, String> {
    let now = jiff::Timestamp::now();
    let time = |flag: &str, text: &Option<String>| {
        let read = text.as_ref().map(|text| parse_time(text, now)).transpose();
        read.map_err(|reason| format!("{flag}: {reason}"))
    };
    let (since, until) = (time("--since", &args.since)?, time("--until", &args.until)?);
    if let (Some(since), Some(until)) = (since, until)
        && since >= until
    {
        return Err(format!(
            "--since is {since} and --until is {until}: expected --since to be earlier than --until"
        ));
    }
    let memory = parse_size(&args.memory).map_err(|reason| format!("--memory: {reason}"))?;
    if memory.0 < MEMORY_MIN {
        return Err("--memory: expected at least 4MiB".to_owned());
    }
    Ok(Options {
        range: Range {
            column: args.time_column.clone(),
            since,
            until,
        },
        also: args.also_topic.clone(),
        wait: parse_duration(&args.wait).map_err(|reason| format!("--wait: {reason}"))?,
        memory: memory.0,
        strict: args.strict,
    })
}

fn verify_pipeline(
    settings: &PipelineSettings,
    args: &VerifyArgs,
    options: &Options,
    runtime: &tokio::runtime::Runtime,
    mut output: Option<&mut BufWriter<File>>,
) -> Result<Outcome, VerifyError> {
    let mut findings = Vec::new();
    let mut report_finding = |finding: &Finding| -> io::Result<()> {
        if findings.len() < args.limit {
            findings.push(finding.clone());
        }
        if let Some(output) = &mut output {
            // Escape control characters, because the file may be displayed in a terminal.
            let line = serde_json::to_string(finding)?;
            let written = writeln!(output, "{}", escape::in_json(&line));
            written.map_err(|error| output_error(args, &error))?;
        }
        Ok(())
    };
    let report = verify(runtime, settings, options, &mut report_finding)?;
    Ok(Outcome {
        pipeline: settings.name.clone(),
        ok: errors(&report.counts, &settings.delivery, args) == 0,
        report,
        findings,
    })
}

/// Returns how many findings count as errors, given the delivery guarantee and the flags.
fn errors(counts: &Counts, delivery: &Delivery, args: &VerifyArgs) -> u64 {
    let allowed = match delivery {
        Delivery::AtLeastOnce => !args.forbid_repeats,
        Delivery::ExactlyOnce(_) => args.allow_repeats,
    };
    let repeated = if allowed { 0 } else { counts.repeated };
    let unexpected = if args.strict { counts.unexpected } else { 0 };
    let always = [
        counts.missing,
        counts.dead_letters,
        counts.out_of_order,
        counts.gaps,
        counts.misplaced,
        counts.unroutable,
    ];
    always.iter().sum::<u64>() + repeated + unexpected
}

fn exit_for_error(error: &VerifyError) -> Exit {
    let remedy = match error {
        VerifyError::NoTable
        | VerifyError::Several(_)
        | VerifyError::NoTopics
        | VerifyError::NoIdHeader
        | VerifyError::NoTime { .. } => return Exit::Usage,
        VerifyError::Denied { .. } | VerifyError::Problem(_) | VerifyError::Mapping(_) => {
            Remedy::Halt
        }
        VerifyError::Catalog(error) => recovery::catalog_remedy(error),
        VerifyError::Topics(error) => return error.into(),
        VerifyError::Io(_) => return Exit::Failed,
    };
    remedy.into()
}

fn print(settings: &PipelineSettings, outcome: &Outcome, args: &VerifyArgs) {
    let (name, counts) = (&settings.name, &outcome.report.counts);
    for finding in &outcome.findings {
        say!("{finding}");
    }
    let total = counts.missing
        + counts.dead_letters
        + counts.repeated
        + counts.out_of_order
        + counts.gaps
        + counts.misplaced
        + counts.unroutable
        + if args.strict { counts.unexpected } else { 0 };
    let shown = outcome.findings.len() as u64;
    if total > shown {
        say!(
            "... and {} more: raise --limit to print more, or write all findings to a file with --output FILE",
            total - shown
        );
    }
    for note in &outcome.report.notes {
        say!("note: {note}");
    }
    say!(
        "{name}: {}: {} rows, {} records",
        settings.target.outbox,
        counts.rows,
        counts.records
    );
    for (what, count) in [
        ("delivered", counts.delivered),
        ("pending", counts.pending),
        ("expired", counts.expired),
        ("missing", counts.missing),
        ("dead letters", counts.dead_letters),
        ("repeated", counts.repeated),
        ("out of order", counts.out_of_order),
        ("gaps", counts.gaps),
        ("misplaced", counts.misplaced),
        ("unroutable", counts.unroutable),
        ("unexpected", counts.unexpected),
        ("newer", counts.newer),
        ("outside", counts.outside),
        ("replayed", counts.replayed),
        ("without id", counts.without_id),
    ] {
        // Always print the most important counts. Print any other count only if it is not zero.
        let is_shown = count > 0
            || ["delivered", "missing", "repeated", "out of order", "gaps"].contains(&what);
        if is_shown {
            say!("  {what:<13}{count:>12}");
        }
    }
    say!("{name}: {}", if outcome.ok { "ok" } else { "NOT OK" });
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn rejects_output_files_that_other_users_can_control() {
        let folder = tempfile::tempdir().expect("a file");
        let [own, link, second] = ["own", "link", "second"].map(|name| folder.path().join(name));
        fs::write(&own, "kept").expect("a file");
        symlink(&own, &link).expect("a file");
        create_private(&link).expect_err("a symbolic link is rejected");
        fs::hard_link(&own, &second).expect("a file");
        let error = create_private(&second).expect_err("a second hard link is rejected");
        assert!(error.to_string().contains("one hard link"), "{error}");
        assert_eq!(fs::read(&own).expect("a file"), b"kept");
        fs::remove_file(&second).expect("a file");
        fs::set_permissions(&own, Permissions::from_mode(0o644)).expect("a file");
        create_private(&own).expect("a file");
        let found = fs::metadata(&own).expect("a file");
        assert_eq!((found.len(), found.mode() & 0o777), (0, 0o600));
        // The directory `shared` is world-writable, so any user could have created the link in it.
        fs::write(&own, "kept").expect("a file");
        let shared = folder.path().join("shared");
        fs::create_dir(&shared).expect("a folder");
        fs::set_permissions(&shared, Permissions::from_mode(0o777)).expect("a folder");
        symlink(folder.path(), shared.join("elsewhere")).expect("a link");
        let error =
            create_private(&shared.join("elsewhere/own")).expect_err("the path is rejected");
        assert!(
            error.to_string().contains("writable by other users"),
            "{error}"
        );
        assert_eq!(fs::read(&own).expect("a file"), b"kept");
    }
}
