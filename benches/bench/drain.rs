//! Measures the drain of a backlog.

use std::ops::Range;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::backlog::{Backlog, Kind, Slot};
use crate::bed::{Bed, STALL};
use crate::program::{Link, Program, Task};
use crate::results::{ByProcess, Drain, Measured};
use crate::support::postgres::{MAJOR, binaries};
use crate::support::reaper::{self, Ending};
use crate::topic::{Topic, TopicSettings};
use crate::usage::{
    MEBIBYTE, Walsender, cpu_seconds, family_cpu_seconds, family_peak_bytes,
    family_waiting_seconds, has_ended, peak_bytes, waiting_seconds, written_bytes,
};

const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// A transaction that contains records is committed within this time.
const COMMITS_WITHIN: Duration = Duration::from_millis(500);

/// A measurement that is repeated once per round.
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

    /// Measures the throughput of pg_recvlogical alone.
    pub(crate) fn limit(link: Link) -> Self {
        Self::new(Program::Limit { link }, TopicSettings::default())
    }

    /// Measures the limit and a program over the same link, at one point.
    pub(crate) fn beside_limit(program: Program, topic: TopicSettings, point: &str) -> [Self; 2] {
        [Self::limit(program.link()), Self::new(program, topic)].map(|lap| lap.named(point))
    }

    /// Sets the point of the series that this lap measures.
    pub(crate) fn named(mut self, point: &str) -> Self {
        point.clone_into(&mut self.point);
        self
    }
}

/// Drains the backlog with each lap once per round. Each round starts with another lap.
pub(crate) fn rounds(
    bed: &Bed,
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
            tell(&drain);
            drains.push(drain);
        }
    }
    drains
}

fn tell(drain: &Drain) {
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

/// Measures the walsender while its output is discarded. Progress is measured in bytes, so that the
/// output need not be parsed.
fn limit(bed: &Bed, link: Link, backlog: &Backlog) -> Measured {
    let slot = Slot::at_backlog(&bed.db);
    let mut walsender = Walsender::new(&bed.db, &slot.name);
    let end = bed.db.value("SELECT pg_current_wal_lsn()").unwrap();
    let mut arrivals = Arrivals::new();
    let mut client = receive(bed, link, backlog.kind, &slot.name, &end);
    let (mut cpu, mut waiting, mut peak) = (0.0, 0.0, 0);
    loop {
        // Samples once more after the end, because a short run might not be sampled otherwise.
        let ended = has_ended(client.id());
        walsender.sample();
        cpu = cpu_seconds(client.id()).unwrap_or(cpu);
        waiting = waiting_seconds(client.id()).unwrap_or(waiting);
        peak = peak_bytes(client.id()).unwrap_or(peak);
        arrivals.see(written_bytes(client.id()).unwrap_or(0));
        if ended {
            break;
        }
        sleep(BETWEEN_LOOKS);
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

fn receive(bed: &Bed, link: Link, kind: Kind, slot: &str, end: &str) -> Child {
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

fn drain(bed: &Bed, program: &Program, settings: &TopicSettings, backlog: &Backlog) -> Measured {
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
    // With transactions, the offsets also count transaction markers, not only records.
    let more_may_come =
        |arrivals: &Arrivals| program.has_transactions() && arrivals.still() < COMMITS_WITHIN;
    while arrivals.see(topic.records() as u64) < all || more_may_come(&arrivals) {
        running.assert_runs();
        arrivals.assert_moves();
        walsender.sample();
        // Querying a thousand topics every 10 ms would put load on the broker.
        sleep(BETWEEN_LOOKS * if settings.topics > 1 { 10 } else { 1 });
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
        "{records} records of {} rows",
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

/// The amounts that have arrived over time, in rows or bytes.
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

    /// Records that `amount` has arrived by now. Returns `amount`.
    fn see(&mut self, amount: u64) -> u64 {
        if amount > self.last.1 {
            self.last = (Instant::now(), amount);
            self.first.get_or_insert(self.last);
        }
        amount
    }

    /// # Panics
    /// Panics if nothing has arrived for a very long time.
    fn assert_moves(&self) {
        let still = self.still();
        assert!(still < STALL, "nothing arrived in {still:?}");
    }

    /// Returns how long nothing has arrived.
    fn still(&self) -> Duration {
        self.last.0.elapsed()
    }

    fn first_seconds(&self) -> f64 {
        let (at, _) = self.first.expect("something has arrived");
        (at - self.began).as_secs_f64()
    }

    fn last_seconds(&self) -> f64 {
        (self.last.0 - self.began).as_secs_f64()
    }

    /// Returns the rate after the first sample that found something, extrapolated to `rows`, or
    /// `None` if that sample found most of the rows.
    fn per_second(&self, rows: usize) -> Option<f64> {
        let ((first, early), (last, all)) = (self.first?, self.last);
        let part = (all - early) as f64 / all as f64;
        (part > 0.5).then(|| rows as f64 * part / (last - first).as_secs_f64())
    }
}
