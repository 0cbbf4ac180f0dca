//! The address and the responses of the HTTP listener.

use std::net::TcpListener;

use super::ANY_PORT;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::secrets::SECRET;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, config_file};

#[test]
fn logs_the_automatically_chosen_port_and_serves_every_path_on_it() {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    assert!(!http.address().ends_with(":0"), "{http:?}");
    assert_eq!(http.get("/healthz").body, "alive\n");
    wait_until("readiness", || http.get("/readyz").code == 200);
    assert_eq!(
        http.get("/readyz").body,
        format!("{}: streaming\n", fixture.name)
    );
    let metrics = http.get("/metrics");
    assert_eq!(metrics.headers["content-type"], "text/plain; version=0.0.4");
    let status = http.get("/status");
    assert_eq!(status.headers["content-type"], "application/json");
    assert_eq!(status.headers["cache-control"], "no-store");
    assert_eq!(http.get("/nothing").code, 404);
    for path in ["/status", "/metrics", "/readyz", "/nothing"] {
        let (get, head) = (http.get(path), http.request("HEAD", path));
        assert_eq!((head.code, &*head.body), (get.code, ""), "{path}");
        assert_eq!(head.headers["content-type"], get.headers["content-type"]);
    }
    let refused = http.request("POST", "/status");
    assert_eq!(refused.code, 405);
    assert_eq!(refused.headers["allow"], "GET, HEAD");
    let pipeline = http.pipeline();
    assert_eq!(pipeline["name"], *fixture.name);
    assert_eq!(pipeline["slot"], fixture.slot());
    assert_eq!(pipeline["state"], "streaming");
    walpost.terminate().expect_code(0);
}

/// Any local user can occupy the port temporarily. Walpost must not exit with code 2 in that case,
/// because systemd would then not restart it.
#[test]
fn exits_with_a_code_that_lets_systemd_restart_it_if_the_port_is_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let fixture = Fixture::bare();
    fixture
        .run()
        .args(["--init", "--http", &address])
        .finish()
        .expect_code(1)
        .expect_mentions(&["--http", &address, "in use", "WALPOST_HTTP", "off"]);
    // The slot does not exist, which shows that Walpost exited before `--init` changed anything.
    let slot = fixture.slot();
    let slots = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}'");
    assert_eq!(fixture.db.number(&slots), 0);
}

#[test]
fn second_instance_listens_on_a_free_port_if_the_default_is_in_use() {
    // If binding fails, another process is already using the port, and the test works just as well.
    let _taken = TcpListener::bind("127.0.0.1:9464");
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.run().without_env("WALPOST_HTTP").start();
    let line = walpost.wait_for_log("127.0.0.1:9464 is in use");
    let http = walpost.http();
    assert!(!http.address().ends_with(":9464"), "{}", http.address());
    let command = format!("walpost status --http {}", http.address());
    assert!(line.contains(&command), "{line}");
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    assert_eq!(http.pipeline()["name"], *fixture.name);
    walpost.terminate().expect_code(0);
}

#[test]
fn rejects_an_invalid_http_address() {
    let fixture = Fixture::bare();
    for address in [
        "9464",
        "no.such.host.invalid:1",
        "127.0.0.1:99999",
        "192.0.2.1:9464",
        "",
    ] {
        fixture
            .run()
            .args(["--http", address])
            .finish()
            .expect_code(2)
            .expect_mentions(&["--http", address, "Expected HOST:PORT"]);
    }
}

#[test]
fn does_not_listen_if_http_is_disabled() {
    let fixture = Fixture::new();
    let walpost = fixture.start_with(&["--http", "off"]);
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
fn http_flag_overrides_the_address_in_the_configuration_file() {
    let fixture = Fixture::new();
    let text = format!(
        "http = \"off\"\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n",
        fixture.broker.address(),
        fixture.name,
        fixture.conninfo()
    );
    let file = config_file(text);
    let run = || {
        Invocation::new(["run", "--config"])
            .arg(&file)
            .without_env("WALPOST_HTTP")
    };
    let off = run().start_streaming();
    assert_eq!(off.logged("http://"), 0);
    off.terminate().expect_code(0);
    let mut on = run().args(ANY_PORT).start();
    on.http();
    on.terminate().expect_code(0);
}

/// Searches the responses for passwords and payloads, just as other tests do with the logs.
#[test]
fn http_responses_contain_no_password_or_payload() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture
        .with_conninfo(&format!("{} password={SECRET}", fixture.conninfo()))
        .run()
        .env("WALPOST_KAFKA_SASL_PASSWORD", SECRET)
        .args(ANY_PORT)
        .start();
    let http = walpost.http();
    walpost.wait_for_log("streaming");
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
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
    server.stop(StopMode::Fast);
    wait_until("an error", || http.pipeline()["last_error"].is_object());
    ask_all();
    walpost.terminate().expect_code(0);
}
