//! What a pipeline uses in its database.

use std::fmt;

use super::table::TableName;
use super::table_pattern::TablePatterns;

/// Schema and name of the table through which older rows of one of several outboxes come: `sql/tables.sql`.
pub(crate) const OUTBOX_ROW: [&str; 2] = ["walpost", "outbox_row"];

/// What a pipeline uses in its database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Where its events are.
    pub outbox: Outbox,
    /// The publication: of the table's inserts, or of nothing.
    pub publication: String,
    /// The logical replication slot.
    pub slot: String,
}

/// Where events are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outbox {
    /// They are the rows inserted into a table.
    Table(TableName),
    /// They are the rows inserted into any of these tables.
    Tables(TablePatterns),
    /// Of these tables one, for a command that is about one.
    OneOf { table: TableName, of: TablePatterns },
    /// They are messages in WAL alone, written by `walpost.publish`.
    Messages {
        /// The prefix of the messages that are this outbox's.
        prefix: String,
    },
}

impl Outbox {
    /// The table, where it is known to be one.
    #[must_use]
    pub fn table(&self) -> Option<&TableName> {
        match self {
            Self::Table(table) | Self::OneOf { table, .. } => Some(table),
            Self::Tables(_) | Self::Messages { .. } => None,
        }
    }

    /// Of several tables this one, or the outbox itself.
    #[must_use]
    pub(crate) fn one(&self, table: &TableName) -> Self {
        match self {
            Self::Tables(of) | Self::OneOf { of, .. } => Self::OneOf {
                table: table.clone(),
                of: of.clone(),
            },
            Self::Table(_) | Self::Messages { .. } => self.clone(),
        }
    }

    /// Other tables share the publication and the slot.
    #[must_use]
    pub(crate) fn is_several(&self) -> bool {
        matches!(self, Self::Tables(_) | Self::OneOf { .. })
    }

    /// Events are messages, and in no table.
    #[must_use]
    pub fn is_messages(&self) -> bool {
        matches!(self, Self::Messages { .. })
    }

    /// The table with this schema and this name, as the catalog spells them, is an outbox.
    #[must_use]
    pub(crate) fn has(&self, schema: &str, name: &str) -> bool {
        match self {
            Self::Table(table) => table.is(schema, name),
            Self::Tables(tables) | Self::OneOf { of: tables, .. } => tables.matches(schema, name),
            Self::Messages { .. } => false,
        }
    }

    /// The command that makes what such an outbox needs.
    #[must_use]
    pub fn init(&self) -> &'static str {
        match self {
            Self::Table(_) | Self::Tables(_) | Self::OneOf { .. } => "walpost init",
            Self::Messages { .. } => "walpost init --outbox messages",
        }
    }

    /// How a person gets events delivered that the slot has passed or lost.
    #[must_use]
    pub fn resend(&self) -> &'static str {
        match self {
            Self::Table(_) => "Send them again from the table: walpost replay --from TIME",
            Self::Tables(_) | Self::OneOf { .. } => {
                "Send them again from each table: walpost replay --table TABLE --from TIME"
            }
            Self::Messages { .. } => {
                "They are in no table: whoever published them has to publish them again"
            }
        }
    }
}

impl fmt::Display for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(table) | Self::OneOf { table, .. } => write!(f, "table {table}"),
            Self::Tables(tables) => write!(f, "tables {tables}"),
            Self::Messages { prefix } => write!(f, "messages with prefix {prefix:?}"),
        }
    }
}
