//! Two instances: one streams, the other stands by and takes over.

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::scene::Scene;
use crate::support::wait::stays;

use std::time::Duration;

for_each_outbox! {
    second_instance_stands_by_and_takes_over_when_the_first_is_killed
}

fn second_instance_stands_by_and_takes_over_when_the_first_is_killed(outbox: Outbox) {
    take_over_in_turn(&Scene::of(outbox), Resends::AtMost(5));
}

#[test]
fn second_instance_takes_over_exactly_once() {
    take_over_in_turn(&Scene::new().exactly_once(), Resends::Never);
}

fn take_over_in_turn(scene: &Scene, resends: Resends) {
    let aggregates = [scene.aggregate(3), scene.aggregate(1)];
    let load = scene.load(&[&aggregates[0], &aggregates[1]]);
    let mut first = scene.start();
    for _ in 0..5 {
        let mut second = scene.run().start();
        second.wait_for_log("standing by");
        load.wait_for_transactions(30);
        assert_eq!(second.logged("streaming"), 0, "{}", second.log());
        first.kill();
        second.wait_for_log("streaming");
        load.wait_for_transactions(30);
        first = second;
    }
    load.stop();
    scene.settle(first, &[], resends);
}

#[test]
fn standby_takes_over_without_repetition_when_the_first_is_stopped() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(3);
    let load = scene.load(&[&aggregate]);
    let first = scene.start();
    let mut second = scene.run().start();
    second.wait_for_log("standing by");
    load.wait_for_transactions(50);
    first.terminate().expect_code(0);
    second.wait_for_log("streaming");
    load.wait_for_transactions(50);
    load.stop();
    assert_eq!(scene.settle(second, &[], Resends::Never).repeated, 0);
}

#[test]
fn standby_says_so_once_and_stops_when_asked() {
    let scene = Scene::new();
    let first = scene.start();
    let mut second = scene.run().start();
    second.wait_for_log("standing by");
    stays("quiet", Duration::from_secs(4), || {
        second.logged("standing by") == 1
    });
    second.terminate().expect_code(0);
    first.terminate().expect_code(0);
}
