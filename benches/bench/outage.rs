//! Measures Walpost's memory before, during and after a broker outage in the middle of a drain.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::backlog::{Kind, Slot};
use crate::bed::{STALL_TIMEOUT, TestBed};
use crate::program::{Link, Task};
use crate::results::Outage;
use crate::topic::{Topic, TopicSettings};
use crate::usage::{MEBIBYTE, family_resident_bytes};

const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);

/// Drains the existing backlog. After a third of the rows have been delivered, freezes the broker
/// for a while.
pub(crate) fn measure(bed: &TestBed, args: &Args, rows: usize) -> Outage {
    let frozen_for = Duration::from_secs(if args.quick { 1 } else { 10 });
    let slot = Slot::at_backlog(&bed.db);
    let topic = Topic::new(bed, &TopicSettings::default());
    let task = Task::new(Kind::Table, &slot, &topic);
    let began = Instant::now();
    let seconds = || began.elapsed().as_secs_f64();
    let mut rss = Vec::new();
    let mut running = args.walpost(Link::Unix).start(bed, &task);
    let pid = running.process_id();
    let mut sample = || {
        running.assert_running();
        rss.push((seconds(), family_resident_bytes(pid)));
        assert!(began.elapsed() < STALL_TIMEOUT, "the drain does not end");
        sleep(SAMPLE_INTERVAL);
    };

    while topic.records() < rows / 3 {
        sample();
    }
    bed.broker.freeze();
    let frozen = Instant::now();
    let frozen_at_seconds = seconds();
    while frozen.elapsed() < frozen_for {
        sample();
    }
    bed.broker.thaw();
    let thawed_at_seconds = seconds();
    while topic.records() < rows {
        sample();
    }
    running.stop();
    let records = topic.records();
    eprintln!(
        "  broker frozen for {} s: peak RSS {:.1} MiB",
        frozen_for.as_secs(),
        rss.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0) as f64 / MEBIBYTE
    );
    Outage {
        frozen_at_seconds,
        thawed_at_seconds,
        rss,
        rows,
        records,
    }
}
