//! The names of librdkafka's properties, used to suggest the correct name for a misspelled
//! property.
//!
//! librdkafka has no complete list: its dump of a configuration omits aliases, such as `linger.ms`,
//! and properties without a value, such as `ssl.ca.location`.

/// The properties that a producer accepts and that users may set. See librdkafka 2.12,
/// `CONFIGURATION.md`.
const NAMES: [&str; 107] = [
    "api.version.fallback.ms",
    "api.version.request",
    "api.version.request.timeout.ms",
    "batch.num.messages",
    "batch.size",
    "bootstrap.servers",
    "broker.address.family",
    "broker.address.ttl",
    "broker.version.fallback",
    "client.dns.lookup",
    "client.id",
    "client.rack",
    "compression.codec",
    "compression.level",
    "compression.type",
    "connections.max.idle.ms",
    "debug",
    "enable.metrics.push",
    "enable.sasl.oauthbearer.unsecure.jwt",
    "enable.ssl.certificate.verification",
    "https.ca.location",
    "https.ca.pem",
    "linger.ms",
    "log.connection.close",
    "log.thread.name",
    "log_level",
    "message.copy.max.bytes",
    "message.max.bytes",
    "message.send.max.retries",
    "metadata.broker.list",
    "metadata.max.age.ms",
    "metadata.recovery.rebootstrap.trigger.ms",
    "metadata.recovery.strategy",
    "partitioner",
    "queue.buffering.backpressure.threshold",
    "queue.buffering.max.ms",
    "receive.message.max.bytes",
    "reconnect.backoff.jitter.ms",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retries",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "sasl.kerberos.keytab",
    "sasl.kerberos.kinit.cmd",
    "sasl.kerberos.min.time.before.relogin",
    "sasl.kerberos.principal",
    "sasl.kerberos.service.name",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.oauthbearer.assertion.algorithm",
    "sasl.oauthbearer.assertion.claim.aud",
    "sasl.oauthbearer.assertion.claim.exp.seconds",
    "sasl.oauthbearer.assertion.claim.iss",
    "sasl.oauthbearer.assertion.claim.jti.include",
    "sasl.oauthbearer.assertion.claim.nbf.seconds",
    "sasl.oauthbearer.assertion.claim.sub",
    "sasl.oauthbearer.assertion.file",
    "sasl.oauthbearer.assertion.jwt.template.file",
    "sasl.oauthbearer.assertion.private.key.file",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.assertion.private.key.pem",
    "sasl.oauthbearer.client.credentials.client.id",
    "sasl.oauthbearer.client.credentials.client.secret",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.extensions",
    "sasl.oauthbearer.grant.type",
    "sasl.oauthbearer.metadata.authentication.type",
    "sasl.oauthbearer.method",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.password",
    "sasl.username",
    "security.protocol",
    "socket.connection.setup.timeout.ms",
    "socket.keepalive.enable",
    "socket.max.fails",
    "socket.nagle.disable",
    "socket.receive.buffer.bytes",
    "socket.send.buffer.bytes",
    "socket.timeout.ms",
    "ssl.ca.certificate.stores",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.crl.location",
    "ssl.curves.list",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.sigalgs.list",
    "statistics.interval.ms",
    "sticky.partitioning.linger.ms",
    "topic.metadata.propagation.max.ms",
    "topic.metadata.refresh.fast.cnt",
    "topic.metadata.refresh.fast.interval.ms",
    "topic.metadata.refresh.interval.ms",
    "topic.metadata.refresh.sparse",
    "transaction.timeout.ms",
];

/// For each enumerated property, the values that it accepts. librdkafka's error messages do not
/// list these values. See librdkafka 2.12, `CONFIGURATION.md`.
const VALUES: [(&str, &str); 6] = [
    ("broker.address.family", "any, v4 or v6"),
    (
        "client.dns.lookup",
        "use_all_dns_ips or resolve_canonical_bootstrap_servers_only",
    ),
    ("compression.codec", "none, gzip, snappy, lz4 or zstd"),
    ("compression.type", "none, gzip, snappy, lz4 or zstd"),
    (
        "security.protocol",
        "plaintext, ssl, sasl_plaintext or sasl_ssl",
    ),
    ("ssl.endpoint.identification.algorithm", "https or none"),
];

/// Returns the accepted values of an enumerated property.
pub(super) fn values(name: &str) -> Option<&'static str> {
    let found = VALUES.iter().find(|(known, _)| *known == name);
    found.map(|(_, values)| *values)
}

/// Returns the property whose name is most similar to `name`, if any is similar enough.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    NAMES
        .iter()
        .map(|known| (strsim::damerau_levenshtein(name, known), *known))
        .filter(|(distance, known)| *distance <= name.len().min(known.len()) / 4 + 1)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use rdkafka::config::ClientConfig;

    use super::*;

    #[test]
    fn suggests_only_properties_that_librdkafka_supports() {
        for name in NAMES {
            let mut config = ClientConfig::new();
            // librdkafka may report that the value is invalid, but must not report that the
            // property doesn't exist.
            config.set(name, "\u{1}");
            if let Err(error) = config.create_native_config() {
                let error = error.to_string();
                assert!(!error.contains("No such configuration property"), "{error}");
            }
        }
    }

    #[test]
    fn lists_only_values_that_librdkafka_accepts() {
        let accepts = |name: &str, value: &str| {
            let mut config = ClientConfig::new();
            config.set(name, value);
            config.create_native_config().is_ok()
        };
        for (name, values) in VALUES {
            for value in values.replace(" or ", ", ").split(", ") {
                assert!(accepts(name, value), "{name} = {value}");
            }
            assert!(!accepts(name, "tls"), "{name}");
        }
    }

    #[test]
    fn suggests_the_nearest_name_for_typical_typos() {
        for (name, expected) in [
            ("linger.mss", Some("linger.ms")),
            ("bootstrap.server", Some("bootstrap.servers")),
            ("sasl.pasword", Some("sasl.password")),
            ("compresion.type", Some("compression.type")),
            ("security.protocl", Some("security.protocol")),
            ("key.serializer", None),
            ("x", None),
        ] {
            assert_eq!(nearest(name), expected, "{name}");
        }
    }
}
