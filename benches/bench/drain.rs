//! Measures how fast programs deliver a backlog.

use std::ops::Range;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::backlog::{Backlog, Kind, Slot};
use crate::bed::{STALL_TIMEOUT, TestBed};
use crate::program::{Link, Program, Task};
use crate::results::{ByProcess, Drain, Measured};
use crate::support::postgres::{MAJOR, binaries};
use crate::support::reaper::{self, Ending};
use crate::topic::{Topic, TopicSettings};
use crate::usage::{
    MEBIBYTE, Walsender, cpu_seconds, family_cpu_seconds, family_peak_bytes,
    family_waiting_seconds, has_ended, peak_bytes, waiting_seconds, written_bytes,
};

const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);

/// If a program uses Kafka transactions, its drain is complete only when no records have arrived
/// for this long. Otherwise, another transaction could be committed after the drain has ended.
const COMMIT_DELAY_MAX: Duration = Duration::from_millis(500);

/// A program to measure, with its settings. Each round measures the program once.
pub(crate) struct Lap {
    point: String,
    program: Program,
    topic: TopicSettings,
}

impl Lap {
    pub(crate) fn new(program: Program, topic: TopicSettings) -> Self {
        Self {
            point: String::new(),
            program,
            topic,
        }
    }

    /// Creates a [`Lap`] that measures pg_recvlogical, whose throughput no other program can
    /// exceed.
    pub(crate) fn limit(link: Link) -> Self {
        Self::new(Program::Limit { link }, TopicSettings::default())
    }

    /// Creates two [`Lap`]s for one value of a series' parameter: one for pg_recvlogical and one
    /// for `program`. Both connect to the database over the same kind of link.
    pub(crate) fn with_limit(program: Program, topic: TopicSettings, point: &str) -> [Self; 2] {
        [Self::limit(program.link()), Self::new(program, topic)].map(|lap| lap.at_point(point))
    }

    /// Sets the value of the series' parameter that this [`Lap`] measures.
    pub(crate) fn at_point(mut self, point: &str) -> Self {
        point.clone_into(&mut self.point);
        self
    }
}

/// Runs each [`Lap`] once per round. Each round starts with a different lap, so that no program
/// benefits from the order.
pub(crate) fn rounds(
    bed: &TestBed,
    series: &str,
    backlog: &Backlog,
    laps: &[Lap],
    rounds: Range<usize>,
) -> Vec<Drain> {
    let mut drains = Vec::new();
    for round in rounds {
        for index in 0..laps.len() {
            let lap = &laps[(index + round) % laps.len()];
            let link = lap.program.link();
            let measured = match &lap.program {
                Program::Limit { link } => limit(bed, *link, backlog),
                program => drain(bed, program, &lap.topic, backlog),
            };
            let drain = Drain {
                series: series.to_owned(),
                point: lap.point.clone(),
                round,
                program: lap.program.name().to_owned(),
                link,
                topic: lap.topic.clone(),
                backlog: backlog.clone(),
                measured,
            };
            print_drain(&drain);
            drains.push(drain);
        }
    }
    drains
}

fn print_drain(drain: &Drain) {
    let Drain { measured, .. } = drain;
    eprintln!(
        "  round {}: {} {} over {}: {:.0} rows/s, first record after {:.2} s, {:.2} s of CPU, peak RSS {:.1} MiB",
        drain.round,
        drain.program,
        drain.point,
        drain.link,
        measured.rows_per_second.unwrap_or(f64::NAN),
        measured.first_seconds,
        measured.cpu.program,
        measured.peak_rss_bytes as f64 / MEBIBYTE,
    );
}

/// Measures pg_recvlogical, which discards the walsender's output. Progress is measured in bytes,
/// because counting rows would require parsing the output.
fn limit(bed: &TestBed, link: Link, backlog: &Backlog) -> Measured {
    let slot = Slot::at_backlog(&bed.db);
    let mut walsender = Walsender::new(&bed.db, &slot.name);
    let end = bed.db.value("SELECT pg_current_wal_lsn()").unwrap();
    let mut arrivals = Arrivals::new();
    let mut client = receive(bed, link, backlog.kind, &slot.name, &end);
    let (mut cpu, mut waiting, mut peak) = (0.0, 0.0, 0);
    loop {
        // Checks before sampling whether pg_recvlogical has exited, so that even a run that ends
        // immediately is sampled once.
        let ended = has_ended(client.id());
        walsender.sample();
        cpu = cpu_seconds(client.id()).unwrap_or(cpu);
        waiting = waiting_seconds(client.id()).unwrap_or(waiting);
        peak = peak_bytes(client.id()).unwrap_or(peak);
        arrivals.record(written_bytes(client.id()).unwrap_or(0));
        if ended {
            break;
        }
        sleep(SAMPLE_INTERVAL);
    }
    let status = client.wait().unwrap();
    reaper::forget(client.id());
    assert!(status.success(), "pg_recvlogical failed");
    Measured {
        records: backlog.rows,
        first_seconds: arrivals.first_seconds(),
        last_seconds: arrivals.last_seconds(),
        rows_per_second: arrivals.per_second(backlog.rows),
        cpu: ByProcess {
            program: cpu,
            walsender: walsender.cpu_seconds(),
            broker: 0.0,
        },
        waiting: ByProcess {
            program: waiting,
            walsender: walsender.waiting_seconds(),
            broker: 0.0,
        },
        peak_rss_bytes: peak,
        topic_bytes: 0,
    }
}

fn receive(bed: &TestBed, link: Link, kind: Kind, slot: &str, end: &str) -> Child {
    let options = kind.options();
    let client = Command::new(binaries(MAJOR).join("pg_recvlogical"))
        .args(["--dbname", &bed.conninfo(link), "--slot", slot])
        .args(["--start", "--no-loop", "--endpos", end])
        .args(["--file", "/dev/null", "--option", "proto_version=1"])
        .args(options.iter().flat_map(|option| ["--option", option]))
        .spawn()
        .expect("pg_recvlogical starts");
    reaper::register(client.id(), Ending::Kill);
    client
}

fn drain(
    bed: &TestBed,
    program: &Program,
    settings: &TopicSettings,
    backlog: &Backlog,
) -> Measured {
    let slot = Slot::at_backlog(&bed.db);
    let topic = Topic::new(bed, settings);
    let task = Task {
        compression: settings.compression.as_deref(),
        ..Task::new(backlog.kind, &slot, &topic)
    };
    let mut walsender = Walsender::new(&bed.db, &slot.name);
    let broker = || {
        let pid = bed.broker.process_id();
        cpu_seconds(pid)
            .zip(waiting_seconds(pid))
            .expect("a running broker")
    };
    let broker_before = broker();
    let mut arrivals = Arrivals::new();
    let mut running = program.start(bed, &task);
    let all = backlog.rows as u64;
    // The offsets also include transaction markers. Therefore, some records may still be missing
    // when the total of the offsets reaches the number of rows.
    let may_commit_more = |arrivals: &Arrivals| {
        program.has_transactions() && arrivals.since_last() < COMMIT_DELAY_MAX
    };
    while arrivals.record(topic.records() as u64) < all || may_commit_more(&arrivals) {
        running.assert_running();
        arrivals.assert_progress();
        walsender.sample();
        // Querying the offsets of a thousand topics every 10 ms would itself put load on the
        // broker.
        sleep(SAMPLE_INTERVAL * if settings.topics > 1 { 10 } else { 1 });
    }
    walsender.sample();
    let pid = running.process_id();
    let broker_after = broker();
    let cpu = ByProcess {
        program: family_cpu_seconds(pid),
        walsender: walsender.cpu_seconds(),
        broker: broker_after.0 - broker_before.0,
    };
    let waiting = ByProcess {
        program: family_waiting_seconds(pid),
        walsender: walsender.waiting_seconds(),
        broker: broker_after.1 - broker_before.1,
    };
    let peak_rss_bytes = family_peak_bytes(pid);
    running.stop();
    let records = match program.has_transactions() {
        true => topic.committed_records(),
        false => topic.records(),
    };
    assert!(
        records == backlog.rows || !program.is_walpost(),
        "{records} records from {} rows",
        backlog.rows
    );
    Measured {
        records,
        first_seconds: arrivals.first_seconds(),
        last_seconds: arrivals.last_seconds(),
        rows_per_second: arrivals.per_second(backlog.rows),
        cpu,
        waiting,
        peak_rss_bytes,
        topic_bytes: topic.bytes(),
    }
}

/// Tracks how many rows or bytes have arrived, and when.
struct Arrivals {
    began: Instant,
    first: Option<(Instant, u64)>,
    last: (Instant, u64),
}

impl Arrivals {
    fn new() -> Self {
        let began = Instant::now();
        Self {
            began,
            first: None,
            last: (began, 0),
        }
    }

    /// Records that a total of `amount` rows or bytes have arrived so far. Returns `amount`.
    fn record(&mut self, amount: u64) -> u64 {
        if amount > self.last.1 {
            self.last = (Instant::now(), amount);
            self.first.get_or_insert(self.last);
        }
        amount
    }

    /// Checks that data has arrived recently.
    ///
    /// # Panics
    /// Panics if no data has arrived for [`STALL_TIMEOUT`].
    fn assert_progress(&self) {
        let elapsed = self.since_last();
        assert!(elapsed < STALL_TIMEOUT, "nothing arrived in {elapsed:?}");
    }

    /// Returns the time since the last arrival of rows or bytes.
    fn since_last(&self) -> Duration {
        self.last.0.elapsed()
    }

    fn first_seconds(&self) -> f64 {
        let (time, _) = self.first.expect("something has arrived");
        (time - self.began).as_secs_f64()
    }

    fn last_seconds(&self) -> f64 {
        (self.last.0 - self.began).as_secs_f64()
    }

    /// Returns the rate in rows per second, measured from the first sample that found any data.
    /// Returns `None` if at least half of the data had already arrived in that sample, because the
    /// remainder is too small to measure.
    fn per_second(&self, rows: usize) -> Option<f64> {
        let ((first, early), (last, all)) = (self.first?, self.last);
        let part = (all - early) as f64 / all as f64;
        (part > 0.5).then(|| rows as f64 * part / (last - first).as_secs_f64())
    }
}
