//! Everything that knows PostgreSQL.
//!
//! [`conninfo`] and [`dial`] open connections, [`connection`] speaks streaming replication over
//! one, [`frame`] and [`pgoutput`] decode what comes, [`catalog`] asks SQL questions on another.

pub mod catalog;
pub mod connection;
pub mod conninfo;
pub mod dial;
pub mod frame;
pub mod lsn;
pub mod pgoutput;
pub mod provision;
pub mod table;
pub mod target;
