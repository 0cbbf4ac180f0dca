//! The `latency` part measures the latency from commit to consumer at steady rates, and CPU usage
//! while idle.

mod receiver;
mod writers;

use std::thread::sleep;
use std::time::Duration;

use receiver::Receiver;

use crate::args::Args;
use crate::backlog::{self, Kind, Slot};
use crate::bed::TestBed;
use crate::program::{Link, Program, Task};
use crate::results::{Idle, Latency, Percentiles, Steady};
use crate::stats::percentile;
use crate::topic::{Topic, TopicSettings};
use crate::usage::{family_cpu_seconds, family_resident_bytes};

/// Transactions per second.
pub(crate) const RATES: [u32; 2] = [500, 2_000];

/// The duration of each phase of a measurement.
#[derive(Clone, Copy)]
struct Times {
    /// The pause between a program's first record and the start of the measurement.
    settle: Duration,
    idle: Duration,
    warm_up: Duration,
    steady: Duration,
}

/// Timestamps of one event, in microseconds since the Unix epoch.
#[derive(Clone, Copy)]
struct Sample {
    /// When the transaction was scheduled to start.
    due: i64,
    /// When the event was inserted.
    inserted: i64,
    received: i64,
}

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Latency {
    let [settle, idle, warm_up, steady] = if args.quick {
        [1, 2, 1, 3]
    } else {
        [3, 10, 5, 25]
    };
    let times = Times {
        settle: Duration::from_secs(settle),
        idle: Duration::from_secs(idle),
        warm_up: Duration::from_secs(warm_up),
        steady: Duration::from_secs(steady),
    };
    let walpost = args.walpost(Link::Unix);
    let mut programs = vec![walpost.clone(), walpost.exactly_once()];
    programs.extend(args.peers());
    eprintln!("  not counted:");
    for program in &programs {
        run(bed, program, 0, times, &mut Latency::default());
    }
    let mut latency = Latency::default();
    for round in 0..args.rounds() {
        let topic = Topic::new(bed, &TopicSettings::default());
        let mut floor = receiver::floor(bed, &topic, RATES[0], times);
        latency.floor.push(Percentiles::from_samples(&mut floor));
        for program in &programs {
            run(bed, program, round, times, &mut latency);
        }
    }
    latency
}

/// Starts a program and measures it while it is idle, then at each rate.
fn run(bed: &TestBed, program: &Program, round: usize, times: Times, latency: &mut Latency) {
    backlog::empty(&bed.db);
    let slot = Slot::at_end(&bed.db);
    let topic = Topic::new(bed, &TopicSettings::default());
    let task = Task::new(Kind::Table, &slot, &topic);
    let mut running = program.start(bed, &task);
    let pid = running.process_id();
    let mut receiver = Receiver::new(bed, &topic);
    writers::write_one(bed);
    receiver.receive(1);
    sleep(times.settle);

    let before = family_cpu_seconds(pid);
    sleep(times.idle);
    let idle = Idle {
        program: program.name().to_owned(),
        link: program.link(),
        seconds: times.idle.as_secs_f64(),
        cpu_seconds: family_cpu_seconds(pid) - before,
    };
    eprintln!(
        "  round {round}: {} idle: {:.2} s of CPU in {} s",
        idle.program, idle.cpu_seconds, idle.seconds
    );
    latency.idle.push(idle);

    for per_second in RATES {
        let schedule = writers::Schedule::starting_soon(per_second, times.warm_up + times.steady);
        let counted_from = schedule.begin + i64::try_from(times.warm_up.as_micros()).unwrap();
        let writers = schedule.start(bed);
        let samples = receiver.receive_from(schedule.transactions(), counted_from, || {
            family_cpu_seconds(pid)
        });
        let mut commits = writers.join();
        running.assert_running();
        let steady = Steady {
            program: program.name().to_owned(),
            link: program.link(),
            round,
            per_second,
            seconds: times.steady.as_secs_f64(),
            records: samples.counted.len(),
            from_insert: Percentiles::from_samples(&mut latencies(&samples.counted, |sample| {
                sample.inserted
            })),
            from_schedule: Percentiles::from_samples(&mut latencies(&samples.counted, |sample| {
                sample.due
            })),
            commit: Percentiles::from_samples(&mut commits),
            cpu_seconds: samples.cpu_seconds,
            rss_bytes: family_resident_bytes(pid),
        };
        eprintln!(
            "  round {round}: {} at {per_second}/s: p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms, max {:.2} ms; {:.2} s of CPU",
            steady.program,
            steady.from_insert.p50,
            steady.from_insert.p99,
            steady.from_insert.p99_9,
            steady.from_insert.max,
            steady.cpu_seconds
        );
        latency.steady.push(steady);
    }
    running.stop();
}

/// Returns each record's latency in milliseconds, measured from the timestamp that `since` selects.
fn latencies(samples: &[Sample], since: fn(&Sample) -> i64) -> Vec<f64> {
    samples
        .iter()
        .map(|sample| (sample.received - since(sample)) as f64 / 1_000.0)
        .collect()
}

impl Percentiles {
    fn from_samples(milliseconds: &mut [f64]) -> Self {
        milliseconds.sort_by(f64::total_cmp);
        let percentile = |part| percentile(milliseconds, part);
        Self {
            p50: percentile(0.5),
            p90: percentile(0.9),
            p99: percentile(0.99),
            p99_9: percentile(0.999),
            max: percentile(1.0),
        }
    }
}

/// Returns the current time in microseconds since the Unix epoch.
fn now() -> i64 {
    jiff::Timestamp::now().as_microsecond()
}

/// Sleeps until the given time, in microseconds since the Unix epoch.
fn sleep_until(due: i64) {
    if let Ok(remaining) = u64::try_from(due - now()) {
        sleep(Duration::from_micros(remaining));
    }
}
