//! The `growth` part varies one parameter at a time, such as the payload size, and compares an
//! outbox table with logical decoding messages.

use crate::args::Args;
use crate::backlog::{self, Kind, Shape};
use crate::bed::TestBed;
use crate::drain::{self, Lap};
use crate::program::Link;
use crate::results::Drain;
use crate::topic::TopicSettings;

pub(crate) const ROWS: &str = "rows";
pub(crate) const PAYLOAD: &str = "payload";
pub(crate) const TRANSACTIONS: &str = "transactions";
pub(crate) const PARTITIONS: &str = "partitions";
pub(crate) const COMPRESSION: &str = "compression";
pub(crate) const TOPICS: &str = "topics";
/// The name of the series that compares an outbox table with logical decoding messages.
pub(crate) const OUTBOX: &str = "outbox";

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Vec<Drain> {
    let mut drains = Vec::new();
    let mut add = |series: &str, point: &str, shape: Shape, rounds: usize| {
        let backlog = backlog::fill(&bed.db, shape);
        let laps = walpost_and_limit(args, point);
        drains.extend(drain::rounds(bed, series, &backlog, &laps, 0..rounds));
    };

    for (point, count) in [
        ("10,000", 10_000),
        ("100,000", 100_000),
        ("1,000,000", 1_000_000),
        ("5,000,000", 5_000_000),
    ] {
        add(
            ROWS,
            point,
            Shape::with_rows(args.scaled(count)),
            args.rounds(),
        );
    }
    for (point, bytes, count) in [
        ("100 B", 100, 500_000),
        ("1 KB", 1_000, 200_000),
        ("10 KB", 10_000, 30_000),
        ("100 KB", 100_000, 3_000),
    ] {
        let shape = Shape {
            payload_bytes: Some(bytes),
            ..Shape::with_rows(args.scaled(count))
        };
        add(PAYLOAD, point, shape, args.rounds());
    }
    for (point, batch, count, rounds) in [
        ("1", 1, 300_000, args.rounds()),
        ("100", 100, 500_000, args.rounds()),
        ("10,000", 10_000, 500_000, args.rounds()),
        ("1,000,000", 1_000_000, 1_000_000, args.rounds()),
        ("5,000,000", 5_000_000, 5_000_000, 1),
    ] {
        let shape = Shape {
            batch,
            ..Shape::with_rows(args.scaled(count))
        };
        add(TRANSACTIONS, point, shape, rounds);
    }

    // The following series vary only the topic's settings, so they share one backlog.
    let backlog = backlog::fill(&bed.db, Shape::with_rows(args.rows()));
    let walpost = |topic, point| Lap::new(args.walpost(Link::Unix), topic).at_point(point);
    let mut laps = vec![Lap::limit(Link::Unix)];
    laps.extend(
        [(1, "1"), (12, "12"), (30, "30"), (100, "100")].map(|(partitions, point)| {
            let topic = TopicSettings {
                partitions,
                ..TopicSettings::default()
            };
            walpost(topic, point)
        }),
    );
    drains.extend(drain::rounds(
        bed,
        PARTITIONS,
        &backlog,
        &laps,
        0..args.rounds(),
    ));
    let mut laps = vec![Lap::limit(Link::Unix)];
    laps.extend(["none", "lz4", "zstd"].map(|codec| {
        let topic = TopicSettings {
            compression: Some(codec.to_owned()),
            ..TopicSettings::default()
        };
        walpost(topic, codec)
    }));
    drains.extend(drain::rounds(
        bed,
        COMPRESSION,
        &backlog,
        &laps,
        0..args.rounds(),
    ));

    // Each round writes its own backlog, because this series also compares how long writing takes.
    for round in 0..args.rounds() {
        let mut kinds = [Kind::Table, Kind::Messages];
        kinds.rotate_left(round % 2);
        for kind in kinds {
            let shape = Shape {
                kind,
                ..Shape::with_rows(args.rows())
            };
            let backlog = backlog::fill(&bed.db, shape);
            let laps = walpost_and_limit(args, kind.name());
            drains.extend(drain::rounds(
                bed,
                OUTBOX,
                &backlog,
                &laps,
                round..round + 1,
            ));
        }
    }
    // This series runs last, because a thousand topics keep the broker busy for a while, even after
    // the topics are deleted.
    for (point, topics) in [("1", 1), ("1,000", args.scaled(1_000))] {
        let shape = Shape {
            types: topics,
            ..Shape::with_rows(args.rows())
        };
        let topic = TopicSettings {
            topics,
            partitions: 1,
            ..TopicSettings::default()
        };
        let backlog = backlog::fill(&bed.db, shape);
        let laps = Lap::with_limit(args.walpost(Link::Unix), topic, point);
        drains.extend(drain::rounds(
            bed,
            TOPICS,
            &backlog,
            &laps,
            0..args.rounds(),
        ));
    }
    backlog::empty(&bed.db);
    drains
}

/// Returns two [`Lap`]s for one value of a series' parameter: one for Walpost and one for
/// pg_recvlogical.
fn walpost_and_limit(args: &Args, point: &str) -> [Lap; 2] {
    Lap::with_limit(args.walpost(Link::Unix), TopicSettings::default(), point)
}
