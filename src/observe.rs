//! Monitoring of a running process.
//!
//! A pipeline records its activity in its [`PipelineStats`](crate::delivery::stats::PipelineStats).
//! [`status::Status`] is a snapshot of these statistics, from which [`metrics`], [`health`] and the
//! status page are derived. `walpost status` and the status page show the [`summary`] of each
//! pipeline first. The [`watchdog`] checks the pipelines once a second.

pub(crate) mod client;
pub(crate) mod health;
pub(crate) mod history;
pub(crate) mod http;
mod log_queue;
pub(crate) mod logging;
pub(crate) mod metrics;
pub(crate) mod problem;
pub(crate) mod registry;
pub(crate) mod status;
pub(crate) mod summary;
pub(crate) mod watchdog;
