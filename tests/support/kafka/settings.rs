//! The files that a broker's directory contains before the broker starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::super::certificates::Validity;
use super::super::postgres::AUTHORITY;
use super::super::reaper;
use super::super::tokens::{AUDIENCE, KEYS};
use super::java::{JVM_OPTIONS, java};
use super::nodes::{NodePosition, Ports};
use super::{SASL_USER, sasl_password};

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

/// Returns a formatted data directory that brokers can copy. Formatting a directory for each broker
/// would require starting a Java virtual machine.
pub(super) fn formatted() -> PathBuf {
    static FORMATTED: OnceLock<PathBuf> = OnceLock::new();
    FORMATTED
        .get_or_init(|| {
            let folder = reaper::folder("formatted");
            write_settings(&folder, &NodePosition::new(0, vec![Ports::free()]), "");
            let scram = format!(
                "SCRAM-SHA-256=[name={SASL_USER},password={}]",
                sasl_password()
            );
            let output = java(&folder, &JVM_OPTIONS)
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

/// Creates a key store for each TLS listener, and returns the broker properties that refer to them.
fn key_stores_in(folder: &Path) -> String {
    let listeners = [
        ("ssl", Validity::Now),
        ("expired", Validity::Past),
        ("early", Validity::Future),
    ];
    let properties = listeners.map(|(listener, validity)| {
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
    });
    properties.concat()
}

/// Returns the broker properties for tokens. The SASL listener also accepts signed tokens, and
/// requires clients to reauthenticate when these expire. Another listener accepts only unsigned
/// tokens.
fn tokens() -> String {
    let module = "org.apache.kafka.common.security.oauthbearer";
    let keys = KEYS.display();
    let settings = [
        format!("sasl.jaas.config={module}.OAuthBearerLoginModule required;"),
        format!("sasl.server.callback.handler.class={module}.OAuthBearerValidatorCallbackHandler"),
        format!("sasl.oauthbearer.jwks.endpoint.url=file://{keys}"),
        format!("sasl.oauthbearer.expected.audience={AUDIENCE}"),
        "connections.max.reauth.ms=3600000".to_owned(),
    ];
    let prefix = "listener.name.sasl_plaintext.oauthbearer";
    let signed = settings.map(|setting| format!("{prefix}.{setting}\n"));
    let prefix = "listener.name.unsecured";
    // A listener without a callback handler of its own accepts unsigned tokens.
    let unsecured = format!(
        "{prefix}.sasl.enabled.mechanisms=OAUTHBEARER\n\
         {prefix}.oauthbearer.sasl.jaas.config={module}.OAuthBearerLoginModule required;\n"
    );
    signed.concat() + &unsecured
}

pub(super) fn write_settings(folder: &Path, position: &NodePosition, settings: &str) {
    let Ports {
        plain,
        sasl,
        unsecured,
        tls,
        proxied,
        proxy,
        expired,
        early,
        controller,
    } = position.nodes[position.index];
    let (id, voters, nodes) = (position.id(), position.voters(), position.nodes.len());
    let in_sync = nodes.div_ceil(2);
    let data = folder.join("data");
    let (mut listeners, mut advertised, mut protocols, mut key_stores) = Default::default();
    let mut mechanisms = "";
    if position.has_tls {
        listeners = format!(
            ",SSL://127.0.0.1:{tls},EXPIRED://127.0.0.1:{expired},EARLY://127.0.0.1:{early},UNSECURED://127.0.0.1:{unsecured}"
        );
        advertised = listeners.replace("127.0.0.1", "localhost");
        protocols = ",SSL:SSL,EXPIRED:SSL,EARLY:SSL,UNSECURED:SASL_PLAINTEXT";
        key_stores = key_stores_in(folder) + &tokens();
        mechanisms = ",OAUTHBEARER";
    }
    let password = sasl_password();
    let module = "org.apache.kafka.common.security";
    let properties = format!(
        "process.roles=broker,controller
node.id={id}
controller.quorum.voters={voters}
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
replica.lag.time.max.ms=3000
listeners=PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},PROXIED://127.0.0.1:{proxied},CONTROLLER://127.0.0.1:{controller}{listeners}
advertised.listeners=PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},PROXIED://127.0.0.1:{proxy}{advertised}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT{protocols}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256{mechanisms}
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
    write_logging(folder);
}

/// Writes the logging configuration for the Java virtual machines that use this directory.
pub(super) fn write_logging(folder: &Path) {
    fs::write(folder.join("log4j2.properties"), LOGGING).unwrap();
}
