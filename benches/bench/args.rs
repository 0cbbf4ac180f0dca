//! The command line.

use std::fmt::{self, Display};

use clap::{Parser, ValueEnum};

use crate::program::{Link, Program};

/// Measures Walpost in comparison with the database's limit. Starts its own PostgreSQL and Kafka;
/// uses all cores, and for `all` about 20 GB below the temporary folder.
#[derive(Parser)]
#[command(name = "./dev bench", max_term_width = 100)]
pub(crate) struct Args {
    /// What to measure [default: drain latency database]
    #[arg(value_enum)]
    words: Vec<Word>,
    /// Rows in the backlog of `drain`
    #[arg(long, value_name = "N")]
    rows: Option<usize>,
    /// Rows in the second backlog of `drain` [default: 4 times the first with a peer, else none]
    #[arg(long, value_name = "N")]
    more_rows: Option<usize>,
    /// Number of rounds of each measurement
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Also measure Debezium on Kafka Connect, which this downloads
    #[arg(long)]
    peers: bool,
    /// Also measure another program. Can be repeated.
    ///
    /// The command runs in the foreground until SIGTERM. Its environment contains
    /// WALPOST_BENCH_CONNINFO (key=value pairs) and the same values separately: _HOST, _PORT,
    /// _USER, _DATABASE; then _SLOT (pgoutput; exists), _PUBLICATION, _TABLE, _TOPIC (exists),
    /// _BOOTSTRAP and _FOLDER, an empty folder for the program. It sends each insert into the table
    /// to the topic, with acks=all.
    #[arg(long, value_name = "NAME=COMMAND", value_parser = peer)]
    peer: Vec<Program>,
    /// Use few rows, to check that everything works. The results are meaningless
    #[arg(long)]
    pub(crate) quick: bool,
    /// A librdkafka property for Walpost
    #[arg(short = 'X', value_name = "NAME=VALUE")]
    pub(crate) property: Vec<String>,
    /// Replace the results of the same parts in docs/benchmarks.json, and generate
    /// docs/benchmarks.md and its charts from it
    #[arg(long)]
    pub(crate) write: bool,
    /// Added by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// A part of the benchmark, or a set of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Word {
    /// Deliver a backlog to Kafka: rows/s, CPU, memory, bytes; and memory while the broker is
    /// frozen
    Drain,
    /// Latency from commit to consumer at a steady rate, and CPU while idle
    Latency,
    /// The drain by rows, payload, transaction size, partitions and compression; and without a
    /// table
    Growth,
    /// The drain by the format of records: those of Connect's converters, and expanded payloads
    Forms,
    /// The drains that miss their targets, without their bottleneck
    Tuned,
    /// The load on the database, compared with a reader that polls the table
    Database,
    /// Many outbox tables on one slot, and many pipelines
    Tables,
    /// Many databases with a backlog each in one process, compared with one database with all rows
    Shards,
    /// Where Walpost itself spends its time during a drain, according to perf
    Profile,
    /// Every part
    All,
    /// Generate docs/benchmarks.md and its charts from docs/benchmarks.json, without measuring
    Render,
}

impl Args {
    /// Returns the parts to measure, in order.
    pub(crate) fn parts(&self) -> Vec<Word> {
        const ALL: [Word; 9] = [
            Word::Drain,
            Word::Latency,
            Word::Growth,
            Word::Forms,
            Word::Tuned,
            Word::Database,
            Word::Tables,
            Word::Shards,
            Word::Profile,
        ];
        let wanted = |part: &Word| {
            if self.words.is_empty() {
                matches!(part, Word::Drain | Word::Latency | Word::Database)
            } else {
                self.words.contains(part) || self.words.contains(&Word::All)
            }
        };
        ALL.into_iter().filter(wanted).collect()
    }

    /// Returns whether only the page is generated.
    pub(crate) fn renders_only(&self) -> bool {
        self.words == [Word::Render]
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows.unwrap_or(self.scaled(500_000))
    }

    /// Returns the size of the second, larger backlog.
    pub(crate) fn more_rows(&self) -> Option<usize> {
        let with_peers = (!self.peers().is_empty() && !self.quick).then_some(4 * self.rows());
        self.more_rows.or(with_peers)
    }

    pub(crate) fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    /// Returns a number of rows, reduced for a quick run.
    pub(crate) fn scaled(&self, rows: usize) -> usize {
        if self.quick {
            (rows / 25).clamp(1, 20_000)
        } else {
            rows
        }
    }

    /// Returns Walpost with this link.
    pub(crate) fn walpost(&self, link: Link) -> Program {
        Program::Walpost {
            link,
            properties: self.property.clone(),
            settings: String::new(),
            exactly_once: false,
        }
    }

    /// Returns the other programs.
    pub(crate) fn peers(&self) -> Vec<Program> {
        let debezium = self.peers.then(Program::debezium);
        debezium.into_iter().chain(self.peer.clone()).collect()
    }
}

impl Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no word is hidden");
        f.write_str(value.get_name())
    }
}

fn peer(argument: &str) -> Result<Program, String> {
    match argument.split_once('=') {
        Some((name, command)) if !name.is_empty() && !command.is_empty() => Ok(Program::Peer {
            name: name.to_owned(),
            command: command.to_owned(),
        }),
        _ => Err(format!(
            "{argument:?} is not NAME=COMMAND, as in --peer 'other=./other --fast'"
        )),
    }
}
