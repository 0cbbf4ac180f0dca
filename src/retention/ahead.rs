//! Creates partitions ahead of time.

use std::fmt::Write as _;

use super::plan::{self, Partition, RetentionFacts, RetentionStep, TimeRange};
use super::{Failed, LOCK_TIMEOUT, Pass, RetentionError, STEPS_PER_TRANSACTION, bounded, is_busy};
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
        let mut missing = &steps[..];
        let mut count = STEPS_PER_TRANSACTION;
        while !missing.is_empty() {
            let (batch, rest) = missing.split_at(count.min(missing.len()));
            if let [step] = batch {
                self.perform_step(step).await?;
            } else if let Some(failed) = self.create_together(batch).await? {
                // A smaller batch blocks writers for less time, and may not include the partition
                // that can't be created.
                count = batch.len() / 2;
                if is_busy(&failed.code) {
                    tokio::time::sleep(LOCK_TIMEOUT / 2).await;
                }
                continue;
            }
            missing = rest;
            count = (2 * count).min(STEPS_PER_TRANSACTION);
        }
        Ok(())
    }

    /// Creates several partitions in one transaction. Returns the error if the transaction fails or
    /// takes too long.
    async fn create_together(
        &mut self,
        steps: &[RetentionStep],
    ) -> Result<Option<Failed>, CatalogError> {
        let (mut create, mut attach) = (Vec::new(), String::new());
        let mut done = Vec::with_capacity(steps.len());
        for step in steps {
            if let RetentionStep::Create(name, range) = step {
                create.push(self.create_sql(name));
                let statement = escape_literal(&self.attach_sql(name, *range));
                let _ = write!(attach, "EXECUTE {statement}; ");
                done.push(describe_created(name, *range));
            }
        }
        // ATTACH locks the default partition and thereby blocks sessions that write to it. Run all
        // ATTACH commands in one statement, because the timeout limits the duration of each
        // statement.
        let attach = escape_literal(&format!("BEGIN {attach}END"));
        let sql = format!("{}; DO {attach}", create.join("; "));
        let failed = self.attempt_once(&bounded(&sql)).await?;
        if failed.is_none() {
            self.commit().await?;
            self.report.done.extend(done);
        }
        Ok(failed)
    }

    /// Returns the statements that create a partition. They use ATTACH, because CREATE TABLE ...
    /// PARTITION OF would block writers.
    pub(super) fn create_partition_sql(&self, name: &TableName, range: TimeRange) -> String {
        format!(
            "{}; {}",
            self.create_sql(name),
            self.attach_sql(name, range)
        )
    }

    fn create_sql(&self, name: &TableName) -> String {
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

    fn attach_sql(&self, name: &TableName, range: TimeRange) -> String {
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
