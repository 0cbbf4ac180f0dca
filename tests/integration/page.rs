//! The page at `/`, in Chromium.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::budget;
use crate::support::browser;
use crate::support::http::Http;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::reaper;
use crate::support::scene::Scene;
use crate::support::wait::{stays, wait_until};
use crate::support::walpost::{Invocation, Walpost};

/// One process with a pipeline for each of the scenes.
fn start(scenes: &[&Scene<'_>]) -> (Walpost, Http) {
    let mut text = format!(
        "http = \"127.0.0.1:0\"\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n",
        Broker::shared().address()
    );
    for scene in scenes {
        let (name, conninfo) = (&scene.name, scene.conninfo());
        text += &format!("[[pipeline]]\nname = \"{name}\"\npostgres = \"{conninfo}\"\n");
    }
    let file = reaper::folder("config").join("walpost.toml");
    fs::write(&file, text).unwrap();
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(file)
        .without("WALPOST_HTTP")
        .start();
    let http = walpost.http();
    walpost.wait_for_logs(" streaming ", scenes.len());
    (walpost, http)
}

fn url(http: &Http) -> String {
    format!("http://{}/", http.address())
}

/// The part of the document that is about a pipeline, without its tags: texts separated by `|`.
fn card(document: &str, pipeline: &str) -> String {
    let start = document
        .find(&format!("data-pipeline=\"{pipeline}\""))
        .unwrap_or_else(|| panic!("no pipeline {pipeline} in {document}"));
    let card = &document[start..];
    let card = &card[..card.find("</article>").unwrap()];
    let mut texts: Vec<&str> = card
        .split('<')
        .filter_map(|piece| piece.split_once('>').map(|(_, text)| text.trim()))
        .collect();
    texts.retain(|text| !text.is_empty());
    texts.join("|")
}

#[test]
fn page_shows_each_pipeline_and_its_rate() {
    let scenes = [Scene::new(), Scene::new()];
    let aggregate = scenes[0].aggregate(2);
    let (walpost, http) = start(&scenes.each_ref());
    let load = scenes[0].load(&[&aggregate]);
    load.wait_for_transactions(300);
    wait_until("a rate and the slot", || {
        let pipeline = http.pipeline();
        pipeline["recent"]["events_per_second"].as_f64() > Some(5.0)
            && pipeline["slot_health"].is_object()
    });
    let document = browser::document(&url(&http));
    load.stop();
    let busy = card(&document, &scenes[0].name);
    let after = |title: &str| busy.split_once(title).unwrap().1;
    let rate = after("Events a second|").split('|').next().unwrap();
    let number: f64 = rate
        .split(' ')
        .next()
        .unwrap()
        .replace(',', "")
        .parse()
        .unwrap();
    assert!(number > 0.0, "{busy}");
    let slot = scenes[0].slot();
    for text in [
        "Streaming",
        "Commit to delivery",
        "Safe",
        "Reachable",
        &slot,
        "at-least-once",
    ] {
        assert!(busy.contains(text), "{text} in {busy}");
    }
    let delivered = after("Events delivered|").split('|').next().unwrap();
    let delivered: u64 = delivered.replace(',', "").parse().unwrap();
    assert!(delivered >= 300, "{busy}");
    // A line for each of the charts, and points in the first.
    assert!(
        document.matches("class=\"first\"").count() >= 6,
        "{document}"
    );
    let idle = card(&document, &scenes[1].name);
    assert!(
        idle.contains("Streaming") && idle.contains("Events delivered|0"),
        "{idle}"
    );
    assert!(document.contains(">Ready<"), "{document}");
    walpost.terminate().expect_code(0);
}

/// It streams for longer than it is stuck.
#[test]
fn page_says_for_how_long_a_pipeline_is_stuck() {
    let broker = Broker::private();
    let scene = Scene::on(Server::shared(MAJOR), &broker);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    let ago = |key: &str| {
        let at = http.pipeline()[key].as_f64()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Some(now.as_secs_f64() - at)
    };
    wait_until("it to stream for a while", || ago("since") > Some(15.0));
    broker.kill();
    let killed = Instant::now();
    scene.insert(&aggregate, "k");
    wait_until("it to be stuck", || ago("not_ready_since").is_some());
    let document = browser::document(&url(&http));
    let most = killed.elapsed().as_secs_f64() + 1.0;
    let stuck = card(&document, &scene.name);
    let (_, lasts) = stuck.split_once("Stuck|for ").expect(&stuck);
    let (lasts, _) = lasts.split_once('|').unwrap_or((lasts, ""));
    let (number, unit) = lasts.split_once(' ').expect(lasts);
    let number: f64 = number.parse().expect(lasts);
    let second = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "min" => 60.0,
        _ => panic!("{unit}: {stuck}"),
    };
    assert!(number * second <= most, "{most} s: {stuck}");
    walpost.kill();
}

/// What a row has gets into the error, and from there onto the page: as text.
#[test]
fn page_shows_an_error_with_its_remedy_and_never_runs_what_is_in_it() {
    let scenes = [Scene::new(), Scene::new()];
    let (mut walpost, http) = start(&scenes.each_ref());
    scenes[0].insert("<img src=x onerror=document.title=1>", "k");
    walpost.wait_for_log("halted: ");
    let document = browser::document(&url(&http));
    let halted = card(&document, &scenes[0].name);
    for text in ["Halted", "&lt;img src=x onerror=", "restart it"] {
        assert!(halted.contains(text), "{text} in {halted}");
    }
    assert!(!document.contains("<img"), "{document}");
    assert!(
        document.contains("<title>(!) Walpost</title>"),
        "{document}"
    );
    assert!(document.contains("1 of 2 not ready"), "{document}");
    walpost.terminate().expect_code(3);
}

#[test]
fn page_takes_nothing_from_anywhere_else() {
    let scene = Scene::new();
    let (walpost, http) = start(&[&scene]);
    let page = http.get("/");
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    let policy = &page.headers["content-security-policy"];
    assert!(
        policy.starts_with("default-src 'none'; connect-src 'self'"),
        "{policy}"
    );
    let outside = page.body.replace("http://www.w3.org/2000/svg", "");
    for way in [
        "http:",
        "https:",
        "//cdn",
        "@import",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
    ] {
        assert!(!outside.contains(way), "{way}");
    }
    walpost.terminate().expect_code(0);
}

/// Makes docs/page.png.
#[test]
#[ignore = "writes to docs/"]
fn capture_page() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(3);
    let (walpost, http) = start(&[&scene]);
    let load = scene.load(&[&aggregate]);
    stays("running", Duration::from_secs(150), || {
        http.get("/healthz").code == 200
    });
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/page.png");
    browser::screenshot(&url(&http), &file, 1220, 690, false);
    load.stop();
    walpost.terminate().expect_code(0);
}

#[test]
fn page_lists_what_was_let_go() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    budget::let_go(&scene);
    budget::new_slot(&scene);
    let (walpost, http) = start(&[&scene]);
    wait_until("the database to be asked", || {
        http.pipeline()["let_go"].is_array()
    });
    let listed = card(&browser::document(&url(&http)), &scene.name);
    for text in ["Committed after", "entry ", "walpost replay --let-go"] {
        assert!(listed.contains(text), "{text}: {listed}");
    }
    walpost.terminate().expect_code(0);
}
