//! The `forms` part delivers the same backlog in each record format.

use crate::args::Args;
use crate::backlog::{self, Shape};
use crate::bed::TestBed;
use crate::drain::{self, Lap};
use crate::program::Link;
use crate::results::Drain;
use crate::topic::TopicSettings;

pub(crate) const SERIES: &str = "forms";

/// The names of the formats, and the pipeline settings that select them.
const FORMS: [(&str, &str); 7] = [
    ("string", ""),
    ("bytes", "value_format = \"bytes\""),
    ("json", "key_format = \"json\"\nvalue_format = \"json\""),
    (
        "json-schema",
        "key_format = \"json-schema\"\nvalue_format = \"json-schema\"",
    ),
    ("expanded string", "expand_payload = true"),
    (
        "expanded json",
        "value_format = \"json\"\nexpand_payload = true",
    ),
    (
        "expanded json-schema",
        "value_format = \"json-schema\"\nexpand_payload = true",
    ),
];

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Vec<Drain> {
    let backlog = backlog::fill(&bed.db, Shape::with_rows(args.rows()));
    let mut laps = vec![Lap::limit(Link::Unix)];
    laps.extend(FORMS.map(|(name, settings)| {
        let walpost = args.walpost(Link::Unix).with_settings(settings);
        Lap::new(walpost, TopicSettings::default()).at_point(name)
    }));
    let drains = drain::rounds(bed, SERIES, &backlog, &laps, 0..args.rounds());
    backlog::empty(&bed.db);
    drains
}
