//! The Kafka client: the only module that uses rdkafka.

mod aside;
mod brokers;
pub(crate) mod context;
pub(crate) mod credentials;
mod end;
mod events;
pub(crate) mod examine;
mod flusher;
pub(crate) mod grants;
pub(crate) mod limits;
mod native;
mod oauthbearer;
mod poller;
pub(crate) mod probe;
pub(crate) mod producer;
pub(crate) mod properties;
pub(crate) mod reader;
pub(crate) mod seen_topics;
pub(crate) mod settings;
mod statistics;
mod token;
pub(crate) mod token_endpoint;
mod topic_lookup;
pub(crate) mod topics;
pub(crate) mod transaction;
pub(crate) mod unknown_codes;
mod unusable;
