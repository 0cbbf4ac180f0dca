//! A cluster of three brokers, in which one or two fail. Delivery resumes in at-least-once and in
//! exactly-once mode, and no event is lost.

use crate::support::cluster::Cluster;
use crate::support::fixture::Fixture;
use crate::support::postgres::{MAJOR, Server};
use crate::support::under_load::{UnderLoad, settle, wait_for_transactions};
use crate::support::wait::wait_until;

const TRANSACTIONS: usize = 40;

/// Waits until all events committed so far are confirmed.
fn wait_for_progress(streams: &[UnderLoad]) {
    for stream in streams {
        stream.fixture.wait_until_confirmed();
    }
}

fn first_topic(streams: &[UnderLoad]) -> String {
    streams[0].fixture.topics()[0].clone()
}

#[test]
fn loses_no_event_when_the_partition_leader_is_killed_under_load() {
    let cluster = Cluster::shared();
    let streams = UnderLoad::in_both_modes(Server::shared(MAJOR), cluster.any_node());
    let topic = first_topic(&streams);
    wait_for_transactions(&streams, TRANSACTIONS);
    cluster.leader(&topic).kill();
    wait_for_progress(&streams);
    cluster.start_all();
    settle(streams, 1);
}

/// When a frozen broker resumes, it still acts as the leader, and processes requests that it
/// received before and while it was frozen.
#[test]
fn loses_no_event_when_the_partition_leader_freezes_until_another_is_elected() {
    let cluster = Cluster::shared();
    let streams = UnderLoad::in_both_modes(Server::shared(MAJOR), cluster.any_node());
    let topic = first_topic(&streams);
    wait_for_transactions(&streams, TRANSACTIONS);
    let zombie = cluster.leader(&topic);
    zombie.freeze();
    wait_until("another leader", || {
        cluster.leader(&topic).id() != zombie.id()
    });
    wait_for_transactions(&streams, TRANSACTIONS);
    zombie.thaw();
    wait_for_progress(&streams);
    cluster.wait_until_in_sync();
    settle(streams, 1);
}

/// With `min.insync.replicas=3`, the leader rejects writes if one of its two followers is down. If
/// both are down, the cluster also has no controller.
#[test]
fn retries_writes_rejected_for_too_few_in_sync_replicas() {
    let cluster = Cluster::shared();
    let streams = [false, true].map(|exactly_once| {
        let fixture =
            Fixture::on_servers(Server::shared(MAJOR), cluster.any_node()).in_mode(exactly_once);
        let conninfo = fixture.conninfo();
        // The leader rejects a write only after it has waited this long for the missing replica.
        let patience = ["-X", "request.timeout.ms=5000"];
        UnderLoad::start(
            fixture,
            &conninfo,
            &patience,
            &[("min.insync.replicas", "3")],
        )
    });
    let topic = first_topic(&streams);
    wait_for_transactions(&streams, TRANSACTIONS);
    let leader = cluster.leader(&topic);
    let log_before = leader.log().len();
    let nodes = cluster.nodes().iter();
    for follower in nodes.filter(|node| node.id() != leader.id()) {
        follower.kill();
        wait_until("writes to be refused", || {
            leader.log()[log_before..].contains("NotEnoughReplicas")
        });
        for stream in &streams {
            wait_until("nothing to be confirmed any more", || {
                let confirmed = stream.fixture.confirmed();
                stream.wait_for_transactions(TRANSACTIONS);
                stream.fixture.confirmed() == confirmed
            });
        }
    }
    cluster.start_all();
    settle(streams, 2);
}

#[test]
fn loses_no_event_during_a_rolling_broker_restart_under_load() {
    let cluster = Cluster::shared();
    let streams = UnderLoad::in_both_modes(Server::shared(MAJOR), cluster.any_node());
    for node in cluster.nodes() {
        wait_for_transactions(&streams, TRANSACTIONS);
        node.stop();
        wait_for_progress(&streams);
        cluster.start_all();
    }
    settle(streams, 3);
}
