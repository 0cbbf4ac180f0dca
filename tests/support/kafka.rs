//! Real Kafka brokers: KRaft, each with a controller in the same process; alone, or the nodes of a
//! [cluster](super::cluster).

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, OnceLock};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier,
    TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::types::RDKafkaErrorCode;
use tokio::runtime::Builder;

use super::certificates::Validity;
use super::disk::Disk;
use super::postgres::{AUTHORITY, copy_owned, dependencies};
use super::process::{free_port, freeze, signal, thaw, wait_for_exit};
use super::proxy::Proxy;
use super::reaper::{self, Ending};
use super::secrets::SECRET;
use super::wait::{PATIENCE, wait_for, wait_until};

/// For tests: a small heap, and no second compiler that competes for two cores.
pub(super) const JVM: [&str; 3] = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];

const LOGGING: &str = "
status=WARN
appender.c.type=Console
appender.c.name=C
appender.c.layout.type=PatternLayout
appender.c.layout.pattern=[%d] %p %m (%c)%n
rootLogger.level=WARN
rootLogger.appenderRef.c.ref=C
logger.t.name=kafka.coordinator.transaction
logger.t.level=INFO
";

/// The name of the user that the SASL listener knows.
pub(crate) const SASL_USER: &str = "walpost";

/// That user's password.
pub(crate) fn sasl_password() -> String {
    format!("{SECRET}-kafka")
}

/// Of a call that is made again where a frozen broker did not answer it.
fn again_soon() -> AdminOptions {
    const WITHIN: Option<Duration> = Some(Duration::from_secs(20));
    AdminOptions::new()
        .operation_timeout(WITHIN)
        .request_timeout(WITHIN)
}

/// A broker of its own, or the shared one. Topics are not made by themselves.
pub(crate) struct Broker {
    ports: Ports,
    seat: Seat,
    folder: PathBuf,
    jvm: Vec<String>,
    process: Mutex<Option<Child>>,
}

#[derive(Clone, Copy)]
pub(super) struct Ports {
    plain: u16,
    sasl: u16,
    tls: u16,
    /// A listener that is advertised as `proxy`, which is where a proxy to it listens.
    proxied: u16,
    proxy: u16,
    expired: u16,
    early: u16,
    controller: u16,
}

impl Ports {
    pub(super) fn free() -> Self {
        Self {
            plain: free_port(),
            sasl: free_port(),
            tls: free_port(),
            proxied: free_port(),
            proxy: free_port(),
            expired: free_port(),
            early: free_port(),
            controller: free_port(),
        }
    }
}

/// One node's place among the nodes of its cluster.
#[derive(Clone)]
pub(super) struct Seat {
    /// Which one it is, from 0.
    index: usize,
    /// The ports of all.
    nodes: Vec<Ports>,
}

impl Seat {
    pub(super) fn of(index: usize, nodes: Vec<Ports>) -> Self {
        Self { index, nodes }
    }

    /// `node.id`
    fn id(&self) -> i32 {
        i32::try_from(self.index + 1).unwrap()
    }

    fn voters(&self) -> String {
        let voters = self.nodes.iter().zip(1..);
        let voters = voters.map(|(ports, id)| format!("{id}@127.0.0.1:{}", ports.controller));
        voters.collect::<Vec<_>>().join(",")
    }
}

impl Broker {
    /// The broker that tests share; it is never stopped.
    pub(crate) fn shared() -> &'static Broker {
        static SHARED: LazyLock<Broker> = LazyLock::new(Broker::private);
        &SHARED
    }

    /// A broker that a test may stop and break; it goes when dropped.
    pub(crate) fn private() -> Broker {
        Self::with(&JVM, "")
    }

    /// A private broker that asks for rights. Who comes without security may do all, and
    /// [`SASL_USER`] what was granted.
    pub(crate) fn with_rights() -> Broker {
        let authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer";
        let settings = format!("authorizer.class.name={authorizer}\nsuper.users=User:ANONYMOUS\n");
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
        }
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

    /// Ends the broker without a word.
    pub(crate) fn kill(&self) {
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

    /// Makes a topic. `settings` are topic configurations.
    pub(crate) fn create_topic(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
        let mut topic = NewTopic::new(name, partitions, self.replication());
        for (key, value) in settings {
            topic = topic.set(key, value);
        }
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let options = again_soon();
        let made = wait_for("the broker to make a topic", || {
            let made = runtime.block_on(admin.create_topics([&topic], &options));
            // The controller fences a broker whose heartbeats are late, as on a busy machine.
            made.ok().filter(|made| {
                let too_few = RDKafkaErrorCode::InvalidReplicationFactor;
                !matches!(&made[0], Err((_, code)) if *code == too_few)
            })
        });
        match &made[0] {
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((name, code)) => panic!("could not create the topic {name}: {code}"),
        }
        let client: BaseConsumer = self.client().create().unwrap();
        wait_for("the topic to have leaders", || {
            let metadata = client
                .fetch_metadata(Some(name), Duration::from_secs(5))
                .ok()?;
            let found = metadata.topics()[0].partitions();
            let ready = found.len() == usize::try_from(partitions).unwrap()
                && found
                    .iter()
                    .all(|partition| partition.error().is_none() && partition.leader() >= 0);
            ready.then_some(())
        });
    }

    /// On every node.
    fn replication(&self) -> TopicReplication<'static> {
        TopicReplication::Fixed(i32::try_from(self.seat.nodes.len()).unwrap())
    }

    /// Adds partitions to a topic.
    pub(crate) fn add_partitions(&self, topic: &str, total: usize) {
        let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let options = again_soon();
        let wanted = NewPartitions::new(topic, total);
        // A broker that was frozen can have made them though nobody heard its answer.
        wait_for("the partitions to be made", || {
            let asked = admin.create_partitions([&wanted], &options);
            let made = runtime.block_on(asked).ok()?;
            (made[0].is_ok() || self.partitions(topic) == total).then_some(())
        });
        wait_for("the partitions to be known", || {
            (self.partitions(topic) == total).then_some(())
        });
    }

    /// Aborts the transactions that are open in the topics, in their order, as kafka-transactions.sh does.
    pub(crate) fn abort_open_transactions(&self, topics: &[String]) {
        let transactions = |arguments: &[&str]| {
            let output = java(&self.folder, &JVM)
                .arg("org.apache.kafka.tools.TransactionsCommand")
                .args(["--bootstrap-server", &self.address()])
                .args(arguments)
                .output()
                .expect("java starts");
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{arguments:?}: {said}");
            said
        };
        for topic in topics {
            for partition in 0..self.partitions(topic) {
                let place = ["--topic", topic, "--partition", &partition.to_string()];
                let producers = transactions(&[&["describe-producers"], &place[..]].concat());
                let columns = producers.lines().map(str::split_whitespace);
                // That of a producer without an open one is None.
                let open = columns
                    .filter_map(|mut line| line.next_back())
                    .filter(|start| start.parse::<u64>().is_ok());
                for start in open {
                    let of_it = ["--start-offset", start];
                    transactions(&[&["abort"], &place[..], &of_it].concat());
                }
            }
        }
    }

    /// Waits until every transaction that there is by now in partition 0 of a topic has its end. A broker
    /// acknowledges a commit before that, and one that is killed meanwhile may lose it: see
    /// [`Broker::has_lost_an_end`].
    pub(crate) fn wait_for_ends(&self, topic: &str) {
        let end = |isolation: &str| -> i64 {
            let mut config = self.client();
            config.set("isolation.level", isolation);
            let client: BaseConsumer = config.create().unwrap();
            client.fetch_watermarks(topic, 0, PATIENCE).unwrap().1
        };
        let written = end("read_uncommitted");
        wait_until("the transactions to have ended", || {
            end("read_committed") >= written
        });
    }

    /// Whether the broker has lost the end of a transaction: Kafka 4.3 takes partitions that have no leader, while
    /// the coordinator of transactions starts, for deleted, and writes no end of a transaction into them: it stays
    /// open there for ever (KAFKA-20734).
    pub(crate) fn has_lost_an_end(&self) -> bool {
        self.log().lines().any(|line| {
            line.contains("transaction markers for")
                && line.contains("these partitions are likely deleted")
        })
    }

    /// Has a broker that is killed in the middle of transactions judged by `test`, and by another broker where
    /// that one has lost the end of one, as nothing can be said of Walpost then.
    pub(crate) fn with_ends(test: impl Fn(&Broker)) {
        for _ in 0..3 {
            let broker = Self::private();
            let outcome = catch_unwind(AssertUnwindSafe(|| test(&broker)));
            match outcome {
                Ok(()) => return,
                Err(_) if broker.has_lost_an_end() => {}
                Err(reason) => resume_unwind(reason),
            }
        }
        panic!("three brokers have lost the end of a transaction");
    }

    /// Sets `max.message.bytes` of a topic that has no other setting of its own.
    pub(crate) fn limit_batches(&self, topic: &str, bytes: &str) {
        const SETTING: &str = "max.message.bytes";
        let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let options = AdminOptions::new().request_timeout(Some(PATIENCE));
        let of_topic = ResourceSpecifier::Topic(topic);
        let wanted = AlterConfig::new(of_topic).set(SETTING, bytes);
        let set = runtime
            .block_on(admin.alter_configs([&wanted], &options))
            .expect("the broker answers");
        set[0].as_ref().expect("a limit");
        wait_for("the limit to be known", || {
            let asked = admin.describe_configs([&of_topic], &options);
            let found = runtime.block_on(asked).expect("the broker answers");
            let setting = found[0].as_ref().ok()?.get(SETTING)?;
            (setting.value.as_deref() == Some(bytes)).then_some(())
        });
    }

    /// Puts a record into the first partition of a topic.
    pub(crate) fn produce(&self, topic: &str, key: &str, payload: &str) {
        let producer: BaseProducer = self.client().create().unwrap();
        let record = BaseRecord::to(topic).partition(0).key(key).payload(payload);
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(PATIENCE).expect("the broker takes it");
    }

    /// Puts so many records with the same key into the first partition of a topic.
    pub(crate) fn produce_many(&self, topic: &str, key: &str, count: usize) {
        let producer: BaseProducer = self.client().create().unwrap();
        for _ in 0..count {
            let record = BaseRecord::to(topic).partition(0).key(key).payload("");
            producer.send(record).map_err(|(error, _)| error).unwrap();
        }
        producer.flush(PATIENCE).expect("the broker takes them");
    }

    /// Puts a record into the first partition of a topic, in a transaction that nobody ends before
    /// the broker does.
    pub(crate) fn open_transaction(&self, topic: &str, key: &str, lasts: Duration) {
        let mut config = self.client();
        config
            .set("transactional.id", key)
            .set("transaction.timeout.ms", lasts.as_millis().to_string());
        let producer: BaseProducer = config.create().unwrap();
        producer.init_transactions(PATIENCE).unwrap();
        producer.begin_transaction().unwrap();
        let record = BaseRecord::to(topic).partition(0).key(key).payload("");
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(PATIENCE).expect("the broker takes it");
        // To drop it is to end the transaction.
        std::mem::forget(producer);
    }

    /// Number of partitions of a topic. Of one that was just made the broker hears a moment later.
    pub(crate) fn partitions(&self, topic: &str) -> usize {
        let client: BaseConsumer = self.client().create().unwrap();
        wait_for("the topic to be known", || {
            let metadata = client
                .fetch_metadata(Some(topic), Duration::from_secs(5))
                .ok()?;
            let partitions = metadata.topics()[0].partitions().len();
            (partitions > 0).then_some(partitions)
        })
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

impl Drop for Broker {
    fn drop(&mut self) {
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

/// A formatted data folder, to be copied: formatting starts a Java virtual machine.
fn formatted() -> PathBuf {
    static FORMATTED: OnceLock<PathBuf> = OnceLock::new();
    FORMATTED
        .get_or_init(|| {
            let folder = reaper::folder("formatted");
            write_settings(&folder, &Seat::of(0, vec![Ports::free()]), "");
            let scram = format!(
                "SCRAM-SHA-256=[name={SASL_USER},password={}]",
                sasl_password()
            );
            let output = java(&folder, &JVM)
                .args([
                    "kafka.tools.StorageTool",
                    "format",
                    "-t",
                    "AAAAAAAAAAAAAAAAAAAAAQ",
                ])
                .args(["--add-scram", &scram, "-c"])
                .arg(folder.join("server.properties"))
                .output()
                .expect("java starts");
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            folder.join("data")
        })
        .clone()
}

/// The option of a Java virtual machine that notes the classes it has loaded when it ends.
const ARCHIVE: &str = "-XX:ArchiveClassesAtExit=";

/// The option for the classes of a broker that ran before: with it a start takes little more than half
/// of the processor's time. Another version of Java does without.
fn shared_classes() -> String {
    static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
        let kafka = dependencies().join("kafka");
        let file = kafka.join("classes.jsa");
        if !file.exists() {
            let unfinished = kafka.join(format!("classes.{}", std::process::id()));
            let option = format!("{ARCHIVE}{}", unfinished.display());
            let broker = Broker::with(&[&JVM[..], &[&option]].concat(), "");
            broker.stop();
            fs::rename(unfinished, &file).expect("the classes of a broker");
        }
        file
    });
    format!("-XX:SharedArchiveFile={}", FILE.display())
}

fn write_settings(folder: &Path, seat: &Seat, settings: &str) {
    let Ports {
        plain,
        sasl,
        tls,
        proxied,
        proxy,
        expired,
        early,
        controller,
    } = seat.nodes[seat.index];
    let (id, voters, nodes) = (seat.id(), seat.voters(), seat.nodes.len());
    let in_sync = nodes.div_ceil(2);
    let data = folder.join("data");
    let key_stores: String = [
        ("ssl", Validity::Now),
        ("expired", Validity::Past),
        ("early", Validity::Future),
    ]
    .into_iter()
    .map(|(listener, validity)| {
        let identity = AUTHORITY.sign_for("localhost", &["localhost"], validity);
        let mut pem = fs::read(identity.key).unwrap();
        pem.extend(fs::read(identity.certificate).unwrap());
        let key_store = folder.join(format!("{listener}.pem"));
        fs::write(&key_store, pem).unwrap();
        let property = format!("listener.name.{listener}.ssl.keystore");
        format!(
            "{property}.type=PEM\n{property}.location={}\n",
            key_store.display()
        )
    })
    .collect();
    let password = sasl_password();
    let module = "org.apache.kafka.common.security";
    let properties = format!(
        "process.roles=broker,controller
node.id={id}
controller.quorum.voters={voters}
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
replica.lag.time.max.ms=3000
listeners=PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},SSL://127.0.0.1:{tls},PROXIED://127.0.0.1:{proxied},EXPIRED://127.0.0.1:{expired},EARLY://127.0.0.1:{early},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},SSL://localhost:{tls},PROXIED://127.0.0.1:{proxy},EXPIRED://localhost:{expired},EARLY://localhost:{early}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL,PROXIED:PLAINTEXT,EXPIRED:SSL,EARLY:SSL,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256
listener.name.sasl_plaintext.plain.sasl.jaas.config={module}.plain.PlainLoginModule required user_{SASL_USER}=\"{password}\";
listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config={module}.scram.ScramLoginModule required;
{key_stores}log.dirs={}
auto.create.topics.enable=false
num.partitions=1
default.replication.factor={nodes}
min.insync.replicas={in_sync}
offsets.topic.replication.factor={nodes}
offsets.topic.num.partitions=1
transaction.state.log.replication.factor={nodes}
transaction.state.log.min.isr={in_sync}
transaction.state.log.num.partitions=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
share.coordinator.state.topic.replication.factor={nodes}
share.coordinator.state.topic.min.isr={in_sync}
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=4194304
{settings}",
        data.display(),
    );
    fs::write(folder.join("server.properties"), properties).unwrap();
    fs::write(folder.join("log4j2.properties"), LOGGING).unwrap();
}

/// A Java command with Kafka's jars, that logs as the folder says.
fn java(folder: &Path, options: &[&str]) -> Command {
    let library = dependencies().join("kafka/lib");
    assert!(
        library.is_dir(),
        "Kafka is not in {}: run ./dev setup",
        library.display()
    );
    let mut class_path = library.into_os_string();
    class_path.push("/*");
    let mut logging = std::ffi::OsString::from("-Dlog4j2.configurationFile=");
    logging.push(folder.join("log4j2.properties"));
    let mut command = Command::new("java");
    // Brokers that are killed leave what they unpacked there.
    let mut scratch = std::ffi::OsString::from("-Djava.io.tmpdir=");
    scratch.push(folder);
    command
        .process_group(0)
        .args(options)
        .arg(logging)
        .arg(scratch)
        .arg("-cp")
        .arg(class_path);
    command
}
