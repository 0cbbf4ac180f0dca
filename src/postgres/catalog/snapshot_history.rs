//! What tells whether rows that are older than a slot were delivered.

use super::journal::{Action, Written};
use super::table::Rows;
use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// What is known of a pipeline's past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotHistory {
    /// What the journal says of it.
    pub record: SnapshotRecord,
    /// The slot has sent transactions, as far as the server's statistics reach back.
    pub has_streamed: bool,
    /// The rows that are in the table.
    pub rows: Rows,
}

/// What the journal says of the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotRecord {
    /// There is no journal.
    NoJournal,
    Nothing,
    /// One was begun that has what was committed before this.
    Begun(Lsn),
    /// There is nothing more to do.
    Done,
}

impl SnapshotRecord {
    /// The key in an entry's detail.
    pub(crate) const STATE: &'static str = "state";
    /// Its value in [`SnapshotRecord::Begun`].
    pub(crate) const BEGUN: &'static str = "begun";
    /// Its value in [`SnapshotRecord::Done`].
    pub(crate) const DONE: &'static str = "done";

    /// Of entries in the order in which they were written. What is done stays done: an instance that was
    /// frozen may write later that it begins.
    #[must_use]
    pub(crate) fn of(entries: &[Written]) -> Self {
        let mut record = Self::Nothing;
        let of_snapshot = |entry: &&Written| entry.action == Action::Snapshot;
        for entry in entries.iter().filter(of_snapshot) {
            record = match (entry.detail[Self::STATE].as_str(), entry.to) {
                (Some(Self::BEGUN), Some(snapshot_lsn)) => Self::Begun(snapshot_lsn),
                _ => return Self::Done,
            };
        }
        record
    }
}

impl Catalog {
    /// What the journal says of the snapshot.
    ///
    /// # Errors
    /// The server can't be asked, or lets us not read the journal.
    pub(crate) async fn snapshot_record(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<SnapshotRecord, CatalogError> {
        match self.journal(pipeline, target).await {
            Ok(entries) => Ok(SnapshotRecord::of(&entries)),
            Err(CatalogError::NoJournal) => Ok(SnapshotRecord::NoJournal),
            Err(error) => Err(error),
        }
    }

    /// What is known of the past of a pipeline whose outbox is `table`.
    ///
    /// # Errors
    /// The server can't be asked.
    pub(crate) async fn snapshot_history(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
    ) -> Result<SnapshotHistory, CatalogError> {
        let record = self.snapshot_record(pipeline, target).await?;
        if record == SnapshotRecord::Done {
            return Ok(SnapshotHistory {
                record,
                has_streamed: true,
                rows: Rows::None,
            });
        }
        let has_streamed = self.has_streamed(&target.slot).await?;
        let rows = match record {
            // How many rows there are makes no difference.
            SnapshotRecord::NoJournal | SnapshotRecord::Nothing if has_streamed => Rows::None,
            // Without a journal there is no function that examines the table either, so no row is read.
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

    /// The slot has sent transactions, as far as the server's statistics reach back.
    pub(in crate::postgres) async fn has_streamed(&self, slot: &str) -> Result<bool, CatalogError> {
        let found = self
            .client()
            .query_opt(
                "SELECT total_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = $1",
                &[&slot],
            )
            .await?;
        let found: Option<bool> = found.map(|row| row.try_get(0)).transpose()?.flatten();
        Ok(found.unwrap_or(false))
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
    fn the_last_entry_about_a_snapshot_counts_until_one_says_that_it_is_done() {
        let begun = entry(Action::Snapshot, SnapshotRecord::BEGUN, 7);
        let done = entry(Action::Snapshot, SnapshotRecord::DONE, 7);
        let skip = entry(Action::Skip, "", 9);
        assert_eq!(SnapshotRecord::of(&[]), SnapshotRecord::Nothing);
        assert_eq!(
            SnapshotRecord::of(std::slice::from_ref(&skip)),
            SnapshotRecord::Nothing
        );
        assert_eq!(
            SnapshotRecord::of(std::slice::from_ref(&begun)),
            SnapshotRecord::Begun(Lsn(7))
        );
        assert_eq!(
            SnapshotRecord::of(&[begun.clone(), skip]),
            SnapshotRecord::Begun(Lsn(7))
        );
        let again = entry(Action::Snapshot, SnapshotRecord::BEGUN, 8);
        assert_eq!(
            SnapshotRecord::of(&[begun.clone(), again]),
            SnapshotRecord::Begun(Lsn(8))
        );
        assert_eq!(
            SnapshotRecord::of(&[begun.clone(), done.clone()]),
            SnapshotRecord::Done
        );
        assert_eq!(SnapshotRecord::of(&[done, begun]), SnapshotRecord::Done);
    }
}
