//! Histogram of durations, written by the pipeline's threads and read by monitoring.

use std::sync::atomic::{AtomicU64, Ordering};

/// Upper bounds of the buckets, in microseconds. An additional bucket counts longer durations.
pub(crate) const BOUNDS_MICROS: [u64; 17] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
];

const BUCKET_COUNT: usize = BOUNDS_MICROS.len() + 1;

/// Number of durations in each bucket.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; BUCKET_COUNT],
    sum_micros: AtomicU64,
}

/// The values of a [`Histogram`] at one point in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    counts: [u64; BUCKET_COUNT],
    /// The sum of all durations, in microseconds.
    pub sum_micros: u64,
}

impl Histogram {
    /// Records one duration.
    pub fn record(&self, micros: u64) {
        self.record_alike(micros, 1);
    }

    /// Records the same duration `count` times.
    pub fn record_alike(&self, micros: u64, count: u64) {
        let bucket = BOUNDS_MICROS.partition_point(|bound| *bound < micros);
        self.counts[bucket].fetch_add(count, Ordering::Relaxed);
        let sum = micros.saturating_mul(count);
        self.sum_micros.fetch_add(sum, Ordering::Relaxed);
    }

    /// Returns a copy of the current values.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            counts: self.counts.each_ref().map(|n| n.load(Ordering::Relaxed)),
            sum_micros: self.sum_micros.load(Ordering::Relaxed),
        }
    }
}

impl Counts {
    /// Returns the number of durations.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns each upper bound, in microseconds, with the number of durations at or below it.
    pub fn cumulative(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut sum = 0;
        BOUNDS_MICROS
            .iter()
            .zip(self.counts)
            .map(move |(bound, count)| {
                sum += count;
                (*bound, sum)
            })
    }

    /// Returns the durations recorded since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut since = *self;
        for (count, before) in since.counts.iter_mut().zip(earlier.counts) {
            *count = count.saturating_sub(before);
        }
        since.sum_micros = since.sum_micros.saturating_sub(earlier.sum_micros);
        since
    }

    /// Returns the `share` quantile in microseconds, or `None` if there are no durations. Durations
    /// are assumed to be evenly distributed within a bucket, as in Prometheus'
    /// `histogram_quantile`.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "counts and bounds are far below 2^52"
    )]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.total() as f64;
        let (mut below, mut lower) = (0, 0);
        for (bound, upto) in self.cumulative() {
            if upto > below && upto as f64 >= rank {
                let part = (rank - below as f64) / (upto - below) as f64;
                return Some(lower as f64 + part * (bound - lower) as f64);
            }
            (below, lower) = (upto, bound);
        }
        (self.total() > 0).then_some(lower as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_each_duration_in_the_smallest_bucket_that_contains_it() {
        let histogram = Histogram::default();
        for micros in [0, 500, 501, 1_000, 300_000_000, 300_000_001, u64::MAX / 2] {
            histogram.record(micros);
        }
        let counts = histogram.counts();
        assert_eq!(counts.total(), 7);
        let cumulative: Vec<_> = counts.cumulative().collect();
        assert_eq!(cumulative[0], (500, 2));
        assert_eq!(cumulative[1], (1_000, 4));
        assert_eq!(cumulative[15], (60_000_000, 4));
        assert_eq!(cumulative[16], (300_000_000, 5));
    }

    #[test]
    fn interpolates_quantiles_within_a_bucket() {
        let histogram = Histogram::default();
        assert_eq!(histogram.counts().quantile(0.5), None);
        for _ in 0..100 {
            histogram.record(7_000);
        }
        let median = histogram.counts().quantile(0.5).expect("some");
        assert!((median - 7_500.0).abs() < 1e-6, "{median}");
        let before = histogram.counts();
        histogram.record(u64::MAX / 2);
        let since = histogram.counts().since(&before);
        assert_eq!(since.quantile(0.99), Some(300_000_000.0));
    }
}
