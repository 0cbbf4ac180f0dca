//! How fast, how soon and at what cost: Walpost beside what the database alone can do, and beside
//! other programs. `./dev bench --help` says how to call it, `docs/benchmarks.md` what came out.
//!
//! [`bed`] starts the servers, [`backlog`] writes the rows, [`topic`] counts what arrives,
//! [`program`] starts what is measured and [`usage`] reads what it costs. On these stand the parts:
//! [`comparison`], [`growth`], [`forms`] and [`tuned`] by [`drain`], [`latency`], [`database`], [`tables`],
//! [`shards`] and [`profile`]. What they measure is [`results`]; [`report`] makes tables, charts and the page of it.
//!
//! Everything runs on one machine and in turn, so ratios mean more than figures.
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

/// Measures the parts that were asked for, and prints and keeps each as it is done.
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
