//! `require_auth`: the authentication methods that a server may request.
//!
//! Spec: PostgreSQL 18, 32.1.2 "Parameter Key Words", and `pqConnectOptions2` in libpq.

use std::fmt;

/// An authentication method that a server can request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::postgres) enum AuthMethod {
    /// Cleartext password.
    Password,
    Md5,
    ScramSha256,
    Gss,
    Sspi,
    OAuth,
    /// The server does not request authentication: `trust`, `peer`, or only a client certificate.
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

/// A list of either allowed or disallowed methods. The default allows all methods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::postgres) struct RequireAuth {
    is_negated: bool,
    /// The methods in the list; empty if the parameter is not set.
    methods: Vec<AuthMethod>,
}

impl RequireAuth {
    /// Parses a non-empty value.
    ///
    /// # Errors
    /// Returns a description of the values that would be valid. As in libpq, spaces and empty list
    /// elements are errors.
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
                return Err(
                    "a list in which either every method or no method begins with !".to_owned(),
                );
            }
            let known = AuthMethod::VALUES.iter().find(|(known, _)| *known == name);
            let Some((_, method)) = known else {
                let names: Vec<_> = AuthMethod::VALUES.iter().map(|(name, _)| *name).collect();
                let names = names.join(", ");
                return Err(format!(
                    "one or more of {names}, separated by commas without spaces"
                ));
            };
            if read.methods.contains(method) {
                return Err("a list that contains each method at most once".to_owned());
            }
            read.methods.push(*method);
        }
        Ok(read)
    }

    /// Returns whether the server may request the method.
    pub(in crate::postgres) fn allows(&self, method: AuthMethod) -> bool {
        self.methods.is_empty() || self.methods.contains(&method) != self.is_negated
    }

    /// Returns whether the parameter explicitly names the method as allowed. Returns false if the
    /// parameter is a list of disallowed methods.
    pub(in crate::postgres) fn requires(&self, method: AuthMethod) -> bool {
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
