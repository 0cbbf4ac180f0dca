//! Everything that knows rdkafka.

pub mod context;
pub mod probe;
pub mod producer;
pub mod properties;
pub mod topics;
