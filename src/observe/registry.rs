//! Keeps track of the process's pipelines for monitoring.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use serde::Serialize;

use super::history::{History, Point, Sample};
use super::logging;
use super::status::{PipelineStatus, Reload, Status};
use super::watchdog::{Facts, Watchdog};
use crate::delivery::stats::PipelineStats;
use crate::model::time::seconds;
use crate::model::time::unix_micros;

/// Maximum number of points in a response with the history of all pipelines. This is enough for ten
/// minutes of data from 50 pipelines. The response is created on the supervisor's thread, which
/// also notifies systemd's watchdog and therefore must not spend many seconds on a request.
const HISTORY_POINTS_MAX: usize = 30_000;

/// All pipelines of the process, regardless of their state.
#[derive(Debug)]
pub(crate) struct Registry {
    started_micros: u64,
    pipelines: RwLock<Vec<Arc<Watched>>>,
    reload: Mutex<Option<Reload>>,
}

#[derive(Debug)]
struct Watched {
    stats: Arc<PipelineStats>,
    history: Mutex<History>,
    watchdog: Mutex<Watchdog>,
}

/// The recent activity of one pipeline, for charts.
#[derive(Debug, Serialize)]
pub(crate) struct PipelineHistory {
    pub name: String,
    /// Points, oldest first.
    pub points: Vec<Point>,
}

impl Watched {
    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watchdog(&self) -> MutexGuard<'_, Watchdog> {
        self.watchdog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self, now_micros: u64) -> PipelineStatus {
        let (recent, problems) = (self.history().recent(), self.watchdog().problems());
        PipelineStatus::from_stats(&self.stats, recent, problems, now_micros)
    }

    /// Runs the watchdog for this pipeline.
    fn watch(&self, now_micros: u64) {
        let (lifecycle, totals) = (self.stats.lifecycle_snapshot(), self.stats.totals());
        let facts = Facts {
            about: &self.stats.about,
            lifecycle: &lifecycle,
            totals: &totals,
            now: Instant::now(),
            now_micros,
        };
        let lines = self.watchdog().check(&facts);
        for line in lines {
            line.log(&self.stats.about.name);
        }
    }
}

impl Registry {
    /// Creates a registry for the given pipelines.
    #[must_use]
    pub(crate) fn new(pipelines: impl IntoIterator<Item = Arc<PipelineStats>>) -> Self {
        let registry = Self {
            started_micros: unix_micros(),
            pipelines: RwLock::default(),
            reload: Mutex::default(),
        };
        registry.replace(pipelines);
        registry
    }

    /// Replaces the registered pipelines with `pipelines`, in the given order. A pipeline that was
    /// already registered keeps its history.
    pub(crate) fn replace(&self, pipelines: impl IntoIterator<Item = Arc<PipelineStats>>) {
        let mut current = self
            .pipelines
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let watched = |stats: Arc<PipelineStats>| {
            let known = current
                .iter()
                .find(|known| Arc::ptr_eq(&known.stats, &stats));
            known.cloned().unwrap_or_else(|| {
                Arc::new(Watched {
                    stats,
                    history: Mutex::default(),
                    watchdog: Mutex::default(),
                })
            })
        };
        *current = pipelines.into_iter().map(watched).collect();
    }

    /// Records the outcome of the last attempt to reload the configuration.
    pub(crate) fn reloaded(&self, error: Option<String>) {
        let mut reload = self.reload.lock().unwrap_or_else(PoisonError::into_inner);
        *reload = Some(Reload {
            at: seconds(unix_micros()),
            error,
        });
    }

    fn pipelines(&self) -> Vec<Arc<Watched>> {
        let pipelines = self.pipelines.read();
        pipelines.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Samples all pipelines and logs their problems. Must be called once a second.
    pub(crate) fn sample(&self) {
        let now = unix_micros();
        for pipeline in self.pipelines() {
            pipeline.watch(now);
            let lag = pipeline.status(now).lag;
            let sample = Sample::from_stats(&pipeline.stats, now);
            pipeline.history().add(sample, lag.bytes, lag.seconds);
        }
    }

    /// Returns the current status of the process.
    #[must_use]
    pub(crate) fn status(&self) -> Status {
        let now = unix_micros();
        let pipelines: Vec<_> = self
            .pipelines()
            .iter()
            .map(|pipeline| pipeline.status(now))
            .collect();
        let reload = self.reload.lock().unwrap_or_else(PoisonError::into_inner);
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: seconds(self.started_micros),
            now: seconds(now),
            ready: pipelines.iter().all(|pipeline| pipeline.ready),
            log_lines_dropped: logging::dropped_lines(),
            reload: reload.clone(),
            pipelines,
        }
    }

    /// Returns the history of all pipelines after `since`, in seconds since 1970. Returns at most
    /// [`HISTORY_POINTS_MAX`] points in total, so the history covers less time if there are many
    /// pipelines.
    #[must_use]
    pub(crate) fn history(&self, since: f64) -> Vec<PipelineHistory> {
        let pipelines = self.pipelines();
        let limit = HISTORY_POINTS_MAX / pipelines.len().max(1);
        let history = |pipeline: &Arc<Watched>| PipelineHistory {
            name: pipeline.stats.about.name.clone(),
            points: pipeline.history().points(since, limit.max(1)),
        };
        pipelines.iter().map(history).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_history_of_many_pipelines_to_the_latest_data_points() {
        const PIPELINES: usize = 2000;
        let registry = Registry::new((0..PIPELINES).map(|_| Arc::default()));
        let samples = 3 + HISTORY_POINTS_MAX / PIPELINES;
        for _ in 0..samples {
            registry.sample();
        }
        let history = registry.history(0.0);
        let count: usize = history.iter().map(|pipeline| pipeline.points.len()).sum();
        assert_eq!(count, HISTORY_POINTS_MAX);
        let latest = registry.pipelines()[0].history().points(0.0, 1);
        assert_eq!(history[0].points.last(), latest.last());
    }
}
