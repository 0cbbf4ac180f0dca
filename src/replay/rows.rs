//! Reads the rows of a replay. The table is locked while each statement is composed.

use super::{ReplayError, ReplayPlan, key_values};
use crate::postgres::catalog::copy::{Query, RowReader};
use crate::postgres::catalog::{CatalogError, CreatedAt, LockedTable, RowOrder, Statement};

impl ReplayPlan<'_> {
    /// Returns the kind of the statement that reads the rows to send.
    fn statement(&self) -> Statement {
        let selected = self.planned.selected();
        selected.map_or(Statement::Compare, |selected| selected.statement())
    }

    /// Locks the table for a statement that reads the rows.
    async fn lock(&self) -> Result<LockedTable, CatalogError> {
        self.reader
            .lock_table(&self.version, self.statement())
            .await
    }

    /// Returns the SQL condition for the rows of the replay.
    fn rows_condition(&self, order: &RowOrder<'_>) -> String {
        match &self.planned.selected() {
            Some(selected) if self.recorded_rows.is_empty() => selected.sql(order),
            _ => self.recorded_rows.clone(),
        }
    }

    /// Returns the SQL condition for the rows that remain to be sent.
    fn condition(&self, order: &RowOrder<'_>) -> String {
        let mut all = vec![self.rows_condition(order)];
        all.retain(|condition| !condition.is_empty());
        // A resumed replay reads a later snapshot than the original process did, so stop at the row
        // that was the last one when the replay was started.
        if let (Some(until), true) = (&self.planned.until, self.is_resumed) {
            all.push(order.compared("<=", until));
        }
        if let Some(last_sent_key) = &self.last_sent_key {
            all.push(order.compared(">", last_sent_key));
        }
        all.join(" AND ")
    }

    /// Returns a ` WHERE` clause for the rows that remain to be sent.
    fn filter(&self, order: &RowOrder<'_>) -> String {
        match self.condition(order).as_str() {
            "" => String::new(),
            condition => format!(" WHERE {condition}"),
        }
    }

    pub(super) async fn count(&mut self) -> Result<(), ReplayError> {
        let locked = self.lock().await?;
        let order = locked.row_order(CreatedAt::First).await?;
        let (described, filter) = (self.rows_condition(&order), self.filter(&order));
        let selected = self.planned.selected();
        let flag = selected.map_or("row selection", |selected| selected.flag());
        let row = self
            .reader
            .select_first(locked, "count(*)", &filter)
            .await
            .map_err(|error| ReplayError::from_statement_error(flag, error))?;
        let count = row.as_ref().and_then(|row| row.get(0)?.parse().ok());
        self.rows = count.ok_or_else(|| CatalogError::Unexpected("count(*)".to_owned()))?;
        self.described = described;
        Ok(())
    }

    /// Returns the key of the last row.
    pub(super) async fn last_key(&self) -> Result<Option<Vec<String>>, ReplayError> {
        let locked = self.lock().await?;
        let order = locked.row_order(CreatedAt::First).await?;
        let rest = format!(
            "{} ORDER BY {} LIMIT 1",
            self.filter(&order),
            order.sql(" DESC")
        );
        let columns = order.selected();
        let row = self.reader.select_first(locked, &columns, &rest).await?;
        Ok(row.map(|row| key_values(&row)).transpose()?)
    }

    /// Starts reading the rows that remain to be sent.
    pub(super) async fn copy(&self) -> Result<RowReader, ReplayError> {
        let locked = self.lock().await?;
        let order = locked.row_order(CreatedAt::First).await?;
        let query = Query {
            columns: &self.columns,
            mapping: &self.mapping,
            order: &order,
            condition: &self.condition(&order),
            row_bytes_max: self.settings.row_bytes_max,
        };
        let statement = query.statement(&locked);
        Ok(self.reader.copy(locked, statement).await?)
    }
}
