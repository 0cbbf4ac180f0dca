//! Errors for invalid connection strings.

/// An error for an invalid connection string or environment variable. Never contains a password.
#[derive(Debug, thiserror::Error)]
pub enum ConninfoError {
    /// The string is neither a URL nor a list of `key=value` pairs. The error does not contain the
    /// string, because it may contain a password.
    #[error("connection string, byte {at}: {what}")]
    Syntax {
        /// Offset into the string.
        at: usize,
        /// The text found or expected at this offset.
        what: &'static str,
    },
    /// The string is a JDBC URL, the format of the Java driver.
    #[error(
        "connection string: found a JDBC URL, expected a libpq URL: postgresql://USER@HOST:PORT/DBNAME, with libpq's parameters after \
         a question mark"
    )]
    Jdbc,
    /// A URL whose password contains an unescaped character with a special meaning.
    #[error(
        "connection URL: unexpected @ in the host, port, database or parameters. In a password, write @ as %40, / as %2F, \
         ? as %3F and % as %25"
    )]
    Userinfo,
    /// An unknown parameter directly after a password. The text may be part of the password.
    #[error(
        "connection string: the text after the password is not a parameter. Enclose a password that contains spaces \
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
    /// A parameter of libpq that Walpost does not support and that can't be ignored without
    /// violating what the parameter promises.
    #[error("{name} is not supported: {remedy}")]
    Unsupported {
        /// Parameter or environment variable.
        name: &'static str,
        /// The alternative to the parameter.
        remedy: &'static str,
    },
    /// A value that the parameter does not accept.
    #[error("{name} is {found:?}, expected {expected}")]
    Value {
        /// Parameter or environment variable.
        name: &'static str,
        /// As written.
        found: String,
        /// The values that the parameter accepts.
        expected: String,
    },
    /// Lists of hosts, addresses and ports that differ in length.
    #[error("{name} lists {found} values, expected {expected}: one for each host")]
    Count {
        /// Parameter or environment variable.
        name: &'static str,
        /// The length of the parameter's list.
        found: usize,
        /// Number of hosts.
        expected: usize,
    },
    /// No parameter and no environment variable names a user.
    #[error("no user: write user=NAME, or set PGUSER (USER and LOGNAME are not set either)")]
    NoUser,
}
