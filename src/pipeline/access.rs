//! Detects failures to connect to a server that has accepted connections before. If the server
//! refuses the role, an administrator is usually making a change: rotating a password, reassigning
//! privileges, or disallowing connections to a database for a few seconds. If the server does not
//! prove its identity, another program may be responding in its place, for example at the server's
//! socket path while the server restarts.
//!
//! This module performs no I/O, and takes the current time as an argument.

use std::time::Duration;

use tokio::time::Instant;

use super::error::{Cause, Change, NotTheServer, PipelineError, RoleRefused};
use crate::postgres::catalog::CatalogError;
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::dial::DialError;
use crate::postgres::replication::ConnectionError;

/// Tracks whether the server has accepted catalog and replication connections from the role, and
/// when it started to refuse the role.
#[derive(Debug, Default)]
pub(super) struct Access {
    /// Whether the server has accepted a catalog connection.
    was_accepted: bool,
    /// Whether the server has accepted a replication connection, or refused one only because
    /// another process held the slot.
    was_granted: bool,
    refused_since: Option<Instant>,
}

impl Access {
    /// Records that the server accepted a catalog connection. The server may still refuse a
    /// replication connection.
    pub(super) fn record_catalog_access(&mut self) {
        self.was_accepted = true;
    }

    /// Records that the server accepted both the catalog connection and the replication connection.
    pub(super) fn record_full_access(&mut self) {
        self.was_granted = true;
        self.refused_since = None;
    }

    /// Wraps `error` in a [`RoleRefused`] if the server is now refusing a role that it accepted
    /// before, or in a [`NotTheServer`] if the server at the same address no longer proves its
    /// identity. Otherwise returns `error` unchanged.
    pub(super) fn classify(
        &mut self,
        error: PipelineError,
        postgres: &Conninfo,
        now: Instant,
    ) -> PipelineError {
        let (was_accepted, refused) = match error.cause() {
            Cause::Connection(ConnectionError::Dial(refused)) => (self.was_granted, refused),
            Cause::Catalog(CatalogError::Dial(refused)) => (self.was_accepted, refused),
            Cause::Connection(_) | Cause::Catalog(_) | Cause::Sink(_) | Cause::Other => {
                return error;
            }
        };
        if !was_accepted {
            return error;
        }
        if may_be_from_another_program(refused) {
            return PipelineError::NotTheServer(NotTheServer {
                error: Box::new(error),
            });
        }
        let Some(change) = infer_change(refused, postgres) else {
            return error;
        };
        let since = *self.refused_since.get_or_insert(now);
        PipelineError::Refused(RoleRefused {
            error: Box::new(error),
            role: postgres.user().to_owned(),
            change,
            lasts: Duration::from_secs(now.duration_since(since).as_secs()),
        })
    }
}

/// Infers from `error` which change by an administrator caused the server to refuse a role that it
/// accepted before. Returns `None` if the error has a different cause.
///
/// All other SQLSTATEs are handled in [`recovery`](super::recovery).
fn infer_change(error: &DialError, postgres: &Conninfo) -> Option<Change> {
    let login = || Change::Login {
        origin: postgres.password_origin(),
    };
    match error.decisive() {
        DialError::Server { error, .. } => match error.code.as_str() {
            // insufficient_privilege: CONNECT or REPLICATION was revoked.
            "42501" => Some(Change::Privilege),
            // object_not_in_prerequisite_state: ALLOW_CONNECTIONS is false.
            "55000" => Some(Change::Closed),
            // Class 28: invalid authorization specification.
            code => code.starts_with("28").then(login),
        },
        // The password file is probably being rewritten.
        DialError::NoPassword { .. } => Some(login()),
        _ => None,
    }
}

/// Returns whether `error` could have been caused by a program other than the server, such as one
/// on the network path, or one that listens at the server's address while the server is down. Such
/// a program must not be able to halt a pipeline.
fn may_be_from_another_program(error: &DialError) -> bool {
    matches!(
        error.decisive(),
        DialError::Tls { .. }
            | DialError::TlsRefused { .. }
            | DialError::AuthMethod { .. }
            | DialError::RequireAuth { .. }
            | DialError::Exposed { .. }
            | DialError::UnknownPeer { .. }
            | DialError::Scram { .. }
            | DialError::ChannelBinding { .. }
            | DialError::Protocol { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::recovery::{self, Remedy};
    use crate::postgres::connect::dial::ServerError;

    fn refused(code: &str) -> DialError {
        let error = Box::new(ServerError {
            code: code.to_owned(),
            ..ServerError::default()
        });
        let host = "db:5432".to_owned();
        DialError::Server { host, error }
    }

    #[test]
    fn retries_for_ten_minutes_if_a_previously_accepted_role_is_refused() {
        let postgres = Conninfo::parse("host=db user=walpost", &|_| None).expect("conninfo");
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut access = Access::default();
        let remedy = |access: &mut Access, code, seconds| {
            let error = CatalogError::Dial(refused(code)).into();
            recovery::remedy(&access.classify(error, &postgres, at(seconds)))
        };
        assert_eq!(remedy(&mut access, "28P01", 0), Remedy::Halt, "a first run");
        access.record_catalog_access();
        for (code, expected) in [
            ("28P01", Remedy::Reconnect),
            ("28000", Remedy::Reconnect),
            ("42501", Remedy::Reconnect),
            ("55000", Remedy::Reconnect),
            ("3D000", Remedy::Halt),
            ("57P03", Remedy::Reconnect),
        ] {
            assert_eq!(remedy(&mut access, code, 10), expected, "{code}");
        }
        assert_eq!(remedy(&mut access, "28P01", 609), Remedy::Reconnect);
        assert_eq!(remedy(&mut access, "28P01", 610), Remedy::Halt);
        let walsender = ConnectionError::Dial(refused("28P01")).into();
        let error = access.classify(walsender, &postgres, at(615));
        assert_eq!(recovery::remedy(&error), Remedy::Halt, "{error}");
        assert!(!matches!(error, PipelineError::Refused(_)), "{error}");
        access.record_full_access();
        let walsender = ConnectionError::Dial(refused("28P01")).into();
        let error = access.classify(walsender, &postgres, at(620));
        assert_eq!(recovery::remedy(&error), Remedy::Reconnect, "{error}");
        assert_eq!(remedy(&mut access, "28P01", 620), Remedy::Reconnect);
        assert_eq!(remedy(&mut access, "28P01", 1219), Remedy::Reconnect);
        assert_eq!(remedy(&mut access, "28P01", 1220), Remedy::Halt);
    }

    #[test]
    fn keeps_reconnecting_if_another_program_may_be_listening_at_the_server_address() {
        let postgres = Conninfo::parse("host=db user=walpost", &|_| None).expect("conninfo");
        let start = Instant::now();
        let mut access = Access::default();
        let remedy = |access: &mut Access, seconds| {
            let host = "db:5432".to_owned();
            let what = "garbage".to_owned();
            let error = CatalogError::Dial(DialError::Protocol { host, what }).into();
            let now = start + Duration::from_secs(seconds);
            recovery::remedy(&access.classify(error, &postgres, now))
        };
        assert_eq!(remedy(&mut access, 0), Remedy::Halt, "a first run");
        access.record_catalog_access();
        assert_eq!(remedy(&mut access, 0), Remedy::Reconnect);
        assert_eq!(remedy(&mut access, 100_000), Remedy::Reconnect);
    }
}
