//! Problems in a database that keep a pipeline from running, each with its fix.

use std::fmt;

use super::UnsafeFilter;
use crate::model::lsn::Lsn;
use crate::postgres::table::{TableName, identifier};

/// The session that uses a slot, according to `pg_stat_activity`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The session's `application_name`.
    pub application_name: String,
    pub role: Option<String>,
    /// The client's address; `None` for a Unix-domain socket, or if the role may not see it.
    pub address: Option<String>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "application_name {:?}", self.application_name)?;
        if let Some(role) = &self.role {
            write!(f, ", role {role:?}")?;
        }
        match &self.address {
            Some(address) => write!(f, ", address {address}"),
            None => Ok(()),
        }
    }
}

/// Prefix by which an `application_name` that an operator sets is recognized as Walpost's.
const WALPOST: &str = "walpost";

impl Holder {
    /// Returns whether this may be another instance of the pipeline whose sessions use this
    /// `application_name`.
    #[must_use]
    pub(crate) fn may_be_ours(&self, application_name: &str) -> bool {
        self.application_name == application_name || self.application_name.starts_with(WALPOST)
    }
}

/// A condition in the database that keeps a pipeline from running.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Problem {
    /// The server is too old.
    #[error("PostgreSQL has version {found}; Walpost needs 14 or later")]
    Version {
        /// `server_version_num`.
        found: i32,
    },
    /// Logical decoding is not enabled.
    #[error("wal_level is {found:?}, expected \"logical\". {remedy}")]
    WalLevel {
        /// The value of the setting.
        found: String,
        /// Where and how to set it.
        remedy: &'static str,
    },
    /// The server is a standby, and nothing can be streamed before it is promoted.
    #[error(
        "the server is a standby in recovery, and slot {slot:?} {found}: waiting until it is promoted. To have another host \
         of the connection string tried meanwhile: target_session_attrs=primary"
    )]
    InRecovery {
        slot: String,
        /// What is wrong with the slot.
        found: &'static str,
    },
    /// The table does not exist.
    #[error(
        "table {table} does not exist in database {database:?}. Create it: {init}; or name yours with --table"
    )]
    NoTable {
        table: TableName,
        /// The command that creates it.
        init: String,
        database: String,
    },
    /// The relation is not a table.
    #[error(
        "{table} is not a table (relkind {kind:?}); expected an ordinary or a partitioned table"
    )]
    NotATable {
        table: TableName,
        /// `pg_class.relkind`.
        kind: String,
    },
    /// Rows of the table are not written to WAL.
    #[error(
        "table {table} is unlogged or temporary, so its rows are not in WAL. Have its owner make it permanent: ALTER TABLE {table} SET LOGGED"
    )]
    Unlogged { table: TableName },
    /// The publication does not exist.
    #[error(
        "publication {publication:?} does not exist in database {database:?}. Create it, and after it the slot: {init}"
    )]
    NoPublication {
        publication: String,
        /// The command that creates it.
        init: String,
        database: String,
    },
    /// The publication does not contain the table of the outbox.
    #[error(
        "publication {publication:?} does not contain table {table}. Add it: ALTER PUBLICATION {name} ADD TABLE {table}. Rows \
         that were committed while it was missing are not delivered by that. {remedy}",
        name = identifier(.publication)
    )]
    NotPublished {
        publication: String,
        table: TableName,
        /// The commands that send the rows committed in the meantime.
        remedy: String,
    },
    /// A row filter of the publication could run code of its owner.
    #[error(
        "publication {publication:?} has a row filter on table {} that calls {}, which could run code of its owner as the role that \
         reads the slot. Drop it: ALTER PUBLICATION {name} DROP TABLE ONLY {}; then add the table again with a condition of immutable \
         functions that PostgreSQL itself has in C, or with none. If rows that were committed meanwhile can't be decoded either, \
         move the slot over them: pg_replication_slot_advance",
        .filter.table, .filter.function, .filter.table,
        name = identifier(.publication)
    )]
    UnsafeFilter {
        publication: String,
        filter: UnsafeFilter,
    },
    /// The owner of the publication could have code executed as the role that reads the slot.
    #[error(
        "publication {publication:?} belongs to role {owner}, which could have code run as role {user}: the server evaluates row filters \
         as the role that reads the slot, including those that have since been removed. Give it to a role that is trusted: \
         ALTER PUBLICATION {name} OWNER TO .... Or, if role {owner} may do all that role {user} may: GRANT {user} TO {owner}. If {user} is \
         a superuser, use a role that is not one",
        name = identifier(.publication),
        owner = identifier(.owner),
        user = identifier(.user)
    )]
    UntrustedPublisher {
        publication: String,
        owner: String,
        /// The current role.
        user: String,
    },
    /// The publication does not publish inserts.
    #[error(
        "publication {publication:?} does not publish inserts. Change it: ALTER PUBLICATION {name} SET (publish = 'insert'). Rows \
         that were committed meanwhile are not delivered by that. Send them once the pipeline runs: {dropped}",
        name = identifier(.publication)
    )]
    NoInserts {
        publication: String,
        /// The command that sends the rows committed in the meantime.
        dropped: String,
    },
    /// Rows would be sent under the name of their partition.
    #[error(
        "publication {publication:?} publishes the partitions of {of} under their own names. Change it: ALTER PUBLICATION {name} SET (publish_via_partition_root = true)",
        name = identifier(.publication)
    )]
    NotViaRoot { publication: String, of: String },
    /// The publication contains tables other than those of the outbox.
    #[error(
        "publication {publication:?} contains other tables than {of}: {others}. Make a publication for {of} alone: {init}; or take the others out: ALTER PUBLICATION {name} DROP TABLE {removed}",
        name = identifier(.publication)
    )]
    OtherTables {
        publication: String,
        /// The command that creates another publication.
        init: String,
        /// The table or tables of the outbox.
        of: String,
        others: String,
        /// Those of the other tables that the suggested command removes.
        removed: String,
    },
    /// The publication contains tables, although the outbox consists of messages.
    #[error(
        "publication {publication:?} contains tables, though the outbox is of messages: {tables}. Make a publication without tables: {init}; or take them out: ALTER PUBLICATION {name} DROP TABLE {removed}",
        name = identifier(.publication)
    )]
    NotEmpty {
        publication: String,
        /// The command that creates another publication.
        init: String,
        tables: String,
        /// Those of the tables that the suggested command removes.
        removed: String,
    },
    /// The slot does not exist.
    #[error(
        "replication slot {slot:?} does not exist. Create it: {init}. If it was there before, events committed since it was dropped are not in the new one"
    )]
    NoSlot {
        slot: String,
        /// The command that creates it.
        init: String,
    },
    /// The slot has another output plugin.
    #[error(
        "replication slot {slot:?} has plugin {found}, expected pgoutput. Name another slot with --slot, and create it: {init}"
    )]
    WrongPlugin {
        slot: String,
        /// The command that creates another slot.
        init: String,
        /// The plugin of the slot.
        found: String,
    },
    /// The slot belongs to another database.
    #[error(
        "replication slot {slot:?} belongs to database {found:?}, but the outbox is in {expected:?}. Slot names are one for the whole server: name another with --slot"
    )]
    WrongDatabase {
        slot: String,
        /// The database of the slot.
        found: String,
        /// The database of the outbox.
        expected: String,
    },
    /// The slot would be dropped at the end of its session.
    #[error(
        "replication slot {slot:?} is temporary and vanishes with its session. Name another with --slot, and create it: {init}"
    )]
    Temporary {
        slot: String,
        /// The command that creates another slot.
        init: String,
    },
    /// The slot would send prepared transactions before they are committed.
    #[error(
        "replication slot {slot:?} was made with two_phase = true, so prepared transactions would be sent before they commit. Name another with --slot, and create it: {init}"
    )]
    TwoPhase {
        slot: String,
        /// The command that creates another slot.
        init: String,
    },
    /// The slot is read by another program.
    #[error(
        "replication slot {slot:?} is held by PID {pid}, which is no Walpost ({holder}): what it reads is not delivered. End \
         it: SELECT pg_catalog.pg_terminate_backend({pid}). If it is a Walpost, give both the same application_name"
    )]
    HeldByOther {
        slot: String,
        /// The server process that uses the slot.
        pid: i32,
        /// The session of that process.
        holder: Holder,
    },
    /// The server has removed WAL or rows that the slot needs.
    #[error(
        "replication slot {slot:?} is lost: {reason}. Drop and re-create it: SELECT pg_catalog.pg_drop_replication_slot('{slot}'); {init}. Events committed after {confirmed} and before that are not in the new one. {resend}"
    )]
    Lost {
        slot: String,
        /// The command that creates it.
        init: String,
        /// How to have the undelivered events delivered.
        resend: String,
        /// The position confirmed last.
        confirmed: Lsn,
        /// Why the slot is lost, and how to prevent that in the future.
        reason: String,
    },
}

/// The slot is being read. This is not a [`Problem`]: an instance on standby waits until the other
/// one ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot:?} is active for PID {pid}")]
pub(crate) struct SlotInUse {
    pub slot: String,
    /// The server process that uses the slot.
    pub pid: i32,
}

/// Describes why a slot is lost, given the server's reason.
pub(super) fn lost(reason: Option<&str>, confirmed: Lsn) -> String {
    match reason {
        Some("wal_removed") | None => format!(
            "the server has removed WAL after {confirmed} that was not delivered (wal_status = lost; see \
             max_slot_wal_keep_size)"
        ),
        Some("idle_timeout") => "nobody streamed from it for longer than idle_replication_slot_timeout (invalidation_reason = \
             idle_timeout). Let that be longer than Walpost is ever stopped for, or turn it off, and bound WAL with \
             max_slot_wal_keep_size: ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_catalog.pg_reload_conf()"
            .to_owned(),
        Some("rows_removed") => "rows of the system catalog that it needs were removed (invalidation_reason = rows_removed). On a \
             standby, keep the primary from that: ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_catalog.pg_reload_conf()"
            .to_owned(),
        Some("wal_level_insufficient") => "wal_level was set below logical (invalidation_reason = wal_level_insufficient). Put it \
             back, on the primary, and restart that: ALTER SYSTEM SET wal_level = logical"
            .to_owned(),
        Some(other) => format!("the server has invalidated it (invalidation_reason = {other})"),
    }
}
