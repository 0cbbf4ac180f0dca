//! Where PostgreSQL is and who asks: connection strings and environment variables with libpq's
//! habits.
//!
//! Spec: PostgreSQL 18, 32.1 "Database Connection Control Functions". Where Walpost differs from
//! libpq:
//! - only what `keywords.rs` lists as used has an effect; the rest is ignored where it is
//!   harmless, and else refused;
//! - `connect_timeout` is 10 s unless set, TCP keepalives and `tcp_user_timeout` are short: a
//!   half-open link is found;
//! - an `@` in a URL's database is written `%40`: unescaped, it is taken for the end of a password;
//! - `sslmode=allow` is refused, TLS is 1.2 or later, `sslrootcert` that is named has to be there
//!   in `require` too.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use error::ConninfoError;
pub(crate) use of_row::{is_host, is_port};
pub(in crate::postgres) use require_auth::{AuthMethod, RequireAuth};

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
mod of_row;
mod passfile;
mod require_auth;
mod settings;
pub(crate) mod syntax;
#[cfg(test)]
mod tests;

/// A checked connection string, with what the environment and the defaults add to it.
///
/// Files (password file, certificates) are named here and read each time a connection is opened, so
/// that a rotated password or certificate is found by the next reconnect. `Debug` prints no secret.
#[derive(Clone, Debug)]
pub struct Conninfo {
    pub(crate) hosts: Vec<Host>,
    pub(crate) shuffle_hosts: bool,
    pub(crate) user: String,
    pub(crate) dbname: String,
    pub(crate) application_name: String,
    pub(crate) options: Option<String>,
    pub(crate) target: Target,
    /// For each address: TCP connect, TLS handshake and authentication together. None: no limit.
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) keepalive: Option<Keepalive>,
    /// None: the operating system's.
    pub(crate) tcp_user_timeout: Option<Duration>,
    pub(crate) channel_binding: ChannelBinding,
    pub(in crate::postgres) require_auth: RequireAuth,
    /// The user, by name or ID, whose process has to listen at a Unix-domain socket.
    pub(crate) require_peer: Option<String>,
    pub(crate) tls: Tls,
    /// Clones share it: each kind is told once.
    pub(crate) exposures: Arc<Exposures>,
    /// Clones share it.
    pub(crate) notices: Arc<NoticeLimit>,
    password: Option<Secret>,
    /// The environment variable that has given the password, if one has.
    password_variable: Option<&'static str>,
    passfile: Option<PathBuf>,
    kept: Option<Kept>,
    password_command: Option<PasswordCommand>,
}

/// A program that prints the password, for each connection.
#[derive(Clone, Debug)]
pub(crate) struct PasswordCommand {
    pub(crate) program: Program,
    /// What messages call the place that names it.
    place: Arc<str>,
}

/// A file that has the connection string in it.
#[derive(Clone)]
struct Kept {
    /// What messages call it.
    place: Arc<str>,
    read: Arc<dyn Fn() -> Result<Conninfo, String> + Send + Sync>,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)
    }
}

/// One server to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) place: Place,
    pub(crate) port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The folder of a unix-domain socket, or `@` and the name of an abstract one.
    Socket(String),
    /// `name` is what the certificate has to be for; `address` saves the look-up.
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

/// `keepalives_*`; zero leaves a value to the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keepalive {
    pub(crate) idle: Duration,
    pub(crate) interval: Duration,
    pub(crate) retries: u32,
}

/// `sslmode`. `allow` is absent on purpose: it tries without TLS first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    /// Never TLS.
    Disable,
    /// TLS if the server has it, with whatever certificate it shows.
    Prefer,
    /// TLS; the certificate is checked as in `verify-ca` where there is a root certificate file.
    Require,
    /// TLS with a certificate that a trusted authority has signed.
    VerifyCa,
    /// As `verify-ca`, and the certificate is for the host that was asked for.
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

/// A file that a parameter names, which has to be there, or libpq's default, used where it is
/// there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TlsFile {
    Named(PathBuf),
    Default(PathBuf),
    /// No parameter, and no home folder to have a default in.
    Absent,
}

impl TlsFile {
    /// The file to read; one that is named and missing shows itself when it is read.
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

/// A version of TLS for `ssl_min_protocol_version` and `ssl_max_protocol_version`.
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
    /// Runs it: the password is the first line that it prints. Blocks.
    ///
    /// # Errors
    /// It fails, or that line is empty or no password.
    pub(in crate::postgres) fn run(&self) -> Result<Secret, PasswordError> {
        let output = self.program.run(program::LIMIT)?;
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

/// The program gave no password.
#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    /// It failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The first line has nothing in it.
    #[error("has printed an empty line first, expected the password")]
    Empty,
    /// PostgreSQL takes none with it.
    #[error("has printed a line with a NUL in it, expected the password")]
    Nul,
}

/// Bytes that no log shows.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Whether the parameter is a password.
fn is_password(name: &str) -> bool {
    ["password", "sslpassword"].contains(&name)
}

const PORT_DEFAULT: u16 = 5432;
/// Debian's and PostgreSQL's own.
const SOCKET_FOLDERS: [&str; 2] = ["/var/run/postgresql", "/tmp"];

impl Conninfo {
    /// The same connection string for `walpost init`, in whose sessions more notices are logged.
    #[must_use]
    pub(crate) fn for_init(&self) -> Self {
        Self {
            notices: Arc::new(NoticeLimit::of_init()),
            ..self.clone()
        }
    }

    /// Reads a connection string, `postgresql://` URL or `key=value` pairs; what it leaves open
    /// comes from the environment variables of libpq (looked up through `env`), then from the
    /// defaults.
    ///
    /// # Errors
    /// [`ConninfoError`], naming the parameter or variable, what was found and what was expected.
    pub fn parse(
        text: &str,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Conninfo, ConninfoError> {
        Self::read(text, env).map_err(|error| match error {
            // What the error would repeat may be a part of the password.
            ConninfoError::UnknownKey { .. } | ConninfoError::Value { .. }
                if syntax::password_spills(text) =>
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
            kept: None,
            password_command: None,
        })
    }

    /// Has the password be what the program prints, for each connection anew; `place` is what messages call the place that
    /// names it.
    ///
    /// # Errors
    /// The connection string has a password in it, so that there are two.
    pub(crate) fn with_password_command(
        mut self,
        program: Program,
        place: &str,
    ) -> Result<Self, &'static str> {
        if self.password.is_some() && self.password_variable.is_none() {
            return Err("postgres has a password in it; leave one of both out");
        }
        let place = place.into();
        self.password_command = Some(PasswordCommand { program, place });
        Ok(self)
    }

    /// The program that prints the password, if one does.
    pub(in crate::postgres) fn password_command(&self) -> Option<&PasswordCommand> {
        self.password_command.as_ref()
    }

    /// How long an attempt to connect may take, with the time of that program.
    pub(in crate::postgres) fn attempt_limit(&self) -> Option<Duration> {
        let program = match self.password_command {
            Some(_) => program::LIMIT,
            None => Duration::ZERO,
        };
        self.connect_timeout.map(|limit| limit + program)
    }

    /// Has the password be read again for each connection, by `read`, from the file that the string comes
    /// from; `place` is what messages call that. Whoever is to be connected to stays the same.
    #[must_use]
    pub fn kept_in(
        mut self,
        place: &str,
        read: impl Fn() -> Result<Conninfo, String> + Send + Sync + 'static,
    ) -> Self {
        self.kept = Some(Kept {
            place: place.into(),
            read: Arc::new(read),
        });
        self
    }

    /// Whether a connection string has a password in it.
    #[must_use]
    pub fn holds_password(text: &str) -> bool {
        syntax::pairs(text).is_ok_and(|pairs| pairs.iter().any(|(name, _)| is_password(name)))
    }

    /// What a connection string says, but for its passwords; all of one that can't be read.
    #[must_use]
    pub fn without_passwords(text: &str) -> Vec<(String, String)> {
        let mut pairs =
            syntax::pairs(text).unwrap_or_else(|_| vec![(String::new(), text.to_owned())]);
        pairs.retain(|(name, _)| !is_password(name));
        pairs
    }

    /// The parameter that `marker` is part of, if a row may supply a value in its place.
    #[must_use]
    pub(crate) fn parameter_of(text: &str, marker: &str) -> Option<&'static str> {
        of_row::parameter_of(text, marker)
    }

    /// Checks a value that a row supplies for a part of `parameter`.
    ///
    /// # Errors
    /// What was found and what was expected, to be put after the name of the column.
    pub(crate) fn check_part_of_row(parameter: &str, value: &str) -> Result<(), String> {
        of_row::check_part(parameter, value)
    }

    /// Checks a whole connection string that a row supplies.
    ///
    /// # Errors
    /// What was found and what was expected, to be put after the name of the column.
    pub(crate) fn check_of_row(text: &str) -> Result<(), String> {
        of_row::check_whole(text)
    }

    /// Database, hosts and user in one line for logs: `shop on /var/run/postgresql:5432 as
    /// walpost`.
    pub fn describe(&self) -> String {
        format!("{} on {} as {}", self.dbname, self.servers(), self.user)
    }

    /// What was found of the connections that were opened with it: for each way in which one is open
    /// to those who share the network, a text that says what they can do and what keeps them from it.
    #[must_use]
    pub fn exposures(&self) -> Vec<String> {
        self.exposures.texts()
    }

    /// The servers, in one text.
    #[must_use]
    pub fn servers(&self) -> String {
        let hosts: Vec<_> = self.hosts.iter().map(Host::to_string).collect();
        hosts.join(",")
    }

    /// The same connection to another database of the server: the one that `other` is for.
    #[must_use]
    pub fn to_database_of(&self, other: &Conninfo) -> Conninfo {
        Conninfo {
            dbname: other.dbname.clone(),
            ..self.clone()
        }
    }

    /// The user who asks.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// `options` say which role the session is to be, as in `-c role=shop`.
    pub(crate) fn asks_for_role(&self) -> bool {
        let options = self.options.as_deref().unwrap_or_default();
        options.split_whitespace().any(|word| {
            let word = word.strip_prefix("-c").unwrap_or(word);
            word.trim_start_matches('-').starts_with("role=")
        })
    }

    /// The database asked for.
    pub fn dbname(&self) -> &str {
        &self.dbname
    }

    /// Where the password comes from, for a person who has to change it there.
    #[must_use]
    pub fn password_origin(&self) -> String {
        if let Some(PasswordCommand { program, place }) = &self.password_command {
            return format!(
                "{place}: {}, which is run for each connection",
                program.path()
            );
        }
        let again = self.read_again();
        let now = again.as_ref().unwrap_or(self);
        match (&now.password, now.password_variable, &self.kept) {
            (Some(_), Some(variable), _) => {
                format!("the environment variable {variable}, which is read at the start only")
            }
            (Some(_), None, Some(kept)) => kept.place.to_string(),
            (Some(_), None, None) => {
                "the connection string of the command line or the environment, which is read at the start only"
                    .to_owned()
            }
            (None, ..) => match &now.passfile {
                Some(file) => format!("the password file {}", file.display()),
                None => "nowhere: PGPASSFILE is not set, and there is no home folder".to_owned(),
            },
        }
    }

    /// As the string is by now in the file that has it; none where there is no such file, or it does not
    /// have it any more.
    fn read_again(&self) -> Option<Conninfo> {
        let Kept { place, read } = self.kept.as_ref()?;
        let reason = match read() {
            Ok(now)
                if (&now.hosts, &now.user, &now.dbname)
                    == (&self.hosts, &self.user, &self.dbname) =>
            {
                return Some(now);
            }
            Ok(_) => "its host, user or database is another one by now: restart walpost".to_owned(),
            Err(reason) => reason,
        };
        tracing::warn!("{place} can't be read again, so the previous password is used: {reason}");
        None
    }

    /// The password for one of the hosts: from the string or PGPASSWORD, else from the password
    /// file.
    pub(crate) fn password(&self, host: &Host) -> Option<Secret> {
        match self.read_again() {
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
        let wanted = passfile::Wanted {
            host: name,
            port: host.port,
            dbname: &self.dbname,
            user: &self.user,
        };
        passfile::look_up(self.passfile.as_deref()?, &wanted).map(Secret)
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
    // A single port is for all hosts.
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

/// The socket in the first of the folders that is there.
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
    // As in libpq: whoever may buy a certificate from a public authority would pass for the server.
    if root == RootCert::System && mode != SslMode::VerifyFull {
        return Err(settings.value_error("sslmode", "verify-full, for sslrootcert=system"));
    }

    let versions = [
        ("TLSv1.2", TlsVersion::V1_2),
        ("TLSv1.3", TlsVersion::V1_3),
        // As lower limits these two ask for less than there is; as upper limits they leave nothing.
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
        let expected = "not less than ssl_min_protocol_version";
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
