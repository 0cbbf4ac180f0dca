//! Measures how long the components that perform no I/O take to process a row. Run it with `./dev
//! micro [FILTER]`.
//!
//! Times vary between machines and runs, so CI checks the instruction counts of `instructions.rs`
//! instead.

#[path = "../tests/support/stream.rs"]
mod stream;

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, Criterion, Throughput};
use stream::{BEGIN, Kind, Stream, null_pipeline, play, templates};
use walpost::facade::Frame;
use walpost::facade::OutboxSettings;
use walpost::facade::Router;
use walpost::facade::Watermark;
use walpost::facade::Window;
use walpost::facade::{COLUMNS_MAX, Mapping, Row, TableColumn};
use walpost::facade::{Lsn, Position};
use walpost::facade::{Message, Value};

const ROWS: usize = 10_000;
/// The number of rows per transaction in benchmarks whose results hardly depend on this number.
const TRANSACTION: usize = 100;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    frame_and_decode(&mut group(&mut criterion, "codec"));
    route(&mut group(&mut criterion, "route"));
    watermark(&mut group(&mut criterion, "watermark"));
    core(&mut group(&mut criterion, "core"));
    criterion.final_summary();
}

type Group<'c> = BenchmarkGroup<'c, WallTime>;

fn group<'c>(criterion: &'c mut Criterion, name: &str) -> Group<'c> {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(ROWS as u64));
    group
}

/// Measures how long it takes to decode the frame in each `CopyData` body, and the message in each
/// frame.
fn frame_and_decode(group: &mut Group<'_>) {
    let stream = Stream::rows(Kind::Plain, ROWS, TRANSACTION);
    group.bench_function("frame", |bencher| {
        bencher.iter(|| {
            stream.bodies().for_each(|body| {
                black_box(Frame::decode(body)).expect("a frame");
            });
        });
    });
    let messages: Vec<_> = stream.bodies().map(message_bytes).collect();
    group.bench_function("decode", |bencher| {
        bencher.iter(|| {
            for bytes in &messages {
                black_box(Message::decode(bytes)).expect("a message");
            }
        });
    });
}

/// Measures how long the router takes to convert rows to records. The benchmark cases are the
/// settings and table layouts whose costs differ most.
fn route(group: &mut Group<'_>) {
    let cases = [
        ("defaults", Kind::Plain, OutboxSettings::default()),
        ("headers column", Kind::Headers, OutboxSettings::default()),
        ("several templates", Kind::Plain, templates()),
        ("bytea", Kind::Bytea, OutboxSettings::default()),
    ];
    for (name, kind, settings) in cases {
        let stream = Stream::rows(kind, ROWS, TRANSACTION);
        let (mapping, rows) = rows(&stream, kind, &settings);
        let mut router = Router::default();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for (index, row) in (0..).zip(&rows) {
                    let position = Position {
                        commit: BEGIN,
                        index,
                    };
                    let record = router.route(&mapping, row, &position.text());
                    black_box(record).expect("a record");
                }
            });
        });
    }
}

/// Measures the [`Watermark`] alone, which tracks rows as they are reserved, committed, delivered
/// and confirmed.
fn watermark(group: &mut Group<'_>) {
    const COST: u64 = 600;
    for (name, per_transaction) in [("transactions of 1", 1), ("transactions of 100", 100)] {
        let window = Window {
            records: ROWS as u64,
            bytes: ROWS as u64 * COST,
        };
        let mut watermark = Watermark::new(window, BEGIN);
        let deliveries = watermark.deliveries();
        let mut end = BEGIN.0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for _ in 0..ROWS / per_transaction {
                    let commit = Lsn(end + 8);
                    end += 16;
                    watermark.begin(commit).expect("begins");
                    for _ in 0..per_transaction {
                        let tag = watermark
                            .reserve(COST)
                            .expect("the transaction is open")
                            .expect("the window has space");
                        deliveries.delivered([black_box(tag)]);
                    }
                    watermark.commit(commit, Lsn(end)).expect("commits");
                }
                assert_eq!(watermark.confirmed().lsn(), Lsn(end));
            });
        });
    }
}

/// Measures all components together, with a sink that discards the records.
fn core(group: &mut Group<'_>) {
    let cases = [
        ("transactions of 1", Kind::Plain, 1),
        ("transactions of 100", Kind::Plain, TRANSACTION),
        ("headers column", Kind::Headers, TRANSACTION),
        ("log", Kind::Messages, TRANSACTION),
    ];
    for (name, kind, per_transaction) in cases {
        let stream = Stream::rows(kind, ROWS, per_transaction);
        group.bench_function(name, |bencher| {
            bencher.iter_batched_ref(
                || null_pipeline(kind, OutboxSettings::default()),
                |(core, sink)| play(core, sink, stream.bodies()),
                BatchSize::LargeInput,
            );
        });
    }
}

fn message_bytes(body: &[u8]) -> &[u8] {
    match Frame::decode(body).expect("a frame") {
        Frame::XLogData { data, .. } => data,
        Frame::Keepalive { .. } | Frame::LargeMessage { .. } => panic!("rows only"),
    }
}

/// Returns the rows in the stream, decoded as a pipeline would decode them before passing them to
/// the router. Also returns the mapping of their columns.
fn rows<'s>(stream: &'s Stream, kind: Kind, settings: &OutboxSettings) -> (Mapping, Vec<Row<'s>>) {
    let mut mapping = None;
    let mut rows = Vec::new();
    for bytes in stream.bodies().map(message_bytes) {
        match Message::decode(bytes).expect("a message") {
            Message::Relation(relation) => {
                let columns: Vec<_> = relation
                    .columns
                    .iter()
                    .map(|column| TableColumn {
                        name: column.name,
                        type_oid: column.type_oid,
                    })
                    .collect();
                mapping = Some(Mapping::bind(settings, kind.name(), &columns).expect("binds"));
            }
            Message::Insert { new, .. } => {
                let mapping = mapping
                    .as_ref()
                    .expect("a Relation message before the rows");
                let mut row = [None; COLUMNS_MAX];
                for (index, value) in new.values().enumerate() {
                    if let (Some(slot), Value::Text(text)) = (mapping.slot(index), value) {
                        row[slot] = Some(text);
                    }
                }
                rows.push(row);
            }
            _ => {}
        }
    }
    (mapping.expect("a Relation message"), rows)
}
