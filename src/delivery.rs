//! What was read, how far it is durable, and what may be confirmed of it.
//!
//! [`watermark`] turns deliveries into confirmed LSNs. For exactly-once, [`checkpoint`] says how far the
//! records in Kafka reach and whether a server's WAL continues it, and [`chunks`] how far the copy of a
//! table does. [`failure`] says why a record is not durable, and [`isolation`] finds the one row for whose sake a
//! batch was refused. [`stats`] counts all that, without a
//! word per row; others read it.

pub(crate) mod checkpoint;
pub(crate) mod chunks;
pub(crate) mod failure;
pub(crate) mod histogram;
pub(crate) mod isolation;
pub(crate) mod lifecycle;
pub(crate) mod stats;
pub(crate) mod watermark;
