//! Measures Walpost's throughput, latency and cost, and compares the results with those of
//! pg_recvlogical and other programs. See `./dev bench --help` for usage and `docs/benchmarks.md`
//! for the results.
//!
//! [`bed`] starts the servers, [`backlog`] writes the rows, [`topic`] counts the records that
//! arrive, [`program`] starts the measured program and [`usage`] reads its resource usage. Each
//! part of the benchmark has its own module: [`comparison`], [`growth`], [`forms`] and [`tuned`],
//! which measure with [`drain`], and [`latency`], [`database`], [`tables`], [`shards`] and
//! [`profile`]. [`results`] stores the measurements, and [`report`] turns the measurements into
//! tables, charts and the page docs/benchmarks.md.
//!
//! The database, the broker and the measured program share one machine, so ratios are more
//! meaningful than absolute figures. Measurements run one at a time.
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

/// Measures the selected parts. The results of each part are printed, and stored if requested, as
/// soon as the part is complete.
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
