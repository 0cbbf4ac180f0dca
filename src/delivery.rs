//! What was read, how far it is durable, and what may be confirmed of it.
//!
//! [`watermark`] turns deliveries into confirmed LSNs. For exactly-once, [`checkpoint`] says how far the
//! records in Kafka reach and whether a server's WAL continues it, and [`pieces`] how far the copy of a
//! table does. [`isolation`] finds the one row for whose sake a batch was refused. [`stats`] counts all that, without a
//! word per row; others read it.

pub mod checkpoint;
pub mod chunks;
pub mod histogram;
pub mod isolation;
pub(crate) mod lifecycle;
pub mod stats;
pub mod watermark;
