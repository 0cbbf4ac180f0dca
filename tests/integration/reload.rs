//! Pipelines are added, removed and changed while the process runs, without affecting the other
//! pipelines.

use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::reaper;
use crate::support::secrets::SECRET;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation, Walpost};

mod copies;
mod query;

const RELOADED: &str = "configuration reloaded";
const NOT_RELOADED: &str = "configuration not reloaded";

/// A Walpost process that was started with a configuration file and a control socket.
struct Process {
    folder: PathBuf,
    walpost: Walpost,
}

impl Process {
    /// Starts a process with a configuration file that defines a pipeline for each fixture.
    fn start(fixtures: &[&Fixture]) -> Self {
        let folder = reaper::folder("config");
        replace(&folder.join("walpost.toml"), &file_of(fixtures));
        Self::start_in(folder, fixtures.len())
    }

    fn start_in(folder: PathBuf, pipelines: usize) -> Self {
        let mut walpost = Invocation::new(["run", "--http", "127.0.0.1:0", "--config"])
            .arg(folder.join("walpost.toml"))
            .start();
        walpost.wait_for_logs("streaming", pipelines);
        Self { folder, walpost }
    }

    fn file(&self) -> PathBuf {
        self.folder.join("walpost.toml")
    }

    /// Writes a configuration with a pipeline for each fixture, and waits until the configuration
    /// has been reloaded `count` times since startup.
    fn reload(&mut self, fixtures: &[&Fixture], count: usize) -> String {
        replace(&self.file(), &file_of(fixtures));
        self.walpost.wait_for_logs(RELOADED, count)
    }

    fn pipeline_command(&self, words: &[&str]) -> Finished {
        Invocation::new(["pipeline"])
            .args(words)
            .arg("--config")
            .arg(self.file())
            .finish()
    }
}

/// Replaces the file by renaming a new file over it, as editors do.
fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, file).unwrap();
}

fn head() -> String {
    format!(
        "control = 'control.sock'\n[kafka]\n'bootstrap.servers' = '{}'\n",
        Broker::shared().address()
    )
}

fn pipeline(fixture: &Fixture, more: &str) -> String {
    format!(
        "[[pipeline]]\nname = '{}'\npostgres = \"{}\"\n{more}\n",
        fixture.name,
        fixture.conninfo()
    )
}

fn file_of(fixtures: &[&Fixture]) -> String {
    let pipelines = fixtures.iter().map(|fixture| pipeline(fixture, ""));
    head() + &pipelines.collect::<String>()
}

/// Returns the PID of the walsender that streams from the pipeline's slot.
fn walsender(fixture: &Fixture) -> String {
    fixture.db.value(&format!(
        "SELECT coalesce(active_pid::text, 'none') FROM pg_replication_slots WHERE slot_name = '{}'",
        fixture.slot()
    )).unwrap()
}

fn wait_until_streaming(fixture: &Fixture) {
    wait_until("the slot to be active", || fixture.slot_is_active());
}

#[test]
fn reload_adds_and_removes_pipelines_without_affecting_others() {
    let [stays, comes] = [Fixture::new(), Fixture::new()];
    let mut process = Process::start(&[&stays]);
    let aggregate = stays.aggregate(2);
    let load = stays.load(&[&aggregate]);
    let sender = walsender(&stays);
    let line = process.reload(&[&stays, &comes], 1);
    assert!(
        line.contains("1 added") && line.contains(&comes.name) && line.contains("1 unchanged"),
        "{line}"
    );
    wait_until_streaming(&comes);
    let other = comes.aggregate(1);
    comes.insert(&other, "k");
    comes.wait_for_records(1);
    let line = process.reload(&[&stays], 2);
    assert!(line.contains("1 removed"), "{line}");
    wait_until("the slot to be released", || !comes.slot_is_active());
    // Removing the pipeline must not drop its slot, because events would then be lost.
    let removal_line = process
        .walpost
        .wait_for_log("removed from the configuration");
    assert!(
        removal_line.contains(&format!(
            "pg_catalog.pg_drop_replication_slot('{}')",
            comes.slot()
        )),
        "{removal_line}"
    );
    comes.insert(&other, "k");
    process.reload(&[&comes, &stays], 3);
    comes.wait_for_records(2);
    load.wait_for_transactions(20);
    load.stop();
    assert_eq!(walsender(&stays), sender);
    assert_eq!(
        stays.settle(process.walpost, &[], Resends::Never).repeated,
        0
    );
    assert_eq!(comes.check_delivered(&[], Resends::Never).committed, 2);
}

#[test]
fn status_reports_a_failed_reload_until_one_succeeds() {
    let fixture = Fixture::new();
    let mut process = Process::start(&[&fixture]);
    let address = process.walpost.http().address().to_owned();
    let status = || Invocation::new(["status", "--http", &address]).finish();
    wait_until("a healthy status", || status().code == Some(0));
    replace(&process.file(), "[[pipeline]]\nretenton = '7d'\n");
    process.walpost.wait_for_log(NOT_RELOADED);
    let failed = status().expect_code(1);
    for word in [
        "configuration: the reload ",
        "did you mean `retention`",
        "Correct the configuration, and reload it",
    ] {
        assert!(
            failed.stdout.contains(word),
            "{word:?} in {}",
            failed.stdout
        );
    }
    process.reload(&[&fixture], 1);
    wait_until("a healthy status", || status().code == Some(0));
    process.walpost.terminate().expect_code(0);
}

#[test]
fn reload_restarts_only_the_changed_pipeline_and_loses_no_event() {
    for exactly_once in [false, true] {
        let [stays, changes] = [Fixture::new(), Fixture::new().in_mode(exactly_once)];
        let mode = match exactly_once {
            true => "delivery = 'exactly-once'\n",
            false => "",
        };
        let text = |window: u32| {
            let more = format!("{mode}window_records = {window}");
            head() + &pipeline(&stays, "") + &pipeline(&changes, &more)
        };
        let folder = reaper::folder("config");
        replace(&folder.join("walpost.toml"), &text(1000));
        let mut process = Process::start_in(folder, 2);
        let aggregate = changes.aggregate(3);
        let load = changes.load(&[&aggregate]);
        let senders = [&stays, &changes].map(walsender);
        for (times, window) in [(1, 500), (2, 800)] {
            load.wait_for_transactions(30);
            replace(&process.file(), &text(window));
            let line = process.walpost.wait_for_logs(RELOADED, times);
            assert!(
                line.contains("1 changed") && line.contains("1 unchanged"),
                "{line}"
            );
            process.walpost.wait_for_logs("streaming", 2 + times);
        }
        load.wait_for_transactions(30);
        load.stop();
        assert_eq!(walsender(&stays), senders[0]);
        assert_ne!(walsender(&changes), senders[1]);
        // The pipeline drains before it restarts, so nothing is delivered twice.
        let summary = changes.settle(process.walpost, &[], Resends::Never);
        assert_eq!(summary.repeated, 0);
    }
}

#[test]
fn password_rotation_restarts_no_pipeline() {
    let fixture = Fixture::new();
    let mut process = Process::start(&[&fixture]);
    let sender = walsender(&fixture);
    let rotated = file_of(&[&fixture]).replace("user=postgres", "user=postgres password=new");
    assert!(rotated.contains("password=new"), "{rotated}");
    replace(&process.file(), &rotated);
    let line = process.walpost.wait_for_log(RELOADED);
    assert!(line.contains(": 1 unchanged"), "{line}");
    assert_eq!(walsender(&fixture), sender);
    process.walpost.terminate().expect_code(0);
}

#[test]
fn reload_reports_an_invalid_file_and_changes_nothing() {
    let [one, other] = [Fixture::new(), Fixture::new()];
    let mut process = Process::start(&[&one, &other]);
    let http = process.walpost.http();
    let senders = [&one, &other].map(walsender);
    let good = file_of(&[&one, &other]);
    let twice = good.clone() + &pipeline(&one, "");
    // The first file ends in the middle of a string, the second contains an unknown key, and the
    // third defines the same name twice.
    let broken = [
        (&good[..good.len() - 5], "line "),
        (&(good.clone() + "windows = 1\n"), "windows"),
        (&twice, "use the same name"),
    ];
    for (times, (text, why)) in broken.into_iter().enumerate() {
        // Overwrite the file in place, so that a reload can read the file while it is empty.
        fs::write(process.file(), text).unwrap();
        let line = process.walpost.wait_for_logs(NOT_RELOADED, times + 1);
        assert!(line.contains(why), "{line}");
        assert_eq!(http.metrics()["walpost_config_reload_failed"], 1.0);
    }
    fs::remove_file(process.file()).unwrap();
    process.walpost.wait_for_logs(NOT_RELOADED, 4);
    assert_eq!([&one, &other].map(walsender), senders);
    process.reload(&[&one, &other], 1);
    assert_eq!(http.metrics()["walpost_config_reload_failed"], 0.0);
    assert_eq!([&one, &other].map(walsender), senders);
    process.walpost.terminate().expect_code(0);
}

#[test]
fn reload_requires_confirmation_before_removing_most_pipelines() {
    let fixtures = [Fixture::new(), Fixture::new(), Fixture::new()];
    let mut process = Process::start(&fixtures.each_ref());
    let senders = fixtures.each_ref().map(walsender);
    for (times, text) in [file_of(&[&fixtures[1]]), head(), String::new()]
        .iter()
        .enumerate()
    {
        replace(&process.file(), text);
        let line = process.walpost.wait_for_logs(NOT_RELOADED, times + 1);
        assert!(
            line.contains("pipeline reload --accept") || line.contains("no database is configured"),
            "{line}"
        );
    }
    replace(&process.file(), &file_of(&[&fixtures[1]]));
    process.walpost.wait_for_logs(NOT_RELOADED, 4);
    process.walpost.signal("HUP");
    process.walpost.wait_for_logs(NOT_RELOADED, 5);
    let refused = process.pipeline_command(&["reload"]).expect_code(1);
    refused.expect_mentions(&["2 pipelines would be removed", &fixtures[0].name]);
    assert_eq!(fixtures.each_ref().map(walsender), senders);
    let accepted = process
        .pipeline_command(&["reload", "--accept"])
        .expect_code(0);
    accepted.expect_mentions(&["2 removed", "1 unchanged"]);
    wait_until("two slots to be released", || {
        !fixtures[0].slot_is_active() && !fixtures[2].slot_is_active()
    });
    assert_eq!(walsender(&fixtures[1]), senders[1]);
    process.walpost.terminate().expect_code(0);
}

#[test]
fn each_file_in_a_pipeline_directory_defines_a_pipeline() {
    let [one, two, three] = [Fixture::new(), Fixture::new(), Fixture::new()];
    let folder = reaper::folder("config");
    let parts = folder.join("pipelines.d");
    fs::create_dir(&parts).unwrap();
    let source = "[[fleet.source]]\ndirectory = 'pipelines.d'\n";
    replace(&folder.join("walpost.toml"), &(head() + source));
    let part = |name: &str, fixture: &Fixture| replace(&parts.join(name), &pipeline(fixture, ""));
    part("one.toml", &one);
    // Editors' temporary files are not treated as pipeline definitions.
    fs::write(parts.join(".two.toml.swp"), "half").unwrap();
    fs::write(parts.join("two.toml~"), "half").unwrap();
    let mut process = Process::start_in(folder, 1);
    let sender = walsender(&one);
    part("two.toml", &two);
    process.walpost.wait_for_logs(RELOADED, 1);
    wait_until_streaming(&two);
    // Define a pipeline whose name another file already uses.
    part("three.toml", &two);
    let line = process.walpost.wait_for_log(NOT_RELOADED);
    assert!(
        line.contains(&two.name) && line.contains("two.toml") && line.contains("three.toml"),
        "{line}"
    );
    part("three.toml", &three);
    process.walpost.wait_for_logs(RELOADED, 2);
    wait_until_streaming(&three);
    fs::remove_file(parts.join("two.toml")).unwrap();
    process.walpost.wait_for_logs(RELOADED, 3);
    wait_until("the slot to be released", || !two.slot_is_active());
    // A missing directory is an error, and Walpost does not remove the pipelines that files in the
    // directory defined.
    fs::rename(&parts, parts.with_extension("away")).unwrap();
    let line = process.walpost.wait_for_logs(NOT_RELOADED, 2);
    assert!(line.contains("pipelines.d"), "{line}");
    fs::rename(parts.with_extension("away"), &parts).unwrap();
    process.walpost.wait_for_logs(RELOADED, 4);
    assert_eq!(walsender(&one), sender);
    process.walpost.terminate().expect_code(0);
}

/// Creates a configuration file that loads pipelines from a directory. Returns the folder that
/// contains the file, and the directory.
fn with_parts() -> (PathBuf, PathBuf) {
    let folder = reaper::folder("config");
    let parts = folder.join("pipelines.d");
    fs::create_dir(&parts).unwrap();
    let source = "[[fleet.source]]\ndirectory = 'pipelines.d'\n";
    replace(&folder.join("walpost.toml"), &(head() + source));
    (folder, parts)
}

/// Anyone who can write to the directory of pipeline definitions could make Walpost send its
/// passwords to any server.
#[test]
fn sends_no_password_for_pipelines_in_a_directory_writable_by_other_users() {
    let (folder, parts) = with_parts();
    let servers = TcpListener::bind("127.0.0.1:0").unwrap();
    servers.set_nonblocking(true).unwrap();
    let port = servers.local_addr().unwrap().port();
    let text = format!(
        "[[pipeline]]\nname = 'evil'\npostgres = 'host=127.0.0.1 port={port} user=u dbname=d'\n\
         kafka = {{ 'bootstrap.servers' = '127.0.0.1:{port}' }}\n"
    );
    let part = parts.join("evil.toml");
    fs::write(&part, text).unwrap();
    for (directory, open, safe) in [(&parts, 0o777, 0o755), (&part, 0o666, 0o644)] {
        fs::set_permissions(directory, Permissions::from_mode(open)).unwrap();
        for command in ["run", "check", "verify"] {
            let refused = Invocation::new([command, "--config"])
                .arg(folder.join("walpost.toml"))
                .env("PGPASSWORD", SECRET)
                .finish();
            let remedy = format!("chmod go-w {}", directory.display());
            refused
                .expect_code(2)
                .expect_mentions(&["is writable by other users", &remedy]);
        }
        fs::set_permissions(directory, Permissions::from_mode(safe)).unwrap();
    }
    assert!(servers.accept().is_err(), "Walpost connected to the server");
}

#[test]
fn special_files_in_a_pipeline_directory_do_not_block_a_reload() {
    let (folder, parts) = with_parts();
    let part = parts.join("part.toml");
    let run = || {
        let run = Invocation::new(["run", "--config"]).arg(folder.join("walpost.toml"));
        run.finish().expect_code(2)
    };
    let created = Command::new("mkfifo").arg(&part).status().unwrap();
    assert!(created.success());
    run().expect_mentions(&["part.toml is a FIFO, expected a regular file"]);
    fs::remove_file(&part).unwrap();
    symlink("/dev/zero", &part).unwrap();
    run().expect_mentions(&["part.toml: /dev/zero "]);
    fs::remove_file(&part).unwrap();
    fs::File::create(&part).unwrap().set_len(1 << 34).unwrap();
    run().expect_mentions(&["part.toml is larger than 16777216 bytes"]);
}

#[test]
fn ignores_changes_in_a_directory_that_became_writable_by_other_users() {
    let [one, other] = [Fixture::new(), Fixture::new()];
    let (folder, parts) = with_parts();
    replace(&parts.join("one.toml"), &pipeline(&one, ""));
    let mut process = Process::start_in(folder, 1);
    let sender = walsender(&one);
    fs::set_permissions(&parts, Permissions::from_mode(0o777)).unwrap();
    fs::write(parts.join("other.toml"), pipeline(&other, "")).unwrap();
    let line = process.walpost.wait_for_log(NOT_RELOADED);
    assert!(line.contains("is writable by other users"), "{line}");
    assert!(!other.slot_is_active());
    assert_eq!(walsender(&one), sender);
    // Once the permissions are corrected, Walpost reads the directory again.
    fs::set_permissions(&parts, Permissions::from_mode(0o755)).unwrap();
    process.walpost.wait_for_log(RELOADED);
    wait_until_streaming(&other);
    assert_eq!(walsender(&one), sender);
    process.walpost.terminate().expect_code(0);
}

/// In a directory that other users can write to, one of them could create a socket at the
/// configured path first, which would prevent Walpost from starting.
#[test]
fn creates_no_control_socket_in_a_directory_writable_by_other_users() {
    let folder = reaper::folder("shared");
    fs::set_permissions(&folder, Permissions::from_mode(0o1777)).unwrap();
    let path = folder.join("control.sock");
    let run = || {
        Invocation::new(["run", "--postgres", "host=/nowhere user=u dbname=d"])
            .args(["--kafka", "127.0.0.1:9"])
            .env("WALPOST_CONTROL", &path)
    };
    let first = UnixListener::bind(&path).unwrap();
    let expected = [
        "other users can create files in",
        "has mode 1777",
        "install -d -m 0700",
    ];
    run().finish().expect_code(2).expect_mentions(&expected);
    drop(first);
    fs::remove_file(&path).unwrap();
    run().finish().expect_code(2).expect_mentions(&expected);
    assert!(!path.exists());
    fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
    let mut walpost = run().start();
    walpost.wait_for_log("listening for walpost pipeline commands at");
    walpost.terminate();
}

#[test]
fn control_socket_stops_and_starts_pipelines() {
    let [one, other] = [Fixture::new(), Fixture::new()];
    let process = Process::start(&[&one, &other]);
    let aggregate = one.aggregate(1);
    let sender = walsender(&other);
    let stopped = process
        .pipeline_command(&["stop", &one.name])
        .expect_code(0);
    stopped.expect_mentions(&["has stopped", "retains WAL", &one.slot()]);
    assert!(!one.slot_is_active());
    let listed = process.pipeline_command(&["list"]).expect_code(0);
    listed.expect_mentions(&[
        &format!("{} stopped", one.name),
        &format!("{} streaming", other.name),
    ]);
    one.insert(&aggregate, "k");
    // A reload must not start a pipeline that an operator has stopped.
    process
        .pipeline_command(&["reload"])
        .expect_code(0)
        .expect_mentions(&["2 unchanged"]);
    assert!(!one.slot_is_active());
    process
        .pipeline_command(&["start", &one.name])
        .expect_code(0);
    one.wait_for_records(1);
    let first = walsender(&one);
    process
        .pipeline_command(&["start", &one.name])
        .expect_code(0)
        .expect_mentions(&["is already running"]);
    assert_eq!(walsender(&one), first);
    process
        .pipeline_command(&["restart", &one.name])
        .expect_code(0)
        .expect_mentions(&["counters were reset to 0"]);
    wait_until_streaming(&one);
    assert_ne!(walsender(&one), first);
    let unknown = process
        .pipeline_command(&["stop", "unknown"])
        .expect_code(1);
    unknown.expect_mentions(&[
        "pipeline \"unknown\" does not exist",
        &one.name,
        &other.name,
    ]);
    assert_eq!(walsender(&other), sender);
    assert_eq!(one.settle(process.walpost, &[], Resends::Never).repeated, 0);
    let socket = process.folder.join("control.sock");
    assert!(!socket.exists());
    Invocation::new(["pipeline", "list", "--control"])
        .arg(&socket)
        .finish()
        .expect_code(1)
        .expect_mentions(&["control.sock"]);
}

#[test]
fn restarts_a_halted_pipeline_after_its_cause_is_fixed() {
    let [halts, other] = [Fixture::new(), Fixture::new()];
    let mut process = Process::start(&[&halts, &other]);
    let aggregate = halts.aggregate(1);
    let late = format!("{aggregate}.late");
    let sender = walsender(&other);
    halts.insert(&late, "k");
    process.walpost.wait_for_log("halted:");
    halts.topic(&format!("outbox.event.{late}"), 1, &[]);
    process
        .pipeline_command(&["start", &halts.name])
        .expect_code(0);
    halts.wait_for_records(1);
    assert_eq!(walsender(&other), sender);
    halts.wait_until_confirmed();
    // Because the cause was fixed, the earlier halt does not affect the exit code.
    process.walpost.terminate().expect_code(0);
    assert_eq!(halts.check_delivered(&[], Resends::Never).committed, 1);
}

#[test]
fn process_with_all_pipelines_stopped_runs_until_terminated() {
    let fixture = Fixture::new();
    let mut process = Process::start(&[&fixture]);
    process
        .pipeline_command(&["stop", &fixture.name])
        .expect_code(0);
    let http = process.walpost.http();
    // Walpost must keep monitoring the pipeline's slot, because PostgreSQL still retains WAL for
    // it.
    fixture.write_other_wal(40);
    wait_until("the retained WAL to be reported", || {
        let kept = http.metric("walpost_slot_retained_bytes", &fixture.name);
        kept > Some(f64::from(32 << 20))
    });
    assert!(process.walpost.is_running());
    process.walpost.terminate().expect_code(0);
}

#[test]
fn repeated_restarts_of_a_pipeline_leak_no_resources() {
    let [restarts, other] = [Fixture::new().exactly_once(), Fixture::new()];
    let folder = reaper::folder("config");
    let mode = "delivery = 'exactly-once'\n";
    let text = head() + &pipeline(&restarts, mode) + &pipeline(&other, "");
    replace(&folder.join("walpost.toml"), &text);
    let process = Process::start_in(folder, 2);
    let aggregate = restarts.aggregate(1);
    let held = |what: &str| {
        let directory = format!("/proc/{}/{what}", process.walpost.process_id());
        fs::read_dir(directory).unwrap().count()
    };
    let restart = |count: usize| {
        for _ in 0..count {
            process
                .pipeline_command(&["restart", &restarts.name])
                .expect_code(0);
            restarts.insert(&aggregate, "k");
            restarts.wait_until_confirmed();
        }
    };
    restart(3);
    let before = ["task", "fd"].map(held);
    restart(20);
    // librdkafka's clients start their own threads and open connections on demand, sometimes only
    // after the first measurement, so allow for a few more threads and descriptors. A leak of one
    // thread or descriptor per restart would exceed this allowance.
    wait_until(
        "threads and descriptors to return to their previous number",
        || {
            let now = ["task", "fd"].map(held);
            now.iter()
                .zip(before)
                .all(|(now, before)| *now < before + 10)
        },
    );
    assert_eq!(
        restarts
            .settle(process.walpost, &[], Resends::Never)
            .repeated,
        0
    );
}

#[test]
fn reload_reports_a_slot_that_becomes_unused() {
    let [changes, other] = [Fixture::new(), Fixture::new()];
    let mut process = Process::start(&[&changes, &other]);
    let sender = walsender(&other);
    let text = head() + &pipeline(&changes, "slot = 'nobody_made_this'") + &pipeline(&other, "");
    replace(&process.file(), &text);
    let line = process
        .walpost
        .wait_for_log("now uses a different slot or database");
    assert!(
        line.contains(&format!(
            "pg_catalog.pg_drop_replication_slot('{}')",
            changes.slot()
        )),
        "{line}"
    );
    process.walpost.wait_for_log("halted");
    // Correcting the definition is a change like any other, so the halted pipeline starts again.
    let aggregate = changes.aggregate(1);
    changes.insert(&aggregate, "k");
    process.reload(&[&changes, &other], 2);
    changes.wait_for_records(1);
    assert_eq!(walsender(&other), sender);
    assert_eq!(
        changes
            .settle(process.walpost, &[], Resends::Never)
            .repeated,
        0
    );
}
