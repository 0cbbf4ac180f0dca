//! Everything that knows PostgreSQL.
//!
//! [`connect`] opens connections, [`replication`] speaks streaming replication over one, [`wire`] decodes
//! what comes, and [`catalog`] asks SQL questions on another. [`provision`] runs the files in `sql/`.

pub mod catalog;
pub mod connect;
pub mod provision;
pub mod replication;
pub(crate) mod sql;
mod sql_lsn;
pub mod table;
pub mod target;
pub mod wire;
