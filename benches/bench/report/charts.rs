//! Draws the charts as SVG files. The charts have an opaque background, so that they are readable
//! on both light and dark pages.

mod bars;
mod flame;
mod lines;

use std::path::Path;

use bars::{Bar, Bars, Segment};
use flame::Flame;
use lines::{Line, Lines};
use plotters::coord::Shift;
use plotters::prelude::{DrawingArea, DrawingBackend, Rectangle};
use plotters::style::{Color, FontStyle, IntoFont, RGBColor};

use super::numbers::{one_place, rough, whole};
use super::summary::{Drains, distinct, groups, steady, ways};
use crate::comparison;
use crate::forms;
use crate::growth;
use crate::latency::RATES;
use crate::program::{LIMIT, WALPOST};
use crate::results::{Cost, Drain, Latency, Outage, Percentiles, Results};
use crate::stats::{Spread, median};
use crate::usage::MEBIBYTE;

const BACKGROUND: RGBColor = RGBColor(255, 255, 255);
const INK: RGBColor = RGBColor(31, 41, 55);
const FAINT: RGBColor = RGBColor(209, 213, 219);
const TEAL: RGBColor = RGBColor(13, 148, 136);
const GREY: RGBColor = RGBColor(148, 163, 184);
/// The colours of programs other than Walpost and pg_recvlogical, used in this order.
const OTHER_COLOURS: [RGBColor; 3] = [
    RGBColor(217, 119, 6),
    RGBColor(124, 58, 237),
    RGBColor(190, 18, 60),
];
const WIDTH: u32 = 800;

/// Returns the file name of the chart for a series.
pub(crate) fn series_file(series: &str) -> String {
    format!("growth-{series}.svg")
}

/// Draws the charts of all measured parts of the benchmark, and writes the charts to `folder`.
pub(crate) fn draw(results: &Results, folder: &Path) {
    if let Some(part) = &results.drain {
        drain(&part.data.drains).draw(&folder.join("drain.svg"));
        memory(&part.data.outage).draw(&folder.join("memory.svg"));
    }
    if let Some(part) = &results.latency {
        latency(&part.data).draw(&folder.join("latency.svg"));
    }
    if let Some(part) = &results.growth {
        for (series, title, _) in super::SERIES {
            grown(&part.data, series, title).draw(&folder.join(series_file(series)));
        }
        let file = folder.join(series_file(growth::OUTBOX));
        grown(&part.data, growth::OUTBOX, "Table or WAL messages").draw(&file);
    }
    if let Some(part) = &results.forms {
        let file = folder.join(series_file(forms::SERIES));
        grown(&part.data, forms::SERIES, "Format of the records").draw(&file);
    }
    if let Some(part) = &results.database {
        database(&part.data).draw(&folder.join("database.svg"));
    }
    if let Some(part) = &results.profile {
        let rows = whole(part.data.rows as f64);
        let flame = Flame {
            title: format!("CPU time of Walpost in a drain of {rows} rows, by thread and function"),
            process: &part.data.process,
        };
        flame.draw(&folder.join("profile.svg"));
    }
}

fn drain(drains: &[Drain]) -> Bars {
    let groups = groups(drains, comparison::SERIES);
    let bars = groups.iter().map(|group| {
        let label = format!("{}, {}", group.program(), group.link());
        rate_bar(label, group, &groups, 1.0)
    });
    let rows = drains.first().map_or(0, |drain| drain.backlog.rows);
    Bars {
        title: format!("Drain of {} rows into Kafka", whole(rows as f64)),
        unit: "rows/s, median; the line spans all rounds",
        bars: bars.collect(),
        legend: Vec::new(),
    }
}

fn grown(drains: &[Drain], series: &str, title: &str) -> Bars {
    let groups = groups(drains, series);
    // When the payload size varies, rows per second are not comparable, so the chart shows bytes
    // per second.
    let in_bytes = series == growth::PAYLOAD;
    let bars = groups.iter().map(|group| {
        let megabytes = group.rounds[0].backlog.payload_bytes / 1e6;
        let label = match (group.point(), group.is_limit()) {
            (point, false) => point.to_owned(),
            ("", true) => "limit".to_owned(),
            (point, true) => format!("{point}, limit"),
        };
        rate_bar(
            label,
            group,
            &groups,
            if in_bytes { megabytes } else { 1.0 },
        )
    });
    Bars {
        title: title.to_owned(),
        unit: match in_bytes {
            true => "payload, MB/s over the unix-domain socket, median; the line spans all rounds",
            false => "rows/s over the unix-domain socket, median; the line spans all rounds",
        },
        bars: bars.collect(),
        legend: vec![("Walpost", TEAL), (LIMIT, GREY)],
    }
}

/// Returns a bar that shows the throughput of the drains in `group`. `all` determines the colour
/// assigned to each program. `weight` is the factor that converts rows per second to the chart's
/// unit.
fn rate_bar(label: String, group: &Drains<'_>, all: &[Drains<'_>], weight: f64) -> Bar {
    let rates = group
        .rounds
        .iter()
        .map(|drain| drain.measured.rows_per_second);
    let rate = Spread::from_values(rates.flatten().map(|rate| rate * weight));
    let length = rate.map_or(0.0, |rate| rate.median);
    let programs = distinct(all.iter().map(Drains::program));
    Bar {
        label,
        segments: vec![Segment {
            length,
            colour: colour(group.program(), &programs),
        }],
        spread: rate.map(|rate| (rate.least, rate.most)),
        text: rate.map_or("too fast to measure".to_owned(), |rate| rough(rate.median)),
    }
}

fn colour(program: &str, all: &[&str]) -> RGBColor {
    let mut others = all
        .iter()
        .filter(|other| **other != WALPOST && **other != LIMIT);
    match program {
        WALPOST => TEAL,
        LIMIT => GREY,
        _ => {
            let index = others.position(|other| *other == program).unwrap_or(0);
            OTHER_COLOURS[index % OTHER_COLOURS.len()]
        }
    }
}

fn latency(latency: &Latency) -> Lines {
    let programs: Vec<&str> = distinct(latency.steady.iter().map(|round| &*round.program));
    let mut lines = Vec::new();
    for program in &programs {
        for (per_second, dashed) in [(RATES[0], false), (RATES[1], true)] {
            let rounds = steady(&latency.steady, program, per_second);
            let median_of = |figure: fn(&Percentiles) -> f64| {
                median(rounds.iter().map(|round| figure(&round.from_schedule))).unwrap_or(0.0)
            };
            let values = [
                median_of(|times| times.p50),
                median_of(|times| times.p90),
                median_of(|times| times.p99),
                median_of(|times| times.p99_9),
                median_of(|times| times.max),
            ];
            lines.push(Line {
                label: format!("{program}, {per_second}/s"),
                colour: colour(program, &programs),
                dashed,
                points: (0..).map(f64::from).zip(values).collect(),
            });
        }
    }
    Lines {
        title: "Latency from the scheduled time of a transaction to the consumer".to_owned(),
        x_unit: "percentile of the events",
        y_unit: "ms, median of the rounds",
        x_labels: Some(["50", "90", "99", "99.9", "100"]),
        logarithmic: true,
        lines,
        shaded: None,
        shade_label: "",
    }
}

fn memory(outage: &Outage) -> Lines {
    let points = outage.rss.iter();
    Lines {
        title: "Memory during a broker outage in the middle of a drain".to_owned(),
        x_unit: "s since startup",
        y_unit: "resident, MiB",
        x_labels: None,
        logarithmic: false,
        lines: vec![Line {
            label: "Walpost".to_owned(),
            colour: TEAL,
            dashed: false,
            points: points
                .map(|&(at, bytes)| (at, bytes as f64 / MEBIBYTE))
                .collect(),
        }],
        shaded: Some((outage.frozen_at_seconds, outage.thawed_at_seconds)),
        shade_label: "broker frozen",
    }
}

fn database(costs: &[Cost]) -> Bars {
    let [reader, rest, _] = OTHER_COLOURS;
    let bars = ways(costs).into_iter().map(|rounds| {
        let spread_of = |figure: fn(&Cost) -> f64| {
            let figures = rounds
                .iter()
                .map(|cost| figure(cost) * 1e6 / cost.events as f64);
            Spread::from_values(figures).expect("a round")
        };
        let all = spread_of(|cost| cost.writers_cpu + cost.reader_cpu + cost.rest_cpu);
        let segment = |figure: fn(&Cost) -> f64, colour| Segment {
            length: spread_of(figure).median,
            colour,
        };
        Bar {
            label: rounds[0].way.clone(),
            segments: vec![
                segment(|cost| cost.writers_cpu, GREY),
                segment(|cost| cost.reader_cpu, reader),
                segment(|cost| cost.rest_cpu, rest),
            ],
            spread: Some((all.least, all.most)),
            text: one_place(all.median),
        }
    });
    Bars {
        title: "Cost of delivering a million events for the database".to_owned(),
        unit: "CPU s, median; the line spans all rounds",
        bars: bars.collect(),
        legend: vec![
            ("writing sessions", GREY),
            ("walsender or polling session", reader),
            ("rest of the server", rest),
        ],
    }
}

fn title<DB: DrawingBackend>(root: &DrawingArea<DB, Shift>, text: &str) {
    let font = ("sans-serif", 19)
        .into_font()
        .style(FontStyle::Bold)
        .color(&INK);
    root.draw_text(text, &font, (16, 14)).unwrap();
}

/// Draws the legend's entries from left to right below the title.
fn legend<'a, DB: DrawingBackend>(
    root: &DrawingArea<DB, Shift>,
    entries: impl Iterator<Item = (&'a str, RGBColor, bool)>,
) {
    /// The approximate width of a letter in pixels. The exact width depends on the viewer's font.
    const LETTER: usize = 7;
    let font = ("sans-serif", 13).into_font().color(&INK);
    let mut x = 16;
    for (label, colour, dashed) in entries {
        let strokes = if dashed {
            vec![(0, 8), (12, 20)]
        } else {
            vec![(0, 20)]
        };
        for (from, to) in strokes {
            let stroke = Rectangle::new([(x + from, 52), (x + to, 56)], colour.filled());
            root.draw(&stroke).unwrap();
        }
        root.draw_text(label, &font, (x + 26, 47)).unwrap();
        x += 26 + i32::try_from(label.chars().count() * LETTER).unwrap() + 18;
    }
}
