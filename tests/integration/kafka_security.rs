//! SASL and TLS to Kafka are librdkafka's, given as properties.

use crate::support::certificates::Authority;
use crate::support::kafka::{SASL_USER, sasl_password};
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
