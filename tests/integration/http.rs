//! `run --http`: what listens, what it answers, and that no client keeps anybody waiting.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, Stop};
use crate::support::reaper;
use crate::support::scene::Scene;
use crate::support::secrets::SECRET;
use crate::support::wait::{wait_for, wait_until};
use crate::support::walpost::Invocation;

const ANY_PORT: [&str; 2] = ["--http", "127.0.0.1:0"];

#[test]
fn free_port_is_taken_and_logged_and_every_path_is_answered() {
    let scene = Scene::new();
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    assert!(!http.address().ends_with(":0"), "{http:?}");
    assert_eq!(http.get("/healthz").body, "alive\n");
    wait_until("readiness", || http.get("/readyz").code == 200);
    assert_eq!(
        http.get("/readyz").body,
        format!("{}: streaming\n", scene.name)
    );
    let metrics = http.get("/metrics");
    assert_eq!(metrics.headers["content-type"], "text/plain; version=0.0.4");
    let status = http.get("/status");
    assert_eq!(status.headers["content-type"], "application/json");
    assert_eq!(status.headers["cache-control"], "no-store");
    assert_eq!(http.get("/nothing").code, 404);
    for path in ["/status", "/metrics", "/readyz", "/nothing"] {
        let (get, head) = (http.get(path), http.ask("HEAD", path));
        assert_eq!((head.code, &*head.body), (get.code, ""), "{path}");
        assert_eq!(head.headers["content-type"], get.headers["content-type"]);
    }
    let refused = http.ask("POST", "/status");
    assert_eq!(refused.code, 405);
    assert_eq!(refused.headers["allow"], "GET, HEAD");
    let pipeline = http.pipeline();
    assert_eq!(pipeline["name"], *scene.name);
    assert_eq!(pipeline["slot"], scene.slot());
    assert_eq!(pipeline["state"], "streaming");
    walpost.terminate().expect_code(0);
}

#[test]
fn port_in_use_is_refused_before_anything_is_done() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let scene = Scene::bare();
    scene
        .run()
        .args(["--init", "--http", &address])
        .finish()
        .expect_code(2)
        .expect_says(&["--http", &address, "in use", "WALPOST_HTTP", "off"]);
    // `--init` would have made it.
    let slot = scene.slot();
    let slots = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}'");
    assert_eq!(scene.db.number(&slots), 0);
}

#[test]
fn address_that_is_none_is_refused() {
    let scene = Scene::bare();
    for address in [
        "9464",
        "no.such.host.invalid:1",
        "127.0.0.1:99999",
        "192.0.2.1:9464",
        "",
    ] {
        scene
            .run()
            .args(["--http", address])
            .finish()
            .expect_code(2)
            .expect_says(&["--http", address, "Expected HOST:PORT"]);
    }
}

#[test]
fn nothing_listens_when_it_is_off() {
    let scene = Scene::new();
    let walpost = scene.start_with(&["--http", "off"]);
    let process = procfs::process::Process::new(walpost.process_id().try_into().unwrap()).unwrap();
    let sockets: Vec<_> = process
        .fd()
        .unwrap()
        .filter_map(|fd| match fd.ok()?.target {
            procfs::process::FDTarget::Socket(inode) => Some(inode),
            _ => None,
        })
        .collect();
    let listens = |entry: &procfs::net::TcpNetEntry| {
        entry.state == procfs::net::TcpState::Listen && sockets.contains(&entry.inode)
    };
    let tcp = procfs::net::tcp().unwrap();
    assert!(!tcp.iter().any(listens), "{tcp:?}");
    assert_eq!(walpost.logged("http://"), 0);
    walpost.terminate().expect_code(0);
}

#[test]
fn file_says_where_and_the_flag_comes_before_it() {
    let file = reaper::folder("config").join("walpost.toml");
    let scene = Scene::new();
    let text = format!(
        "http = \"off\"\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n",
        scene.broker.address(),
        scene.name,
        scene.conninfo()
    );
    fs::write(&file, text).unwrap();
    let run = || {
        Invocation::new(["run", "--config"])
            .arg(&file)
            .without("WALPOST_HTTP")
    };
    let mut off = run().start();
    off.wait_for_log("streaming");
    assert_eq!(off.logged("http://"), 0);
    off.terminate().expect_code(0);
    let mut on = run().args(ANY_PORT).start();
    on.http();
    on.terminate().expect_code(0);
}

/// Each answer is searched for passwords and payloads, as a log is.
#[test]
fn no_answer_has_a_password_or_a_payload() {
    let server = Server::private(MAJOR, "");
    let scene = Scene::on(&server, Broker::shared());
    let aggregate = scene.aggregate(1);
    let mut walpost = scene
        .run_as(&format!("{} password={SECRET}", scene.conninfo()))
        .env("WALPOST_KAFKA_SASL_PASSWORD", SECRET)
        .args(ANY_PORT)
        .start();
    let http = walpost.http();
    walpost.wait_for_log("streaming");
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    let ask_all = || {
        for path in [
            "/",
            "/metrics",
            "/healthz",
            "/readyz",
            "/status",
            "/history?since=1",
        ] {
            assert_ne!(http.get(path).body, "", "{path}");
        }
    };
    wait_until("the slot", || http.pipeline()["slot_health"].is_object());
    ask_all();
    server.stop(Stop::Fast);
    wait_until("an error", || http.pipeline()["last_error"].is_object());
    ask_all();
    walpost.terminate().expect_code(0);
}

/// More connections than there is room for, each with half a head: they are let go, and others are
/// answered.
#[test]
fn clients_that_never_end_their_request_keep_nobody_out() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    let mut slow: Vec<_> = (0..100).map(|_| http.connect()).collect();
    for stream in &mut slow {
        stream.write_all(b"GET /status HTTP/1.1\r\nHost: ").unwrap();
    }
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    let asked = Instant::now();
    assert_eq!(http.get("/healthz").code, 200);
    assert!(asked.elapsed() < Duration::from_secs(30));
    let mut rest = Vec::new();
    // It ends, whatever it says.
    let _ = slow[0].read_to_end(&mut rest);
    walpost.terminate().expect_code(0);
}

#[test]
fn pipeline_behind_a_dead_broker_is_not_ready_and_says_why() {
    let broker = Broker::private();
    let scene = Scene::on(Server::shared(MAJOR), &broker);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    wait_until("readiness", || http.get("/readyz").code == 200);
    broker.kill();
    scene.insert(&aggregate, "k");
    let answer = wait_for("the pipeline to be not ready", || {
        let answer = http.get("/readyz");
        (answer.code == 503).then_some(answer)
    });
    assert!(answer.body.contains("Kafka is unreachable"), "{answer:?}");
    assert_eq!(http.get("/healthz").code, 200);
    let name = &scene.name;
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
    broker.start();
    wait_until("readiness", || http.get("/readyz").code == 200);
    scene.wait_for_records(2);
    wait_until("no lag", || {
        http.metric("walpost_lag_seconds", name) == Some(0.0)
            && http.metric("walpost_in_flight_events", name) == Some(0.0)
    });
    let outage = &http.pipeline()["outages"][0];
    assert_eq!(outage["kind"], "kafka_broker");
    assert!(outage["ended_at"].is_number(), "{outage}");
    walpost.terminate().expect_code(0);
}

/// A broker that takes connections and answers nothing is not down as librdkafka sees it.
#[test]
fn pipeline_whose_broker_answers_nothing_is_not_ready() {
    let broker = Broker::private();
    let scene = Scene::on(Server::shared(MAJOR), &broker);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    broker.freeze();
    scene.insert(&aggregate, "k");
    let answer = wait_for("the pipeline to be not ready", || {
        let answer = http.get("/readyz");
        (answer.code == 503).then_some(answer)
    });
    assert!(answer.body.contains(&scene.name), "{answer:?}");
    broker.thaw();
    wait_until("readiness", || http.get("/readyz").code == 200);
    walpost.terminate().expect_code(0);
}

#[test]
fn pipeline_without_its_database_is_not_ready_and_remembers_it() {
    let server = Server::private(MAJOR, "");
    let scene = Scene::on(&server, Broker::shared());
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    wait_until("readiness", || http.get("/readyz").code == 200);
    server.stop(Stop::Fast);
    wait_until("no readiness", || http.get("/readyz").code == 503);
    wait_until("the state", || http.pipeline()["state"] == "reconnecting");
    wait_until("lag", || {
        http.metric("walpost_lag_seconds", &scene.name) > Some(1.0)
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
fn pipeline_that_has_halted_stays_in_sight_while_others_run() {
    let scenes = [Scene::new(), Scene::new()];
    let mut text = format!(
        "http = \"127.0.0.1:0\"\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n",
        Broker::shared().address()
    );
    for scene in &scenes {
        text += &format!(
            "[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n",
            scene.name,
            scene.conninfo()
        );
    }
    let file = reaper::folder("config").join("walpost.toml");
    fs::write(&file, text).unwrap();
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(file)
        .without("WALPOST_HTTP")
        .start();
    let http = walpost.http();
    walpost.wait_for_logs("streaming", 2);
    scenes[0].insert("nobody.made.this", "k");
    walpost.wait_for_log("halted: ");
    let answer = http.get("/readyz");
    assert_eq!(answer.code, 503);
    let lines: Vec<_> = answer.body.lines().collect();
    assert!(
        lines[0].starts_with(&format!("{}: halted: ", scenes[0].name)),
        "{lines:?}"
    );
    assert_eq!(lines[1], format!("{}: streaming", scenes[1].name));
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
fn hot_standby_is_ready_and_takes_over_ready() {
    let scene = Scene::new();
    let first = scene.start();
    let mut second = scene.run().args(ANY_PORT).start();
    let http = second.http();
    second.wait_for_log("standing by");
    wait_until("the state", || http.pipeline()["state"] == "standing_by");
    let answer = http.get("/readyz");
    assert_eq!(
        (answer.code, answer.body),
        (200, format!("{}: standing_by\n", scene.name))
    );
    first.terminate().expect_code(0);
    second.wait_for_log("streaming");
    wait_until("the state", || http.pipeline()["state"] == "streaming");
    assert_eq!(http.get("/readyz").code, 200);
    second.terminate().expect_code(0);
}
