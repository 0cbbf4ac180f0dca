//! A cluster of three Kafka nodes, which a test may break.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};

use super::kafka::{Broker, NodePosition, Ports};
use super::wait::wait_until;

const NODES: usize = 3;

/// A Kafka cluster. By default, its topics have a replica on each node and require two in-sync
/// replicas.
pub(crate) struct Cluster {
    nodes: Vec<Broker>,
}

/// Number of tests that are waiting for the cluster.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Gives a single test exclusive access to the cluster.
pub(crate) struct ClusterGuard(MutexGuard<'static, Cluster>);

impl Deref for ClusterGuard {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0
    }
}

impl Drop for ClusterGuard {
    /// Freezes the nodes unless another test is waiting, because even idle nodes use 10% of a CPU.
    fn drop(&mut self) {
        if WAITING.load(Ordering::Relaxed) == 0 && !thread::panicking() {
            let up = self.nodes.iter().filter(|node| node.is_running());
            up.for_each(Broker::freeze);
        }
    }
}

impl Cluster {
    /// Waits for exclusive access to the shared cluster, and repairs it. The caller may break its
    /// nodes.
    pub(crate) fn shared() -> ClusterGuard {
        static SHARED: LazyLock<Mutex<Cluster>> = LazyLock::new(|| Mutex::new(Cluster::new()));
        WAITING.fetch_add(1, Ordering::Relaxed);
        let cluster = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        WAITING.fetch_sub(1, Ordering::Relaxed);
        cluster.repair();
        ClusterGuard(cluster)
    }

    /// Creates a cluster without starting its nodes.
    fn new() -> Cluster {
        let ports: Vec<_> = (0..NODES).map(|_| Ports::free()).collect();
        let nodes = (0..NODES)
            .map(|index| {
                let jvm = ["-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];
                Broker::prepared(NodePosition::new(index, ports.clone()), &jvm, None, "")
            })
            .collect();
        Cluster { nodes }
    }

    /// Resumes nodes that the previous test left frozen, and starts nodes that it left stopped.
    fn repair(&self) {
        let up = self.nodes.iter().filter(|node| node.is_running());
        up.for_each(Broker::thaw);
        self.start_all();
    }

    /// Starts the nodes that are not running, and waits until all replicas are in sync.
    pub(crate) fn start_all(&self) {
        let down = self.nodes.iter().filter(|node| !node.is_running());
        down.for_each(Broker::begin_start);
        self.wait_until_in_sync();
    }

    /// Returns one of the nodes. Its `address` lists all nodes of the cluster.
    pub(crate) fn any_node(&self) -> &Broker {
        &self.nodes[0]
    }

    pub(crate) fn nodes(&self) -> &[Broker] {
        &self.nodes
    }

    /// Returns the node that leads the first partition of a topic.
    pub(crate) fn leader(&self, topic: &str) -> &Broker {
        let client: BaseConsumer = self.any_node().client().create().unwrap();
        let metadata = client.fetch_metadata(Some(topic), Duration::from_secs(30));
        let leader = metadata.expect("the cluster answers").topics()[0].partitions()[0].leader();
        let mut nodes = self.nodes.iter();
        nodes.find(|node| node.id() == leader).expect("a leader")
    }

    /// Waits until all replicas of all partitions are in sync.
    pub(crate) fn wait_until_in_sync(&self) {
        self.nodes.iter().for_each(Broker::wait_until_up);
        let client: BaseConsumer = self.any_node().client().create().unwrap();
        wait_until("all replicas to be in sync", || {
            let Ok(metadata) = client.fetch_metadata(None, Duration::from_secs(5)) else {
                return false;
            };
            let mut partitions = metadata
                .topics()
                .iter()
                .flat_map(|topic| topic.partitions());
            metadata.brokers().len() == NODES
                && partitions.all(|partition| {
                    partition.leader() >= 0 && partition.isr().len() == partition.replicas().len()
                })
        });
    }
}
