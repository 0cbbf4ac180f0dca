//! Real Kafka brokers. Each one runs in KRaft mode with a controller in the same process, either
//! alone or as a node of a [cluster](super::cluster).

use std::fs::{self, File};
use std::mem;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};

use super::disk::Disk;
use super::postgres::copy_owned;
use super::process::{freeze, signal, thaw, wait_for_exit};
use super::proxy::Proxy;
use super::reaper::{self, Ending};
use super::secrets::SECRET;
use super::tokens::KEYS;
use super::wait::{WAIT_TIMEOUT, wait_for};

mod admin;
pub(crate) mod connect;
mod headers;
mod java;
mod nodes;
mod produce;
mod settings;
mod transactions;

pub(super) use nodes::{NodePosition, Ports};

use java::{ARCHIVE_OPTION, JVM_OPTIONS, java, shared_classes};
use settings::{formatted, write_settings};

/// The user whose password the SASL listener accepts.
pub(crate) const SASL_USER: &str = "walpost";

/// Returns the password of [`SASL_USER`].
pub(crate) fn sasl_password() -> String {
    format!("{SECRET}-kafka")
}

/// A broker that is either private to a test or shared by several tests. It does not create topics
/// automatically.
pub(crate) struct Broker {
    ports: Ports,
    position: NodePosition,
    folder: PathBuf,
    jvm: Vec<String>,
    process: Mutex<Option<Child>>,
    /// Whether to keep the broker for another test instead of removing it when it is dropped.
    is_lent: bool,
    /// Idle consumers that can be reused. Only the shared broker keeps consumers.
    pub(super) readers: Mutex<Vec<BaseConsumer>>,
}

/// A long session timeout. Otherwise, a broker's controller could fence the broker after both have
/// been frozen, or when the machine is busy.
const LONG_BROKER_SESSION: &str = "broker.session.timeout.ms=3600000\n";

/// Brokers that are kept for other tests. They are frozen, because even an idle broker uses 2% of a
/// CPU.
static RETURNED_BROKERS: Mutex<Vec<Broker>> = Mutex::new(Vec::new());

impl Broker {
    /// Returns the broker that all tests share. It is never stopped, and is the only one with TLS
    /// listeners.
    pub(crate) fn shared() -> &'static Broker {
        static SHARED: LazyLock<Broker> = LazyLock::new(|| {
            let alone = NodePosition::new(0, vec![Ports::free()]).with_tls();
            let broker = Broker::prepared(alone, &JVM_OPTIONS, None, LONG_BROKER_SESSION);
            broker.start();
            broker
        });
        &SHARED
    }

    /// Starts a broker that a test may stop or break. It is removed when dropped.
    pub(crate) fn private() -> Broker {
        Self::with(&JVM_OPTIONS, "")
    }

    /// Returns a broker that a test may stop, freeze or disconnect. Because starting a broker takes
    /// seconds of CPU time, other tests reuse it afterwards. A test that kills the broker or
    /// changes it permanently needs [`Broker::private`] instead.
    pub(crate) fn borrowed() -> Broker {
        if let Some(broker) = RETURNED_BROKERS.lock().unwrap().pop() {
            broker.thaw();
            return broker;
        }
        let mut broker = Self::with(&JVM_OPTIONS, LONG_BROKER_SESSION);
        broker.is_lent = true;
        broker
    }

    /// Starts a private broker that checks permissions. On the listener without security, clients
    /// may do anything. [`SASL_USER`] has only the permissions that a test grants.
    pub(crate) fn with_rights() -> Broker {
        let authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer";
        let settings = format!(
            "authorizer.class.name={authorizer}\nsuper.users=User:ANONYMOUS\n{LONG_BROKER_SESSION}"
        );
        Self::with(&JVM_OPTIONS, &settings)
    }

    /// Starts a private broker with the given options for its Java virtual machine.
    pub(crate) fn with_jvm(options: &[&str]) -> Broker {
        Self::with(options, "")
    }

    fn with(options: &[&str], settings: &str) -> Broker {
        let broker = Self::prepared(
            NodePosition::new(0, vec![Ports::free()]),
            options,
            None,
            settings,
        );
        broker.start();
        broker
    }

    /// Starts a private broker that stores its data on `disk`.
    pub(crate) fn on_disk(disk: &Disk) -> Broker {
        let alone = NodePosition::new(0, vec![Ports::free()]);
        let broker = Self::prepared(alone, &JVM_OPTIONS, Some(disk), "");
        broker.start();
        broker
    }

    /// Creates a broker of a cluster without starting it.
    pub(super) fn prepared(
        position: NodePosition,
        options: &[&str],
        disk: Option<&Disk>,
        settings: &str,
    ) -> Broker {
        let folder = reaper::folder("kafka");
        let data = folder.join("data");
        match disk {
            None => copy_owned(&formatted(), &data),
            Some(disk) => {
                let target = disk.path().join("kafka");
                copy_owned(&formatted(), &target);
                symlink(target, &data).unwrap();
            }
        }
        let identity = data.join("meta.properties");
        let mut properties = fs::read_to_string(&identity).unwrap();
        for name in ["node.id=", "directory.id="] {
            properties = properties
                .lines()
                .filter(|line| !line.starts_with(name))
                .fold(String::new(), |text, line| text + line + "\n");
        }
        // A directory ID consists of 16 bytes, encoded in URL-safe base64.
        let (id, directory) = (
            position.id(),
            format!("AAAAAAAAAAAAAAAAAAA{}A", 10 + position.id()),
        );
        properties.push_str(&format!("node.id={id}\ndirectory.id={directory}\n"));
        fs::write(&identity, properties).unwrap();
        write_settings(&folder, &position, settings);
        Broker {
            ports: position.nodes[position.index],
            position,
            folder,
            jvm: options.iter().map(|&option| option.to_owned()).collect(),
            process: Mutex::new(None),
            is_lent: false,
            readers: Mutex::default(),
        }
    }

    /// Returns whether this is the shared broker, which is never stopped.
    pub(super) fn is_shared(&self) -> bool {
        self.position.has_tls
    }

    /// Returns the `node.id`.
    pub(crate) fn id(&self) -> i32 {
        self.position.id()
    }

    /// Returns the `bootstrap.servers` for the listeners without security on all nodes of the
    /// cluster.
    pub(crate) fn address(&self) -> String {
        let nodes = self.position.nodes.iter();
        let nodes = nodes.map(|ports| format!("127.0.0.1:{}", ports.plain));
        nodes.collect::<Vec<_>>().join(",")
    }

    /// Returns the address of the SASL listener, which accepts PLAIN and SCRAM-SHA-256 without TLS.
    pub(crate) fn sasl_address(&self) -> String {
        format!("127.0.0.1:{}", self.ports.sasl)
    }

    /// Returns the address of the listener for SASL without TLS that accepts unsigned tokens.
    pub(crate) fn unsecured_address(&self) -> String {
        format!("localhost:{}", self.ports.unsecured)
    }

    /// Returns the address of the TLS listener, whose certificate is for `localhost`.
    pub(crate) fn tls_address(&self) -> String {
        format!("localhost:{}", self.ports.tls)
    }

    /// Starts a proxy to the broker. Clients of the proxy find only the proxy's address in the
    /// broker's metadata, so all their connections use the proxy.
    pub(crate) fn proxy(&self) -> Proxy {
        Proxy::start(self.ports.proxy, self.ports.proxied)
    }

    /// Returns the addresses of two TLS listeners with invalid certificates: one has expired, and
    /// the other is not yet valid.
    pub(crate) fn invalid_certificate_addresses(&self) -> [String; 2] {
        [self.ports.expired, self.ports.early].map(|port| format!("localhost:{port}"))
    }

    /// Runs one of Kafka's command-line tools, and returns its output. The broker's address is
    /// passed before the arguments.
    pub(crate) fn tool(&self, class: &str, arguments: &[&str]) -> String {
        let output = java(&self.folder, &JVM_OPTIONS)
            .arg(shared_classes())
            .args([class, "--bootstrap-server", &self.address()])
            .args(arguments)
            .output()
            .expect("java starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {out}{err}");
        out
    }

    /// Starts the broker and waits until it responds.
    pub(crate) fn start(&self) {
        self.begin_start();
        self.wait_until_up();
    }

    /// Starts the broker without waiting until it responds.
    pub(super) fn begin_start(&self) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_file())
            .unwrap();
        let mut command = java(
            &self.folder,
            &self.jvm.iter().map(String::as_str).collect::<Vec<_>>(),
        );
        if !self
            .jvm
            .iter()
            .any(|option| option.starts_with(ARCHIVE_OPTION))
        {
            command.arg(shared_classes());
        }
        if self.is_shared() {
            // A broker reads the keys for verifying tokens only from URLs that are listed in a
            // system property.
            let keys = format!("file://{}", KEYS.display());
            command.arg(format!(
                "-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys}"
            ));
        }
        command
            .arg("kafka.Kafka")
            .arg(self.folder.join("server.properties"));
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = command.spawn().expect("java starts");
        reaper::register(child.id(), Ending::Kill);
        *self.process.lock().unwrap() = Some(child);
    }

    /// Waits until the broker has joined its cluster.
    pub(super) fn wait_until_up(&self) {
        let mut config = self.client();
        config.set(
            "bootstrap.servers",
            format!("127.0.0.1:{}", self.ports.plain),
        );
        let client: BaseConsumer = config.create().unwrap();
        wait_for("Kafka to respond", || {
            if let Some(status) = self
                .process
                .lock()
                .unwrap()
                .as_mut()
                .unwrap()
                .try_wait()
                .unwrap()
            {
                panic!("Kafka exited with {status}:\n{}", self.log());
            }
            let metadata = client.fetch_metadata(None, Duration::from_secs(2)).ok()?;
            let known = metadata.brokers().iter();
            known
                .map(|broker| broker.id())
                .any(|id| id == self.id())
                .then_some(())
        });
    }

    /// Returns whether the broker's process exists, even if it is frozen.
    pub(crate) fn is_running(&self) -> bool {
        let mut process = self.process.lock().unwrap();
        let Some(child) = process.as_mut() else {
            return false;
        };
        let ended = wait_for_exit(child, Duration::ZERO).is_some();
        if ended {
            *process = None;
        }
        !ended
    }

    /// Kills the broker without a shutdown, so it may lose a transaction marker.
    pub(crate) fn kill(&self) {
        assert!(
            !self.is_lent,
            "a killed broker that is restarted would wait until its session ends"
        );
        let mut process = self.process.lock().unwrap();
        let mut child = process.take().expect("a running broker");
        signal(child.id(), "KILL");
        wait_for_exit(&mut child, WAIT_TIMEOUT).expect("a killed process ends");
    }

    /// Shuts the broker down cleanly.
    pub(crate) fn stop(&self) {
        let mut process = self.process.lock().unwrap();
        let mut child = process.take().expect("a running broker");
        signal(child.id(), "TERM");
        if wait_for_exit(&mut child, WAIT_TIMEOUT).is_none() {
            *process = Some(child);
            drop(process);
            panic!("Kafka does not stop:\n{}", self.log());
        }
    }

    /// Stops the broker, and starts a different cluster, which has no topics, at the same address.
    pub(crate) fn replace_cluster(&self) {
        self.stop();
        let identity = self.data().join("meta.properties");
        let before = fs::read_to_string(&identity).unwrap();
        fs::remove_dir_all(self.data()).unwrap();
        copy_owned(&formatted(), &self.data());
        let other = |line: &str| match line.starts_with("cluster.id=") {
            true => "cluster.id=BBBBBBBBBBBBBBBBBBBBBg\n".to_owned(),
            false => format!("{line}\n"),
        };
        let now: String = before.lines().map(other).collect();
        assert_ne!(now, before);
        fs::write(&identity, now).unwrap();
        self.start();
    }

    /// Suspends the broker. Its connections stay open, but it does not respond.
    pub(crate) fn freeze(&self) {
        freeze(self.process_id());
    }

    /// Resumes the broker after [`Broker::freeze`].
    pub(crate) fn thaw(&self) {
        thaw(self.process_id());
    }

    /// Returns the process ID of the broker.
    pub(crate) fn process_id(&self) -> u32 {
        self.process
            .lock()
            .unwrap()
            .as_ref()
            .expect("a running broker")
            .id()
    }

    /// Returns a client configuration for the listener without security.
    pub(crate) fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.address());
        // Reconnect quickly, because tests often wait for a broker that has just started.
        config.set("reconnect.backoff.max.ms", "200");
        config
    }

    /// Returns the data directory, in which each partition has its own directory.
    pub(crate) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// Returns the broker's log.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        self.folder.join("log")
    }
}

impl Broker {
    /// If this test has passed and the broker is running, moves the broker out of `self`, so that
    /// another test can use it.
    fn return_broker(&mut self) -> Option<Broker> {
        let is_reusable = self.is_lent && !std::thread::panicking() && self.is_running();
        is_reusable.then(|| {
            self.freeze();
            Broker {
                ports: self.ports,
                position: self.position.clone(),
                folder: mem::take(&mut self.folder),
                jvm: mem::take(&mut self.jvm),
                process: Mutex::new(self.process.get_mut().unwrap().take()),
                is_lent: true,
                readers: Mutex::default(),
            }
        })
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Some(broker) = self.return_broker() {
            RETURNED_BROKERS.lock().unwrap().push(broker);
            return;
        }
        let process = self
            .process
            .get_mut()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(mut child) = process.take() {
            let _ = child.kill();
            wait_for_exit(&mut child, WAIT_TIMEOUT);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}
