//! Combines walpost.toml, flags and environment variables into the settings of one pipeline.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::error::ConfigError;
use super::file::{self, DeliveryName, FilePipeline, Origin, SinkName};
use super::reader::Reader;
use super::selection::read_again;
use super::values::{Bytes, PASSWORD_COMMAND, parse_duration, parse_size};
use super::{Env, Given, GivenSink};
use super::{commands, kafka, records, reserved, target};
use crate::kafka::properties::Properties;
use crate::kafka::settings::CheckpointSettings;
use crate::outbox::reserved_topics::{DEFAULT_CHECKPOINT_TOPIC, ReservedTopics, TopicUse};
use crate::outbox::settings::Topic;
use crate::pipeline::settings::{
    DeadLetterSettings, Delivery, PipelineSettings, Retention, SinkSettings, Undeliverable,
};
use crate::pipeline::wal_budget::budget::{OnMax, WalBudget};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::target::{Outbox, Target};
use crate::program::Program;

pub(super) fn settings(
    mut file: FilePipeline,
    path: Option<&Path>,
    file_kafka: &BTreeMap<String, file::Scalar>,
    from_env: &Properties,
    given: &Given<'_>,
    env: Env<'_>,
) -> Result<PipelineSettings, ConfigError> {
    let name = file.name().to_owned();
    let reader = Reader {
        pipeline: name.clone(),
    };
    let is_legal = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    if name.is_empty() || name.len() > 48 || !name.bytes().all(is_legal) {
        return Err(reader.error("name", "expected 1 to 48 characters of a-z, 0-9 and _"));
    }
    given.overlay(&mut file);
    let mut postgres = postgres(&name, file.postgres.as_deref(), env)?;
    if let Some(path) = path
        && file.postgres.is_some()
        && given.connection.postgres.is_none()
    {
        postgres = with_reread_password(postgres, path, &file.origin, &name);
    }
    // The password command belongs to the connection in the file. It must not be used for a
    // connection given on the command line.
    if let Some(argv) = &file.password_command
        && given.connection.postgres.is_none()
    {
        let error = |reason: String| reader.error(PASSWORD_COMMAND, reason);
        let program = Program::new(argv).map_err(error)?;
        let place = format!("{PASSWORD_COMMAND} of pipeline {name:?}");
        let with = postgres.with_password_command(program, &place);
        postgres = with.map_err(|reason| error(reason.to_owned()))?;
    }
    let has_postgres = file.postgres.is_some();
    let commands = commands::commands(&name, path, has_postgres, from_env, given, env);
    let target = target::target(&reader, &file, given, commands)?;
    let outbox = records::outbox(&reader, &file)?;
    let default_timeout = Duration::from_secs(60);
    let link_timeout = reader.parse("link_timeout", file.link_timeout.as_ref(), parse_duration)?;
    let link_timeout = link_timeout.unwrap_or(default_timeout);
    if link_timeout < Duration::from_secs(1) {
        return Err(reader.error("link_timeout", "expected at least 1s"));
    }
    let drain_timeout =
        reader.parse("drain_timeout", file.drain_timeout.as_ref(), parse_duration)?;
    let size = |key, given: &Option<file::Scalar>, default| {
        let given = given.as_ref().map(ToString::to_string);
        Ok::<_, ConfigError>(
            reader
                .parse(key, given.as_ref(), parse_size)?
                .unwrap_or(Bytes(default))
                .0,
        )
    };
    let window_bytes = size("window_bytes", &file.window_bytes, 8 << 20)?;
    let row_bytes_max = size("max_row_bytes", &file.max_row_bytes, 64 << 20)?;
    // PostgreSQL does not send messages larger than 1 GiB.
    let row_bytes_max = usize::try_from(row_bytes_max.min(1 << 30)).unwrap_or(1 << 30);
    let window_records = file.window_records.unwrap_or(100_000);
    if window_records == 0 || window_bytes == 0 || row_bytes_max < 1024 {
        let reason = "window_records and window_bytes must be greater than 0, and max_row_bytes at least 1KiB";
        return Err(reader.error("window", reason));
    }
    let delivery = delivery(&reader, &file)?;
    let dead_letters = dead_letters(&reader, &file, &target, &outbox.topic, &delivery)?;
    let retention = retention(&reader, &file, &target.outbox)?;
    let wal_budget = wal_budget(&reader, &file, &target.outbox)?;
    let (sink, is_for_delivery) = match given.sink {
        GivenSink::ForDelivery(sink) => (sink.or(file.sink).unwrap_or_default(), true),
        GivenSink::Instead(sink) => (sink, false),
    };
    let sink = match sink {
        SinkName::Stdout if is_for_delivery && delivery != Delivery::AtLeastOnce => {
            let reason = "exactly-once requires Kafka transactions, but the sink is stdout";
            return Err(reader.error("delivery", reason));
        }
        SinkName::Stdout => SinkSettings::Stdout,
        SinkName::Kafka => kafka::sink(&reader, &file, path, file_kafka, from_env, given)?,
    };
    let mut settings = PipelineSettings {
        name,
        defined_by: file.origin.defined_by(),
        postgres,
        target,
        outbox,
        sink,
        delivery,
        dead_letters,
        on_table_error: file.on_table_error.unwrap_or_default(),
        snapshot: file.snapshot.unwrap_or_default(),
        window_records,
        window_bytes,
        row_bytes_max,
        link_timeout,
        drain_timeout: drain_timeout.unwrap_or(Duration::from_secs(30)),
        retention,
        wal_budget,
    };
    let own = settings.own_topics();
    let own = ReservedTopics::new(own.map(|(topic, usage)| (topic.to_owned(), usage)));
    settings.outbox.reserved_topics = own;
    reserved::reject_constant_topic(&reader, &settings.outbox)?;
    Ok(settings)
}

fn retention(
    reader: &Reader,
    file: &FilePipeline,
    outbox: &Outbox,
) -> Result<Retention, ConfigError> {
    let is_given = file.retention.is_some() || file.partitions_ahead.is_some();
    if is_given && outbox.is_messages() {
        let reason = "an outbox that uses logical decoding messages has no table to clean up. Remove the retention and \
             partitions_ahead settings";
        return Err(reader.error("retention", reason));
    }
    let keep = reader.parse("retention", file.retention.as_ref(), parse_duration)?;
    if keep.is_some_and(|keep| keep < Duration::from_secs(1)) {
        return Err(reader.error("retention", "expected at least 1s"));
    }
    let ahead = file.partitions_ahead.unwrap_or(7);
    if !(1..=1000).contains(&ahead) {
        return Err(reader.error("partitions_ahead", "expected 1 to 1000"));
    }
    Ok(Retention {
        keep,
        ahead,
        delete_rows: file.delete_rows.unwrap_or_default(),
    })
}

fn wal_budget(
    reader: &Reader,
    file: &FilePipeline,
    outbox: &Outbox,
) -> Result<WalBudget, ConfigError> {
    let given = file.wal_budget.clone().unwrap_or_default();
    let size = |key, given: Option<file::Scalar>| {
        let given = given.map(|given| given.to_string());
        let size = reader.parse(key, given.as_ref(), parse_size)?;
        match size {
            Some(Bytes(0)) => Err(reader.error(key, "expected a size of more than 0 bytes")),
            size => Ok(size.map(|Bytes(size)| size)),
        }
    };
    let budget = WalBudget {
        warn_bytes: size("wal_budget.warn", given.warn)?,
        max_bytes: size("wal_budget.max", given.max)?,
        on_max: given.on_max.unwrap_or_default(),
    };
    if let (Some(warn), Some(max)) = (budget.warn_bytes, budget.max_bytes)
        && warn > max
    {
        let reason = format!(
            "found {warn} bytes, expected no more than wal_budget.max, which is {max} bytes"
        );
        return Err(reader.error("wal_budget.warn", reason));
    }
    if given.on_max.is_some() && budget.max_bytes.is_none() {
        let reason = "this key has no effect without wal_budget.max. Set wal_budget.max, or remove wal_budget.on_max";
        return Err(reader.error("wal_budget.on_max", reason));
    }
    if budget.on_max == OnMax::DropSlot && outbox.table().is_none() {
        let reason = match outbox.is_messages() {
            true => {
                "an outbox that uses logical decoding messages has no table from which events could be sent again; expected \
                 \"hold\""
            }
            false => "\"drop-slot\" requires an outbox with exactly one table; expected \"hold\"",
        };
        return Err(reader.error("wal_budget.on_max", reason));
    }
    Ok(budget)
}

fn delivery(reader: &Reader, file: &FilePipeline) -> Result<Delivery, ConfigError> {
    let checkpoint = file.checkpoint.clone().unwrap_or_default();
    if file.delivery.unwrap_or_default() == DeliveryName::AtLeastOnce {
        return Ok(Delivery::AtLeastOnce);
    }
    let topic = checkpoint
        .topic
        .unwrap_or_else(|| DEFAULT_CHECKPOINT_TOPIC.to_owned());
    records::check_topic_name(&topic).map_err(|reason| reader.error("checkpoint", reason))?;
    own_topic(&topic, TopicUse::Checkpoints)
        .map_err(|reason| reader.error("checkpoint", reason))?;
    let replication = checkpoint.replication.unwrap_or(-1);
    if replication == 0 || replication < -1 {
        return Err(reader.error("checkpoint", "expected at least 1 replica"));
    }
    Ok(Delivery::ExactlyOnce(CheckpointSettings {
        topic,
        replication,
    }))
}

/// Rejects a topic whose name is reserved by default for a different purpose, even if no pipeline
/// of this process uses it for that purpose: another Walpost process might.
fn own_topic(topic: &str, usage: TopicUse) -> Result<(), String> {
    match ReservedTopics::default().find(topic) {
        Some(other) if other != usage => Err(format!(
            "topic {topic:?} is reserved for {other} and can't be used for {usage}; choose another topic"
        )),
        _ => Ok(()),
    }
}

fn dead_letters(
    reader: &Reader,
    file: &FilePipeline,
    target: &Target,
    events: &Topic,
    delivery: &Delivery,
) -> Result<DeadLetterSettings, ConfigError> {
    const TOPIC: &str = "dead_letter_topic";
    let default = DeadLetterSettings::default();
    let settings = DeadLetterSettings {
        oversize: file.on_oversize.unwrap_or_default(),
        unroutable: file.on_unroutable.unwrap_or_default(),
        malformed: match target.outbox.is_messages() {
            // Rows can't be malformed. Ignore on_malformed rather than rejecting it, because a flag
            // may set it for other pipelines in the file.
            false => Undeliverable::Halt,
            // Don't halt by default, because in PostgreSQL any role that can connect is allowed to
            // write a malformed message unless this privilege is revoked.
            true => file.on_malformed.unwrap_or(Undeliverable::DeadLetter),
        },
        topic: file.dead_letter_topic.clone().unwrap_or(default.topic),
    };
    if !settings.is_enabled() {
        if file.dead_letter_topic.is_some() {
            let reason = "this key has no effect unless dead letters are enabled. Set on_oversize or on_unroutable to \
                          dead-letter, or remove dead_letter_topic";
            return Err(reader.error(TOPIC, reason));
        }
        return Ok(settings);
    }
    let topic = &settings.topic;
    records::check_topic_name(topic).map_err(|reason| reader.error(TOPIC, reason))?;
    own_topic(topic, TopicUse::DeadLetters).map_err(|reason| reader.error(TOPIC, reason))?;
    if events.constant() == Some(topic) {
        let reason = format!("topic {topic:?} is already used for events; choose another topic");
        return Err(reader.error(TOPIC, reason));
    }
    if matches!(delivery, Delivery::ExactlyOnce(checkpoint) if checkpoint.topic == *topic) {
        let reason =
            format!("topic {topic:?} is already used for checkpoints; choose another topic");
        return Err(reader.error(TOPIC, reason));
    }
    if target.outbox.is_messages() && settings.oversize == Undeliverable::DeadLetter {
        let reason = "a dead letter for an oversize event does not contain the payload, and an outbox that uses logical \
                      decoding messages does not store it anywhere else. Use halt, and raise message.max.bytes";
        return Err(reader.error("on_oversize", reason));
    }
    Ok(settings)
}

fn postgres(name: &str, url: Option<&str>, env: Env<'_>) -> Result<Conninfo, ConfigError> {
    let from_env = ["PGHOST", "PGHOSTADDR", "PGDATABASE"]
        .iter()
        .any(|name| env(name).is_some());
    let url = match url {
        Some(url) => url,
        None if from_env => "",
        None => return Err(ConfigError::NoPostgres(name.to_owned())),
    };
    Conninfo::parse(url, env).map_err(|error| ConfigError::Postgres {
        pipeline: name.to_owned(),
        error,
    })
}

/// Returns the connection string with a password source that reads the file again for each
/// connection, because the password in the file may change.
fn with_reread_password(
    postgres: Conninfo,
    path: &Path,
    origin: &Origin,
    pipeline: &str,
) -> Conninfo {
    let place = format!("the setting postgres of pipeline {pipeline:?} in {origin}");
    let (path, origin) = (path.to_owned(), origin.clone());
    let pipeline = pipeline.to_owned();
    postgres.with_source(&place, move || {
        let current = read_again(&path, &origin, &pipeline);
        let (_, current) = current.map_err(|error| error.to_string())?;
        let env = |name: &str| std::env::var(name).ok();
        let postgres = self::postgres(&pipeline, current.postgres.as_deref(), &env);
        postgres.map_err(|error| error.to_string())
    })
}
