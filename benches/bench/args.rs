//! Parses the command line.

use std::fmt::{self, Display};

use clap::{Parser, ValueEnum};

use crate::program::{Link, Program};

/// Measure Walpost, and compare its throughput with that of pg_recvlogical. Starts its own
/// PostgreSQL server and Kafka broker. Uses all cores and, with `all`, about 20 GB in the temporary
/// directory.
#[derive(Parser)]
#[command(name = "./dev bench", max_term_width = 100)]
pub(crate) struct Args {
    /// Parts to measure [default: drain latency database]
    #[arg(value_enum)]
    part_names: Vec<PartName>,
    /// Number of rows in the backlog of `drain`
    #[arg(long, value_name = "N")]
    rows: Option<usize>,
    /// Number of rows in the second backlog of `drain` [default: 4 times the first with
    /// --peers or --peer, otherwise none]
    #[arg(long, value_name = "N")]
    more_rows: Option<usize>,
    /// Number of rounds of each measurement
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Also download and measure Debezium on Kafka Connect
    #[arg(long)]
    peers: bool,
    /// Also measure another program. Can be repeated.
    ///
    /// The command must run in the foreground until SIGTERM, and send each insert into the table to
    /// the topic with acks=all. The command's environment contains WALPOST_BENCH_CONNINFO
    /// (key=value pairs) and the same values separately: _HOST, _PORT, _USER and _DATABASE. The
    /// environment also contains _SLOT (an existing slot for pgoutput), _PUBLICATION, _TABLE,
    /// _TOPIC (an existing topic), _BOOTSTRAP and _FOLDER (an empty directory for the program).
    #[arg(long, value_name = "NAME=COMMAND", value_parser = peer)]
    peer: Vec<Program>,
    /// Use only a few rows, to check that the benchmark works. The results are meaningless
    #[arg(long)]
    pub(crate) quick: bool,
    /// A librdkafka property for Walpost
    #[arg(short = 'X', value_name = "NAME=VALUE")]
    pub(crate) property: Vec<String>,
    /// Replace the results of the measured parts in docs/benchmarks.json, and generate
    /// docs/benchmarks.md and its charts from docs/benchmarks.json
    #[arg(long)]
    pub(crate) write: bool,
    /// Added by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// A part of the benchmark, or a set of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PartName {
    /// Deliver a backlog to Kafka and measure rows/s, CPU, memory and the topic's size. Also
    /// measure memory while the broker is frozen
    Drain,
    /// Latency from commit to consumer at a steady rate, and CPU while idle
    Latency,
    /// The drain with different numbers of rows, payload sizes, transaction sizes, partitions and
    /// compression types, and with logical decoding messages instead of a table
    Growth,
    /// The drain with each record format: the formats of Kafka Connect's converters, and expanded payloads
    Forms,
    /// The drains that miss their targets, repeated with the suspected bottleneck removed
    Tuned,
    /// The load on the database, compared with that of a reader that polls the table
    Database,
    /// Many outbox tables on one slot, and many pipelines
    Tables,
    /// Many databases, each with a backlog, in one process, compared with one database that contains
    /// all rows
    Shards,
    /// Where Walpost itself spends its time during a drain, according to perf
    Profile,
    /// Every part
    All,
    /// Generate docs/benchmarks.md and its charts from docs/benchmarks.json, without measuring
    Render,
}

impl Args {
    /// Returns the parts to measure, in the order in which they are measured.
    pub(crate) fn parts(&self) -> Vec<PartName> {
        const ALL: [PartName; 9] = [
            PartName::Drain,
            PartName::Latency,
            PartName::Growth,
            PartName::Forms,
            PartName::Tuned,
            PartName::Database,
            PartName::Tables,
            PartName::Shards,
            PartName::Profile,
        ];
        let is_selected = |part: &PartName| {
            if self.part_names.is_empty() {
                matches!(
                    part,
                    PartName::Drain | PartName::Latency | PartName::Database
                )
            } else {
                self.part_names.contains(part) || self.part_names.contains(&PartName::All)
            }
        };
        ALL.into_iter().filter(is_selected).collect()
    }

    /// Returns whether to generate docs/benchmarks.md from stored results without measuring
    /// anything.
    pub(crate) fn renders_only(&self) -> bool {
        self.part_names == [PartName::Render]
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

    /// Returns `rows`, reduced to a small fraction with `--quick`.
    pub(crate) fn scaled(&self, rows: usize) -> usize {
        if self.quick {
            (rows / 25).clamp(1, 20_000)
        } else {
            rows
        }
    }

    /// Returns a Walpost program that connects to the database over a Unix-domain socket or TCP, as
    /// given by `link`.
    pub(crate) fn walpost(&self, link: Link) -> Program {
        Program::Walpost {
            link,
            properties: self.property.clone(),
            settings: String::new(),
            exactly_once: false,
        }
    }

    /// Returns the programs to compare with Walpost.
    pub(crate) fn peers(&self) -> Vec<Program> {
        let debezium = self.peers.then(Program::debezium);
        debezium.into_iter().chain(self.peer.clone()).collect()
    }
}

impl Display for PartName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no value is hidden");
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
            "{argument:?} is not NAME=COMMAND, for example: --peer 'other=./other --fast'"
        )),
    }
}
