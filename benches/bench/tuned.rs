//! The `tuned` part repeats the drains that miss their targets, but with the suspected bottleneck
//! removed. If a drain then meets its target, the suspicion is confirmed.

use crate::args::Args;
use crate::backlog::{self, Kind, Shape};
use crate::bed::TestBed;
use crate::drain::{self, Lap};
use crate::program::{Link, Program};
use crate::results::Drain;
use crate::topic::TopicSettings;

pub(crate) const SERIES: &str = "tuned";

pub(crate) const PARTITIONS: &str = "100 partitions, 2,000,000 rows";
pub(crate) const PAYLOAD: &str = "payload of 10 KB, `compression.type = none`";
pub(crate) const MESSAGES: &str = "messages in the log alone, over TCP";
pub(crate) const TOPICS: &str = "1,000 topics, `statistics.interval.ms = 0`";

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Vec<Drain> {
    let mut drains = Vec::new();
    let mut add = |point: &str, shape: Shape, walpost: Program, topic: TopicSettings| {
        let backlog = backlog::fill(&bed.db, shape);
        let laps = Lap::with_limit(walpost, topic, point);
        drains.extend(drain::rounds(
            bed,
            SERIES,
            &backlog,
            &laps,
            0..args.rounds(),
        ));
    };
    let default_topic = TopicSettings::default;
    let walpost_over = |link| args.walpost(link);

    let shape = Shape::with_rows(args.scaled(2_000_000));
    let topic = TopicSettings {
        partitions: 100,
        ..default_topic()
    };
    add(PARTITIONS, shape, walpost_over(Link::Unix), topic);

    let shape = Shape {
        payload_bytes: Some(10_000),
        ..Shape::with_rows(args.scaled(30_000))
    };
    let topic = TopicSettings {
        compression: Some("none".to_owned()),
        ..default_topic()
    };
    add(PAYLOAD, shape, walpost_over(Link::Unix), topic);

    let shape = Shape {
        kind: Kind::Messages,
        ..Shape::with_rows(args.rows())
    };
    add(MESSAGES, shape, walpost_over(Link::Tcp), default_topic());

    // This drain runs last, because a thousand topics keep the broker busy for a while, even after
    // the topics are deleted.
    let topics = args.scaled(1_000);
    let shape = Shape {
        types: topics,
        ..Shape::with_rows(args.rows())
    };
    let topic = TopicSettings {
        topics,
        partitions: 1,
        ..default_topic()
    };
    let walpost = walpost_over(Link::Unix).with_property("statistics.interval.ms=0");
    add(TOPICS, shape, walpost, topic);

    backlog::empty(&bed.db);
    drains
}
