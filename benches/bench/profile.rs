//! The `profile` part uses Linux's perf(1) to find where Walpost spends CPU time during a drain.

use std::cmp::Reverse;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::args::Args;
use crate::backlog::{self, Shape, Slot};
use crate::bed::TestBed;
use crate::program::{Link, Task};
use crate::support::process::{signal, wait_for_exit};
use crate::support::reaper::{self, Ending};
use crate::support::wait::WAIT_TIMEOUT;
use crate::topic::{Topic, TopicSettings};

/// The sampled stacks of Walpost's threads during one drain.
#[derive(Serialize, Deserialize)]
pub(crate) struct Profile {
    pub(crate) rows: usize,
    /// The root frame, which represents the process. Its callees represent the threads. Threads
    /// with the same name share one frame.
    pub(crate) process: Frame,
}

/// One function in the call stacks, with the functions that it called.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Frame {
    pub(crate) name: String,
    /// The number of samples in which the function or one of its callees was running.
    pub(crate) samples: usize,
    pub(crate) callees: Vec<Frame>,
}

const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Sampling frequency in Hz.
const FREQUENCY: &str = "999";
/// Minimum share of all samples. Frames with a smaller share are omitted, because they would be too
/// narrow to see in the chart.
const SHARE_MIN: f64 = 0.002;
/// Functions with these prefixes are omitted from stacks. Such functions start threads and call
/// closures, and would only add depth to the chart.
const SCAFFOLDING: [&str; 9] = [
    "std::",
    "core::",
    "<core::",
    "<alloc::",
    "alloc::",
    "tokio::",
    "start_thread",
    "clone3",
    "__GI___clone",
];

/// Profiles a drain. Returns `None` if perf is not installed.
pub(crate) fn measure(bed: &TestBed, args: &Args) -> Option<Profile> {
    if Command::new("perf").arg("--version").output().is_err() {
        eprintln!("  skipped: perf is not installed (Debian: apt install linux-perf)");
        return None;
    }
    let backlog = backlog::fill(&bed.db, Shape::with_rows(2 * args.rows()));
    let file = reaper::folder("profile").join("perf.data");
    record(bed, args, backlog.rows, &file);
    backlog::empty(&bed.db);
    let text = Command::new("perf")
        .args(["script", "--no-inline", "--fields", "comm,ip,sym"])
        .arg("--input")
        .arg(&file)
        .output()
        .unwrap();
    assert!(
        text.status.success(),
        "{}",
        String::from_utf8_lossy(&text.stderr)
    );
    let process = stacks(&String::from_utf8_lossy(&text.stdout));
    eprintln!("  {} samples", process.samples);
    Some(Profile {
        rows: backlog.rows,
        process,
    })
}

/// Drains the backlog while perf samples Walpost's stacks.
fn record(bed: &TestBed, args: &Args, rows: usize, file: &Path) {
    let slot = Slot::at_backlog(&bed.db);
    let topic = Topic::new(bed, &TopicSettings::default());
    let task = Task::new(backlog::Kind::Table, &slot, &topic);
    let mut running = args.walpost(Link::Unix).start(bed, &task);
    let pid = running.process_id().to_string();
    let mut wait_for = |records| {
        running.wait_until("records", POLL_INTERVAL, || topic.records() >= records);
    };
    // Starts perf only after some rows have arrived, because perf does not sample threads that
    // start after it. The reader thread starts only when rows arrive at a high rate.
    wait_for(rows / 20);
    let mut perf = Command::new("perf")
        .args(["record", "--quiet", "--freq", FREQUENCY])
        // The binary is built without frame pointers, so perf has to unwind using DWARF.
        .args(["--call-graph", "dwarf", "--pid", &pid, "--output"])
        .arg(file)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    reaper::register(perf.id(), Ending::Kill);
    wait_for(rows);
    signal(perf.id(), "INT");
    wait_for_exit(&mut perf, WAIT_TIMEOUT).expect("perf exits after the signal");
    reaper::forget(perf.id());
    running.stop();
}

/// Parses the output of `perf script`. Each sample consists of a line with the thread's name, one
/// line per frame, innermost first, and an empty line.
fn stacks(text: &str) -> Frame {
    let mut process = Frame {
        name: "walpost".to_owned(),
        ..Frame::default()
    };
    for sample in text.split("\n\n") {
        let mut lines = sample.lines().filter(|line| !line.is_empty());
        let Some(thread) = lines.next() else { continue };
        let functions = lines.filter_map(|line| Some(line.trim().split_once(' ')?.1));
        let mut names: Vec<_> = functions.map(without_hash).collect();
        names.retain(|name| !SCAFFOLDING.iter().any(|start| name.starts_with(start)));
        names.push(thread.trim());
        process.add(names.into_iter().rev());
    }
    let samples = process.samples as f64;
    process.prune(samples * SHARE_MIN);
    process
}

/// Returns a symbol without its trailing hash.
fn without_hash(symbol: &str) -> &str {
    match symbol.rsplit_once("::h") {
        Some((name, hash)) if hash.len() == 16 => name,
        _ => symbol,
    }
}

impl Frame {
    /// Adds one sampled stack, given as function names, outermost first.
    fn add<'n>(&mut self, names: impl Iterator<Item = &'n str>) {
        self.samples += 1;
        let mut frame = self;
        for name in names {
            let known = frame.callees.iter().position(|callee| callee.name == name);
            let index = known.unwrap_or_else(|| {
                frame.callees.push(Self {
                    name: name.to_owned(),
                    ..Self::default()
                });
                frame.callees.len() - 1
            });
            frame = &mut frame.callees[index];
            frame.samples += 1;
        }
    }

    /// Removes callees with fewer than `min_samples` samples and sorts the remaining callees by the
    /// number of samples, in descending order.
    fn prune(&mut self, min_samples: f64) {
        self.callees
            .retain(|callee| callee.samples as f64 >= min_samples);
        self.callees.sort_by_key(|callee| Reverse(callee.samples));
        for callee in &mut self.callees {
            callee.prune(min_samples);
        }
    }

    /// Returns the depth of the tree of frames, including this frame.
    pub(crate) fn depth(&self) -> usize {
        1 + self.callees.iter().map(Self::depth).max().unwrap_or(0)
    }
}
