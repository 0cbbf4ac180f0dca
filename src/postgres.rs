//! Everything that knows PostgreSQL.
//!
//! [`conninfo`] and [`dial`] open connections, [`connection`] speaks streaming replication over
//! one, [`frame`] and [`pgoutput`] decode what comes, [`catalog`] asks SQL questions on another,
//! [`copy`] and [`snapshot`] read the outbox table there, [`peek`] looks ahead in a slot and moves it, [`let_go`]
//! gives one up, and [`journal`] keeps what was done to a pipeline that the log can't tell.

pub mod catalog;
pub mod connection;
pub mod conninfo;
pub mod copy;
pub mod dial;
pub mod frame;
pub mod journal;
pub mod let_go;
pub mod lsn;
pub mod peek;
pub mod pgoutput;
pub mod provision;
pub mod retention;
pub mod slot_state;
pub mod snapshot;
pub mod table;
pub mod target;
