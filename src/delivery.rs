//! Delivery tracking: which records have been read, which of them are durable, and which LSN may be
//! confirmed.
//!
//! [`watermark`] determines the LSN that may be confirmed. For exactly-once delivery,
//! [`checkpoint`] records which events are in Kafka, and determines whether a server's WAL
//! continues from the last of these events; [`chunks`] records which copied rows are in Kafka.
//! [`failure`] describes why a record is not durable, and [`isolation`] finds the row that caused a
//! batch to be rejected. [`stats`] contains the statistics for monitoring, which are updated per
//! batch rather than per row.

pub(crate) mod checkpoint;
pub(crate) mod chunks;
pub(crate) mod failure;
pub(crate) mod histogram;
pub(crate) mod isolation;
pub(crate) mod lifecycle;
pub(crate) mod stats;
pub(crate) mod watermark;
