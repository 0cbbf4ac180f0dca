//! The nodes of a cluster, and where each of them listens.

use super::super::process::free_port;

#[derive(Clone, Copy)]
pub(crate) struct Ports {
    pub(super) plain: u16,
    pub(super) sasl: u16,
    /// A listener that takes tokens without a signature.
    pub(super) unsecured: u16,
    pub(super) tls: u16,
    /// A listener that is advertised as `proxy`, which is where a proxy to it listens.
    pub(super) proxied: u16,
    pub(super) proxy: u16,
    pub(super) expired: u16,
    pub(super) early: u16,
    pub(super) controller: u16,
}

impl Ports {
    pub(crate) fn free() -> Self {
        Self {
            plain: free_port(),
            sasl: free_port(),
            unsecured: free_port(),
            tls: free_port(),
            proxied: free_port(),
            proxy: free_port(),
            expired: free_port(),
            early: free_port(),
            controller: free_port(),
        }
    }
}

/// One node's place among the nodes of its cluster.
#[derive(Clone)]
pub(crate) struct Seat {
    /// Which one it is, from 0.
    pub(super) index: usize,
    /// The ports of all.
    pub(super) nodes: Vec<Ports>,
    /// It has the listeners for TLS and for tokens, which take a tenth of what a start takes.
    pub(super) has_tls: bool,
}

impl Seat {
    pub(crate) fn of(index: usize, nodes: Vec<Ports>) -> Self {
        Self {
            index,
            nodes,
            has_tls: false,
        }
    }

    pub(super) fn with_tls(self) -> Self {
        Self {
            has_tls: true,
            ..self
        }
    }

    /// `node.id`
    pub(super) fn id(&self) -> i32 {
        i32::try_from(self.index + 1).unwrap()
    }

    pub(super) fn voters(&self) -> String {
        let voters = self.nodes.iter().zip(1..);
        let voters = voters.map(|(ports, id)| format!("{id}@127.0.0.1:{}", ports.controller));
        voters.collect::<Vec<_>>().join(",")
    }
}
