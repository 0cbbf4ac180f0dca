//! What the command line asks for.

use std::fmt::{self, Display};

use clap::{Parser, ValueEnum};

use crate::program::{Link, Program};

/// Measures Walpost beside what the database alone can do. Starts a PostgreSQL and a Kafka of its
/// own; takes all cores, and about 20 GB below the temporary folder for `all`.
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
    /// How often each is measured
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Beside Debezium on Kafka Connect, which this downloads
    #[arg(long)]
    peers: bool,
    /// Beside another program, as often as you like.
    ///
    /// The command runs in the foreground until SIGTERM, and finds in its environment
    /// WALPOST_BENCH_CONNINFO (key=value pairs) and the same in parts: _HOST, _PORT, _USER,
    /// _DATABASE; then _SLOT (pgoutput; exists), _PUBLICATION, _TABLE, _TOPIC (exists), _BOOTSTRAP
    /// and _FOLDER, which is empty and its own. It sends each insert of the table to the topic,
    /// with acks=all.
    #[arg(long, value_name = "NAME=COMMAND", value_parser = peer)]
    peer: Vec<Program>,
    /// Small figures for a look at whether everything works: they mean nothing
    #[arg(long)]
    pub(crate) quick: bool,
    /// A librdkafka property for Walpost
    #[arg(short = 'X', value_name = "NAME=VALUE")]
    pub(crate) property: Vec<String>,
    /// Puts what was measured into docs/benchmarks.json in place of what it had of the same parts,
    /// and makes docs/benchmarks.md and its charts of it
    #[arg(long)]
    pub(crate) write: bool,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

/// A part of the benchmark, or a short word for some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Word {
    /// A backlog into Kafka: rows/s, CPU, memory, bytes; and memory while the broker is frozen
    Drain,
    /// From commit to consumer at a steady rate, and CPU while idle
    Latency,
    /// The drain by rows, payload, size of transactions, partitions, compression; without a table
    Growth,
    /// The drain by the form of the records: what Connect's converters write, and expanded payloads
    Forms,
    /// The drains that are behind their targets, without what bounds them
    Tuned,
    /// What carrying costs the database, beside a reader that polls the table
    Database,
    /// Many outbox tables on one slot, and many pipelines
    Tables,
    /// Many databases with a backlog each in one process, beside one database with all rows
    Shards,
    /// What Walpost itself spends a drain on, by perf
    Profile,
    /// Every part
    All,
    /// Makes docs/benchmarks.md and its charts of docs/benchmarks.json; measures nothing
    Render,
}

impl Args {
    /// The parts to measure, in their order.
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

    /// Whether nothing is to be measured.
    pub(crate) fn renders_only(&self) -> bool {
        self.words == [Word::Render]
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows.unwrap_or(self.scaled(500_000))
    }

    /// The size of the second, larger backlog.
    pub(crate) fn more_rows(&self) -> Option<usize> {
        let with_peers = (!self.peers().is_empty() && !self.quick).then_some(4 * self.rows());
        self.more_rows.or(with_peers)
    }

    pub(crate) fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    /// A number of rows, or what stands for it in a quick run.
    pub(crate) fn scaled(&self, rows: usize) -> usize {
        if self.quick {
            (rows / 25).clamp(1, 20_000)
        } else {
            rows
        }
    }

    /// Walpost over that link.
    pub(crate) fn walpost(&self, link: Link) -> Program {
        Program::Walpost {
            link,
            properties: self.property.clone(),
            settings: String::new(),
            exactly_once: false,
        }
    }

    /// The other programs.
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
