//! Displays the status page at `/` in Chromium.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::budget;
use crate::support::browser::{self, Tab};
use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::proxy::ProxyMode;
use crate::support::wait::{assert_stays, poll_until, wait_until};
use crate::support::walpost::{Invocation, Walpost, config_file};

/// Starts a Walpost process with a pipeline for each fixture.
fn start(fixtures: &[&Fixture<'_>]) -> (Walpost, Http) {
    let mut text = format!(
        "http = \"127.0.0.1:0\"\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n",
        Broker::shared().address()
    );
    for fixture in fixtures {
        let (name, conninfo) = (&fixture.name, fixture.conninfo());
        text += &format!("[[pipeline]]\nname = \"{name}\"\npostgres = \"{conninfo}\"\n");
    }
    let file = config_file(text);
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(file)
        .without_env("WALPOST_HTTP")
        .start();
    let http = walpost.http();
    walpost.wait_for_logs(" streaming ", fixtures.len());
    (walpost, http)
}

fn url(http: &Http) -> String {
    format!("http://{}/", http.address())
}

/// Returns the text of the section about a pipeline. HTML tags are removed, and the pieces of text
/// between them are separated by `|`.
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

/// Asserts that the page and `walpost status` show the same state for each pipeline and, if there
/// is a problem, the same reason and remedy, each exactly once. Polls, because the page may be
/// refreshed a moment after the command has run.
fn expect_agreement(tab: &mut Tab, http: &Http) {
    let mut found = String::new();
    let agree = poll_until(Duration::from_secs(60), || {
        let status = Invocation::new(["status", "--http", http.address()]).finish();
        let document = tab.evaluate("document.documentElement.outerHTML");
        found = differences(document.as_str().unwrap(), &status.stdout, &http.status());
        found.is_empty().then_some(())
    });
    assert!(agree.is_some(), "{found}");
}

fn differences(document: &str, printed: &str, status: &Value) -> String {
    let mut found = String::new();
    let mut expect_once = |place: &str, text: &str| match place.matches(text).count() {
        1 => {}
        times => found += &format!("{times} times {text:?} in {place}\n"),
    };
    let text = |text: &Value| text.as_str().unwrap().to_owned();
    for pipeline in status["pipelines"].as_array().unwrap() {
        let name = text(&pipeline["name"]);
        let card = card(document, &name);
        let word = text(&pipeline["summary"]["state"]);
        expect_once(&card, &format!("|{word}|for "));
        let row = printed
            .lines()
            .find(|line| line.starts_with(&format!("{name} ")));
        expect_once(row.unwrap_or_default(), &format!("  {word}  "));
        for reason in pipeline["summary"]["reasons"].as_array().unwrap() {
            let (what, remedy) = (text(&reason["what"]), text(&reason["remedy"]));
            expect_once(printed, &format!("{name}: {what}. {remedy}\n"));
            for text in [what, remedy] {
                let text = text.replace('&', "&amp;").replace('<', "&lt;");
                expect_once(&card, &text.replace('>', "&gt;"));
            }
        }
    }
    found
}

/// Returns the name and state in each row of the overview.
fn overview_rows(tab: &mut Tab) -> Vec<[String; 2]> {
    let overview_rows = tab.evaluate(
        "[...document.querySelectorAll('#overview tbody')].map(row => [row.querySelector('a').textContent,
         row.querySelector('.state').textContent])",
    );
    serde_json::from_value(overview_rows).unwrap()
}

/// Twelve pipelines: one has halted, one can't reach its server, one is on standby, and nine
/// stream.
#[test]
fn status_page_with_many_pipelines_shows_problems_first_and_stays_short() {
    let (halted, healthy) = (Fixture::new(), Fixture::bare());
    let mut text = format!(
        "http = \"127.0.0.1:0\"\n[kafka]\n\"bootstrap.servers\" = \"{}\"\n",
        Broker::shared().address()
    );
    let mut add = |name: &str, conninfo: &str| {
        text += &format!("[[pipeline]]\nname = \"{name}\"\npostgres = \"{conninfo}\"\n");
        name.to_owned()
    };
    // Use short names, like those that operators choose. The names of the fixtures are too long to
    // be realistic.
    let prefix = healthy.name.split('_').next().unwrap();
    let named = |suffix: &str| format!("{prefix}_{suffix}");
    let streaming: Vec<_> = (1..=9)
        .map(|n| add(&named(&format!("s{n}")), &healthy.conninfo()))
        .collect();
    let idle = add(&named("standby"), &healthy.conninfo());
    let away = add(&named("away"), "host=/nowhere dbname=x user=y");
    let last = add(&halted.name, &halted.conninfo());
    let file = config_file(text);
    for name in streaming.iter().chain([&idle]) {
        let arguments = ["init", "--pipeline", name, "--config"];
        Invocation::new(arguments)
            .arg(&file)
            .finish()
            .expect_code(0);
    }
    let other = ["run", "--http", "off", "--pipeline", &idle, "--config"];
    let mut other = Invocation::new(other).arg(&file).start();
    other.wait_for_log(" streaming ");
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(&file)
        .without_env("WALPOST_HTTP")
        .start();
    let http = walpost.http();
    walpost.wait_for_logs(" streaming ", 10);
    walpost.wait_for_log("standing by");
    halted.accept_any_name("outbox");
    halted.insert("no topic is called <so>", "k");
    walpost.wait_for_log("halted: ");

    let mut tab = Tab::open(&url(&http), 1280, 900);
    wait_until("the overview", || {
        let overview_rows = overview_rows(&mut tab);
        let states: Vec<_> = overview_rows.iter().map(|row| row[1].as_str()).collect();
        states.len() == 12
            && states[..2] == ["halted", "reconnecting"]
            && !states[2..].contains(&"starting")
    });
    let order: Vec<_> = overview_rows(&mut tab)
        .into_iter()
        .map(|[name, ..]| name)
        .collect();
    let configured = streaming.iter().chain([&idle]);
    let expected: Vec<_> = [&last, &away].into_iter().chain(configured).collect();
    assert_eq!(order.iter().collect::<Vec<_>>(), expected);
    let cards =
        "[...document.querySelectorAll('[data-pipeline]')].map(card => card.dataset.pipeline)";
    assert_eq!(tab.evaluate(cards), serde_json::json!(order), "the cards");

    let shown = Invocation::new(["status", "--http", http.address()]).finish();
    assert!(
        shown.stdout.starts_with(
            "12 pipelines, 2 with problems: 1 halted, 1 reconnecting, 9 streaming, 1 standing by\n"
        ),
        "{}",
        shown.stdout
    );
    let names = shown.stdout.lines().skip(2).take(12);
    let names: Vec<_> = names.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, order, "{}", shown.stdout);
    expect_agreement(&mut tab, &http);

    // With all cards expanded, the page would be 6,652 pixels tall in the larger window and 17,637
    // in the smaller one, far more than these limits.
    for (width, height, peak) in [(1280, 900, 1_700), (390, 844, 2_400)] {
        tab.resize(width, height);
        let size = tab.evaluate(
            "[document.documentElement.scrollHeight, document.documentElement.scrollWidth,
              document.querySelectorAll('.charts').length, [...document.querySelectorAll('.charts')].filter(c => c.offsetHeight).length]",
        );
        assert!(size[0].as_u64().unwrap() <= peak, "{width}: {size}");
        assert_eq!(size[1], width, "the page scrolls horizontally: {size}");
        assert_eq!((&size[2], &size[3]), (&12.into(), &0.into()), "folded");
    }

    // From here, use only the keyboard. The first link is in the first row of the overview and
    // leads to that pipeline's card.
    let focused = "document.activeElement.textContent";
    tab.press("Tab");
    assert_eq!(tab.evaluate(focused), *last);
    for _ in 0..5 {
        tab.press("Tab");
    }
    let fifth = &order[5];
    assert_eq!(tab.evaluate(focused), **fifth);
    tab.press("Enter");
    let card = format!("document.getElementById('pipeline-{fifth}')");
    wait_until("the card", || {
        tab.evaluate(&format!("{card}.querySelector('.charts').offsetHeight > 0")) == true
    });
    let top = format!("{card}.getBoundingClientRect().top");
    wait_until("the card to be visible", || {
        let top = tab.evaluate(&top).as_f64().unwrap();
        (0.0..844.0).contains(&top)
    });
    let fold = format!("{card}.querySelector('button').getAttribute('aria-expanded')");
    assert_eq!(tab.evaluate(&fold), "true");
    // The next tab stop is the heading of the card; pressing Enter collapses the card.
    tab.press("Tab");
    assert_eq!(tab.evaluate(focused), **fifth);
    tab.press("Enter");
    assert_eq!(tab.evaluate(&fold), "false");
    drop(tab);

    // If the URL's fragment is the name of a pipeline, that pipeline's card is expanded and shows
    // charts.
    let mut tab = Tab::open(&format!("{}#pipeline-{last}", url(&http)), 390, 844);
    let card = format!("document.getElementById('pipeline-{last}')");
    wait_until("the charts", || {
        tab.evaluate(&format!("{card}.querySelectorAll('path.first').length")) == 3
    });
    other.terminate().expect_code(0);
    walpost.terminate().expect_code(3);
}

/// With three pipelines or fewer, no card is collapsed.
#[test]
fn status_page_with_few_pipelines_has_no_overview() {
    let fixture = Fixture::new();
    let (walpost, http) = start(&[&fixture]);
    for width in [1280, 390] {
        let mut tab = Tab::open(&url(&http), width, 900);
        let size = tab.evaluate(
            "[document.documentElement.scrollWidth, document.getElementById('overview').hidden,
              document.querySelector('.charts').offsetHeight > 0, document.querySelectorAll('article button').length]",
        );
        assert_eq!(size, serde_json::json!([width, true, true, 0]));
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn status_page_shows_each_pipeline_and_its_rate() {
    let fixtures = [Fixture::new(), Fixture::new()];
    let aggregate = fixtures[0].aggregate(2);
    let (walpost, http) = start(&fixtures.each_ref());
    let load = fixtures[0].load(&[&aggregate]);
    load.wait_for_transactions(300);
    wait_until("a rate and the slot", || {
        let pipeline = http.pipeline();
        pipeline["recent"]["events_per_second"].as_f64() > Some(5.0)
            && pipeline["slot_health"].is_object()
    });
    let document = browser::document(&url(&http));
    load.stop();
    let busy = card(&document, &fixtures[0].name);
    let after = |title: &str| busy.split_once(title).unwrap().1;
    let rate = after("Events per second|").split('|').next().unwrap();
    let number: f64 = rate
        .split(' ')
        .next()
        .unwrap()
        .replace(',', "")
        .parse()
        .unwrap();
    assert!(number > 0.0, "{busy}");
    let slot = fixtures[0].slot();
    for text in [
        "streaming",
        "Commit to delivery",
        "reserved, active",
        "reachable",
        &slot,
        "at-least-once",
    ] {
        assert!(busy.contains(text), "{text} in {busy}");
    }
    let delivered = after("Events delivered|").split('|').next().unwrap();
    let delivered: u64 = delivered.replace(',', "").parse().unwrap();
    assert!(delivered >= 300, "{busy}");
    // Each chart has a line, and the first chart has points.
    assert!(
        document.matches("class=\"first\"").count() >= 6,
        "{document}"
    );
    let idle = card(&document, &fixtures[1].name);
    assert!(
        idle.contains("streaming") && idle.contains("Events delivered|0"),
        "{idle}"
    );
    assert!(document.contains(">Ready<"), "{document}");
    walpost.terminate().expect_code(0);
}

/// The page must show the duration of the stall, which is shorter than the time since streaming
/// began.
#[test]
fn status_page_shows_how_long_a_pipeline_has_been_stalled() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    let ago = |key: &str| {
        let at = http.pipeline()[key].as_f64()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Some(now.as_secs_f64() - at)
    };
    wait_until("the pipeline to stream for a while", || {
        ago("since") > Some(15.0)
    });
    kafka.set_mode(ProxyMode::Refuse);
    let killed = Instant::now();
    fixture.insert(&aggregate, "k");
    wait_until("the pipeline to be stalled", || {
        ago("not_ready_since").is_some()
    });
    let document = browser::document(&url(&http));
    let peak = killed.elapsed().as_secs_f64() + 1.0;
    let stuck = card(&document, &fixture.name);
    let (_, lasts) = stuck.split_once("stuck|for ").expect(&stuck);
    let (lasts, _) = lasts.split_once('|').unwrap_or((lasts, ""));
    let (number, unit) = lasts.split_once(' ').expect(lasts);
    let number: f64 = number.parse().expect(lasts);
    let second = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "min" => 60.0,
        _ => panic!("{unit}: {stuck}"),
    };
    assert!(number * second <= peak, "{peak} s: {stuck}");
    expect_agreement(&mut Tab::open(&url(&http), 1280, 900), &http);
    walpost.kill();
}

/// The error contains text from a row, which must be escaped rather than interpreted as HTML.
#[test]
fn status_page_shows_an_error_with_its_remedy_as_plain_text() {
    let fixtures = [Fixture::new(), Fixture::new()];
    let (mut walpost, http) = start(&fixtures.each_ref());
    fixtures[0].accept_any_name("outbox");
    fixtures[0].insert("<img src=x onerror=document.title=1>", "k");
    walpost.wait_for_log("halted: ");
    let document = browser::document(&url(&http));
    let halted = card(&document, &fixtures[0].name);
    for text in ["halted", "&lt;img src=x onerror=", "restart Walpost"] {
        assert!(halted.contains(text), "{text} in {halted}");
    }
    assert!(!document.contains("<img"), "{document}");
    assert!(
        document.contains("<title>(!) Walpost</title>"),
        "{document}"
    );
    assert!(document.contains("1 of 2 not ready"), "{document}");
    expect_agreement(&mut Tab::open(&url(&http), 1280, 900), &http);
    walpost.terminate().expect_code(3);
}

#[test]
fn status_page_loads_no_external_resources() {
    let fixture = Fixture::new();
    let (walpost, http) = start(&[&fixture]);
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

/// Creates docs/page.png.
#[test]
#[ignore = "writes to docs/"]
fn captures_a_screenshot_of_the_status_page() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(3);
    let (walpost, http) = start(&[&fixture]);
    let load = fixture.load(&[&aggregate]);
    assert_stays("running", Duration::from_secs(150), || {
        http.get("/healthz").code == 200
    });
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/page.png");
    browser::screenshot(&url(&http), &file, 1220, 620, false);
    load.stop();
    walpost.terminate().expect_code(0);
}

#[test]
fn status_page_lists_dropped_slots() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    budget::drop_slot(&fixture);
    budget::new_slot(&fixture);
    let (walpost, http) = start(&[&fixture]);
    wait_until("the database to be queried", || {
        http.pipeline()["dropped_slots"].is_array()
    });
    let listed = card(&browser::document(&url(&http)), &fixture.name);
    for text in [
        "committed after",
        "entry ",
        "walpost replay --dropped-slots",
    ] {
        assert!(listed.contains(text), "{text}: {listed}");
    }
    walpost.terminate().expect_code(0);
}
