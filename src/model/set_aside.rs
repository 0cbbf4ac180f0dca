//! Tables that are set aside, which means that their rows are not delivered from a certain position
//! onwards.

use serde::{Deserialize, Serialize};

use super::commands::Commands;
use super::lsn::{Lsn, Position};

/// A table that was set aside, as recorded in the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAside {
    /// The ID of the journal entry.
    pub id: i64,
    /// When the entry was written, as formatted by the server.
    pub at: String,
    /// The name of the table when the entry was written.
    pub table: String,
    /// The table's OID.
    #[serde(skip)]
    pub(crate) relation: u32,
    /// The position of the first row that is not delivered.
    pub position: Position,
    /// The error that the first undelivered row caused.
    pub reason: String,
    /// The rows that the latest finished replay of the table has sent, or `None` if no replay has
    /// finished.
    #[serde(skip)]
    pub(crate) replayed: Option<Replayed>,
    /// The LSN from which delivery resumed: rows with a commit LSN at or after this LSN are
    /// delivered. `None` until a later journal entry closes this entry.
    #[serde(skip)]
    pub(crate) until: Option<Lsn>,
    /// The first transaction whose rows may be missing; `None` if any row may be missing.
    #[serde(skip)]
    pub(crate) since: Option<u64>,
    /// The system identifier of the cluster to which the OID in `relation` and the transaction ID
    /// in `since` belong.
    #[serde(skip)]
    pub(crate) cluster: Option<String>,
    /// Whether `table` is an accepted name of the table with the OID in `relation`.
    #[serde(skip)]
    pub(crate) is_accepted_name: bool,
}

/// The rows that a replay has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replayed {
    /// The replay has sent all rows with a commit LSN lower than this value.
    pub before: Lsn,
    /// The replay has sent all rows of transactions with an ID lower than this value. The value
    /// comes from the snapshot that was used to read the rows.
    pub snapshot_xmin: Option<u64>,
}

impl SetAside {
    /// Returns whether this entry is about the table with the given name, or with the given OID in the given cluster.
    /// The name still matches after the table has been re-created, and the OID still matches after it has been renamed.
    ///
    /// In the cluster in which the entry was written, the name alone matches only if it is an
    /// accepted name of the recorded table. Otherwise, a table's owner could stop the delivery of a
    /// future table by renaming the existing table to the future table's name.
    #[must_use]
    pub(crate) fn is_about(&self, table: &str, relation: u32, cluster: &str) -> bool {
        let is_same_cluster = self.cluster.as_deref() == Some(cluster);
        self.relation == relation && is_same_cluster
            || self.table == table && (self.is_accepted_name || !is_same_cluster)
    }

    /// Describes the table and the missing events, for use in messages.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "table {} is set aside: its events from position {} on are not delivered (journal entry {}, written at {})",
            self.table, self.position, self.id, self.at
        )
    }
}

/// Returns the `walpost replay` command that delivers the rows of a table that is set aside.
#[must_use]
pub(crate) fn replay_set_aside(commands: &Commands, table: &str) -> String {
    commands.print(["replay", "--set-aside", "--table", table])
}
