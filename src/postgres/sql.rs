//! Re-exports the types and functions that other modules need to compose a statement and read its
//! result.

pub(crate) use postgres_protocol::escape::{escape_identifier, escape_literal};
pub(crate) use tokio_postgres::types::ToSql;
pub(crate) use tokio_postgres::{Client, Row, SimpleQueryRow};
