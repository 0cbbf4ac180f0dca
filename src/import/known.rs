//! The remaining properties of Debezium's PostgreSQL connector, Kafka Connect and Debezium Server,
//! and how they are handled. Properties that correspond to a line of walpost.toml are read where
//! that line is written.
//!
//! Debezium 3.7, Kafka Connect 4.3.

use super::report::Report;
use super::source::{Source, Taken};

/// How a property is handled unless it has a harmless value.
#[derive(Clone, Copy)]
enum Fate {
    /// Neither a consumer nor an operator would notice its absence.
    WithoutEffect,
    Different(&'static str),
    /// Like `Different`, but the user has to act.
    ToDo(&'static str),
    Unsupported(&'static str),
}
use Fate::{Different, ToDo, Unsupported, WithoutEffect};

/// A property, or all properties with a prefix if it ends with `*`; its harmless values; and how
/// other values are handled.
struct Known(&'static str, &'static [&'static str], Fate);

const TYPES: Fate = ToDo(
    "changes how columns of some types come as key, header or envelope. Walpost writes them as Debezium does with this property's \
     default: compare those columns before the switch-over",
);
const SKIPS: Fate = Different(
    "has Debezium leave out events that fail. Walpost leaves nothing out: it halts, or sends a dead letter with on_unroutable = \
     \"dead-letter\"",
);
const COLUMNS: Fate = Unsupported(
    "changes the values of columns. Walpost delivers them as they are in the table: have the service write them so",
);
const COPY: Fate = Different(
    "is of Debezium's snapshot. Walpost copies all rows that are older than its slot, or none; walpost replay sends some again",
);
const SIGNALS: Fate = Different(
    "is of Debezium's signals, which Walpost does not read; walpost replay sends rows of the table again",
);
const TOPICS: Fate = ToDo(
    "is a setting of new topics, and Walpost sets their partitions and replicas alone: create the topics yourself, or set it with \
     kafka-configs.sh",
);

const KNOWN: &[Known] = &[
    // Kafka Connect.
    Known("tasks.max", &[], WithoutEffect),
    Known("tasks.max.enforce", &[], WithoutEffect),
    Known("config.action.reload", &[], WithoutEffect),
    Known("connector.plugin.version", &[], WithoutEffect),
    Known("key.converter.plugin.version", &[], WithoutEffect),
    Known("value.converter.plugin.version", &[], WithoutEffect),
    Known("header.converter.plugin.version", &[], WithoutEffect),
    Known("offsets.storage.topic", &[], WithoutEffect),
    Known("transaction.boundary", &[], WithoutEffect),
    Known("transaction.boundary.interval.ms", &[], WithoutEffect),
    Known("errors.tolerance", &["none"], SKIPS),
    Known("errors.*", &[], WithoutEffect),
    Known("consumer.override.*", &[], WithoutEffect),
    Known("admin.override.*", &[], WithoutEffect),
    Known("topic.creation.enable", &[], WithoutEffect),
    Known("topic.creation.*", &[], TOPICS),
    // The slot and the publication.
    Known("plugin.name", &[], WithoutEffect),
    Known(
        "slot.drop.on.stop",
        &["false"],
        ToDo(
            "has Debezium drop its slot when it stops: set it to false before the switch-over, so that there is a way back",
        ),
    ),
    Known(
        "slot.failover",
        &["false"],
        Different(
            "is what walpost init does from PostgreSQL 17 on, if it is not told --no-failover",
        ),
    ),
    Known("slot.stream.params", &[], WithoutEffect),
    Known("slot.max.retries", &[], WithoutEffect),
    Known("slot.retry.delay.ms", &[], WithoutEffect),
    Known("slot.seek.to.known.offset.on.start", &[], WithoutEffect),
    Known(
        "offset.mismatch.strategy",
        &[],
        Different("has no equal: Walpost halts where its slot was moved, and says how to go on"),
    ),
    Known("create.slot.command.timeout", &[], WithoutEffect),
    Known("publication.name", &[], WithoutEffect),
    Known("publication.autocreate.mode", &[], WithoutEffect),
    Known("publish.via.partition.root", &[], WithoutEffect),
    Known("replica.identity.autoset.values", &[], WithoutEffect),
    Known("status.update.interval.ms", &[], WithoutEffect),
    Known("lsn.flush.timeout.ms", &[], WithoutEffect),
    Known("lsn.flush.timeout.action", &[], WithoutEffect),
    Known(
        "lsn.flush.mode",
        &["connector", "connector_and_driver"],
        ToDo(
            "leaves it to others to move Debezium's slot, so its position does not say what Debezium has delivered: in the switch-over, \
         compare Debezium's offsets with the start of Walpost's slot",
        ),
    ),
    Known(
        "flush.lsn.source",
        &["true"],
        ToDo(
            "leaves it to others to move Debezium's slot, so its position does not say what Debezium has delivered: in the switch-over, \
         compare Debezium's offsets with the start of Walpost's slot",
        ),
    ),
    Known("xmin.fetch.interval.ms", &[], WithoutEffect),
    Known(
        "read.only",
        &["false"],
        Unsupported(
            "keeps Debezium from writing. Walpost writes what is confirmed into the table walpost.slot_state of the primary, and reads \
         its slot there: let its role do that (sql/role.sql)",
        ),
    ),
    Known("connection.validation.timeout.ms", &[], WithoutEffect),
    Known("database.query.timeout.ms", &[], WithoutEffect),
    Known("database.tcpKeepAlive", &["true"], WithoutEffect),
    Known(
        "database.initial.statements",
        &[""],
        Unsupported(
            "runs SQL in each session. Write settings into the connection string: options='-c NAME=VALUE'",
        ),
    ),
    Known(
        "database.sslfactory",
        &[""],
        Unsupported(
            "is a class of Java. What is checked is chosen with sslmode and sslrootcert in postgres",
        ),
    ),
    Known(
        "database.connection.factory.class",
        &[""],
        Unsupported(
            "is a class of Java. Passwords come from PGPASSWORD, ~/.pgpass or walpost.toml",
        ),
    ),
    Known(
        "driver.*",
        &[],
        Unsupported(
            "is a property of the JDBC driver. Write its equal of libpq into postgres, if there is one",
        ),
    ),
    // Tables and columns.
    Known(
        "table.exclude.list",
        &[""],
        Different("has no equal: a pipeline reads its own table and no other"),
    ),
    Known(
        "schema.exclude.list",
        &[""],
        Different("has no equal: a pipeline reads its own table and no other"),
    ),
    Known("database.include.list", &[], WithoutEffect),
    Known("database.exclude.list", &[], WithoutEffect),
    Known("table.ignore.builtin", &[], WithoutEffect),
    Known("column.include.list", &[], WithoutEffect),
    Known("column.exclude.list", &[], WithoutEffect),
    Known("column.mask.*", &[], COLUMNS),
    Known("column.truncate.*", &[], COLUMNS),
    Known(
        "converters",
        &[""],
        Unsupported(
            "are converters of your own for columns, and Walpost has none: their columns come as Debezium's defaults have them",
        ),
    ),
    Known(
        "post.processors",
        &[""],
        Unsupported("are processors of your own, and Walpost has none"),
    ),
    Known("message.key.columns", &[], WithoutEffect),
    Known(
        "message.prefix.include.list",
        &[""],
        Different(
            "is of messages of pg_logical_emit_message. Walpost reads those that are its own events alone: docs/messages.md",
        ),
    ),
    Known(
        "message.prefix.exclude.list",
        &[""],
        Different(
            "is of messages of pg_logical_emit_message. Walpost reads those that are its own events alone: docs/messages.md",
        ),
    ),
    Known("skip.messages.without.change", &[], WithoutEffect),
    Known("tombstones.on.delete", &[], WithoutEffect),
    Known(
        "provide.transaction.metadata",
        &["false"],
        ToDo(
            "has Debezium send a record for each BEGIN and END to a topic of its own. Walpost sends none: the header walpost-position has \
         the LSN of the commit, which is one for all records of a transaction",
        ),
    ),
    Known("transaction.metadata.factory", &[], WithoutEffect),
    Known("unavailable.value.placeholder", &[], WithoutEffect),
    // Values.
    Known("time.precision.mode", &["adaptive"], TYPES),
    Known("decimal.handling.mode", &["precise"], TYPES),
    Known("hstore.handling.mode", &["json"], TYPES),
    Known("interval.handling.mode", &["numeric"], TYPES),
    Known("money.fraction.digits", &["2"], TYPES),
    Known(
        "binary.handling.mode",
        &["bytes"],
        Unsupported(
            "writes bytea as text. Walpost delivers its bytes as they are: have the service write base64 or hex into a text column",
        ),
    ),
    Known("include.unknown.datatypes", &[], WithoutEffect),
    Known("schema.refresh.mode", &[], WithoutEffect),
    Known("schema.name.adjustment.mode", &["none"], TYPES),
    Known("field.name.adjustment.mode", &["none"], TYPES),
    Known("column.propagate.source.type", &[""], TYPES),
    Known("datatype.propagate.source.type", &[""], TYPES),
    // Failures.
    Known("event.processing.failure.handling.mode", &["fail"], SKIPS),
    Known(
        "event.converting.failure.handling.mode",
        &["fail", "warn"],
        SKIPS,
    ),
    Known("custom.retriable.exception", &[], WithoutEffect),
    Known("retriable.restart.connector.wait.ms", &[], WithoutEffect),
    // Snapshots and signals.
    Known("snapshot.include.collection.list", &[""], COPY),
    Known("snapshot.select.statement.overrides*", &[], COPY),
    Known("snapshot.query.mode", &["select_all"], COPY),
    Known("snapshot.*", &[], WithoutEffect),
    Known("legacy.snapshot.max.threads", &[], WithoutEffect),
    Known("incremental.snapshot.*", &[], WithoutEffect),
    Known("streaming.delay.ms", &[], WithoutEffect),
    Known("signal.data.collection", &[""], SIGNALS),
    Known(
        "signal.enabled.channels",
        &["source", "source,kafka"],
        SIGNALS,
    ),
    Known("signal.*", &[], WithoutEffect),
    Known(
        "notification.enabled.channels",
        &[""],
        Different(
            "has no equal: the state of a pipeline is in its metrics, /status and walpost status",
        ),
    ),
    Known("notification.*", &[], WithoutEffect),
    // Heartbeats.
    Known(
        "heartbeat.interval.ms",
        &["0"],
        Different(
            "has no equal and needs none: Walpost confirms what the WAL has of other tables, and sends no record to a heartbeat topic",
        ),
    ),
    Known("topic.heartbeat.prefix", &[], WithoutEffect),
    Known("topic.heartbeat.name", &[], WithoutEffect),
    // Topic names, which the router replaces.
    Known("topic.naming.strategy", &[], WithoutEffect),
    Known("topic.delimiter", &[], WithoutEffect),
    Known("topic.cache.size", &[], WithoutEffect),
    Known("topic.transaction", &[], WithoutEffect),
    // Queues, threads and metrics.
    Known("max.batch.size", &[], WithoutEffect),
    Known("max.queue.size", &[], WithoutEffect),
    Known("max.queue.size.in.bytes", &[], WithoutEffect),
    Known("queue.provider.*", &[], WithoutEffect),
    Known("poll.interval.ms", &[], WithoutEffect),
    Known("poll.dispatch.interval.ms", &[], WithoutEffect),
    Known("query.fetch.size", &[], WithoutEffect),
    Known("executor.shutdown.timeout.ms", &[], WithoutEffect),
    Known("custom.metric.tags", &[], WithoutEffect),
    Known("custom.sanitize.pattern", &[], WithoutEffect),
    Known("advanced.metrics.enable", &[], WithoutEffect),
    Known("statistics.metrics.enabled", &[], WithoutEffect),
    Known("guardrail.*", &[], WithoutEffect),
    Known("openlineage.*", &[], WithoutEffect),
    Known("sourceinfo.struct.maker", &[], WithoutEffect),
    Known("include.schema.changes", &[], WithoutEffect),
    Known("include.schema.comments", &[], WithoutEffect),
    Known("log.position.check.enable", &[], WithoutEffect),
    Known("offset.activity.monitor.interval.ms", &[], WithoutEffect),
    Known("multi.partition.mode", &[], WithoutEffect),
    Known("table.mapping.storage.*", &[], WithoutEffect),
    Known("internal.*", &[], WithoutEffect),
    // Debezium Server and its engine.
    Known("offset.storage*", &[], WithoutEffect),
    Known("offset.flush.*", &[], WithoutEffect),
    Known("offset.commit.policy", &[], WithoutEffect),
    Known("schema.history.internal*", &[], WithoutEffect),
    Known("record.processing.*", &[], WithoutEffect),
    Known("task.management.timeout.ms", &[], WithoutEffect),
    Known("http.*", &[], WithoutEffect),
    Known(
        "debezium.sink.kafka.wait.message.delivery.timeout.ms",
        &[],
        WithoutEffect,
    ),
    Known(
        "debezium.sink.*",
        &[],
        Unsupported("is of a sink that Walpost does not have"),
    ),
    Known("debezium.api.*", &[], WithoutEffect),
    Known("quarkus.*", &[], WithoutEffect),
];

/// The properties that correspond to lines of walpost.toml, for suggestions if a name is
/// misspelled.
const CONVERTED_PROPERTIES: &[&str] = &[
    "connector.class",
    "name",
    "database.hostname",
    "database.port",
    "database.user",
    "database.password",
    "database.dbname",
    "database.sslmode",
    "database.sslcert",
    "database.sslkey",
    "database.sslpassword",
    "database.sslrootcert",
    "slot.name",
    "table.include.list",
    "schema.include.list",
    "topic.prefix",
    "snapshot.mode",
    "heartbeat.action.query",
    "skipped.operations",
    "extended.headers.enabled",
    "exactly.once.support",
    "transforms",
    "predicates",
    "key.converter",
    "value.converter",
    "header.converter",
    "key.converter.schemas.enable",
    "value.converter.schemas.enable",
    "header.converter.schemas.enable",
    "topic.creation.default.partitions",
    "topic.creation.default.replication.factor",
    "transforms.NAME.type",
    "debezium.format.key",
    "debezium.format.value",
    "debezium.format.header",
    "debezium.sink.type",
];

/// Names of earlier versions and common mistakes, with the intended names.
pub(super) const OBSOLETE: &[(&str, &str)] = &[
    ("table.whitelist", "table.include.list"),
    ("table.blacklist", "table.exclude.list"),
    ("schema.whitelist", "schema.include.list"),
    ("schema.blacklist", "schema.exclude.list"),
    ("column.whitelist", "column.include.list"),
    ("column.blacklist", "column.exclude.list"),
    ("database.whitelist", "database.include.list"),
    ("message.prefix.whitelist", "message.prefix.include.list"),
    ("database.server.name", "topic.prefix"),
    ("database.sslMode", "database.sslmode"),
    ("database.host", "database.hostname"),
    ("database.username", "database.user"),
    ("database.name", "database.dbname"),
    ("database.database", "database.dbname"),
    ("slot.drop_on_stop", "slot.drop.on.stop"),
    ("heartbeat.topics.prefix", "topic.heartbeat.prefix"),
    ("toasted.value.placeholder", "unavailable.value.placeholder"),
    (
        "debezium.expand.json.payload",
        "transforms.NAME.table.expand.json.payload",
    ),
    (
        "debezium.op.invalid.behavior",
        "transforms.NAME.table.op.invalid.behavior",
    ),
    ("bootstrap.servers", "producer.override.bootstrap.servers"),
];

/// Names of earlier versions whose values apply if the current name is not set.
pub(super) const FORMER_NAMES: &[(&str, &str)] = &[
    ("table.include.list", "table.whitelist"),
    ("schema.include.list", "schema.whitelist"),
    ("topic.prefix", "database.server.name"),
];

/// Reports how the remaining properties of a source are handled.
pub(super) fn left(source: &mut Source, report: &mut Report) {
    let custom = names_of(source, &["converters", "post.processors"]);
    let left: Vec<_> = source
        .left()
        .map(|(name, taken)| (name.to_owned(), taken))
        .collect();
    for (name, taken) in left {
        let is_custom = custom.iter().any(|custom| {
            name.strip_prefix(custom.as_str())
                .is_some_and(|rest| rest.starts_with('.'))
        });
        if is_custom {
            report.without_effect(&taken.written);
            continue;
        }
        match KNOWN.iter().find(|Known(known, ..)| is_of(&name, known)) {
            Some(known) => tell(known, &taken, report),
            None => report.unknown(&shown(&taken.written), meaning(&name)),
        }
    }
}

/// Returns the members of lists that define the prefixes of other properties.
fn names_of(source: &Source, lists: &[&str]) -> Vec<String> {
    let lists = source.left().filter(|(name, _)| lists.contains(name));
    lists.flat_map(|(_, taken)| taken.list()).collect()
}

fn is_of(name: &str, known: &str) -> bool {
    match known.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == known,
    }
}

fn tell(Known(_, harmless, fate): &Known, taken: &Taken, report: &mut Report) {
    let written = shown(&taken.written);
    let value: String = taken.value.split_whitespace().collect();
    let is_harmless = harmless
        .iter()
        .any(|harmless| value.eq_ignore_ascii_case(harmless));
    match fate {
        WithoutEffect => report.without_effect(&written),
        _ if is_harmless => report.without_effect(&written),
        Different(says) => report.different(&written, *says),
        ToDo(says) => report.task(&written, *says),
        Unsupported(says) => report.unsupported(&written, *says),
    }
}

/// Removes the secret from a name: `column.mask.hash.SHA-256.with.salt.SECRET`.
fn shown(written: &str) -> String {
    match written.split_once(".with.salt.") {
        Some((name, _)) => format!("{name}.with.salt..."),
        None => written.to_owned(),
    }
}

/// Describes the likely intention behind an unknown name.
fn meaning(name: &str) -> String {
    if let Some((_, meant)) = OBSOLETE.iter().find(|(obsolete, _)| *obsolete == name) {
        return format!(
            "is no property of Debezium 3; {meant} is likely meant. Debezium takes no notice of it, nor does Walpost"
        );
    }
    let known = KNOWN
        .iter()
        .map(|Known(known, ..)| known.trim_end_matches(['*', '.']));
    match nearest(name, known.chain(CONVERTED_PROPERTIES.iter().copied())) {
        Some(known) => format!("is no property of Debezium 3.7; did you mean {known}? Debezium takes no notice of it, nor does Walpost"),
        None => "is no property of Debezium 3.7 that is known here: find out what it is for, and remove it if nothing".to_owned(),
    }
}

/// Returns the known name that is most similar to `name`, if one is similar enough.
pub(super) fn nearest<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    known
        .map(|known| (strsim::damerau_levenshtein(name, known), known))
        .filter(|(distance, known)| *distance <= name.len().min(known.len()) / 4 + 1)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::report::{Finding, Group};

    fn found(properties: &[(&str, &str)]) -> Vec<Finding> {
        let mut report = Report::default();
        let mut text = "connector.class=C\n".to_owned();
        for (name, value) in properties {
            text += &format!("{name}={value}\n");
        }
        let mut source = Source::read(&text, &mut report).expect("properties");
        source.raw("connector.class");
        left(&mut source, &mut report);
        report.finish()
    }

    #[test]
    fn what_has_no_effect_is_one_line() {
        let found = found(&[
            ("tasks.max", "1"),
            ("poll.interval.ms", "10"),
            ("errors.tolerance", "none"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0]
                .says
                .ends_with("for errors.tolerance, poll.interval.ms, tasks.max"),
            "{found:?}"
        );
        assert!(!found[0].needs_person);
    }

    #[test]
    fn a_value_that_changes_something_is_told() {
        for (name, value, group) in [
            ("errors.tolerance", "all", Group::Different),
            ("read.only", "true", Group::Unsupported),
            ("slot.failover", "true", Group::Different),
            ("lsn.flush.mode", "manual", Group::Different),
            (
                "column.mask.with.10.chars",
                "public.outbox.payload",
                Group::Unsupported,
            ),
            ("binary.handling.mode", "base64", Group::Unsupported),
            (
                "topic.creation.default.cleanup.policy",
                "compact",
                Group::Different,
            ),
            ("provide.transaction.metadata", "true", Group::Different),
        ] {
            let found = found(&[(name, value)]);
            assert_eq!((found.len(), found[0].group), (1, group), "{found:?}");
            assert_eq!(found[0].property, name);
        }
    }

    #[test]
    fn a_misspelling_has_its_likely_meaning() {
        for (name, expected) in [
            ("table.whitelist", "table.include.list"),
            ("slot.nam", "slot.name"),
            ("database.hostnam", "database.hostname"),
            ("debezium.expand.json.payload", "table.expand.json.payload"),
            ("max.batch.sizes", "max.batch.size"),
        ] {
            let found = found(&[(name, "x")]);
            assert_eq!(found[0].group, Group::Unknown, "{found:?}");
            assert!(found[0].says.contains(expected), "{found:?}");
            assert!(found[0].needs_person);
        }
        let found = found(&[("my.own.thing", "x")]);
        assert!(found[0].says.contains("known here"), "{found:?}");
    }

    #[test]
    fn properties_of_own_converters_go_with_them() {
        let found = found(&[
            ("converters", "iso"),
            ("iso.type", "com.example.Iso"),
            ("iso.format", "x"),
        ]);
        assert!(
            found.iter().all(|finding| finding.group != Group::Unknown),
            "{found:?}"
        );
    }

    #[test]
    fn a_salt_in_a_name_is_not_shown() {
        let found = found(&[("column.mask.hash.SHA-256.with.salt.hunter2", "a")]);
        assert!(!format!("{found:?}").contains("hunter2"), "{found:?}");
    }
}
