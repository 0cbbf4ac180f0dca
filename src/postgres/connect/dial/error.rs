//! Errors that a connection attempt can return.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use postgres_protocol::message::backend::ErrorFields;
use tokio_postgres::error::DbError;
use tokio_postgres::fallible_iterator::FallibleIterator;

use crate::escape::shell_word_on_one_line;
use crate::model::commands::Commands;
use crate::postgres::connect::conninfo::exposure::Exposure;
use crate::postgres::connect::conninfo::syntax::quote_value;
use crate::postgres::connect::conninfo::{Conninfo, PasswordError, SslMode};
use crate::postgres::table::identifier;
use crate::trusted_path::PathError;

/// Maximum length of a field. Longer fields are truncated so that they don't fill the logs.
const FIELD_BYTES_MAX: usize = 8192;

/// An ErrorResponse or NoticeResponse from the server.
///
/// Spec: PostgreSQL 18, 54.8 "Error and Notice Message Fields".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerError {
    /// The severity, such as FATAL, ERROR or WARNING. Not localized.
    pub severity: String,
    /// The SQLSTATE, a five-character code.
    pub code: String,
    /// The message, in the server's language.
    pub message: String,
    /// The DETAIL field.
    pub detail: Option<String>,
    /// The HINT field.
    pub hint: Option<String>,
    /// The function in the server's source code that reported the error; empty if unknown. Unlike
    /// the message, it does not depend on the server's language.
    pub routine: String,
}

impl ServerError {
    /// Parses the fields of a message. Bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// Returns an [`io::Error`] if a field is not terminated.
    pub fn parse(mut fields: ErrorFields<'_>) -> io::Result<ServerError> {
        let mut error = ServerError::default();
        let mut localized_severity = String::new();
        while let Some(field) = fields.next()? {
            let value = self::field(field.value_bytes());
            match field.type_() {
                b'V' => error.severity = value,
                b'S' => localized_severity = value,
                b'C' => error.code = value,
                b'M' => error.message = value,
                b'D' => error.detail = Some(value),
                b'H' => error.hint = Some(value),
                b'R' => error.routine = value,
                _ => {}
            }
        }
        if error.severity.is_empty() {
            error.severity = localized_severity;
        }
        Ok(error)
    }

    /// Returns the connection pooler that sent this error, judging by its message, or `None` if no
    /// known pooler sends such a message. PostgreSQL itself never sends these messages.
    #[must_use]
    pub(crate) fn pooler(&self) -> Option<Pooler> {
        let contains = |words: &str| self.message.contains(words);
        let (name, instead) = match self.code.as_str() {
            // PgBouncer rejects parameters that it does not forward, such as `replication` or one
            // of the settings that Walpost uses in every session.
            "08P01" if contains("unsupported startup parameter") => ("PgBouncer", OWN_ADDRESS),
            "0A000" if contains("RDS Proxy") => (
                "RDS Proxy",
                "the endpoint of the RDS DB instance or DB cluster",
            ),
            // Supavisor expects the project's ID as a suffix of the user name.
            "XX000" if contains("Tenant or user not found") || contains("tenant/user") => (
                "Supavisor",
                "the direct connection host of the Supabase project (db.PROJECT.supabase.co, port 5432), without the project's ID \
                 in the user name",
            ),
            "58000" if contains("No pool configured for database") => ("PgCat", OWN_ADDRESS),
            _ => return None,
        };
        Some(Pooler { name, instead })
    }

    /// If the hint starts with a suggested command, replaces `--config FILE` in that command with
    /// this process's options. The files in sql/ can't contain these options. Only the beginning of
    /// the hint is changed. The rest can contain names that other roles chose, and text inserted
    /// into such a name could break its quoting.
    pub(crate) fn complete_commands(&mut self, commands: &Commands) {
        const STARTS: [(&str, &[&str]); 3] = [
            ("Create it: ", &["init"]),
            ("Create it as a superuser: ", &["init"]),
            (
                "Choose another name, because slot names are unique within a server: ",
                &["init", "--slot", "NAME"],
            ),
        ];
        let Some(hint) = &self.hint else { return };
        let found = STARTS.iter().find_map(|(start, words)| {
            let literal = format!("{start}walpost {} --config FILE;", words.join(" "));
            let rest = hint.strip_prefix(&literal)?;
            Some(format!("{start}{};{rest}", commands.print_words(words)))
        });
        if found.is_some() {
            self.hint = found;
        }
    }

    /// Returns whether a later attempt may succeed, for example because the server is starting up,
    /// shutting down or out of resources, or because the connection was lost.
    fn is_temporary(&self) -> bool {
        // 08P01 (protocol violation) is not temporary: a peer that does not support a message now
        // will not support it later either.
        self.code != "08P01"
            && self.pooler().is_none()
            && ["08", "53", "57"]
                .iter()
                .any(|class| self.code.starts_with(class))
    }
}

const OWN_ADDRESS: &str = "PostgreSQL's address and port";

/// A proxy that shares its PostgreSQL connections among clients, so that a client does not have a
/// session of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pooler {
    pub(crate) name: &'static str,
    /// The address to connect to instead of the pooler.
    instead: &'static str,
}

/// Returns the value of a field, truncated to [`FIELD_BYTES_MAX`]. Bytes that are not UTF-8 are
/// replaced.
fn field(value: &[u8]) -> String {
    let value = value.get(..FIELD_BYTES_MAX).unwrap_or(value);
    String::from_utf8_lossy(value).into_owned()
}

impl From<&DbError> for ServerError {
    fn from(error: &DbError) -> Self {
        ServerError {
            severity: error.severity().to_owned(),
            code: error.code().code().to_owned(),
            message: field(error.message().as_bytes()),
            detail: error.detail().map(|detail| field(detail.as_bytes())),
            hint: error.hint().map(|hint| field(hint.as_bytes())),
            routine: error.routine().unwrap_or_default().to_owned(),
        }
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SQLSTATE {})", self.message, self.code)?;
        if let Some(detail) = &self.detail {
            write!(f, " DETAIL: {detail}")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, " HINT: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ServerError {}

/// An error from a connection attempt. `host` is formatted as `name:port`, followed by the address
/// if the name resolves to several addresses.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The host name has no address, or no name server responded.
    #[error("{host} can't be resolved: {source}")]
    Resolve {
        /// The host that was tried.
        host: String,
        /// The error from the resolver.
        source: io::Error,
    },
    /// No server accepts connections at this address.
    #[error("{host}: can't connect: {source}{}", connect_remedy(.source))]
    Connect {
        /// The host that was tried.
        host: String,
        /// The error from the operating system.
        source: io::Error,
    },
    /// The session was not ready within `connect_timeout`.
    #[error(
        "{host}: no PostgreSQL server responded within {limit:?} (connect_timeout). Correct the host and port, or allow \
         the connection in the network's firewall rules"
    )]
    Timeout {
        /// The host that was tried.
        host: String,
        /// The time limit.
        limit: Duration,
    },
    /// The connection broke before the session was ready.
    #[error("{host}: connection lost during startup: {source}")]
    Io {
        /// The host that was tried.
        host: String,
        /// The I/O error.
        source: io::Error,
    },
    /// A local certificate, key or revocation list is missing or unusable.
    #[error("{parameter} {}: {reason}", path.display())]
    TlsFile {
        /// The connection parameter that names the file.
        parameter: &'static str,
        /// The file.
        path: PathBuf,
        /// Why the file is unusable, and how to fix it.
        reason: String,
    },
    /// A local certificate, key or revocation list is in a place where another user could have
    /// modified or replaced it.
    #[error("{parameter} {}: the file is not used: {error}", path.display())]
    UntrustedFile {
        /// The connection parameter that names the file.
        parameter: &'static str,
        /// The file.
        path: PathBuf,
        /// Which path other users can write to, and how to fix this.
        error: Box<PathError>,
    },
    /// The TLS handshake failed, usually because one side rejected the other's certificate.
    #[error("{host}: TLS failed: {reason}")]
    Tls {
        /// The host that was tried.
        host: String,
        /// The reason given by OpenSSL or the server.
        reason: String,
    },
    /// `sslmode` requires TLS, but the server does not support it.
    #[error(
        "{host}: the server does not support TLS (ssl = off), but sslmode={mode} requires it. \
         Enable it on the server, or set sslmode=disable"
    )]
    TlsRefused {
        /// The host that was tried.
        host: String,
        /// The value of `sslmode`.
        mode: SslMode,
    },
    /// The session did not apply the parameters in the startup message. Its search_path could
    /// therefore cause statements to call other roles' functions.
    #[error(
        "{host}: the session has search_path {search_path:?} instead of \"{}\": a connection pooler (such as PgCat or Supavisor) has \
         dropped parameters of the startup message. Connect directly to PostgreSQL's address and port",
        super::SEARCH_PATH.1
    )]
    Pooler {
        /// The host that was tried.
        host: String,
        /// The `search_path` that the session uses.
        search_path: String,
    },
    /// The server rejected the connection with an error.
    #[error("{host}: {error}")]
    Server {
        /// The host that was tried.
        host: String,
        /// The error from the server.
        error: Box<ServerError>,
    },
    /// The server requests a password, but no password is configured.
    #[error(
        "{host}: the server requests a password for role {user}, but none is configured. Set it in PGPASSWORD, in \
         ~/.pgpass (or in the file that PGPASSFILE names; mode 0600), or in the connection string"
    )]
    NoPassword {
        /// The host that was tried.
        host: String,
        /// The user to log in as.
        user: String,
    },
    /// The program that should print the password did not supply one.
    #[error(
        "{host}: the server requests a password, but password_command {program} did not supply one: {error}"
    )]
    PasswordCommand {
        /// The host that was tried.
        host: String,
        /// The program's path.
        program: String,
        /// The reason why the program did not supply a password.
        error: PasswordError,
    },
    /// The server requests an authentication method that Walpost does not support.
    #[error(
        "{host}: the server requests {method} authentication; Walpost supports trust, password, md5, \
         scram-sha-256 and client certificates (pg_hba.conf)"
    )]
    AuthMethod {
        /// The host that was tried.
        host: String,
        /// The requested method.
        method: String,
    },
    /// The server requests a method that `require_auth` does not allow.
    #[error(
        "{host}: the server requests {requested} authentication, which require_auth={required} does not allow. \
         Change require_auth, or change the method in pg_hba.conf"
    )]
    RequireAuth {
        /// The host that was tried.
        host: String,
        /// The allowed methods.
        required: String,
        /// The requested method.
        requested: &'static str,
    },
    /// The server requests a password, but an attacker may be able to read the network traffic, or
    /// the peer may not be PostgreSQL. The password was not sent.
    #[error(
        "{host}: the server requests {what}, but {}: {}, so the response was not sent. {}, or configure the server to request \
         scram-sha-256 (pg_hba.conf). To send the response anyway, set require_auth={method}",
        exposure.fault("the connection"), exposure.attacker(), exposure.remedy()
    )]
    Exposed {
        /// The host that was tried.
        host: String,
        /// The credential that the server requests.
        what: &'static str,
        /// How well the connection is protected from attackers.
        exposure: Exposure,
        /// The method's name in `require_auth`.
        method: String,
    },
    /// The process that listens on the Unix-domain socket belongs to a different user than
    /// `requirepeer` specifies. Nothing was sent to it.
    #[error(
        "{host}: the process that listens on the socket belongs to uid {found}, but requirepeer is {required}. Nothing \
         was sent to the process. Identify the process (ss -xlp); if it is PostgreSQL, correct requirepeer"
    )]
    OtherPeer {
        /// The host that was tried.
        host: String,
        /// The user that should own the process.
        required: String,
        /// The ID of the user that owns the process; "unknown" if the kernel does not report it.
        found: String,
    },
    /// The user that `requirepeer` names does not exist.
    #[error(
        "{host}: requirepeer={required} is not a user in /etc/passwd. Correct it, or use the numeric ID of the user that PostgreSQL \
         runs as"
    )]
    UnknownPeer {
        /// The host that was tried.
        host: String,
        /// The user name.
        required: String,
    },
    /// The server sent an invalid or unsafe SCRAM message, so it has not proven its identity.
    #[error("{host}: SCRAM authentication failed: {reason}")]
    Scram {
        /// The host that was tried.
        host: String,
        /// The reason for the failure.
        reason: String,
    },
    /// `channel_binding=require` is set, but channel binding is not possible.
    #[error("{host}: channel_binding=require can't be satisfied: {reason}")]
    ChannelBinding {
        /// The host that was tried.
        host: String,
        /// Why channel binding is not possible.
        reason: &'static str,
    },
    /// The session was established, but it does not satisfy `target_session_attrs`.
    #[error("{host}: the server is not {wanted} (target_session_attrs)")]
    NotReadWrite {
        /// The host that was tried.
        host: String,
        /// `read-write` or `primary`.
        wanted: &'static str,
    },
    /// The peer violated version 3.0 of PostgreSQL's protocol.
    #[error("{host}: the reply does not follow PostgreSQL's protocol: {what}")]
    Protocol {
        /// The host that was tried.
        host: String,
        /// A description of what was received.
        what: String,
    },
    /// Several attempts were made, and all of them failed.
    #[error("none of {} connection attempts succeeded: {}", failures.len(), list(failures))]
    AllHosts {
        /// All failures, in the order tried. Never empty, and never contains `AllHosts`.
        failures: Vec<DialError>,
        /// The index of the failure on which the suggested remedy is based: see
        /// [`DialError::decisive`].
        decisive: usize,
    },
}

fn list(failures: &[DialError]) -> String {
    let texts: Vec<_> = failures.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// Describes what to check if no server accepts connections, phrased to follow the operating
/// system's error.
fn connect_remedy(error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            "Start PostgreSQL at this address, or correct the host and port; PostgreSQL accepts connections at the addresses in \
             listen_addresses"
        }
        // The path of the Unix-domain socket does not exist.
        io::ErrorKind::NotFound => {
            "Start PostgreSQL, or correct the host and port; PostgreSQL creates its socket in the directories in unix_socket_directories"
        }
        _ => return String::new(),
    };
    format!(". {remedy}")
}

/// Describes how to fix an error for which PostgreSQL does not send a hint. Some errors are
/// recognized by their message, which works only if the server's messages are in English.
fn remedy(error: &ServerError, conninfo: &Conninfo) -> Option<String> {
    let (role, database) = (identifier(conninfo.user()), identifier(conninfo.dbname()));
    let contains = |words: &str| error.message.contains(words);
    if let Some(Pooler { name, instead }) = error.pooler() {
        return Some(format!(
            "This is a connection pooler ({name}, according to its error message). Replication and session settings require a direct \
             connection to PostgreSQL: connect to {instead}"
        ));
    }
    match error.code.as_str() {
        "28000" if contains("not permitted to log in") => Some(format!("ALTER ROLE {role} LOGIN")),
        "28000" if contains("no pg_hba.conf entry") => Some(match hba_line(&error.message, conninfo) {
            Some(line) => format!(
                "Add this line to pg_hba.conf on the server, before any line that rejects the connection: {line}. Then run: SELECT \
                 pg_catalog.pg_reload_conf()"
            ),
            None => "Add a line for this database and role to pg_hba.conf on the server, before any line that rejects the connection. Then run: \
                     SELECT pg_catalog.pg_reload_conf()"
                .to_owned(),
        }),
        "28000" if contains("Peer authentication failed") => Some(format!(
            "pg_hba.conf requires peer authentication for role {role}: run Walpost as the operating system user with \
             that name (sudo -u {} walpost ...), or connect over TCP with a password (host=localhost)",
            shell_word_on_one_line(conninfo.user())
        )),
        "28P01" => Some(format!(
            "The password comes from the connection string, PGPASSWORD, ~/.pgpass or password_command. To set a new password as a superuser: \
             psql {} -c {}",
            shell_word_on_one_line(&format!("dbname={}", quote_value(conninfo.dbname()))),
            shell_word_on_one_line(&format!("\\password {role}"))
        )),
        "28000" if contains("does not exist") && conninfo.is_default_user => Some(
            "No user is configured, so the name of the operating system user is used. Set the role that walpost init created: \
             postgresql://walpost@..., or PGUSER=walpost"
                .to_owned(),
        ),
        "28000" if contains("does not exist") => Some(format!(
            "To create the role walpost, run walpost init as a superuser. To create this role: CREATE ROLE {role} LOGIN REPLICATION"
        )),
        "3D000" => Some(format!(
            "Use the name of the database that contains the outbox, or create the database: CREATE DATABASE {database}"
        )),
        "42501" if contains("permission denied for database") => {
            Some(format!("GRANT CONNECT ON DATABASE {database} TO {role}"))
        }
        "55000" if contains("not currently accepting connections") => {
            Some(format!("ALTER DATABASE {database} ALLOW_CONNECTIONS true"))
        }
        "53300" if contains("max_wal_senders") => Some(
            "Each pipeline uses a walsender. To list the current walsenders: SELECT pid, application_name, client_addr FROM \
             pg_stat_replication. To allow more: ALTER SYSTEM SET max_wal_senders = ..., and restart the server"
                .to_owned(),
        ),
        // The message contains "walsender" in PostgreSQL 15 and earlier, and "WAL sender" in later
        // versions.
        "42501" if contains("walsender") || contains("WAL sender") => {
            Some(format!("ALTER ROLE {role} REPLICATION"))
        }
        _ => None,
    }
}

/// Returns the line to add to pg_hba.conf to allow the connection, or `None` if pg_hba.conf can't
/// contain one of the names. `message` contains the client's address as the server sees it. The
/// line names the database, because `replication` in that field would match only physical
/// replication.
fn hba_line(message: &str, conninfo: &Conninfo) -> Option<String> {
    let (role, database) = (hba_word(conninfo.user())?, hba_word(conninfo.dbname())?);
    let address = message.split('"').nth(1).unwrap_or_default();
    Some(match address.parse::<IpAddr>() {
        Ok(address) => {
            let bits = match address {
                IpAddr::V4(_) => 32,
                IpAddr::V6(_) => 128,
            };
            let kind = match message.contains("no encryption") {
                true => "host",
                false => "hostssl",
            };
            format!("{kind} {database} {role} {address}/{bits} scram-sha-256")
        }
        Err(_) => format!("local {database} {role} scram-sha-256"),
    })
}

/// Formats a name for pg_hba.conf, quoted if it is a keyword or contains characters such as spaces.
/// Returns `None` for a name that can't be represented: a line feed ends a line, and a word that
/// starts with a slash is a regular expression, whether quoted or not (PostgreSQL 18, 20.1 "The
/// pg_hba.conf File").
fn hba_word(name: &str) -> Option<String> {
    if name.is_empty() || name.starts_with('/') || name.contains(char::is_control) {
        return None;
    }
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let is_keyword = matches!(name, "all" | "sameuser" | "samerole" | "replication");
    Some(match name.chars().all(is_plain) && !is_keyword {
        true => name.to_owned(),
        false => format!("\"{}\"", name.replace('"', "\"\"")),
    })
}

impl DialError {
    /// Adds a hint that describes how to fix the error, if a fix is known.
    pub(crate) fn with_remedy(mut self, conninfo: &Conninfo) -> Self {
        if let DialError::Server { error, .. } = &mut self
            && error.hint.is_none()
        {
            error.hint = remedy(error, conninfo);
        }
        self
    }

    /// Returns the failure on which the suggested remedy is based. Never returns
    /// [`DialError::AllHosts`].
    ///
    /// If several attempts failed, returns the failure that is most likely to be temporary. If
    /// several failures are equally likely to be temporary, returns the last of them. For example,
    /// if one host is unreachable and another rejected the password, the unreachable host may still
    /// accept the connection later.
    pub fn decisive(&self) -> &DialError {
        match self {
            DialError::AllHosts { failures, decisive } => failures.get(*decisive).unwrap_or(self),
            error => error,
        }
    }

    /// Returns every failed attempt, in the order tried.
    pub fn attempts(&self) -> &[DialError] {
        match self {
            DialError::AllHosts { failures, .. } => failures,
            error => std::slice::from_ref(error),
        }
    }

    /// Returns the error that the server reported, if [`DialError::decisive`] returns a failure
    /// with such an error.
    pub(in crate::postgres) fn server_mut(&mut self) -> Option<&mut ServerError> {
        match self {
            DialError::Server { error, .. } => Some(error),
            DialError::AllHosts { failures, decisive } => {
                failures.get_mut(*decisive).and_then(DialError::server_mut)
            }
            _ => None,
        }
    }

    /// Combines the errors of all attempts into one error, or returns `None` if `failures` is
    /// empty.
    pub(crate) fn combine(mut failures: Vec<DialError>) -> Option<DialError> {
        let decisive = (0..failures.len()).max_by_key(|i| failures[*i].retry_rank())?;
        if failures.len() == 1 {
            return failures.pop();
        }
        Some(DialError::AllHosts { failures, decisive })
    }

    /// Returns how likely the error is to disappear without intervention. A higher rank means more
    /// likely.
    fn retry_rank(&self) -> u8 {
        match self {
            DialError::Connect { .. }
            | DialError::Timeout { .. }
            | DialError::Io { .. }
            | DialError::Resolve { .. }
            | DialError::PasswordCommand { .. }
            | DialError::UntrustedFile { .. }
            | DialError::OtherPeer { .. }
            | DialError::NotReadWrite { .. } => 2,
            DialError::Server { error, .. } if error.is_temporary() => 2,
            DialError::Server { .. } => 1,
            DialError::TlsFile { .. }
            | DialError::Tls { .. }
            | DialError::TlsRefused { .. }
            | DialError::NoPassword { .. }
            | DialError::AuthMethod { .. }
            | DialError::RequireAuth { .. }
            | DialError::Exposed { .. }
            | DialError::UnknownPeer { .. }
            | DialError::Scram { .. }
            | DialError::ChannelBinding { .. }
            | DialError::Protocol { .. }
            | DialError::Pooler { .. }
            | DialError::AllHosts { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(conninfo: &str, message: &str) -> String {
        let error = ServerError {
            code: "28000".to_owned(),
            message: message.to_owned(),
            ..ServerError::default()
        };
        let conninfo = Conninfo::parse(conninfo, &|_| None).expect("a connection string");
        remedy(&error, &conninfo).expect("a hint")
    }

    #[test]
    fn suggests_a_remedy_if_a_role_or_database_is_rejected() {
        let peer = hint(
            "user=postgres dbname=shop",
            "Peer authentication failed for user \"postgres\"",
        );
        assert!(peer.contains("sudo -u postgres walpost"), "{peer}");
        let missing = hint("user=Shop", "role \"Shop\" does not exist");
        assert!(
            missing.contains("CREATE ROLE \"Shop\" LOGIN REPLICATION"),
            "{missing}"
        );
    }

    #[test]
    fn leaves_commands_within_quoted_names_unchanged() {
        let completed = |hint: &str| {
            let mut error = ServerError {
                hint: Some(hint.to_owned()),
                ..ServerError::default()
            };
            error.complete_commands(&Commands::for_pipeline("orders"));
            error.hint.expect("a hint")
        };
        let plain = completed(
            "Create it: walpost init --config FILE; or run sql/journal.sql of Walpost in this database",
        );
        assert!(
            plain.starts_with("Create it: walpost init --pipeline orders; or run "),
            "{plain}"
        );
        let name = "Drop the table: DROP TABLE 'walpost init --config FILE;touch /tmp/f;#'";
        assert_eq!(completed(name), name);
    }

    #[test]
    fn suggests_the_missing_line_of_pg_hba_conf() {
        for (message, line) in [
            (
                "no pg_hba.conf entry for host \"192.0.2.7\", user \"w\", database \"shop\", SSL encryption",
                "hostssl shop w 192.0.2.7/32",
            ),
            (
                "no pg_hba.conf entry for host \"2001:db8::7\", user \"w\", database \"shop\", no encryption",
                "host shop w 2001:db8::7/128",
            ),
            (
                "no pg_hba.conf entry for host \"[local]\", user \"w\", database \"shop\", no encryption",
                "local shop w",
            ),
        ] {
            let found = hint("host=h user=w dbname=shop", message);
            let line = format!(": {line} scram-sha-256.");
            assert!(found.contains(&line), "{found}");
        }
        let quoted = hint(
            "host=h user=w-1 dbname=replication",
            "no pg_hba.conf entry for host \"192.0.2.7\"",
        );
        assert!(
            quoted.contains("hostssl \"replication\" \"w-1\" "),
            "{quoted}"
        );
        let refused = "no pg_hba.conf entry for host \"192.0.2.7\"";
        let escaped = hint("host=h user=w dbname='x\",all all trust #'", refused);
        assert!(
            escaped.contains("hostssl \"x\"\",all all trust #\" w 192"),
            "{escaped}"
        );
        for name in ["/.*", "x\nlocal all all trust"] {
            let no_line = hint(&format!("host=h user=w dbname='{name}'"), refused);
            assert!(!no_line.contains("host"), "{no_line}");
        }
    }
}
