//! SASL/OAUTHBEARER: tokens that a program prints, and that brokers check.

use std::path::PathBuf;

use crate::support::certificates::write_private;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::reaper;
use crate::support::scene::Scene;
use crate::support::tokens::Issuer;
use crate::support::under_load::{UnderLoad, settle};
use crate::support::wait::wait_until;

/// walpost.toml of a pipeline that has its tokens from the program.
fn file(scene: &Scene, issuer: &Issuer) -> PathBuf {
    let file = reaper::folder("config").join("walpost.toml");
    let text = format!(
        "[kafka]\n\"security.protocol\" = \"sasl_plaintext\"\n\"sasl.mechanisms\" = \"OAUTHBEARER\"\n\
         [[pipeline]]\nname = \"{}\"\nkafka_token_command = {}\n",
        scene.name,
        issuer.command()
    );
    write_private(&file, text.as_bytes());
    file
}

/// Flags with which a command has its tokens from the program.
fn flags(scene: &Scene, issuer: &Issuer) -> [String; 4] {
    let file = file(scene, issuer).display().to_string();
    let listener = format!("bootstrap.servers={}", scene.broker.sasl_address());
    ["--config".to_owned(), file, "-X".to_owned(), listener]
}

/// The brokers close a connection whose token has expired, unless another one was shown before.
#[test]
fn tokens_that_expire_under_load_are_renewed_in_both_modes_and_a_program_that_fails_is_run_again() {
    let (server, broker) = (Server::shared(MAJOR), Broker::shared());
    let issuers = [Issuer::new(5), Issuer::new(5)];
    let streams = [false, true].map(|exactly_once| {
        let scene = Scene::on(server, broker).in_mode(exactly_once);
        let flags = flags(&scene, &issuers[usize::from(exactly_once)]);
        let conninfo = scene.conninfo();
        UnderLoad::start(scene, &conninfo, &flags.each_ref().map(String::as_str), &[])
    });
    let before = issuers.each_ref().map(Issuer::calls);

    // Meanwhile: one whose program fails at first. That is no refusal, after which the pipeline would halt.
    let scene = Scene::new();
    let away = Issuer::new(60);
    away.leave();
    let arguments = flags(&scene, &away);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.run().args(&arguments).start();
    scene.insert(&aggregate, "k");
    let line = walpost.wait_for_log("Kafka is unreachable");
    for text in [
        "kafka_token_command: /bin/sh has ended with exit status: 3",
        "the issuer is away",
    ] {
        assert!(line.contains(text), "{text} in {line}");
    }
    let check = scene.check().args(&arguments).finish().expect_code(1);
    check.expect_says(&["UNREACHABLE", "the issuer is away"]);
    away.come_back();
    scene.wait_for_records(1);
    scene.check().args(&arguments).finish().expect_code(0);
    scene.verify().args(&arguments).finish().expect_code(0);
    scene.settle(walpost, &[], scene.resends(0));

    for (issuer, before) in issuers.iter().zip(before) {
        wait_until("three more tokens", || issuer.calls() >= before + 3);
    }
    for stream in &streams {
        stream.wait_for_transactions(20);
        let log = stream.walpost.log();
        assert!(!log.contains("Kafka refuses"), "{log}");
    }
    settle(streams, 0);
}
