//! Formats the results as tables for the terminal, and generates docs/benchmarks.md and its charts.

mod charts;
mod numbers;
mod page;
mod summary;
mod table;
mod tables;
mod targets;

use std::fmt::Write as _;
use std::fs;

use crate::args::PartName;
use crate::forms;
use crate::growth;
use crate::results::{self, Comparison, Drain, Part, Results, Tables};
use crate::stats::Spread;
use crate::tables as bench_tables;
use crate::tuned;
use crate::usage::MEBIBYTE;
use numbers::{one_place, spread, two_places, whole};

/// The series in which a single parameter varies, each with its name, its title and a description
/// of the parameter.
const SERIES: [(&str, &str, &str); 6] = [
    (growth::ROWS, "Rows in the backlog", "rows in the backlog"),
    (growth::PAYLOAD, "Size of the payload", "payload"),
    (
        growth::TRANSACTIONS,
        "Rows in a transaction",
        "rows in a transaction",
    ),
    (growth::PARTITIONS, "Partitions of the topic", "partitions"),
    (
        growth::COMPRESSION,
        "Compression of the records",
        "compression",
    ),
    (growth::TOPICS, "Topics", "topics"),
];

/// Returns the tables for one part of the benchmark, or an empty string if the part was not
/// measured.
pub(crate) fn part(results: &Results, part_name: PartName) -> String {
    let mut text = String::new();
    match part_name {
        PartName::Drain => {
            if let Some(Part { data, .. }) = &results.drain {
                for series in summary::distinct(data.drains.iter().map(|drain| &drain.series)) {
                    writeln!(text, "{}", describe_backlog(&data.drains, series)).unwrap();
                    writeln!(text, "{}", tables::comparison(&data.drains, series)).unwrap();
                }
                writeln!(text, "{}", describe_outage(data)).unwrap();
            }
        }
        PartName::Latency => {
            if let Some(Part { data, .. }) = &results.latency {
                writeln!(text, "{}", tables::latency(data)).unwrap();
                writeln!(text, "{}", tables::floors(data)).unwrap();
                writeln!(text, "{}", tables::idle(data)).unwrap();
            }
        }
        PartName::Growth => {
            if let Some(part) = &results.growth {
                for (series, _, what) in SERIES {
                    writeln!(text, "{}", tables::growth(&part.data, series, what)).unwrap();
                }
                writeln!(text, "{}", tables::outbox(&part.data)).unwrap();
                writeln!(text, "{}", tables::bounds(&part.data)).unwrap();
            }
        }
        PartName::Forms => {
            if let Some(part) = &results.forms {
                writeln!(
                    text,
                    "{}",
                    tables::growth(&part.data, forms::SERIES, "form")
                )
                .unwrap();
            }
        }
        PartName::Tuned => {
            if let Some(part) = &results.tuned {
                writeln!(
                    text,
                    "{}",
                    tables::growth(&part.data, tuned::SERIES, "drain")
                )
                .unwrap();
                writeln!(text, "{}", tables::bounds(&part.data)).unwrap();
            }
        }
        PartName::Database => {
            if let Some(part) = &results.database {
                writeln!(text, "{}", tables::database(&part.data)).unwrap();
            }
        }
        PartName::Tables => {
            if let Some(part) = &results.tables {
                let Tables { drains, .. } = &part.data;
                writeln!(
                    text,
                    "{}",
                    tables::growth(drains, bench_tables::SERIES, "tables")
                )
                .unwrap();
                writeln!(text, "{}", tables::fleets(&part.data)).unwrap();
                writeln!(text, "{}", describe_added_tables(&part.data)).unwrap();
            }
        }
        PartName::Shards => {
            if let Some(part) = &results.shards {
                writeln!(text, "{}", tables::shards(&part.data)).unwrap();
            }
        }
        PartName::Profile => {
            if let Some(part) = &results.profile {
                writeln!(text, "{}", tables::profile(&part.data)).unwrap();
            }
        }
        PartName::All | PartName::Render => {}
    }
    text
}

/// Writes docs/benchmarks.md and its charts.
pub(crate) fn write(results: &Results) {
    let docs = results::docs();
    let folder = docs.join("benchmarks");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    charts::draw(results, &folder);
    fs::write(docs.join("benchmarks.md"), page::render(results)).unwrap();
}

/// Returns a sentence that describes a series' backlog.
fn describe_backlog(drains: &[Drain], series: &str) -> String {
    let Some(drain) = drains.iter().find(|drain| drain.series == series) else {
        return String::new();
    };
    let backlog = &drain.backlog;
    format!(
        "The backlog has {} rows in transactions of {}, with payloads of {} bytes on average, and generates {} MB of WAL; \
         the topic has {} partitions.",
        whole(backlog.rows as f64),
        whole(backlog.batch as f64),
        whole(backlog.payload_bytes),
        whole(backlog.wal_bytes as f64 / 1e6),
        drain.topic.partitions
    )
}

/// Returns a sentence that states how soon the first event of a newly added table is delivered.
fn describe_added_tables(tables: &Tables) -> String {
    let seconds = Spread::from_values(tables.added_seconds.iter().copied());
    format!(
        "After an empty table was added with `walpost.add_outbox`, its first event reached Kafka within {} s, measured with {} tables.",
        spread(seconds, two_places),
        tables.added_seconds.len()
    )
}

/// Returns a sentence that compares memory usage before, during and after the broker outage.
fn describe_outage(comparison: &Comparison) -> String {
    let outage = &comparison.outage;
    let peak = |from: f64, to: f64| {
        let samples = outage
            .rss
            .iter()
            .filter(|(time, _)| (from..to).contains(time));
        let peak = samples.map(|(_, bytes)| *bytes).max().unwrap_or(0);
        one_place(peak as f64 / MEBIBYTE)
    };
    let (frozen, thawed) = (outage.frozen_at_seconds, outage.thawed_at_seconds);
    format!(
        "The broker was frozen for {:.0} s during a drain of {} rows; RSS was at most {} MiB before, {} MiB during \
         and {} MiB after the freeze, and {} records arrived.",
        thawed - frozen,
        whole(outage.rows as f64),
        peak(0.0, frozen),
        peak(frozen, thawed),
        peak(thawed, f64::INFINITY),
        whole(outage.records as f64)
    )
}
