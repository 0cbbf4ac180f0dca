//! The librdkafka properties that users can set, and the properties that Walpost requires or
//! rejects.
//!
//! See librdkafka 2.12, `CONFIGURATION.md`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, FromClientConfig, FromClientConfigAndContext};
use rdkafka::error::{KafkaError, KafkaResult};

use super::property_names;
use crate::authorities;
use crate::trusted_path::{self, PathError};

/// The property for the maximum batch size in bytes; [`client_config`] always sets it.
pub(super) const BATCH_BYTES: &str = "batch.size";
const IN_FLIGHT: &str = "max.in.flight.requests.per.connection";

/// Properties by name, as specified by the user.
pub type Properties = BTreeMap<String, String>;

/// A property that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PropertyError {
    /// The property would break ordering, durability or delivery reports.
    #[error("Kafka property {name} = {value:?} is not allowed: {reason}. Remove it")]
    Refused {
        name: String,
        value: String,
        /// Why the property is rejected.
        reason: &'static str,
    },
    /// The property makes librdkafka load a library or run a command.
    #[error(
        "Kafka property {name} is not allowed: librdkafka would {action} with Walpost's privileges. Remove it, or \
         allow it with --allow-code-in-kafka-properties"
    )]
    Code {
        name: String,
        /// The action that librdkafka would perform.
        action: &'static str,
    },
    /// librdkafka does not accept the property.
    #[error("Kafka properties: {0}")]
    Invalid(String),
    /// The property refers to a file that must not be used.
    #[error("Kafka property {0}")]
    File(FileError),
    /// A broker address starts with an unsupported protocol, such as `http://`.
    #[error(
        "bootstrap.servers: {0:?} is not the address of a Kafka broker: expected HOST:PORT[,HOST:PORT...], without http://"
    )]
    Address(String),
    /// No broker is configured.
    #[error(
        "no Kafka broker is configured; expected --kafka HOST:PORT, WALPOST_KAFKA=HOST:PORT, or \
         \"bootstrap.servers\" in [kafka]"
    )]
    NoBrokers,
}

/// Checks that `properties` don't conflict with Walpost's guarantees. All properties are checked
/// before any is passed to librdkafka, because librdkafka loads a library as soon as it reads the
/// property that names it.
///
/// # Errors
/// Returns an error if a property would break a guarantee or run code.
pub fn check(properties: &Properties) -> Result<(), PropertyError> {
    for name in properties.keys() {
        if let Some(action) = code_action(name) {
            let name = name.clone();
            return Err(PropertyError::Code { name, action });
        }
    }
    check_with_code(properties)
}

/// Like [`check`], but allows properties that run code. This check is used only if the user has
/// explicitly allowed such properties.
///
/// # Errors
/// Returns an error if a property would break a guarantee.
pub(crate) fn check_with_code(properties: &Properties) -> Result<(), PropertyError> {
    for (name, value) in properties {
        if let Some(reason) = refusal(name, value) {
            let (name, value) = (name.clone(), value.clone());
            return Err(PropertyError::Refused {
                name,
                value,
                reason,
            });
        }
    }
    // Check for unknown property names before checking that brokers are set, so that the error for
    // a misspelled `bootstrap.servers` contains the misspelled name.
    client_config(properties, "walpost")
        .create_native_config()
        .map_err(|error| PropertyError::Invalid(describe(&error)))?;
    match properties
        .get("bootstrap.servers")
        .or(properties.get("metadata.broker.list"))
    {
        Some(brokers) if !brokers.trim().is_empty() => check_brokers(brokers),
        _ => Err(PropertyError::NoBrokers),
    }
}

/// Rejects addresses with an unsupported protocol. librdkafka would only log a warning about the
/// address, and then have no broker to connect to.
fn check_brokers(brokers: &str) -> Result<(), PropertyError> {
    const PROTOCOLS: [&str; 4] = ["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"];
    let mut addresses = brokers.split(',').map(str::trim);
    let is_foreign = |address: &&str| {
        let protocol = address.split_once("://").map(|(protocol, _)| protocol);
        protocol.is_some_and(|protocol| !PROTOCOLS.contains(&&*protocol.to_ascii_lowercase()))
    };
    match addresses.find(is_foreign) {
        Some(address) => Err(PropertyError::Address(address.to_owned())),
        None => Ok(()),
    }
}

/// Removes the optional `topic.` prefix. For example, librdkafka treats `topic.acks` and `acks` as
/// equivalent.
fn strip_topic_prefix(name: &str) -> &str {
    name.strip_prefix("topic.").unwrap_or(name)
}

/// If the property makes librdkafka run external code, returns a description of the action.
fn code_action(name: &str) -> Option<&'static str> {
    match strip_topic_prefix(name) {
        "plugin.library.paths" | "interceptors" => Some("load a library"),
        "ssl.engine.location" | "ssl.engine.id" | "ssl_engine_callback_data" => {
            Some("load an OpenSSL engine")
        }
        "ssl.providers" => Some("load OpenSSL providers"),
        // librdkafka inserts the other Kerberos properties into the kinit command, which a shell
        // runs.
        name if name.starts_with("sasl.kerberos.") => Some("run a shell command"),
        _ => None,
    }
}

/// Returns the reason why the property must not have this value, or `None` if the value is allowed.
fn refusal(name: &str, value: &str) -> Option<&'static str> {
    let is_any = |expected: &[&str]| expected.contains(&value.trim());
    match strip_topic_prefix(name) {
        "enable.idempotence" if !is_any(&["true"]) => {
            Some("without idempotence, a retry can duplicate and reorder records")
        }
        "acks" | "request.required.acks" if !is_any(&["all", "-1"]) => Some(
            "an LSN is confirmed only after all in-sync replicas have the records (acks = all)",
        ),
        "message.timeout.ms" | "delivery.timeout.ms" if !is_any(&["0"]) => Some(
            "an expired record would be missing from Kafka; Walpost waits for the broker instead",
        ),
        "enable.gapless.guarantee" if !is_any(&["true"]) => {
            Some("if the broker rejected a record, later records would be delivered ahead of it")
        }
        "queuing.strategy" if !is_any(&["fifo"]) => Some("it would reorder records"),
        "delivery.report.only.error" if !is_any(&["false"]) => {
            Some("Walpost needs a delivery report for each delivered record to confirm positions")
        }
        "queue.buffering.max.messages" | "queue.buffering.max.kbytes" => {
            Some("window_records and window_bytes limit the records in flight")
        }
        "max.in.flight" | "max.in.flight.requests.per.connection" if !is_any(&["1"]) => Some(
            "if the broker temporarily rejected a record, later records would be delivered ahead of it",
        ),
        "transactional.id" => Some(
            "with delivery = \"exactly-once\", Walpost sets it from the names of the pipeline and the slot",
        ),
        "test.mock.num.brokers" => Some("a mock broker acknowledges records without storing them"),
        _ => None,
    }
}

/// Returns the configuration of a producer, or of another client of the same cluster. The user's
/// properties override Walpost's defaults, and the properties that Walpost requires override both.
#[must_use]
pub fn client_config(properties: &Properties, client_id: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    // `murmur2_random` is the Java client's default partitioner, so keys still map to the same
    // partitions after Walpost replaces Debezium.
    config.set("partitioner", "murmur2_random");
    if !properties.contains_key("compression.codec") {
        // LZ4 compresses batches to about a third of their size at little cost, and all Kafka
        // clients can decompress it.
        config.set("compression.type", "lz4");
    }
    if leaves_linger(properties) {
        // A linger time of 10 ms suits high traffic. When traffic is low, Walpost flushes
        // explicitly.
        config.set("linger.ms", "10");
    }
    // librdkafka keeps a batch and its compressed copy until the batch is acknowledged, for up to
    // five batches per broker when transactions are used. With librdkafka's default batch size of 1
    // MB, these batches would take about as much memory as the default `window_bytes`.
    config.set(BATCH_BYTES, "262144");
    config.set("client.id", client_id);
    config.set("reconnect.backoff.max.ms", "2000");
    config.set("socket.keepalive.enable", "true");
    config.set("log.connection.close", "false");
    // Emit statistics for monitoring every five seconds, which is also how often Walpost queries
    // its slot.
    config.set("statistics.interval.ms", "5000");
    // By default, librdkafka uses only the locations that its OpenSSL was built with, but no
    // distribution stores its certificate authorities there.
    let protocol = properties.get("security.protocol");
    if protocol.is_some_and(|protocol| is_tls(protocol))
        && !AUTHORITIES
            .iter()
            .any(|name| properties.contains_key(*name))
        && let Some(path) = authorities::system_bundle().and_then(Path::to_str)
    {
        config.set(CA_LOCATION, path);
    }
    for (name, value) in properties {
        config.set(name, value);
    }
    config.set("enable.idempotence", "true");
    config.set("acks", "all");
    // Without this property, librdkafka would continue to deliver later records after a broker
    // permanently rejected a record. If a new producer then resent the rejected record, the record
    // would be out of order.
    config.set("enable.gapless.guarantee", "true");
    // A broker that has no state for the producer yet accepts a batch even if the broker
    // temporarily rejected the preceding batch, and librdkafka then treats the rejected batch as
    // accepted too (librdkafka #4134).
    config.remove("max.in.flight");
    config.set(IN_FLIGHT, "1");
    // Disable this timeout. If a record expired, librdkafka would skip it and continue to send
    // later records.
    config.set("message.timeout.ms", "0");
    // `window_records` and `window_bytes` already limit the queue. A limit in librdkafka would
    // permanently block any row larger than the limit.
    config.set("queue.buffering.max.messages", "0");
    config.set("queue.buffering.max.kbytes", "2147483647");
    config
}

/// Returns the configuration of a transactional producer, based on a configuration from
/// [`client_config`].
#[must_use]
pub(crate) fn transactional(mut config: ClientConfig, transactional_id: &str) -> ClientConfig {
    config.set("transactional.id", transactional_id);
    // Several requests may be in flight, because a transaction in which records were reordered is
    // not committed: see `Context::record_unacknowledged`.
    config.set(IN_FLIGHT, "5");
    // Remove properties that transactions make unnecessary: if a record expires or is rejected, its
    // whole transaction is aborted.
    config.remove("message.timeout.ms");
    config.remove("delivery.timeout.ms");
    config.remove("enable.gapless.guarantee");
    if config.get("transaction.timeout.ms").is_none() {
        // After a crash, the open transaction delays consumers of committed records for at most
        // this long.
        config.set("transaction.timeout.ms", "30000");
    }
    config
}

/// Returns the configuration of a client that is not a producer, based on a producer's
/// configuration.
#[must_use]
pub(crate) fn leave_producers(mut config: ClientConfig) -> ClientConfig {
    for name in [
        "enable.idempotence",
        "enable.gapless.guarantee",
        IN_FLIGHT,
        "acks",
        "message.timeout.ms",
        "partitioner",
        "transactional.id",
        "transaction.timeout.ms",
        "compression.type",
        "linger.ms",
        BATCH_BYTES,
        "batch.num.messages",
        "queue.buffering.max.messages",
        "queue.buffering.max.kbytes",
        "statistics.interval.ms",
    ] {
        config.remove(name);
    }
    config
}

/// Returns whether the user has left the choice of linger time to Walpost.
#[must_use]
pub(crate) fn leaves_linger(properties: &Properties) -> bool {
    ["linger.ms", "queue.buffering.max.ms"]
        .iter()
        .all(|name| !properties.contains_key(*name))
}

/// Properties whose values are names of files that librdkafka opens.
const FILES: [&str; 6] = [
    "https.ca.location",
    CA_LOCATION,
    "ssl.certificate.location",
    "ssl.crl.location",
    PRIVATE_KEY,
    KEY_STORE,
];
const CA_LOCATION: &str = "ssl.ca.location";
const PRIVATE_KEY: &str = "ssl.key.location";
const KEY_STORE: &str = "ssl.keystore.location";
/// Properties that name certificate authorities.
const AUTHORITIES: [&str; 3] = [CA_LOCATION, "ssl.ca.pem", "ssl.ca.certificate.stores"];
/// Value that makes librdkafka search for the system's certificate authorities.
const PROBE: &str = "probe";

/// Returns whether the value of `ssl.ca.location` is `probe`, which is not the name of a file.
pub(super) fn is_probe(path: &Path) -> bool {
    path == Path::new(PROBE)
}

/// Checks the files that the configuration names and, if OpenSSL's default authorities are used,
/// the files that OpenSSL's environment variables name. A user who can write to these files
/// controls which brokers are trusted, and librdkafka would block on a FIFO.
///
/// # Errors
/// Returns an error if a file is writable by other users, is missing, or is not a regular file.
pub(crate) fn check_files(config: &ClientConfig) -> Result<(), FileError> {
    for property in FILES {
        let named = config
            .get(property)
            .filter(|path| !path.is_empty() && *path != PROBE);
        if let Some(path) = named {
            trusted_path::check_all(Path::new(path)).map_err(|error| FileError {
                property,
                path: path.to_owned(),
                error: error.into(),
            })?;
        }
    }
    let are_named = AUTHORITIES.iter().any(|name| {
        let value = config.get(name).unwrap_or_default();
        !value.is_empty() && value != PROBE
    });
    let protocol = config.get("security.protocol").unwrap_or_default();
    match is_tls(protocol) && !are_named {
        true => authorities::check_environment().map_err(|found| FileError {
            property: found.variable,
            path: found.path.display().to_string(),
            error: found.error,
        }),
        false => Ok(()),
    }
}

/// Returns whether this value of `security.protocol` requires TLS.
fn is_tls(protocol: &str) -> bool {
    protocol.trim().to_lowercase().ends_with("ssl")
}

/// The error for a file that librdkafka must not open.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{property} {path}: {error}")]
pub struct FileError {
    property: &'static str,
    path: String,
    error: Box<PathError>,
}

impl FileError {
    /// Returns whether the file was rejected because other users can write to it. If not, the file
    /// is missing or unsuitable.
    pub(crate) fn is_untrusted(&self) -> bool {
        self.error.is_untrusted()
    }
}

/// Checks the files and the login in the configuration. librdkafka omits some of these checks, and
/// its error messages would not name the file or the environment variable.
fn check_before_creation(config: &ClientConfig) -> KafkaResult<()> {
    check_files(config).map_err(|error| KafkaError::ClientCreation(error.to_string()))?;
    match invalid_login(|name| config.get(name)) {
        Some(missing) => Err(KafkaError::ClientCreation(missing)),
        None => Ok(()),
    }
}

/// The SASL mechanisms that Walpost's build of librdkafka supports.
const MECHANISMS: [&str; 4] = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"];

/// Returns an error message if the SASL mechanism is missing or not supported, or if the
/// configuration lacks a login property that the mechanism requires. In the latter case, the
/// message names the environment variable that sets the property.
pub(crate) fn invalid_login<'p>(get: impl Fn(&str) -> Option<&'p str>) -> Option<String> {
    let protocol = get("security.protocol")?.trim().to_lowercase();
    if !protocol.starts_with("sasl_") {
        return None;
    }
    let mechanism = get("sasl.mechanisms").or_else(|| get("sasl.mechanism"));
    let Some(mechanism) = mechanism.filter(|mechanism| !mechanism.trim().is_empty()) else {
        return Some(format!(
            "sasl.mechanisms is missing, but security.protocol = {protocol:?} requires it; expected {}",
            MECHANISMS.join(", ")
        ));
    };
    let mechanism = mechanism.trim().to_uppercase();
    if !MECHANISMS.contains(&&*mechanism) {
        return Some(format!(
            "sasl.mechanisms = {mechanism:?} is not supported; expected {}",
            MECHANISMS.join(", ")
        ));
    }
    if mechanism == "OAUTHBEARER" {
        return None;
    }
    let missing = ["sasl.username", "sasl.password"]
        .into_iter()
        .find(|name| get(name).is_none_or(str::is_empty))?;
    let variable = missing.to_uppercase().replace('.', "_");
    Some(format!(
        "{missing} is missing, but sasl.mechanisms = {mechanism:?} requires it. Set the environment variable WALPOST_KAFKA_{variable}, \
         or {missing:?} in [kafka]"
    ))
}

/// Creates a client, after checking the files that its configuration names.
///
/// # Errors
/// Returns an error if a file must not be used, or if librdkafka does not accept the configuration.
pub(super) fn create<T: FromClientConfig>(config: &ClientConfig) -> KafkaResult<T> {
    check_before_creation(config)?;
    #[expect(clippy::disallowed_methods, reason = "the files were checked")]
    config.create().map_err(|error| with_file(config, error))
}

/// If librdkafka failed to load certificates from a file, adds the file's name to the error.
fn with_file(config: &ClientConfig, error: KafkaError) -> KafkaError {
    match (error, config.get(CA_LOCATION)) {
        (KafkaError::ClientCreation(reason), Some(path))
            if reason.starts_with("ssl.ca.location failed") =>
        {
            KafkaError::ClientCreation(format!(
                "ssl.ca.location {path}: no certificate in PEM format was found ({reason})"
            ))
        }
        (error, _) => error,
    }
}

/// Like [`create`], but for a client with a context.
///
/// # Errors
/// See [`create`].
pub(super) fn create_with_context<C: ClientContext, T: FromClientConfigAndContext<C>>(
    config: &ClientConfig,
    context: C,
) -> KafkaResult<T> {
    check_before_creation(config)?;
    #[expect(clippy::disallowed_methods, reason = "the files were checked")]
    let created = config.create_with_context(context);
    created.map_err(|error| with_file(config, error))
}

/// Returns a warning for each private key that other users can read.
fn exposed_keys(properties: &Properties) -> Vec<String> {
    let exposed = |name: &&str| {
        let path = Path::new(properties.get(*name)?);
        let (mode, remedy) = trusted_path::exposure(path)?;
        Some(format!(
            "{name} {} has mode {mode:04o}, so other users can read the private key: {remedy}",
            path.display()
        ))
    };
    [PRIVATE_KEY, KEY_STORE]
        .iter()
        .filter_map(exposed)
        .collect()
}

/// Returns the bootstrap servers, which may be configured under either of the property's two names.
#[must_use]
pub(crate) fn brokers(config: &ClientConfig) -> String {
    let named = config.get("bootstrap.servers");
    named
        .or(config.get("metadata.broker.list"))
        .unwrap_or_default()
        .to_owned()
}

/// Returns a warning, including the remedy, for each way in which `properties` expose data to the
/// network or to other users of this machine.
#[must_use]
pub(crate) fn warnings(properties: &Properties) -> Vec<String> {
    let mut warnings = network_warnings(properties);
    warnings.extend(exposed_keys(properties));
    warnings
}

fn network_warnings(properties: &Properties) -> Vec<String> {
    // Invalid properties are reported elsewhere.
    let Ok(native) = client_config(properties, "walpost").create_native_config() else {
        return Vec::new();
    };
    // librdkafka normalizes the value, so "false" covers every accepted spelling of false.
    let effective = |name| native.get(name).unwrap_or_default();
    let protocol = effective("security.protocol");
    // With PLAIN and OAUTHBEARER, anyone who can read the traffic can also read the credentials.
    let mechanism = effective("sasl.mechanisms");
    let shows_password = protocol.starts_with("sasl")
        && ["PLAIN", "OAUTHBEARER"].contains(&mechanism.to_ascii_uppercase().as_str());
    let exposed = match shows_password {
        true => "Walpost's records and credentials",
        false => "Walpost's records",
    };
    if protocol.ends_with("ssl") {
        if effective("enable.ssl.certificate.verification") == "false" {
            return vec![format!(
                "enable.ssl.certificate.verification = false: anyone on the network between Walpost and the brokers can \
                 impersonate a broker and read {exposed}. Remove this setting, and set ssl.ca.location to the certificate of the \
                 CA that issued the brokers' certificates"
            )];
        }
        if effective("ssl.endpoint.identification.algorithm") == "none" {
            return vec![format!(
                "ssl.endpoint.identification.algorithm = none: anyone who has a certificate from the same CA can impersonate \
                 a broker and read {exposed}. Remove this setting"
            )];
        }
        return Vec::new();
    }
    // If the list of brokers is set under both of the property's names, librdkafka may use either
    // list.
    let lists = ["bootstrap.servers", "metadata.broker.list"].map(|name| properties.get(name));
    let brokers = lists.into_iter().flatten().flat_map(|list| list.split(','));
    let mut brokers = brokers.map(str::trim);
    let Some(broker) = brokers.find(|broker| !is_loopback(broker)) else {
        return Vec::new();
    };
    let better = match protocol.starts_with("sasl") {
        true => "sasl_ssl",
        false => "ssl",
    };
    vec![format!(
        "security.protocol = {protocol} does not protect the connection: anyone on the network between Walpost and {broker} can \
         impersonate a broker and read {exposed}. Set security.protocol = {better}"
    )]
}

/// Returns a warning, including the remedy, if these brokers are known not to support a property.
#[must_use]
pub(crate) fn unsuitable(properties: &Properties) -> Option<String> {
    const EVENT_HUBS: [&str; 4] = [
        ".servicebus.windows.net",
        ".servicebus.chinacloudapi.cn",
        ".servicebus.usgovcloudapi.net",
        ".servicebus.cloudapi.de",
    ];
    let config = client_config(properties, "walpost");
    let brokers = brokers(&config).to_ascii_lowercase();
    let mut hosts = brokers.split(',').map(|broker| {
        broker
            .trim()
            .rsplit_once(':')
            .map_or(broker, |(host, _)| host)
    });
    if !hosts.any(|host| EVENT_HUBS.iter().any(|domain| host.ends_with(domain))) {
        return None;
    }
    let native = config.create_native_config().ok()?;
    // librdkafka normalizes the value and accepts two names for the property.
    let compression = native.get("compression.codec").ok()?;
    (!["gzip", "none"].contains(&compression.as_str())).then(|| {
        format!(
            "compression.type is {compression}, but Azure Event Hubs only accepts batches that are compressed with gzip or not \
             compressed. In [kafka], set \"compression.type\" = \"gzip\", or \"none\" in tiers that do not support gzip"
        )
    })
}

/// Returns whether a broker in `bootstrap.servers` is on this machine. A host name that would need
/// to be resolved counts as remote.
pub(super) fn is_loopback(broker: &str) -> bool {
    let address = broker.split_once("://").map_or(broker, |(_, rest)| rest);
    let host = match address.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => address.rsplit_once(':').map_or(address, |(host, _)| host),
    };
    host.eq_ignore_ascii_case("localhost")
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Returns whether the property's value is a secret, or would be if the property's name were
/// spelled correctly.
#[must_use]
pub(crate) fn is_secret(name: &str) -> bool {
    [
        "password",
        "passphrase",
        "secret",
        "key.pem",
        "sasl.jaas",
        "oauthbearer.config",
    ]
    .iter()
    .any(|part| name.contains(part))
}

/// Formats a librdkafka error without rdkafka's Rust type names.
#[must_use]
pub(crate) fn describe(error: &rdkafka::error::KafkaError) -> String {
    match error {
        rdkafka::error::KafkaError::ClientConfig(_, description, name, _)
            if description.starts_with("No such configuration property") =>
        {
            match property_names::nearest(name) {
                Some(known) => {
                    format!("{name}: librdkafka has no such property; did you mean {known}?")
                }
                None => format!("{name}: librdkafka has no such property"),
            }
        }
        rdkafka::error::KafkaError::ClientConfig(_, description, name, _) => {
            // librdkafka's description of the error may contain the property's value.
            match is_secret(name) {
                true if name == "sasl.jaas.config" => format!(
                    "{name} is a property of Java clients. Instead, set sasl.mechanisms and sasl.username, and the environment variable \
                     WALPOST_KAFKA_SASL_PASSWORD"
                ),
                true => format!("{name} has an invalid value"),
                false => match property_names::values(name) {
                    Some(values) => format!("{name}: {description}; expected {values}"),
                    None => format!("{name}: {description}"),
                },
            }
        }
        other => match other.rdkafka_error_code() {
            Some(code) => code.to_string(),
            None => other.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(more: &[(&str, &str)]) -> Properties {
        [("bootstrap.servers", "localhost:9092")]
            .iter()
            .chain(more)
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn rejects_properties_that_break_order_or_durability() {
        for (name, value) in [
            ("enable.idempotence", "false"),
            ("acks", "1"),
            ("request.required.acks", "0"),
            ("message.timeout.ms", "30000"),
            ("delivery.timeout.ms", "30000"),
            ("enable.gapless.guarantee", "false"),
            ("queuing.strategy", "lifo"),
            ("delivery.report.only.error", "true"),
            ("queue.buffering.max.kbytes", "1024"),
            ("max.in.flight", "5"),
            ("max.in.flight.requests.per.connection", "5"),
            ("transactional.id", "x"),
            ("test.mock.num.brokers", "3"),
            // librdkafka treats the `topic.` prefix as optional.
            ("topic.acks", "1"),
            ("topic.message.timeout.ms", "30000"),
            ("topic.queuing.strategy", "lifo"),
        ] {
            match check(&properties(&[(name, value)])) {
                Err(PropertyError::Refused { name: refused, .. }) => assert_eq!(refused, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    /// librdkafka has two names for this property, and uses whichever value is set last.
    #[test]
    fn limits_requests_in_flight_under_both_names_of_the_property() {
        let effective = |config: &ClientConfig, name: &str| {
            let native = config.create_native_config().expect("a configuration");
            native.get(name).expect("a value")
        };
        for name in ["max.in.flight", IN_FLIGHT] {
            for value in ["1", "5"] {
                let config = client_config(&properties(&[(name, value)]), "x");
                assert_eq!(effective(&config, IN_FLIGHT), "1", "{name} = {value}");
                // Several requests may be in flight, because a transaction in which records were
                // reordered is not committed.
                let config = transactional(config, "x");
                assert_eq!(effective(&config, IN_FLIGHT), "5", "{name} = {value}");
            }
            assert_eq!(check(&properties(&[(name, "1")])), Ok(()));
        }
    }

    #[test]
    fn enforces_properties_required_for_order_and_durability() {
        let config = client_config(&properties(&[("acks", "-1")]), "x");
        for (name, value) in [
            ("enable.idempotence", "true"),
            ("enable.gapless.guarantee", "true"),
            ("acks", "all"),
            ("message.timeout.ms", "0"),
        ] {
            assert_eq!(config.get(name), Some(value), "{name}");
        }
    }

    #[test]
    fn rejects_properties_that_run_code_unless_a_flag_allows_them() {
        for (name, value) in [
            ("plugin.library.paths", "/nonexistent/plugin"),
            ("plugin.library.paths", ""),
            ("interceptors", "x"),
            ("ssl.engine.location", "/nonexistent/engine"),
            ("ssl.engine.id", "dynamic"),
            ("ssl.providers", "default"),
            ("sasl.kerberos.kinit.cmd", "true"),
            ("sasl.kerberos.keytab", "\"; true; \""),
            ("sasl.kerberos.principal", "$(true)"),
        ] {
            let given = properties(&[(name, value)]);
            match check(&given) {
                Err(PropertyError::Code { name: refused, .. }) => assert_eq!(refused, name),
                other => panic!("{name}: {other:?}"),
            }
            let allowed = check_with_code(&given);
            assert!(
                !matches!(allowed, Err(PropertyError::Code { .. })),
                "{name}: {allowed:?}"
            );
        }
    }

    #[test]
    fn warns_about_insecure_remote_connections() {
        let ssl = ("security.protocol", "ssl");
        let remote = ("bootstrap.servers", "localhost:1,kafka.example.com:2");
        let unverified = ("enable.ssl.certificate.verification", "0");
        for (given, expected) in [
            (&[][..], &[][..]),
            (
                &[("bootstrap.servers", "127.0.0.1:1, [::1]:2, LOCALHOST:3")],
                &[],
            ),
            (
                &[remote],
                &[
                    "plaintext",
                    "kafka.example.com:2",
                    "Walpost's records.",
                    "= ssl",
                ],
            ),
            (
                &[("bootstrap.servers", "PLAINTEXT://10.0.0.1:1")],
                &["10.0.0.1:1"],
            ),
            (&[("metadata.broker.list", "10.0.0.1")], &["10.0.0.1"]),
            (
                &[
                    remote,
                    ("security.protocol", "SASL_PLAINTEXT"),
                    ("sasl.mechanism", "PLAIN"),
                ],
                &["sasl_plaintext", "credentials", "= sasl_ssl"],
            ),
            (
                &[
                    remote,
                    ("security.protocol", "sasl_plaintext"),
                    ("sasl.mechanism", "SCRAM-SHA-256"),
                ],
                &["sasl_plaintext", "Walpost's records.", "= sasl_ssl"],
            ),
            (
                &[
                    ("security.protocol", "sasl_plaintext"),
                    ("sasl.mechanism", "PLAIN"),
                ],
                &[],
            ),
            (&[remote, ssl], &[]),
            (&[remote, ("security.protocol", "sasl_ssl")], &[]),
            (
                &[ssl, unverified],
                &["enable.ssl.certificate.verification = false"],
            ),
            (&[unverified], &[]),
            (
                &[ssl, ("ssl.endpoint.identification.algorithm", "none")],
                &["ssl.endpoint.identification.algorithm = none"],
            ),
        ] {
            let warned = warnings(&properties(given)).join("\n");
            assert_eq!(
                warned.is_empty(),
                expected.is_empty(),
                "{given:?}: {warned}"
            );
            for text in expected {
                assert!(warned.contains(text), "{given:?}: {warned}");
            }
        }
    }

    #[test]
    fn reports_compression_types_that_azure_event_hubs_does_not_support() {
        let hubs = ("bootstrap.servers", "shop.servicebus.windows.net:9093");
        for (given, is_refused) in [
            (&[hubs][..], true),
            (&[hubs, ("compression.type", "zstd")], true),
            (&[hubs, ("compression.codec", "snappy")], true),
            (&[hubs, ("compression.type", "gzip")], false),
            (&[hubs, ("compression.codec", "none")], false),
            (&[("bootstrap.servers", "kafka.example.com:9093")], false),
            (
                &[(
                    "bootstrap.servers",
                    "shop.servicebus.windows.net.example.com:9093",
                )],
                false,
            ),
        ] {
            let found = unsuitable(&properties(given));
            assert_eq!(found.is_some(), is_refused, "{given:?}: {found:?}");
        }
    }

    #[test]
    fn passes_other_properties_through_unchanged() {
        let given = properties(&[
            ("acks", "all"),
            ("compression.type", "zstd"),
            ("security.protocol", "sasl_ssl"),
            ("sasl.mechanisms", "SCRAM-SHA-512"),
            ("linger.ms", "20"),
            ("partitioner", "consistent"),
        ]);
        assert_eq!(check(&given), Ok(()));
        let config = client_config(&given, "x");
        assert_eq!(config.get("linger.ms"), Some("20"));
        assert_eq!(config.get("partitioner"), Some("consistent"));
        assert_eq!(config.get("message.timeout.ms"), Some("0"));
    }

    #[test]
    fn rejects_missing_and_unsupported_sasl_mechanisms() {
        let login = |mechanism: Option<&str>| {
            invalid_login(|name| match name {
                "security.protocol" => Some("SASL_SSL"),
                "sasl.mechanism" => mechanism,
                "sasl.username" | "sasl.password" => Some("x"),
                _ => None,
            })
        };
        for mechanism in MECHANISMS {
            assert_eq!(login(Some(mechanism)), None);
        }
        let expected = "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER";
        for (mechanism, reason) in [
            (None, "sasl.mechanisms is missing"),
            (Some(""), "sasl.mechanisms is missing"),
            (Some("SCRAM-SHA256"), "\"SCRAM-SHA256\" is not supported"),
            (Some("GSSAPI"), "\"GSSAPI\" is not supported"),
        ] {
            let found = login(mechanism).expect("invalid");
            assert!(found.contains(reason), "{reason} in {found}");
            assert!(found.ends_with(expected), "{found}");
        }
    }

    #[test]
    fn error_names_the_ca_file_that_contains_no_certificate() {
        let config = client_config(
            &properties(&[
                ("security.protocol", "ssl"),
                ("ssl.ca.location", "/etc/hostname"),
            ]),
            "x",
        );
        let created = create::<rdkafka::consumer::BaseConsumer>(&config);
        let error = created.err().expect("no certificate").to_string();
        assert!(
            error.contains("ssl.ca.location /etc/hostname: no certificate"),
            "{error}"
        );
    }

    #[test]
    fn lists_the_accepted_values_of_a_property() {
        let error =
            check(&properties(&[("security.protocol", "tls")])).expect_err("an unknown value");
        let text = error.to_string();
        assert!(
            text.ends_with("expected plaintext, ssl, sasl_plaintext or sasl_ssl"),
            "{text}"
        );
        let error = check(&properties(&[("sasl.jaas.config", "x")]))
            .expect_err("a property of Java clients is rejected");
        assert!(
            error.to_string().contains("WALPOST_KAFKA_SASL_PASSWORD"),
            "{error}"
        );
    }

    #[test]
    fn rejects_properties_unknown_to_librdkafka() {
        let error = check(&properties(&[("compresion.type", "lz4")])).expect_err("unknown");
        assert!(error.to_string().contains("compresion.type"), "{error}");
        let error = check(&properties(&[("linger.ms", "soon")])).expect_err("no number");
        assert!(error.to_string().contains("linger.ms"), "{error}");
        let misspelled = [("bootstrap.server".to_owned(), "b:9092".to_owned())];
        let error = check(&misspelled.into()).expect_err("unknown");
        assert_eq!(
            error.to_string(),
            "Kafka properties: bootstrap.server: librdkafka has no such property; did you mean bootstrap.servers?"
        );
        assert_eq!(check(&Properties::new()), Err(PropertyError::NoBrokers));
        let url = [(
            "bootstrap.servers".to_owned(),
            "b:9092,http://c:9092".to_owned(),
        )];
        assert_eq!(
            check(&url.into()),
            Err(PropertyError::Address("http://c:9092".to_owned()))
        );
    }
}
