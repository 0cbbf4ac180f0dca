//! A slot that was dropped.

use serde::{Deserialize, Serialize};

use super::commands::Commands;
use super::lsn::Lsn;

/// A slot that was dropped, or a table that was not published for a while, and what went with it was not replayed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedSlot {
    /// The entry of the journal.
    pub id: i64,
    /// When, as the server prints it.
    pub at: String,
    /// The position that the slot had confirmed: every event up to it was delivered. 0/0 if older rows were still to be copied. `None`
    /// if that slot was in another history of the database.
    pub from: Option<Lsn>,
    /// Where the log ended. What was committed after that, before there was a new slot, is missing
    /// too.
    pub to: Option<Lsn>,
    /// The table, if several shared the slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// No slot was dropped: the table was not in the publication for a while.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left_publication: bool,
    /// No slot was dropped: another table has taken the place of this one.
    #[serde(
        default,
        rename = "replaced",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub is_replaced: bool,
    /// The first transaction that may be missing; where that is not known, all rows may be.
    #[serde(skip)]
    pub(crate) since: Option<u64>,
    /// The cluster whose transactions these are.
    #[serde(skip)]
    pub(crate) cluster: Option<String>,
}

impl DroppedSlot {
    /// For people: which it is, and what may be missing.
    #[must_use]
    pub fn describe(&self) -> String {
        let of_table = match &self.table {
            Some(table) => format!(" of table {table}"),
            None => String::new(),
        };
        let when = match (self.from, self.to) {
            (None | Some(Lsn::ZERO), Some(to)) => format!("before {to}"),
            (from, _) => format!("after {}", from.unwrap_or_default()),
        };
        format!(
            "events{of_table} committed {when} (entry {} of the journal, {})",
            self.id, self.at
        )
    }

    /// Why they may be missing.
    #[must_use]
    pub fn cause(&self) -> &'static str {
        match self.left_publication {
            true if self.is_replaced => "another table has taken its place",
            true => "the table was not in the publication for a while",
            false => "a slot was dropped",
        }
    }

    /// The command that sends them again.
    #[must_use]
    pub(crate) fn replay(&self, commands: &Commands) -> String {
        replay_command(commands, self.table.as_deref())
    }
}

/// The command that records, without sending anything, that the events of dropped slots were delivered.
#[must_use]
pub(crate) fn settle_command(commands: &Commands, table: Option<&str>) -> String {
    match table {
        Some(table) => commands.print([
            "replay",
            "--dropped-slots",
            "--already-delivered",
            "--table",
            table,
        ]),
        None => commands.print(["replay", "--dropped-slots", "--already-delivered"]),
    }
}

/// The command that sends the events of dropped slots again. `table` is `None` unless several tables shared the slot.
#[must_use]
pub(crate) fn replay_command(commands: &Commands, table: Option<&str>) -> String {
    match table {
        Some(table) => commands.print(["replay", "--dropped-slots", "--table", table]),
        None => commands.print(["replay", "--dropped-slots"]),
    }
}
