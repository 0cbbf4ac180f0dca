//! Creates partitions ahead of time.

use super::plan::{self, Partition, RetentionFacts, TimeRange};
use super::{Pass, RetentionError};
use crate::postgres::catalog::CatalogError;
use crate::postgres::sql::{escape_identifier, escape_literal};
use crate::postgres::table::TableName;

impl Pass<'_> {
    /// Creates the missing partitions.
    pub(super) async fn create_partitions(
        &mut self,
        found: &RetentionFacts,
        ahead: u32,
        dry_run: bool,
    ) -> Result<(), CatalogError> {
        let ranges = found.partitions.iter().any(Partition::is_range);
        if !ranges {
            let table = self.outbox.name.clone();
            self.report.problems.push(RetentionError::NoModel(table));
        }
        let steps = plan::plan_missing(&self.outbox.name, found, ahead);
        if dry_run {
            let would = steps.iter().map(|step| format!("would {}", step.intent()));
            self.report.done.extend(would);
            return Ok(());
        }
        let steps: Vec<_> = steps.iter().collect();
        self.perform_in_batches(&steps).await?;
        Ok(())
    }

    /// Returns a statement that creates the table for a partition, owned by the outbox's owner.
    /// The partition is created with ATTACH, because CREATE TABLE ... PARTITION OF would block
    /// writers.
    pub(super) fn create_sql(&self, name: &TableName) -> String {
        let (root, name) = (self.outbox.name.quoted(), name.quoted());
        let owner = match self.outbox.owner == self.outbox.user {
            true => String::new(),
            false => format!(
                "; ALTER TABLE {name} OWNER TO {}",
                escape_identifier(&self.outbox.owner)
            ),
        };
        format!(
            "CREATE TABLE {name} (LIKE {root} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED              INCLUDING STORAGE){owner}"
        )
    }

    pub(super) fn attach_sql(&self, name: &TableName, range: TimeRange) -> String {
        let (root, name) = (self.outbox.name.quoted(), name.quoted());
        let bound = |time: jiff::Timestamp| escape_literal(&time.to_string());
        let (from, to) = (bound(range.lower), bound(range.upper));
        format!("ALTER TABLE {root} ATTACH PARTITION {name} FOR VALUES FROM ({from}) TO ({to})")
    }
}

/// Describes a newly created partition for the report.
pub(super) fn describe_created(name: &TableName, range: TimeRange) -> String {
    format!("partition {name} created for {range}")
}
