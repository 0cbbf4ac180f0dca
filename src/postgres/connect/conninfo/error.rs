//! Errors in connection strings.

/// Why a connection string, or an environment variable used in its place, is rejected. Never
/// contains a password.
#[derive(Debug, thiserror::Error)]
pub enum ConninfoError {
    /// The string is neither a URL nor `key=value` pairs. It is not repeated because it may contain
    /// a password.
    #[error("connection string, byte {at}: {what}")]
    Syntax {
        /// Offset into the string.
        at: usize,
        /// What was found or expected there.
        what: &'static str,
    },
    /// A URL of the Java driver.
    #[error(
        "connection string: it is a JDBC URL, expected one of libpq: postgresql://USER@HOST:PORT/DBNAME, with the parameters of \
         libpq behind a question mark"
    )]
    Jdbc,
    /// A URL whose password contains an unescaped character with a special meaning.
    #[error(
        "connection URL: an @ stands where host, port, database or parameters are expected; in a password \
         @ is written %40, / is %2F, ? is %3F and % is %25"
    )]
    Userinfo,
    /// An unknown parameter directly after a password, of which it may be a part.
    #[error(
        "connection string: what follows the password is no parameter. A password with spaces stands \
         in single quotes{}",
        nearest.map(|known| format!("; did you mean {known:?}?")).unwrap_or_default()
    )]
    BehindPassword {
        /// The most similar known parameter, if any.
        nearest: Option<&'static str>,
    },
    /// A parameter that libpq does not have.
    #[error(
        "unknown connection parameter {name:?}{}",
        nearest.map(|known| format!("; did you mean {known:?}?")).unwrap_or_default()
    )]
    UnknownKey {
        /// As written.
        name: String,
        /// The most similar known parameter, if any.
        nearest: Option<&'static str>,
    },
    /// A parameter of libpq that Walpost does not support, and that promises something that would
    /// not hold if it were ignored.
    #[error("{name} is not supported: {remedy}")]
    Unsupported {
        /// Parameter or environment variable.
        name: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A value that the parameter does not accept.
    #[error("{name} is {found:?}, expected {expected}")]
    Value {
        /// Parameter or environment variable.
        name: &'static str,
        /// As written.
        found: String,
        /// What the parameter accepts.
        expected: String,
    },
    /// Lists of hosts, addresses and ports that differ in length.
    #[error("{name} lists {found} values, expected {expected}: one for each host")]
    Count {
        /// Parameter or environment variable.
        name: &'static str,
        /// Length of its list.
        found: usize,
        /// Number of hosts.
        expected: usize,
    },
    /// No parameter and no environment variable names a user.
    #[error("no user: write user=NAME, or set PGUSER (USER and LOGNAME are not set either)")]
    NoUser,
}
