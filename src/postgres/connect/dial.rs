//! Opens authenticated connections. Tries the hosts in turn, negotiates TLS, authenticates, and
//! checks whether the server meets `target_session_attrs`. Replication connections and
//! tokio-postgres clients are both opened in this way.
//!
//! Differences from libpq:
//! - If one host rejects the connection, the remaining hosts are still tried.
//! - With `sslmode=prefer`, certificates are never verified, and a connection without TLS is
//!   attempted only if the handshake fails or `pg_hba.conf` rejects the connection.
//! - A cleartext or MD5-hashed password is sent over a network only if the server has proven its
//!   identity, and over a Unix-domain socket only if no other user could have created the socket.
//!   `require_auth` disables this protection for the methods that it names.
//! - `requirepeer` also accepts a user ID.

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
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio_postgres::error::{DbError, Severity};
use tokio_postgres::{AsyncMessage, CancelToken, NoTls};
use tracing::{debug, info, warn};

pub(crate) use bound::SqlLimits;
pub(crate) use error::{DialError, ServerError};
pub(crate) use notifications::Notifications;
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
mod notifications;
mod peer;
mod scram;
mod socket;
mod startup;
#[cfg(test)]
mod tests;
mod tls;

/// Maximum length of a logged notice, in characters. The limit is high because a hint can contain
/// one command for each of many tables.
const NOTICE_CHARS_MAX: usize = 16_384;

/// Settings for every session that Walpost opens. They override settings made with `ALTER ROLE` and
/// `ALTER DATABASE`, so that other database users can't execute code with Walpost's privileges or
/// otherwise interfere with its sessions.
///
/// - `search_path`: if the path contained other schemas, a function or operator in one of them
///   could match the argument types better than the intended one in pg_catalog, and would be called
///   instead (CVE-2018-1058).
/// - `row_security`: if on, querying a table runs the functions in its policies. If off, a query
///   fails if a policy would hide rows.
/// - `role`: the database owner can set this parameter, and objects that Walpost creates would then
///   belong to another role.
/// - `standard_conforming_strings`: Walpost's literals are valid only if this is on.
/// - `quote_all_identifiers`: Walpost compares names that the server prints with names that are
///   quoted only if necessary.
/// - `default_transaction_isolation`: at levels above READ COMMITTED, a query could see the
///   catalogs as they were before Walpost locked a table.
/// - `constraint_exclusion`: if `on`, reading a partition directly makes the planner evaluate the
///   partition keys of its ancestors.
/// - `gin_fuzzy_search_limit`: if set, a query that uses a GIN index can omit rows.
/// - `client_min_messages`: notices must reach Walpost, because some warn about privileges of other
///   roles.
/// - `default_transaction_read_only`: if on, Walpost can't confirm a position, because it must
///   write the position to a table first. Some providers enable this parameter when retained WAL
///   has nearly filled the disk, which would keep Walpost from releasing that WAL.
/// - `synchronous_commit`: if `on`, and if the server treats Walpost as a synchronous standby, a
///   commit would wait for Walpost itself.
/// - Timeouts: they would terminate sessions that have to wait, such as an idle catalog connection,
///   or a walsender from which Walpost does not read while Kafka is unavailable. Walpost enforces
///   its own time limits. See also [`LATER_TIMEOUTS`].
///
/// Spec: PostgreSQL 18, 5.10.6 "Usage Patterns", 5.9 "Row Security Policies", 19.11.1 "Statement
/// Behavior".
const SAFE_SESSION: [(&str, &str); 13] = [
    SEARCH_PATH,
    ("row_security", "off"),
    ("standard_conforming_strings", "on"),
    ("quote_all_identifiers", "off"),
    ("default_transaction_isolation", "read committed"),
    ("constraint_exclusion", "partition"),
    ("gin_fuzzy_search_limit", "0"),
    ("client_min_messages", "notice"),
    ("default_transaction_read_only", "off"),
    ("synchronous_commit", "local"),
    ("statement_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ROLE,
];

/// A query that makes the server end a session within seconds after its client has disappeared,
/// even during a statement. Otherwise, a statement could continue to hold locks or to read a table.
/// Operating systems other than Linux may not support this.
///
/// The query also disables timeouts that older versions of PostgreSQL lack: `idle_session_timeout`,
/// which was added in version 14, and `transaction_timeout`, which was added in version 17. They
/// can't be set in the startup message, because servers reject unknown parameters there.
const LATER_TIMEOUTS: &str = "SELECT pg_catalog.set_config(name, CASE WHEN name OPERATOR(pg_catalog.=) 'client_connection_check_interval' \
     THEN '2s' ELSE '0' END, false) FROM pg_catalog.pg_settings \
     WHERE name OPERATOR(pg_catalog.=) ANY ('{idle_session_timeout,transaction_timeout}') \
     OR name OPERATOR(pg_catalog.=) 'client_connection_check_interval' AND pg_catalog.version() OPERATOR(pg_catalog.~) 'linux'";

/// The oldest supported major version of PostgreSQL. [`LATER_TIMEOUTS`] is not sent to older
/// versions, which have neither of these timeouts.
const SUPPORTED_SINCE: u32 = 14;

const SEARCH_PATH: (&str, &str) = ("search_path", "pg_catalog, pg_temp");

/// How long an SQL client's statement waits for a lock by default. If another session holds the
/// lock for longer, the statement fails. Without this limit, the pipeline would stall without a log
/// message.
const LOCK_TIMEOUT: &str = "10s";

const ROLE: (&str, &str) = ("role", "none");

/// See [`SqlConnection::signal`].
pub(crate) const SIGNAL: &str = "walpost signal";

/// An authenticated connection that is ready for queries.
pub struct Session {
    pub socket: Socket,
    /// Bytes that the server sent after ReadyForQuery and that have already been read, if any.
    pub buffer: BytesMut,
    /// Parameters that the server reported: `server_version`, `in_hot_standby`, and so on.
    pub parameters: HashMap<String, String>,
    /// Process ID of the server process.
    pub backend_pid: i32,
    /// The secret key that a request to cancel this session's query must contain.
    pub secret: i32,
    /// The host that accepted the connection, for logs.
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

/// The connection of an SQL client. This is a future that must be polled, for example by spawning
/// it, for as long as the client is in use. It completes when the client is dropped, or with an
/// error if the connection breaks.
pub(crate) struct SqlConnection {
    driver: handover::Driver,
    notifications: Arc<Notifications>,
    notices: Arc<NoticeLimit>,
    signal: Arc<Notify>,
    /// `None` if the connection was not opened by [`sql`].
    peer: Option<Peer>,
}

/// The address to which a session is connected, for cancel requests.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    host: Host,
    address: Address,
    /// The settings with which the connection was established. With `sslmode=prefer`, they may
    /// differ from those in the connection string.
    tls: Tls,
}

impl SqlConnection {
    fn new(driver: handover::Driver) -> Self {
        Self {
            driver,
            notifications: Arc::default(),
            notices: Arc::default(),
            signal: Arc::default(),
            peer: None,
        }
    }

    /// Returns a handle that is notified when the server sends the message [`SIGNAL`] with severity
    /// INFO. A running statement can send this message, whereas notifications are sent only between
    /// transactions.
    pub(crate) fn signal(&self) -> Arc<Notify> {
        Arc::clone(&self.signal)
    }

    pub(crate) fn peer(&self) -> Option<Peer> {
        self.peer.clone()
    }

    /// Returns a handle for receiving the notifications that arrive while the connection is polled.
    pub(crate) fn notifications(&self) -> Arc<Notifications> {
        Arc::clone(&self.notifications)
    }
}

impl Future for SqlConnection {
    type Output = Result<(), tokio_postgres::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        while let Some(message) = ready!(self.driver.poll_message(cx)).transpose()? {
            match message {
                AsyncMessage::Notice(notice)
                    if notice.message() == SIGNAL
                        && notice.parsed_severity() == Some(Severity::Info) =>
                {
                    self.signal.notify_one();
                }
                AsyncMessage::Notice(notice) => log_notice(&notice, &self.notices),
                AsyncMessage::Notification(notification) => {
                    self.notifications.receive(notification.payload());
                }
                _ => {}
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Logs a notice, unless too many notices were logged recently. Includes the hint, because it may
/// contain a command that PostgreSQL or a file in sql/ suggests.
fn log_notice(notice: &DbError, limit: &NoticeLimit) {
    let parts = [Some(notice.message()), notice.detail(), notice.hint()];
    let parts = parts.into_iter().flatten();
    let parts: Vec<_> = parts
        .map(|part| part.trim_end_matches(['.', ';']))
        .collect();
    let text: String = parts.join(". ").chars().take(NOTICE_CHARS_MAX).collect();
    let is_warning = notice.parsed_severity() == Some(Severity::Warning);
    // Notices caused by CREATE ... IF NOT EXISTS and DROP ... IF EXISTS end with ", skipping".
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

/// Opens a session for logical replication (`replication=database`), which also accepts `SHOW` and
/// SQL. `startup` contains server parameters to add to the startup message.
///
/// # Errors
/// Returns a [`DialError`]. If more than one attempt was made, this is [`DialError::AllHosts`].
pub(crate) async fn replication(
    conninfo: &Conninfo,
    startup: &[(&str, &str)],
) -> Result<Session, DialError> {
    let mut parameters = vec![("replication", "database")];
    parameters.extend_from_slice(startup);
    let (session, _) = connect(conninfo, &parameters).await?;
    Ok(session)
}

/// Opens an SQL client and its connection, which must be polled. If the server sends more than
/// `limits` allow, the connection stops reading, and the pending query fails with an error that
/// states the reason.
///
/// # Errors
/// Returns the same errors as [`replication`].
pub(crate) async fn sql(
    conninfo: &Conninfo,
    limits: SqlLimits,
) -> Result<(tokio_postgres::Client, SqlConnection), DialError> {
    let (session, peer) = connect(conninfo, &[("lock_timeout", LOCK_TIMEOUT)]).await?;
    let (client, mut connection) =
        handover::to_tokio_postgres(session, &conninfo.user, limits).await?;
    connection.notices = Arc::clone(&conninfo.notices);
    connection.peer = Some(peer);
    Ok((client, connection))
}

/// Asks the server to cancel the statement that is running in the session of `token`. The server
/// does not report whether it has canceled a statement.
///
/// # Errors
/// Returns an error if the server can't be reached.
///
/// Spec: PostgreSQL 18, 54.2.8 "Canceling Requests in Progress".
pub(crate) async fn cancel(
    conninfo: &Conninfo,
    peer: &Peer,
    token: &CancelToken,
) -> Result<(), DialError> {
    let label = peer.host.to_string();
    let attempt = Attempt {
        conninfo,
        parameters: &[],
        host: &peer.host,
        address: &peer.address,
        label: &label,
    };
    let (mut socket, _) = with_timeout(conninfo, &label, attempt.connect(&peer.tls)).await??;
    // The socket already uses TLS if required.
    let sent = token.cancel_query_raw(&mut socket, NoTls).await;
    sent.map_err(|error| DialError::Connect {
        host: label,
        source: io::Error::other(error),
    })?;
    // The server closes the connection after it has processed the request. Closing it earlier could
    // discard the request. Errors are ignored, because the request has been sent.
    let _ = socket.read(&mut [0]).await;
    Ok(())
}

async fn connect(conninfo: &Conninfo, more: &[(&str, &str)]) -> Result<(Session, Peer), DialError> {
    let mut parameters = SAFE_SESSION.to_vec();
    if conninfo.sets_role() {
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
                Ok(connected) => return Ok(connected),
                Err(error) => failures.push(error.with_remedy(conninfo)),
            }
        }
    }
    Err(
        DialError::combine(failures).unwrap_or_else(|| DialError::Resolve {
            host: conninfo.describe(),
            source: io::Error::other("no address"),
        }),
    )
}

/// Resolves the addresses of a host. The result is never empty.
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
    let found = with_timeout(conninfo, &host.to_string(), look_up).await?;
    found.map_err(|source| DialError::Resolve {
        host: host.to_string(),
        source,
    })
}

/// Runs a step of a connection attempt with a time limit. A single step has the same time limit as
/// the whole attempt.
async fn with_timeout<T>(
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

/// An attempt to connect to one address of a host.
struct Attempt<'a> {
    conninfo: &'a Conninfo,
    parameters: &'a [(&'a str, &'a str)],
    host: &'a Host,
    address: &'a Address,
    label: &'a str,
}

impl Attempt<'_> {
    async fn run(&self) -> Result<(Session, Peer), DialError> {
        let tls = &self.conninfo.tls;
        let error = match with_timeout(self.conninfo, self.label, self.open(tls)).await? {
            Ok(session) => return Ok((session, self.peer(tls.clone()))),
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
        match with_timeout(self.conninfo, self.label, self.open(&plain)).await {
            Ok(Ok(session)) => {
                tracing::warn!(host = self.label, %error, "connected without TLS, as sslmode=prefer allows");
                Ok((session, self.peer(plain)))
            }
            // Without TLS, the server requested a password, which was not sent because the
            // connection is not secure. This error is more useful than the reason why TLS failed.
            Ok(Err(kept @ DialError::Exposed { .. })) => Err(kept),
            // Report the TLS error, because its cause is the problem that the operator has to fix.
            Ok(Err(_)) | Err(_) => Err(error),
        }
    }

    fn peer(&self, tls: Tls) -> Peer {
        Peer {
            host: self.host.clone(),
            address: self.address.clone(),
            tls,
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
            .record_connection(wire.exposure(), self.label, tls.mode);
        // A connection pooler may have dropped the parameters from the startup message. SHOW does
        // not call functions, so it is safe with any search_path.
        let search_path = wire.query("SHOW search_path").await?;
        if search_path.as_deref() != Some(SEARCH_PATH.1) {
            wire.terminate().await;
            return Err(DialError::Pooler {
                host: self.label.to_owned(),
                search_path: search_path.unwrap_or_default(),
            });
        }
        if started.may_be_since(SUPPORTED_SINCE) {
            wire.query(LATER_TIMEOUTS).await?;
        }
        // `SHOW` also works in a replication session.
        let (wanted, query) = match self.conninfo.target {
            Target::Any => return Ok(wire.into_session(started)),
            Target::ReadWrite => ("read-write", "SHOW transaction_read_only"),
            Target::Primary => ("a primary", "SHOW in_hot_standby"),
        };
        if wire.query(query).await?.as_deref() == Some("off") {
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
