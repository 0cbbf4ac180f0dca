//! Compares the results with Walpost's performance targets.

use super::numbers::{NOTHING, one_place, rough, two_places, whole};
use super::summary::{Drains, find, groups, steady};
use super::table::Table;
use crate::backlog::Kind;
use crate::comparison::{MORE_ROWS, SERIES};
use crate::growth;
use crate::program::{DEBEZIUM, EXACTLY_ONCE, Link, WALPOST};
use crate::results::{Drain, Latency, Outage, Results, Shards, Tables};
use crate::stats::{Spread, median};
use crate::tables as bench_tables;
use crate::tuned;
use crate::usage::MEBIBYTE;

/// The target for peak memory, in MiB, with the default limits on the size and number of events in
/// flight.
const MEBIBYTES_MAX: f64 = 32.0;

/// Returns the table of targets. A target is met if the median of all rounds meets it.
pub(crate) fn table(results: &Results) -> Table {
    let drain = results.drain.as_ref().map(|part| &part.data);
    let growth = results.growth.as_ref().map(|part| &part.data);
    let latency = results.latency.as_ref().map(|part| &part.data);
    let drains = drain.map_or(&[][..], |data| &data.drains);
    let grown = growth.map_or(&[][..], |drains| drains);

    let mut targets = Targets(Table::new(["measurement", "target", "measured", "met"]));
    targets.rates(drains);
    targets.grown_rates(grown);
    targets.costs(drains, grown);
    targets.memory(drains, grown, drain.map(|data| &data.outage));
    targets.latency(latency);
    targets.tuned(results.tuned.as_ref().map_or(&[][..], |part| &part.data));
    if let Some(part) = &results.tables {
        targets.tables(&part.data);
    }
    if let Some(part) = &results.shards {
        targets.shards(&part.data);
    }
    targets.0
}

struct Targets(Table);

impl Targets {
    fn rates(&mut self, drains: &[Drain]) {
        let both = [
            (groups(drains, SERIES), 6.0, 4.8),
            (groups(drains, MORE_ROWS), 2.5, 2.5),
        ];
        for (groups, ..) in &both {
            let rows = rows(groups);
            for (link, target) in [(Link::Unix, 0.9), (Link::Tcp, 0.95)] {
                let what = format!("drain of {rows} rows over {link}, relative to pg_recvlogical");
                let walpost = find(groups, WALPOST, link);
                let measured = median_value(walpost.and_then(Drains::ratio_to_limit));
                self.at_least(&what, target, measured, two_places);
            }
        }
        for (groups, over_unix, over_tcp) in both {
            let rows = rows(&groups);
            for (link, target) in [(Link::Unix, over_unix), (Link::Tcp, over_tcp)] {
                let what =
                    format!("drain of {rows} rows over {link}, relative to Debezium (over TCP)");
                let measured = times_debezium(&groups, link, |group| median_value(group.rate()));
                self.at_least(&what, target, measured, one_place);
            }
        }
    }

    fn grown_rates(&mut self, grown: &[Drain]) {
        for (series, point, target) in [
            (growth::PARTITIONS, "12", 0.8),
            (growth::PARTITIONS, "30", 0.7),
            (growth::PARTITIONS, "100", 0.45),
            (growth::PAYLOAD, "1 KB", 0.75),
            (growth::PAYLOAD, "10 KB", 0.75),
            (growth::TRANSACTIONS, "1,000,000", 0.8),
        ] {
            let groups = groups(grown, series);
            let measured =
                median_value(walpost_at(&groups, point).and_then(Drains::ratio_to_limit));
            let what = format!("drain, {series}: {point}, relative to pg_recvlogical");
            self.at_least(&what, target, measured, two_places);
        }
        let outboxes = groups(grown, growth::OUTBOX);
        let messages =
            median_value(walpost_at(&outboxes, Kind::Messages.name()).and_then(Drains::rate));
        self.at_least(
            "drain of logical decoding messages, rows/s",
            300_000.0,
            messages,
            rough,
        );
    }

    fn costs(&mut self, drains: &[Drain], grown: &[Drain]) {
        let (drained, more) = (groups(drains, SERIES), groups(drains, MORE_ROWS));
        let part = |figure: fn(&Drain) -> f64| {
            times_debezium(&drained, Link::Unix, |group| {
                median_value(group.spread_of(figure))
            })
        };
        let three_places = |part| format!("{part:.3}");
        let cpu = part(|drain| drain.measured.cpu.program);
        self.at_most(
            "CPU of the drain, relative to Debezium",
            0.1,
            cpu,
            three_places,
        );
        let memory = part(|drain| drain.measured.peak_rss_bytes as f64);
        self.at_most(
            "memory of the drain, relative to Debezium",
            0.05,
            memory,
            three_places,
        );
        let walpost = find(&drained, WALPOST, Link::Unix);
        let first = walpost
            .and_then(|group| median_value(group.spread_of(|drain| drain.measured.first_seconds)));
        self.at_most("first record after the start, s", 0.3, first, two_places);
        let program: fn(&Drain) -> f64 = |drain| drain.measured.cpu.program;
        for groups in [drained, more] {
            let what = format!("CPU s per million rows, in a drain of {}", rows(&groups));
            let walpost = find(&groups, WALPOST, Link::Unix);
            let cpu = walpost.and_then(|group| {
                median_value(group.per_million(|drain| drain.measured.cpu.program))
            });
            self.at_most(&what, 1.7, cpu, two_places);
        }
        let cpu = |series, point, figure| {
            let groups = groups(grown, series);
            walpost_at(&groups, point).and_then(|group| median_value(group.per_million(figure)))
        };
        self.at_most(
            "CPU s per million rows of 10 KB",
            35.0,
            cpu(growth::PAYLOAD, "10 KB", program),
            one_place,
        );
        self.at_most(
            "CPU s of the broker per million rows, 100 partitions",
            6.0,
            cpu(growth::PARTITIONS, "100", |drain| drain.measured.cpu.broker),
            two_places,
        );
    }

    fn memory(&mut self, drains: &[Drain], grown: &[Drain], outage: Option<&Outage>) {
        for program in [WALPOST, EXACTLY_ONCE] {
            let drained = drains.iter().filter(|drain| drain.program == program);
            let what = format!("of the drain ({program})");
            self.at_most_mebibytes(&what, MEBIBYTES_MAX, peaks(drained));
        }
        for (series, point, target) in [
            (growth::TRANSACTIONS, "5,000,000", MEBIBYTES_MAX),
            (growth::PAYLOAD, "100 KB", MEBIBYTES_MAX),
            (growth::TOPICS, "1,000", 48.0),
        ] {
            let groups = groups(grown, series);
            let rounds = walpost_at(&groups, point).map(|group| group.rounds.iter().copied());
            let what = format!("of the drain, {series}: {point}");
            self.at_most_mebibytes(&what, target, peaks(rounds.into_iter().flatten()));
        }
        let outage = outage.map_or(&[][..], |outage| &outage.rss);
        let most = outage
            .iter()
            .map(|(_, bytes)| *bytes as f64)
            .reduce(f64::max);
        self.at_most_mebibytes(
            "before, during and after the broker outage",
            MEBIBYTES_MAX,
            Spread::from_values(most),
        );
    }

    /// Adds the `tuned` part: drains that miss their targets with default settings, repeated with
    /// the bottleneck removed.
    fn tuned(&mut self, drains: &[Drain]) {
        let groups = groups(drains, tuned::SERIES);
        for (point, target) in [(tuned::PARTITIONS, 0.45), (tuned::PAYLOAD, 0.75)] {
            let measured =
                median_value(walpost_at(&groups, point).and_then(Drains::ratio_to_limit));
            let what = format!("drain, {point}, relative to pg_recvlogical");
            self.at_least(&what, target, measured, two_places);
        }
        let messages = walpost_at(&groups, tuned::MESSAGES).and_then(Drains::rate);
        let what = format!("drain, {}, rows/s", tuned::MESSAGES);
        self.at_least(&what, 300_000.0, median_value(messages), rough);
        let broker = walpost_at(&groups, tuned::PARTITIONS)
            .and_then(|group| median_value(group.per_million(|drain| drain.measured.cpu.broker)));
        let what = format!(
            "CPU s of the broker per million rows, {}",
            tuned::PARTITIONS
        );
        self.at_most(&what, 6.0, broker, two_places);
        let program = walpost_at(&groups, tuned::PAYLOAD)
            .and_then(|group| median_value(group.per_million(|drain| drain.measured.cpu.program)));
        let what = format!("CPU s per million rows, {}", tuned::PAYLOAD);
        self.at_most(&what, 35.0, program, one_place);
        let rounds = walpost_at(&groups, tuned::TOPICS).map(|group| group.rounds.iter().copied());
        let what = format!("of the drain, {}", tuned::TOPICS);
        self.at_most_mebibytes(&what, 48.0, peaks(rounds.into_iter().flatten()));
    }

    fn tables(&mut self, tables: &Tables) {
        let groups = groups(&tables.drains, bench_tables::SERIES);
        let many_and_one = walpost_at(&groups, "1000").zip(walpost_at(&groups, "1"));
        let ratio = many_and_one.and_then(|(many, one)| rate_ratio(many, one));
        let what = "drain of 1,000 tables on one slot, relative to one table";
        self.at_least(what, 0.95, ratio, two_places);
        let rounds = walpost_at(&groups, "1000").map(|group| group.rounds.iter().copied());
        let what = "of the drain of 1,000 tables";
        self.at_most_mebibytes(what, 48.0, peaks(rounds.into_iter().flatten()));
        let added = median(tables.added_seconds.iter().copied());
        let what = "first event of a newly added table, s";
        self.at_most(what, 1.0, added, two_places);
        let one_slot = tables.fleets.iter().filter(|fleet| fleet.slots == 1);
        let walsender = median(one_slot.map(|fleet| fleet.walsenders_cpu));
        let what =
            "CPU s of the walsender for 50 tables, during 300,000 inserts into another table";
        self.at_most(what, 2.0, walsender, two_places);
        let idle = &tables.idle;
        let mebibytes = idle.rss_bytes as f64 / MEBIBYTE / idle.slots as f64;
        let what = "memory for each of 500 idle pipelines, MiB";
        self.at_most(what, 1.0, Some(mebibytes), two_places);
        let cores = idle.program_cpu / idle.seconds;
        let what = "processors used by 500 idle pipelines";
        self.at_most(what, 0.2, Some(cores), two_places);
    }

    fn shards(&mut self, rounds: &[Shards]) {
        let ratios = rounds
            .iter()
            .filter(|shards| shards.pipelines > 1)
            .filter_map(|shards| {
                let is_one = |one: &&Shards| one.round == shards.round && one.pipelines == 1;
                let one = rounds.iter().find(is_one)?;
                Some(shards.rows_per_second / one.rows_per_second)
            });
        let what = "concurrent drain of 50 databases, relative to one database";
        self.at_least(what, 0.9, median(ratios), two_places);
    }

    fn latency(&mut self, latency: Option<&Latency>) {
        let all = latency.map_or(&[][..], |latency| &latency.steady);
        for (program, per_second, p50, p99) in [
            (WALPOST, 500, Some(2.5), 8.0),
            (WALPOST, 2_000, None, 8.0),
            (EXACTLY_ONCE, 500, Some(6.0), 12.0),
        ] {
            let rounds = steady(all, program, per_second);
            let what = format!(
                "latency at {} transactions/s ({program})",
                whole(f64::from(per_second))
            );
            if let Some(target) = p50 {
                let p50 = median(rounds.iter().map(|round| round.from_insert.p50));
                self.at_most(&format!("{what}: p50, ms"), target, p50, two_places);
            }
            let measured = median(rounds.iter().map(|round| round.from_insert.p99));
            self.at_most(&format!("{what}: p99, ms"), p99, measured, two_places);
        }
        let idle = latency.map_or(&[][..], |latency| &latency.idle);
        let idle = idle.iter().filter(|idle| idle.program == WALPOST);
        let idle = median(idle.map(|idle| idle.cpu_seconds * 10.0 / idle.seconds));
        self.at_most("idle CPU s in 10 s", 0.03, idle, two_places);
    }

    /// Adds a target for memory. The table also shows the worst round, because the median does not
    /// include the highest peaks.
    fn at_most_mebibytes(&mut self, what: &str, target: f64, bytes: Option<Spread>) {
        let worst = bytes.map_or(0.0, |bytes| bytes.most / MEBIBYTE);
        let measured = bytes.map(|bytes| bytes.median / MEBIBYTE);
        let what = format!("peak RSS {what}, MiB");
        self.at_most(&what, target, measured, |median| {
            format!("{} (worst {})", one_place(median), one_place(worst))
        });
    }

    fn at_least(
        &mut self,
        what: &str,
        target: f64,
        measured: Option<f64>,
        write: impl Fn(f64) -> String,
    ) {
        let met = measured.map(|measured| measured >= target);
        self.add(
            what,
            format!("at least {}", format_target(target)),
            measured.map(write),
            met,
        );
    }

    fn at_most(
        &mut self,
        what: &str,
        target: f64,
        measured: Option<f64>,
        write: impl Fn(f64) -> String,
    ) {
        let met = measured.map(|measured| measured <= target);
        self.add(
            what,
            format!("at most {}", format_target(target)),
            measured.map(write),
            met,
        );
    }

    fn add(&mut self, what: &str, target: String, measured: Option<String>, met: Option<bool>) {
        let met = match met {
            None => NOTHING,
            Some(true) => "yes",
            Some(false) => "**no**",
        };
        let measured = measured.unwrap_or("not measured".to_owned());
        self.0
            .row([what.to_owned(), target, measured, met.to_owned()]);
    }
}

fn format_target(target: f64) -> String {
    match target < 1_000.0 {
        true => target.to_string(),
        false => whole(target),
    }
}

/// Formats the number of rows in the backlog, which is the same for all groups.
fn rows(groups: &[Drains<'_>]) -> String {
    groups.first().map_or("more".to_owned(), |group| {
        whole(group.rounds[0].backlog.rows as f64)
    })
}

fn median_value(spread: Option<Spread>) -> Option<f64> {
    spread.map(|spread| spread.median)
}

/// Returns Walpost's value divided by Debezium's. `figure` computes the value of each program.
fn times_debezium(
    groups: &[Drains<'_>],
    link: Link,
    figure: impl Fn(&Drains<'_>) -> Option<f64>,
) -> Option<f64> {
    let walpost = figure(find(groups, WALPOST, link)?)?;
    Some(walpost / figure(find(groups, DEBEZIUM, Link::Tcp)?)?)
}

/// Returns Walpost's results at the given value of the series' parameter.
fn walpost_at<'a, 'b>(groups: &'b [Drains<'a>], point: &str) -> Option<&'b Drains<'a>> {
    groups
        .iter()
        .find(|group| group.is_walpost() && group.point() == point)
}

/// Returns the median, over all rounds, of `group`'s rate divided by `other`'s rate in the same
/// round.
fn rate_ratio(group: &Drains<'_>, other: &Drains<'_>) -> Option<f64> {
    median(group.rounds.iter().filter_map(|drain| {
        let mut rounds = other.rounds.iter();
        let other = rounds.find(|other| other.round == drain.round)?;
        Some(drain.measured.rows_per_second? / other.measured.rows_per_second?)
    }))
}

fn peaks<'a>(drains: impl IntoIterator<Item = &'a Drain>) -> Option<Spread> {
    let peaks = drains
        .into_iter()
        .map(|drain| drain.measured.peak_rss_bytes as f64);
    Spread::from_values(peaks)
}
