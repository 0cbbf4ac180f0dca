//! Formats a [`Status`] in Prometheus' text format. Each metric is one row of [`METRICS`].

use std::cmp::Reverse;
use std::collections::BTreeSet;

use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily};
use prometheus::{TEXT_FORMAT, TextEncoder};

use super::problem::Kind;
use super::status::{PipelineStatus, Status};
use crate::delivery::histogram::{BOUNDS_MICROS, Counts};
use crate::escape::in_label;
use crate::model::lifecycle::{SnapshotPhase, State};
use crate::model::time::seconds;

pub use prometheus::proto::MetricType;

/// The media type of the text.
pub(crate) const CONTENT_TYPE: &str = TEXT_FORMAT;

/// The values of a slot's `wal_status`: PostgreSQL 18, "53.20. `pg_replication_slots`".
const WAL_STATUS: [&str; 4] = ["reserved", "extended", "unreserved", "lost"];

/// Maximum number of tables with metrics of their own. There may be thousands of tables, each of
/// which would create a time series.
const TABLES_MAX: usize = 10;

/// The definition of a metric. All metrics except those of the process have the label `pipeline`.
pub struct Definition {
    pub name: &'static str,
    /// The help text.
    pub help: &'static str,
    /// How to compute the value.
    pub source: Source,
}

/// The type of a metric, and a function that computes its value.
pub enum Source {
    /// A gauge of the process, with the name of its label, if it has one. The function returns the
    /// label's value and the metric's value.
    Process(Option<&'static str>, fn(&Status) -> (String, f64)),
    /// A counter of the process.
    ProcessCounter(fn(&Status) -> f64),
    /// A counter.
    Counter(fn(&PipelineStatus) -> Option<f64>),
    /// A counter for each value of a label.
    Counters(&'static str, fn(&PipelineStatus) -> Vec<(String, f64)>),
    /// A gauge, which is omitted while its value is unknown.
    Gauge(fn(&PipelineStatus) -> Option<f64>),
    /// A gauge for each value of a label.
    Gauges(&'static str, fn(&PipelineStatus) -> Vec<(String, f64)>),
    /// A histogram of durations.
    Histogram(fn(&PipelineStatus) -> &Counts),
}

impl Source {
    /// Returns the type in Prometheus' terms.
    #[must_use]
    pub fn kind(&self) -> MetricType {
        match self {
            Self::Process(..) | Self::Gauge(_) | Self::Gauges(..) => MetricType::GAUGE,
            Self::ProcessCounter(_) | Self::Counter(_) | Self::Counters(..) => MetricType::COUNTER,
            Self::Histogram(_) => MetricType::HISTOGRAM,
        }
    }

    /// Returns the names of the metric's labels.
    #[must_use]
    pub fn labels(&self) -> Vec<&'static str> {
        match self {
            Self::Process(label, _) => label.iter().copied().collect(),
            Self::ProcessCounter(_) => Vec::new(),
            Self::Counters(label, _) | Self::Gauges(label, _) => vec!["pipeline", label],
            Self::Counter(_) | Self::Gauge(_) | Self::Histogram(_) => vec!["pipeline"],
        }
    }
}

const fn metric(name: &'static str, help: &'static str, source: Source) -> Definition {
    Definition { name, help, source }
}

/// All metrics.
pub const METRICS: &[Definition] = &[
    metric(
        "walpost_build_info",
        "Version of Walpost; always 1.",
        Source::Process(Some("version"), |status| (status.version.clone(), 1.0)),
    ),
    metric(
        "walpost_start_time_seconds",
        "When the process was started, in seconds since 1970.",
        Source::Process(None, |status| (String::new(), status.started_at)),
    ),
    metric(
        "walpost_config_reload_failed",
        "1 if the configuration has changed and can't be used, so that the pipelines go on as they are; else 0.",
        Source::Process(None, |status| {
            let failed = status
                .reload
                .as_ref()
                .is_some_and(|last| last.error.is_some());
            (String::new(), f64::from(u8::from(failed)))
        }),
    ),
    metric(
        "walpost_log_lines_dropped_total",
        "Log lines that were dropped because standard error was not read in time, or could not be written to.",
        Source::ProcessCounter(|status| exact(status.log_lines_dropped)),
    ),
    metric(
        "walpost_pipeline_state",
        "1 for the state that the pipeline is in, 0 for the others.",
        Source::Gauges("state", |of| {
            one_hot(
                State::ALL.iter().map(|state| state.name()),
                Some(of.state.name()),
            )
        }),
    ),
    metric(
        "walpost_pipeline_ready",
        "1 if the pipeline streams and makes progress, or stands by; 0 if not.",
        Source::Gauge(|of| truth(of.ready)),
    ),
    metric(
        "walpost_watchdog_problem",
        "1 for each kind of problem that the watchdog sees, 0 for the others.",
        Source::Gauges("kind", |of| {
            let is = |kind| of.problems.iter().any(|seen| seen.problem.kind == kind);
            let all = Kind::ALL.into_iter();
            all.map(|kind| (kind.name().to_owned(), f64::from(u8::from(is(kind)))))
                .collect()
        }),
    ),
    metric(
        "walpost_events_sent_total",
        "Events that were handed to the producer.",
        Source::Counter(|of| count(of.events.sent)),
    ),
    metric(
        "walpost_events_delivered_total",
        "Events that Kafka has acknowledged.",
        Source::Counter(|of| count(of.events.delivered)),
    ),
    metric(
        "walpost_transactions_total",
        "Transactions with events that were read to their end.",
        Source::Counter(|of| count(of.events.transactions)),
    ),
    metric(
        "walpost_received_bytes_total",
        "Bytes that came from PostgreSQL over the replication connection.",
        Source::Counter(|of| count(of.events.received_bytes)),
    ),
    metric(
        "walpost_in_flight_events",
        "Events that the producer has and Kafka has not acknowledged.",
        Source::Gauge(|of| count(of.events.in_flight)),
    ),
    metric(
        "walpost_in_flight_bytes",
        "Memory that they use, as window_bytes counts it.",
        Source::Gauge(|of| count(of.events.in_flight_bytes)),
    ),
    metric(
        "walpost_window_events",
        "How many events may be in flight by now: window_records, or less (exactly-once, slow Kafka).",
        Source::Gauge(|of| count(of.events.window_events)),
    ),
    metric(
        "walpost_window_bytes",
        "How many bytes may be in flight by now: window_bytes, or less (exactly-once, slow Kafka).",
        Source::Gauge(|of| count(of.events.window_bytes)),
    ),
    metric(
        "walpost_commit_to_delivery_seconds",
        "From a transaction's commit in PostgreSQL until all its events are durable in Kafka (with exactly-once: \
         readable).",
        Source::Histogram(|of| &of.commit_to_delivery),
    ),
    metric(
        "walpost_delivery_seconds",
        "From reading the end of a transaction until all its events are durable in Kafka (with exactly-once: readable).",
        Source::Histogram(|of| &of.delivery),
    ),
    metric(
        "walpost_kafka_commit_seconds",
        "With exactly-once: how long a Kafka transaction took to commit.",
        Source::Histogram(|of| &of.kafka_commit),
    ),
    metric(
        "walpost_received_lsn",
        "The highest LSN that was received, as a number of bytes.",
        Source::Gauge(|of| of.positions.received.map(|lsn| exact(lsn.0))),
    ),
    metric(
        "walpost_confirmed_lsn",
        "The LSN up to which everything is durable in Kafka, as a number of bytes.",
        Source::Gauge(|of| of.positions.confirmed.map(|lsn| exact(lsn.0))),
    ),
    metric(
        "walpost_server_lsn",
        "The end of the server's WAL, as a number of bytes.",
        Source::Gauge(|of| of.positions.server.map(|lsn| exact(lsn.0))),
    ),
    metric(
        "walpost_lag_bytes",
        "WAL between what is confirmed and its end.",
        Source::Gauge(|of| of.lag.bytes.map(exact)),
    ),
    metric(
        "walpost_lag_seconds",
        "Age of the oldest event that was read and is not durable, including one that waits for its topic; while there is no stream, at least how long there \
         is none.",
        Source::Gauge(|of| of.lag.seconds),
    ),
    metric(
        "walpost_last_event_timestamp_seconds",
        "When the last transaction with events was committed that was read, in seconds since 1970.",
        Source::Gauge(|of| of.positions.last_event_at),
    ),
    metric(
        "walpost_slot_active",
        "1 if a walsender has the slot.",
        Source::Gauge(|of| truth(of.slot_health.as_ref()?.active)),
    ),
    metric(
        "walpost_slot_retained_bytes",
        "WAL that the server retains for the slot: from restart_lsn to its end.",
        Source::Gauge(|of| of.lag.retained_bytes.map(exact)),
    ),
    metric(
        "walpost_wal_budget_warn_bytes",
        "How much WAL the slot may retain before there is a warning: wal_budget.warn; left out where it is not set.",
        Source::Gauge(|of| of.about.wal_budget_warn_bytes.map(exact)),
    ),
    metric(
        "walpost_wal_budget_max_bytes",
        "How much WAL the slot may retain at most: wal_budget.max; left out where it is not set.",
        Source::Gauge(|of| of.about.wal_budget_max_bytes.map(exact)),
    ),
    metric(
        "walpost_dropped_slots_unreplayed",
        "Dropped slots whose events were not sent again from the table yet; left out where that is not known.",
        Source::Gauge(|of| Some(exact(of.dropped_slots.as_ref()?.len() as u64))),
    ),
    metric(
        "walpost_tables_set_aside",
        "Tables that are set aside: their events from some position on are not delivered; left out where that is not known.",
        Source::Gauge(|of| {
            let entries = of.set_aside.as_ref()?.iter();
            let tables: BTreeSet<_> = entries.map(|entry| &entry.table).collect();
            Some(exact(tables.len() as u64))
        }),
    ),
    metric(
        "walpost_left_out_rows_total",
        "Rows of tables that are set aside that were not delivered.",
        Source::Counter(|of| count(of.left_out_rows)),
    ),
    metric(
        "walpost_slot_safe_wal_bytes",
        "How much more WAL may be written before the slot is in danger of being lost (safe_wal_size); left out where \
         max_slot_wal_keep_size is -1.",
        Source::Gauge(|of| of.slot_health.as_ref()?.safe_wal_bytes.map(signed)),
    ),
    metric(
        "walpost_slot_wal_status",
        "1 for the slot's wal_status, 0 for the others.",
        Source::Gauges("status", |of| match &of.slot_health {
            Some(slot) => one_hot(WAL_STATUS.into_iter(), slot.wal_status.as_deref()),
            None => Vec::new(),
        }),
    ),
    metric(
        "walpost_slot_catalog_xmin_age_transactions",
        "Transactions since the oldest one whose dead rows of the system catalog the slot retains.",
        Source::Gauge(|of| of.slot_health.as_ref()?.catalog_xmin_age.map(signed)),
    ),
    metric(
        "walpost_database_asked_timestamp_seconds",
        "When the database was last queried for its slot, the end of its WAL and the partitions, in seconds since 1970.",
        Source::Gauge(|of| Some(of.slot_health.as_ref()?.asked_at)),
    ),
    metric(
        "walpost_outbox_partitions",
        "Partitions of the outbox table that hold rows themselves; left out where it is not partitioned.",
        Source::Gauge(|of| of.partitions.map(exact)),
    ),
    metric(
        "walpost_partitions_end_timestamp_seconds",
        "When the last partition of the outbox table ends, in seconds since 1970; left out where they are not ranges of a \
         time that all end.",
        Source::Gauge(|of| Some(of.partitions_end?.at)),
    ),
    metric(
        "walpost_partitions_ahead",
        "Partitions of the outbox table that begin later than now.",
        Source::Gauge(|of| Some(exact(of.partitions_end?.ahead))),
    ),
    metric(
        "walpost_checkpoint_timestamp_seconds",
        "With exactly-once: when the last checkpoint was committed, in seconds since 1970.",
        Source::Gauge(|of| of.checkpoint_at),
    ),
    metric(
        "walpost_snapshot_phase",
        "1 for the phase that the snapshot of older rows is in, 0 for the others; left out where none was made since the \
         start.",
        Source::Gauges("phase", |of| match &of.snapshot {
            Some(snapshot) => one_hot(
                SnapshotPhase::ALL.iter().map(|phase| phase.name()),
                Some(snapshot.phase.name()),
            ),
            None => Vec::new(),
        }),
    ),
    metric(
        "walpost_snapshot_rows_total",
        "Rows of snapshots that were read.",
        Source::Counter(|of| count(of.snapshot_rows)),
    ),
    metric(
        "walpost_snapshot_rows_expected",
        "Rows that the snapshot is expected to have, by the planner's estimate.",
        Source::Gauge(|of| of.snapshot?.expected.map(exact)),
    ),
    metric(
        "walpost_errors_total",
        "Errors, by what they are about.",
        Source::Counters("kind", |of| {
            let errors = of.errors.iter();
            errors.map(|(kind, n)| (kind.clone(), exact(*n))).collect()
        }),
    ),
    metric(
        "walpost_dead_letters_total",
        "Dead letters, by the reason why the events could not be delivered.",
        Source::Counters("kind", |of| {
            let letters = of.dead_letters;
            vec![
                ("oversize".to_owned(), exact(letters.oversize)),
                ("unroutable".to_owned(), exact(letters.unroutable)),
                ("malformed".to_owned(), exact(letters.malformed)),
            ]
        }),
    ),
    metric(
        "walpost_table_rows_total",
        "Rows that have come of a table, where the outbox is several: of the ten with most; /status has all.",
        Source::Counters("table", |of| {
            let mut tables: Vec<_> = of.tables.iter().collect();
            tables.sort_by_key(|(_, rows)| Reverse(**rows));
            let most = tables.into_iter().take(TABLES_MAX);
            most.map(|(table, rows)| (table.clone(), exact(*rows)))
                .collect()
        }),
    ),
    metric(
        "walpost_reconnects_total",
        "Attempts to reconnect after an error.",
        Source::Counter(|of| count(of.reconnects)),
    ),
    metric(
        "walpost_kafka_up",
        "0 while no broker can be reached.",
        Source::Gauge(|of| truth(of.kafka.unreachable.is_none())),
    ),
    metric(
        "walpost_kafka_retries_total",
        "Requests that the producer has sent again.",
        Source::Counter(|of| of.kafka.retries.map(exact)),
    ),
    metric(
        "walpost_kafka_sent_bytes_total",
        "Bytes that the producer has sent to brokers.",
        Source::Counter(|of| of.kafka.sent_bytes.map(exact)),
    ),
    metric(
        "walpost_kafka_queued_events",
        "Events in the producer, queued or on the wire.",
        Source::Gauge(|of| of.kafka.queued_events.map(exact)),
    ),
    metric(
        "walpost_kafka_round_trip_p99_seconds",
        "p99 of the round trip to the slowest broker, on the wire and in the broker.",
        Source::Gauge(|of| of.kafka.round_trip_p99_seconds),
    ),
];

/// Converts a number to Prometheus' type.
#[expect(
    clippy::cast_precision_loss,
    reason = "Prometheus has no other numbers; below 2^53 they are exact"
)]
fn exact(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "as above")]
fn signed(number: i64) -> f64 {
    number as f64
}

#[expect(clippy::unnecessary_wraps, reason = "what a source gives")]
fn count(number: u64) -> Option<f64> {
    Some(exact(number))
}

#[expect(clippy::unnecessary_wraps, reason = "what a source gives")]
fn truth(is: bool) -> Option<f64> {
    Some(f64::from(u8::from(is)))
}

/// Returns all names, with the value 1 for `is` and 0 for the others.
fn one_hot<'n>(all: impl Iterator<Item = &'n str>, is: Option<&str>) -> Vec<(String, f64)> {
    all.map(|name| (name.to_owned(), f64::from(u8::from(is == Some(name)))))
        .collect()
}

/// Formats all metrics as text.
///
/// # Errors
/// Returns an error from the library, which does not occur for these metrics.
pub(crate) fn text(status: &Status) -> Result<String, prometheus::Error> {
    let families: Vec<_> = METRICS
        .iter()
        .map(|metric| family(metric, status))
        .filter(|family| !family.get_metric().is_empty())
        .collect();
    TextEncoder::new().encode_to_string(&families)
}

fn family(definition: &Definition, status: &Status) -> MetricFamily {
    let kind = definition.source.kind();
    let mut metrics = Vec::new();
    if let Source::Process(label, read) = definition.source {
        let (of, value) = read(status);
        let labels = label.map(|name| pair(name, &of));
        metrics.push(single(labels.into_iter().collect(), kind, value));
    }
    if let Source::ProcessCounter(read) = definition.source {
        metrics.push(single(Vec::new(), kind, read(status)));
    }
    for pipeline in &status.pipelines {
        let own = || pair("pipeline", &pipeline.about.name);
        match definition.source {
            Source::Process(..) | Source::ProcessCounter(_) => {}
            Source::Counter(read) | Source::Gauge(read) => {
                let value = read(pipeline);
                metrics.extend(value.map(|value| single(vec![own()], kind, value)));
            }
            Source::Counters(label, read) | Source::Gauges(label, read) => {
                metrics.extend(
                    read(pipeline)
                        .into_iter()
                        .map(|(of, value)| single(vec![own(), pair(label, &of)], kind, value)),
                );
            }
            Source::Histogram(read) => {
                let mut metric = Metric::from_label(vec![own()]);
                metric.set_histogram(histogram(read(pipeline)));
                metrics.push(metric);
            }
        }
    }
    let mut family = MetricFamily::default();
    family.set_name(definition.name.to_owned());
    family.set_help(definition.help.to_owned());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}

fn pair(name: &str, value: &str) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(in_label(value).into_owned());
    pair
}

fn single(labels: Vec<LabelPair>, kind: MetricType, value: f64) -> Metric {
    let mut metric = Metric::from_label(labels);
    match kind {
        MetricType::COUNTER => {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        }
        _ => {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
    }
    metric
}

fn histogram(counts: &Counts) -> Histogram {
    let bucket = |(bound, upto): (u64, u64)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(seconds(bound));
        bucket.set_cumulative_count(upto);
        bucket
    };
    let mut histogram = Histogram::default();
    histogram.set_sample_count(counts.total());
    histogram.set_sample_sum(seconds(counts.sum_micros));
    let mut buckets = Vec::with_capacity(BOUNDS_MICROS.len());
    buckets.extend(counts.cumulative().map(bucket));
    histogram.set_bucket(buckets);
    histogram
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::delivery::stats::{About, PipelineStats};
    use crate::model::lifecycle::ErrorKind;
    use crate::observe::registry::Registry;

    fn stats() -> PipelineStats {
        let stats = PipelineStats::new(About {
            name: "a\"\\\n<b>".to_owned(),
            ..About::default()
        });
        stats.commit_to_delivery.record(700);
        stats.checkpointed(Duration::from_millis(3));
        stats.count(ErrorKind::Row);
        stats.entered(State::Streaming);
        stats
    }

    #[test]
    fn what_was_written_down_is_in_the_text() {
        let text = text(&Registry::new([Arc::new(stats())]).status()).expect("text");
        for line in [
            r#"walpost_pipeline_state{pipeline="a\"\\\n<b>",state="streaming"} 1"#,
            r#"walpost_pipeline_state{pipeline="a\"\\\n<b>",state="halted"} 0"#,
            r#"walpost_errors_total{pipeline="a\"\\\n<b>",kind="row"} 1"#,
            r#"walpost_commit_to_delivery_seconds_bucket{pipeline="a\"\\\n<b>",le="0.0005"} 0"#,
            r#"walpost_commit_to_delivery_seconds_bucket{pipeline="a\"\\\n<b>",le="0.001"} 1"#,
            r#"walpost_commit_to_delivery_seconds_sum{pipeline="a\"\\\n<b>"} 0.0007"#,
            r#"walpost_kafka_commit_seconds_count{pipeline="a\"\\\n<b>"} 1"#,
            "# TYPE walpost_errors_total counter",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        // The database has not been queried yet.
        assert!(!text.contains("walpost_lag_bytes"), "{text}");
    }

    #[test]
    fn shows_only_the_tables_with_the_most_rows() {
        let stats = stats();
        stats.rows_of_tables((1..=12).map(|n| (format!("tenant_{n}.outbox"), n)));
        stats.rows_of_tables([("tenant_2.outbox", 100)]);
        let text = text(&Registry::new([Arc::new(stats)]).status()).expect("text");
        let of = |n: u64| format!("table=\"tenant_{n}.outbox\"}} ");
        let shown: Vec<_> = (1..=12).filter(|n| text.contains(&of(*n))).collect();
        assert_eq!(shown, [2, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert!(text.contains(&format!("{}102\n", of(2))), "{text}");
    }

    #[test]
    fn labels_contain_nothing_that_a_terminal_obeys() {
        let stats = stats();
        stats.rows_of_tables([("tenant_\x1b[2J\u{202e}\"\\\n.outbox", 1)]);
        let text = text(&Registry::new([Arc::new(stats)]).status()).expect("text");
        let label = r#"table="tenant_\\u{1b}[2J\\u{202e}\"\\\n.outbox"} 1"#;
        assert!(text.contains(label), "{label} in\n{text}");
        assert!(!text.contains(|c: char| c != '\n' && crate::escape::is_control(c)));
    }

    #[test]
    fn names_are_those_that_prometheus_expects() {
        let names: BTreeSet<_> = METRICS.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), METRICS.len(), "each once");
        for metric in METRICS {
            let is_counter = metric.source.kind() == MetricType::COUNTER;
            assert!(metric.name.starts_with("walpost_"), "{}", metric.name);
            assert_eq!(
                metric.name.ends_with("_total"),
                is_counter,
                "{}",
                metric.name
            );
            assert!(metric.help.ends_with('.'), "{}", metric.name);
        }
    }
}
