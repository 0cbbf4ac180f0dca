//! Counts the instructions needed to turn a replication message into a Kafka record, and fails if a
//! count exceeds the stored count by more than a margin. Run it with `./dev instructions`.
//!
//! Unlike times, instruction counts are repeatable, so they reveal a regression on any machine,
//! even a busy one. The program runs itself under Valgrind's callgrind. The program passes a stream
//! of replication messages through a pipeline whose sink discards the records. The count of a run
//! that only prepares the stream is subtracted, so that startup is not included. The socket and
//! librdkafka are not included either.
//!
//! The counts are stored together with a description of the environment. With a different compiler,
//! C library or processor, other versions of std and memcpy may be used, so a wider margin applies.
//! Counts for different architectures can't be compared.

#[path = "../tests/support/stream.rs"]
mod stream;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use clap::Parser;
use serde::{Deserialize, Serialize};
use stream::{Kind, Stream, null_pipeline, play, templates};
use walpost::facade::OutboxSettings;

/// The largest allowed increase over the stored count, in percent, if the stored count was measured
/// in the same environment.
const MARGIN: f64 = 5.0;
/// The largest allowed increase over the stored count, in percent, if the stored count was measured
/// in a different environment.
const OTHER_ENVIRONMENT_MARGIN: f64 = 15.0;

const ROWS: usize = 10_000;

#[derive(Parser)]
struct Args {
    /// Store the counts instead of comparing them with the stored counts
    #[arg(long)]
    store: bool,
    /// Process all rows of a case, or none if ROWS is 0. Used when this program runs itself under
    /// callgrind
    #[arg(long, hide = true, num_args = 2, value_names = ["CASE", "ROWS"])]
    play: Option<Vec<String>>,
    /// Added by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// A combination of outbox type, transaction size and settings for which instructions are counted.
struct Case {
    name: &'static str,
    kind: Kind,
    per_transaction: usize,
    settings: fn() -> OutboxSettings,
}

const CASES: [Case; 7] = [
    case("transactions-of-1", Kind::Plain, 1),
    case("transactions-of-100", Kind::Plain, 100),
    case("transactions-of-10000", Kind::Plain, ROWS),
    case("headers-column", Kind::Headers, 100),
    case("log", Kind::Messages, 100),
    case("bytea-payload", Kind::Bytea, 100),
    Case {
        settings: templates,
        ..case("several-templates", Kind::Plain, 100)
    },
];

const fn case(name: &'static str, kind: Kind, per_transaction: usize) -> Case {
    Case {
        name,
        kind,
        per_transaction,
        settings: OutboxSettings::default,
    }
}

/// The contents of instructions.toml.
#[derive(Serialize, Deserialize)]
struct Figures {
    architecture: String,
    environment: String,
    /// The number of rows processed in each case when the instructions were counted.
    rows: usize,
    /// The number of instructions per row, keyed by the name of the case.
    per_row: BTreeMap<String, f64>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.play {
        Some(play) => play_case(&play[0], &play[1]),
        None => count_all().and_then(|figures| match args.store {
            true => store(&figures),
            false => compare(&figures),
        }),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("instructions: {message}");
            ExitCode::FAILURE
        }
    }
}

fn play_case(name: &str, rows: &str) -> Result<(), String> {
    let case = CASES
        .iter()
        .find(|case| case.name == name)
        .ok_or_else(|| format!("unknown case {name:?}"))?;
    let rows: usize = rows.parse().map_err(|error| format!("{rows:?}: {error}"))?;
    let stream = Stream::rows(case.kind, ROWS, case.per_transaction);
    let (mut core, mut sink) = null_pipeline(case.kind, (case.settings)());
    if rows > 0 {
        play(&mut core, &mut sink, stream.bodies());
    }
    Ok(())
}

fn count_all() -> Result<Figures, String> {
    let mut per_row = BTreeMap::new();
    for case in &CASES {
        let instructions = count(case.name, ROWS)?.saturating_sub(count(case.name, 0)?);
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let figure = instructions as f64 / ROWS as f64;
        per_row.insert(case.name.to_owned(), (figure * 10.0).round() / 10.0);
    }
    Ok(Figures {
        architecture: env::consts::ARCH.to_owned(),
        environment: environment()?,
        rows: ROWS,
        per_row,
    })
}

/// Returns the number of instructions that this program executes when it processes `rows` rows of a
/// case.
fn count(case: &str, rows: usize) -> Result<u64, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let output = run(Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(["--play", case, &rows.to_string()]))?;
    output
        .lines()
        .find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
        .ok_or_else(|| format!("callgrind did not print the number of instructions:\n{output}"))
}

/// Describes the compiler, the C library and anything else in the environment that affects the
/// counts.
fn environment() -> Result<String, String> {
    let mut parts = vec![
        run(Command::new("rustc").arg("--version"))?,
        run(Command::new("getconf").arg("GNU_LIBC_VERSION"))?,
        run(Command::new("valgrind").arg("--version"))?,
    ];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        parts.push("avx2".to_owned());
    }
    parts
        .iter_mut()
        .for_each(|part| *part = part.trim().to_owned());
    Ok(parts.join(", "))
}

/// Runs a program and returns its output.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().display().to_string();
    let output = command.output().map_err(|error| {
        format!("{program}: {error}; to install missing programs, run ./dev setup")
    })?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let written = text(&output.stdout) + &text(&output.stderr);
    match output.status.success() {
        true => Ok(written),
        false => Err(format!("{program}: {}\n{written}", output.status)),
    }
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions.toml")
}

fn store(figures: &Figures) -> Result<(), String> {
    let text = toml::to_string(figures).map_err(|error| error.to_string())?;
    print!("{text}");
    let text = format!("# Instructions per row. Written by ./dev instructions --store\n{text}");
    fs::write(file(), text).map_err(|error| format!("{}: {error}", file().display()))
}

fn compare(now: &Figures) -> Result<(), String> {
    let unusable = |error: &dyn std::fmt::Display| {
        format!(
            "{}: {error}. Create the file with ./dev instructions --store",
            file().display()
        )
    };
    let text = fs::read_to_string(file()).map_err(|error| unusable(&error))?;
    let stored: Figures = toml::from_str(&text).map_err(|error| unusable(&error))?;
    if stored.architecture != now.architecture {
        println!(
            "instructions: these counts are for {} and can't be compared with the stored counts, which are for {}",
            now.architecture, stored.architecture
        );
        return Ok(());
    }
    let margin = match stored.environment == now.environment {
        true => MARGIN,
        false => {
            println!(
                "instructions: the environment is {}, but the stored counts are from {}. std and memcpy may differ, so an \
                 increase of {OTHER_ENVIRONMENT_MARGIN} % is allowed instead of {MARGIN} %",
                now.environment, stored.environment
            );
            OTHER_ENVIRONMENT_MARGIN
        }
    };

    println!(
        "{:<24}{:>10}{:>10}{:>10}",
        "instructions per row", "stored", "now", "change"
    );
    let (mut increased, mut decreased) = (Vec::new(), Vec::new());
    for (case, &figure) in &now.per_row {
        let Some(&before) = stored.per_row.get(case) else {
            return Err(unusable(&format!("the file contains no count for {case}")));
        };
        let change = (figure - before) / before * 100.0;
        println!("{case:<24}{before:>10.1}{figure:>10.1}{change:>+9.1}%");
        if change > margin {
            increased.push(format!("{case} from {before} to {figure} ({change:+.1} %)"));
        }
        if change < -margin {
            decreased.push(case.as_str());
        }
    }
    if !decreased.is_empty() {
        println!(
            "{} decreased by more than {margin} %: store the new counts with ./dev instructions --store",
            decreased.join(", ")
        );
    }
    match increased.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "processing a row takes over {margin} % more instructions than stored: {}. Find the cause, or, if the increase \
             is justified, store the new counts: ./dev instructions --store",
            increased.join("; ")
        )),
    }
}
