//! Tracking of deliveries: what has been read, what is durable, and what may be confirmed.
//!
//! [`watermark`] turns deliveries into confirmed LSNs. For exactly-once delivery, [`checkpoint`]
//! records which events are in Kafka and determines whether a server's WAL continues from there,
//! and [`chunks`] does the same for copied rows. [`failure`] describes why a record is not durable,
//! and [`isolation`] finds the row that caused a batch to be rejected. [`stats`] counts all this
//! for monitoring, without any work per row.

pub(crate) mod checkpoint;
pub(crate) mod chunks;
pub(crate) mod failure;
pub(crate) mod histogram;
pub(crate) mod isolation;
pub(crate) mod lifecycle;
pub(crate) mod stats;
pub(crate) mod watermark;
