//! A pipeline's counters over the last few minutes, sampled once per second. Rates and charts are
//! computed from the samples.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::delivery::histogram::Counts;
use crate::delivery::stats::PipelineStats;
use crate::model::time::seconds;

/// The number of seconds that [`Recent`] covers.
const RECENT_SECONDS: usize = 10;
/// The number of seconds for which data points are kept.
const KEPT_SECONDS: usize = 600;

/// A pipeline's totals at one point in time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// The time of the sample, in microseconds since 1970.
    pub at_micros: u64,
    /// Number of events that became durable.
    pub delivered: u64,
    /// Number of transactions that were read.
    pub transactions: u64,
    /// Number of bytes received from PostgreSQL.
    pub received_bytes: u64,
    /// The distribution of the time from reading a transaction until its events are durable in
    /// Kafka.
    pub delivery: Counts,
    /// The distribution of the time from a transaction's commit until its events are durable in
    /// Kafka.
    pub commit_to_delivery: Counts,
}

impl Sample {
    /// Samples the pipeline's counters.
    #[must_use]
    pub(crate) fn from_stats(stats: &PipelineStats, at_micros: u64) -> Self {
        let totals = stats.totals();
        Self {
            at_micros,
            delivered: totals.delivered,
            transactions: totals.transactions,
            received_bytes: totals.received_bytes,
            delivery: stats.delivery.counts(),
            commit_to_delivery: stats.commit_to_delivery.counts(),
        }
    }
}

/// The throughput and latency of a pipeline over the last ten seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recent {
    /// Number of events per second that became durable.
    pub events_per_second: f64,
    /// Number of transactions read per second.
    pub transactions_per_second: f64,
    /// Number of bytes received from PostgreSQL per second.
    pub bytes_per_second: f64,
    /// The median time from a transaction's commit until its events are durable in Kafka, in
    /// seconds.
    pub commit_to_delivery_p50: Option<f64>,
    /// The 99th percentile of the time from a transaction's commit until its events are durable in
    /// Kafka, in seconds.
    pub commit_to_delivery_p99: Option<f64>,
    /// The median time from reading a transaction until its events are durable in Kafka, in
    /// seconds.
    pub delivery_p50: Option<f64>,
    /// The 99th percentile of the time from reading a transaction until its events are durable in
    /// Kafka, in seconds.
    pub delivery_p99: Option<f64>,
}

impl Recent {
    #[expect(
        clippy::cast_precision_loss,
        reason = "the counters increase by far less than 2^52 between two samples"
    )]
    fn between(first: &Sample, last: &Sample) -> Self {
        let lasted = seconds(last.at_micros.saturating_sub(first.at_micros));
        if lasted <= 0.0 {
            return Self::default();
        }
        let rate = |counter: fn(&Sample) -> u64| {
            counter(last).saturating_sub(counter(first)) as f64 / lasted
        };
        let quantile = |counts: fn(&Sample) -> &Counts, share| {
            let counts = counts(last).since(counts(first));
            counts.quantile(share).map(|micros| micros / 1e6)
        };
        Self {
            events_per_second: rate(|sample| sample.delivered),
            transactions_per_second: rate(|sample| sample.transactions),
            bytes_per_second: rate(|sample| sample.received_bytes),
            commit_to_delivery_p50: quantile(|sample| &sample.commit_to_delivery, 0.5),
            commit_to_delivery_p99: quantile(|sample| &sample.commit_to_delivery, 0.99),
            delivery_p50: quantile(|sample| &sample.delivery, 0.5),
            delivery_p99: quantile(|sample| &sample.delivery, 0.99),
        }
    }
}

/// A data point for one second in a chart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// The end of the second, in seconds since 1970.
    pub at: f64,
    /// Number of events per second that became durable.
    pub events: f64,
    /// Number of bytes received from PostgreSQL per second.
    pub bytes: f64,
    /// The lag of the pipeline, in bytes of WAL.
    pub lag_bytes: Option<u64>,
    /// The lag of the pipeline, in seconds.
    pub lag_seconds: Option<f64>,
    /// The median time from a transaction's commit until its events are durable in Kafka, in
    /// seconds.
    pub p50: Option<f64>,
    /// The 99th percentile of the time from a transaction's commit until its events are durable in
    /// Kafka, in seconds.
    pub p99: Option<f64>,
}

/// The recent samples and data points of one pipeline.
#[derive(Debug, Default)]
pub(crate) struct History {
    samples: VecDeque<Sample>,
    points: VecDeque<Point>,
}

impl History {
    /// Adds a sample, together with the lag at the time when the sample was taken. Must be called
    /// once a second.
    pub(crate) fn add(&mut self, sample: Sample, lag_bytes: Option<u64>, lag_seconds: Option<f64>) {
        if let Some(before) = self.samples.back() {
            let second = Recent::between(before, &sample);
            if self.points.len() == KEPT_SECONDS {
                self.points.pop_front();
            }
            self.points.push_back(Point {
                at: seconds(sample.at_micros),
                events: second.events_per_second,
                bytes: second.bytes_per_second,
                lag_bytes,
                lag_seconds,
                p50: second.commit_to_delivery_p50,
                p99: second.commit_to_delivery_p99,
            });
        }
        if self.samples.len() > RECENT_SECONDS {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns the recent throughput and latency.
    #[must_use]
    pub(crate) fn recent(&self) -> Recent {
        match (self.samples.front(), self.samples.back()) {
            (Some(first), Some(last)) => Recent::between(first, last),
            _ => Recent::default(),
        }
    }

    /// Returns the points for the seconds that ended after `since` (in seconds since 1970), oldest
    /// first. If there are more than `limit`, returns the latest ones.
    #[must_use]
    pub(crate) fn points(&self, since: f64, limit: usize) -> Vec<Point> {
        let later = |point: &&Point| point.at > since;
        let omitted = self.points.len().saturating_sub(limit);
        self.points
            .iter()
            .skip(omitted)
            .filter(later)
            .copied()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_current_rates_over_ten_seconds_and_chart_points_over_one_second() {
        let mut history = History::default();
        assert_eq!(history.recent(), Recent::default());
        for second in 0..2000_u64 {
            // Deliver 10 events per second, but 100 in the last second.
            let delivered = second * 10 + if second == 1999 { 90 } else { 0 };
            let sample = Sample {
                at_micros: second * 1_000_000,
                delivered,
                ..Sample::default()
            };
            history.add(sample, Some(second), None);
        }
        let recent = history.recent();
        assert!((recent.events_per_second - 19.0).abs() < 1e-9, "{recent:?}");
        assert_eq!(recent.delivery_p50, None);
        let points = history.points(0.0, usize::MAX);
        assert_eq!(points.len(), KEPT_SECONDS);
        assert_eq!(points[0].lag_bytes, Some(2000 - KEPT_SECONDS as u64));
        assert!((points[0].events - 10.0).abs() < 1e-9);
        assert!((points[KEPT_SECONDS - 1].events - 100.0).abs() < 1e-9);
        let latest = &points[KEPT_SECONDS - 2..];
        assert_eq!(history.points(1997.5, usize::MAX), latest);
        assert_eq!(history.points(0.0, 2), latest);
    }
}
