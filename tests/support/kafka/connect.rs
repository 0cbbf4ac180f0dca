//! A Kafka Connect worker that runs Debezium connectors.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use super::super::http::Http;
use super::super::postgres::dependencies;
use super::super::process::{free_port, wait_for_exit};
use super::super::reaper::{self, Ending};
use super::super::wait::WAIT_TIMEOUT;
use super::Broker;
use super::java::{JVM_OPTIONS, java};
use super::settings::write_logging;

/// A standalone worker. Dropping it kills the process and, if the test has failed, prints its log.
pub(crate) struct Connect {
    child: Child,
    folder: PathBuf,
    http: Http,
}

impl Connect {
    /// Starts a worker without waiting until it responds. Each connector consists of a name and a
    /// configuration.
    pub(crate) fn start(broker: &Broker, connectors: &[(String, Value)]) -> Self {
        let debezium = dependencies().join("debezium");
        assert!(
            debezium.is_dir(),
            "Debezium is not in {}: run ./dev debezium",
            debezium.display()
        );
        let folder = reaper::folder("connect");
        write_logging(&folder);
        let port = free_port();
        let worker = format!(
            "bootstrap.servers={}\nlisteners=http://127.0.0.1:{port}\nplugin.path={}\nplugin.discovery=service_load\n\
             offset.storage.file.filename={}\noffset.flush.interval.ms=500\n\
             key.converter=org.apache.kafka.connect.storage.StringConverter\n\
             value.converter=org.apache.kafka.connect.storage.StringConverter\n",
            broker.address(),
            debezium.display(),
            folder.join("offsets").display(),
        );
        fs::write(folder.join("worker.properties"), worker).unwrap();
        let log = File::create(folder.join("log")).unwrap();
        let mut command = java(&folder, &JVM_OPTIONS);
        command
            .arg("org.apache.kafka.connect.cli.ConnectStandalone")
            .arg(folder.join("worker.properties"));
        for (name, config) in connectors {
            let file = folder.join(format!("{name}.json"));
            fs::write(&file, json!({ "name": name, "config": config }).to_string()).unwrap();
            command.arg(file);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("java starts");
        reaper::register(child.id(), Ending::Kill);
        let http = Http::at(&format!("127.0.0.1:{port}"));
        Self {
            child,
            folder,
            http,
        }
    }

    /// Returns a client for the worker's REST API.
    pub(crate) fn http(&self) -> &Http {
        &self.http
    }

    /// Returns the path of the worker's properties file.
    pub(crate) fn worker_file(&self) -> PathBuf {
        self.folder.join("worker.properties")
    }

    /// Returns the path of a connector's configuration file.
    pub(crate) fn connector_file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.json"))
    }
}

impl Drop for Connect {
    fn drop(&mut self) {
        let _ = self.child.kill();
        wait_for_exit(&mut self.child, WAIT_TIMEOUT);
        if std::thread::panicking() {
            let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            eprintln!("--- Kafka Connect ---\n{log}");
        }
    }
}
