//! Determines whether an attacker on the same network or machine could intercept a connection, and
//! logs warnings about such connections.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use super::SslMode;

/// How well a connection is protected from attackers on the same network or machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// The loopback interface, or a Unix-domain socket that no other user could have created. No
    /// network is involved.
    Local,
    /// A Unix-domain socket that another user on this machine could have created.
    OtherUser {
        /// The user that owns the listening process, or `None` if the kernel does not report it.
        uid: Option<u32>,
    },
    /// A TLS connection on which the server has proven its identity: either a trusted authority
    /// signed its certificate, or the server has shown that it knows the password.
    Proven,
    /// A TLS connection whose server certificate was not verified. The server's identity is not
    /// known.
    Unproven,
    /// Unencrypted TCP.
    Clear,
}

impl Exposure {
    /// Returns how well a TCP connection is protected. `peer` is the server's address; `None` means
    /// that the address is unknown and therefore not trusted. `tls` states whether the server's
    /// certificate was verified; `None` means that the connection does not use TLS.
    pub(crate) fn over_tcp(peer: Option<IpAddr>, tls: Option<bool>) -> Exposure {
        // An IPv4 address may be reported as an IPv6 address, as in ::ffff:127.0.0.1.
        let is_loopback = peer.is_some_and(|address| address.to_canonical().is_loopback());
        match tls {
            Some(true) => Exposure::Proven,
            _ if is_loopback => Exposure::Local,
            Some(false) => Exposure::Unproven,
            None => Exposure::Clear,
        }
    }

    /// Returns whether the peer may be a program other than PostgreSQL.
    pub(crate) fn is_open(self) -> bool {
        match self {
            Exposure::Local | Exposure::Proven => false,
            Exposure::OtherUser { .. } | Exposure::Unproven | Exposure::Clear => true,
        }
    }

    /// Describes why the connection is not secure. `connection` is the subject of the sentence,
    /// such as "the connection". Returns an empty string if the connection is secure.
    pub(crate) fn fault(self, connection: &str) -> String {
        match self {
            Exposure::Local | Exposure::Proven => String::new(),
            Exposure::OtherUser { uid: Some(uid) } => format!(
                "{connection} uses a Unix-domain socket that any user on this machine could have created, and the \
                 listening process belongs to uid {uid}"
            ),
            Exposure::OtherUser { uid: None } => format!(
                "{connection} uses a Unix-domain socket that any user on this machine could have created"
            ),
            Exposure::Unproven => {
                format!("{connection} uses TLS without verifying the server's certificate")
            }
            Exposure::Clear => format!("{connection} does not use TLS"),
        }
    }

    /// Describes who could read the client's response to an authentication request.
    pub(crate) fn attacker(self) -> &'static str {
        match self {
            Exposure::OtherUser { .. } => {
                "any user who listens on the socket while PostgreSQL is down could read the authentication response"
            }
            Exposure::Local | Exposure::Proven | Exposure::Unproven | Exposure::Clear => {
                "anyone on the network between Walpost and the server could read the authentication response"
            }
        }
    }

    /// Describes how to secure the connection.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Exposure::OtherUser { .. } => {
                "Set requirepeer to the user that PostgreSQL runs as (requirepeer=postgres), or unix_socket_directories to a directory in \
                 which only that user can create files"
            }
            Exposure::Local | Exposure::Proven | Exposure::Unproven | Exposure::Clear => {
                "Set sslmode=verify-full with sslrootcert"
            }
        }
    }
}

/// The warnings logged about connections that were opened with one connection string. Each kind of
/// warning is logged only once, no matter how often Walpost connects.
#[derive(Debug, Default)]
pub(crate) struct Exposures(Mutex<Vec<(Exposure, String)>>);

impl Exposures {
    /// Logs a warning if an authenticated connection is not secure, unless the same kind of warning
    /// has already been logged.
    pub(crate) fn record_connection(&self, exposure: Exposure, host: &str, mode: SslMode) {
        let consequence = match exposure {
            Exposure::Local | Exposure::Proven => return,
            Exposure::OtherUser { .. } => return self.record_socket(exposure, host),
            Exposure::Unproven => {
                "anyone on the network path can impersonate the server, and read and change the data"
            }
            Exposure::Clear => {
                "anyone on the network path can read and change the data, and the server's identity \
                 is not verified"
            }
        };
        let fault = exposure.fault(&format!("the connection to PostgreSQL at {host}"));
        let text = format!(
            "{fault} (sslmode={mode}): {consequence}. Set sslmode=verify-full with sslrootcert=FILE or sslrootcert=system, \
             or channel_binding=require"
        );
        self.warn_once(exposure, text);
    }

    fn record_socket(&self, exposure: Exposure, host: &str) {
        let text = format!(
            "{}: while PostgreSQL is down, another user can listen on the socket, impersonate the server and change \
             the data. {}",
            exposure.fault(&format!("the connection to PostgreSQL at {host}")),
            exposure.remedy()
        );
        self.warn_once(exposure, text);
    }

    /// Logs a warning that a cleartext password is sent over the loopback interface. No network is
    /// involved, but any process could be listening on the port.
    pub(crate) fn warn_clear_password(&self, host: &str) {
        let text = format!(
            "the server at {host} requests the password in clear text, and the connection does not verify the server's \
             identity with TLS: while PostgreSQL is down, another user on this machine can listen on its port and \
             receive the password. Configure the server to request scram-sha-256 (pg_hba.conf), and set \
             require_auth=scram-sha-256. If clear text is intended, set require_auth=password"
        );
        self.warn_once(Exposure::Local, text);
    }

    fn warn_once(&self, kind: Exposure, text: String) {
        let mut warnings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if warnings.iter().any(|(known, _)| *known == kind) {
            return;
        }
        tracing::warn!("{text}");
        warnings.push((kind, text));
    }

    /// Returns the warnings logged so far.
    pub(crate) fn texts(&self) -> Vec<String> {
        let warnings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        warnings.iter().map(|(_, text)| text.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::connect::conninfo::Conninfo;

    #[test]
    fn shares_warnings_between_clones_of_a_connection_string() {
        let conninfo = Conninfo::parse("host=h user=u", &|_| None).expect("a connection string");
        let clone = conninfo.clone();
        clone
            .exposures
            .record_connection(Exposure::Proven, "h", SslMode::Prefer);
        assert_eq!(conninfo.exposures(), Vec::<String>::new());
        clone
            .exposures
            .record_connection(Exposure::Clear, "db", SslMode::Prefer);
        let [warning] = &conninfo.exposures()[..] else {
            panic!("{:?}", conninfo.exposures());
        };
        assert!(
            warning
                .contains("the connection to PostgreSQL at db does not use TLS (sslmode=prefer)"),
            "{warning}"
        );
    }
}
