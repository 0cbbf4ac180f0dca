//! `check`, and the small things beside the commands that work.

use serde_json::Value;

use crate::init::objects;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::scene::Scene;
use crate::support::walpost::Invocation;

#[test]
fn init_and_check_say_that_the_server_cannot_be_reached() {
    let nowhere = "host=/nowhere user=postgres dbname=postgres";
    for command in ["init", "check"] {
        let mut invocation = Invocation::new([command, "--postgres", nowhere]);
        if command == "check" {
            invocation = invocation.args(["--kafka", "127.0.0.1:9"]);
        }
        invocation
            .finish()
            .expect_code(1)
            .expect_says(&["/nowhere"]);
    }
}

#[test]
fn check_is_content_with_what_init_made() {
    for major in MAJORS {
        let scene = Scene::on(Server::shared(major), Broker::shared());
        scene.check().finish().expect_code(0);
        let finished = scene.check().arg("--json").finish().expect_code(0);
        serde_json::from_str::<Value>(&finished.stdout).expect("one JSON document");
    }
}

#[test]
fn check_tells_everything_that_is_wrong_with_its_remedy() {
    let scene = Scene::bare();
    scene.check().finish().expect_code(3).expect_says(&[
        "public.outbox",
        "publication",
        "slot",
        "walpost init",
    ]);
    let finished = scene.check().arg("--json").finish().expect_code(3);
    let report: Value = serde_json::from_str(&finished.stdout).expect("one JSON document");
    assert!(report.to_string().contains("walpost init"), "{report}");
    assert!(objects(&scene).is_empty(), "check changes nothing");
}

#[test]
fn check_finds_a_broker_that_does_not_answer() {
    let scene = Scene::new();
    let finished = scene
        .invoke("check")
        .args(["--kafka", "127.0.0.1:9"])
        .finish();
    assert!(matches!(finished.code, Some(1 | 3)), "{finished:?}");
    finished.expect_says(&["127.0.0.1:9"]);
}

#[test]
fn completions_are_made_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let finished = Invocation::new(["completions", shell])
            .finish()
            .expect_code(0);
        assert!(finished.stdout.contains("null-payload"), "{shell}");
    }
}

#[test]
fn version_and_help_are_given() {
    let finished = Invocation::new(["--version"]).finish().expect_code(0);
    assert_eq!(
        finished.stdout.trim(),
        concat!("walpost ", env!("CARGO_PKG_VERSION"))
    );
    Invocation::new(["run", "--help"])
        .finish()
        .expect_code(0)
        .expect_says(&["--null-payload", "WALPOST_KAFKA"]);
}

#[test]
fn logs_are_json_where_that_is_asked() {
    let scene = Scene::new();
    let mut walpost = scene.run().args(["--log-format", "json"]).start();
    walpost.wait_for_log("streaming");
    let finished = walpost.terminate().expect_code(0);
    for line in finished.stderr.lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
}
