//! The `drain` part compares the throughput of Walpost, pg_recvlogical and other programs on the
//! same backlogs. It also measures Walpost's memory while the broker is frozen.

use crate::args::Args;
use crate::backlog::{self, Shape};
use crate::bed::TestBed;
use crate::drain::{self, Lap};
use crate::outage;
use crate::program::Link;
use crate::results::Comparison;
use crate::topic::TopicSettings;

/// The name of the series in which each program drains the first backlog. Most published figures
/// come from this series.
pub(crate) const SERIES: &str = "drain";
/// The name of the series in which each program drains the second, larger backlog.
pub(crate) const MORE_ROWS: &str = "drain of more rows";

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Comparison {
    let backlog = backlog::fill(&bed.db, Shape::with_rows(args.rows()));
    let mut drains = drain::rounds(bed, SERIES, &backlog, &laps(args), 0..args.rounds());
    let outage = outage::measure(bed, args, backlog.rows);
    if let Some(rows) = args.more_rows() {
        let backlog = backlog::fill(&bed.db, Shape::with_rows(rows));
        drains.extend(drain::rounds(
            bed,
            MORE_ROWS,
            &backlog,
            &laps(args),
            0..args.rounds(),
        ));
    }
    backlog::empty(&bed.db);
    Comparison { drains, outage }
}

fn laps(args: &Args) -> Vec<Lap> {
    let mut laps = Vec::new();
    for link in [Link::Unix, Link::Tcp] {
        laps.push(Lap::limit(link));
        laps.push(Lap::new(args.walpost(link), TopicSettings::default()));
    }
    let exactly_once = args.walpost(Link::Unix).exactly_once();
    laps.push(Lap::new(exactly_once, TopicSettings::default()));
    let peers = args.peers().into_iter();
    laps.extend(peers.map(|peer| Lap::new(peer, TopicSettings::default())));
    laps
}
