//! All code that is specific to PostgreSQL.
//!
//! [`connect`] opens connections, [`replication`] implements the streaming replication protocol,
//! [`wire`] decodes messages from the server, and [`catalog`] runs SQL queries on a separate
//! connection. [`provision`] runs the files in `sql/`.

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
