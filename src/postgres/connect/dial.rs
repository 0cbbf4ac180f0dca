//! Opens an authenticated connection: hosts in turn, TLS, authentication, and which kind of server
//! answered. One way in for both clients, the replication client and tokio-postgres.
//!
//! Differences from libpq: a host that refuses us does not end the search among the others; in
//! `sslmode=prefer` a certificate is never checked, and only a failed handshake or a refusal by
//! `pg_hba.conf` leads to a try without TLS; a password in clear text or hashed with MD5 goes over a
//! network only to a server that has proven itself, and over a Unix-domain socket only if no other user could have created that,
//! unless `require_auth` names the method; `requirepeer` also takes the ID of a user.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::BytesMut;
use tokio::net::UnixStream;
use tokio_postgres::AsyncMessage;
use tokio_postgres::error::{DbError, Severity};
use tracing::{debug, info, warn};

pub(crate) use bound::SqlLimits;
pub(crate) use error::{DialError, ServerError};
pub(crate) use socket::Socket;

use super::conninfo::exposure::Exposure;
use super::conninfo::notices::NoticeLimit;
use super::conninfo::{Conninfo, Host, Place, SslMode, Target, Tls};
use socket::Address;
use startup::Wire;

mod bound;
mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod handover;
mod peer;
mod scram;
mod socket;
mod startup;
#[cfg(test)]
mod tests;
mod tls;

/// How much of a notice is logged: a hint can have a command for each of many tables.
const NOTICE_CHARS_MAX: usize = 16_384;

/// What every session of ours is told when it starts, so that nobody who shares the database has code
/// run as us. It overrides what `ALTER ROLE` and `ALTER DATABASE` have set.
///
/// - Without `search_path`, a function or operator in a schema of the path that fits an argument better
///   than pg_catalog's is called in its place (CVE-2018-1058).
/// - With `row_security`, a query of a table runs the functions of its policies. Off, it is an error where
///   a policy would hide rows.
/// - `role` can be set by the owner of the database: what we make would be that role's then.
/// - Literals are written for `standard_conforming_strings`, and what the server prints of the catalog is compared with names that
///   are quoted only if that is necessary.
/// - An examination under another isolation level than READ COMMITTED would see the catalogs as they were before a table was locked.
/// - With `constraint_exclusion = on`, the planner evaluates the partition keys above every table that is read.
/// - A warning can be about rights that others have.
/// - With `default_transaction_read_only` nothing is confirmed, as that is written down first; and providers
///   set it where the disk is nearly full of log that a slot keeps.
/// - With `synchronous_commit = on`, a commit can wait for a standby that is Walpost itself.
/// - Timeouts would end what has to wait: a walsender that we take no more from while Kafka is away, a
///   catalog connection between two questions. We have limits of our own. See also [`LATER_TIMEOUTS`].
///
/// PostgreSQL 18, 5.10.6 "Usage Patterns", 5.9 "Row Security Policies", 19.11.1 "Statement Behavior".
const SAFE_SESSION: [(&str, &str); 12] = [
    ("search_path", "pg_catalog, pg_temp"),
    ("row_security", "off"),
    ("standard_conforming_strings", "on"),
    ("quote_all_identifiers", "off"),
    ("default_transaction_isolation", "read committed"),
    ("constraint_exclusion", "partition"),
    ("client_min_messages", "notice"),
    ("default_transaction_read_only", "off"),
    ("synchronous_commit", "local"),
    ("statement_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ROLE,
];

/// Sets the timeouts that not every server has (`idle_session_timeout` from 14 on, `transaction_timeout` from
/// 17 on): in the startup message, a parameter that the server does not know would be an error.
const LATER_TIMEOUTS: &str = "SELECT set_config(name, '0', false) FROM pg_settings \
     WHERE name IN ('idle_session_timeout', 'transaction_timeout')";

/// The version that has the first of them.
const LATER_TIMEOUTS_SINCE: u32 = 14;

/// How long a statement of an SQL client waits for a lock, unless it is told otherwise: a lock that others hold must not stall a
/// pipeline without a word in the log.
const LOCK_TIMEOUT: &str = "10s";

const ROLE: (&str, &str) = ("role", "none");

/// An authenticated connection that is ready for queries.
pub struct Session {
    /// The transport.
    pub socket: Socket,
    /// Bytes read from it that lie behind ReadyForQuery; most often none.
    pub buffer: BytesMut,
    /// What the server reported of itself: `server_version`, `in_hot_standby` ...
    pub parameters: HashMap<String, String>,
    /// The server process on the other side.
    pub backend_pid: i32,
    /// The key for cancelling that process's query.
    pub secret: i32,
    /// The host that answered, as logs call it.
    pub host: String,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("host", &self.host)
            .field("backend_pid", &self.backend_pid)
            .finish_non_exhaustive()
    }
}

/// The half of an SQL client that moves bytes: a future to be polled (spawned) for as long as the
/// client is in use. It ends when the client is dropped, or with the error that broke the
/// connection.
pub(crate) struct SqlConnection {
    driver: handover::Driver,
    notices: Arc<NoticeLimit>,
}

impl Future for SqlConnection {
    type Output = Result<(), tokio_postgres::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        while let Some(message) = ready!(self.driver.poll_message(cx)).transpose()? {
            if let AsyncMessage::Notice(notice) = message {
                log_notice(&notice, &self.notices);
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Logs a notice with its hint, which is the command that PostgreSQL or a file in sql/ suggests, unless there are too many.
fn log_notice(notice: &DbError, limit: &NoticeLimit) {
    let parts = [Some(notice.message()), notice.detail(), notice.hint()];
    let parts = parts.into_iter().flatten();
    let parts: Vec<_> = parts
        .map(|part| part.trim_end_matches(['.', ';']))
        .collect();
    let text: String = parts.join(". ").chars().take(NOTICE_CHARS_MAX).collect();
    let is_warning = notice.parsed_severity() == Some(Severity::Warning);
    // The notices of CREATE ... IF NOT EXISTS and DROP ... IF EXISTS.
    let is_expected = notice.message().ends_with(", skipping");
    if !is_warning && (is_expected || notice.parsed_severity() == Some(Severity::Debug)) {
        debug!("{text}");
        return;
    }
    if !limit.admits(Instant::now()) {
        return;
    }
    match is_warning {
        true => warn!("{text}"),
        false => info!("{text}"),
    }
}

/// Opens a session for logical replication (`replication=database`), in which `SHOW` and SQL work
/// as well. `startup` adds run-time parameters of the server to the startup message.
///
/// # Errors
/// [`DialError`]; for more than one attempt [`DialError::AllHosts`].
pub(crate) async fn replication(
    conninfo: &Conninfo,
    startup: &[(&str, &str)],
) -> Result<Session, DialError> {
    let mut parameters = vec![("replication", "database")];
    parameters.extend_from_slice(startup);
    open(conninfo, &parameters).await
}

/// Opens an SQL client and the connection that has to be driven for it. A server that sends more than
/// `limits` allow is answered no more, and whoever waits for its answer has an error that says so.
///
/// # Errors
/// As [`replication`].
pub(crate) async fn sql(
    conninfo: &Conninfo,
    limits: SqlLimits,
) -> Result<(tokio_postgres::Client, SqlConnection), DialError> {
    let session = open(conninfo, &[("lock_timeout", LOCK_TIMEOUT)]).await?;
    let (client, mut connection) =
        handover::to_tokio_postgres(session, &conninfo.user, limits).await?;
    connection.notices = Arc::clone(&conninfo.notices);
    Ok((client, connection))
}

async fn open(conninfo: &Conninfo, more: &[(&str, &str)]) -> Result<Session, DialError> {
    let mut parameters = SAFE_SESSION.to_vec();
    if conninfo.asks_for_role() {
        parameters.retain(|parameter| *parameter != ROLE);
    }
    parameters.extend_from_slice(more);
    let mut hosts: Vec<_> = conninfo.hosts.iter().collect();
    if conninfo.shuffle_hosts {
        fastrand::shuffle(&mut hosts);
    }
    let mut failures = Vec::new();
    for host in hosts {
        let addresses = match addresses(conninfo, host).await {
            Ok(addresses) => addresses,
            Err(error) => {
                failures.push(error);
                continue;
            }
        };
        for address in &addresses {
            let label = match address {
                Address::Tcp(address) if addresses.len() > 1 => {
                    format!("{host} ({})", address.ip())
                }
                Address::Tcp(_) | Address::Unix(_) => host.to_string(),
            };
            let attempt = Attempt {
                conninfo,
                parameters: &parameters,
                host,
                address,
                label: &label,
            };
            match attempt.run().await {
                Ok(session) => return Ok(session),
                Err(error) => failures.push(error.with_remedy(conninfo)),
            }
        }
    }
    Err(
        DialError::of(failures).unwrap_or_else(|| DialError::Resolve {
            host: conninfo.describe(),
            source: io::Error::other("no address"),
        }),
    )
}

/// The addresses of a host; never none.
async fn addresses(conninfo: &Conninfo, host: &Host) -> Result<Vec<Address>, DialError> {
    let name = match &host.place {
        Place::Socket(folder) => return Ok(vec![Address::unix(folder, host.port)]),
        Place::Tcp {
            address: Some(address),
            ..
        } => {
            return Ok(vec![Address::Tcp(SocketAddr::new(*address, host.port))]);
        }
        Place::Tcp {
            name,
            address: None,
        } => name.as_str(),
    };
    let look_up = async {
        let found: Vec<_> = tokio::net::lookup_host((name, host.port))
            .await?
            .map(Address::Tcp)
            .collect();
        if found.is_empty() {
            Err(io::Error::other("no address"))
        } else {
            Ok(found)
        }
    };
    let found = within(conninfo, &host.to_string(), look_up).await?;
    found.map_err(|source| DialError::Resolve {
        host: host.to_string(),
        source,
    })
}

/// Bounds a step by `connect_timeout`.
async fn within<T>(
    conninfo: &Conninfo,
    label: &str,
    step: impl Future<Output = T>,
) -> Result<T, DialError> {
    match conninfo.attempt_limit() {
        None => Ok(step.await),
        Some(limit) => tokio::time::timeout(limit, step)
            .await
            .map_err(|_| DialError::Timeout {
                host: label.to_owned(),
                limit,
            }),
    }
}

/// One address of one host.
struct Attempt<'a> {
    conninfo: &'a Conninfo,
    parameters: &'a [(&'a str, &'a str)],
    host: &'a Host,
    address: &'a Address,
    label: &'a str,
}

impl Attempt<'_> {
    async fn run(&self) -> Result<Session, DialError> {
        let tls = &self.conninfo.tls;
        let error = match within(self.conninfo, self.label, self.open(tls)).await? {
            Ok(session) => return Ok(session),
            Err(error) => error,
        };
        let refused_for_tls = match (&error, self.address) {
            (DialError::Tls { .. }, _) => true,
            (DialError::Server { error, .. }, Address::Tcp(_)) => error.code == "28000",
            _ => false,
        };
        if tls.mode != SslMode::Prefer || !refused_for_tls {
            return Err(error);
        }
        let plain = Tls {
            mode: SslMode::Disable,
            ..tls.clone()
        };
        match within(self.conninfo, self.label, self.open(&plain)).await {
            Ok(Ok(session)) => {
                tracing::warn!(host = self.label, %error, "connected without TLS, as sslmode=prefer allows");
                Ok(session)
            }
            // What was kept from being sent says more than why there is no TLS.
            Ok(Err(kept @ DialError::Exposed { .. })) => Err(kept),
            // The first refusal is the one to fix.
            Ok(Err(_)) | Err(_) => Err(error),
        }
    }

    async fn open(&self, tls: &Tls) -> Result<Session, DialError> {
        let (socket, exposure) = self.connect(tls).await?;
        let wire = Wire::new(socket, exposure, self.label);
        let (mut wire, started) = wire
            .start(self.conninfo, self.host, self.parameters)
            .await?;
        self.conninfo
            .exposures
            .note(wire.exposure(), self.label, tls.mode);
        if started.may_be_since(LATER_TIMEOUTS_SINCE) {
            wire.query(LATER_TIMEOUTS).await?;
        }
        // Both can be asked in a replication session too.
        let (wanted, question) = match self.conninfo.target {
            Target::Any => return Ok(wire.into_session(started)),
            Target::ReadWrite => ("read-write", "SHOW transaction_read_only"),
            Target::Primary => ("a primary", "SHOW in_hot_standby"),
        };
        if wire.query(question).await?.as_deref() == Some("off") {
            return Ok(wire.into_session(started));
        }
        wire.terminate().await;
        Err(DialError::NotReadWrite {
            host: self.label.to_owned(),
            wanted,
        })
    }

    async fn connect(&self, tls: &Tls) -> Result<(Socket, Exposure), DialError> {
        let failed = |source| DialError::Connect {
            host: self.label.to_owned(),
            source,
        };
        match (self.address, &self.host.place) {
            (Address::Unix(path), Place::Socket(name) | Place::Tcp { name, .. }) => {
                let stream = UnixStream::connect(path).await.map_err(failed)?;
                let required = self.conninfo.require_peer.as_deref();
                let exposure = peer::examine(&stream, name, required, self.label)?;
                Ok((Socket::Unix(stream), exposure))
            }
            (Address::Tcp(address), Place::Tcp { name, .. } | Place::Socket(name)) => {
                let stream = socket::connect_tcp(*address, self.conninfo)
                    .await
                    .map_err(failed)?;
                let socket = tls::negotiate(stream, tls, name, self.label).await?;
                let exposure = socket.network_exposure().unwrap_or(Exposure::Clear);
                Ok((socket, exposure))
            }
        }
    }
}
