//! Records which partitions the initial copy of a table is expected to read, and detects partitions
//! that were detached before they were copied.
//!
//! If a partition is detached before its existing rows are copied, neither the copy nor the stream
//! contains these rows, and the catalog no longer shows that the partition belonged to the table.
//! Therefore, a journal entry about a copy lists the partitions that the table had when the entry
//! was written.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tokio_postgres::Row;
use tracing::warn;

use super::drop_slot::{DETACHED_PARTITIONS, PARTITIONS};
use super::journal::{Action, Entry, Written};
use super::{Catalog, CatalogError};
use crate::model::dropped_slot::replay_command;
use crate::model::lsn::Lsn;
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// The key under which the `detail` of a journal entry stores the table's OID, as a string.
const RELATION: &str = "relation";
/// The key under which the `detail` of a journal entry stores the system identifier of the cluster
/// that assigned the OIDs.
const SYSTEM_ID: &str = "system_id";

/// The reason recorded in the journal if events of detached partitions may be missing.
const REASON: &str = "partitions detached before they were copied";

/// A query for the OIDs of the table with the quoted name `$1`, and of all its partitions and child
/// tables, at any level. Omits partitions that are being detached concurrently, because the copy
/// may omit them as well.
const TABLE_AND_DESCENDANTS: &str = "WITH RECURSIVE descendant (oid) AS ( \
     SELECT inhrelid FROM pg_inherits WHERE inhparent = $1::text::regclass AND NOT inhdetachpending \
     UNION SELECT i.inhrelid FROM pg_inherits i JOIN descendant d ON i.inhparent = d.oid WHERE NOT i.inhdetachpending) \
     SELECT $1::text::regclass::oid, ARRAY(SELECT oid FROM descendant ORDER BY oid)";

/// A table that is copied, its partitions, and the cluster that contains them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyScope {
    system_id: String,
    relation: u32,
    partitions: Vec<u32>,
}

impl CopyScope {
    /// Adds the scope (the cluster, the table and its partitions) to the `detail` of a journal
    /// entry.
    pub(crate) fn add_to(&self, detail: &mut Value) {
        let oid = u32::to_string;
        let partitions: Vec<_> = self.partitions.iter().map(oid).collect();
        detail[SYSTEM_ID] = json!(self.system_id);
        detail[RELATION] = json!(oid(&self.relation));
        detail[PARTITIONS] = json!(partitions);
    }

    /// Returns the partitions that are listed in `entries` but that the table no longer has. Omits
    /// a partition if a later entry already records that its events are missing. `entries` must be
    /// in the order in which they were written.
    fn missing(&self, entries: &[Written]) -> Vec<u32> {
        let mut missing = BTreeSet::new();
        let about_table = entries.iter().filter(|entry| {
            entry.detail[SYSTEM_ID] == *self.system_id
                && entry.detail[RELATION] == *self.relation.to_string()
        });
        for entry in about_table {
            let listed = listed_partitions(entry);
            match entry.action {
                Action::DropSlot => listed.for_each(|oid| {
                    missing.remove(&oid);
                }),
                _ => missing.extend(listed),
            }
        }
        missing.retain(|oid| !self.partitions.contains(oid));
        missing.into_iter().collect()
    }
}

/// Returns the OIDs of the partitions that a journal entry lists.
fn listed_partitions(entry: &Written) -> impl Iterator<Item = u32> {
    let oids = entry.detail[PARTITIONS].as_array().into_iter().flatten();
    oids.filter_map(|oid| oid.as_str()?.parse().ok())
}

impl Catalog {
    /// Returns the table and the partitions that a copy of `table` would read now.
    ///
    /// # Errors
    /// Returns an error if the query fails, or if the table does not exist.
    pub(crate) async fn copy_scope(&self, table: &TableName) -> Result<CopyScope, CatalogError> {
        let client = self.client();
        let found = client
            .query_one(TABLE_AND_DESCENDANTS, &[&table.quoted()])
            .await?;
        Ok(CopyScope {
            system_id: self.cluster().await?,
            relation: found.try_get(0)?,
            partitions: found.try_get(1)?,
        })
    }

    /// Records in the journal which partitions of `table` were detached before their rows were
    /// copied, and logs a warning. Each partition is recorded only once. `confirmed` is the slot's
    /// position.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if the role is not allowed to read or write the
    /// journal.
    pub(crate) async fn record_uncopied_partitions(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
        confirmed: Lsn,
    ) -> Result<(), CatalogError> {
        let scope = self.copy_scope(table).await?;
        let missing = scope.missing(&self.copy_entries(target, table).await?);
        if missing.is_empty() {
            return Ok(());
        }
        let (oids, names) = self.existing_tables(&missing).await?;
        if oids.is_empty() {
            return Ok(());
        }
        let scope = CopyScope {
            partitions: oids,
            ..scope
        };
        let mut detail = json!({
            "reason": REASON,
            "table": table.to_string(),
            "several": false,
            DETACHED_PARTITIONS: true,
        });
        scope.add_to(&mut detail);
        let entry = Entry {
            pipeline,
            target,
            action: Action::DropSlot,
            from: Some(Lsn::ZERO),
            to: Some(confirmed),
            detail,
        };
        let id = self.write_journal(&entry).await?;
        let (slot, partitions) = (&target.slot, names.join(", "));
        warn!(
            pipeline,
            slot,
            journal = id,
            partitions,
            "partitions were detached from table {table} before their rows were copied: their events may be missing from Kafka. \
             Attach the partitions, and send the events: {}",
            replay_command(&target.commands, None)
        );
        Ok(())
    }

    /// Returns the OIDs and qualified names of the tables that still exist. Omits dropped
    /// partitions, which have no rows left to send.
    async fn existing_tables(&self, oids: &[u32]) -> Result<(Vec<u32>, Vec<String>), CatalogError> {
        let sql = "SELECT c.oid, c.oid::regclass::text FROM pg_class c WHERE c.oid = ANY ($1) ORDER BY c.oid";
        let rows = self.client().query(sql, &[&oids]).await?;
        let table = |row: &Row| -> Result<(u32, String), CatalogError> {
            Ok((row.try_get(0)?, row.try_get(1)?))
        };
        rows.iter().map(table).collect()
    }

    /// Returns the journal entries that list partitions of the table. Such an entry records that a
    /// copy was started, or that partitions were detached before a copy read them.
    async fn copy_entries(
        &self,
        target: &Target,
        table: &TableName,
    ) -> Result<Vec<Written>, CatalogError> {
        let condition = format!(
            "j.slot = {} AND j.detail ->> 'table'::text = {} AND j.detail ? '{PARTITIONS}'::text AND j.action IN ({}, {})",
            text_literal(&target.slot),
            text_literal(&table.to_string()),
            text_literal(Action::Snapshot.name()),
            text_literal(Action::DropSlot.name()),
        );
        self.entries(target, &condition).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(action: Action, partitions: &[u32]) -> Written {
        let mut detail = json!({});
        scope(partitions).add_to(&mut detail);
        Written {
            id: 1,
            at: String::new(),
            action,
            from: None,
            to: None,
            by_role: String::new(),
            detail,
        }
    }

    fn scope(partitions: &[u32]) -> CopyScope {
        CopyScope {
            system_id: "7".to_owned(),
            relation: 16384,
            partitions: partitions.to_vec(),
        }
    }

    #[test]
    fn finds_partitions_detached_since_a_journal_entry_was_written() {
        let entries = [
            entry(Action::Snapshot, &[1, 2]),
            entry(Action::Snapshot, &[2, 3]),
        ];
        assert_eq!(scope(&[2, 4]).missing(&entries), [1, 3]);
        assert!(scope(&[1, 2, 3]).missing(&entries).is_empty());
    }

    #[test]
    fn records_a_partition_again_only_if_it_was_reattached() {
        let (begun, recorded) = (
            entry(Action::Snapshot, &[1, 2]),
            entry(Action::DropSlot, &[1]),
        );
        let entries = [begun.clone(), recorded.clone()];
        assert_eq!(scope(&[]).missing(&entries), [2]);
        let entries = [begun.clone(), recorded, begun];
        assert_eq!(scope(&[]).missing(&entries), [1, 2]);
    }

    #[test]
    fn ignores_journal_entries_for_other_clusters_and_tables() {
        let begun = [entry(Action::Snapshot, &[1])];
        let other_cluster = CopyScope {
            system_id: "8".to_owned(),
            ..scope(&[])
        };
        let other_table = CopyScope {
            relation: 16385,
            ..scope(&[])
        };
        assert!(other_cluster.missing(&begun).is_empty());
        assert!(other_table.missing(&begun).is_empty());
    }
}
