//! Why no connection came about, one variant a kind.

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

/// So much of a field is kept: a server that sends more fills logs.
const FIELD_BYTES_MAX: usize = 8192;

/// An ErrorResponse or NoticeResponse of the server.
///
/// Spec: PostgreSQL 18, 54.8 "Error and Notice Message Fields".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerError {
    /// FATAL, ERROR, WARNING ...; not localized.
    pub severity: String,
    /// SQLSTATE, five characters.
    pub code: String,
    /// In the server's language.
    pub message: String,
    /// More about the message.
    pub detail: Option<String>,
    /// What the server suggests.
    pub hint: Option<String>,
    /// The function in the server's source that reported it; empty if unknown. Unlike the message, it is not translated.
    pub routine: String,
}

impl ServerError {
    /// Reads the fields of a message; bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// [`io::Error`] for a field that is not terminated.
    pub fn parse(mut fields: ErrorFields<'_>) -> io::Result<ServerError> {
        let mut error = ServerError::default();
        let mut localized_severity = String::new();
        while let Some(field) = fields.next()? {
            let value = field.value_bytes();
            let value = value.get(..FIELD_BYTES_MAX).unwrap_or(value);
            let value = String::from_utf8_lossy(value).into_owned();
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

    /// The pooler that has said this, where it is one by its words: PostgreSQL has none like them.
    #[must_use]
    pub(crate) fn pooler(&self) -> Option<Pooler> {
        let says = |words: &str| self.message.contains(words);
        let (name, instead) = match self.code.as_str() {
            // Of what it does not pass on: replication, or a setting that every session of ours has.
            "08P01" if says("unsupported startup parameter") => ("PgBouncer", OWN_ADDRESS),
            "0A000" if says("RDS Proxy") => {
                ("RDS Proxy", "the endpoint of the instance or the cluster")
            }
            // Supavisor knows projects by the name that the user ends with.
            "XX000" if says("Tenant or user not found") || says("tenant/user") => (
                "Supavisor",
                "the project's own host, as db.PROJECT.supabase.co, port 5432, with the user's name alone",
            ),
            "58000" if says("No pool configured for database") => ("PgCat", OWN_ADDRESS),
            _ => return None,
        };
        Some(Pooler { name, instead })
    }

    /// Puts the options of this process in the place of `--config FILE` in the command at the start of a hint: a file in sql/ cannot know them. Names that
    /// other roles choose can follow, and a command that is inserted between their quotes would end these.
    pub(crate) fn complete_commands(&mut self, commands: &Commands) {
        const STARTS: [&str; 2] = ["Create it: ", "Create it as a superuser: "];
        let Some(hint) = &self.hint else { return };
        let found = STARTS.iter().find_map(|start| {
            let rest = hint
                .strip_prefix(start)?
                .strip_prefix("walpost init --config FILE;")?;
            Some(format!("{start}{};{rest}", commands.print(["init"])))
        });
        if found.is_some() {
            self.hint = found;
        }
    }

    /// Whether the same question can have another answer in a while: the server starts, stops, is
    /// full or lost a peer.
    fn passes(&self) -> bool {
        // What the other side does not understand it will not understand next time.
        self.code != "08P01"
            && self.pooler().is_none()
            && ["08", "53", "57"]
                .iter()
                .any(|class| self.code.starts_with(class))
    }
}

const OWN_ADDRESS: &str = "its own address and port";

/// A program between, which shares connections and has no session of one's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pooler {
    pub(crate) name: &'static str,
    /// What to connect to instead.
    instead: &'static str,
}

impl From<&DbError> for ServerError {
    fn from(error: &DbError) -> Self {
        ServerError {
            severity: error.severity().to_owned(),
            code: error.code().code().to_owned(),
            message: error.message().to_owned(),
            detail: error.detail().map(str::to_owned),
            hint: error.hint().map(str::to_owned),
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

/// Why no connection came about. `host` is `name:port`, with the address behind it where the name
/// has several.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The name has no address, or no name server answered.
    #[error("{host}: can't be resolved: {source}")]
    Resolve {
        /// The host tried.
        host: String,
        /// The resolver's answer.
        source: io::Error,
    },
    /// Nothing accepts connections there.
    #[error("{host}: can't connect: {source}{}", connect_remedy(.source))]
    Connect {
        /// The host tried.
        host: String,
        /// The operating system's answer.
        source: io::Error,
    },
    /// No session within `connect_timeout`.
    #[error(
        "{host}: no PostgreSQL server has responded within {limit:?} (connect_timeout). Correct host and port, or let the network \
         pass the connection"
    )]
    Timeout {
        /// The host tried.
        host: String,
        /// The time allowed.
        limit: Duration,
    },
    /// The connection broke before the session was ready.
    #[error("{host}: connection lost during startup: {source}")]
    Io {
        /// The host tried.
        host: String,
        /// What happened to the connection.
        source: io::Error,
    },
    /// A certificate, key or revocation list on this side is missing or unusable.
    #[error("{parameter} {}: {reason}", path.display())]
    TlsFile {
        /// The connection parameter that names the file.
        parameter: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what would fix it.
        reason: String,
    },
    /// Another user could have written a certificate, key or revocation list on this side.
    #[error("{parameter} {}: the file is not used: {error}", path.display())]
    UntrustedFile {
        /// The connection parameter that names the file.
        parameter: &'static str,
        /// The file.
        path: PathBuf,
        /// What others can write, and what prevents it.
        error: Box<PathError>,
    },
    /// The TLS handshake failed: most often a certificate that one side does not accept.
    #[error("{host}: TLS failed: {reason}")]
    Tls {
        /// The host tried.
        host: String,
        /// What OpenSSL or the other side said.
        reason: String,
    },
    /// `sslmode` asks for TLS and the server has none.
    #[error(
        "{host}: the server has no TLS (ssl = off) and sslmode={mode} requires it; \
         turn it on there, or write sslmode=disable"
    )]
    TlsRefused {
        /// The host tried.
        host: String,
        /// The mode asked for.
        mode: SslMode,
    },
    /// The server refused the session.
    #[error("{host}: {error}")]
    Server {
        /// The host tried.
        host: String,
        /// The server's own words.
        error: Box<ServerError>,
    },
    /// The server asks for a password and none is known.
    #[error(
        "{host}: no password for role {user}, which the server asks for: give it in PGPASSWORD, \
         in a line of ~/.pgpass (or of the file that PGPASSFILE names; mode 0600), or in the \
         connection string"
    )]
    NoPassword {
        /// The host tried.
        host: String,
        /// Who was asked.
        user: String,
    },
    /// The program that prints the password gave none.
    #[error("{host}: the server asks for a password, and password_command {program} {error}")]
    PasswordCommand {
        /// The host tried.
        host: String,
        /// The program's path.
        program: String,
        /// What came of it.
        error: PasswordError,
    },
    /// The server asks for a method that Walpost does not have.
    #[error(
        "{host}: the server asks for {method} authentication; walpost has trust, password, md5, \
         scram-sha-256 and client certificates (pg_hba.conf)"
    )]
    AuthMethod {
        /// The host tried.
        host: String,
        /// The method asked for.
        method: String,
    },
    /// The server asks for what `require_auth` does not allow.
    #[error(
        "{host}: the server asks for {asked} authentication, and require_auth={required} does not allow it: \
         allow it there, or change the method in pg_hba.conf"
    )]
    RequireAuth {
        /// The host tried.
        host: String,
        /// What is allowed.
        required: String,
        /// What it asks for.
        asked: &'static str,
    },
    /// The server asks for a password on a connection that others can read, or can be the ones who
    /// ask. Nothing was sent.
    #[error(
        "{host}: the server asks for {what}, and the connection {}: {} could have it, so it was not sent. {}, or have the server ask \
         for scram-sha-256 (pg_hba.conf); to send it all the same: require_auth={method}",
        exposure.fault(), exposure.attacker(), exposure.remedy()
    )]
    Exposed {
        /// The host tried.
        host: String,
        /// What it asks for.
        what: &'static str,
        /// How it is exposed.
        exposure: Exposure,
        /// The method's name for `require_auth`.
        method: String,
    },
    /// The process that listens at the Unix-domain socket is another user's. Nothing was sent.
    #[error(
        "{host}: the process that listens at the socket belongs to uid {found}, and requirepeer={required} allows no other user: \
         nothing was sent to it. Look which process that is (ss -xlp); if it is PostgreSQL, correct requirepeer"
    )]
    OtherPeer {
        /// The host tried.
        host: String,
        /// Who should listen.
        required: String,
        /// The ID of the user who does.
        found: String,
    },
    /// The user that `requirepeer` names is not known.
    #[error(
        "{host}: requirepeer={required} names no user in /etc/passwd: correct it, or use the numeric ID of the user that PostgreSQL \
         runs as"
    )]
    UnknownPeer {
        /// The host tried.
        host: String,
        /// The name.
        required: String,
    },
    /// The SCRAM exchange failed on the server's side of the proof: it may not be the server it
    /// says it is.
    #[error("{host}: SCRAM authentication failed: {reason}")]
    Scram {
        /// The host tried.
        host: String,
        /// What was wrong.
        reason: String,
    },
    /// `channel_binding=require` can't be kept.
    #[error("{host}: channel_binding=require can't be met: {reason}")]
    ChannelBinding {
        /// The host tried.
        host: String,
        /// Why not.
        reason: &'static str,
    },
    /// A session, but not the kind that `target_session_attrs` asks for.
    #[error("{host}: is not {wanted} (target_session_attrs)")]
    NotReadWrite {
        /// The host tried.
        host: String,
        /// `read-write` or `primary`.
        wanted: &'static str,
    },
    /// The other side does not speak PostgreSQL's protocol, version 3.0.
    #[error("{host}: unexpected reply, not PostgreSQL's protocol: {what}")]
    Protocol {
        /// The host tried.
        host: String,
        /// What was found.
        what: String,
    },
    /// More than one attempt, none of them a success.
    #[error("none of {} connection attempts succeeded: {}", failures.len(), list(failures))]
    AllHosts {
        /// All that failed, in the order tried; never empty, and none of them is `AllHosts`.
        failures: Vec<DialError>,
        /// Index of the failure that says what to do: see [`DialError::decisive`].
        decisive: usize,
    },
}

fn list(failures: &[DialError]) -> String {
    let texts: Vec<_> = failures.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// What to look at if nothing accepts connections, after the operating system's answer.
fn connect_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            ". Start PostgreSQL there, or correct host and port; listen_addresses says where it accepts connections"
        }
        // Of a Unix-domain socket.
        io::ErrorKind::NotFound => {
            ". Start PostgreSQL, or correct host and port; unix_socket_directories says where it has its socket"
        }
        _ => "",
    }
}

/// What PostgreSQL gives no hint for: the statement that lets us in. The message is in the server's
/// language, and this knows English alone.
fn remedy(error: &ServerError, conninfo: &Conninfo) -> Option<String> {
    let (role, database) = (identifier(conninfo.user()), identifier(conninfo.dbname()));
    let says = |words: &str| error.message.contains(words);
    if let Some(Pooler { name, instead }) = error.pooler() {
        return Some(format!(
            "This is a connection pooler ({name}, by its words). Replication and the settings of a session need PostgreSQL \
             itself: connect to {instead}"
        ));
    }
    match error.code.as_str() {
        "28000" if says("not permitted to log in") => Some(format!("ALTER ROLE {role} LOGIN")),
        "28000" if says("no pg_hba.conf entry") => Some(match hba_line(&error.message, conninfo) {
            Some(line) => format!(
                "Add this line to pg_hba.conf on the server, above lines that reject the connection: {line}. Then: SELECT \
                 pg_reload_conf()"
            ),
            None => "Add a line for this database and role to pg_hba.conf on the server, above lines that reject the connection. Then: \
                     SELECT pg_reload_conf()"
                .to_owned(),
        }),
        "28000" if says("Peer authentication failed") => Some(format!(
            "pg_hba.conf admits role {role} by peer, as the operating system's user of that name alone: sudo -u {} walpost ...; or connect \
             over TCP with a password (host=localhost)",
            shell_word_on_one_line(conninfo.user())
        )),
        "28P01" => Some(format!(
            "The password was in the connection string, PGPASSWORD, ~/.pgpass or password_command. To set another one, as a superuser: \
             psql {} -c {}",
            shell_word_on_one_line(&format!("dbname={}", quote_value(conninfo.dbname()))),
            shell_word_on_one_line(&format!("\\password {role}"))
        )),
        "28000" if says("does not exist") && conninfo.is_default_user => Some(
            "Nothing names a user, so this is the operating system's. Name the role that walpost init has created: \
             postgresql://walpost@..., or PGUSER=walpost"
                .to_owned(),
        ),
        "28000" if says("does not exist") => Some(format!(
            "walpost init, run as a superuser, creates the role walpost. To create this one: CREATE ROLE {role} LOGIN REPLICATION"
        )),
        "3D000" => Some(format!(
            "Name the database that has the outbox, or create it: CREATE DATABASE {database}"
        )),
        "42501" if says("permission denied for database") => {
            Some(format!("GRANT CONNECT ON DATABASE {database} TO {role}"))
        }
        "55000" if says("not currently accepting connections") => {
            Some(format!("ALTER DATABASE {database} ALLOW_CONNECTIONS true"))
        }
        "53300" if says("max_wal_senders") => Some(
            "Each pipeline has a walsender. SELECT pid, application_name, client_addr FROM pg_stat_replication shows who has \
             them. To have more: ALTER SYSTEM SET max_wal_senders = ..., and restart the server"
                .to_owned(),
        ),
        // Up to PostgreSQL 15, and from 16 on.
        "42501" if says("walsender") || says("WAL sender") => {
            Some(format!("ALTER ROLE {role} REPLICATION"))
        }
        _ => None,
    }
}

/// Returns the line of pg_hba.conf that would admit the connection. The message names the address that the server sees.
/// `replication` in the database's field is for physical replication only. None for a name that cannot be written there.
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

/// Returns a name as a word of pg_hba.conf, with quotes if it is a keyword or has characters such as spaces. None for a name that would
/// be read as something else: a line ends at a line feed, and a word that begins with a slash is a regular expression, with or without
/// quotes (PostgreSQL 18, 20.1 "The pg_hba.conf File").
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
    /// With the statement that fixes it, where one would.
    pub(crate) fn with_remedy(mut self, conninfo: &Conninfo) -> Self {
        if let DialError::Server { error, .. } = &mut self
            && error.hint.is_none()
        {
            error.hint = remedy(error, conninfo);
        }
        self
    }

    /// The failure that says what to do; never [`DialError::AllHosts`].
    ///
    /// Of several hosts it is the one most likely to heal, and of equals the last: as long as one
    /// host is out of reach or in recovery, it may be the one that will take us when it is back,
    /// whatever another said about the password.
    pub fn decisive(&self) -> &DialError {
        match self {
            DialError::AllHosts { failures, decisive } => failures.get(*decisive).unwrap_or(self),
            error => error,
        }
    }

    /// Every failed attempt, in the order tried.
    pub fn attempts(&self) -> &[DialError] {
        match self {
            DialError::AllHosts { failures, .. } => failures,
            error => std::slice::from_ref(error),
        }
    }

    /// What the server has said, if [`DialError::decisive`] is about that.
    pub(in crate::postgres) fn server_mut(&mut self) -> Option<&mut ServerError> {
        match self {
            DialError::Server { error, .. } => Some(error),
            DialError::AllHosts { failures, decisive } => {
                failures.get_mut(*decisive).and_then(DialError::server_mut)
            }
            _ => None,
        }
    }

    /// One error for all attempts; None for no attempt.
    pub(crate) fn of(mut failures: Vec<DialError>) -> Option<DialError> {
        let decisive = (0..failures.len()).max_by_key(|i| failures[*i].hope())?;
        if failures.len() == 1 {
            return failures.pop();
        }
        Some(DialError::AllHosts { failures, decisive })
    }

    /// How likely it is that waiting is enough.
    fn hope(&self) -> u8 {
        match self {
            DialError::Connect { .. }
            | DialError::Timeout { .. }
            | DialError::Io { .. }
            | DialError::Resolve { .. }
            | DialError::PasswordCommand { .. }
            | DialError::UntrustedFile { .. }
            | DialError::OtherPeer { .. }
            | DialError::NotReadWrite { .. } => 2,
            DialError::Server { error, .. } if error.passes() => 2,
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
    fn names_what_to_do_if_a_role_or_database_is_not_admitted() {
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
    fn completes_no_command_inside_of_a_name() {
        let completed = |hint: &str| {
            let mut error = ServerError {
                hint: Some(hint.to_owned()),
                ..ServerError::default()
            };
            error.complete_commands(&Commands::of_pipeline("orders"));
            error.hint.expect("a hint")
        };
        let plain = completed(
            "Create it: walpost init --config FILE; or, in this database: psql -f sql/journal.sql",
        );
        assert!(
            plain.starts_with("Create it: walpost init --pipeline orders; or, "),
            "{plain}"
        );
        let name = "Drop it: DROP TABLE 'walpost init --config FILE;touch /tmp/f;#'";
        assert_eq!(completed(name), name);
    }

    #[test]
    fn names_the_line_that_pg_hba_lacks() {
        for (message, line) in [
            (
                "no pg_hba.conf entry for host \"192.0.2.7\", user \"w\", database \"shop\", SSL encryption",
                ": hostssl shop w 192.0.2.7/32 scram-sha-256.",
            ),
            (
                "no pg_hba.conf entry for host \"2001:db8::7\", user \"w\", database \"shop\", no encryption",
                ": host shop w 2001:db8::7/128 scram-sha-256.",
            ),
            (
                "no pg_hba.conf entry for host \"[local]\", user \"w\", database \"shop\", no encryption",
                ": local shop w scram-sha-256.",
            ),
        ] {
            let found = hint("host=h user=w dbname=shop", message);
            assert!(found.contains(line), "{found}");
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
