//! `run --http`: what listens, what it answers, and that no client keeps anybody waiting.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::support::http::Http;
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
fn without_an_address_of_its_own_a_second_instance_takes_a_free_one() {
    // Whoever has it, it is in use: this test, or another.
    let _taken = TcpListener::bind("127.0.0.1:9464");
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.run().without("WALPOST_HTTP").start();
    let told = walpost.wait_for_log("127.0.0.1:9464 is in use");
    let http = walpost.http();
    assert!(!http.address().ends_with(":9464"), "{}", http.address());
    let command = format!("walpost status --http {}", http.address());
    assert!(told.contains(&command), "{told}");
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    assert_eq!(http.pipeline()["name"], *scene.name);
    walpost.terminate().expect_code(0);
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

/// More connections than there is room for, each with half a head: they are closed, and others are
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

/// As long as the manifests have a probe wait.
const PROBE: Duration = Duration::from_secs(5);

/// What a connection of a flood does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rudeness {
    /// Nothing at all.
    Silent,
    /// It begins a request, and adds a byte a second.
    SlowHead,
    /// It asks once, reads the answer, and stays.
    IdleKeepAlive,
    /// It asks for far more than the sockets hold, and reads none of it.
    NeverReads,
}

/// 400 connections from one address, each of which is made again as soon as it is ended.
struct Flood {
    is_over: Arc<AtomicBool>,
    /// Connections so far, with those that were made again.
    made: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Flood {
    const CONNECTIONS: usize = 400;

    fn start(http: &Http, rudeness: Rudeness) -> Self {
        const THREADS: usize = 4;
        let (is_over, made) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let threads = (0..THREADS).map(|_| {
            let (http, is_over, made) = (http.clone(), Arc::clone(&is_over), Arc::clone(&made));
            thread::spawn(move || {
                let connect = || {
                    made.fetch_add(1, Ordering::Relaxed);
                    rude_client(&http, rudeness)
                };
                let mut clients: Vec<_> = (0..Self::CONNECTIONS / THREADS)
                    .map(|_| connect())
                    .collect();
                let mut spoke = Instant::now();
                while !is_over.load(Ordering::Relaxed) {
                    let speaks = spoke.elapsed() >= Duration::from_secs(1);
                    if speaks {
                        spoke = Instant::now();
                    }
                    for client in &mut clients {
                        if has_ended(client.as_mut(), rudeness, speaks) {
                            *client = connect();
                        }
                    }
                    // An attacker who leaves the machine's cores to the tests beside this one.
                    thread::sleep(Duration::from_millis(20));
                }
            })
        });
        let flood = Self {
            is_over: Arc::clone(&is_over),
            made: Arc::clone(&made),
            threads: threads.collect(),
        };
        flood.wait_for(Self::CONNECTIONS);
        flood
    }

    fn wait_for(&self, made: usize) {
        wait_until("connections", || self.made.load(Ordering::Relaxed) >= made);
    }

    fn stop(self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

/// `None` where it can't be made now, because the other side has no room for it.
fn rude_client(http: &Http, rudeness: Rudeness) -> Option<TcpStream> {
    let address: SocketAddr = http.address().parse().unwrap();
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    if rudeness == Rudeness::NeverReads {
        socket.set_recv_buffer_size(4096).unwrap();
    }
    socket
        .connect_timeout(&address.into(), Duration::from_millis(500))
        .ok()?;
    let mut stream = TcpStream::from(socket);
    let host = http.address();
    let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    match rudeness {
        Rudeness::Silent => {}
        Rudeness::SlowHead => stream.write_all(&request.as_bytes()[..10]).ok()?,
        Rudeness::IdleKeepAlive => stream.write_all(request.as_bytes()).ok()?,
        // Of 17 KiB each: more than a socket of Linux takes by itself.
        Rudeness::NeverReads => stream.write_all(request.repeat(1000).as_bytes()).ok()?,
    }
    stream.set_nonblocking(true).unwrap();
    Some(stream)
}

/// Whether there is no connection any more; adds a byte where that is its way and it is time.
fn has_ended(client: Option<&mut TcpStream>, rudeness: Rudeness, speaks: bool) -> bool {
    let Some(client) = client else { return true };
    match rudeness {
        Rudeness::NeverReads => client.take_error().unwrap().is_some(),
        _ => {
            if speaks && rudeness == Rudeness::SlowHead && client.write(b"x").is_err() {
                return true;
            }
            let mut bytes = [0; 32 << 10];
            match client.read(&mut bytes) {
                Ok(read) => read == 0,
                Err(error) => error.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}

/// What a kubelet does: a connection of its own, and an answer in time, or else it has failed.
fn probe(http: &Http, path: &str) -> Result<String, std::io::Error> {
    let address = http.address().parse().unwrap();
    let began = Instant::now();
    let mut stream = TcpStream::connect_timeout(&address, PROBE)?;
    let head = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    let mut answer = String::new();
    let mut bytes = [0; 1024];
    loop {
        let left = PROBE.checked_sub(began.elapsed());
        let left = left
            .filter(|left| !left.is_zero())
            .ok_or(ErrorKind::TimedOut)?;
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes)? {
            0 => return Ok(answer),
            read => answer += &String::from_utf8_lossy(&bytes[..read]),
        }
    }
}

/// The flood comes from the address that asks for health, as from a proxy or a neighbour on the
/// same host: no bound on an address may lock out who shares it.
fn health_is_answered_in_a_flood(rudeness: Rudeness) {
    let scene = Scene::new();
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    walpost.wait_for_log("streaming");
    let flood = Flood::start(&http, rudeness);
    for number in 0..8 {
        let answer = probe(&http, "/healthz");
        let is_alive = answer.as_ref().is_ok_and(|text| text.ends_with("alive\n"));
        assert!(is_alive, "{rudeness:?}: probe {number}: {answer:?}");
    }
    flood.stop();
    walpost.terminate().expect_code(0);
}

#[test]
fn health_is_answered_in_a_flood_of_silent_connections() {
    health_is_answered_in_a_flood(Rudeness::Silent);
}

#[test]
fn health_is_answered_in_a_flood_of_heads_that_never_end() {
    health_is_answered_in_a_flood(Rudeness::SlowHead);
}

#[test]
fn health_is_answered_in_a_flood_of_idle_connections() {
    health_is_answered_in_a_flood(Rudeness::IdleKeepAlive);
}

#[test]
fn health_is_answered_in_a_flood_of_answers_that_nobody_reads() {
    health_is_answered_in_a_flood(Rudeness::NeverReads);
}

/// A scraper keeps its connection. It does not give way to those of another address.
#[test]
fn flood_from_one_address_ends_no_connection_of_another() {
    let scene = Scene::new();
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let other: SocketAddr = "127.0.0.2:0".parse().unwrap();
    socket.bind(&other.into()).unwrap();
    let there: SocketAddr = http.address().parse().unwrap();
    socket.connect(&there.into()).unwrap();
    let mut scraper = TcpStream::from(socket);
    scraper.set_read_timeout(Some(PROBE)).unwrap();
    let mut scrape = || {
        let request = format!("GET /healthz HTTP/1.1\r\nHost: {there}\r\n\r\n");
        scraper.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        let mut bytes = [0; 1024];
        while !answer.ends_with(b"alive\n") {
            match scraper.read(&mut bytes)? {
                0 => return Err(std::io::Error::from(ErrorKind::UnexpectedEof)),
                read => answer.extend_from_slice(&bytes[..read]),
            }
        }
        Ok(())
    };
    scrape().unwrap();
    let flood = Flood::start(&http, Rudeness::Silent);
    // As often as each of them has been ended once.
    let began = Instant::now();
    while flood.made.load(Ordering::Relaxed) < 3 * Flood::CONNECTIONS {
        scrape().unwrap();
        assert!(
            began.elapsed() < 12 * PROBE,
            "the flood doesn't get through"
        );
        thread::sleep(Duration::from_millis(100));
    }
    scrape().unwrap();
    flood.stop();
    walpost.terminate().expect_code(0);
}

/// Who sends a request and takes none of the answer has it ended, and its memory freed, without
/// anybody else coming.
#[test]
fn answer_that_nobody_reads_is_ended_after_some_seconds() {
    let scene = Scene::new();
    let mut walpost = scene.start_with(&ANY_PORT);
    let http = walpost.http();
    let client = rude_client(&http, Rudeness::NeverReads).unwrap();
    let began = Instant::now();
    wait_until("the end", || client.take_error().unwrap().is_some());
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "{:?}",
        began.elapsed()
    );
    walpost.terminate().expect_code(0);
}

/// What a browser does once its page's name leads to this machine: DNS rebinding.
#[test]
fn name_that_is_not_its_own_is_answered_nothing() {
    let scene = Scene::new();
    let mut walpost = scene.start_with(&ANY_PORT);
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
            let answer = http.ask_with("GET", path, &format!("Host: {host}\r\n"));
            assert_eq!(answer.code, 421, "{path} for {host:?}: {answer:?}");
            for text in ["http_hosts", "walpost.toml", "--http-host", &scene.name] {
                let is_told = answer.body.contains(text);
                assert_eq!(is_told, text != scene.name, "{text}: {answer:?}");
            }
        }
    }
    let two = format!("Host: {}\r\nHost: rebound.example\r\n", http.address());
    assert_ne!(http.ask_with("GET", "/status", &two).code, 200);
    let absolute = format!("http://rebound.example:{port}/status");
    assert_eq!(http.ask("GET", &absolute).code, 421);
    // It tells nothing, and a probe may have whatever name.
    let alive = http.ask_with("GET", "/healthz", "Host: rebound.example\r\n");
    assert_eq!((alive.code, &*alive.body), (200, "alive\n"));
    for host in [
        "localhost",
        &format!("LocalHost:{port}"),
        "127.0.0.1",
        "127.0.0.1:1",
        "[::1]:80",
        "192.0.2.1",
    ] {
        let answer = http.ask_with("GET", "/status", &format!("Host: {host}\r\n"));
        assert_eq!(answer.code, 200, "{host}: {answer:?}");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn names_that_the_configuration_has_are_answered() {
    let scene = Scene::new();
    let asked = |http: &Http, host: &str| {
        let answer = http.ask_with("GET", "/readyz", &format!("Host: {host}\r\n"));
        answer.code != 421
    };
    let flags = ["--http-host", "walpost.example.com,second.example.com"];
    let mut walpost = scene.run().args(ANY_PORT).args(flags).start();
    let http = walpost.http();
    for host in ["Walpost.Example.Com:443", "second.example.com", "localhost"] {
        assert!(asked(&http, host), "{host}");
    }
    assert!(!asked(&http, "third.example.com"));
    walpost.terminate().expect_code(0);

    let any = [("WALPOST_HTTP_HOST", "*"), ("WALPOST_HTTP", "127.0.0.1:0")];
    let run = any
        .iter()
        .fold(scene.run(), |run, (name, value)| run.env(name, value));
    let mut walpost = run.start();
    assert!(asked(&walpost.http(), "whatever.example.com"));
    walpost.terminate().expect_code(0);

    let file = reaper::folder("config").join("walpost.toml");
    let text = format!(
        "http = \"127.0.0.1:0\"\nhttp_hosts = [\"of-the-file.example.com\"]\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n\
         [[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n",
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
    let mut walpost = run().start();
    let http = walpost.http();
    assert!(asked(&http, "of-the-file.example.com"));
    assert!(!asked(&http, "walpost.example.com"));
    walpost.terminate().expect_code(0);
    let mut walpost = run().args(flags).start();
    let http = walpost.http();
    assert!(asked(&http, "walpost.example.com"), "the flag comes first");
    assert!(!asked(&http, "of-the-file.example.com"));
    walpost.terminate().expect_code(0);
}

#[test]
fn name_that_is_none_is_refused() {
    let scene = Scene::bare();
    for name in ["http://x.example", "x.example:80", "a b", "", "*.example"] {
        scene
            .run()
            .arg(format!("--http-host={name}"))
            .finish()
            .expect_code(2)
            .expect_says(&["http_hosts", "expected", "walpost.example.com"]);
    }
}

/// A pod is probed by its address and scraped by the name of a service. Neither is a name that a
/// stranger can have.
#[test]
fn listener_that_others_reach_answers_addresses_and_names_within_the_network() {
    let scene = Scene::new();
    let mut walpost = scene.start_with(&["--http", "0.0.0.0:0"]);
    let http = walpost.http();
    let asked = |host: &str| {
        let answer = http.ask_with("GET", "/status", &format!("Host: {host}\r\n"));
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
        assert!(asked(host), "{host}");
    }
    for host in ["rebound.example.com", "svc.example", "local.example"] {
        assert!(!asked(host), "{host}");
    }
    // Who asks with Walpost's own client needs no name.
    let (_, port) = http.address().rsplit_once(':').unwrap();
    walpost.wait_for_log("streaming");
    Invocation::new(["status", "--http", &format!("localhost:{port}")])
        .finish()
        .expect_code(0);
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
