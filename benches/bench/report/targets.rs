//! What Walpost is meant to reach, and what was measured.

use super::numbers::{MEBIBYTE, NOTHING, one_place, two_places, whole};
use super::summary::{Drains, find, groups, steady};
use super::table::Table;
use crate::comparison::{MORE_ROWS, SERIES};
use crate::growth;
use crate::program::{DEBEZIUM, Link, WALPOST};
use crate::results::{Drain, Latency, Outage, Results};
use crate::stats::{Spread, median};

/// Most memory, in MiB, with the window as it is by default.
const MOST_MEBIBYTES: f64 = 32.0;

/// Rates and costs are judged by the median of the rounds, memory by the worst of them.
pub(crate) fn table(results: &Results) -> Table {
    let drain = results.drain.as_ref().map(|part| &part.data);
    let growth = results.growth.as_ref().map(|part| &part.data);
    let latency = results.latency.as_ref().map(|part| &part.data);
    let drains = drain.map_or(&[][..], |data| &data.drains);

    let mut targets = Targets(Table::new(["target", "wanted", "measured", "met"]));
    targets.rates(drains);
    targets.costs(drains);
    targets.memory(
        drains,
        growth.map_or(&[], |drains| drains),
        drain.map(|data| &data.outage),
    );
    targets.latency(latency);
    targets.0
}

struct Targets(Table);

impl Targets {
    fn rates(&mut self, drains: &[Drain]) {
        let both = [
            (groups(drains, SERIES), 4.5),
            (groups(drains, MORE_ROWS), 2.5),
        ];
        for (groups, _) in &both {
            let rows = rows(groups);
            for (link, wanted) in [(Link::Unix, 0.85), (Link::Tcp, 0.95)] {
                let what = format!("drain of {rows} rows over {link}, of what pg_recvlogical does");
                let walpost = find(groups, WALPOST, link);
                let measured = mid(walpost.and_then(Drains::of_limit));
                self.at_least(&what, wanted, measured, two_places);
            }
        }
        for (groups, wanted) in both {
            let rows = rows(&groups);
            for link in [Link::Unix, Link::Tcp] {
                let what = format!("drain of {rows} rows over {link}, times Debezium's (over TCP)");
                let measured = times_debezium(&groups, link, |group| mid(group.rate()));
                self.at_least(&what, wanted, measured, one_place);
            }
        }
    }

    fn costs(&mut self, drains: &[Drain]) {
        let (groups, more) = (groups(drains, SERIES), groups(drains, MORE_ROWS));
        let part = |figure: fn(&Drain) -> f64| {
            times_debezium(&groups, Link::Unix, |group| mid(group.of(figure)))
        };
        let three_places = |part| format!("{part:.3}");
        let cpu = part(|drain| drain.measured.cpu.program);
        self.at_most("CPU of the drain, of Debezium's", 0.1, cpu, three_places);
        let memory = part(|drain| drain.measured.peak_rss_bytes as f64);
        self.at_most(
            "memory of the drain, of Debezium's",
            0.05,
            memory,
            three_places,
        );
        let walpost = find(&groups, WALPOST, Link::Unix);
        let first = walpost.and_then(|group| mid(group.of(|drain| drain.measured.first_seconds)));
        self.at_most("first record after the start, s", 0.3, first, two_places);
        for groups in [groups, more] {
            let what = format!("CPU s per million rows, in a drain of {}", rows(&groups));
            let walpost = find(&groups, WALPOST, Link::Unix);
            let cpu = walpost
                .and_then(|group| mid(group.per_million(|drain| drain.measured.cpu.program)));
            self.at_most(&what, 2.2, cpu, two_places);
        }
    }

    fn memory(&mut self, drains: &[Drain], growth: &[Drain], outage: Option<&Outage>) {
        let drained = drains.iter().filter(|drain| drain.program == WALPOST);
        self.at_most_mebibytes("of the drain", worst_peak(drained));
        let longest = longest_transaction(growth);
        let rows = longest.map_or("many".to_owned(), |drain| whole(drain.backlog.batch as f64));
        let what = format!("of the drain of one transaction of {rows} rows");
        self.at_most_mebibytes(&what, worst_peak(longest));
        let outage = outage.and_then(|outage| outage.rss.iter().map(|(_, bytes)| *bytes).max());
        self.at_most_mebibytes("before, while and after the broker does not answer", outage);
    }

    fn latency(&mut self, latency: Option<&Latency>) {
        let rounds = latency.map_or(&[][..], |latency| &latency.steady);
        let rounds = steady(rounds, WALPOST, 500);
        let p50 = median(rounds.iter().map(|round| round.from_insert.p50));
        let p99 = median(rounds.iter().map(|round| round.from_insert.p99));
        let what = "latency at 500 transactions/s";
        self.at_most(&format!("{what}: p50, ms"), 2.5, p50, two_places);
        self.at_most(&format!("{what}: p99, ms"), 8.0, p99, two_places);
        let idle = latency.map_or(&[][..], |latency| &latency.idle);
        let idle = idle.iter().filter(|idle| idle.program == WALPOST);
        let idle = median(idle.map(|idle| idle.cpu_seconds * 10.0 / idle.seconds));
        self.at_most("idle CPU s in 10 s", 0.03, idle, two_places);
    }

    fn at_most_mebibytes(&mut self, what: &str, bytes: Option<u64>) {
        let measured = bytes.map(|bytes| bytes as f64 / MEBIBYTE);
        let what = format!("peak RSS {what}, MiB");
        self.at_most(&what, MOST_MEBIBYTES, measured, one_place);
    }

    fn at_least(
        &mut self,
        what: &str,
        wanted: f64,
        measured: Option<f64>,
        write: impl Fn(f64) -> String,
    ) {
        let met = measured.map(|measured| measured >= wanted);
        self.add(what, format!("at least {wanted}"), measured.map(write), met);
    }

    fn at_most(
        &mut self,
        what: &str,
        wanted: f64,
        measured: Option<f64>,
        write: impl Fn(f64) -> String,
    ) {
        let met = measured.map(|measured| measured <= wanted);
        self.add(what, format!("at most {wanted}"), measured.map(write), met);
    }

    fn add(&mut self, what: &str, wanted: String, measured: Option<String>, met: Option<bool>) {
        let met = match met {
            None => NOTHING,
            Some(true) => "yes",
            Some(false) => "**no**",
        };
        let measured = measured.unwrap_or("not measured".to_owned());
        self.0
            .row([what.to_owned(), wanted, measured, met.to_owned()]);
    }
}

/// How many there were, as text.
fn rows(groups: &[Drains<'_>]) -> String {
    groups.first().map_or("more".to_owned(), |group| {
        whole(group.rounds[0].backlog.rows as f64)
    })
}

fn mid(spread: Option<Spread>) -> Option<f64> {
    spread.map(|spread| spread.median)
}

/// Walpost's figure as a multiple of Debezium's.
fn times_debezium(
    groups: &[Drains<'_>],
    link: Link,
    figure: impl Fn(&Drains<'_>) -> Option<f64>,
) -> Option<f64> {
    let walpost = figure(find(groups, WALPOST, link)?)?;
    Some(walpost / figure(find(groups, DEBEZIUM, Link::Tcp)?)?)
}

fn worst_peak<'a>(drains: impl IntoIterator<Item = &'a Drain>) -> Option<u64> {
    let peaks = drains
        .into_iter()
        .map(|drain| drain.measured.peak_rss_bytes);
    peaks.max()
}

fn longest_transaction(drains: &[Drain]) -> Option<&Drain> {
    drains
        .iter()
        .filter(|drain| drain.program == WALPOST && drain.series == growth::TRANSACTIONS)
        .max_by_key(|drain| drain.backlog.batch)
}
