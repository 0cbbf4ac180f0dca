//! Problems in a database that keep a pipeline from running, each with its fix.

use std::fmt;

use super::UnsafeFilter;
use crate::model::lsn::Lsn;
use crate::postgres::table::{TableName, identifier};

/// Whose session it is that uses a slot, by `pg_stat_activity`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    /// What it calls itself.
    pub application_name: String,
    pub role: Option<String>,
    /// Where it is; none for a unix-domain socket, and where we may not know.
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

/// An `application_name` that an operator sets begins with this.
const OUR_NAME: &str = "walpost";

impl Holder {
    /// It may be another instance of the pipeline whose sessions have this `application_name`.
    #[must_use]
    pub(crate) fn may_be_ours(&self, application_name: &str) -> bool {
        self.application_name == application_name || self.application_name.starts_with(OUR_NAME)
    }
}

/// Something in the database that keeps a pipeline from running.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Problem {
    /// The server is too old.
    #[error("PostgreSQL has version {found}; Walpost needs 14 or later")]
    Version {
        /// `server_version_num`
        found: i32,
    },
    /// No logical decoding.
    #[error("wal_level is {found:?}, expected \"logical\". {remedy}")]
    WalLevel {
        /// The setting.
        found: String,
        /// Where and how it is set.
        remedy: &'static str,
    },
    /// Nothing can be streamed before the server is promoted.
    #[error(
        "the server is a standby in recovery, and slot {slot:?} {found}: waiting until it is promoted. To have another host \
         of the connection string tried meanwhile: target_session_attrs=primary"
    )]
    InRecovery {
        slot: String,
        /// What is wrong with it.
        found: &'static str,
    },
    /// No such table.
    #[error(
        "table {table} does not exist in database {database:?}. Create it: {init}; or name yours with --table"
    )]
    NoTable {
        table: TableName,
        /// The command that makes it.
        init: String,
        database: String,
    },
    /// Not a table.
    #[error(
        "{table} is not a table (relkind {kind:?}); expected an ordinary or a partitioned table"
    )]
    NotATable {
        /// Its name.
        table: TableName,
        /// `pg_class.relkind`
        kind: String,
    },
    /// Not in WAL.
    #[error(
        "table {table} is unlogged or temporary, so its rows are not in WAL. Make it permanent: ALTER TABLE {table} SET LOGGED"
    )]
    Unlogged { table: TableName },
    /// No such publication.
    #[error(
        "publication {publication:?} does not exist in database {database:?}. Create it, and after it the slot: {init}"
    )]
    NoPublication {
        publication: String,
        /// The command that makes it.
        init: String,
        database: String,
    },
    /// It has not our table.
    #[error(
        "publication {publication:?} does not contain table {table}. Add it: ALTER PUBLICATION {name} ADD TABLE {table}. Rows \
         that were committed while it was missing are not delivered by that. {remedy}",
        name = identifier(.publication)
    )]
    NotPublished {
        publication: String,
        table: TableName,
        /// The commands that send those rows.
        remedy: String,
    },
    /// One of its row filters could run code of its owner.
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
    /// Its owner could have code run as the role that reads the slot.
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
        /// The role that we are.
        user: String,
    },
    /// It leaves inserts out.
    #[error(
        "publication {publication:?} does not publish inserts. Change it: ALTER PUBLICATION {name} SET (publish = 'insert'). Rows \
         that were committed meanwhile are not delivered by that. Send them once the pipeline runs: {dropped}",
        name = identifier(.publication)
    )]
    NoInserts {
        publication: String,
        /// The command that sends them.
        dropped: String,
    },
    /// Rows would come under their partition's name.
    #[error(
        "publication {publication:?} publishes the partitions of {of} under their own names. Change it: ALTER PUBLICATION {name} SET (publish_via_partition_root = true)",
        name = identifier(.publication)
    )]
    NotViaRoot { publication: String, of: String },
    /// It has tables besides ours.
    #[error(
        "publication {publication:?} contains other tables than {of}: {others}. Make a publication for {of} alone: {init}; or take the others out: ALTER PUBLICATION {name} DROP TABLE {removed}",
        name = identifier(.publication)
    )]
    OtherTables {
        publication: String,
        /// The command that makes another one.
        init: String,
        /// Our table or tables.
        of: String,
        others: String,
        /// Those of them that the command takes out.
        removed: String,
    },
    /// It has tables, and the outbox is none.
    #[error(
        "publication {publication:?} contains tables, though the outbox is of messages: {tables}. Make a publication without tables: {init}; or take them out: ALTER PUBLICATION {name} DROP TABLE {removed}",
        name = identifier(.publication)
    )]
    NotEmpty {
        publication: String,
        /// The command that makes another one.
        init: String,
        tables: String,
        /// Those of them that the command takes out.
        removed: String,
    },
    /// No such slot.
    #[error(
        "replication slot {slot:?} does not exist. Create it: {init}. If it was there before, events committed since it was dropped are not in the new one"
    )]
    NoSlot {
        slot: String,
        /// The command that makes it.
        init: String,
    },
    /// The slot is another kind.
    #[error(
        "replication slot {slot:?} has plugin {found}, expected pgoutput. Name another slot with --slot, and create it: {init}"
    )]
    WrongPlugin {
        slot: String,
        /// The command that makes one.
        init: String,
        /// Its plugin.
        found: String,
    },
    /// The slot is another database's.
    #[error(
        "replication slot {slot:?} belongs to database {found:?}, but the outbox is in {expected:?}. Slot names are one for the whole server: name another with --slot"
    )]
    WrongDatabase {
        slot: String,
        /// Its database.
        found: String,
        /// Ours.
        expected: String,
    },
    /// The slot would not survive.
    #[error(
        "replication slot {slot:?} is temporary and vanishes with its session. Name another with --slot, and create it: {init}"
    )]
    Temporary {
        slot: String,
        /// The command that makes one.
        init: String,
    },
    /// The slot sends prepared transactions too early.
    #[error(
        "replication slot {slot:?} was made with two_phase = true, so prepared transactions would be sent before they commit. Name another with --slot, and create it: {init}"
    )]
    TwoPhase {
        slot: String,
        /// The command that makes one.
        init: String,
    },
    /// The slot is read by something else.
    #[error(
        "replication slot {slot:?} is held by PID {pid}, which is no Walpost ({holder}): what it reads is not delivered. End \
         it: SELECT pg_catalog.pg_terminate_backend({pid}). If it is a Walpost, give both the same application_name"
    )]
    HeldByOther {
        slot: String,
        /// The server process that has it.
        pid: i32,
        /// Whose that is.
        holder: Holder,
    },
    /// The server has removed WAL or rows that the slot needs.
    #[error(
        "replication slot {slot:?} is lost: {reason}. Drop and re-create it: SELECT pg_catalog.pg_drop_replication_slot('{slot}'); {init}. Events committed after {confirmed} and before that are not in the new one. {resend}"
    )]
    Lost {
        slot: String,
        /// The command that makes it.
        init: String,
        /// How the events between are delivered.
        resend: String,
        /// What was confirmed last.
        confirmed: Lsn,
        /// Why, and what keeps that from coming again.
        reason: String,
    },
}

/// Somebody reads the slot. No [`Problem`]: who stands by waits for it to end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot:?} is active for PID {pid}")]
pub(crate) struct SlotInUse {
    pub slot: String,
    /// The server process that has it.
    pub pid: i32,
}

/// Why a slot is lost, as the server calls it, for a person.
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
