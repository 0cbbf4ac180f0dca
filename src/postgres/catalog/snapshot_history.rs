//! Determines whether the rows that are older than a slot have been delivered.

use std::collections::BTreeMap;

use super::journal::{Action, Written};
use super::own_table::OwnTable;
use super::slot_state;
use super::table::Rows;
use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// The cluster's system identifier.
const SYSTEM_ID: &str = "(SELECT system_identifier::text FROM pg_control_system())";

/// The information that determines whether a pipeline's snapshot was taken, and whether a snapshot
/// is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotHistory {
    /// The state of the snapshot according to the journal.
    pub record: SnapshotRecord,
    /// Whether the slot has been read, according to the server's statistics or
    /// `walpost.slot_state`.
    pub has_streamed: bool,
    /// The approximate number of rows in the table.
    pub rows: Rows,
}

/// The state of one table's snapshot according to the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableSnapshot {
    /// The table's name in the journal; `None` if the entries do not name a table.
    pub table: Option<String>,
    /// The state of the snapshot, which is never [`SnapshotRecord::NoJournal`].
    pub record: SnapshotRecord,
}

/// The state of a snapshot according to the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotRecord {
    /// The journal does not exist.
    NoJournal,
    Nothing,
    /// `sql/snapshot.sql`, which `walpost init` runs, found rows that the first run must copy.
    Due {
        /// The slot's position when `sql/snapshot.sql` found the rows.
        slot_at: Lsn,
        /// The OID of the table.
        relation: u32,
    },
    /// A copy was started. It reads a snapshot that contains the rows committed before this
    /// position.
    Begun(Lsn),
    /// The copy is complete, or none is needed.
    Done,
}

impl SnapshotRecord {
    /// The key under which the `detail` of a journal entry stores the state of the snapshot.
    pub(crate) const STATE: &'static str = "state";
    /// The value of [`Self::STATE`] for [`SnapshotRecord::Due`].
    pub(crate) const DUE: &'static str = "due";
    /// The value of [`Self::STATE`] for [`SnapshotRecord::Begun`].
    pub(crate) const BEGUN: &'static str = "begun";
    /// The value of [`Self::STATE`] for [`SnapshotRecord::Done`].
    pub(crate) const DONE: &'static str = "done";

    /// Derives the state from journal entries, which must be sorted from oldest to newest. Ignores
    /// all entries after the first entry whose state is [`Self::DONE`]: an instance that was
    /// suspended may, once resumed, record the start of a copy that another instance has already
    /// completed.
    #[must_use]
    pub(crate) fn from_entries(entries: &[Written]) -> Self {
        let mut record = Self::Nothing;
        let is_snapshot = |entry: &&Written| entry.action == Action::Snapshot;
        for entry in entries.iter().filter(is_snapshot) {
            record = match (entry.detail[Self::STATE].as_str(), entry.to) {
                (Some(Self::BEGUN), Some(snapshot_lsn)) => Self::Begun(snapshot_lsn),
                // A copy was started, and the pipeline was renamed afterward. The entry written
                // after the renaming, which states that a copy is due, does not reset the state.
                (Some(Self::DUE), _) if matches!(record, Self::Begun(_)) => record,
                (Some(Self::DUE), Some(slot_at)) => Self::Due {
                    slot_at,
                    relation: relation(&entry.detail),
                },
                _ => return Self::Done,
            };
        }
        record
    }

    /// Returns the state of a table's snapshot, given the result of [`TableSnapshot::by_table`].
    #[must_use]
    pub(crate) fn of_table(snapshots: &[TableSnapshot], table: Option<&TableName>) -> Self {
        let table = table.map(TableName::to_string);
        let is_ours = |found: &&TableSnapshot| found.table.is_none() || found.table == table;
        let mut ours = snapshots.iter().filter(is_ours).map(|found| found.record);
        match (ours.next(), ours.next()) {
            (None, _) => Self::Nothing,
            (Some(record), None) => record,
            // Entries without a table name are sorted first.
            (Some(Self::Done), _) => Self::Done,
            (Some(_), Some(record)) => record,
        }
    }

    /// Returns `true` if a copy was started and some of its rows may not have been delivered.
    /// `confirmed` is the slot's position.
    #[must_use]
    pub(crate) fn is_open(self, confirmed: Lsn) -> bool {
        match self {
            // Positions at or after the consistent point are confirmed only once the whole copy is
            // durable, so such a position shows that the copy is complete. A separate journal entry
            // covers the events that an earlier slot did not deliver.
            Self::Begun(snapshot_lsn) => confirmed < snapshot_lsn,
            // The slot's position does not show whether rows are missing: see
            // `Catalog::uncopied_tables`.
            Self::Due { .. } | Self::NoJournal | Self::Nothing | Self::Done => false,
        }
    }

    /// Returns true if no run of the pipeline has started to copy the table yet.
    #[must_use]
    pub(crate) fn is_not_started(self) -> bool {
        matches!(self, Self::Nothing | Self::Due { .. })
    }
}

/// Returns the table's OID from the `detail` of a journal entry, or zero if `detail` does not
/// contain an OID.
fn relation(detail: &serde_json::Value) -> u32 {
    let relation = detail["relation"].as_str().map(str::parse);
    relation.and_then(Result::ok).unwrap_or_default()
}

impl TableSnapshot {
    /// Groups entries by table. The entries must be sorted from oldest to newest. In the result,
    /// the element without a table name is the first one.
    fn by_table(entries: Vec<Written>) -> Vec<Self> {
        let mut by_table = BTreeMap::<Option<String>, Vec<Written>>::new();
        for entry in entries {
            let table = entry.detail["table"].as_str().map(str::to_owned);
            by_table.entry(table).or_default().push(entry);
        }
        let by_table = by_table.into_iter().map(|(table, entries)| Self {
            table,
            record: SnapshotRecord::from_entries(&entries),
        });
        by_table.collect()
    }
}

impl Catalog {
    /// Returns the snapshot states of all tables that have been delivered through the slot, even if
    /// the pipeline was renamed in the meantime.
    ///
    /// # Errors
    /// Returns an error if the query fails, the journal does not exist, or the role is not allowed
    /// to read it.
    pub(crate) async fn table_snapshots(
        &self,
        target: &Target,
    ) -> Result<Vec<TableSnapshot>, CatalogError> {
        // A restored dump contains entries from a different cluster. Such an entry is ignored only
        // if it records that a copy is due, because in that case its position refers to that
        // cluster's slot.
        let condition = format!(
            "j.slot = {} AND j.action = {} AND (j.detail ->> '{}'::text IS DISTINCT FROM '{}'::text OR j.detail ->> 'system_id'::text = {SYSTEM_ID})",
            text_literal(&target.slot),
            text_literal(Action::Snapshot.name()),
            SnapshotRecord::STATE,
            SnapshotRecord::DUE
        );
        Ok(TableSnapshot::by_table(
            self.entries(target, &condition).await?,
        ))
    }

    /// Returns the snapshot state of the target's table.
    ///
    /// # Errors
    /// Returns an error if the query fails, or if the role is not allowed to read the journal.
    pub(crate) async fn snapshot_record(
        &self,
        target: &Target,
    ) -> Result<SnapshotRecord, CatalogError> {
        match self.table_snapshots(target).await {
            Ok(snapshots) => Ok(SnapshotRecord::of_table(&snapshots, target.outbox.table())),
            Err(CatalogError::NoJournal { .. }) => Ok(SnapshotRecord::NoJournal),
            Err(error) => Err(error),
        }
    }

    /// Returns whether a snapshot of `table`, the pipeline's outbox, was taken, and whether a
    /// snapshot is needed.
    ///
    /// # Errors
    /// Returns an error if a query fails.
    pub(crate) async fn snapshot_history(
        &self,
        target: &Target,
        table: &TableName,
    ) -> Result<SnapshotHistory, CatalogError> {
        let record = self.snapshot_record(target).await?;
        if record == SnapshotRecord::Done {
            return Ok(SnapshotHistory {
                record,
                has_streamed: true,
                rows: Rows::None,
            });
        }
        let has_streamed = self.has_streamed(target).await?;
        let rows = match record {
            // No copy was started before streaming from the slot began. Therefore, no copy is
            // needed, and the number of rows does not matter.
            SnapshotRecord::NoJournal | SnapshotRecord::Nothing | SnapshotRecord::Due { .. }
                if has_streamed =>
            {
                Rows::None
            }
            // If the journal does not exist, neither does the function that must examine the table
            // before its rows are read. Therefore, check only whether the table has any storage.
            SnapshotRecord::NoJournal if self.has_storage(table).await? => Rows::About(0),
            SnapshotRecord::NoJournal => Rows::None,
            _ => self.rows(table).await?,
        };
        Ok(SnapshotHistory {
            record,
            has_streamed,
            rows,
        })
    }

    /// Returns whether the slot has been read, according to the server's statistics or
    /// `walpost.slot_state`. A crash of the server deletes the statistics but not the table.
    pub(super) async fn has_streamed(&self, target: &Target) -> Result<bool, CatalogError> {
        let sent = self
            .client()
            .query_opt(
                "SELECT total_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = $1",
                &[&target.slot],
            )
            .await?;
        let has_sent: Option<bool> = sent.map(|row| row.try_get(0)).transpose()?.flatten();
        // The query does not compare the timeline, because the rows on a promoted standby were
        // written on its former primary. If Walpost failed during startup, the server may have sent
        // data that Walpost did not deliver. In this case, the slot is still at the position at
        // which `walpost init` created it, and is treated as not read.
        let select = format!(
            "SELECT begun, created_lsn = (SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = {slot}) \
             AS is_untouched FROM walpost.slot_state WHERE slot = {slot} AND version = {} \
             AND system_id = {SYSTEM_ID} \
             AND database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())",
            slot_state::VERSION,
            slot = text_literal(&target.slot),
        );
        let found = self.run_on_own_table(OwnTable::SlotState, target, "", &select);
        let rows = match found.await {
            // invalid_schema_name, undefined_table, insufficient_privilege
            Err(CatalogError::Server(error))
                if matches!(&*error.code, "3F000" | "42P01" | "42501") =>
            {
                Vec::new()
            }
            rows => rows?,
        };
        let is_true = |column| rows.first().and_then(|row| row.get(column)) == Some("t");
        Ok(is_true("begun") || has_sent == Some(true) && !is_true("is_untouched"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(action: Action, state: &str, to: u64) -> Written {
        Written {
            id: 1,
            at: String::new(),
            action,
            from: None,
            to: Some(Lsn(to)),
            by_role: String::new(),
            detail: serde_json::json!({ "state": state }),
        }
    }

    #[test]
    fn tracks_the_snapshot_of_each_table_separately() {
        let entry_of = |table: Option<&str>, state, to| {
            let mut entry = entry(Action::Snapshot, state, to);
            entry.detail["table"] = table.into();
            entry
        };
        let (begun, done) = (SnapshotRecord::BEGUN, SnapshotRecord::DONE);
        let record = |entries: &[Written], table: &str| {
            let snapshots = TableSnapshot::by_table(entries.to_vec());
            let table: TableName = table.parse().expect("a table");
            SnapshotRecord::of_table(&snapshots, Some(&table))
        };
        let two = [
            entry_of(Some("public.a"), begun, 7),
            entry_of(Some("public.b"), done, 8),
        ];
        assert_eq!(record(&two, "public.a"), SnapshotRecord::Begun(Lsn(7)));
        assert_eq!(record(&two, "public.b"), SnapshotRecord::Done);
        assert_eq!(record(&two, "public.c"), SnapshotRecord::Nothing);
        // A journal entry that names no table applies to every table.
        let one = [
            entry_of(Some("public.a"), begun, 7),
            entry_of(None, done, 7),
        ];
        assert_eq!(record(&one, "public.a"), SnapshotRecord::Done);
        let one = [
            entry_of(None, begun, 7),
            entry_of(Some("public.a"), done, 7),
        ];
        assert_eq!(record(&one, "public.a"), SnapshotRecord::Done);
        assert_eq!(record(&one, "public.b"), SnapshotRecord::Begun(Lsn(7)));
    }

    #[test]
    fn snapshot_is_unfinished_until_its_position_is_confirmed() {
        let begun = SnapshotRecord::Begun(Lsn(7));
        assert!(begun.is_open(Lsn(6)));
        assert!(!begun.is_open(Lsn(7)));
        for record in [
            SnapshotRecord::Done,
            SnapshotRecord::Nothing,
            SnapshotRecord::NoJournal,
            SnapshotRecord::Due {
                slot_at: Lsn(7),
                relation: 1,
            },
        ] {
            assert!(!record.is_open(Lsn(6)));
        }
    }

    #[test]
    fn uses_the_last_snapshot_entry_in_the_journal_unless_the_snapshot_is_done() {
        let begun = entry(Action::Snapshot, SnapshotRecord::BEGUN, 7);
        let done = entry(Action::Snapshot, SnapshotRecord::DONE, 7);
        let skip = entry(Action::Skip, "", 9);
        assert_eq!(SnapshotRecord::from_entries(&[]), SnapshotRecord::Nothing);
        assert_eq!(
            SnapshotRecord::from_entries(std::slice::from_ref(&skip)),
            SnapshotRecord::Nothing
        );
        assert_eq!(
            SnapshotRecord::from_entries(std::slice::from_ref(&begun)),
            SnapshotRecord::Begun(Lsn(7))
        );
        assert_eq!(
            SnapshotRecord::from_entries(&[begun.clone(), skip]),
            SnapshotRecord::Begun(Lsn(7))
        );
        let again = entry(Action::Snapshot, SnapshotRecord::BEGUN, 8);
        assert_eq!(
            SnapshotRecord::from_entries(&[begun.clone(), again]),
            SnapshotRecord::Begun(Lsn(8))
        );
        assert_eq!(
            SnapshotRecord::from_entries(&[begun.clone(), done.clone()]),
            SnapshotRecord::Done
        );
        assert_eq!(
            SnapshotRecord::from_entries(&[done, begun]),
            SnapshotRecord::Done
        );
    }

    #[test]
    fn copy_of_existing_rows_is_due_until_it_starts() {
        let due_at = |to| {
            let mut due = entry(Action::Snapshot, SnapshotRecord::DUE, to);
            due.detail["relation"] = "16384".into();
            due
        };
        let begun = entry(Action::Snapshot, SnapshotRecord::BEGUN, 9);
        let done = entry(Action::Snapshot, SnapshotRecord::DONE, 9);
        let due = |slot_at| SnapshotRecord::Due {
            slot_at: Lsn(slot_at),
            relation: 16384,
        };
        assert_eq!(SnapshotRecord::from_entries(&[due_at(7)]), due(7));
        assert_eq!(
            SnapshotRecord::from_entries(&[due_at(7), due_at(8)]),
            due(8)
        );
        for entries in [[due_at(7), begun.clone()], [begun, due_at(9)]] {
            assert_eq!(
                SnapshotRecord::from_entries(&entries),
                SnapshotRecord::Begun(Lsn(9))
            );
        }
        for entries in [[due_at(7), done.clone()], [done, due_at(9)]] {
            assert_eq!(SnapshotRecord::from_entries(&entries), SnapshotRecord::Done);
        }
    }
}
