//! The host names that Walpost accepts in requests.

use super::ANY_PORT;
use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, config_file};

/// A browser sends a request with an unknown host name if a page's host name resolves to this
/// machine (DNS rebinding).
#[test]
fn rejects_requests_with_an_unknown_host_name() {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    let (_, port) = http.address().rsplit_once(':').unwrap();
    for path in [
        "/", "/status", "/metrics", "/readyz", "/history", "/nothing",
    ] {
        for host in [
            "rebound.example",
            &format!("rebound.example:{port}"),
            "localhost.rebound.example",
            "127.0.0.1.rebound.example",
            "walpost",
            "127.0.0.1@rebound.example",
            "[::1",
            "",
        ] {
            let answer = http.request_with("GET", path, &format!("Host: {host}\r\n"));
            assert_eq!(answer.code, 421, "{path} for {host:?}: {answer:?}");
            for text in ["http_hosts", "walpost.toml", "--http-host", &fixture.name] {
                let is_told = answer.body.contains(text);
                assert_eq!(is_told, text != fixture.name, "{text}: {answer:?}");
            }
        }
    }
    let two = format!("Host: {}\r\nHost: rebound.example\r\n", http.address());
    assert_ne!(http.request_with("GET", "/status", &two).code, 200);
    let absolute = format!("http://rebound.example:{port}/status");
    assert_eq!(http.request("GET", &absolute).code, 421);
    // /healthz accepts any host name, because probes may use any name, and the response reveals
    // nothing.
    let alive = http.request_with("GET", "/healthz", "Host: rebound.example\r\n");
    assert_eq!((alive.code, &*alive.body), (200, "alive\n"));
    for host in [
        "localhost",
        &format!("LocalHost:{port}"),
        "127.0.0.1",
        "127.0.0.1:1",
        "[::1]:80",
        "192.0.2.1",
    ] {
        let answer = http.request_with("GET", "/status", &format!("Host: {host}\r\n"));
        assert_eq!(answer.code, 200, "{host}: {answer:?}");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn accepts_host_names_from_the_configuration() {
    let fixture = Fixture::new();
    let is_accepted = |http: &Http, host: &str| {
        let answer = http.request_with("GET", "/readyz", &format!("Host: {host}\r\n"));
        answer.code != 421
    };
    let flags = ["--http-host", "walpost.example.com,second.example.com"];
    let mut walpost = fixture.run().args(ANY_PORT).args(flags).start();
    let http = walpost.http();
    for host in ["Walpost.Example.Com:443", "second.example.com", "localhost"] {
        assert!(is_accepted(&http, host), "{host}");
    }
    assert!(!is_accepted(&http, "third.example.com"));
    walpost.terminate().expect_code(0);

    let any = [("WALPOST_HTTP_HOST", "*"), ("WALPOST_HTTP", "127.0.0.1:0")];
    let run = any
        .iter()
        .fold(fixture.run(), |run, (name, value)| run.env(name, value));
    let mut walpost = run.start();
    assert!(is_accepted(&walpost.http(), "whatever.example.com"));
    walpost.terminate().expect_code(0);

    let text = format!(
        "http = \"127.0.0.1:0\"\nhttp_hosts = [\"of-the-file.example.com\"]\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n\
         [[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n",
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
    let mut walpost = run().start();
    let http = walpost.http();
    assert!(is_accepted(&http, "of-the-file.example.com"));
    assert!(!is_accepted(&http, "walpost.example.com"));
    walpost.terminate().expect_code(0);
    let mut walpost = run().args(flags).start();
    let http = walpost.http();
    assert!(
        is_accepted(&http, "walpost.example.com"),
        "the flag takes precedence"
    );
    assert!(!is_accepted(&http, "of-the-file.example.com"));
    walpost.terminate().expect_code(0);
}

#[test]
fn rejects_an_invalid_host_name_in_the_configuration() {
    let fixture = Fixture::bare();
    for name in ["http://x.example", "x.example:80", "a b", "", "*.example"] {
        fixture
            .run()
            .arg(format!("--http-host={name}"))
            .finish()
            .expect_code(2)
            .expect_mentions(&["http_hosts", "expected", "walpost.example.com"]);
    }
}

/// Kubernetes probes a pod by its IP address, and Prometheus scrapes it by a service name. An
/// attacker can register neither of them as a domain.
#[test]
fn public_listener_accepts_requests_for_ip_addresses_and_internal_host_names() {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&["--http", "0.0.0.0:0"]);
    let http = walpost.http();
    let is_accepted = |host: &str| {
        let answer = http.request_with("GET", "/status", &format!("Host: {host}\r\n"));
        answer.code == 200
    };
    for host in [
        "10.0.0.7:9464",
        "[fd00::7]:9464",
        "walpost:9464",
        "walpost-metrics.shop.svc:9464",
        "walpost-metrics.shop.svc.cluster.local.",
        "db1.internal",
        "localhost",
    ] {
        assert!(is_accepted(host), "{host}");
    }
    for host in ["rebound.example.com", "svc.example", "local.example"] {
        assert!(!is_accepted(host), "{host}");
    }
    // Requests from `walpost status` are accepted, although no host name is configured.
    let (_, port) = http.address().rsplit_once(':').unwrap();
    let status = || Invocation::new(["status", "--http", &format!("localhost:{port}")]);
    // Walpost logs "streaming" slightly before it reports the pipeline as ready.
    wait_until("the pipeline to be ready", || {
        status().finish().code == Some(0)
    });
    walpost.terminate().expect_code(0);
}
