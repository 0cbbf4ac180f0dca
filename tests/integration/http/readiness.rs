//! Tests whether a pipeline is reported as ready, and which reason is reported if it is not.

use super::ANY_PORT;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::proxy::ProxyMode;
use crate::support::wait::{wait_for, wait_until};
use crate::support::walpost::{Invocation, config_file};

#[test]
fn reports_not_ready_with_the_reason_while_the_broker_is_down() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    wait_until("readiness", || http.get("/readyz").code == 200);
    kafka.set_mode(ProxyMode::Refuse);
    fixture.insert(&aggregate, "k");
    let answer = wait_for("the pipeline to be not ready", || {
        let answer = http.get("/readyz");
        (answer.code == 503).then_some(answer)
    });
    assert!(answer.body.contains("Kafka is unreachable"), "{answer:?}");
    assert_eq!(http.get("/healthz").code, 200);
    let name = &fixture.name;
    assert_eq!(http.metric("walpost_kafka_up", name), Some(0.0));
    assert_eq!(http.metric("walpost_pipeline_ready", name), Some(0.0));
    wait_until("lag", || {
        let seconds = http.metric("walpost_lag_seconds", name);
        let bytes = http.metric("walpost_lag_bytes", name);
        seconds > Some(1.0) && bytes > Some(0.0)
    });
    let pipeline = http.pipeline();
    assert_eq!(pipeline["events"]["in_flight"], 1);
    let error = &pipeline["last_error"];
    assert!(
        error["message"].as_str().unwrap().contains("Kafka"),
        "{error}"
    );
    assert!(
        error["remedy"].as_str().unwrap().contains("brokers"),
        "{error}"
    );
    kafka.set_mode(ProxyMode::Pass);
    wait_until("readiness", || http.get("/readyz").code == 200);
    fixture.wait_for_records(2);
    wait_until("no lag", || {
        http.metric("walpost_lag_seconds", name) == Some(0.0)
            && http.metric("walpost_in_flight_events", name) == Some(0.0)
    });
    let outage = &http.pipeline()["outages"][0];
    assert_eq!(outage["kind"], "kafka_broker");
    assert!(outage["ended_at"].is_number(), "{outage}");
    walpost.terminate().expect_code(0);
}

/// librdkafka does not consider a broker down if it accepts connections without responding.
#[test]
fn reports_not_ready_while_the_broker_does_not_respond() {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    broker.freeze();
    fixture.insert(&aggregate, "k");
    let answer = wait_for("the pipeline to be not ready", || {
        let answer = http.get("/readyz");
        (answer.code == 503).then_some(answer)
    });
    assert!(answer.body.contains(&fixture.name), "{answer:?}");
    broker.thaw();
    wait_until("readiness", || http.get("/readyz").code == 200);
    walpost.terminate().expect_code(0);
}

#[test]
fn reports_not_ready_while_the_database_is_down_and_records_the_outage() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    wait_until("readiness", || http.get("/readyz").code == 200);
    server.stop(StopMode::Fast);
    wait_until("no readiness", || http.get("/readyz").code == 503);
    wait_until("the state", || http.pipeline()["state"] == "reconnecting");
    wait_until("lag", || {
        http.metric("walpost_lag_seconds", &fixture.name) > Some(1.0)
    });
    server.start();
    wait_until("readiness", || http.get("/readyz").code == 200);
    let pipeline = http.pipeline();
    assert!(pipeline["reconnects"].as_u64() >= Some(1), "{pipeline}");
    let outage = &pipeline["outages"][0];
    assert_eq!(outage["kind"], "postgres");
    assert!(outage["ended_at"].is_number(), "{outage}");
    walpost.terminate().expect_code(0);
}

#[test]
fn http_endpoints_report_a_halted_pipeline_while_others_run() {
    let fixtures = [Fixture::new(), Fixture::new()];
    let mut text = format!(
        "http = \"127.0.0.1:0\"\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n",
        Broker::shared().address()
    );
    for fixture in &fixtures {
        text += &format!(
            "[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n",
            fixture.name,
            fixture.conninfo()
        );
    }
    let file = config_file(text);
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(file)
        .without_env("WALPOST_HTTP")
        .start();
    let http = walpost.http();
    walpost.wait_for_logs("streaming", 2);
    fixtures[0].insert("nobody.made.this", "k");
    walpost.wait_for_log("halted: ");
    let answer = http.get("/readyz");
    assert_eq!(answer.code, 503);
    let lines: Vec<_> = answer.body.lines().collect();
    assert!(
        lines[0].starts_with(&format!("{}: halted: ", fixtures[0].name)),
        "{lines:?}"
    );
    assert_eq!(lines[1], format!("{}: streaming", fixtures[1].name));
    let status = http.status();
    assert_eq!(status["ready"], false);
    let halted = &status["pipelines"][0];
    assert_eq!(halted["state"], "halted");
    let error = &halted["last_error"];
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("nobody.made.this"),
        "{error}"
    );
    assert!(
        error["remedy"].as_str().unwrap().contains("restart"),
        "{error}"
    );
    assert_eq!(status["pipelines"][1]["state"], "streaming");
    walpost.terminate().expect_code(3);
}

#[test]
fn standby_instance_reports_ready_before_and_after_takeover() {
    let fixture = Fixture::new();
    let first = fixture.start();
    let mut second = fixture.run().args(ANY_PORT).start();
    let http = second.http();
    second.wait_for_log("standing by");
    wait_until("the state", || http.pipeline()["state"] == "standing_by");
    let answer = http.get("/readyz");
    assert_eq!(
        (answer.code, answer.body),
        (200, format!("{}: standing_by\n", fixture.name))
    );
    first.terminate().expect_code(0);
    second.wait_for_log("streaming");
    wait_until("the state", || http.pipeline()["state"] == "streaming");
    assert_eq!(http.get("/readyz").code, 200);
    second.terminate().expect_code(0);
}
