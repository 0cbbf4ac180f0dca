//! Translates OAUTHBEARER authentication with classes of Apache Kafka (KIP-768, KIP-1139) to
//! `sasl.oauthbearer.method = oidc`.

use super::document::{Section, text};
use super::jaas::{option, options_with_prefix};
use super::report::Report;
use super::source::{Source, Taken};
use crate::kafka::token_endpoint::{Endpoint, METHOD};

/// Placeholder for the program that the user has to specify. /bin/false exists on most systems and
/// prints nothing.
const NO_PROGRAM: [&str; 2] = ["/bin/false", "change-me"];
const URL: &str = "sasl.oauthbearer.token.endpoint.url";
const EXTENSIONS: &str = "sasl.oauthbearer.extensions";
const URLENCODE: &str = "sasl.oauthbearer.header.urlencode";
const HANDLER: &str = "producer.sasl.login.callback.handler.class";

/// Returns whether the login module and its callback handler are classes of Apache Kafka.
pub(super) fn uses_kafka_classes(module: &str, source: &Source) -> bool {
    module.ends_with(".oauthbearer.OAuthBearerLoginModule")
        && source.value(HANDLER).is_some_and(|class| {
            let class = class.trim();
            class.starts_with("org.apache.kafka.common.security.oauthbearer.")
                && class.ends_with(".OAuthBearerLoginCallbackHandler")
        })
}

/// Translates a JAAS configuration for which [`uses_kafka_classes`] returns true.
pub(super) fn read(jaas: &Taken, source: &mut Source, kafka: &mut Section, report: &mut Report) {
    let mut found = Vec::new();
    if let Some(handler) = source.raw(HANDLER) {
        found.push((METHOD, "oidc".to_owned(), handler));
    }
    for (property, name, jaas_option) in [
        (URL, URL, None),
        (
            "sasl.oauthbearer.client.credentials.client.id",
            "sasl.oauthbearer.client.id",
            Some("clientId"),
        ),
        (
            "sasl.oauthbearer.scope",
            "sasl.oauthbearer.scope",
            Some("scope"),
        ),
        (URLENCODE, URLENCODE, None),
    ] {
        let taken = source.take_property(&format!("producer.{property}"), report);
        match (
            taken,
            jaas_option.and_then(|name| option(&jaas.value, name)),
        ) {
            (Some(taken), _) => found.push((name, taken.value.clone(), taken)),
            (None, Some(value)) => found.push((name, value, jaas.clone())),
            (None, None) => {}
        }
    }
    let extensions = extensions(&jaas.value);
    if !extensions.is_empty() {
        found.push((EXTENSIONS, extensions.join(","), jaas.clone()));
    }
    let values = found
        .iter()
        .map(|(name, value, _)| ((*name).to_owned(), value.clone()));
    if let Err(reason) = Endpoint::from_properties(&mut values.collect(), || Ok(None)) {
        return report.unsupported(
            &jaas.written,
            format!("this configuration can't be converted: {reason}"),
        );
    }
    for (name, value, taken) in found {
        report.carried(&taken.written, format!("{name:?} in [kafka]"));
        kafka.set(name, text(value.trim()), taken.written);
    }

    let secret = source.raw("producer.sasl.oauthbearer.client.credentials.client.secret");
    let written = secret.map_or(jaas.written.clone(), |secret| secret.written);
    let message = "this property contains the client secret, which was not copied: set the secret in \
     WALPOST_KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET, or as \"sasl.oauthbearer.client.secret\" in [kafka] with mode 0600";
    report.task(&written, message);
    kafka.add_comment(
        "sasl.oauthbearer.client.secret comes from the environment variable \
         WALPOST_KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET",
    );
    if option(&jaas.value, "ssl.truststore.location").is_some() {
        let message = "this property contains a trust store for the token endpoint: write its certificates to a PEM file, and \
         set \"https.ca.location\" in [kafka] to that file";
        report.task(&jaas.written, message);
    }

    for name in [
        "sasl.oauthbearer.scope.claim.name",
        "sasl.oauthbearer.sub.claim.name",
        "sasl.oauthbearer.clock.skew.seconds",
        "sasl.login.connect.timeout.ms",
        "sasl.login.read.timeout.ms",
        "sasl.login.retry.backoff.ms",
        "sasl.login.retry.backoff.max.ms",
        "sasl.login.refresh.window.factor",
        "sasl.login.refresh.window.jitter",
        "sasl.login.refresh.min.period.seconds",
        "sasl.login.refresh.buffer.seconds",
    ] {
        if let Some(taken) = source.raw(&format!("producer.{name}")) {
            report.without_effect(&taken.written);
        }
    }
}

/// If authentication requires tokens but no source of tokens is configured, adds a placeholder for
/// a program that prints tokens.
pub(super) fn add_program_placeholder(
    source: &Source,
    kafka: &Section,
    pipeline: &mut Section,
    report: &mut Report,
) {
    let is_set = |name: &str, carried: &str, matches: fn(&str) -> bool| {
        kafka.contains(carried)
            && source
                .value(name)
                .is_some_and(|value| matches(value.trim()))
    };
    let has_tokens = is_set("producer.sasl.mechanism", "sasl.mechanisms", |value| {
        value == "OAUTHBEARER"
    }) && is_set("producer.security.protocol", "security.protocol", |value| {
        value.to_ascii_lowercase().starts_with("sasl_")
    });
    if !has_tokens || kafka.contains(METHOD) {
        return;
    }
    let message = "this mechanism requires a program that prints a token: set kafka_token_command to such a program. \
     docs/managed.md lists one for each service";
    report.task("sasl.mechanism", message);
    let comment = "CHANGE THIS: the program that prints a token (docs/managed.md, \"Tokens\")";
    let program = NO_PROGRAM.map(text).join(", ");
    pipeline.set("kafka_token_command", format!("[{program}]"), comment);
}

/// Converts each `extension_NAME="VALUE"` in a JAAS configuration to `NAME=VALUE`.
fn extensions(jaas: &str) -> Vec<String> {
    options_with_prefix(jaas, "extension_")
        .map(|(name, value)| format!("{name}={value}"))
        .collect()
}
