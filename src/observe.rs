//! What a person sees of the program while it runs.
//!
//! A pipeline writes what it does into its [`PipelineStats`](crate::delivery::stats::PipelineStats);
//! [`status::Status`] is what that says at one moment, and all else is made of it: [`metrics`], [`health`], the page. Its
//! [`summary`] is what people see first. The [`watchdog`]
//! looks at it once a second.

pub mod client;
pub mod health;
pub mod history;
pub mod http;
pub mod logging;
pub mod metrics;
pub mod problem;
pub mod registry;
pub mod status;
pub mod summary;
pub mod watchdog;
