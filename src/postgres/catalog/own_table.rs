//! Statements about Walpost's own tables, which are examined each time they are used: an object that another role adds to one of
//! them would run as us.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow};

use super::Catalog;
use crate::postgres::sql_file;
use crate::postgres::target::Target;

/// How long to wait for a lock on one of them: until the statement is done, nothing is confirmed.
const LOCK_TIMEOUT: &str = "2s";

/// A table that `sql/journal.sql` creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnTable {
    Journal,
    SlotState,
}

impl OwnTable {
    /// What `sql/examine.sql` calls its examination.
    fn word(self) -> &'static str {
        match self {
            Self::Journal => "journal",
            Self::SlotState => "slot_state",
        }
    }
}

impl Catalog {
    /// Runs a statement about one of Walpost's tables after `sql/examine.sql` has accepted the table. Parsing the statement locks
    /// the table, so that it cannot change in between, and runs nothing of it. `settings` are statements that precede it, such as
    /// SET LOCAL. All of it is one message and one transaction: cancel safe.
    pub(super) async fn run_on_own_table(
        &self,
        table: OwnTable,
        target: &Target,
        settings: &str,
        statement: &str,
    ) -> Result<Vec<SimpleQueryRow>, tokio_postgres::Error> {
        // A name that an error left prepared must not be in the way of the next statement.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("walpost_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let sql = format!(
            "SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'; {settings}PREPARE {name} AS {statement};\n{}EXECUTE {name}; DEALLOCATE {name}",
            sql_file::examine(target, table.word())
        );
        let messages = match self.client().simple_query(&sql).await {
            Ok(messages) => messages,
            Err(error) => {
                // It is not there if preparing it is what failed.
                let deallocate = format!("DEALLOCATE {name}");
                let _ = self.client().batch_execute(&deallocate).await;
                return Err(error);
            }
        };
        let rows = messages.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        Ok(rows.collect())
    }
}
