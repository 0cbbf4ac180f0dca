//! Connection strings and environment variables, which follow libpq's conventions.
//!
//! Spec: PostgreSQL 18, 32.1 "Database Connection Control Functions". Walpost differs from libpq in
//! these ways:
//! - only the parameters that `keywords.rs` lists as used have an effect; the others are ignored if
//!   that is harmless, and rejected otherwise;
//! - `connect_timeout` defaults to 10 s, and TCP keepalives and `tcp_user_timeout` are short, so
//!   that half-open connections are detected;
//! - an `@` in the database name of a URL must be written as `%40`, because an unescaped `@` is
//!   assumed to end a password;
//! - `sslmode=allow` is rejected, TLS must be 1.2 or later, and a file that `sslrootcert` names
//!   must exist even with `sslmode=require`.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use error::ConninfoError;
pub(in crate::postgres) use require_auth::{AuthMethod, RequireAuth};
pub(crate) use row_parameters::{is_host, is_port};

use exposure::Exposures;
use notices::NoticeLimit;
use settings::Settings;

use crate::program::{self, Program, ProgramError};

mod error;
pub(in crate::postgres) mod exposure;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod keywords;
pub(in crate::postgres) mod notices;
mod passfile;
mod require_auth;
mod row_parameters;
mod settings;
pub(crate) mod syntax;
#[cfg(test)]
mod tests;

/// A validated connection string. Parameters that the string does not set are taken from the
/// environment or have their default values.
///
/// Stores the paths of the password file and certificates, not their contents. The files are read
/// for each connection, so that a rotated password or certificate is used from the next connection
/// onward. `Debug` does not print secrets.
#[derive(Clone, Debug)]
pub struct Conninfo {
    pub(crate) hosts: Vec<Host>,
    pub(crate) shuffle_hosts: bool,
    pub(crate) user: String,
    /// Whether `user` is the name of the operating system user, because no user is configured.
    pub(crate) is_default_user: bool,
    pub(crate) dbname: String,
    pub(crate) application_name: String,
    pub(crate) options: Option<String>,
    pub(crate) target: Target,
    /// Time limit for each address, including TCP connect, TLS handshake and authentication. `None`
    /// means no limit.
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) keepalive: Option<Keepalive>,
    /// `tcp_user_timeout`; `None` means the operating system's default.
    pub(crate) tcp_user_timeout: Option<Duration>,
    pub(crate) channel_binding: ChannelBinding,
    pub(in crate::postgres) require_auth: RequireAuth,
    /// The name or ID of the user that must own the process listening on a Unix-domain socket.
    pub(crate) require_peer: Option<String>,
    pub(crate) tls: Tls,
    /// The security warnings that have been logged about connections opened with this connection
    /// string. Shared between clones, so that each kind of warning is logged only once.
    pub(crate) exposures: Arc<Exposures>,
    /// The limit on logged notices, shared between clones.
    pub(crate) notices: Arc<NoticeLimit>,
    password: Option<Secret>,
    /// The environment variable that supplied the password, or `None` if the password does not come
    /// from the environment.
    password_variable: Option<&'static str>,
    passfile: Option<PathBuf>,
    source: Option<PasswordSource>,
    password_command: Option<PasswordCommand>,
}

/// A program that prints the password. It is run for each connection.
#[derive(Clone, Debug)]
pub(crate) struct PasswordCommand {
    pub(crate) program: Program,
    /// The name of the setting that specifies the program, for use in messages.
    place: Arc<str>,
}

/// A file that contains the connection string.
#[derive(Clone)]
struct PasswordSource {
    /// A description of the file, for use in messages.
    place: Arc<str>,
    read: Arc<dyn Fn() -> Result<Conninfo, String> + Send + Sync>,
}

impl fmt::Debug for PasswordSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)
    }
}

/// A server to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) place: Place,
    pub(crate) port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The directory of a Unix-domain socket, or `@` and the name of an abstract socket.
    Socket(String),
    /// A TCP address. The certificate must match `name`. If `address` is set, `name` is not
    /// resolved.
    Tcp {
        name: String,
        address: Option<IpAddr>,
    },
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Tcp { name, .. } if name.contains(':') => write!(f, "[{name}]:{}", self.port),
            Place::Tcp { name, .. } | Place::Socket(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// `target_session_attrs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Any,
    ReadWrite,
    Primary,
}

/// `channel_binding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelBinding {
    Disable,
    Prefer,
    Require,
}

/// The `keepalives_*` parameters. For each of them, zero means the operating system's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keepalive {
    pub(crate) idle: Duration,
    pub(crate) interval: Duration,
    pub(crate) retries: u32,
}

/// `sslmode`. `allow` is deliberately not supported, because it connects without TLS first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    /// No TLS.
    Disable,
    /// TLS if the server supports it. Any certificate is accepted.
    Prefer,
    /// TLS. If a root certificate file exists, the server's certificate is verified as with
    /// `verify-ca`.
    Require,
    /// TLS with a server certificate that a trusted authority has signed.
    VerifyCa,
    /// Like `verify-ca`, but the certificate must also match the requested host.
    VerifyFull,
}

impl SslMode {
    const VALUES: &[(&str, SslMode)] = &[
        ("disable", SslMode::Disable),
        ("prefer", SslMode::Prefer),
        ("require", SslMode::Require),
        ("verify-ca", SslMode::VerifyCa),
        ("verify-full", SslMode::VerifyFull),
    ];
}

impl fmt::Display for SslMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::VALUES
            .iter()
            .find(|(_, mode)| mode == self)
            .map(|(name, _)| *name);
        f.write_str(name.unwrap_or_default())
    }
}

/// Either a file that a parameter names, which must exist, or libpq's default file, which is used
/// only if it exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TlsFile {
    Named(PathBuf),
    Default(PathBuf),
    /// The parameter is not set, and there is no default because there is no home directory.
    Absent,
}

impl TlsFile {
    /// Returns the path of the file to read. If a parameter names the file, returns the path even
    /// if the file is missing, so that the attempt to read it reports the error.
    pub(crate) fn to_read(&self) -> Option<&Path> {
        match self {
            TlsFile::Named(path) => Some(path),
            TlsFile::Default(path) => Some(path.as_path()).filter(|path| path.exists()),
            TlsFile::Absent => None,
        }
    }
}

/// `sslrootcert`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RootCert {
    /// The certificate authorities that the operating system trusts.
    System,
    File(TlsFile),
}

/// A TLS version, as in `ssl_min_protocol_version` and `ssl_max_protocol_version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TlsVersion {
    V1_2,
    V1_3,
}

/// The `ssl*` parameters.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    pub(crate) mode: SslMode,
    pub(crate) root: RootCert,
    pub(crate) revoked: TlsFile,
    pub(crate) certificate: TlsFile,
    pub(crate) key: TlsFile,
    pub(crate) key_password: Option<Secret>,
    pub(crate) server_name_indication: bool,
    pub(crate) version_min: TlsVersion,
    pub(crate) version_max: Option<TlsVersion>,
}

impl PasswordCommand {
    /// Runs the program and returns the password, which is the first line of the program's output.
    /// Blocks the calling thread.
    ///
    /// # Errors
    /// Returns an error if the program fails, or if the line is empty or contains a NUL character.
    pub(in crate::postgres) fn run(&self) -> Result<Secret, PasswordError> {
        let output = self.program.run(program::RUN_TIMEOUT)?;
        let line = output.split(|byte| *byte == b'\n').next();
        let line = line.unwrap_or_default();
        let password = line.strip_suffix(b"\r").unwrap_or(line);
        match password {
            b"" => Err(PasswordError::Empty),
            password if password.contains(&0) => Err(PasswordError::Nul),
            password => Ok(Secret(password.to_vec())),
        }
    }
}

/// The reason why a program did not supply a password.
#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    /// The program failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The first line is empty.
    #[error(
        "expected the password on the first line of the program's output, but this line is empty"
    )]
    Empty,
    /// The line contains a NUL character, which PostgreSQL does not allow in a password.
    #[error(
        "expected the password on the first line of the program's output, but this line contains a NUL character"
    )]
    Nul,
}

/// Secret bytes, which `Debug` does not print.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Returns whether the parameter's value is a password.
fn is_password(name: &str) -> bool {
    ["password", "sslpassword"].contains(&name)
}

const PORT_DEFAULT: u16 = 5432;
/// The default socket directories of Debian and of PostgreSQL itself.
const SOCKET_FOLDERS: [&str; 2] = ["/var/run/postgresql", "/tmp"];

impl Conninfo {
    /// Returns a copy of this connection string with the higher limit on logged notices that
    /// `walpost init` uses.
    #[must_use]
    pub(crate) fn for_init(&self) -> Self {
        Self {
            notices: Arc::new(NoticeLimit::for_init()),
            ..self.clone()
        }
    }

    /// Parses a connection string: a `postgresql://` URL or `key=value` pairs. Parameters that the
    /// string does not set are taken from libpq's environment variables, which are looked up with
    /// `env`. All other parameters have their default values.
    ///
    /// # Errors
    /// Returns a [`ConninfoError`] that names the parameter or variable, its value, and the values
    /// that would be valid.
    pub fn parse(
        text: &str,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Conninfo, ConninfoError> {
        Self::read(text, env).map_err(|error| match error {
            // Replace the error, because it quotes text that may be part of the password.
            ConninfoError::UnknownKey { .. } | ConninfoError::Value { .. }
                if syntax::has_unescaped_password(text) =>
            {
                ConninfoError::Userinfo
            }
            error => error,
        })
    }

    fn read(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Conninfo, ConninfoError> {
        if text.trim_start().starts_with("jdbc:") {
            return Err(ConninfoError::Jdbc);
        }
        let settings = Settings::gather(text, env)?;
        let home = env("HOME")
            .filter(|home| !home.is_empty())
            .map(PathBuf::from);
        let in_home = |name: &str| home.as_ref().map(|home| home.join(name));

        let user = settings
            .text("user")
            .map(str::to_owned)
            .or_else(|| {
                ["USER", "LOGNAME"]
                    .into_iter()
                    .filter_map(env)
                    .find(|u| !u.is_empty())
            })
            .ok_or(ConninfoError::NoUser)?;
        let switch = &[("0", false), ("1", true)];
        let keepalive = Keepalive {
            idle: Duration::from_secs(settings.number("keepalives_idle", 10)?),
            interval: Duration::from_secs(settings.number("keepalives_interval", 5)?),
            retries: u32::try_from(settings.number("keepalives_count", 3)?).unwrap_or(u32::MAX),
        };
        let connect_timeout = Duration::from_secs(settings.number("connect_timeout", 10)?);
        let tcp_user_timeout = Duration::from_millis(settings.number("tcp_user_timeout", 30_000)?);

        Ok(Conninfo {
            hosts: hosts(&settings)?,
            shuffle_hosts: settings.choice(
                "load_balance_hosts",
                &[("disable", false), ("random", true)],
                false,
            )?,
            is_default_user: settings.text("user").is_none(),
            dbname: settings.text("dbname").unwrap_or(&user).to_owned(),
            user,
            application_name: settings
                .text("application_name")
                .or_else(|| settings.text("fallback_application_name"))
                .unwrap_or("walpost")
                .to_owned(),
            options: settings.text("options").map(str::to_owned),
            target: settings.choice(
                "target_session_attrs",
                &[
                    ("any", Target::Any),
                    ("read-write", Target::ReadWrite),
                    ("primary", Target::Primary),
                ],
                Target::Any,
            )?,
            connect_timeout: Some(connect_timeout).filter(|limit| !limit.is_zero()),
            keepalive: settings
                .choice("keepalives", switch, true)?
                .then_some(keepalive),
            tcp_user_timeout: Some(tcp_user_timeout).filter(|limit| !limit.is_zero()),
            channel_binding: settings.choice(
                "channel_binding",
                &[
                    ("disable", ChannelBinding::Disable),
                    ("prefer", ChannelBinding::Prefer),
                    ("require", ChannelBinding::Require),
                ],
                ChannelBinding::Prefer,
            )?,
            require_auth: match settings.text("require_auth") {
                Some(text) => RequireAuth::parse(text)
                    .map_err(|expected| settings.value_error("require_auth", &expected))?,
                None => RequireAuth::default(),
            },
            require_peer: settings.text("requirepeer").map(str::to_owned),
            tls: tls(&settings, &in_home)?,
            exposures: Arc::default(),
            notices: Arc::default(),
            password: settings
                .text("password")
                .map(|text| Secret(text.as_bytes().to_vec())),
            password_variable: settings.variable("password"),
            passfile: settings
                .text("passfile")
                .map(PathBuf::from)
                .or_else(|| in_home(".pgpass")),
            source: None,
            password_command: None,
        })
    }

    /// Uses the output of a program as the password. The program runs for each connection. `place`
    /// is the name of the setting that specifies the program, for use in messages.
    ///
    /// # Errors
    /// Returns an error if the connection string also contains a password.
    pub(crate) fn with_password_command(
        mut self,
        program: Program,
        place: &str,
    ) -> Result<Self, &'static str> {
        if self.password.is_some() && self.password_variable.is_none() {
            return Err(
                "the connection string contains a password, although password_command is set: remove one of them",
            );
        }
        let place = place.into();
        self.password_command = Some(PasswordCommand { program, place });
        Ok(self)
    }

    /// Returns the program that prints the password, or `None` if none is configured.
    pub(in crate::postgres) fn password_command(&self) -> Option<&PasswordCommand> {
        self.password_command.as_ref()
    }

    /// Returns the time limit for a connection attempt, including the time that the password
    /// program may take.
    pub(in crate::postgres) fn attempt_limit(&self) -> Option<Duration> {
        let program = match self.password_command {
            Some(_) => program::RUN_TIMEOUT,
            None => Duration::ZERO,
        };
        self.connect_timeout.map(|limit| limit + program)
    }

    /// Makes each connection attempt reread the password from the file that contains the connection
    /// string. `read` reads the file, and `place` describes it in messages. The hosts, user and
    /// database do not change.
    #[must_use]
    pub fn with_source(
        mut self,
        place: &str,
        read: impl Fn() -> Result<Conninfo, String> + Send + Sync + 'static,
    ) -> Self {
        self.source = Some(PasswordSource {
            place: place.into(),
            read: Arc::new(read),
        });
        self
    }

    /// Returns whether a connection string contains a password.
    #[must_use]
    pub fn contains_password(text: &str) -> bool {
        syntax::pairs(text).is_ok_and(|pairs| pairs.iter().any(|(name, _)| is_password(name)))
    }

    /// Returns the parameters in a connection string, without passwords. If the string can't be
    /// parsed, returns the whole string as a single value.
    #[must_use]
    pub fn without_passwords(text: &str) -> Vec<(String, String)> {
        let mut pairs =
            syntax::pairs(text).unwrap_or_else(|_| vec![(String::new(), text.to_owned())]);
        pairs.retain(|(name, _)| !is_password(name));
        pairs
    }

    /// Returns the parameter whose value contains `marker`. Returns `None` if no value contains it,
    /// or if a registry row is not allowed to supply that parameter.
    #[must_use]
    pub(crate) fn parameter_with(text: &str, marker: &str) -> Option<&'static str> {
        row_parameters::parameter_with(text, marker)
    }

    /// Checks a value from a registry row before the value is inserted into the connection
    /// parameter `parameter`.
    ///
    /// # Errors
    /// Returns a message with the value found and the value expected, phrased to follow the
    /// column's name.
    pub(crate) fn check_row_parameter(parameter: &str, value: &str) -> Result<(), String> {
        row_parameters::check_part(parameter, value)
    }

    /// Checks a complete connection string that a registry row supplies.
    ///
    /// # Errors
    /// Returns a message with the value found and the value expected, phrased to follow the
    /// column's name.
    pub(crate) fn check_row_url(text: &str) -> Result<(), String> {
        row_parameters::check_whole(text)
    }

    /// Returns the database, hosts and user as one line for logs, such as `shop on
    /// /var/run/postgresql:5432 as walpost`.
    pub fn describe(&self) -> String {
        format!("{} on {} as {}", self.dbname, self.servers(), self.user)
    }

    /// Returns the security warnings that were logged about connections opened with this connection
    /// string, at most one of each kind. A warning describes what an attacker could do and how to
    /// prevent it.
    #[must_use]
    pub fn exposures(&self) -> Vec<String> {
        self.exposures.texts()
    }

    /// Returns the servers as a comma-separated list.
    #[must_use]
    pub fn servers(&self) -> String {
        let hosts: Vec<_> = self.hosts.iter().map(Host::to_string).collect();
        hosts.join(",")
    }

    /// Returns this connection string with its database replaced by the database of `other`.
    #[must_use]
    pub fn with_database_of(&self, other: &Conninfo) -> Conninfo {
        Conninfo {
            dbname: other.dbname.clone(),
            ..self.clone()
        }
    }

    /// Returns the user to log in as.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Returns whether `options` sets the session's role, as in `-c role=shop`.
    pub(crate) fn sets_role(&self) -> bool {
        let options = self.options.as_deref().unwrap_or_default();
        options.split_whitespace().any(|word| {
            let word = word.strip_prefix("-c").unwrap_or(word);
            word.trim_start_matches('-').starts_with("role=")
        })
    }

    /// Returns the database to connect to.
    pub fn dbname(&self) -> &str {
        &self.dbname
    }

    /// Describes where the password comes from, so that an operator knows where to change it.
    #[must_use]
    pub fn password_origin(&self) -> String {
        if let Some(PasswordCommand { program, place }) = &self.password_command {
            return format!(
                "Walpost gets the password from the program {} ({place}), which is run for each connection",
                program.path()
            );
        }
        let again = self.reread();
        let now = again.as_ref().unwrap_or(self);
        match (&now.password, now.password_variable, &self.source) {
            (Some(_), Some(variable), _) => {
                format!(
                    "Walpost gets the password from the environment variable {variable}, which is only read at startup"
                )
            }
            (Some(_), None, Some(source)) => {
                format!("Walpost gets the password from {}", source.place)
            }
            (Some(_), None, None) => "Walpost gets the password from the connection string on the command line or in the \
                                      environment, which is only read at startup"
                .to_owned(),
            (None, ..) => match &now.passfile {
                Some(file) => format!(
                    "Walpost gets the password from the password file {}",
                    file.display()
                ),
                None => "Walpost can't find a password file, because PGPASSFILE is not set and there is no home directory"
                    .to_owned(),
            },
        }
    }

    /// Rereads the connection string from its file. Returns `None` if the file can't be read or now
    /// contains a different host, user or database, or different security settings. A new password
    /// must not be sent according to the old settings, for example to a server that only the old
    /// `sslrootcert` accepts.
    fn reread(&self) -> Option<Conninfo> {
        let PasswordSource { place, read } = self.source.as_ref()?;
        let reason = match read() {
            Ok(now) if now.password_recipient() == self.password_recipient() => return Some(now),
            Ok(_) => {
                "the host, user, database or a security setting in the connection string has changed. Restart Walpost"
                    .to_owned()
            }
            Err(reason) => reason,
        };
        tracing::warn!("failed to read {place} again, so the previous password is used: {reason}");
        None
    }

    /// Returns the settings that determine which servers receive the password, and how these servers
    /// must prove their identity.
    fn password_recipient(&self) -> impl PartialEq + '_ {
        let tls = &self.tls;
        (
            (&self.hosts, &self.user, &self.dbname),
            (tls.mode, &tls.root, &tls.revoked),
            (tls.version_min, tls.version_max),
            self.channel_binding,
            &self.require_auth,
            &self.require_peer,
        )
    }

    /// Returns the password for one of the hosts. The password is taken from the connection string
    /// or PGPASSWORD if set, or else from the password file.
    pub(crate) fn password(&self, host: &Host) -> Option<Secret> {
        match self.reread() {
            Some(now) => now.password_for(host),
            None => self.password_for(host),
        }
    }

    fn password_for(&self, host: &Host) -> Option<Secret> {
        if let Some(password) = &self.password {
            return Some(password.clone());
        }
        let name = match &host.place {
            Place::Socket(folder) if SOCKET_FOLDERS.contains(&folder.as_str()) => "localhost",
            Place::Socket(name) | Place::Tcp { name, .. } => name,
        };
        let wanted = passfile::PassfileQuery {
            host: name,
            port: host.port,
            dbname: &self.dbname,
            user: &self.user,
        };
        passfile::find_password(self.passfile.as_deref()?, &wanted).map(Secret)
    }
}

fn hosts(settings: &Settings) -> Result<Vec<Host>, ConninfoError> {
    let (_, names) = settings.list("host");
    let (address_setting, addresses) = settings.list("hostaddr");
    let (port_setting, ports) = settings.list("port");
    let count = if names.is_empty() {
        addresses.len().max(1)
    } else {
        names.len()
    };
    let address_counts = [0, count].contains(&addresses.len());
    // A single port applies to all hosts.
    let port_counts = [0, 1, count].contains(&ports.len());
    for (fits, name, found) in [
        (address_counts, address_setting, addresses.len()),
        (port_counts, port_setting, ports.len()),
    ] {
        if !fits {
            return Err(ConninfoError::Count {
                name,
                found,
                expected: count,
            });
        }
    }
    (0..count)
        .map(|i| {
            let name = names.get(i).copied().unwrap_or_default();
            let address = match addresses.get(i).copied().unwrap_or_default() {
                "" => None,
                text => Some(text.parse::<IpAddr>().map_err(|_| ConninfoError::Value {
                    name: address_setting,
                    found: text.to_owned(),
                    expected: "IPv4 or IPv6 addresses".to_owned(),
                })?),
            };
            let port = match ports.get(i).or(ports.first()).map(|port| port.trim()) {
                None | Some("") => PORT_DEFAULT,
                Some(text) => {
                    let port = text.parse().ok().filter(|port| *port != 0);
                    port.ok_or_else(|| ConninfoError::Value {
                        name: port_setting,
                        found: text.to_owned(),
                        expected: "a number from 1 to 65535".to_owned(),
                    })?
                }
            };
            let place = match (name, address) {
                ("", None) => default_place(&SOCKET_FOLDERS),
                ("", Some(address)) => Place::Tcp {
                    name: address.to_string(),
                    address: Some(address),
                },
                (name, None) if name.starts_with(['/', '@']) => Place::Socket(name.to_owned()),
                (name, address) => Place::Tcp {
                    name: name.to_owned(),
                    address,
                },
            };
            Ok(Host { place, port })
        })
        .collect()
}

/// Returns the first of the directories that exists, or `localhost` if none exists.
fn default_place(folders: &[&str]) -> Place {
    match folders.iter().find(|folder| Path::new(folder).is_dir()) {
        Some(folder) => Place::Socket((*folder).to_owned()),
        None => Place::Tcp {
            name: "localhost".to_owned(),
            address: None,
        },
    }
}

fn tls(
    settings: &Settings,
    in_home: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<Tls, ConninfoError> {
    let file = |key, default| match (settings.text(key), in_home(default)) {
        (Some(path), _) => TlsFile::Named(PathBuf::from(path)),
        (None, Some(path)) => TlsFile::Default(path),
        (None, None) => TlsFile::Absent,
    };
    let root = match file("sslrootcert", ".postgresql/root.crt") {
        TlsFile::Named(path) if path == Path::new("system") => RootCert::System,
        file => RootCert::File(file),
    };

    let by_root = match root {
        RootCert::System => SslMode::VerifyFull,
        RootCert::File(_) => SslMode::Prefer,
    };
    let mode = settings.choice("sslmode", SslMode::VALUES, by_root)?;
    // As in libpq, sslrootcert=system requires verify-full. Otherwise, anyone with a certificate
    // from a public authority could impersonate the server.
    if root == RootCert::System && mode != SslMode::VerifyFull {
        return Err(
            settings.value_error("sslmode", "verify-full, which sslrootcert=system requires")
        );
    }

    let versions = [
        ("TLSv1.2", TlsVersion::V1_2),
        ("TLSv1.3", TlsVersion::V1_3),
        // TLS 1.2 or later is always required. Therefore, the following versions have no effect as
        // a minimum. As a maximum, they would rule out every version, so they are rejected.
        ("TLSv1", TlsVersion::V1_2),
        ("TLSv1.1", TlsVersion::V1_2),
    ];
    let version_min = settings.choice("ssl_min_protocol_version", &versions, TlsVersion::V1_2)?;
    let version_max = match settings.text("ssl_max_protocol_version") {
        Some(_) => {
            Some(settings.choice("ssl_max_protocol_version", &versions[..2], TlsVersion::V1_3)?)
        }
        None => None,
    };
    if version_max.is_some_and(|max| max < version_min) {
        let expected = "the value of ssl_min_protocol_version or a later version";
        return Err(settings.value_error("ssl_max_protocol_version", expected));
    }

    let send_certificate =
        settings.choice("sslcertmode", &[("disable", false), ("allow", true)], true)?;
    let (certificate, key) = if send_certificate {
        (
            file("sslcert", ".postgresql/postgresql.crt"),
            file("sslkey", ".postgresql/postgresql.key"),
        )
    } else {
        (TlsFile::Absent, TlsFile::Absent)
    };
    Ok(Tls {
        mode,
        root,
        revoked: file("sslcrl", ".postgresql/root.crl"),
        certificate,
        key,
        key_password: settings
            .text("sslpassword")
            .map(|text| Secret(text.as_bytes().to_vec())),
        server_name_indication: settings.choice("sslsni", &[("0", false), ("1", true)], true)?,
        version_min,
        version_max,
    })
}
