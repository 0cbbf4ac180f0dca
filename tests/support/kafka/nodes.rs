//! The position and the ports of each node in a cluster.

use super::super::process::free_port;

#[derive(Clone, Copy)]
pub(crate) struct Ports {
    pub(super) plain: u16,
    pub(super) sasl: u16,
    /// The port of a listener that accepts unsigned tokens.
    pub(super) unsecured: u16,
    pub(super) tls: u16,
    /// The port of a listener for connections through a proxy. The address that the broker
    /// advertises for this listener contains the port `proxy`, on which the proxy listens.
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

/// The position of a node within its cluster.
#[derive(Clone)]
pub(crate) struct NodePosition {
    /// Zero-based index of this node.
    pub(super) index: usize,
    /// The ports of every node in the cluster.
    pub(super) nodes: Vec<Ports>,
    /// Whether the node has listeners for TLS and tokens. They are optional because they account
    /// for a tenth of the startup time.
    pub(super) has_tls: bool,
}

impl NodePosition {
    pub(crate) fn new(index: usize, nodes: Vec<Ports>) -> Self {
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

    /// Returns the `node.id`.
    pub(super) fn id(&self) -> i32 {
        i32::try_from(self.index + 1).unwrap()
    }

    pub(super) fn voters(&self) -> String {
        let voters = self.nodes.iter().zip(1..);
        let voters = voters.map(|(ports, id)| format!("{id}@127.0.0.1:{}", ports.controller));
        voters.collect::<Vec<_>>().join(",")
    }
}
