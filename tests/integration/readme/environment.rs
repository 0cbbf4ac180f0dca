//! The environment in which the documentation's examples run: a server, a broker and a shell. Names
//! in the examples are replaced with names from the test.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::support::kafka::Broker;
use crate::support::names::unique_name;
use crate::support::postgres::{AUTHORITY, MAJOR, Server, dependencies};
use crate::support::process::{signal, wait_for_exit};
use crate::support::reaper::{self, Ending};
use crate::support::records::Record;
use crate::support::secrets::{self, SECRET};
use crate::support::session::Session;
use crate::support::wait::{WAIT_TIMEOUT, wait_for};

/// A server with a database named `shop`, and the shared broker.
pub(super) struct ExampleEnvironment {
    pub(super) server: Server,
    /// The aggregate type that replaces `order` in the examples. It must be unique, because all
    /// tests share the broker's topics.
    pub(super) aggregate: String,
    folder: PathBuf,
}

impl ExampleEnvironment {
    pub(super) fn new(settings: &str) -> Self {
        let server = Server::private(MAJOR, settings);
        server.session("postgres").run("CREATE ROLE shop LOGIN");
        server.session("postgres").run("CREATE DATABASE shop");
        let environment = Self {
            server,
            aggregate: unique_name(),
            folder: reaper::folder("readme"),
        };
        environment.install(
            "walpost",
            &format!("{} \"$@\"", env!("CARGO_BIN_EXE_walpost")),
        );
        let library = dependencies().join("kafka/lib");
        let java = format!("java -XX:TieredStopAtLevel=1 -cp '{}/*'", library.display());
        for (name, class) in [
            ("kafka-topics.sh", "TopicCommand"),
            ("kafka-console-consumer.sh", "consumer.ConsoleConsumer"),
        ] {
            let line = format!("{java} org.apache.kafka.tools.{class} \"$@\"");
            environment.install(name, &line);
        }
        environment
    }

    fn install(&self, name: &str, line: &str) {
        let path = self.folder.join(name);
        fs::write(&path, format!("#!/bin/sh\nexec {line}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(super) fn shop(&self) -> Session {
        self.server.session("shop")
    }

    /// Returns the name of the topic that receives the examples' events.
    pub(super) fn topic(&self) -> String {
        format!("outbox.event.{}", self.aggregate)
    }

    /// Returns the path that takes the place of `/etc/walpost/<name>` in the examples.
    pub(super) fn etc(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Replaces names in an example with the names that the test uses.
    pub(super) fn fill_in(&self, example: &str) -> String {
        let broker = Broker::shared();
        let (socket, port) = (self.server.socket.display(), self.server.port);
        let root = AUTHORITY.root.display().to_string();
        [
            (
                "host=/var/run/postgresql",
                format!("host={socket}&port={port}"),
            ),
            ("@db.example.com/", format!("@localhost:{port}/")),
            ("kafka1.example.com:9092", broker.address()),
            ("localhost:9092", broker.address()),
            // The test's broker does not support SASL and TLS on the same listener.
            ("kafka1.example.com:9094", broker.sasl_address()),
            ("sasl_ssl", "sasl_plaintext".to_owned()),
            ("SASL_SSL", "SASL_PLAINTEXT".to_owned()),
            ("/etc/walpost/postgres-ca.pem", root.clone()),
            ("/etc/walpost/kafka-ca.pem", root.clone()),
            ("/etc/walpost-tls/postgres.pem", root.clone()),
            ("/etc/walpost-tls/kafka.pem", root),
            ("/etc/walpost", self.folder.display().to_string()),
            ("/run/walpost", self.folder.display().to_string()),
            (
                "/usr/local/bin/walpost",
                self.folder.join("walpost").display().to_string(),
            ),
            ("outbox.event.order", self.topic()),
            ("'order'", format!("'{}'", self.aggregate)),
            // The test has only one broker, so topics can't have three replicas.
            (
                "--replication-factor 3",
                "--replication-factor 1".to_owned(),
            ),
            ("replication = 3", "replication = 1".to_owned()),
            ("min.insync.replicas=2", "min.insync.replicas=1".to_owned()),
        ]
        .iter()
        .fold(example.to_owned(), |text, (from, to)| {
            text.replace(from, to)
        })
    }

    fn command(&self, line: &str) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("bash");
        command
            .args(["-euo", "pipefail", "-c", line])
            .env_clear()
            .env("PATH", format!("{}:{path}", self.folder.display()))
            .env("HOME", reaper::scratch())
            // The port that the examples use may already be in use on this machine.
            .env("WALPOST_HTTP", "127.0.0.1:0")
            .env("PGHOST", &self.server.socket)
            .env("PGPORT", self.server.port.to_string())
            .env("PGUSER", "postgres")
            .env(
                "WALPOST_KAFKA_SASL_PASSWORD",
                crate::support::kafka::sasl_password(),
            )
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stdin(Stdio::null());
        command
    }

    /// Runs a shell example in the repository's folder, as the server's superuser.
    pub(super) fn sh(&self, example: &str) -> String {
        let example = self.fill_in(example);
        succeeded(&example, &self.command(&example).output().unwrap())
    }

    /// Like [`ExampleEnvironment::sh`], but connects as the role `walpost` with its password.
    pub(super) fn sh_as_walpost(&self, line: &str) -> String {
        let line = self.fill_in(line);
        let mut command = self.command(&line);
        command
            .env_remove("PGUSER")
            .env_remove("PGHOST")
            .env_remove("PGPORT")
            .env("PGPASSWORD", SECRET);
        succeeded(&line, &command.output().unwrap())
    }

    /// Runs an SQL example in the database `shop` with psql, and returns its output: one line per
    /// row, with columns separated by `|`.
    pub(super) fn sql(&self, example: &str) -> String {
        let (example, mut command) = self.psql(example);
        succeeded(&example, &command.output().unwrap())
    }

    /// Like [`ExampleEnvironment::sql`], but connects over TCP with TLS, as a role that has a
    /// password.
    pub(super) fn sql_as(&self, role: &str, password: &str, example: &str) -> String {
        let (example, mut command) = self.psql(example);
        command
            .env("PGHOST", "localhost")
            .env("PGSSLMODE", "require")
            .env("PGUSER", role)
            .env("PGPASSWORD", password);
        succeeded(&example, &command.output().unwrap())
    }

    fn psql(&self, example: &str) -> (String, Command) {
        let example = self.fill_in(example);
        let file = self.folder.join("example.sql");
        fs::write(&file, &example).unwrap();
        let psql = "psql -XqAt -v ON_ERROR_STOP=1 -d shop -f";
        let command = self.command(&format!("{psql} {}", file.display()));
        (example, command)
    }

    /// Writes an example to a file in the folder that takes the place of `/etc/walpost`.
    pub(super) fn write(&self, name: &str, example: &str) {
        fs::write(self.etc(name), self.fill_in(example)).unwrap();
    }

    /// Starts a command the way a service manager does.
    pub(super) fn start(&self, line: &str) -> Service {
        self.start_after("", line)
    }

    /// Like [`ExampleEnvironment::start`], but first runs shell commands that prepare the
    /// environment.
    pub(super) fn start_after(&self, lines: &str, line: &str) -> Service {
        let (log, output) = (self.folder.join("log"), self.folder.join("output"));
        let line = format!("{}\nexec {}", self.fill_in(lines), self.fill_in(line));
        let mut command = self.command(&line);
        let child = command
            .env_remove("PGUSER")
            .process_group(0)
            .stdout(fs::File::create(&output).unwrap())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        reaper::register(child.id(), Ending::Kill);
        Service { child, log, output }
    }

    /// Waits until the events' topic has at least `count` records, and returns all of them.
    pub(super) fn wait_for_records(&self, service: &mut Service, count: usize) -> Vec<Record> {
        let topics = [self.topic()];
        wait_for("the records of the examples", || {
            service.expect_running();
            (Broker::shared().count(&topics) >= count).then_some(())
        });
        Broker::shared().read(&topics)
    }
}

/// A running command, which is killed when this value is dropped.
pub(super) struct Service {
    child: Child,
    log: PathBuf,
    output: PathBuf,
}

impl Service {
    fn expect_running(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("ended with {status}:\n{}", read(&self.log));
        }
    }

    /// Waits for a log line that contains `text`, and returns it.
    pub(super) fn wait_for_log(&mut self, text: &str) -> String {
        wait_for(text, || {
            self.expect_running();
            let log = read(&self.log);
            log.lines()
                .find(|line| line.contains(text))
                .map(str::to_owned)
        })
    }

    /// Waits until the standard output contains `text`.
    pub(super) fn wait_for_output(&mut self, text: &str) {
        wait_for(text, || {
            self.expect_running();
            read(&self.output).contains(text).then_some(())
        });
    }

    /// Stops the command with SIGTERM.
    pub(super) fn stop(mut self) {
        signal(self.child.id(), "TERM");
        let status = wait_for_exit(&mut self.child, WAIT_TIMEOUT).expect("it ends");
        assert!(status.success(), "{status}:\n{}", read(&self.log));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        wait_for_exit(&mut self.child, WAIT_TIMEOUT);
        let log = read(&self.log);
        if std::thread::panicking() {
            eprintln!("--- walpost ---\n{log}");
        } else {
            secrets::expect_none(secrets::OutputStream::Error, &log);
        }
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn succeeded(what: &str, output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    let (out, err) = (String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(
        output.status.success(),
        "{}:\n{what}\n{out}{err}",
        output.status
    );
    secrets::expect_none(secrets::OutputStream::Output, &out);
    secrets::expect_none(secrets::OutputStream::Error, &err);
    out.trim().to_owned()
}
