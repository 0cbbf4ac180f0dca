//! Everything that knows rdkafka.

mod aside;
pub mod context;
pub mod credentials;
mod end;
mod events;
pub mod examine;
mod flusher;
pub mod grants;
pub mod limits;
mod native;
mod poller;
pub mod probe;
pub mod producer;
pub mod properties;
pub mod reader;
pub mod settings;
mod statistics;
pub mod topics;
pub mod transaction;
