//! `require_auth`: the methods of authentication that a server may ask for.
//!
//! Spec: PostgreSQL 18, 32.1.2 "Parameter Key Words", and `pqConnectOptions2` of libpq.

use std::fmt;

/// A method that a server can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::postgres) enum AuthMethod {
    /// The password in clear text.
    Password,
    Md5,
    ScramSha256,
    Gss,
    Sspi,
    OAuth,
    /// Nothing: `trust`, `peer`, or a client certificate alone.
    None,
}

impl AuthMethod {
    const VALUES: &[(&str, AuthMethod)] = &[
        ("password", AuthMethod::Password),
        ("md5", AuthMethod::Md5),
        ("scram-sha-256", AuthMethod::ScramSha256),
        ("gss", AuthMethod::Gss),
        ("sspi", AuthMethod::Sspi),
        ("oauth", AuthMethod::OAuth),
        ("none", AuthMethod::None),
    ];
}

impl fmt::Display for AuthMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::VALUES
            .iter()
            .find(|(_, method)| method == self)
            .map(|(name, _)| *name);
        f.write_str(name.unwrap_or_default())
    }
}

/// A list of methods, either of those that are allowed or of those that are not. The default allows
/// all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::postgres) struct RequireAuth {
    is_negated: bool,
    /// Empty: not set.
    methods: Vec<AuthMethod>,
}

impl RequireAuth {
    /// Reads a value that is not empty.
    ///
    /// # Errors
    /// What is expected in its place. As in libpq, spaces and empty members are errors.
    pub(crate) fn parse(text: &str) -> Result<RequireAuth, String> {
        let mut read = RequireAuth::default();
        for (index, member) in text.split(',').enumerate() {
            let (is_negated, name) = match member.strip_prefix('!') {
                Some(name) => (true, name),
                None => (false, member),
            };
            if index == 0 {
                read.is_negated = is_negated;
            } else if read.is_negated != is_negated {
                return Err("a ! before each of the methods, or before none of them".to_owned());
            }
            let known = AuthMethod::VALUES.iter().find(|(known, _)| *known == name);
            let Some((_, method)) = known else {
                let names: Vec<_> = AuthMethod::VALUES.iter().map(|(name, _)| *name).collect();
                let names = names.join(", ");
                return Err(format!("some of {names}, separated by commas alone"));
            };
            if read.methods.contains(method) {
                return Err("each method once".to_owned());
            }
            read.methods.push(*method);
        }
        Ok(read)
    }

    /// Whether the server may ask for it.
    pub(in crate::postgres) fn allows(&self, method: AuthMethod) -> bool {
        self.methods.is_empty() || self.methods.contains(&method) != self.is_negated
    }

    /// Whether the list asks for it by name: a list of what is not allowed asks for nothing.
    pub(in crate::postgres) fn names(&self, method: AuthMethod) -> bool {
        !self.is_negated && self.methods.contains(&method)
    }
}

impl fmt::Display for RequireAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.is_negated { "!" } else { "" };
        for (index, method) in self.methods.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{sign}{method}")?;
        }
        Ok(())
    }
}
