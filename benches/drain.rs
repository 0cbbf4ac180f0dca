//! Drains a backlog from a real PostgreSQL into a real Kafka, and prints how fast, beside what the
//! walsender alone can do (`pg_recvlogical` to /dev/null over the same socket).
//!
//! `./dev bench --rows 1000000 --rounds 3 --batch 100 [--tcp] [-X NAME=VALUE ...]`
//!
//! One run on one machine, the two in turn: times move from machine to machine, ratios much less.
#![allow(
    clippy::unwrap_used,
    reason = "a benchmark that can't go on has failed"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Parser;
use rdkafka::consumer::{BaseConsumer, Consumer};
use support::kafka::Broker;
use support::postgres::{MAJOR, Server, binaries};
use support::session::Session;
use support::wait::wait_until;
use support::walpost::{Invocation, Walpost};

const DATABASE: &str = "postgres";
const PUBLICATION: &str = "walpost_outbox";
const PARTITIONS: i32 = 3;

/// Rows as a shop writes them: 10,000 keys, payloads of about 220 bytes.
const TABLE: &str = "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL,
    aggregateid text NOT NULL, type text NOT NULL, payload jsonb NOT NULL);
CREATE PUBLICATION walpost_outbox FOR TABLE outbox WITH (publish = 'insert');
CREATE PROCEDURE fill(total bigint, batch bigint) LANGUAGE plpgsql AS $$
DECLARE at bigint := 1; BEGIN
  WHILE at <= total LOOP
    INSERT INTO outbox SELECT gen_random_uuid(), 'order', 'ord-' || (n % 10000), 'OrderCreated',
      jsonb_build_object('n', n, 'customer', 'customer-' || (n % 5000),
        'amount', ((n * 7919) % 100000) / 100.0, 'currency', 'EUR', 'status', 'created', 'note',
        substr(md5(n::text) || md5((n + 1)::text) || md5((n + 2)::text), 1, 70))
      FROM generate_series(at, least(at + batch - 1, total)) n;
    COMMIT; at := at + batch;
  END LOOP; END $$";

#[derive(Parser)]
struct Args {
    /// Rows in the backlog
    #[arg(long, default_value_t = 1_000_000)]
    rows: usize,
    /// How often each is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Rows in a transaction
    #[arg(long, default_value_t = 100)]
    batch: usize,
    /// Over TCP loopback instead of the unix-domain socket
    #[arg(long)]
    tcp: bool,
    /// A librdkafka property for walpost
    #[arg(short = 'X', value_name = "NAME=VALUE")]
    property: Vec<String>,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

/// One drain.
struct Measured {
    seconds: f64,
    to_first: f64,
    cpu_seconds: f64,
    peak_mebibytes: f64,
}

fn main() {
    let args = Args::parse();
    let server = Server::private(MAJOR, "shared_buffers = 256MB\nmax_wal_size = 8GB\n");
    let broker = Broker::with_jvm(&["-Xms512m", "-Xmx512m"]);
    let session = server.session(DATABASE);
    session.run(TABLE);
    let slots: Vec<_> = (0..args.rounds)
        .flat_map(|n| [format!("limit_{n}"), format!("walpost_{n}")])
        .collect();
    for slot in &slots {
        session.run(&format!(
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ));
    }
    let began = Instant::now();
    session.run(&format!("CALL fill({}, {})", args.rows, args.batch));
    println!(
        "{} rows in transactions of {} written in {:.1} s",
        args.rows,
        args.batch,
        began.elapsed().as_secs_f64()
    );
    session.run("CHECKPOINT");

    let conninfo = match args.tcp {
        false => server.conninfo(DATABASE),
        true => server.tcp_conninfo(DATABASE),
    };
    let (mut limits, mut drains) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        let limit = limit(&session, &conninfo, round);
        let drain = drain(&args, &broker, &conninfo, round);
        println!(
            "round {round}: pg_recvlogical {limit:.2} s; walpost {:.2} s, first record after {:.2} s, {:.2} s of CPU, \
             peak RSS {:.1} MiB",
            drain.seconds, drain.to_first, drain.cpu_seconds, drain.peak_mebibytes
        );
        limits.push(limit);
        drains.push(drain);
    }
    let rows = args.rows as f64;
    let middle = |of: fn(&Measured) -> f64| median(drains.iter().map(of).collect());
    let (limit, seconds) = (median(limits), middle(|drain| drain.seconds));
    println!(
        "median: pg_recvlogical {:.0} rows/s; walpost {:.0} rows/s ({:.2} of it), {:.2} CPU s per million rows, \
         peak RSS {:.1} MiB",
        rows / limit,
        rows / seconds,
        limit / seconds,
        middle(|drain| drain.cpu_seconds) * 1e6 / rows,
        middle(|drain| drain.peak_mebibytes),
    );
}

/// Seconds that the walsender needs when nothing is done with what it sends.
fn limit(session: &Session, conninfo: &str, round: usize) -> f64 {
    let end = session.value("SELECT pg_current_wal_lsn()").unwrap();
    let began = Instant::now();
    let status = Command::new(binaries(MAJOR).join("pg_recvlogical"))
        .args([
            "--dbname",
            conninfo,
            "--slot",
            &format!("limit_{round}"),
            "--start",
            "--no-loop",
        ])
        .args([
            "--endpos",
            &end,
            "--file",
            "/dev/null",
            "--option",
            "proto_version=1",
        ])
        .args(["--option", &format!("publication_names={PUBLICATION}")])
        .status()
        .unwrap();
    assert!(status.success());
    began.elapsed().as_secs_f64()
}

/// The same backlog through walpost: from the first record in the topic to the last.
fn drain(args: &Args, broker: &Broker, conninfo: &str, round: usize) -> Measured {
    let topic = format!("drain-{round}");
    broker.create_topic(&topic, PARTITIONS, &[]);
    let reader = broker.reader();
    let properties = args
        .property
        .iter()
        .flat_map(|property| ["-X".to_owned(), property.clone()]);
    let began = Instant::now();
    let walpost = Invocation::new(["run", "--postgres", conninfo, "--kafka", &broker.address()])
        .args(["--slot", &format!("walpost_{round}"), "--topic", &topic])
        .args(properties)
        .start();
    let mut first = None;
    let last = loop {
        let arrived = arrived(&reader, &topic);
        let now = Instant::now();
        if arrived > 0 {
            first.get_or_insert((now, arrived));
        }
        if arrived >= args.rows {
            break now;
        }
        sleep(Duration::from_millis(20));
    };
    let (first, early) = first.unwrap();
    let seconds =
        (last - first).as_secs_f64() * args.rows as f64 / (args.rows - early).max(1) as f64;
    let measured = Measured {
        seconds,
        to_first: (first - began).as_secs_f64(),
        cpu_seconds: cpu_seconds(&walpost),
        peak_mebibytes: peak_mebibytes(&walpost),
    };
    assert_eq!(walpost.terminate().code, Some(0));
    wait_until("nothing comes twice", || {
        arrived(&reader, &topic) == args.rows
    });
    measured
}

/// Records in the topic.
fn arrived(reader: &BaseConsumer, topic: &str) -> usize {
    let ends = (0..PARTITIONS).map(|partition| {
        reader
            .fetch_watermarks(topic, partition, Duration::from_secs(10))
            .map_or(0, |(_, end)| end)
    });
    usize::try_from(ends.sum::<i64>()).unwrap()
}

/// User and system time of the process so far: proc(5), fields 14 and 15 of stat.
fn cpu_seconds(walpost: &Walpost) -> f64 {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = fs::read_to_string(format!("/proc/{}/stat", walpost.process_id())).unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    let ticks = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<f64>().unwrap());
    ticks.sum::<f64>() / TICKS_PER_SECOND
}

fn peak_mebibytes(walpost: &Walpost) -> f64 {
    let status = fs::read_to_string(format!("/proc/{}/status", walpost.process_id())).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<f64>()
        .unwrap()
        / 1024.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
