//! Problems in a database that prevent a pipeline from running, and their remedies.

use std::fmt;

use super::UnsafeFilter;
use crate::model::lsn::Lsn;
use crate::postgres::sql::escape_literal;
use crate::postgres::table::{TableName, identifier};

/// The session that uses a slot or holds a lock, according to `pg_stat_activity`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The session's `application_name`.
    pub application_name: String,
    pub role: Option<String>,
    /// The client's address; `None` for a Unix-domain socket, or if the role is not allowed to see
    /// the address.
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

/// A session whose `application_name` starts with this prefix is assumed to belong to Walpost.
const WALPOST: &str = "walpost";

impl Holder {
    /// Returns whether the session may belong to another instance of a pipeline whose sessions use
    /// this `application_name`.
    #[must_use]
    pub(crate) fn may_be_ours(&self, application_name: &str) -> bool {
        self.application_name == application_name || self.application_name.starts_with(WALPOST)
    }
}

/// The holder of an advisory lock that Walpost requires. Every role can take any advisory lock, so
/// the holder may be unrelated to Walpost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AdvisoryLockHolder {
    Session {
        pid: i32,
        identity: Holder,
    },
    /// A prepared transaction keeps its locks when its session ends, and even when the server
    /// restarts.
    PreparedTransaction {
        name: String,
        role: Option<String>,
    },
}

impl AdvisoryLockHolder {
    /// Returns the statement that releases the lock.
    #[must_use]
    pub(crate) fn release(&self) -> String {
        match self {
            Self::Session { pid, .. } => format!("SELECT pg_catalog.pg_terminate_backend({pid})"),
            Self::PreparedTransaction { name, .. } => {
                format!("ROLLBACK PREPARED {}", escape_literal(name).trim_start())
            }
        }
    }
}

impl fmt::Display for AdvisoryLockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Session { pid, identity } => write!(f, "PID {pid} ({identity})"),
            Self::PreparedTransaction { name, role } => {
                write!(f, "prepared transaction {name:?}")?;
                match role {
                    Some(role) => write!(f, " (role {role:?})"),
                    None => Ok(()),
                }
            }
        }
    }
}

/// A condition in the database that prevents a pipeline from running.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Problem {
    /// The server is too old.
    #[error("PostgreSQL has version {found}; Walpost requires version 14 or later")]
    Version {
        /// `server_version_num`.
        found: i32,
    },
    /// Logical decoding is not enabled.
    #[error("wal_level is {found:?}, expected \"logical\". {remedy}")]
    WalLevel {
        /// The current value of `wal_level`.
        found: String,
        /// How to change `wal_level`.
        remedy: &'static str,
    },
    /// The server is a standby, and the slot can't be used until the standby is promoted.
    #[error(
        "the server is a standby in recovery, and {found}; waiting for the standby to be promoted. To try \
         the other hosts in the connection string in the meantime, set target_session_attrs=primary"
    )]
    InRecovery {
        /// The name of the slot and the reason why the slot can't be used.
        found: String,
    },
    /// The table does not exist.
    #[error(
        "table {table} does not exist in database {database:?}. Create it: {init}; or specify another table with --table"
    )]
    NoTable {
        table: TableName,
        /// The command that creates the table.
        init: String,
        database: String,
    },
    /// The relation is not a table.
    #[error("{table} is not a table (relkind {kind:?}); expected an ordinary or partitioned table")]
    NotATable {
        table: TableName,
        /// `pg_class.relkind`.
        kind: String,
    },
    /// Rows of the table are not written to WAL.
    #[error(
        "table {table} is unlogged or temporary, so its rows are not written to WAL. As its owner, make the table \
         permanent: ALTER TABLE {table} SET LOGGED"
    )]
    Unlogged { table: TableName },
    /// The publication does not exist.
    #[error(
        "publication {publication:?} does not exist in database {database:?}. Create the publication and then the slot: {init}"
    )]
    NoPublication {
        publication: String,
        /// The command that creates the publication.
        init: String,
        database: String,
    },
    /// The publication does not contain the outbox table.
    #[error(
        "publication {publication:?} does not contain table {table}. Add the table: ALTER PUBLICATION {name} ADD TABLE \
         {table}. This does not deliver the rows committed while the table was missing. {remedy}",
        name = identifier(.publication)
    )]
    NotPublished {
        publication: String,
        table: TableName,
        /// The commands that deliver the rows committed while the publication did not contain the
        /// table.
        remedy: String,
    },
    /// One of the publication's row filters calls a function that could run its owner's code.
    #[error(
        "publication {publication:?} has a row filter on table {} that calls {}, which could run its owner's code as \
         the role that reads the slot. Remove the table: ALTER PUBLICATION {name} DROP TABLE ONLY {}; then add the \
         table again without a filter, or with a filter that calls only PostgreSQL's built-in immutable C functions. If \
         rows committed in the meantime can't be decoded either, advance the slot past them: pg_replication_slot_advance",
        .filter.table, .filter.function, .filter.table,
        name = identifier(.publication)
    )]
    UnsafeFilter {
        publication: String,
        filter: UnsafeFilter,
    },
    /// The publication's owner could run code as the role that reads the slot.
    #[error(
        "publication {publication:?} belongs to role {owner}, which could run code as role {user}: the server evaluates \
         row filters, including filters that have since been removed, as the role that reads the slot. Change the owner \
         to a trusted role: ALTER PUBLICATION {name} OWNER TO .... Or, if role {owner} can be trusted with all \
         privileges of role {user}: GRANT {user} TO {owner}. If {user} is a superuser, connect as a role that is not a \
         superuser",
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
        "publication {publication:?} does not publish inserts. Publish inserts: ALTER PUBLICATION {name} SET (publish = \
         'insert'). This does not deliver the rows committed in the meantime. Send these rows once the pipeline is \
         running: {dropped}",
        name = identifier(.publication)
    )]
    NoInserts {
        publication: String,
        /// The command that delivers the rows committed while inserts were not published.
        dropped: String,
    },
    /// Rows would be sent under the name of their partition instead of the name of the partitioned
    /// table.
    #[error(
        "publication {publication:?} publishes the partitions of {outbox} under their own names. Publish them under the \
         name of the partitioned table: ALTER PUBLICATION {name} SET (publish_via_partition_root = true)",
        name = identifier(.publication)
    )]
    NotViaRoot { publication: String, outbox: String },
    /// The publication contains tables that do not belong to the outbox.
    #[error(
        "publication {publication:?} contains tables other than {outbox}: {others}. Rows of these tables are not \
         delivered. Create a publication that contains only {outbox}: {init}; or remove the other tables: ALTER \
         PUBLICATION {name} DROP TABLE {removed}",
        name = identifier(.publication)
    )]
    OtherTables {
        publication: String,
        /// The command that creates a different publication.
        init: String,
        /// The name of the outbox's table, or the patterns for its tables.
        outbox: String,
        others: String,
        /// The tables that the suggested command removes from the publication.
        removed: String,
    },
    /// The publication contains tables, although the outbox uses logical messages.
    #[error(
        "publication {publication:?} contains tables, but the outbox uses logical decoding messages: {tables}. Create a \
         publication without tables: {init}; or remove the tables: ALTER PUBLICATION {name} DROP TABLE {removed}",
        name = identifier(.publication)
    )]
    NotEmpty {
        publication: String,
        /// The command that creates a different publication.
        init: String,
        tables: String,
        /// The tables that the suggested command removes.
        removed: String,
    },
    /// The slot does not exist.
    #[error(
        "replication slot {slot:?} does not exist. Create it: {init}. If the slot existed before, events committed \
         since it was dropped are not in the new slot"
    )]
    NoSlot {
        slot: String,
        /// The command that creates the slot.
        init: String,
    },
    /// The slot does not use the output plugin pgoutput.
    #[error(
        "replication slot {slot:?} has plugin {found}, expected pgoutput. Specify another slot with --slot, and create \
         it: {init}"
    )]
    WrongPlugin {
        slot: String,
        /// The command that creates a different slot.
        init: String,
        /// The slot's output plugin.
        found: String,
    },
    /// The slot belongs to a database other than the outbox's.
    #[error(
        "replication slot {slot:?} belongs to database {found:?}, but the outbox is in {expected:?}. Slot names must be \
         unique across all databases of a server: specify another name with --slot"
    )]
    WrongDatabase {
        slot: String,
        /// The database that the slot belongs to.
        found: String,
        /// The database that contains the outbox.
        expected: String,
    },
    /// The slot would be dropped when its session ends.
    #[error(
        "replication slot {slot:?} is temporary and is dropped when its session ends. Specify another slot with --slot, \
         and create it: {init}"
    )]
    Temporary {
        slot: String,
        /// The command that creates a different slot.
        init: String,
    },
    /// The slot would send prepared transactions before they are committed.
    #[error(
        "replication slot {slot:?} was created with two_phase = true, so prepared transactions would be sent before \
         they commit. Specify another slot with --slot, and create it: {init}"
    )]
    TwoPhase {
        slot: String,
        /// The command that creates a different slot.
        init: String,
    },
    /// The slot is read by another program.
    #[error(
        "replication slot {slot:?} is in use by PID {pid}, which does not appear to be Walpost ({holder}): events that \
         it reads are not delivered to Kafka. Terminate it: SELECT pg_catalog.pg_terminate_backend({pid}). If it is \
         another Walpost instance, give both instances the same application_name"
    )]
    HeldByOther {
        slot: String,
        /// The PID of the server process that uses the slot.
        pid: i32,
        /// The session that uses the slot.
        holder: Holder,
    },
    /// The server has removed WAL or rows that the slot requires.
    #[error(
        "replication slot {slot:?} is lost: {reason}. Drop and re-create it: SELECT \
         pg_catalog.pg_drop_replication_slot('{slot}'); {init}. Events committed after {confirmed} and before the new \
         slot is created are not in the new slot. {resend}"
    )]
    Lost {
        slot: String,
        /// The command that re-creates the slot.
        init: String,
        /// How to deliver the events that the slot did not deliver.
        resend: String,
        /// The last WAL position that was confirmed for the slot.
        confirmed: Lsn,
        /// Why the slot is lost, and how to prevent this in the future.
        reason: String,
    },
}

/// The slot is in use. This is not a [`Problem`], because a standby instance of Walpost simply
/// waits until the active instance exits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot:?} is active for PID {pid}")]
pub(crate) struct SlotInUse {
    pub slot: String,
    /// The PID of the server process that uses the slot.
    pub pid: i32,
}

/// Describes why a slot is lost, given the server's reason.
pub(super) fn lost(reason: Option<&str>, confirmed: Lsn) -> String {
    match reason {
        Some("wal_removed") | None => format!(
            "the server has removed undelivered WAL after {confirmed} (wal_status = lost; see \
             max_slot_wal_keep_size)"
        ),
        Some("idle_timeout") => "the slot was inactive for longer than idle_replication_slot_timeout (invalidation_reason = \
         idle_timeout). Raise this timeout above the longest time for which Walpost is stopped, or disable the timeout \
         and limit retained WAL with max_slot_wal_keep_size: ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT \
         pg_catalog.pg_reload_conf()"
            .to_owned(),
        Some("rows_removed") => "system catalog rows that the slot requires were removed (invalidation_reason = \
         rows_removed). On a standby, prevent the primary from removing them: ALTER SYSTEM SET hot_standby_feedback = \
         on; SELECT pg_catalog.pg_reload_conf()"
            .to_owned(),
        Some("wal_level_insufficient") => "wal_level was set below logical (invalidation_reason = \
         wal_level_insufficient). Set wal_level back on the primary, then restart the primary: ALTER SYSTEM SET \
         wal_level = logical"
            .to_owned(),
        Some(other) => format!("the server has invalidated the slot (invalidation_reason = {other})"),
    }
}
