//! Errors for invalid connection strings.

/// The reason why a connection string or environment variable is invalid. Never contains a
/// password.
#[derive(Debug, thiserror::Error)]
pub enum ConninfoError {
    /// The string is neither a URL nor a list of `key=value` pairs. The error does not contain the
    /// string, because it may contain a password.
    #[error("connection string, byte {at}: {what}")]
    Syntax {
        /// The byte offset in the string.
        at: usize,
        /// Describes what was found or expected at this offset.
        what: &'static str,
    },
    /// The string is a JDBC URL, the format that the Java driver uses.
    #[error(
        "connection string: found a JDBC URL, expected a libpq URL: postgresql://USER@HOST:PORT/DBNAME, with libpq's parameters after \
         a question mark"
    )]
    Jdbc,
    /// A URL whose password contains an unescaped special character.
    #[error(
        "connection URL: unexpected @ in the host, port, database or parameters. In a password, write @ as %40, / as %2F, \
         ? as %3F and % as %25"
    )]
    Userinfo,
    /// An unknown parameter directly after a password. The error does not contain the text, because
    /// it may be part of the password.
    #[error(
        "connection string: the text after the password is not a parameter. Enclose a password that contains spaces \
         in single quotes{}",
        nearest.map(|known| format!("; did you mean {known:?}?")).unwrap_or_default()
    )]
    BehindPassword {
        /// The most similar known parameter, if any.
        nearest: Option<&'static str>,
    },
    /// A parameter that libpq does not define.
    #[error(
        "unknown connection parameter {name:?}{}",
        nearest.map(|known| format!("; did you mean {known:?}?")).unwrap_or_default()
    )]
    UnknownKey {
        /// The parameter's name as written in the connection string.
        name: String,
        /// The most similar known parameter, if any.
        nearest: Option<&'static str>,
    },
    /// A libpq parameter that Walpost does not support and that can't be ignored, because the
    /// operator relies on its effect.
    #[error("{name} is not supported: {remedy}")]
    Unsupported {
        /// The parameter or environment variable.
        name: &'static str,
        /// Describes what to do instead of setting the parameter.
        remedy: &'static str,
    },
    /// A value that is invalid for the parameter.
    #[error("{name} is {found:?}, expected {expected}")]
    Value {
        /// The parameter or environment variable.
        name: &'static str,
        /// The value of the parameter or environment variable, as written.
        found: String,
        /// The valid values.
        expected: String,
    },
    /// The lists of hosts, addresses and ports differ in length.
    #[error("{name} lists {found} values, expected {expected}: one for each host")]
    Count {
        /// The parameter or environment variable.
        name: &'static str,
        /// The number of elements in the parameter's list.
        found: usize,
        /// The number of hosts.
        expected: usize,
    },
    /// Neither a parameter nor an environment variable specifies a user.
    #[error("no user: specify user=NAME, or set PGUSER (USER and LOGNAME are not set either)")]
    NoUser,
}
