//! SASL and TLS to Kafka are librdkafka's, given as properties.

use crate::support::certificates::Authority;
use crate::support::kafka::{Broker, SASL_USER, sasl_password};
use crate::support::postgres::AUTHORITY;
use crate::support::scene::Scene;
use crate::support::secrets::SECRET;
use crate::support::walpost::Invocation;

/// `walpost run` to that listener of the shared broker, with these properties.
fn run(scene: &Scene, address: &str, properties: &[&str]) -> Invocation {
    let run = scene.invoke("run").args(["--kafka", address]);
    properties
        .iter()
        .fold(run, |run, property| run.args(["-X", property]))
}

fn delivers(scene: &Scene, run: Invocation) {
    let aggregate = scene.aggregate(1);
    let before = scene.broker.count(&scene.topics());
    let mut walpost = run.start();
    walpost.wait_for_log("streaming");
    scene.insert(&aggregate, "k");
    scene.wait_for_records(before + 1);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

fn sasl(mechanism: &str) -> Vec<String> {
    vec![
        "security.protocol=sasl_plaintext".to_owned(),
        format!("sasl.mechanism={mechanism}"),
        format!("sasl.username={SASL_USER}"),
    ]
}

#[test]
fn sasl_plain_and_scram_are_passed_through() {
    let scene = Scene::new();
    let password = format!("sasl.password={}", sasl_password());
    for mechanism in ["PLAIN", "SCRAM-SHA-256"] {
        let mut properties = sasl(mechanism);
        properties.push(password.clone());
        let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
        delivers(
            &scene,
            run(&scene, &scene.broker.sasl_address(), &properties),
        );
    }
}

#[test]
fn sasl_password_comes_from_the_environment() {
    let scene = Scene::new();
    let properties = sasl("PLAIN");
    let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
    let run = run(&scene, &scene.broker.sasl_address(), &properties);
    delivers(
        &scene,
        run.env("WALPOST_KAFKA_SASL_PASSWORD", sasl_password())
            .args(["--log-level", "trace"]),
    );
}

#[test]
fn wrong_sasl_password_halts() {
    let scene = Scene::new();
    let mut properties = sasl("PLAIN");
    properties.push(format!("sasl.password={SECRET}-wrong"));
    let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    let finished = run(&scene, &scene.broker.sasl_address(), &properties).finish();
    finished
        .expect_code(3)
        .expect_says(&["halted", "authentication"]);
}

#[test]
fn tls_is_verified_against_the_configured_authority() {
    let scene = Scene::new();
    let root = format!("ssl.ca.location={}", AUTHORITY.root.display());
    let address = scene.broker.tls_address();
    delivers(
        &scene,
        run(&scene, &address, &["security.protocol=ssl", &root]),
    );

    let stranger = Authority::new("Another CA");
    let root = format!("ssl.ca.location={}", stranger.root.display());
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    let finished = run(&scene, &address, &["security.protocol=ssl", &root]).finish();
    finished
        .expect_code(3)
        .expect_says(&["halted", "certificate"]);
}

#[test]
fn no_command_talks_to_a_broker_whose_certificate_does_not_hold() {
    let right = format!("ssl.ca.location={}", AUTHORITY.root.display());
    let stranger = Authority::new("Another CA");
    let stranger = format!("ssl.ca.location={}", stranger.root.display());
    let broker = Broker::shared();
    let [expired, early] = broker.untimely_addresses();
    let other_name = broker.tls_address().replace("localhost", "127.0.0.1");
    // Each takes as long as an accident may: all side by side.
    let mut running = Vec::new();
    for (address, root) in [
        (broker.tls_address(), &stranger),
        (other_name, &right),
        (expired, &right),
        (early, &right),
    ] {
        // This one takes the slot before it hears from Kafka, and would be in the way of the others.
        let streaming = [&["run"][..]];
        let others = [
            &["run", "--exactly-once"][..],
            &["check"],
            &["checkpoint", "show"],
            &["checkpoint", "adopt", "--yes"],
            &["replay", "--yes"],
        ];
        for commands in [&streaming[..], &others] {
            let scene = Scene::new();
            scene.insert(&scene.aggregate(1), "k");
            let start = |words: &&[&str]| {
                Invocation::new(*words)
                    .args(["--pipeline", &scene.name, "--postgres", &scene.conninfo()])
                    .args(["--kafka", &address])
                    .args(["-X", "security.protocol=ssl", "-X", root])
                    .start()
            };
            let started: Vec<_> = commands.iter().map(start).collect();
            running.push((scene, address.clone(), started));
        }
    }
    for (scene, address, started) in running {
        for walpost in started {
            let finished = walpost.finish().expect_code(3);
            finished.expect_says(&["refuses the connection", &address, "certificate"]);
        }
        drop(scene);
    }
}
