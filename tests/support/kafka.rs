//! Real Kafka brokers: KRaft, each with a controller in the same process; alone, or the nodes of a
//! [cluster](super::cluster).

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
use super::wait::{PATIENCE, wait_for};

mod admin;
pub(crate) mod connect;
mod java;
mod nodes;
mod produce;
mod settings;
mod transactions;

pub(super) use nodes::{Ports, Seat};

use java::{ARCHIVE, JVM, java, shared_classes};
use settings::{formatted, write_settings};

/// The name of the user that the SASL listener knows.
pub(crate) const SASL_USER: &str = "walpost";

/// That user's password.
pub(crate) fn sasl_password() -> String {
    format!("{SECRET}-kafka")
}

/// A broker of its own, or the shared one. Topics are not made by themselves.
pub(crate) struct Broker {
    ports: Ports,
    seat: Seat,
    folder: PathBuf,
    jvm: Vec<String>,
    process: Mutex<Option<Child>>,
    /// Whoever takes a broker next may have it.
    is_lent: bool,
    /// Consumers of the shared broker that have nothing to do.
    pub(super) readers: Mutex<Vec<BaseConsumer>>,
}

/// A broker that is alone is not to be missed by its own controller when both were frozen for long, or when the machine is busy.
const NEVER_MISSED: &str = "broker.session.timeout.ms=3600000\n";

/// Brokers that were given back, frozen: one that has nothing to do takes 2 % of a processor.
static GIVEN_BACK: Mutex<Vec<Broker>> = Mutex::new(Vec::new());

impl Broker {
    /// The broker that tests share; it is never stopped. It alone has listeners for TLS.
    pub(crate) fn shared() -> &'static Broker {
        static SHARED: LazyLock<Broker> = LazyLock::new(|| {
            let alone = Seat::of(0, vec![Ports::free()]).with_tls();
            let broker = Broker::prepared(alone, &JVM, None, NEVER_MISSED);
            broker.start();
            broker
        });
        &SHARED
    }

    /// A broker that a test may stop and break; it goes when dropped.
    pub(crate) fn private() -> Broker {
        Self::with(&JVM, "")
    }

    /// A broker that a test may stop, freeze and cut off. Another test gets it then, as a start takes seconds of a processor.
    /// What a test changes for good, or kills, needs [`Broker::private`].
    pub(crate) fn lent() -> Broker {
        if let Some(broker) = GIVEN_BACK.lock().unwrap().pop() {
            broker.thaw();
            return broker;
        }
        let mut broker = Self::with(&JVM, NEVER_MISSED);
        broker.is_lent = true;
        broker
    }

    /// A private broker that asks for rights. Who comes without security may do all, and
    /// [`SASL_USER`] what was granted.
    pub(crate) fn with_rights() -> Broker {
        let authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer";
        let settings = format!(
            "authorizer.class.name={authorizer}\nsuper.users=User:ANONYMOUS\n{NEVER_MISSED}"
        );
        Self::with(&JVM, &settings)
    }

    /// A private broker with other options of the Java virtual machine.
    pub(crate) fn with_jvm(options: &[&str]) -> Broker {
        Self::with(options, "")
    }

    fn with(options: &[&str], settings: &str) -> Broker {
        let broker = Self::prepared(Seat::of(0, vec![Ports::free()]), options, None, settings);
        broker.start();
        broker
    }

    /// A private broker that has its data on the disk.
    pub(crate) fn on_disk(disk: &Disk) -> Broker {
        let alone = Seat::of(0, vec![Ports::free()]);
        let broker = Self::prepared(alone, &JVM, Some(disk), "");
        broker.start();
        broker
    }

    /// A node that is not started yet.
    pub(super) fn prepared(
        seat: Seat,
        options: &[&str],
        disk: Option<&Disk>,
        settings: &str,
    ) -> Broker {
        let folder = reaper::folder("kafka");
        let data = folder.join("data");
        match disk {
            None => copy_owned(&formatted(), &data),
            Some(disk) => {
                let there = disk.path().join("kafka");
                copy_owned(&formatted(), &there);
                symlink(there, &data).unwrap();
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
        // An id of a folder is 16 bytes in URL-safe base64.
        let (id, directory) = (seat.id(), format!("AAAAAAAAAAAAAAAAAAA{}A", 10 + seat.id()));
        properties.push_str(&format!("node.id={id}\ndirectory.id={directory}\n"));
        fs::write(&identity, properties).unwrap();
        write_settings(&folder, &seat, settings);
        Broker {
            ports: seat.nodes[seat.index],
            seat,
            folder,
            jvm: options.iter().map(|&option| option.to_owned()).collect(),
            process: Mutex::new(None),
            is_lent: false,
            readers: Mutex::default(),
        }
    }

    /// It is never stopped.
    pub(super) fn is_shared(&self) -> bool {
        self.seat.has_tls
    }

    /// `node.id`
    pub(crate) fn id(&self) -> i32 {
        self.seat.id()
    }

    /// `bootstrap.servers` of the listener without security, with all nodes of the cluster.
    pub(crate) fn address(&self) -> String {
        let nodes = self.seat.nodes.iter();
        let nodes = nodes.map(|ports| format!("127.0.0.1:{}", ports.plain));
        nodes.collect::<Vec<_>>().join(",")
    }

    /// The listener for SASL without TLS; PLAIN and SCRAM-SHA-256.
    pub(crate) fn sasl_address(&self) -> String {
        format!("127.0.0.1:{}", self.ports.sasl)
    }

    /// The listener for SASL without TLS that takes tokens which nobody has signed.
    pub(crate) fn unsecured_address(&self) -> String {
        format!("localhost:{}", self.ports.unsecured)
    }

    /// The listener for TLS, with a certificate for `localhost`.
    pub(crate) fn tls_address(&self) -> String {
        format!("localhost:{}", self.ports.tls)
    }

    /// A proxy to the broker. Whoever asks there is sent to no other address of it.
    pub(crate) fn proxy(&self) -> Proxy {
        Proxy::start(self.ports.proxy, self.ports.proxied)
    }

    /// Listeners for TLS whose certificates are valid no more, and not yet.
    pub(crate) fn untimely_addresses(&self) -> [String; 2] {
        [self.ports.expired, self.ports.early].map(|port| format!("localhost:{port}"))
    }

    /// Runs one of the command-line tools, with the address in front of its arguments, and returns
    /// what it prints.
    pub(crate) fn tool(&self, class: &str, arguments: &[&str]) -> String {
        let output = java(&self.folder, &JVM)
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

    /// Starts the broker, and returns when it answers.
    pub(crate) fn start(&self) {
        self.begin_start();
        self.wait_until_up();
    }

    /// Starts the broker, and returns at once.
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
        if !self.jvm.iter().any(|option| option.starts_with(ARCHIVE)) {
            command.arg(shared_classes());
        }
        if self.is_shared() {
            // Else a broker reads no keys.
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

    /// Waits until the broker is one of its cluster.
    pub(super) fn wait_until_up(&self) {
        let mut config = self.client();
        config.set(
            "bootstrap.servers",
            format!("127.0.0.1:{}", self.ports.plain),
        );
        let client: BaseConsumer = config.create().unwrap();
        wait_for("Kafka to answer", || {
            if let Some(status) = self
                .process
                .lock()
                .unwrap()
                .as_mut()
                .unwrap()
                .try_wait()
                .unwrap()
            {
                panic!("Kafka ended with {status}:\n{}", self.log());
            }
            let metadata = client.fetch_metadata(None, Duration::from_secs(2)).ok()?;
            let known = metadata.brokers().iter();
            known
                .map(|broker| broker.id())
                .any(|id| id == self.id())
                .then_some(())
        });
    }

    /// Whether its process is there, frozen or not.
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

    /// Ends the broker without a word, which can lose the end of a transaction.
    pub(crate) fn kill(&self) {
        assert!(
            !self.is_lent,
            "its next start would wait for its session to end"
        );
        let mut process = self.process.lock().unwrap();
        let mut child = process.take().expect("a running broker");
        signal(child.id(), "KILL");
        wait_for_exit(&mut child, PATIENCE).expect("a killed process ends");
    }

    /// Stops the broker in an orderly way.
    pub(crate) fn stop(&self) {
        let mut process = self.process.lock().unwrap();
        let mut child = process.take().expect("a running broker");
        signal(child.id(), "TERM");
        if wait_for_exit(&mut child, PATIENCE).is_none() {
            *process = Some(child);
            drop(process);
            panic!("Kafka does not stop:\n{}", self.log());
        }
    }

    /// Stops the broker, and starts another cluster without topics at its address.
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

    /// Freezes the broker: connections stay, answers do not come.
    pub(crate) fn freeze(&self) {
        freeze(self.process_id());
    }

    /// Goes on after [`Broker::freeze`].
    pub(crate) fn thaw(&self) {
        thaw(self.process_id());
    }

    /// The number of the broker's process.
    pub(crate) fn process_id(&self) -> u32 {
        self.process
            .lock()
            .unwrap()
            .as_ref()
            .expect("a running broker")
            .id()
    }

    /// A client of the listener without security.
    pub(crate) fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.address());
        // Tests wait for brokers that were just started.
        config.set("reconnect.backoff.max.ms", "200");
        config
    }

    /// The folder that holds a folder for each partition.
    pub(crate) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// What the broker has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        self.folder.join("log")
    }
}

impl Broker {
    /// The same broker for another test, where this one's has left it as it was.
    fn give_back(&mut self) -> Option<Broker> {
        let is_whole = self.is_lent && !std::thread::panicking() && self.is_running();
        is_whole.then(|| {
            self.freeze();
            Broker {
                ports: self.ports,
                seat: self.seat.clone(),
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
        if let Some(broker) = self.give_back() {
            GIVEN_BACK.lock().unwrap().push(broker);
            return;
        }
        let process = self
            .process
            .get_mut()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(mut child) = process.take() {
            let _ = child.kill();
            wait_for_exit(&mut child, PATIENCE);
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}
