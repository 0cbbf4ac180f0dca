//! Writes librdkafka properties to walpost.toml.

use super::document::{Section, text};
use super::report::Report;
use super::source::Taken;
use crate::kafka::properties::{Properties, check};

/// Placeholder for the list of brokers. Its host name never resolves (RFC 2606).
pub(super) const NO_BROKER: &str = "change-me.invalid:9092";

/// Writes a property if librdkafka accepts it. Otherwise, reports the reason.
pub(super) fn set(
    kafka: &mut Section,
    name: &str,
    value: &str,
    taken: &Taken,
    report: &mut Report,
) {
    if kafka.contains(name) {
        return report.unsupported(
            &taken.written,
            format!("this property sets {name} a second time"),
        );
    }
    let properties = [("bootstrap.servers", NO_BROKER), (name, value)];
    let properties: Properties = properties
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    // Reject NUL characters, at which librdkafka would truncate the value.
    let checked = match value.contains('\0') {
        true => Err("The value contains a NUL character".to_owned()),
        false => check(&properties).map_err(|error| error.to_string()),
    };
    match checked {
        Ok(()) => {
            report.carried(&taken.written, format!("{name:?} in [kafka]"));
            kafka.set(name, text(value), taken.written.clone());
        }
        Err(error) => report.unsupported(
            &taken.written,
            format!("librdkafka rejects this property. {error}"),
        ),
    }
}
