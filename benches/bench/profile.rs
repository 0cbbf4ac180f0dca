//! The part `profile`: what Walpost itself spends a drain on, by perf(1) of Linux.

use std::cmp::Reverse;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::args::Args;
use crate::backlog::{self, Shape, Slot};
use crate::bed::Bed;
use crate::program::{Link, Task};
use crate::support::process::{signal, wait_for_exit};
use crate::support::reaper::{self, Ending};
use crate::support::wait::PATIENCE;
use crate::topic::{Topic, TopicSettings};

/// What was on the stacks of Walpost's threads at the samples of one drain.
#[derive(Serialize, Deserialize)]
pub(crate) struct Profile {
    pub(crate) rows: usize,
    /// All threads; its callees are the threads, by name.
    pub(crate) process: Frame,
}

/// A function, as it was called by the one above it.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Frame {
    pub(crate) name: String,
    /// Samples in which it ran, or one that it had called.
    pub(crate) samples: usize,
    pub(crate) callees: Vec<Frame>,
}

const BETWEEN_LOOKS: Duration = Duration::from_millis(10);
/// Samples a second.
const FREQUENCY: &str = "999";
/// Frames with less of all samples are left out: no chart could show them.
const LEAST_PART: f64 = 0.002;
/// What every stack has below and between what matters: how threads are started and closures called.
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

/// `None` where perf is not installed.
pub(crate) fn measure(bed: &Bed, args: &Args) -> Option<Profile> {
    if Command::new("perf").arg("--version").output().is_err() {
        eprintln!("  left out: there is no perf (Debian: apt install linux-perf)");
        return None;
    }
    let backlog = backlog::fill(&bed.db, Shape::of_rows(2 * args.rows()));
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

/// Drains the backlog, and has perf take samples meanwhile.
fn record(bed: &Bed, args: &Args, rows: usize, file: &Path) {
    let slot = Slot::at_backlog(&bed.db);
    let topic = Topic::new(bed, &TopicSettings::default());
    let task = Task::new(backlog::Kind::Table, &slot, &topic);
    let mut running = args.walpost(Link::Unix).start(bed, &task);
    let pid = running.process_id().to_string();
    let mut wait_for = |records| {
        running.wait_until("records", BETWEEN_LOOKS, || topic.records() >= records);
    };
    // perf takes no samples of threads that come later, and the reader does when rows come fast.
    wait_for(rows / 20);
    let mut perf = Command::new("perf")
        .args(["record", "--quiet", "--freq", FREQUENCY])
        // The binary has no frame pointers.
        .args(["--call-graph", "dwarf", "--pid", &pid, "--output"])
        .arg(file)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    reaper::register(perf.id(), Ending::Kill);
    wait_for(rows);
    signal(perf.id(), "INT");
    wait_for_exit(&mut perf, PATIENCE).expect("perf ends when it is told to");
    reaper::forget(perf.id());
    running.stop();
}

/// What `perf script` prints: for each sample the thread's name, then a line for each frame, the
/// innermost first, then an empty one.
fn stacks(text: &str) -> Frame {
    let mut process = Frame {
        name: "walpost".to_owned(),
        ..Frame::default()
    };
    for sample in text.split("\n\n") {
        let mut lines = sample.lines().filter(|line| !line.is_empty());
        let Some(thread) = lines.next() else { continue };
        let functions = lines.filter_map(|line| Some(line.trim().split_once(' ')?.1));
        let mut names: Vec<_> = functions.map(plain).collect();
        names.retain(|name| !SCAFFOLDING.iter().any(|start| name.starts_with(start)));
        names.push(thread.trim());
        process.add(names.into_iter().rev());
    }
    let samples = process.samples as f64;
    process.prune(samples * LEAST_PART);
    process
}

/// A symbol without the hash at its end.
fn plain(symbol: &str) -> &str {
    match symbol.rsplit_once("::h") {
        Some((name, hash)) if hash.len() == 16 => name,
        _ => symbol,
    }
}

impl Frame {
    /// Counts a sample with these functions, the outermost first.
    fn add<'n>(&mut self, names: impl Iterator<Item = &'n str>) {
        self.samples += 1;
        let mut frame = self;
        for name in names {
            let known = frame.callees.iter().position(|callee| callee.name == name);
            let place = known.unwrap_or_else(|| {
                frame.callees.push(Self {
                    name: name.to_owned(),
                    ..Self::default()
                });
                frame.callees.len() - 1
            });
            frame = &mut frame.callees[place];
            frame.samples += 1;
        }
    }

    /// Takes away what has fewer samples, and sorts the rest.
    fn prune(&mut self, least: f64) {
        self.callees.retain(|callee| callee.samples as f64 >= least);
        self.callees.sort_by_key(|callee| Reverse(callee.samples));
        for callee in &mut self.callees {
            callee.prune(least);
        }
    }

    /// How many frames are on top of one another, with this one.
    pub(crate) fn depth(&self) -> usize {
        1 + self.callees.iter().map(Self::depth).max().unwrap_or(0)
    }
}
