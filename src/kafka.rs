//! Everything that knows rdkafka.

pub mod context;
mod native;
pub mod probe;
pub mod producer;
pub mod properties;
pub mod topics;
