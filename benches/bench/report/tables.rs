//! Builds the tables that are printed to the terminal and included in docs/benchmarks.md.

use super::numbers::{NOTHING, median_only, one_place, rough, spread, two_places, whole};
use super::summary::{Drains, distinct, find, groups, steady, ways};
use super::table::Table;
use crate::growth;
use crate::latency::RATES;
use crate::profile::Profile;
use crate::program::LIMIT;
use crate::results::{Cost, Drain, Fleet, Latency, Measured, Percentiles, Shards, Steady, Tables};
use crate::stats::Spread;
use crate::usage::MEBIBYTE;

/// Compares programs that deliver the same backlog.
pub(crate) fn comparison(drains: &[Drain], series: &str) -> Table {
    let mut table = Table::new([
        "program",
        "over",
        "rows/s",
        "of the limit",
        "first record, s",
        "CPU s per million: program",
        "walsender",
        "broker",
        "peak RSS, MiB",
        "topic, MB",
    ]);
    for group in groups(drains, series) {
        let cpu = |figure: fn(&Drain) -> f64| median_only(group.per_million(figure), two_places);
        let only_kafka = |text: String| match group.is_limit() {
            true => NOTHING.to_owned(),
            false => text,
        };
        let topic = group.spread_of(|drain| drain.measured.topic_bytes as f64 / 1e6);
        table.row([
            group.program().to_owned(),
            group.link().to_string(),
            spread(group.rate(), rough),
            only_kafka(spread(group.ratio_to_limit(), two_places)),
            spread(
                group.spread_of(|drain| drain.measured.first_seconds),
                two_places,
            ),
            cpu(|drain| drain.measured.cpu.program),
            cpu(|drain| drain.measured.cpu.walsender),
            only_kafka(cpu(|drain| drain.measured.cpu.broker)),
            peak(&group),
            only_kafka(median_only(topic, one_place)),
        ]);
    }
    table
}

/// Shows a series in which one parameter varies. `what` is the heading of that parameter's column.
pub(crate) fn growth(drains: &[Drain], series: &str, what: &'static str) -> Table {
    let mut table = Table::new([
        what,
        "rows",
        "limit, rows/s",
        "Walpost, rows/s",
        "of the limit",
        "payload, MB/s",
        "start to last record, s",
        "CPU s per million: Walpost",
        "broker",
        "peak RSS, MiB",
        "WAL, MB",
        "topic, MB",
    ]);
    let groups = groups(drains, series);
    for group in groups.iter().filter(|group| group.is_walpost()) {
        let limit = limit_of(group, &groups);
        let backlog = &group.rounds[0].backlog;
        let throughput = group
            .rate()
            .map(|rate| rate.median * backlog.payload_bytes / 1e6);
        table.row([
            group.point().to_owned(),
            whole(backlog.rows as f64),
            spread(limit.and_then(Drains::rate), rough),
            spread(group.rate(), rough),
            spread(group.ratio_to_limit(), two_places),
            throughput.map_or(NOTHING.to_owned(), rough),
            spread(
                group.spread_of(|drain| drain.measured.last_seconds),
                two_places,
            ),
            median_only(
                group.per_million(|drain| drain.measured.cpu.program),
                two_places,
            ),
            median_only(
                group.per_million(|drain| drain.measured.cpu.broker),
                two_places,
            ),
            peak(group),
            rough(backlog.wal_bytes as f64 / 1e6),
            median_only(
                group.spread_of(|drain| drain.measured.topic_bytes as f64 / 1e6),
                one_place,
            ),
        ]);
    }
    table
}

/// Compares an outbox table with logical decoding messages that contain the same events.
pub(crate) fn outbox(drains: &[Drain]) -> Table {
    let mut table = Table::new([
        "outbox",
        "written in, s",
        "WAL, MB",
        "limit, rows/s",
        "Walpost, rows/s",
        "of the limit",
        "start to last record, s",
        "CPU s per million: Walpost",
        "walsender",
        "broker",
        "peak RSS, MiB",
    ]);
    let groups = groups(drains, growth::OUTBOX);
    for group in groups.iter().filter(|group| group.is_walpost()) {
        let cpu = |figure: fn(&Drain) -> f64| median_only(group.per_million(figure), two_places);
        table.row([
            group.point().to_owned(),
            spread(
                group.spread_of(|drain| drain.backlog.write_seconds),
                two_places,
            ),
            median_only(
                group.spread_of(|drain| drain.backlog.wal_bytes as f64 / 1e6),
                rough,
            ),
            spread(limit_of(group, &groups).and_then(Drains::rate), rough),
            spread(group.rate(), rough),
            spread(group.ratio_to_limit(), two_places),
            spread(
                group.spread_of(|drain| drain.measured.last_seconds),
                two_places,
            ),
            cpu(|drain| drain.measured.cpu.program),
            cpu(|drain| drain.measured.cpu.walsender),
            cpu(|drain| drain.measured.cpu.broker),
            peak(group),
        ]);
    }
    table
}

/// Shows how long the processes of each drain were running and how long they waited for a
/// processor.
pub(crate) fn bounds(drains: &[Drain]) -> Table {
    let mut table = Table::new([
        "drain",
        "program",
        "s per million rows",
        "walsender: runs",
        "waits for a processor",
        "waits for its reader or the disk",
        "program: runs",
        "waits for a processor",
        "broker: runs",
        "processors used",
    ]);
    for series in distinct(drains.iter().map(|drain| &drain.series)) {
        for group in groups(drains, series) {
            let Some(rate) = group.rate() else { continue };
            let seconds = 1e6 / rate.median;
            let median_of = |figure: fn(&Measured) -> f64| {
                let figures = group.per_million(|drain| figure(&drain.measured));
                figures.expect("a round").median
            };
            let walsender = median_of(|measured| measured.cpu.walsender);
            let walsender_waits = median_of(|measured| measured.waiting.walsender);
            let program = median_of(|measured| measured.cpu.program);
            let broker = median_of(|measured| measured.cpu.broker);
            table.row([
                match group.point() {
                    "" => series.clone(),
                    point => format!("{series}: {point}"),
                },
                group.program().to_owned(),
                two_places(seconds),
                two_places(walsender),
                two_places(walsender_waits),
                two_places((seconds - walsender - walsender_waits).max(0.0)),
                two_places(program),
                two_places(median_of(|measured| measured.waiting.program)),
                two_places(broker),
                two_places((walsender + program + broker) / seconds),
            ]);
        }
    }
    table
}

/// Returns pg_recvlogical's results at the same value of the series' parameter. If pg_recvlogical
/// was measured only once for the whole series, returns the results of that measurement.
fn limit_of<'a, 'b>(group: &Drains<'a>, groups: &'b [Drains<'a>]) -> Option<&'b Drains<'a>> {
    groups
        .iter()
        .find(|limit| limit.is_limit() && limit.point() == group.point())
        .or_else(|| find(groups, LIMIT, group.link()))
}

fn peak(group: &Drains<'_>) -> String {
    let peak = group.spread_of(|drain| drain.measured.peak_rss_bytes as f64 / MEBIBYTE);
    spread(peak, one_place)
}

/// Shows the latency, measured from the INSERT and from the scheduled time.
pub(crate) fn latency(latency: &Latency) -> Table {
    let mut table = Table::new([
        "program",
        "transactions/s",
        "p50, ms",
        "p99, ms",
        "p99.9, ms",
        "max, ms",
        "as scheduled: p99, ms",
        "p99.9, ms",
        "max, ms",
        "CPU s in 10 s",
        "RSS, MiB",
    ]);
    for per_second in RATES {
        for program in distinct(latency.steady.iter().map(|round| &round.program)) {
            let rounds = steady(&latency.steady, program, per_second);
            let spread_of = |figure: fn(&Steady) -> f64| {
                Spread::from_values(rounds.iter().map(|round| figure(round)))
            };
            let time = |figure| spread(spread_of(figure), two_places);
            table.row([
                program.clone(),
                whole(f64::from(per_second)),
                time(|round| round.from_insert.p50),
                time(|round| round.from_insert.p99),
                time(|round| round.from_insert.p99_9),
                time(|round| round.from_insert.max),
                time(|round| round.from_schedule.p99),
                time(|round| round.from_schedule.p99_9),
                time(|round| round.from_schedule.max),
                median_only(
                    spread_of(|round| round.cpu_seconds * 10.0 / round.seconds),
                    two_places,
                ),
                median_only(
                    spread_of(|round| round.rss_bytes as f64 / MEBIBYTE),
                    one_place,
                ),
            ]);
        }
    }
    table
}

/// Shows how much latency the broker and the commits alone contribute.
pub(crate) fn floors(latency: &Latency) -> Table {
    let mut table = Table::new([
        "without a connector",
        "p50, ms",
        "p99, ms",
        "p99.9, ms",
        "max, ms",
    ]);
    let mut row = |name: String, rounds: Vec<Percentiles>| {
        let cell = |figure: fn(&Percentiles) -> f64| {
            spread(Spread::from_values(rounds.iter().map(figure)), two_places)
        };
        table.row([
            name,
            cell(|round| round.p50),
            cell(|round| round.p99),
            cell(|round| round.p99_9),
            cell(|round| round.max),
        ]);
    };
    row("producer to consumer".to_owned(), latency.floor.clone());
    for per_second in RATES {
        let rounds = latency.steady.iter();
        let commits = rounds
            .filter(|round| round.per_second == per_second)
            .map(|round| round.commit);
        row(
            format!("INSERT and COMMIT, {}/s", whole(f64::from(per_second))),
            commits.collect(),
        );
    }
    table
}

/// Shows how much CPU time each program uses while it is idle.
pub(crate) fn idle(latency: &Latency) -> Table {
    let mut table = Table::new(["program", "idle CPU s in 10 s"]);
    for program in distinct(latency.idle.iter().map(|idle| &idle.program)) {
        let rounds = latency.idle.iter().filter(|idle| idle.program == *program);
        let used = Spread::from_values(rounds.map(|idle| idle.cpu_seconds * 10.0 / idle.seconds));
        table.row([program.clone(), spread(used, two_places)]);
    }
    table
}

/// Compares the cost of one slot with that of many slots, and shows the cost of idle pipelines.
pub(crate) fn fleets(tables: &Tables) -> Table {
    let mut table = Table::new([
        "slots, each with a pipeline",
        "tables",
        "rows in other tables",
        "CPU s: walsenders",
        "Walpost",
        "caught up after, s",
        "threads",
        "RSS, MiB",
    ]);
    let all = || tables.fleets.iter().chain([&tables.idle]);
    let key = |fleet: &Fleet| (fleet.slots, fleet.tables, fleet.rows);
    for (slots, outboxes, rows) in distinct(all().map(key)) {
        let rounds: Vec<_> = all()
            .filter(|fleet| key(fleet) == (slots, outboxes, rows))
            .collect();
        let figure = |figure: fn(&Fleet) -> f64| {
            Spread::from_values(rounds.iter().map(|fleet| figure(fleet)))
        };
        let only_rows = |text: String| if rows == 0 { NOTHING.to_owned() } else { text };
        let program = spread(figure(|fleet| fleet.program_cpu), two_places);
        table.row([
            whole(slots as f64),
            whole(outboxes as f64),
            whole(rows as f64),
            only_rows(spread(figure(|fleet| fleet.walsenders_cpu), two_places)),
            match rows {
                0 => format!("{program} in {:.0} s", rounds[0].seconds),
                _ => program,
            },
            only_rows(spread(figure(|fleet| fleet.seconds), two_places)),
            median_only(figure(|fleet| fleet.threads as f64), whole),
            spread(figure(|fleet| fleet.rss_bytes as f64 / MEBIBYTE), one_place),
        ]);
    }
    table
}

/// Compares many pipelines that drain their backlogs concurrently with a single pipeline.
pub(crate) fn shards(rounds: &[Shards]) -> Table {
    let mut table = Table::new([
        "pipelines",
        "total rows",
        "rows/s",
        "relative to one pipeline",
        "CPU s per million: Walpost",
        "broker",
        "slowest and fastest at half, relative to average",
        "threads",
        "peak RSS, MiB",
    ]);
    let pipelines = distinct(rounds.iter().map(|shards| shards.pipelines));
    for count in &pipelines {
        let rounds_with_count = || rounds.iter().filter(|shards| shards.pipelines == *count);
        let figure =
            |figure: fn(&Shards) -> f64| Spread::from_values(rounds_with_count().map(figure));
        let ratio_to_one = rounds_with_count().filter_map(|shards| {
            let one = rounds
                .iter()
                .find(|one| one.round == shards.round && one.pipelines == pipelines[0])?;
            Some(shards.rows_per_second / one.rows_per_second)
        });
        table.row([
            whole(*count as f64),
            median_only(figure(|shards| shards.rows as f64), whole),
            spread(figure(|shards| shards.rows_per_second), rough),
            match *count == pipelines[0] {
                true => NOTHING.to_owned(),
                false => spread(Spread::from_values(ratio_to_one), two_places),
            },
            median_only(
                figure(|shards| shards.program_cpu * 1e6 / shards.rows as f64),
                two_places,
            ),
            median_only(
                figure(|shards| shards.broker_cpu * 1e6 / shards.rows as f64),
                two_places,
            ),
            format!(
                "{} and {}",
                median_only(figure(|shards| shards.least_at_half), two_places),
                median_only(figure(|shards| shards.most_at_half), two_places)
            ),
            median_only(figure(|shards| shards.threads as f64), whole),
            spread(
                figure(|shards| shards.peak_rss_bytes as f64 / MEBIBYTE),
                one_place,
            ),
        ]);
    }
    table
}

/// Shows each thread's share of the samples taken during a drain.
pub(crate) fn profile(profile: &Profile) -> Table {
    let mut table = Table::new(["thread", "share of samples"]);
    for thread in &profile.process.callees {
        let part = thread.samples as f64 / profile.process.samples as f64;
        table.row([thread.name.clone(), two_places(part)]);
    }
    table
}

/// Shows how much load each delivery method puts on the database.
pub(crate) fn database(costs: &[Cost]) -> Table {
    let mut table = Table::new([
        "delivery",
        "CPU s per million: all",
        "writers",
        "reader",
        "rest",
        "VACUUM after",
        "WAL, MB",
        "table after, MB",
        "dead rows",
        "written in, s",
        "in Kafka after, s",
    ]);
    for rounds in ways(costs) {
        let spread_of = |figure: fn(&Cost) -> f64| {
            Spread::from_values(
                rounds
                    .iter()
                    .map(|cost| figure(cost) * 1e6 / cost.events as f64),
            )
        };
        let delivered = rounds.iter().filter_map(|cost| {
            let seconds = cost.carry_seconds?;
            Some(seconds * 1e6 / cost.events as f64)
        });
        table.row([
            rounds[0].way.clone(),
            spread(spread_of(server_cpu), one_place),
            median_only(spread_of(|cost| cost.writers_cpu), one_place),
            median_only(spread_of(|cost| cost.reader_cpu), one_place),
            median_only(spread_of(|cost| cost.rest_cpu), one_place),
            median_only(spread_of(|cost| cost.vacuum_cpu), one_place),
            median_only(spread_of(|cost| cost.wal_bytes as f64 / 1e6), rough),
            median_only(spread_of(|cost| cost.table_bytes as f64 / 1e6), rough),
            median_only(spread_of(|cost| cost.dead_tuples as f64), rough),
            median_only(spread_of(|cost| cost.write_seconds), one_place),
            median_only(Spread::from_values(delivered), one_place),
        ]);
    }
    table
}

fn server_cpu(cost: &Cost) -> f64 {
    cost.writers_cpu + cost.reader_cpu + cost.rest_cpu
}
