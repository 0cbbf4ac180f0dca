//! Formats a [`Status`] in Prometheus' text format. [`METRICS`] defines all metrics.

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

/// The media type of Prometheus' text format.
pub(crate) const CONTENT_TYPE: &str = TEXT_FORMAT;

/// The possible values of a slot's `wal_status`, from section 53.20 of the PostgreSQL 18 manual,
/// "`pg_replication_slots`".
const WAL_STATUS: [&str; 4] = ["reserved", "extended", "unreserved", "lost"];

/// Maximum number of tables for which a metric is exported. There may be thousands of tables, and
/// each one would create a time series.
const TABLES_MAX: usize = 10;

/// The definition of a metric. All metrics except process metrics have the label `pipeline`.
pub struct Definition {
    pub name: &'static str,
    /// The help text.
    pub help: &'static str,
    /// The metric's type, and the function that computes its value.
    pub source: Source,
}

/// The type of a metric, and a function that computes its value.
pub enum Source {
    /// A process-wide gauge, with the name of its label, if any. The function returns the values of
    /// the label and of the gauge.
    Process(Option<&'static str>, fn(&Status) -> (String, f64)),
    /// A process-wide counter.
    ProcessCounter(fn(&Status) -> f64),
    /// A counter.
    Counter(fn(&PipelineStatus) -> Option<f64>),
    /// A set of counters, one for each value of a label.
    Counters(&'static str, fn(&PipelineStatus) -> Vec<(String, f64)>),
    /// A gauge, which is omitted while its value is unknown.
    Gauge(fn(&PipelineStatus) -> Option<f64>),
    /// A set of gauges, one for each value of a label.
    Gauges(&'static str, fn(&PipelineStatus) -> Vec<(String, f64)>),
    /// A histogram of durations.
    Histogram(fn(&PipelineStatus) -> &Counts),
}

impl Source {
    /// Returns the Prometheus type of the metric.
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
        "The version of Walpost, as a label; the value is always 1.",
        Source::Process(Some("version"), |status| (status.version.clone(), 1.0)),
    ),
    metric(
        "walpost_start_time_seconds",
        "When the process was started, in seconds since 1970.",
        Source::Process(None, |status| (String::new(), status.started_at)),
    ),
    metric(
        "walpost_config_reload_failed",
        "1 if the configuration has changed but can't be used, and the pipelines keep running with the previous one; \
         otherwise 0.",
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
        "Log lines that were dropped because standard error was not read in time or could not be written to.",
        Source::ProcessCounter(|status| exact(status.log_lines_dropped)),
    ),
    metric(
        "walpost_pipeline_state",
        "1 for the pipeline's current state, 0 for the other states.",
        Source::Gauges("state", |pipeline| {
            one_hot(
                State::ALL.iter().map(|state| state.name()),
                Some(pipeline.state.name()),
            )
        }),
    ),
    metric(
        "walpost_pipeline_ready",
        "1 if the pipeline is streaming and making progress, or is a hot standby; otherwise 0.",
        Source::Gauge(|pipeline| flag(pipeline.ready)),
    ),
    metric(
        "walpost_watchdog_problem",
        "1 for each kind of problem that the watchdog has found, 0 for the other kinds.",
        Source::Gauges("kind", |pipeline| {
            let is = |kind| {
                pipeline
                    .problems
                    .iter()
                    .any(|seen| seen.problem.kind == kind)
            };
            let all = Kind::ALL.into_iter();
            all.map(|kind| (kind.name().to_owned(), f64::from(u8::from(is(kind)))))
                .collect()
        }),
    ),
    metric(
        "walpost_events_sent_total",
        "Events passed to the producer.",
        Source::Counter(|pipeline| count(pipeline.events.sent)),
    ),
    metric(
        "walpost_events_delivered_total",
        "Events that Kafka has acknowledged.",
        Source::Counter(|pipeline| count(pipeline.events.delivered)),
    ),
    metric(
        "walpost_transactions_total",
        "Transactions that contained events and have been read completely.",
        Source::Counter(|pipeline| count(pipeline.events.transactions)),
    ),
    metric(
        "walpost_received_bytes_total",
        "Bytes received from PostgreSQL over the replication connection.",
        Source::Counter(|pipeline| count(pipeline.events.received_bytes)),
    ),
    metric(
        "walpost_in_flight_events",
        "Events in flight: passed to the producer, but not acknowledged by Kafka.",
        Source::Gauge(|pipeline| count(pipeline.events.in_flight)),
    ),
    metric(
        "walpost_in_flight_bytes",
        "Size of the events in flight, as counted for window_bytes.",
        Source::Gauge(|pipeline| count(pipeline.events.in_flight_bytes)),
    ),
    metric(
        "walpost_window_events",
        "Current limit on events in flight: window_records, or a lower value if delivery is exactly-once and Kafka is slow.",
        Source::Gauge(|pipeline| count(pipeline.events.window_events)),
    ),
    metric(
        "walpost_window_bytes",
        "Current limit on bytes in flight: window_bytes, or a lower value if delivery is exactly-once and Kafka is slow.",
        Source::Gauge(|pipeline| count(pipeline.events.window_bytes)),
    ),
    metric(
        "walpost_commit_to_delivery_seconds",
        "Time from a transaction's commit in PostgreSQL until all its events are durable in Kafka or, with exactly-once \
         delivery, can be read by consumers.",
        Source::Histogram(|pipeline| &pipeline.commit_to_delivery),
    ),
    metric(
        "walpost_delivery_seconds",
        "Time from reading the end of a transaction until all its events are durable in Kafka or, with exactly-once delivery, \
         can be read by consumers.",
        Source::Histogram(|pipeline| &pipeline.delivery),
    ),
    metric(
        "walpost_kafka_commit_seconds",
        "With exactly-once: duration of the commits of Kafka transactions.",
        Source::Histogram(|pipeline| &pipeline.kafka_commit),
    ),
    metric(
        "walpost_received_lsn",
        "The highest LSN received, as a number of bytes.",
        Source::Gauge(|pipeline| pipeline.positions.received.map(|lsn| exact(lsn.0))),
    ),
    metric(
        "walpost_confirmed_lsn",
        "The LSN up to which everything is durable in Kafka, as a number of bytes.",
        Source::Gauge(|pipeline| pipeline.positions.confirmed.map(|lsn| exact(lsn.0))),
    ),
    metric(
        "walpost_server_lsn",
        "The end of the server's WAL, as a number of bytes.",
        Source::Gauge(|pipeline| pipeline.positions.server.map(|lsn| exact(lsn.0))),
    ),
    metric(
        "walpost_lag_bytes",
        "WAL between the confirmed LSN and the end of the server's WAL.",
        Source::Gauge(|pipeline| pipeline.lag.bytes.map(exact)),
    ),
    metric(
        "walpost_lag_seconds",
        "Age of the oldest event that has been read but is not yet durable, including events waiting for a topic. While the \
         pipeline is not streaming, the value is at least the time since the stream ended.",
        Source::Gauge(|pipeline| pipeline.lag.seconds),
    ),
    metric(
        "walpost_last_event_timestamp_seconds",
        "When the most recently read transaction with events was committed, in seconds since 1970.",
        Source::Gauge(|pipeline| pipeline.positions.last_event_at),
    ),
    metric(
        "walpost_slot_active",
        "1 if a walsender is using the slot; otherwise 0.",
        Source::Gauge(|pipeline| flag(pipeline.slot_health.as_ref()?.active)),
    ),
    metric(
        "walpost_slot_retained_bytes",
        "WAL that the server retains for the slot: from restart_lsn to the end of the WAL.",
        Source::Gauge(|pipeline| pipeline.lag.retained_bytes.map(exact)),
    ),
    metric(
        "walpost_wal_budget_warn_bytes",
        "WAL that the slot may retain before Walpost logs a warning (wal_budget.warn); absent if not set.",
        Source::Gauge(|pipeline| pipeline.about.wal_budget_warn_bytes.map(exact)),
    ),
    metric(
        "walpost_wal_budget_max_bytes",
        "Maximum WAL that the slot may retain (wal_budget.max); absent if not set.",
        Source::Gauge(|pipeline| pipeline.about.wal_budget_max_bytes.map(exact)),
    ),
    metric(
        "walpost_dropped_slots_unreplayed",
        "Dropped slots whose events have not been sent again from the table yet; absent if unknown.",
        Source::Gauge(|pipeline| Some(exact(pipeline.dropped_slots.as_ref()?.len() as u64))),
    ),
    metric(
        "walpost_tables_set_aside",
        "Tables that are set aside, which means that their events after a recorded position are not delivered; absent if \
         unknown.",
        Source::Gauge(|pipeline| {
            let entries = pipeline.set_aside.as_ref()?.iter();
            let tables: BTreeSet<_> = entries.map(|entry| &entry.table).collect();
            Some(exact(tables.len() as u64))
        }),
    ),
    metric(
        "walpost_left_out_rows_total",
        "Rows that were not delivered because their tables are set aside.",
        Source::Counter(|pipeline| count(pipeline.left_out_rows)),
    ),
    metric(
        "walpost_slot_safe_wal_bytes",
        "How much more WAL can be written before the slot is in danger of being lost (safe_wal_size); absent if max_slot_wal_keep_size is -1.",
        Source::Gauge(|pipeline| pipeline.slot_health.as_ref()?.safe_wal_bytes.map(signed)),
    ),
    metric(
        "walpost_slot_wal_status",
        "1 for the slot's current wal_status, 0 for the other values.",
        Source::Gauges("status", |pipeline| match &pipeline.slot_health {
            Some(slot) => one_hot(WAL_STATUS.into_iter(), slot.wal_status.as_deref()),
            None => Vec::new(),
        }),
    ),
    metric(
        "walpost_slot_catalog_xmin_age_transactions",
        "Age of the slot's catalog_xmin, in transactions: dead system catalog rows from these transactions are retained.",
        Source::Gauge(|pipeline| pipeline.slot_health.as_ref()?.catalog_xmin_age.map(signed)),
    ),
    metric(
        "walpost_database_asked_timestamp_seconds",
        "Time of the last database query for the state of the slot, the end of the WAL and the partitions, in seconds since \
         1970.",
        Source::Gauge(|pipeline| Some(pipeline.slot_health.as_ref()?.asked_at)),
    ),
    metric(
        "walpost_outbox_partitions",
        "Leaf partitions of the outbox table; absent if the table is not partitioned.",
        Source::Gauge(|pipeline| pipeline.partitions.map(exact)),
    ),
    metric(
        "walpost_partitions_end_timestamp_seconds",
        "Upper bound of the last partition of the outbox table, in seconds since 1970; absent if the partitions are not defined \
         by time ranges with upper bounds.",
        Source::Gauge(|pipeline| Some(pipeline.partitions_end?.at)),
    ),
    metric(
        "walpost_partitions_ahead",
        "Partitions of the outbox table whose time range begins in the future.",
        Source::Gauge(|pipeline| Some(exact(pipeline.partitions_end?.ahead))),
    ),
    metric(
        "walpost_checkpoint_timestamp_seconds",
        "With exactly-once: when the last checkpoint was committed, in seconds since 1970.",
        Source::Gauge(|pipeline| pipeline.checkpoint_at),
    ),
    metric(
        "walpost_snapshot_phase",
        "1 for the current phase of the snapshot of older rows, 0 for the other phases; absent if no snapshot has been created since startup.",
        Source::Gauges("phase", |pipeline| match &pipeline.snapshot {
            Some(snapshot) => one_hot(
                SnapshotPhase::ALL.iter().map(|phase| phase.name()),
                Some(snapshot.phase.name()),
            ),
            None => Vec::new(),
        }),
    ),
    metric(
        "walpost_snapshot_rows_total",
        "Rows read by snapshots.",
        Source::Counter(|pipeline| count(pipeline.snapshot_rows)),
    ),
    metric(
        "walpost_snapshot_rows_expected",
        "Expected number of rows in the snapshot, according to the planner's estimate.",
        Source::Gauge(|pipeline| pipeline.snapshot?.expected.map(exact)),
    ),
    metric(
        "walpost_errors_total",
        "Errors, by kind.",
        Source::Counters("kind", |pipeline| {
            let errors = pipeline.errors.iter();
            errors.map(|(kind, n)| (kind.clone(), exact(*n))).collect()
        }),
    ),
    metric(
        "walpost_dead_letters_total",
        "Dead letters, by the reason why the events could not be delivered.",
        Source::Counters("kind", |pipeline| {
            let letters = pipeline.dead_letters;
            vec![
                ("oversize".to_owned(), exact(letters.oversize)),
                ("unroutable".to_owned(), exact(letters.unroutable)),
                ("malformed".to_owned(), exact(letters.malformed)),
            ]
        }),
    ),
    metric(
        "walpost_table_rows_total",
        "Rows received from each table, if the outbox consists of several tables; limited to the ten tables with the \
         most rows. /status lists all tables.",
        Source::Counters("table", |pipeline| {
            let mut tables: Vec<_> = pipeline.tables.iter().collect();
            tables.sort_by_key(|(_, rows)| Reverse(**rows));
            let most = tables.into_iter().take(TABLES_MAX);
            most.map(|(table, rows)| (table.clone(), exact(*rows)))
                .collect()
        }),
    ),
    metric(
        "walpost_reconnects_total",
        "Attempts to reconnect after an error.",
        Source::Counter(|pipeline| count(pipeline.reconnects)),
    ),
    metric(
        "walpost_kafka_up",
        "0 while no broker is reachable; otherwise 1.",
        Source::Gauge(|pipeline| flag(pipeline.kafka.unreachable.is_none())),
    ),
    metric(
        "walpost_kafka_retries_total",
        "Requests that the producer has retried.",
        Source::Counter(|pipeline| pipeline.kafka.retries.map(exact)),
    ),
    metric(
        "walpost_kafka_sent_bytes_total",
        "Bytes that the producer has sent to brokers.",
        Source::Counter(|pipeline| pipeline.kafka.sent_bytes.map(exact)),
    ),
    metric(
        "walpost_kafka_queued_events",
        "Events in the producer: queued, or sent but not acknowledged.",
        Source::Gauge(|pipeline| pipeline.kafka.queued_events.map(exact)),
    ),
    metric(
        "walpost_kafka_round_trip_p99_seconds",
        "99th percentile of the round-trip time to the slowest broker, including the broker's processing time.",
        Source::Gauge(|pipeline| pipeline.kafka.round_trip_p99_seconds),
    ),
];

/// Converts a number to a floating-point number, because Prometheus has no other type of number.
#[expect(
    clippy::cast_precision_loss,
    reason = "Prometheus has only floating-point numbers, which are exact below 2^53"
)]
fn exact(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "as in `exact`")]
fn signed(number: i64) -> f64 {
    number as f64
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "a metric's function must return Option<f64>"
)]
fn count(number: u64) -> Option<f64> {
    Some(exact(number))
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "a metric's function must return Option<f64>"
)]
fn flag(value: bool) -> Option<f64> {
    Some(f64::from(u8::from(value)))
}

/// Returns each name in `all` with its value: 1 for `current`, and 0 for every other name.
fn one_hot<'n>(all: impl Iterator<Item = &'n str>, current: Option<&str>) -> Vec<(String, f64)> {
    all.map(|name| (name.to_owned(), f64::from(u8::from(current == Some(name)))))
        .collect()
}

/// Formats all metrics as text.
///
/// # Errors
/// Returns the encoder's error, which does not occur for these metrics.
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
        let (label_value, value) = read(status);
        let labels = label.map(|name| pair(name, &label_value));
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
                        .map(|(name, value)| single(vec![own(), pair(label, &name)], kind, value)),
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
    fn exports_recorded_statistics_as_prometheus_metrics() {
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
        // The lag is unknown, because the database has not been queried yet.
        assert!(!text.contains("walpost_lag_bytes"), "{text}");
    }

    #[test]
    fn shows_only_the_tables_with_the_most_rows() {
        let stats = stats();
        stats.rows_of_tables((1..=12).map(|n| (format!("tenant_{n}.outbox"), n)));
        stats.rows_of_tables([("tenant_2.outbox", 100)]);
        let text = text(&Registry::new([Arc::new(stats)]).status()).expect("text");
        let label = |n: u64| format!("table=\"tenant_{n}.outbox\"}} ");
        let shown: Vec<_> = (1..=12).filter(|n| text.contains(&label(*n))).collect();
        assert_eq!(shown, [2, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert!(text.contains(&format!("{}102\n", label(2))), "{text}");
    }

    #[test]
    fn escapes_control_characters_in_labels() {
        let stats = stats();
        stats.rows_of_tables([("tenant_\x1b[2J\u{202e}\"\\\n.outbox", 1)]);
        let text = text(&Registry::new([Arc::new(stats)]).status()).expect("text");
        let label = r#"table="tenant_\\u{1b}[2J\\u{202e}\"\\\n.outbox"} 1"#;
        assert!(text.contains(label), "{label} in\n{text}");
        assert!(!text.contains(|c: char| c != '\n' && crate::escape::is_control(c)));
    }

    #[test]
    fn metric_names_follow_prometheus_naming_conventions() {
        let names: BTreeSet<_> = METRICS.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), METRICS.len(), "duplicate names");
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
