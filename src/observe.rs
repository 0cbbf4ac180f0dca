//! What a person sees of the program while it runs.
//!
//! A pipeline writes what it does into its [`PipelineStats`](crate::delivery::stats::PipelineStats);
//! [`status::Status`] is what that says at one moment, and all else is made of it: [`metrics`], [`health`], the page. Its
//! [`summary`] is what people see first. The [`watchdog`]
//! looks at it once a second.

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
