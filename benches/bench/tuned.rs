//! The part `tuned`: shows the bottleneck of drains that miss their targets, by repeating them
//! without it.

use crate::args::Args;
use crate::backlog::{self, Kind, Shape};
use crate::bed::Bed;
use crate::drain::{self, Lap};
use crate::program::{Link, Program};
use crate::results::Drain;
use crate::topic::TopicSettings;

pub(crate) const SERIES: &str = "tuned";

pub(crate) const PARTITIONS: &str = "100 partitions, 2,000,000 rows";
pub(crate) const PAYLOAD: &str = "payload of 10 KB, `compression.type = none`";
pub(crate) const MESSAGES: &str = "messages in the log alone, over TCP";
pub(crate) const TOPICS: &str = "1,000 topics, `statistics.interval.ms = 0`";

pub(crate) fn measure(bed: &Bed, args: &Args) -> Vec<Drain> {
    let mut drains = Vec::new();
    let mut add = |point: &str, shape: Shape, walpost: Program, topic: TopicSettings| {
        let backlog = backlog::fill(&bed.db, shape);
        let laps = Lap::beside_limit(walpost, topic, point);
        drains.extend(drain::rounds(
            bed,
            SERIES,
            &backlog,
            &laps,
            0..args.rounds(),
        ));
    };
    let usual = TopicSettings::default;
    let over = |link| args.walpost(link);

    let shape = Shape::of_rows(args.scaled(2_000_000));
    let topic = TopicSettings {
        partitions: 100,
        ..usual()
    };
    add(PARTITIONS, shape, over(Link::Unix), topic);

    let shape = Shape {
        payload_bytes: Some(10_000),
        ..Shape::of_rows(args.scaled(30_000))
    };
    let topic = TopicSettings {
        compression: Some("none".to_owned()),
        ..usual()
    };
    add(PAYLOAD, shape, over(Link::Unix), topic);

    let shape = Shape {
        kind: Kind::Messages,
        ..Shape::of_rows(args.rows())
    };
    add(MESSAGES, shape, over(Link::Tcp), usual());

    // This comes last, because the broker remains busy with a thousand topics for a while.
    let topics = args.scaled(1_000);
    let shape = Shape {
        types: topics,
        ..Shape::of_rows(args.rows())
    };
    let topic = TopicSettings {
        topics,
        partitions: 1,
        ..usual()
    };
    let walpost = over(Link::Unix).with_property("statistics.interval.ms=0");
    add(TOPICS, shape, walpost, topic);

    backlog::empty(&bed.db);
    drains
}
