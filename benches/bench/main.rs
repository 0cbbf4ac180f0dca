//! Measures Walpost's throughput, latency and cost in comparison with the database's limit and with
//! other programs. `./dev bench --help` describes the usage, and `docs/benchmarks.md` contains the
//! results.
//!
//! [`bed`] starts the servers, [`backlog`] writes the rows, [`topic`] counts the records that
//! arrive, [`program`] starts the measured program and [`usage`] reads its resource usage. The
//! parts use these modules: [`comparison`], [`growth`], [`forms`] and [`tuned`] through [`drain`],
//! and [`latency`], [`database`], [`tables`], [`shards`] and [`profile`]. The measurements are
//! stored in [`results`], from which [`report`] creates tables, charts and the page.
//!
//! Everything runs on one machine, one measurement at a time, so ratios are more meaningful than
//! absolute figures.
#![allow(
    clippy::unwrap_used,
    reason = "a benchmark that can't go on has failed"
)]

mod args;
mod backlog;
mod bed;
mod comparison;
mod database;
mod drain;
mod forms;
mod growth;
mod latency;
mod machine;
mod outage;
mod profile;
mod program;
mod report;
mod results;
mod shards;
mod stats;
mod tables;
mod topic;
mod tuned;
mod usage;

#[path = "../../tests/support/mod.rs"]
mod support;

use std::time::Instant;

use args::{Args, Word};
use bed::Bed;
use clap::Parser;
use results::{Part, Results};

fn main() {
    let args = Args::parse();
    if args.write && cfg!(debug_assertions) {
        eprintln!(
            "bench: this is a build for tests; figures to keep are of a release build: ./dev bench --write"
        );
        std::process::exit(2);
    }
    let mut results = Results::load_if(args.write || args.renders_only());
    if !args.renders_only() {
        measure(&args, &mut results);
    }
    if args.write || args.renders_only() {
        report::write(&results);
    }
}

/// Measures the selected parts. Prints and stores the results of each part when it is done.
fn measure(args: &Args, results: &mut Results) {
    let bed = Bed::new(args);
    for word in args.parts() {
        let began = Instant::now();
        eprintln!("{word}:");
        match word {
            Word::Drain => {
                let data = comparison::measure(&bed, args);
                results.drain = Some(Part::new(&bed, began, data));
            }
            Word::Latency => {
                let data = latency::measure(&bed, args);
                results.latency = Some(Part::new(&bed, began, data));
            }
            Word::Growth => {
                let data = growth::measure(&bed, args);
                results.growth = Some(Part::new(&bed, began, data));
            }
            Word::Forms => {
                let data = forms::measure(&bed, args);
                results.forms = Some(Part::new(&bed, began, data));
            }
            Word::Tuned => {
                let data = tuned::measure(&bed, args);
                results.tuned = Some(Part::new(&bed, began, data));
            }
            Word::Database => {
                let data = database::measure(&bed, args);
                results.database = Some(Part::new(&bed, began, data));
            }
            Word::Tables => {
                let data = tables::measure(&bed, args);
                results.tables = Some(Part::new(&bed, began, data));
            }
            Word::Shards => {
                let data = shards::measure(&bed, args);
                results.shards = Some(Part::new(&bed, began, data));
            }
            Word::Profile => {
                if let Some(data) = profile::measure(&bed, args) {
                    results.profile = Some(Part::new(&bed, began, data));
                }
            }
            Word::All | Word::Render => unreachable!("not a part"),
        }
        if args.write {
            results.save();
        }
        println!("{}", report::part(results, word));
    }
}
