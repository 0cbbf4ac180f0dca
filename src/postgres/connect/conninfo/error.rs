//! What is wrong with a connection string.

/// Why a connection string, or an environment variable that stands in for a part of it, can't be
/// used. Never holds a password.
#[derive(Debug, thiserror::Error)]
pub enum ConninfoError {
    /// The string is neither a URL nor `key=value` pairs. The string is not repeated: it may hold a
    /// password.
    #[error("connection string, byte {at}: {what}")]
    Syntax {
        /// Offset into the string.
        at: usize,
        /// What was found or expected there.
        what: &'static str,
    },
    /// The driver of Java has it.
    #[error(
        "connection string: it is a JDBC URL, expected one of libpq: postgresql://USER@HOST:PORT/DBNAME, with the parameters of \
         libpq behind a question mark"
    )]
    Jdbc,
    /// A URL whose password holds a character that has a meaning of its own there.
    #[error(
        "connection URL: an @ stands where host, port, database or parameters are expected; in a password \
         @ is written %40, / is %2F, ? is %3F and % is %25"
    )]
    Userinfo,
    /// No parameter, right behind a password: it may be a part of that.
    #[error(
        "connection string: what follows the password is no parameter. A password with spaces stands \
         in single quotes{}",
        nearest.map(|known| format!("; did you mean {known:?}?")).unwrap_or_default()
    )]
    BehindPassword {
        /// The known parameter most like it, if there is one.
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
        /// The known parameter most like it, if there is one.
        nearest: Option<&'static str>,
    },
    /// A parameter that libpq has and Walpost does not, and whose promise would be broken by
    /// ignoring it.
    #[error("{name} is not supported: {remedy}")]
    Unsupported {
        /// Parameter or environment variable.
        name: &'static str,
        /// What to do in its place.
        remedy: &'static str,
    },
    /// A value outside of what its parameter takes.
    #[error("{name} is {found:?}, expected {expected}")]
    Value {
        /// Parameter or environment variable.
        name: &'static str,
        /// As written.
        found: String,
        /// What the parameter takes.
        expected: String,
    },
    /// Lists of hosts, addresses and ports that don't have the same length.
    #[error("{name} lists {found} values, expected {expected}: one for each host")]
    Count {
        /// Parameter or environment variable.
        name: &'static str,
        /// Length of its list.
        found: usize,
        /// Number of hosts.
        expected: usize,
    },
    /// No parameter and no environment variable says who asks.
    #[error("no user: write user=NAME, or set PGUSER (USER and LOGNAME are not set either)")]
    NoUser,
}
