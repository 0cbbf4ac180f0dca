//! Determines the flags to include in the commands that messages suggest, so that these commands
//! use the same configuration as this process.

use std::collections::BTreeMap;
use std::path::Path;

use clap::ValueEnum;

use super::args::{ConnectionArgs, RecordArgs};
use super::file::DeliveryName;
use super::{Env, Given};
use crate::kafka::credentials::Credentials;
use crate::kafka::topics::CreateTopics;
use crate::model::commands::{Commands, Options};
use crate::postgres::connect::conninfo::Conninfo;

/// Environment variables for a database connection, and the equivalent connection string keywords.
const POSTGRES_VARIABLES: [(&str, &str); 7] = [
    ("PGHOST", "host"),
    ("PGHOSTADDR", "hostaddr"),
    ("PGPORT", "port"),
    ("PGDATABASE", "dbname"),
    ("PGUSER", "user"),
    ("PGSSLMODE", "sslmode"),
    ("PGSSLROOTCERT", "sslrootcert"),
];

type Flags = Vec<(&'static str, String)>;

/// Creates the commands to suggest for the named pipeline. `has_postgres` indicates whether the
/// file contains the pipeline's database connection. `kafka` contains the properties set by
/// environment variables.
pub(super) fn commands(
    pipeline: &str,
    path: Option<&Path>,
    has_postgres: bool,
    kafka: &BTreeMap<String, String>,
    given: &Given<'_>,
    env: Env<'_>,
) -> Commands {
    let mut common = vec![("--pipeline", pipeline.to_owned())];
    common.extend(path.map(|path| ("--config", path.display().to_string())));
    match &given.connection.postgres {
        Some(url) => common.push(("--postgres", without_passwords(url))),
        None if has_postgres => {}
        None => common.push(("--postgres", variable_assignments(env))),
    }
    common.extend(connection_flags(given.connection));
    let from_variables = kafka
        .iter()
        .filter(|(name, _)| !Credentials::have(name))
        .map(|(name, value)| ("--kafka-property", format!("{name}={value}")));
    let mut records: Flags = from_variables.collect();
    records.extend(given.records.into_iter().flat_map(record_flags));
    Commands::new(Options { common, records })
}

/// Returns the connection string without passwords. A connection string without a password is
/// returned unchanged.
fn without_passwords(url: &str) -> String {
    match Conninfo::contains_password(url) {
        false => url.to_owned(),
        true => conninfo(Conninfo::without_passwords(url)),
    }
}

fn variable_assignments(env: Env<'_>) -> String {
    let pairs = POSTGRES_VARIABLES.iter();
    conninfo(
        pairs
            .filter_map(|(variable, keyword)| Some(((*keyword).to_owned(), env(variable)?)))
            .collect(),
    )
}

/// Formats keywords and values as a connection string.
fn conninfo(pairs: Vec<(String, String)>) -> String {
    let quoted = |value: &str| {
        let is_plain = !value.is_empty() && !value.contains([' ', '\'', '\\', '\t', '\n']);
        match is_plain {
            true => value.to_owned(),
            false => format!("'{}'", value.replace('\\', r"\\").replace('\'', r"\'")),
        }
    };
    let pairs = pairs.iter();
    let pairs: Vec<_> = pairs
        .map(|(keyword, value)| format!("{keyword}={}", quoted(value)))
        .collect();
    pairs.join(" ")
}

fn connection_flags(args: &ConnectionArgs) -> Flags {
    let texts = [
        ("--outbox", args.outbox.and_then(value_name)),
        ("--table", args.table.clone()),
        ("--prefix", args.prefix.clone()),
        ("--publication", args.publication.clone()),
        ("--slot", args.slot.clone()),
    ];
    given(texts)
}

fn record_flags(args: &RecordArgs) -> Flags {
    let delivery = match args.exactly_once {
        true => value_name(DeliveryName::ExactlyOnce),
        false => args.delivery.and_then(value_name),
    };
    let mut flags = given([
        ("--kafka", args.kafka.clone()),
        ("--create-topics", args.create_topics.map(create_topics)),
        ("--delivery", delivery),
        ("--on-oversize", args.on_oversize.and_then(value_name)),
        ("--on-unroutable", args.on_unroutable.and_then(value_name)),
        ("--on-malformed", args.on_malformed.and_then(value_name)),
        ("--on-table-error", args.on_table_error.and_then(value_name)),
        ("--dead-letter-topic", args.dead_letter_topic.clone()),
        ("--topic", args.topic.clone()),
        ("--key", args.key.clone()),
        ("--payload", args.payload.clone()),
        ("--null-payload", args.null_payload.and_then(value_name)),
    ]);
    let properties = args.kafka_property.iter();
    let is_public = |text: &&String| {
        let name = text.split_once('=').map_or(&***text, |(name, _)| name);
        !Credentials::have(name)
    };
    flags.extend(
        properties
            .filter(is_public)
            .map(|text| ("--kafka-property", text.clone())),
    );
    let headers = args.header.iter();
    flags.extend(headers.map(|(name, template)| ("--header", format!("{name}={template}"))));
    flags
}

fn given<const N: usize>(flags: [(&'static str, Option<String>); N]) -> Flags {
    let flags = flags.into_iter();
    flags
        .filter_map(|(flag, value)| Some((flag, value?)))
        .collect()
}

/// Returns the name that represents this value on the command line.
fn value_name(value: impl ValueEnum) -> Option<String> {
    Some(value.to_possible_value()?.get_name().to_owned())
}

fn create_topics(topics: CreateTopics) -> String {
    match topics.replication {
        -1 => topics.partitions.to_string(),
        replication => format!("{}:{replication}", topics.partitions),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GivenSink;

    fn skip(connection: &ConnectionArgs, records: &RecordArgs, env: Env<'_>) -> String {
        let given = Given {
            connection,
            records: Some(records),
            sink: GivenSink::ForDelivery(None),
            accepts_single_table: false,
        };
        let properties = BTreeMap::from([
            ("sasl.password".to_owned(), "hunter2".to_owned()),
            ("security.protocol".to_owned(), "sasl_ssl".to_owned()),
        ]);
        let path = connection.config.as_deref();
        commands("outbox", path, false, &properties, &given, env).print(["skip", "--to", "0/1"])
    }

    #[test]
    fn suggested_commands_contain_every_flag_but_no_password() {
        let connection = ConnectionArgs {
            postgres: Some("postgresql://shop:hunter2@db/shop".to_owned()),
            table: Some("shop.outbox".to_owned()),
            slot: Some("other".to_owned()),
            ..ConnectionArgs::default()
        };
        let records = RecordArgs {
            kafka: Some("a:9092,b:9092".to_owned()),
            kafka_property: vec!["sasl.password=hunter2".to_owned(), "acks=all".to_owned()],
            exactly_once: true,
            ..RecordArgs::default()
        };
        let printed = skip(&connection, &records, &|_| None);
        for text in [
            "walpost skip --to 0/1 --pipeline outbox ",
            "host=db",
            "user=shop",
            "dbname=shop",
            " --table shop.outbox --slot other ",
            " --kafka-property 'security.protocol=sasl_ssl' ",
            " --kafka a:9092,b:9092 --delivery exactly-once ",
            "'acks=all'",
        ] {
            assert!(printed.contains(text), "{text} in {printed}");
        }
        assert!(!printed.contains("hunter2"), "{printed}");
    }

    #[test]
    fn suggested_commands_contain_the_database_name_from_the_environment() {
        let env = |name: &str| match name {
            "PGHOST" => Some("/var/run/my socket".to_owned()),
            "PGDATABASE" => Some("shop".to_owned()),
            "PGPASSWORD" => Some("hunter2".to_owned()),
            _ => None,
        };
        let printed = skip(&ConnectionArgs::default(), &RecordArgs::default(), &env);
        let expected = r"--postgres 'host='\''/var/run/my socket'\'' dbname=shop'";
        assert!(printed.contains(expected), "{printed}");
        assert!(!printed.contains("hunter2"), "{printed}");
    }
}
