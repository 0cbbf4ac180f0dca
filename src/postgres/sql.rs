//! Types and functions that other modules use to write a statement and to read its result.

pub(crate) use postgres_protocol::escape::{escape_identifier, escape_literal};
pub(crate) use tokio_postgres::types::ToSql;
pub(crate) use tokio_postgres::{Client, Row, SimpleQueryRow};
