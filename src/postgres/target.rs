//! What a pipeline uses in its database.

use std::fmt;

use super::table::TableName;
use super::table_pattern::TablePatterns;
use crate::model::commands::Commands;
use crate::model::set_aside::replay_set_aside;

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
    /// Commands that are about the same pipeline.
    pub commands: Commands,
}

impl Target {
    /// The command that makes what such an outbox needs, with these words.
    #[must_use]
    pub(crate) fn init(&self, words: &[&str]) -> String {
        let outbox: &[&str] = match self.outbox {
            Outbox::Messages { .. } => &["--outbox", "messages"],
            Outbox::Table(_) | Outbox::Tables(_) | Outbox::OneOf { .. } => &[],
        };
        let words = [&["init"], outbox, words].concat();
        self.commands.print_words(&words)
    }

    /// The command that makes this table.
    #[must_use]
    pub(crate) fn init_table(&self, table: &TableName) -> String {
        self.init(&["--table", &table.to_string()])
    }

    /// The table, if it is one of several.
    #[must_use]
    pub(crate) fn table_of_several(&self) -> Option<String> {
        match &self.outbox {
            Outbox::OneOf { table, .. } => Some(table.to_string()),
            Outbox::Table(_) | Outbox::Tables(_) | Outbox::Messages { .. } => None,
        }
    }

    /// The command that sends rows of the table again from a time on.
    #[must_use]
    pub(crate) fn replay_from(&self) -> String {
        let table = match &self.outbox {
            Outbox::Tables(_) => Some("TABLE".to_owned()),
            _ => self.table_of_several(),
        };
        match table {
            Some(table) => {
                let words = ["replay", "--table", &table, "--from", "TIME"];
                self.commands.print(words)
            }
            None => self.commands.print(["replay", "--from", "TIME"]),
        }
    }

    /// The command that leaves out what the slot has before a position.
    #[must_use]
    pub(crate) fn skip(&self, to: &str) -> String {
        self.commands.print(["skip", "--to", to])
    }

    /// The command that sends the rows of a table again that was set aside.
    #[must_use]
    pub(crate) fn replay_set_aside(&self, table: &str) -> String {
        replay_set_aside(&self.commands, table)
    }

    /// The command that makes a slot of this name.
    #[must_use]
    pub(crate) fn init_slot(&self) -> String {
        self.init(&["--slot", &self.slot])
    }

    /// How an operator gets events delivered that the slot has passed or lost.
    #[must_use]
    pub(crate) fn resend(&self) -> String {
        match &self.outbox {
            Outbox::Table(_) => {
                format!("Send them again from the table: {}", self.replay_from())
            }
            Outbox::Tables(_) | Outbox::OneOf { .. } => {
                let words = ["replay", "--table", "TABLE", "--from", "TIME"];
                let replay = self.commands.print(words);
                format!("Send them again from each table: {replay}")
            }
            Outbox::Messages { .. } => {
                "They are in no table: whoever published them has to publish them again".to_owned()
            }
        }
    }
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
