//! Queries the data from which the maintenance of a table is planned.

use crate::postgres::sql::{Client, Row};
use jiff::Timestamp;

use super::RetentionError;
use super::mark::{Origin, end_of_comment};
use super::plan::{Bounds, Detached, Partition, RetentionFacts};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::{Catalog, CatalogError};
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// The properties of a table that a maintenance pass uses to compose statements. Once the table is
/// locked, Walpost queries these properties again and verifies that they have not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MaintainedTable {
    pub(crate) name: TableName,
    pub(crate) origin: Origin,
    /// How the table is partitioned, or `None` if it is not partitioned.
    pub(crate) partitioning: Option<Partitioning>,
    pub(crate) default: Option<TableName>,
    pub(crate) owner: String,
    pub(crate) owner_is_superuser: bool,
    /// The session's role.
    pub(crate) user: String,
    /// Whether the session's role is the table's owner or has the owner's privileges.
    pub(crate) has_owner_privileges: bool,
    pub(crate) may_create: bool,
    /// Whether the table has a `created_at` column, which determines the age of a row.
    pub(crate) has_time: bool,
}

/// How a table is partitioned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Partitioning {
    /// The table is range-partitioned by one column of a date or timestamp type.
    Time,
    /// The table is partitioned in any other way.
    Other,
}

/// Configures the session. Sets the time zone and date style in which times are returned, and a
/// lock timeout, so that other sessions don't queue for long behind a statement that waits for a
/// lock.
pub(crate) async fn prepare(client: &Client, lock_timeout: u128) -> Result<(), CatalogError> {
    let sql =
        format!("SET TimeZone = 'UTC'; SET DateStyle = ISO; SET lock_timeout = {lock_timeout}");
    Ok(client.batch_execute(&sql).await?)
}

/// Returns the properties of the table, or `None` if the table does not exist.
pub(crate) async fn query_maintained_table(
    client: &Client,
    table: &TableName,
) -> Result<Option<MaintainedTable>, CatalogError> {
    let found = client
        .query_opt(
            "SELECT c.oid, (SELECT system_identifier::text FROM pg_control_system()), p.partrelid IS NOT NULL, \
             p.partstrat = 'r' AND p.partnatts = 1 AND a.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, \
             'date'::regtype), d.relname::text, dn.nspname::text, pg_get_userbyid(c.relowner)::text, current_user::text, \
             pg_has_role(c.relowner, 'USAGE'), has_schema_privilege(n.oid, 'CREATE'), \
             (SELECT rolsuper FROM pg_roles r WHERE r.oid = c.relowner), \
             EXISTS (SELECT FROM pg_attribute t WHERE t.attrelid = c.oid AND t.attname = 'created_at' AND NOT t.attisdropped \
             AND t.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype)) \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid \
             LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0] \
             LEFT JOIN pg_class d ON d.oid = p.partdefid LEFT JOIN pg_namespace dn ON dn.oid = d.relnamespace \
             WHERE n.nspname = $1 AND c.relname = $2",
            &[&table.schema, &table.name],
        )
        .await?;
    let Some(row) = found else { return Ok(None) };
    let partitioning = match row.try_get(2)? {
        false => None,
        true if row.try_get::<_, Option<bool>>(3)? == Some(true) => Some(Partitioning::Time),
        true => Some(Partitioning::Other),
    };
    let default: Option<String> = row.try_get(4)?;
    let default_schema: Option<String> = row.try_get(5)?;
    Ok(Some(MaintainedTable {
        name: table.clone(),
        origin: Origin {
            table: row.try_get(0)?,
            cluster: row.try_get(1)?,
        },
        partitioning,
        default: default_schema
            .zip(default)
            .map(|(schema, name)| TableName { schema, name }),
        owner: row.try_get(6)?,
        user: row.try_get(7)?,
        has_owner_privileges: row.try_get(8)?,
        may_create: row.try_get(9)?,
        owner_is_superuser: row.try_get(10)?,
        has_time: row.try_get(11)?,
    }))
}

/// Claims the table until [`release`] is called or the session ends, so that no other session
/// maintains the table. Returns false if another session has claimed it.
pub(crate) async fn claim(client: &Client, table: &MaintainedTable) -> Result<bool, CatalogError> {
    lock(client, "pg_try_advisory_lock", table).await
}

/// Returns the error for a failed [`claim`]. Names the holder of the lock if the holder can't be
/// another Walpost process, because its role lacks the privileges of the table's owner.
pub(crate) async fn claim_error(
    catalog: &Catalog,
    table: &MaintainedTable,
) -> Result<RetentionError, CatalogError> {
    let is_foreign = "classid = x'77616c70'::int::oid AND objid = $1 AND objsubid = 2 \
        AND role IS DISTINCT FROM session_user AND NOT coalesce(pg_has_role((SELECT oid FROM pg_roles WHERE rolname = role), \
        (SELECT relowner FROM pg_class WHERE oid = $1), 'USAGE'), false)";
    let oid = &table.origin.table;
    let name = table.name.clone();
    Ok(
        match catalog.advisory_lock_holder(is_foreign, &[oid]).await? {
            Some(holder) => RetentionError::ClaimedByOther {
                table: name,
                holder,
            },
            None => RetentionError::Claimed(name),
        },
    )
}

/// Releases the advisory lock that [`claim`] acquired on the table.
pub(crate) async fn release(client: &Client, table: &MaintainedTable) -> Result<(), CatalogError> {
    lock(client, "pg_advisory_unlock", table).await?;
    Ok(())
}

async fn lock(
    client: &Client,
    function: &str,
    table: &MaintainedTable,
) -> Result<bool, CatalogError> {
    // The first key is "walp" in ASCII, to avoid conflicts with other applications' advisory locks.
    let row = client
        .query_one(
            &format!("SELECT {function}(x'77616c70'::int, $1::oid::int8::bit(32)::int)"),
            &[&table.origin.table],
        )
        .await?;
    Ok(row.try_get(0)?)
}

/// Returns an SQL expression that converts a time to microseconds since 1970-01-01 UTC, or to NULL
/// if the time is infinite.
fn micros(expression: &str) -> String {
    format!(
        "(extract(epoch FROM CASE WHEN isfinite({expression}) THEN {expression} END) * 1000000)::int8"
    )
}

fn timestamp(row: &Row, column: usize) -> Result<Option<Timestamp>, CatalogError> {
    let micros: Option<i64> = row.try_get(column)?;
    // PostgreSQL supports a larger range of times than Jiff. Treat times outside Jiff's range as
    // infinite.
    Ok(micros.and_then(|micros| Timestamp::from_microsecond(micros).ok()))
}

fn name(row: &Row, schema: usize, name: usize) -> Result<TableName, CatalogError> {
    Ok(TableName {
        schema: row.try_get(schema)?,
        name: row.try_get(name)?,
    })
}

/// Queries the data needed to plan the maintenance of a table that is partitioned by time. The
/// slots' positions are queried separately.
pub(crate) async fn query_facts(
    client: &Client,
    outbox: &MaintainedTable,
) -> Result<RetentionFacts, CatalogError> {
    let now = micros("now()");
    let row = client.query_one(&format!("SELECT {now}"), &[]).await?;
    let now = clock(&row)?;
    // Transactions of other roles are visible only to members of pg_read_all_stats, so the query
    // may miss older transactions.
    let began = micros("xact_start");
    let oldest_open = client
        .query_opt(
            &format!(
                "SELECT {began}, pid FROM pg_stat_activity WHERE datname = current_database() \
                 AND pid <> pg_backend_pid() AND xact_start IS NOT NULL AND backend_type = 'client backend' \
                 ORDER BY xact_start LIMIT 1"
            ),
            &[],
        )
        .await?;
    let oldest_open = match oldest_open {
        Some(row) => timestamp(&row, 0)?.zip(Some(row.try_get(1)?)),
        None => None,
    };
    let origin = &outbox.origin;
    Ok(RetentionFacts {
        now,
        oldest_open,
        partitions: partitions(client, origin).await?,
        detached: detached(client, origin).await?,
        slot: None,
    })
}

async fn partitions(client: &Client, origin: &Origin) -> Result<Vec<Partition>, CatalogError> {
    let bound = |side: &str| {
        let text = format!(
            "substring(pg_get_expr(c.relpartbound, 0) FROM '{side} \\(''([^'']*)''\\)')::timestamptz"
        );
        micros(&text)
    };
    let rows = client
        .query(
            &format!(
                "SELECT n.nspname::text, c.relname::text, {}, {}, c.oid = p.partdefid, i.inhdetachpending, \
                 {} \
                 FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN pg_partitioned_table p ON p.partrelid = i.inhparent WHERE i.inhparent = $1",
                bound("FROM"),
                bound("TO"),
                end_of_comment("c.oid")
            ),
            &[&origin.table],
        )
        .await?;
    let partition = |row: &Row| {
        let comment: Option<String> = row.try_get(6)?;
        Ok(Partition {
            name: name(row, 0, 1)?,
            bounds: Bounds {
                lower: timestamp(row, 2)?,
                upper: timestamp(row, 3)?,
            },
            is_default: row.try_get(4)?,
            is_pending: row.try_get(5)?,
            mark: origin.read(comment.as_deref()),
        })
    };
    rows.iter().map(partition).collect()
}

/// Returns tables whose comments show that they were partitions of the outbox. Any role can write
/// such a comment on its own table, so a table is included only if its owner could attach a
/// partition to the outbox, or owns a current partition. Owners of current partitions are accepted
/// because `ALTER TABLE ... OWNER TO` does not change the owners of partitions.
async fn detached(client: &Client, origin: &Origin) -> Result<Vec<Detached>, CatalogError> {
    let rows = client
        .query(
            &format!(
                "SELECT n.nspname::text, c.relname::text, c.oid, {} FROM pg_description d \
                 JOIN pg_class c ON c.oid = d.objoid JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE d.classoid = 'pg_class'::regclass AND d.objsubid = 0 AND NOT c.relispartition \
                 AND c.relkind IN ('r', 'p') AND c.oid <> $1 AND right(d.description, length($2)) = $2 \
                 AND c.relowner IN (SELECT relowner FROM pg_class WHERE oid = $1 \
                 UNION SELECT p.relowner FROM pg_inherits JOIN pg_class p ON p.oid = inhrelid WHERE inhparent = $1 \
                 UNION SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user \
                 UNION SELECT datdba FROM pg_database WHERE datname = current_database())",
                end_of_comment("c.oid")
            ),
            &[&origin.table, &origin.suffix()],
        )
        .await?;
    let table = |row: &Row| {
        let comment_end: String = row.try_get(3)?;
        Ok(Detached {
            oid: row.try_get(2)?,
            name: name(row, 0, 1)?,
            mark: origin.read(Some(&comment_end)),
            comment_end,
        })
    };
    rows.iter().map(table).collect()
}

/// Returns the names of detached partitions, and of partitions that are being detached.
pub(crate) async fn detached_partitions(
    client: &Client,
    origin: &Origin,
) -> Result<Vec<TableName>, CatalogError> {
    let pending = client
        .query(
            "SELECT n.nspname::text, c.relname::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
             JOIN pg_namespace n ON n.oid = c.relnamespace WHERE i.inhparent = $1 AND i.inhdetachpending",
            &[&origin.table],
        )
        .await?;
    let mut names: Vec<_> = pending
        .iter()
        .map(|row| name(row, 0, 1))
        .collect::<Result<_, _>>()?;
    let detached = detached(client, origin).await?;
    names.extend(detached.into_iter().map(|detached| detached.name));
    Ok(names)
}

/// Returns the database server's current time, and the end of the table's comment, where Walpost
/// stores the removal progress.
pub(crate) async fn query_rows_mark(
    client: &Client,
    outbox: &MaintainedTable,
) -> Result<(Timestamp, Option<String>), CatalogError> {
    let now = micros("now()");
    let sql = format!("SELECT {now}, {}", end_of_comment("$1"));
    let row = client.query_one(&sql, &[&outbox.origin.table]).await?;
    Ok((clock(&row)?, row.try_get(1)?))
}

/// Returns the current WAL insert position. All transactions committed so far were committed before
/// this position.
pub(crate) async fn position(client: &Client) -> Result<Lsn, CatalogError> {
    let row = client
        .query_one("SELECT pg_current_wal_insert_lsn()", &[])
        .await?;
    Ok(row.try_get(0)?)
}

/// Reads the server's current time from the first column.
fn clock(row: &Row) -> Result<Timestamp, CatalogError> {
    timestamp(row, 0)?
        .ok_or_else(|| CatalogError::Unexpected("now() is outside the supported range".to_owned()))
}

/// Returns the query that [`slots`] runs on a server of this version. The query avoids the view
/// `pg_publication_tables`: in PostgreSQL 17 and later, this view locks every table of every
/// publication, so a lock on an unrelated table would prevent maintenance.
fn slots_sql(version: i32) -> String {
    // Since PostgreSQL 15, publications can contain whole schemas.
    let in_schema = match version >= 150_000 {
        true => {
            "OR EXISTS (SELECT FROM pg_publication_namespace s JOIN tree ON tree.schema = s.pnnspid WHERE s.pnpubid = p.oid)"
        }
        false => "",
    };
    format!(
        "WITH root AS (SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = $2::text AND c.relname = $3::text), \
         tree AS (SELECT c.oid, c.relnamespace AS schema FROM pg_class c WHERE c.oid IN (SELECT oid FROM root \
             UNION ALL SELECT t.relid FROM root, pg_partition_tree(root.oid) AS t \
             UNION ALL SELECT a.relid FROM root, pg_partition_ancestors(root.oid) AS a)) \
         SELECT slot_name::text, coalesce(confirmed_flush_lsn, '0/0'), slot_name = $1 \
         FROM pg_replication_slots \
         WHERE database = current_database() AND NOT temporary AND plugin = 'pgoutput' AND (slot_name = $1 \
             OR slot_name::text = ANY ($5) \
             OR EXISTS (SELECT FROM pg_publication p WHERE p.pubname <> $4 AND (p.puballtables \
                 OR EXISTS (SELECT FROM pg_publication_rel r JOIN tree ON tree.oid = r.prrelid WHERE r.prpubid = p.oid) \
                 {in_schema})))"
    )
}

/// Returns the slots that may read the table, with their positions: the pipeline's own slot and, if
/// another publication also contains the table, all other pgoutput slots of this database, because
/// the server does not record which publication a slot is used with. Slots named in `readers` are
/// also included if they exist. Returns no slots if the pipeline's own slot does not exist.
pub(crate) async fn slots(
    client: &Client,
    target: &Target,
    table: &TableName,
    readers: &[String],
) -> Result<Vec<(String, Lsn)>, CatalogError> {
    let row = client
        .query_one("SELECT current_setting('server_version_num')::int4", &[])
        .await?;
    let sql = slots_sql(row.try_get(0)?);
    let rows = client
        .query(
            &sql,
            &[
                &target.slot,
                &table.schema,
                &table.name,
                &target.publication,
                &readers,
            ],
        )
        .await?;
    let mut has_own = false;
    let mut slots = Vec::with_capacity(rows.len());
    for row in &rows {
        has_own |= row.try_get::<_, bool>(2)?;
        slots.push((row.try_get(0)?, row.try_get(1)?));
    }
    slots.retain(|_| has_own);
    Ok(slots)
}
