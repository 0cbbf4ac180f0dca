//! Queries the state of a slot while its pipeline streams. The query runs every few seconds.

use tokio_postgres::Row;

use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;
use crate::model::vitals::{OpenTransaction, PartitionsEnd, SlotVitals, TransactionOwner, Vitals};
use crate::postgres::target::Target;

/// Returns the SQL query. The parameter `$1` is the slot; `$2` and `$3` are the table's schema and
/// name.
fn query() -> String {
    // Only values in ISO format are converted to timestamps. An attempt to convert any other value
    // could make the whole query fail.
    let time = |side: &str| {
        let text = format!(
            "substring(pg_get_expr(k.relpartbound, 0) FROM '{side} \\(''(\\d{{4,6}}-\\d\\d-\\d\\d[0-9 :.+-]*)''\\)')"
        );
        format!(
            "CASE a.atttypid WHEN 'timestamptz'::regtype THEN {text}::timestamptz \
             ELSE {text}::timestamp AT TIME ZONE 'UTC' END"
        )
    };
    format!(
        "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE \
         pg_current_wal_lsn() END), s.slot_name IS NOT NULL, coalesce(s.active, false), \
         s.confirmed_flush_lsn, s.restart_lsn, s.wal_status, s.safe_wal_size, \
         age(s.catalog_xmin)::int8, \
         (WITH RECURSIVE tree AS (SELECT c.oid, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = $2 AND c.relname = $3 AND c.relkind = 'p' UNION ALL \
         SELECT k.oid, k.relkind FROM tree t JOIN pg_inherits i ON i.inhparent = t.oid JOIN pg_class k ON k.oid = i.inhrelid \
         WHERE t.relkind = 'p') SELECT count(*) FROM tree WHERE relkind <> 'p'), \
         EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = $2 AND c.relname = $3 AND c.relkind = 'p'), \
         o.xid::text, age(o.xid)::int8, o.pid, o.gid, o.role, o.database, \
         (extract(epoch FROM o.began) * 1000000)::int8, \
         CASE WHEN p.all_end THEN (extract(epoch FROM p.upto) * 1000000)::int8 END, p.ahead, p.has_default, \
         EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = 'walpost' AND c.relname = 'journal' AND has_schema_privilege(n.oid, 'USAGE') \
         AND has_table_privilege(c.oid, 'SELECT')) \
         FROM (VALUES (1)) AS one LEFT JOIN pg_replication_slots s ON s.slot_name = $1 \
         LEFT JOIN (SELECT * FROM ( \
         SELECT backend_xid AS xid, pid, NULL::text AS gid, usename::text AS role, datname::text AS database, \
         xact_start AS began FROM pg_stat_activity WHERE backend_xid IS NOT NULL UNION ALL \
         SELECT transaction, NULL, gid, owner::text, database::text, prepared FROM pg_prepared_xacts) AS open \
         ORDER BY age(xid) DESC LIMIT 1) AS o ON true \
         LEFT JOIN (SELECT bool_and(upper IS NOT NULL) AS all_end, max(upper) AS upto, \
         count(*) FILTER (WHERE lower > now()) AS ahead, bool_or(has_default) AS has_default FROM ( \
         SELECT {} AS lower, {} AS upper, t.partdefid <> 0 AS has_default \
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         JOIN pg_partitioned_table t ON t.partrelid = c.oid AND t.partstrat = 'r' AND t.partnatts = 1 \
         JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = t.partattrs[0] \
         AND a.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype) \
         JOIN pg_inherits i ON i.inhparent = c.oid AND NOT i.inhdetachpending AND i.inhrelid <> t.partdefid \
         JOIN pg_class k ON k.oid = i.inhrelid WHERE n.nspname = $2 AND c.relname = $3) AS bounds) AS p ON true",
        time("FROM"),
        time("TO")
    )
}

impl Catalog {
    /// Queries the state of `target`'s slot, and the dropped slots of `pipeline`.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn vitals(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<Vitals, CatalogError> {
        let (schema, name) = match target.outbox.table() {
            Some(table) => (table.schema.as_str(), table.name.as_str()),
            None => ("", ""),
        };
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
            [&target.slot, &schema, &name];
        let row = self.client().query_one(&query(), &parameters).await?;
        let slot = SlotVitals {
            active: row.try_get(2)?,
            confirmed: row.try_get(3)?,
            restart: row.try_get(4)?,
            wal_status: row.try_get(5)?,
            safe_wal_bytes: row.try_get(6)?,
            catalog_xmin_age: row.try_get(7)?,
        };
        let partitions: i64 = row.try_get(8)?;
        let is_partitioned: bool = row.try_get(9)?;
        let has_journal: bool = row.try_get(20)?;
        let dropped_slots = match has_journal && !target.outbox.is_messages() {
            // If the query for dropped slots fails, the other results are still returned.
            true => self.dropped_slots(pipeline, target).await.ok(),
            false => None,
        };
        let set_aside = match has_journal && target.outbox.is_several() {
            true => self.set_aside(target).await.ok().map(|mut entries| {
                entries.retain(|entry| entry.until.is_none());
                entries
            }),
            false => None,
        };
        Ok(Vitals {
            dropped_slots,
            set_aside,
            end: row.try_get::<_, Option<Lsn>>(0)?.unwrap_or_default(),
            slot: row.try_get::<_, bool>(1)?.then_some(slot),
            partitions: is_partitioned.then(|| u64::try_from(partitions).unwrap_or_default()),
            partitions_end: partitions_end(&row)?,
            oldest_open: oldest_open(&row)?,
        })
    }
}

fn partitions_end(row: &Row) -> Result<Option<PartitionsEnd>, CatalogError> {
    let Some(at) = row.try_get::<_, Option<i64>>(17)? else {
        return Ok(None);
    };
    let ahead: i64 = row.try_get(18)?;
    Ok(Some(PartitionsEnd {
        at_micros: u64::try_from(at).unwrap_or_default(),
        ahead: u64::try_from(ahead).unwrap_or_default(),
        has_default: row.try_get(19)?,
    }))
}

fn oldest_open(row: &Row) -> Result<Option<OpenTransaction>, CatalogError> {
    let Some(xid) = row.try_get::<_, Option<String>>(10)? else {
        return Ok(None);
    };
    let (pid, name): (Option<i32>, Option<String>) = (row.try_get(12)?, row.try_get(13)?);
    let began: Option<i64> = row.try_get(16)?;
    Ok(Some(OpenTransaction {
        xid,
        age: row.try_get(11)?,
        whose: match name {
            Some(name) => TransactionOwner::Prepared(name),
            None => TransactionOwner::Session(pid.unwrap_or_default()),
        },
        role: row.try_get(14)?,
        database: row.try_get(15)?,
        began_micros: began.and_then(|began| u64::try_from(began).ok()),
    }))
}
