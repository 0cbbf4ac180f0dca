//! Translates the Java producer's properties to librdkafka properties.

use super::document::{Section, text};
use super::jaas::option;
use super::known::nearest;
use super::property::{NO_BROKER, set};
use super::report::Report;
use super::source::{Source, Taken};
use super::tokens;

/// How to handle a property of the Java producer.
#[derive(Clone, Copy)]
enum Rule {
    /// librdkafka supports the property under this name.
    Renamed(&'static str),
    WithoutEffect,
    Different(&'static str),
    Unsupported(&'static str),
}
use Rule::{Different, Renamed, Unsupported, WithoutEffect};

const WAITING_RULE: Rule = Different(
    "this property has no equivalent: Walpost waits for the brokers indefinitely, because an expired record would be missing \
     from Kafka",
);
const CODE_RULE: Rule = Unsupported("this property names a Java class, which Walpost can't load");
const TOKEN_RULE: Rule = Unsupported(
    "this property configures token authentication through Java classes. Instead, set kafka_token_command to a program that \
     prints a token, or \"sasl.oauthbearer.method\" = \"oidc\" in [kafka] to fetch tokens from a token endpoint: see \
     docs/managed.md",
);
const KERBEROS_RULE: Rule = Unsupported(
    "this property configures Kerberos authentication, which Walpost does not support: use a listener that accepts SCRAM, tokens \
     or certificates",
);

/// How to handle each property of the Java producer, by name. A `*` at the end of a name matches
/// any suffix.
const RULES: &[(&str, Rule)] = &[
    ("sasl.mechanism", Renamed("sasl.mechanisms")),
    ("max.request.size", Renamed("message.max.bytes")),
    ("send.buffer.bytes", Renamed("socket.send.buffer.bytes")),
    (
        "receive.buffer.bytes",
        Renamed("socket.receive.buffer.bytes"),
    ),
    ("key.serializer", WithoutEffect),
    ("value.serializer", WithoutEffect),
    ("max.block.ms", WithoutEffect),
    ("metadata.max.idle.ms", WithoutEffect),
    ("metadata.recovery.*", WithoutEffect),
    ("metric.reporters", WithoutEffect),
    ("metrics.*", WithoutEffect),
    ("enable.metrics.push", WithoutEffect),
    ("auto.include.jmx.reporter", WithoutEffect),
    ("partitioner.adaptive.partitioning.enable", WithoutEffect),
    ("partitioner.availability.timeout.ms", WithoutEffect),
    ("socket.connection.setup.timeout.max.ms", WithoutEffect),
    ("compression.gzip.level", Renamed("compression.level")),
    ("compression.lz4.level", Renamed("compression.level")),
    ("compression.zstd.level", Renamed("compression.level")),
    ("ssl.protocol", WithoutEffect),
    ("ssl.enabled.protocols", WithoutEffect),
    ("ssl.provider", WithoutEffect),
    ("ssl.keymanager.algorithm", WithoutEffect),
    ("ssl.trustmanager.algorithm", WithoutEffect),
    ("ssl.secure.random.implementation", WithoutEffect),
    (
        "ssl.cipher.suites",
        Unsupported(
            "this property contains Java cipher suite names: use OpenSSL's names in [kafka], or omit this property",
        ),
    ),
    ("retries", WAITING_RULE),
    ("delivery.timeout.ms", WAITING_RULE),
    (
        "buffer.memory",
        Different(
            "this property has no equivalent: window_bytes limits the size of the records that were read but not yet \
             acknowledged (8MiB by default)",
        ),
    ),
    ("partitioner.class", CODE_RULE),
    ("interceptor.classes", CODE_RULE),
    ("ssl.engine.factory.class", CODE_RULE),
    ("security.providers", CODE_RULE),
    ("config.providers*", CODE_RULE),
    ("sasl.client.callback.handler.class", TOKEN_RULE),
    ("sasl.login.*", TOKEN_RULE),
    ("sasl.oauthbearer.*", TOKEN_RULE),
    ("sasl.kerberos.*", KERBEROS_RULE),
    (
        "partitioner.ignore.keys",
        Unsupported(
            "this setting makes Debezium ignore the key when it chooses a partition. Walpost always sends the same key to the \
             same partition",
        ),
    ),
];

/// Properties that have the same name and meaning in librdkafka. [`HANDLED_SEPARATELY`] lists
/// properties that need special handling.
const SAME_IN_LIBRDKAFKA: &[&str] = &[
    "bootstrap.servers",
    "client.id",
    "client.rack",
    "client.dns.lookup",
    "security.protocol",
    "compression.type",
    "linger.ms",
    "batch.size",
    "request.timeout.ms",
    "retry.backoff.ms",
    "retry.backoff.max.ms",
    "reconnect.backoff.ms",
    "reconnect.backoff.max.ms",
    "connections.max.idle.ms",
    "metadata.max.age.ms",
    "transaction.timeout.ms",
    "socket.connection.setup.timeout.ms",
];
const HANDLED_SEPARATELY: &[&str] = &[
    "acks",
    "enable.idempotence",
    "max.in.flight.requests.per.connection",
    "transactional.id",
    "sasl.jaas.config",
    "ssl.truststore.location",
    "ssl.truststore.type",
    "ssl.truststore.password",
    "ssl.truststore.certificates",
    "ssl.keystore.location",
    "ssl.keystore.type",
    "ssl.keystore.password",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
];

pub(super) fn read(source: &mut Source, kafka: &mut Section, report: &mut Report) {
    brokers(source, kafka, report);
    fixed_properties(source, report);
    jaas(source, kafka, report);
    authorities(source, kafka, report);
    certificate(source, kafka, report);
    if let Some(taken) =
        source.take_property("producer.ssl.endpoint.identification.algorithm", report)
    {
        let value = if taken.value.trim().is_empty() {
            "none"
        } else {
            "https"
        };
        set(
            kafka,
            "ssl.endpoint.identification.algorithm",
            value,
            &taken,
            report,
        );
    }
    while let Some(name) = source.next_with_prefix("producer.") {
        let property = format!("producer.{name}");
        match source.take_property(&property, report) {
            Some(taken) => apply_rule(&name, &taken, kafka, report),
            // The property is set, but its value refers to a value that is stored elsewhere.
            // `take_property` has already reported this.
            None if source.raw(&property).is_none() => break,
            None => {}
        }
    }
}

fn brokers(source: &mut Source, kafka: &mut Section, report: &mut Report) {
    const NAME: &str = "bootstrap.servers";
    if let Some(taken) = source.take_property("producer.bootstrap.servers", report)
        && !taken.value.trim().is_empty()
    {
        set(kafka, NAME, taken.value.trim(), &taken, report);
    }
    if !kafka.contains(NAME) {
        let message = "this property is not in the file: the Kafka Connect worker's file contains the brokers. Pass the worker's \
         file with --worker, or set the brokers in walpost.toml";
        report.task(NAME, message);
        let comment = "CHANGE THIS: set the brokers here, and configure authentication and TLS below \
         (docs/configuration.md, \"Kafka\")";
        kafka.set(NAME, text(NO_BROKER), comment);
    }
}

/// Reports properties that can't be changed in Walpost, because the order and durability of records
/// depend on them.
fn fixed_properties(source: &mut Source, report: &mut Report) {
    for (name, harmless, message) in [
        (
            "acks",
            &["all", "-1"][..],
            "this property has no equivalent: Walpost waits for all in-sync replicas (acks = all)",
        ),
        (
            "enable.idempotence",
            &["true"],
            "this property has no equivalent: without idempotence, a retry can repeat and reorder records",
        ),
        (
            "max.in.flight.requests.per.connection",
            &["1"],
            "this property has no equivalent: Walpost allows one request in flight per broker, or five with delivery = \
             \"exactly-once\"",
        ),
        (
            "transactional.id",
            &[],
            "this property has no equivalent: with delivery = \"exactly-once\", Walpost derives the ID from the pipeline and the \
             slot",
        ),
    ] {
        if let Some(taken) = source.take_property(&format!("producer.{name}"), report) {
            match harmless.iter().any(|harmless| taken.is(harmless)) {
                true => report.without_effect(&taken.written),
                false => report.different(&taken.written, message),
            }
        }
    }
    // Walpost's default partitioner is equivalent to the Java producer's.
    let is_default = |taken: &Taken| {
        let name = taken.value.rsplit('.').next().unwrap_or_default();
        ["", "DefaultPartitioner", "null"].contains(&name)
    };
    let class = source.raw("producer.partitioner.class");
    match class {
        Some(taken) if is_default(&taken) => report.without_effect(&taken.written),
        Some(taken) => {
            let message = "this property selects partitions with a Java class. Walpost hashes the key like the Java client does \
             by default (murmur2). To select partitions differently, set \"partitioner\" in [kafka] to another partitioner of \
             librdkafka, or write the partition into a column";
            report.unsupported(&taken.written, message);
        }
        None => {}
    }
}

/// Translates a JAAS configuration such as `MODULE required username="..." password="...";`.
fn jaas(source: &mut Source, kafka: &mut Section, report: &mut Report) {
    let Some(taken) = source.take_property("producer.sasl.jaas.config", report) else {
        return;
    };
    let module = taken.value.split_whitespace().next().unwrap_or_default();
    if tokens::uses_kafka_classes(module, source) {
        return tokens::read(&taken, source, kafka, report);
    }
    if !["PlainLoginModule", "ScramLoginModule"]
        .iter()
        .any(|known| module.ends_with(known))
    {
        let message = "this property configures authentication through a Java class other than PlainLoginModule and \
         ScramLoginModule: docs/configuration.md and librdkafka's CONFIGURATION.md list the mechanisms and their properties";
        return report.unsupported(&taken.written, message);
    }
    match option(&taken.value, "username") {
        Some(user) => set(kafka, "sasl.username", &user, &taken, report),
        None => report.unsupported(
            &taken.written,
            "this property contains no username: set sasl.username in [kafka]",
        ),
    }
    let message = "this property contains a password, which was not copied: set the password in WALPOST_KAFKA_SASL_PASSWORD, or \
     as \"sasl.password\" in [kafka] with mode 0600";
    report.task(&taken.written, message);
    kafka.add_comment(
        "sasl.password comes from the environment variable WALPOST_KAFKA_SASL_PASSWORD",
    );
}

/// Translates the trust store to a file of CA certificates.
fn authorities(source: &mut Source, kafka: &mut Section, report: &mut Report) {
    const PEM: &str = "/etc/walpost/kafka-ca.pem";
    let kind = source.take_property("producer.ssl.truststore.type", report);
    let is_pem = kind.as_ref().is_some_and(|kind| kind.is("PEM"));
    for taken in [kind, source.raw("producer.ssl.truststore.password")]
        .into_iter()
        .flatten()
    {
        report.without_effect(&taken.written);
    }
    if let Some(taken) = source.take_property("producer.ssl.truststore.certificates", report) {
        set(kafka, "ssl.ca.pem", &taken.value, &taken, report);
    }
    let Some(taken) = source.take_property("producer.ssl.truststore.location", report) else {
        return;
    };
    if is_pem {
        return set(kafka, "ssl.ca.location", &taken.value, &taken, report);
    }
    let message = format!(
        "this file is a Java trust store, but librdkafka reads PEM. Write its certificates to {PEM}: keytool -list -rfc \
         -keystore TRUSTSTORE > {PEM}"
    );
    report.task(&taken.written, message);
    set(kafka, "ssl.ca.location", PEM, &taken, report);
}

/// Translates the key store, which contains the client certificate.
fn certificate(source: &mut Source, kafka: &mut Section, report: &mut Report) {
    const PKCS12: &str = "/etc/walpost/kafka.p12";
    let kind = source.take_property("producer.ssl.keystore.type", report);
    let is = |name: &str| kind.as_ref().is_some_and(|kind| kind.is(name));
    let (is_pem, is_pkcs12) = (is("PEM"), is("PKCS12"));
    if let Some(kind) = &kind {
        report.without_effect(&kind.written);
    }
    if let Some(taken) = source.take_property("producer.ssl.keystore.certificate.chain", report) {
        set(kafka, "ssl.certificate.pem", &taken.value, &taken, report);
    }
    if let Some(taken) = source.raw("producer.ssl.keystore.key") {
        let message = "the value is a private key, which was not copied: put the key into a file with mode 0600, and set \
         \"ssl.key.location\" in [kafka] to that file";
        report.task(&taken.written, message);
    }
    for (name, property) in [
        ("ssl.keystore.password", "ssl.keystore.password"),
        ("ssl.key.password", "ssl.key.password"),
    ] {
        if let Some(taken) = source.raw(&format!("producer.{name}")) {
            let variable = property.to_uppercase().replace('.', "_");
            let message = format!(
                "the value is a secret, which was not copied: set it in WALPOST_KAFKA_{variable}"
            );
            report.task(&taken.written, message);
        }
    }
    let Some(taken) = source.take_property("producer.ssl.keystore.location", report) else {
        return;
    };
    if is_pem {
        set(
            kafka,
            "ssl.certificate.location",
            &taken.value,
            &taken,
            report,
        );
        set(kafka, "ssl.key.location", &taken.value, &taken, report);
    } else if is_pkcs12 {
        set(kafka, "ssl.keystore.location", &taken.value, &taken, report);
    } else {
        let message = format!(
            "this file is a Java key store, but librdkafka reads PKCS#12. Convert it: keytool -importkeystore -srckeystore \
             KEYSTORE -destkeystore {PKCS12} -deststoretype PKCS12"
        );
        report.task(&taken.written, message);
        set(kafka, "ssl.keystore.location", PKCS12, &taken, report);
    }
}

/// Handles a property as specified in [`RULES`].
fn apply_rule(name: &str, taken: &Taken, kafka: &mut Section, report: &mut Report) {
    let matches = |known: &str| match known.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == known,
    };
    match RULES
        .iter()
        .find(|(known, _)| matches(known))
        .map(|(_, rule)| *rule)
    {
        Some(Renamed(new)) => set(kafka, new, taken.value.trim(), taken, report),
        Some(WithoutEffect) => report.without_effect(&taken.written),
        Some(Different(message)) => report.different(&taken.written, message),
        Some(Unsupported(message)) => report.unsupported(&taken.written, message),
        None if SAME_IN_LIBRDKAFKA.contains(&name) => {
            set(kafka, name, taken.value.trim(), taken, report)
        }
        None => {
            let names = RULES
                .iter()
                .map(|(known, _)| known.trim_end_matches(['*', '.']));
            let names = names
                .chain(SAME_IN_LIBRDKAFKA.iter().copied())
                .chain(HANDLED_SEPARATELY.iter().copied());
            let message = match nearest(name, names) {
                Some(known) => format!("this is not a property of Kafka's producer; did you mean {known}?"),
                None => "this is not a known property of Kafka's producer: look for an equivalent in librdkafka's \
                 CONFIGURATION.md, or remove it"
                    .to_owned(),
            };
            report.unknown(&taken.written, message);
        }
    }
}
