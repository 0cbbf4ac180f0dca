//! Measures Walpost's throughput, latency and cost, and compares them with the database's limit and
//! with other programs. `./dev bench --help` describes the usage, and `docs/benchmarks.md` contains
//! the results.
//!
//! [`bed`] starts the servers, [`backlog`] writes the rows, [`topic`] counts the records that
//! arrive, [`program`] starts the measured program and [`usage`] reads its resource usage. The
//! parts of the benchmark use these modules: [`comparison`], [`growth`], [`forms`] and [`tuned`]
//! through [`drain`]; [`latency`], [`database`], [`tables`], [`shards`] and [`profile`] directly.
//! [`results`] stores the measurements, from which [`report`] creates tables, charts and the page.
//!
//! All programs run on one machine, one measurement at a time, so ratios are more meaningful than
//! absolute figures.
#![allow(
    clippy::unwrap_used,
    reason = "a benchmark that can't continue has failed"
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

use args::{Args, PartName};
use bed::TestBed;
use clap::Parser;
use results::{Part, Results};

fn main() {
    let args = Args::parse();
    if args.write && cfg!(debug_assertions) {
        eprintln!(
            "bench: this is a debug build; results can be written only by a release build: ./dev bench --write"
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

/// Measures the selected parts. Prints and stores the results of each part when the part is
/// complete.
fn measure(args: &Args, results: &mut Results) {
    let bed = TestBed::new(args);
    for part_name in args.parts() {
        let began = Instant::now();
        eprintln!("{part_name}:");
        match part_name {
            PartName::Drain => {
                let data = comparison::measure(&bed, args);
                results.drain = Some(Part::new(&bed, began, data));
            }
            PartName::Latency => {
                let data = latency::measure(&bed, args);
                results.latency = Some(Part::new(&bed, began, data));
            }
            PartName::Growth => {
                let data = growth::measure(&bed, args);
                results.growth = Some(Part::new(&bed, began, data));
            }
            PartName::Forms => {
                let data = forms::measure(&bed, args);
                results.forms = Some(Part::new(&bed, began, data));
            }
            PartName::Tuned => {
                let data = tuned::measure(&bed, args);
                results.tuned = Some(Part::new(&bed, began, data));
            }
            PartName::Database => {
                let data = database::measure(&bed, args);
                results.database = Some(Part::new(&bed, began, data));
            }
            PartName::Tables => {
                let data = tables::measure(&bed, args);
                results.tables = Some(Part::new(&bed, began, data));
            }
            PartName::Shards => {
                let data = shards::measure(&bed, args);
                results.shards = Some(Part::new(&bed, began, data));
            }
            PartName::Profile => {
                if let Some(data) = profile::measure(&bed, args) {
                    results.profile = Some(Part::new(&bed, began, data));
                }
            }
            PartName::All | PartName::Render => unreachable!("not a part"),
        }
        if args.write {
            results.save();
        }
        println!("{}", report::part(results, part_name));
    }
}
