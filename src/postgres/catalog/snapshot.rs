//! Reads the rows of a table as of one snapshot, in no particular order. To read complete events in
//! order, use [`copy`].

use super::copy;
use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;

/// A transaction that reads the database as it was when the transaction started.
pub(crate) struct Snapshot<'c> {
    catalog: &'c Catalog,
    /// Transactions that committed at or after this position are not visible.
    pub after: Lsn,
    /// Transactions whose commit record precedes this position are visible, unless their commit was
    /// still in progress when the snapshot was taken.
    pub before: Lsn,
}

impl<'c> Snapshot<'c> {
    /// Starts the transaction and takes the snapshot.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn begin(catalog: &'c Catalog) -> Result<Self, CatalogError> {
        let client = catalog.client();
        copy::prepare(client).await?;
        let before = query_wal_end(catalog).await?;
        client
            .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            .await?;
        // This is the transaction's first statement, so the server takes the snapshot before it
        // evaluates the statement's expressions.
        let after = query_wal_end(catalog).await?;
        Ok(Self {
            catalog,
            after,
            before,
        })
    }

    /// Ends the transaction.
    ///
    /// # Errors
    /// Returns an error if the connection is lost.
    pub(crate) async fn end(self) -> Result<(), CatalogError> {
        Ok(self.catalog.client().batch_execute("COMMIT").await?)
    }
}

/// Returns the end of WAL. Every transaction that is currently visible was committed before this
/// position.
async fn query_wal_end(catalog: &Catalog) -> Result<Lsn, CatalogError> {
    let row = catalog
        .client()
        .query_one(
            "SELECT pg_current_wal_insert_lsn(), current_setting('wal_block_size')::int8, \
             pg_size_bytes(current_setting('wal_segment_size'))",
            &[],
        )
        .await?;
    let (page, segment): (i64, i64) = (row.try_get(1)?, row.try_get(2)?);
    Ok(end_of_record(
        row.try_get(0)?,
        page.unsigned_abs(),
        segment.unsigned_abs(),
    ))
}

/// Returns the end of the last WAL record, given the start of the next record. The two differ if
/// the last record ended at a page boundary, because the next record then starts after a page
/// header. A slot can be confirmed up to this end, but not up to the start of a future record.
fn end_of_record(next: Lsn, page: u64, segment: u64) -> Lsn {
    const SHORT_HEADER: u64 = 24;
    const LONG_HEADER: u64 = 40;
    let offset_in = |start: u64| next.0.checked_rem(start);
    if offset_in(segment) == Some(LONG_HEADER) {
        Lsn(next.0 - LONG_HEADER)
    } else if offset_in(page) == Some(SHORT_HEADER) {
        Lsn(next.0 - SHORT_HEADER)
    } else {
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_a_wal_record_excludes_the_header_of_the_next_page() {
        const PAGE: u64 = 8192;
        const SEGMENT: u64 = 16 << 20;
        for (next, end) in [
            (SEGMENT + PAGE + 24, SEGMENT + PAGE),
            (SEGMENT + 40, SEGMENT),
            (SEGMENT + PAGE, SEGMENT + PAGE),
            // The last record began on the previous page and ends 16 bytes after the page header.
            (SEGMENT + PAGE + 40, SEGMENT + PAGE + 40),
        ] {
            assert_eq!(end_of_record(Lsn(next), PAGE, SEGMENT), Lsn(end));
        }
    }
}
