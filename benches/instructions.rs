//! How many instructions a row takes, from its frame to its record, compared with stored figures:
//! `./dev instructions`.
//!
//! Instructions are repeatable where times are not, so growth shows on any machine, also a busy
//! one. The captured stream is played into a sink that keeps nothing, under Valgrind's callgrind;
//! the same without playing it is taken off, so that starting up and building the stream don't
//! count. The socket and librdkafka are not in it.
//!
//! What else the figures depend on is stored with them: another compiler, C library or processor
//! means another std and another memcpy, so a wider margin holds there; another architecture can't
//! be compared.

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

/// Growth that fails, in per cent of the stored figure; and where that is of another environment.
const MARGIN: f64 = 5.0;
const MARGIN_ELSEWHERE: f64 = 15.0;

const ROWS: usize = 10_000;

#[derive(Parser)]
struct Args {
    /// Store the figures instead of holding them against the stored ones
    #[arg(long)]
    store: bool,
    /// Only play rows of a case; callgrind counts that
    #[arg(long, hide = true, num_args = 2, value_names = ["CASE", "ROWS"])]
    play: Option<Vec<String>>,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

/// An outbox, the rows in a transaction, and settings.
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

/// What is stored.
#[derive(Serialize, Deserialize)]
struct Figures {
    architecture: String,
    environment: String,
    /// Rows that each case was counted over.
    rows: usize,
    /// Instructions per row, by case.
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
        .ok_or_else(|| format!("no case {name:?}"))?;
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

/// Instructions of this program when it plays `rows` of a case.
fn count(case: &str, rows: usize) -> Result<u64, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let output = run(Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(["--play", case, &rows.to_string()]))?;
    output
        .lines()
        .find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
        .ok_or_else(|| format!("callgrind did not say what it collected:\n{output}"))
}

/// What the figures depend on besides Walpost.
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

/// What a program that has to succeed writes.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().display().to_string();
    let output = command
        .output()
        .map_err(|error| format!("{program}: {error}; ./dev setup installs what is missing"))?;
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
            "{}: {error}. Write it with ./dev instructions --store",
            file().display()
        )
    };
    let text = fs::read_to_string(file()).map_err(|error| unusable(&error))?;
    let stored: Figures = toml::from_str(&text).map_err(|error| unusable(&error))?;
    if stored.architecture != now.architecture {
        println!(
            "instructions: counted on {}, which can't be compared with the figures stored on {}",
            now.architecture, stored.architecture
        );
        return Ok(());
    }
    let margin = match stored.environment == now.environment {
        true => MARGIN,
        false => {
            println!(
                "instructions: here is {}; the figures were stored with {}. std and memcpy may differ, so \
                 {MARGIN_ELSEWHERE} % are allowed instead of {MARGIN} %",
                now.environment, stored.environment
            );
            MARGIN_ELSEWHERE
        }
    };

    println!(
        "{:<24}{:>10}{:>10}{:>10}",
        "instructions per row", "stored", "now", "change"
    );
    let (mut grown, mut fallen) = (Vec::new(), Vec::new());
    for (case, &figure) in &now.per_row {
        let Some(&before) = stored.per_row.get(case) else {
            return Err(unusable(&format!("it has no figure for {case}")));
        };
        let change = (figure - before) / before * 100.0;
        println!("{case:<24}{before:>10.1}{figure:>10.1}{change:>+9.1}%");
        if change > margin {
            grown.push(format!("{case} from {before} to {figure} ({change:+.1} %)"));
        }
        if change < -margin {
            fallen.push(case.as_str());
        }
    }
    if !fallen.is_empty() {
        println!(
            "{} fell by more than {margin} %: hold the gain with ./dev instructions --store",
            fallen.join(", ")
        );
    }
    match grown.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "a row takes over {margin} % more instructions than stored: {}. Find what grew, or, if it is worth it, \
             store the new figures: ./dev instructions --store",
            grown.join("; ")
        )),
    }
}
