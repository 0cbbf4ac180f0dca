//! Checks that the files in `deploy/` match the program and its sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use walpost::facade::{METRICS, MetricType};

/// Reads a file in the repository.
fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the source files that Cargo.toml requires to exist.
fn targets() -> Vec<PathBuf> {
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let mut paths = vec!["src/lib.rs".into(), "src/main.rs".into()];
    for (kind, folder) in [("bench", "benches"), ("test", "tests")] {
        for target in manifest[kind].as_array().unwrap() {
            let name = target["name"].as_str().unwrap();
            let path = target.get("path").and_then(toml::Value::as_str);
            paths.push(path.map_or_else(
                || Path::new(folder).join(format!("{name}.rs")),
                PathBuf::from,
            ));
        }
    }
    assert!(paths.len() > 5, "{paths:?}");
    paths
}

#[test]
fn dockerfile_creates_a_stub_file_for_each_target_in_cargo_toml() {
    let dockerfile = read("deploy/Dockerfile");
    let (_, steps) = dockerfile
        .split_once("COPY Cargo.toml Cargo.lock ./\nRUN ")
        .unwrap();
    let (stubs, _) = steps.split_once("&& cargo build").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{stubs} && true").replace("\\\n", " ");
    let status = Command::new("sh")
        .args(["-euc", &line])
        .current_dir(&folder)
        .status();
    assert!(status.unwrap().success(), "{line}");
    for path in targets() {
        assert!(
            folder.path().join(&path).exists(),
            "{} is missing",
            path.display()
        );
    }
}

/// Anyone who can send events controls the contents of records.
#[test]
fn demo_prints_no_control_characters_from_records() {
    let folder = tempfile::tempdir().unwrap();
    let record = "Partition:0\tOffset:1\tid:7,walpost-position:0/1\tk\u{1b}[2J\tv\u{9b}31m\u{7}\n";
    let printed = Command::new("bash")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo/consume.sh"))
        .arg("127.0.0.1:9")
        .arg(folder.path().join("records"))
        .args(["bash", "-c", "printf %s \"$0\"", record])
        .output()
        .unwrap();
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(
        text.starts_with("record: partition 0 offset   1"),
        "{text:?}"
    );
    assert!(text.ends_with("k?[2J  v?31m?\n"), "{text:?}");
}

#[test]
fn image_build_context_contains_exactly_the_copied_files() {
    let ignored = read(".dockerignore");
    let included: BTreeSet<_> = ignored
        .lines()
        .filter_map(|line| line.strip_prefix('!'))
        .collect();
    let dockerfile = read("deploy/Dockerfile");
    let copied: BTreeSet<_> = dockerfile
        .lines()
        .filter_map(|line| line.strip_prefix("COPY "))
        .filter(|line| !line.starts_with("--from="))
        .flat_map(|line| line.rsplit_once(' ').unwrap().0.split(' '))
        .collect();
    assert!(copied.contains("build.rs"), "{copied:?}");
    assert_eq!(copied, included);
}

/// Returns all container images that the build and the Compose file pull.
fn images() -> Vec<String> {
    let (dockerfile, compose) = (read("deploy/Dockerfile"), read("docker-compose.yml"));
    let bases = values(&dockerfile, "FROM ").into_iter();
    let bases = bases.map(|base| base.split(' ').next().unwrap().to_owned());
    let services = values(&compose, "image: ").into_iter().map(str::to_owned);
    bases.chain(services).collect()
}

/// Tags can be moved to another image, but a digest always identifies the same image.
#[test]
fn pins_each_image_to_one_tag_and_digest_everywhere() {
    let mut digests = BTreeMap::new();
    for image in images() {
        let (tag, digest) = image
            .split_once("@sha256:")
            .unwrap_or_else(|| panic!("{image}: no digest; ./dev digests writes them"));
        assert!(tag.contains(':'), "{image}: no tag");
        let is_hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        assert!(digest.len() == 64 && digest.bytes().all(is_hex), "{image}");
        let before = digests.insert(tag.to_owned(), digest.to_owned());
        assert!(before.is_none_or(|before| before == digest), "{image}");
    }
    assert!(digests.len() >= 6, "{digests:?}");
}

#[test]
fn digest_update_writes_valid_digests_and_rejects_invalid_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path_in_folder = |path: &str| folder.path().join(path);
    fs::create_dir_all(path_in_folder("deploy")).unwrap();
    fs::create_dir_all(path_in_folder("bin")).unwrap();
    for path in ["dev", "deploy/Dockerfile", "docker-compose.yml"] {
        fs::write(path_in_folder(path), read(path)).unwrap();
    }
    let digests = |answer: &str| {
        let docker = format!(
            "#!/bin/sh\ncase $4 in postgres:*) echo {answer} ;; *) echo sha256:{:064} ;; esac\n",
            7
        );
        fs::write(path_in_folder("bin/docker"), docker).unwrap();
        let status = Command::new("chmod")
            .arg("755")
            .arg(path_in_folder("bin/docker"))
            .status();
        assert!(status.unwrap().success());
        let path = std::env::var("PATH").unwrap();
        let output = Command::new("bash")
            .arg(path_in_folder("dev"))
            .arg("digests")
            .env(
                "PATH",
                format!("{}:{path}", path_in_folder("bin").display()),
            )
            .env_remove("CARGO_TARGET_DIR")
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let found = || {
        let text = |path: &str| fs::read_to_string(path_in_folder(path)).unwrap();
        text("deploy/Dockerfile") + &text("docker-compose.yml")
    };
    let count = |digest: &str| found().matches(digest).count();
    let (done, printed_text) = digests("unknown");
    assert!(
        !done && printed_text.contains("postgres:") && printed_text.contains("expected a digest"),
        "{printed_text}"
    );
    let one = format!("sha256:{:064}", 1);
    let (done, printed_text) = digests(&one);
    assert!(done, "{printed_text}");
    let (own, all) = (count(&one), images());
    let of_postgres = all.iter().filter(|image| image.starts_with("postgres:"));
    assert_eq!(own, of_postgres.count());
    assert_eq!(count(&format!("sha256:{:064}", 7)), all.len() - own);
    let (done, printed_text) = digests(&one);
    assert!(
        done && !printed_text.contains("now sha256") && printed_text.contains("unchanged"),
        "{printed_text}"
    );
}

const WORKFLOWS: [&str; 2] = [".github/workflows/ci.yml", ".github/workflows/release.yml"];

/// The owner of a GitHub action can move a tag to another commit, but a commit hash always
/// identifies the same code.
#[test]
fn workflows_pin_each_action_to_a_commit() {
    for path in WORKFLOWS {
        for action in values(&read(path), "- uses: ") {
            let (_, commit) = action.split_once('@').unwrap();
            let commit = commit.split(' ').next().unwrap();
            let is_hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
            let is_commit = commit.len() == 40 && commit.bytes().all(is_hex);
            assert!(
                is_commit,
                "{path}: {action}: expected the hash of a commit after @"
            );
        }
    }
}

#[test]
fn workflows_call_existing_dev_subcommands_and_use_the_dockerfile_rust_version() {
    let dev = read("dev");
    let words: BTreeSet<_> = dev
        .lines()
        .filter_map(|line| line.strip_prefix("    ")?.split_once(") "))
        .flat_map(|(words, _)| words.split(" | "))
        .collect();
    let dockerfile = read("deploy/Dockerfile");
    let (_, image) = dockerfile.split_once("FROM rust:").unwrap();
    let (rust, _) = image.split_once('-').unwrap();
    for path in WORKFLOWS {
        let workflow = read(path);
        for line in values(&workflow, "- run: ./dev ") {
            let word = line.split(' ').next().unwrap();
            assert!(words.contains(word), "{path}: ./dev {word} does not exist");
        }
        let quoted = format!("\"{rust}\"");
        assert_eq!(values(&workflow, "RUST_VERSION: "), [&quoted], "{path}");
    }
}

/// Compares only the version numbers. `./dev chart` compares the rendered chart with the manifests.
#[test]
fn chart_version_matches_the_crate_version() {
    let chart = read("deploy/helm/Chart.yaml");
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(values(&chart, "version: "), [version]);
    assert_eq!(values(&chart, "appVersion: "), [format!("\"{version}\"")]);
    let deployment = read("deploy/kubernetes/deployment.yaml");
    assert!(deployment.contains(&format!("/walpost:{version}\n")));
}

/// The network policy controls which pods can send requests to Walpost. It does not apply to the
/// kubelet.
#[test]
fn network_policy_admits_only_the_prometheus_namespace() {
    let policy = read("deploy/kubernetes/networkpolicy.yaml");
    let deployment = read("deploy/kubernetes/deployment.yaml");
    assert_eq!(values(&policy, "policyTypes: "), ["[Ingress]"]);
    assert_eq!(policy.matches("- from:").count(), 1);
    assert_eq!(
        policy.matches("Selector:").count(),
        2,
        "pods, and one namespace"
    );
    let chosen = values(&policy, "app.kubernetes.io/name: ");
    assert!(chosen.iter().all(|name| *name == "walpost"));
    let ports = values(&policy, "port: ");
    assert!(
        ports
            .iter()
            .all(|port| values(&deployment, "- name: ").contains(port)),
        "{ports:?}"
    );
}

/// Returns the number of seconds that follows the first occurrence of `key` in a file.
fn seconds_after(path: &str, key: &str) -> Duration {
    let text = read(path);
    let (_, rest) = text
        .split_once(key)
        .unwrap_or_else(|| panic!("{key} in {path}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Duration::from_secs(digits.parse().unwrap())
}

#[test]
fn stop_timeouts_in_deployment_files_exceed_the_default_drain_timeout() {
    for (path, key) in [
        ("deploy/systemd/walpost.service", "\nTimeoutStopSec="),
        (
            "deploy/kubernetes/deployment.yaml",
            "\n      terminationGracePeriodSeconds: ",
        ),
        ("docker-compose.yml", "\n    stop_grace_period: "),
    ] {
        let patience = seconds_after(path, key);
        // 30 s is the default drain_timeout. A process that is killed sooner can't finish draining.
        assert!(patience > Duration::from_secs(30), "{path}: {patience:?}");
    }
}

/// Returns the text after `key` on each line that starts with `key`.
fn values<'t>(text: &'t str, key: &str) -> Vec<&'t str> {
    let lines = text.lines().map(str::trim);
    let values: Vec<_> = lines.filter_map(|line| line.strip_prefix(key)).collect();
    assert!(!values.is_empty(), "{key}");
    values
}

/// Returns all names in the text that start with the prefix of Walpost's metrics.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    text.match_indices("walpost_")
        .map(|(at, _)| text[at..].split(|c| !is_part(c)).next().unwrap().to_owned())
        .collect()
}

/// Returns the names of the time series in which Prometheus stores Walpost's metrics.
fn exported() -> BTreeSet<String> {
    METRICS
        .iter()
        .flat_map(|metric| match metric.source.kind() {
            MetricType::HISTOGRAM => ["_bucket", "_count", "_sum"]
                .map(|part| format!("{}{part}", metric.name))
                .to_vec(),
            _ => vec![metric.name.to_owned()],
        })
        .collect()
}

#[test]
fn alerts_and_dashboard_use_only_exported_metrics() {
    let exported = exported();
    for path in [
        "deploy/prometheus/alerts.yml",
        "deploy/grafana/dashboard.json",
    ] {
        let queried = metrics_in(&read(path));
        assert!(queried.len() > 10, "{path}: {queried:?}");
        let unknown: Vec<_> = queried.difference(&exported).collect();
        assert!(unknown.is_empty(), "{path}: {unknown:?}");
    }
}

#[test]
fn dashboard_shows_every_metric() {
    let shown = metrics_in(&read("deploy/grafana/dashboard.json"));
    for metric in METRICS {
        let is_shown = shown.iter().any(|name| name.starts_with(metric.name));
        assert!(is_shown, "no panel shows {}", metric.name);
    }
}

/// Returns the panels of the Grafana dashboard.
fn panels() -> Vec<serde_json::Value> {
    let dashboard: serde_json::Value =
        serde_json::from_str(&read("deploy/grafana/dashboard.json")).unwrap();
    dashboard["panels"].as_array().unwrap().clone()
}

#[test]
fn dashboard_panels_do_not_overlap_and_have_unique_ids() {
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels() {
        let number = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        let title = panel["title"].as_str().unwrap();
        assert!(
            ids.insert(panel["id"].as_u64().unwrap()),
            "{title}: another panel has the same id"
        );
        assert!(number("x") + number("w") <= 24, "{title}: it is too wide");
        for x in number("x")..number("x") + number("w") {
            for y in number("y")..number("y") + number("h") {
                assert!(taken.insert((x, y)), "{title}: it overlaps another panel");
            }
        }
    }
}

#[test]
fn prometheus_accepts_every_dashboard_query() {
    // Rewrites the queries as recording rules, because promtool can check such rules.
    let mut rules = "groups: [{name: dashboard, rules: [".to_owned();
    for panel in panels() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"]
                .as_str()
                .unwrap()
                .replace("$__rate_interval", "1m");
            let quoted = serde_json::to_string(&expression).unwrap();
            let name = format!("panel:{}:{}", panel["id"], rules.len());
            rules += &format!("{{record: \"{name}\", expr: {quoted}}},\n");
        }
    }
    rules += "]}]\n";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yml");
    fs::write(&file, &rules).unwrap();
    let output = Command::new("promtool")
        .args(["check", "rules"])
        .arg(&file)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{rules}");
}

#[test]
fn every_alert_has_a_test_and_a_runbook_entry() {
    let rules = read("deploy/prometheus/alerts.yml");
    let alerts: BTreeSet<_> = values(&rules, "- alert: ").into_iter().collect();
    assert!(alerts.len() > 10, "{alerts:?}");

    let tests = read("deploy/prometheus/alerts_test.yml");
    let tested: BTreeSet<_> = values(&tests, "alertname: ").into_iter().collect();
    assert_eq!(tested, alerts, "alerts_test.yml and alerts.yml");

    let runbook = read("docs/operations.md");
    let entries: BTreeSet<_> = values(&runbook, "## Walpost")
        .into_iter()
        .map(|rest| format!("Walpost{rest}"))
        .collect();
    let alerts: BTreeSet<_> = alerts.into_iter().map(str::to_owned).collect();
    assert_eq!(entries, alerts, "docs/operations.md and alerts.yml");
    for entry in runbook.split("\n## Walpost").skip(1) {
        for part in [
            "- **Means**: ",
            "- **Look at**: ",
            "- **Do**: ",
            "- **Wake**: ",
        ] {
            assert_eq!(entry.matches(part).count(), 1, "{part} in:\n{entry}");
        }
    }

    let named: BTreeSet<_> = values(&rules, "runbook_url: docs/operations.md#")
        .into_iter()
        .collect();
    let anchors: BTreeSet<_> = alerts.iter().map(|alert| alert.to_lowercase()).collect();
    assert_eq!(named, anchors.iter().map(String::as_str).collect());
}
