//! How others on the same network or machine can attack a connection, and the warnings logged about
//! it.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use super::SslMode;

/// How a connection is protected from others on the same network or machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// No network is involved: the loopback interface, or a Unix-domain socket that no other user
    /// could have created.
    Local,
    /// A Unix-domain socket that another user of this machine could have created.
    OtherUser {
        /// The user that listens there, or `None` if the kernel does not report it.
        uid: Option<u32>,
    },
    /// TLS, and the server has presented a certificate of a trusted authority or proved that it
    /// knows the password.
    Proven,
    /// TLS with an unverified certificate: the other end may be anyone.
    Unproven,
    /// Unencrypted TCP.
    Clear,
}

impl Exposure {
    /// Returns the exposure of a TCP connection. `peer` is `None` if the address is unknown, which
    /// is treated as not trusted. `tls` tells whether a certificate was verified, and is `None`
    /// without TLS.
    pub(crate) fn over_tcp(peer: Option<IpAddr>, tls: Option<bool>) -> Exposure {
        // An IPv4 address may be reported as an IPv6 one: ::ffff:127.0.0.1.
        let is_loopback = peer.is_some_and(|address| address.to_canonical().is_loopback());
        match tls {
            Some(true) => Exposure::Proven,
            _ if is_loopback => Exposure::Local,
            Some(false) => Exposure::Unproven,
            None => Exposure::Clear,
        }
    }

    /// Returns whether someone other than PostgreSQL may be answering.
    pub(crate) fn is_open(self) -> bool {
        match self {
            Exposure::Local | Exposure::Proven => false,
            Exposure::OtherUser { .. } | Exposure::Unproven | Exposure::Clear => true,
        }
    }

    /// Describes what is wrong with the connection, worded to follow "the connection". Empty if
    /// nothing is wrong.
    pub(crate) fn fault(self) -> Cow<'static, str> {
        match self {
            Exposure::Local | Exposure::Proven => "".into(),
            Exposure::OtherUser { uid: Some(uid) } => format!(
                "uses a Unix-domain socket that any user of this machine could have created, and uid {uid} listens there"
            )
            .into(),
            Exposure::OtherUser { uid: None } => {
                "uses a Unix-domain socket that any user of this machine could have created".into()
            }
            Exposure::Unproven => "has TLS that checks no certificate".into(),
            Exposure::Clear => "has no TLS".into(),
        }
    }

    /// Describes who could answer in place of the server.
    pub(crate) fn attacker(self) -> &'static str {
        match self {
            Exposure::OtherUser { .. } => "whoever listens there while PostgreSQL is down",
            Exposure::Local | Exposure::Proven | Exposure::Unproven | Exposure::Clear => {
                "whoever is on the network between"
            }
        }
    }

    /// Describes how to prevent that.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Exposure::OtherUser { .. } => {
                "Set requirepeer to the user that PostgreSQL runs as (requirepeer=postgres), or unix_socket_directories to a folder in \
                 which only that user can create files"
            }
            Exposure::Local | Exposure::Proven | Exposure::Unproven | Exposure::Clear => {
                "Set sslmode=verify-full with sslrootcert"
            }
        }
    }
}

/// The warnings logged about connections of one connection string. Each kind is logged once, no
/// matter how often Walpost connects; a connection with another kind of exposure is logged again.
#[derive(Debug, Default)]
pub(crate) struct Exposures(Mutex<Vec<(Exposure, String)>>);

impl Exposures {
    /// Records an authenticated connection, and logs a warning if it is open to others.
    pub(crate) fn record_connection(&self, exposure: Exposure, host: &str, mode: SslMode) {
        let consequence = match exposure {
            Exposure::Local | Exposure::Proven => return,
            Exposure::OtherUser { .. } => return self.record_socket(exposure, host),
            Exposure::Unproven => {
                "whoever is between can pass for the server, and read and change what it sends"
            }
            Exposure::Clear => {
                "whoever is between can read and change what is sent, and nothing proves that this is the \
                 server"
            }
        };
        let fault = exposure.fault();
        let text = format!(
            "the connection to PostgreSQL at {host} {fault} (sslmode={mode}): {consequence}. Set \
             sslmode=verify-full with sslrootcert=FILE or sslrootcert=system, or channel_binding=require"
        );
        self.warn_once(exposure, text);
    }

    fn record_socket(&self, exposure: Exposure, host: &str) {
        let text = format!(
            "the connection to PostgreSQL at {host} {}: whoever listens there while PostgreSQL is down can pass for the server, and \
             change what it sends. {}",
            exposure.fault(),
            exposure.remedy()
        );
        self.warn_once(exposure, text);
    }

    /// Warns that a cleartext password is sent over the loopback interface. No network is involved,
    /// but any process may be listening on the port.
    pub(crate) fn warn_clear_password(&self, host: &str) {
        let text = format!(
            "the server at {host} asks for the password in clear text, and the connection has no TLS that checks who asks: while \
             PostgreSQL is down, another user of this machine can listen on its port and is sent the password. Have the server ask \
             for scram-sha-256 (pg_hba.conf), and set require_auth=scram-sha-256; if that is meant: require_auth=password"
        );
        self.warn_once(Exposure::Local, text);
    }

    fn warn_once(&self, kind: Exposure, text: String) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.iter().any(|(known, _)| *known == kind) {
            return;
        }
        tracing::warn!("{text}");
        told.push((kind, text));
    }

    /// Returns the warnings logged so far.
    pub(crate) fn texts(&self) -> Vec<String> {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.iter().map(|(_, text)| text.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::connect::conninfo::Conninfo;

    #[test]
    fn findings_are_shared_by_connections_of_the_same_string() {
        let conninfo = Conninfo::parse("host=h user=u", &|_| None).expect("a connection string");
        let clone = conninfo.clone();
        clone
            .exposures
            .record_connection(Exposure::Proven, "h", SslMode::Prefer);
        assert_eq!(conninfo.exposures(), Vec::<String>::new());
        clone
            .exposures
            .record_connection(Exposure::Clear, "h", SslMode::Prefer);
        let [told] = &conninfo.exposures()[..] else {
            panic!("{:?}", conninfo.exposures());
        };
        assert!(told.contains("at h has no TLS (sslmode=prefer)"), "{told}");
    }
}
