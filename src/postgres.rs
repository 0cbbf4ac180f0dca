//! Everything that knows PostgreSQL.
//!
//! [`connect`] opens connections, [`replication`] speaks streaming replication over one, [`wire`] decodes
//! what comes, and [`catalog`] asks SQL questions on another. [`provision`] runs the files in `sql/`.

pub(crate) mod catalog;
pub(crate) mod connect;
pub(crate) mod provision;
pub(crate) mod replication;
pub(crate) mod sql;
mod sql_file;
mod sql_lsn;
pub(crate) mod table;
pub(crate) mod table_pattern;
pub(crate) mod target;
pub(crate) mod text_rows;
pub(crate) mod wire;
