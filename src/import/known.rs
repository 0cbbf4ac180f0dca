//! Determines how an import reports the properties of Debezium's PostgreSQL connector, Kafka
//! Connect and Debezium Server that do not correspond to a line of walpost.toml. Properties that do
//! are handled by the modules that write these lines.
//!
//! Covers the properties of Debezium 3.7 and Kafka Connect 4.3.

use super::report::Report;
use super::source::{Source, Taken};

/// How to report a property whose value affects the import.
#[derive(Clone, Copy)]
enum Handling {
    /// Walpost has no equivalent setting, but the difference does not affect consumers or
    /// operators.
    WithoutEffect,
    Different(&'static str),
    /// Like `Different`, but requires action by the user.
    ToDo(&'static str),
    Unsupported(&'static str),
}
use Handling::{Different, ToDo, Unsupported, WithoutEffect};

/// A known property: its name, or a prefix of property names followed by `*`; the values that don't
/// affect the import; and how other values are reported.
struct KnownProperty(&'static str, &'static [&'static str], Handling);

const TYPES: Handling = ToDo(
    "this property changes how columns of some types are written to the key, headers or envelope. Walpost writes these columns \
     as Debezium does with the property's default: compare them before the switch-over",
);
const SKIPS: Handling = Different(
    "this setting makes Debezium skip events that fail. Walpost does not skip events: it halts, or sends a dead letter with \
     on_unroutable = \"dead-letter\"",
);
const COLUMNS: Handling = Unsupported(
    "this property changes the values of columns. Walpost delivers the values in the table: change the service so that it writes \
     the values that consumers expect",
);
const COPY: Handling = Different(
    "this property configures Debezium's snapshot. Walpost copies all rows that are older than its slot, or none; walpost replay \
     sends selected rows again",
);
const SIGNALS: Handling = Different(
    "this property configures Debezium's signals, which Walpost does not support; walpost replay sends rows of the table again",
);
const TOPICS: Handling = ToDo(
    "this is a setting for new topics. Walpost sets only their partitions and replicas: create the topics yourself, or change \
     the setting with kafka-configs.sh",
);

const KNOWN: &[KnownProperty] = &[
    // Kafka Connect.
    KnownProperty("tasks.max", &[], WithoutEffect),
    KnownProperty("tasks.max.enforce", &[], WithoutEffect),
    KnownProperty("config.action.reload", &[], WithoutEffect),
    KnownProperty("connector.plugin.version", &[], WithoutEffect),
    KnownProperty("key.converter.plugin.version", &[], WithoutEffect),
    KnownProperty("value.converter.plugin.version", &[], WithoutEffect),
    KnownProperty("header.converter.plugin.version", &[], WithoutEffect),
    KnownProperty("offsets.storage.topic", &[], WithoutEffect),
    KnownProperty("transaction.boundary", &[], WithoutEffect),
    KnownProperty("transaction.boundary.interval.ms", &[], WithoutEffect),
    KnownProperty("errors.tolerance", &["none"], SKIPS),
    KnownProperty("errors.*", &[], WithoutEffect),
    KnownProperty("consumer.override.*", &[], WithoutEffect),
    KnownProperty("admin.override.*", &[], WithoutEffect),
    KnownProperty("topic.creation.enable", &[], WithoutEffect),
    KnownProperty("topic.creation.*", &[], TOPICS),
    // Properties that configure the slot and the publication.
    KnownProperty("plugin.name", &[], WithoutEffect),
    KnownProperty(
        "slot.drop.on.stop",
        &["false"],
        ToDo(
            "this setting makes Debezium drop its slot when it stops: set the property to false before the switch-over, so that \
             you can switch back",
        ),
    ),
    KnownProperty(
        "slot.failover",
        &["false"],
        Different(
            "on PostgreSQL 17 and later, walpost init creates a failover slot by default; --no-failover disables this",
        ),
    ),
    KnownProperty("slot.stream.params", &[], WithoutEffect),
    KnownProperty("slot.max.retries", &[], WithoutEffect),
    KnownProperty("slot.retry.delay.ms", &[], WithoutEffect),
    KnownProperty("slot.seek.to.known.offset.on.start", &[], WithoutEffect),
    KnownProperty(
        "offset.mismatch.strategy",
        &[],
        Different(
            "this property has no equivalent: if Walpost's slot was moved, Walpost halts and logs the commands that resolve this",
        ),
    ),
    KnownProperty("create.slot.command.timeout", &[], WithoutEffect),
    KnownProperty("publication.name", &[], WithoutEffect),
    KnownProperty("publication.autocreate.mode", &[], WithoutEffect),
    KnownProperty("publish.via.partition.root", &[], WithoutEffect),
    KnownProperty("replica.identity.autoset.values", &[], WithoutEffect),
    KnownProperty("status.update.interval.ms", &[], WithoutEffect),
    KnownProperty("lsn.flush.timeout.ms", &[], WithoutEffect),
    KnownProperty("lsn.flush.timeout.action", &[], WithoutEffect),
    KnownProperty(
        "lsn.flush.mode",
        &["connector", "connector_and_driver"],
        ToDo(
            "this setting lets other programs move Debezium's slot, so the position of the slot does not show what Debezium has \
             delivered: during the switch-over, compare Debezium's offsets with the start of Walpost's slot",
        ),
    ),
    KnownProperty(
        "flush.lsn.source",
        &["true"],
        ToDo(
            "this setting lets other programs move Debezium's slot, so the position of the slot does not show what Debezium has \
             delivered: during the switch-over, compare Debezium's offsets with the start of Walpost's slot",
        ),
    ),
    KnownProperty("xmin.fetch.interval.ms", &[], WithoutEffect),
    KnownProperty(
        "read.only",
        &["false"],
        Unsupported(
            "this setting prevents Debezium from writing to the database. Walpost records the confirmed position in the table \
             walpost.slot_state on the primary, and reads the slot's state there: grant Walpost's role the privileges in \
             sql/role.sql",
        ),
    ),
    KnownProperty("connection.validation.timeout.ms", &[], WithoutEffect),
    KnownProperty("database.query.timeout.ms", &[], WithoutEffect),
    KnownProperty("database.tcpKeepAlive", &["true"], WithoutEffect),
    KnownProperty(
        "database.initial.statements",
        &[""],
        Unsupported(
            "this property runs SQL in each session. Set parameters in the connection string instead: options='-c NAME=VALUE'",
        ),
    ),
    KnownProperty(
        "database.sslfactory",
        &[""],
        Unsupported(
            "this property names a Java class. Use sslmode and sslrootcert in the postgres setting to configure certificate \
             verification",
        ),
    ),
    KnownProperty(
        "database.connection.factory.class",
        &[""],
        Unsupported(
            "this property names a Java class. Walpost reads passwords from PGPASSWORD, ~/.pgpass or walpost.toml",
        ),
    ),
    KnownProperty(
        "driver.*",
        &[],
        Unsupported(
            "this is a property of the JDBC driver. If libpq has an equivalent parameter, add it to the postgres setting",
        ),
    ),
    // Tables and columns.
    KnownProperty(
        "table.exclude.list",
        &[""],
        Different("this property has no equivalent: a pipeline reads only its own table"),
    ),
    KnownProperty(
        "schema.exclude.list",
        &[""],
        Different("this property has no equivalent: a pipeline reads only its own table"),
    ),
    KnownProperty("database.include.list", &[], WithoutEffect),
    KnownProperty("database.exclude.list", &[], WithoutEffect),
    KnownProperty("table.ignore.builtin", &[], WithoutEffect),
    KnownProperty("column.include.list", &[], WithoutEffect),
    KnownProperty("column.exclude.list", &[], WithoutEffect),
    KnownProperty("column.mask.*", &[], COLUMNS),
    KnownProperty("column.truncate.*", &[], COLUMNS),
    KnownProperty(
        "converters",
        &[""],
        Unsupported(
            "these are custom converters for columns, which Walpost does not support: Walpost writes these columns as Debezium \
             does without custom converters",
        ),
    ),
    KnownProperty(
        "post.processors",
        &[""],
        Unsupported("these are custom processors, which Walpost does not support"),
    ),
    KnownProperty("message.key.columns", &[], WithoutEffect),
    KnownProperty(
        "message.prefix.include.list",
        &[""],
        Different(
            "this property selects messages of pg_logical_emit_message. Walpost reads only messages that are its own events: see \
             docs/messages.md",
        ),
    ),
    KnownProperty(
        "message.prefix.exclude.list",
        &[""],
        Different(
            "this property selects messages of pg_logical_emit_message. Walpost reads only messages that are its own events: see \
             docs/messages.md",
        ),
    ),
    KnownProperty("skip.messages.without.change", &[], WithoutEffect),
    KnownProperty("tombstones.on.delete", &[], WithoutEffect),
    KnownProperty(
        "provide.transaction.metadata",
        &["false"],
        ToDo(
            "this setting makes Debezium send a record for each BEGIN and END to a separate topic. Walpost does not send such \
             records: the header walpost-position contains the commit LSN, which is the same for all records of a transaction",
        ),
    ),
    KnownProperty("transaction.metadata.factory", &[], WithoutEffect),
    KnownProperty("unavailable.value.placeholder", &[], WithoutEffect),
    // Conversion of values.
    KnownProperty("time.precision.mode", &["adaptive"], TYPES),
    KnownProperty("decimal.handling.mode", &["precise"], TYPES),
    KnownProperty("hstore.handling.mode", &["json"], TYPES),
    KnownProperty("interval.handling.mode", &["numeric"], TYPES),
    KnownProperty("money.fraction.digits", &["2"], TYPES),
    KnownProperty(
        "binary.handling.mode",
        &["bytes"],
        Unsupported(
            "with this setting, Debezium writes bytea as text. Walpost delivers the bytes unchanged: change the service so that \
             it writes base64 or hex into a text column",
        ),
    ),
    KnownProperty("include.unknown.datatypes", &[], WithoutEffect),
    KnownProperty("schema.refresh.mode", &[], WithoutEffect),
    KnownProperty("schema.name.adjustment.mode", &["none"], TYPES),
    KnownProperty("field.name.adjustment.mode", &["none"], TYPES),
    KnownProperty("column.propagate.source.type", &[""], TYPES),
    KnownProperty("datatype.propagate.source.type", &[""], TYPES),
    // Handling of failures.
    KnownProperty("event.processing.failure.handling.mode", &["fail"], SKIPS),
    KnownProperty(
        "event.converting.failure.handling.mode",
        &["fail", "warn"],
        SKIPS,
    ),
    KnownProperty("custom.retriable.exception", &[], WithoutEffect),
    KnownProperty("retriable.restart.connector.wait.ms", &[], WithoutEffect),
    // Snapshots and signals.
    KnownProperty("snapshot.include.collection.list", &[""], COPY),
    KnownProperty("snapshot.select.statement.overrides*", &[], COPY),
    KnownProperty("snapshot.query.mode", &["select_all"], COPY),
    KnownProperty("snapshot.*", &[], WithoutEffect),
    KnownProperty("legacy.snapshot.max.threads", &[], WithoutEffect),
    KnownProperty("incremental.snapshot.*", &[], WithoutEffect),
    KnownProperty("streaming.delay.ms", &[], WithoutEffect),
    KnownProperty("signal.data.collection", &[""], SIGNALS),
    KnownProperty(
        "signal.enabled.channels",
        &["source", "source,kafka"],
        SIGNALS,
    ),
    KnownProperty("signal.*", &[], WithoutEffect),
    KnownProperty(
        "notification.enabled.channels",
        &[""],
        Different(
            "this property has no equivalent: the state of a pipeline is available in its metrics, in /status and from walpost \
             status",
        ),
    ),
    KnownProperty("notification.*", &[], WithoutEffect),
    // Heartbeats.
    KnownProperty(
        "heartbeat.interval.ms",
        &["0"],
        Different(
            "this property has no equivalent and is not needed: Walpost also confirms WAL of other tables, and sends no records \
             to a heartbeat topic",
        ),
    ),
    KnownProperty("topic.heartbeat.prefix", &[], WithoutEffect),
    KnownProperty("topic.heartbeat.name", &[], WithoutEffect),
    // Properties that determine topic names. They have no effect, because the router replaces the
    // names.
    KnownProperty("topic.naming.strategy", &[], WithoutEffect),
    KnownProperty("topic.delimiter", &[], WithoutEffect),
    KnownProperty("topic.cache.size", &[], WithoutEffect),
    KnownProperty("topic.transaction", &[], WithoutEffect),
    // Properties that configure queues, threads and metrics.
    KnownProperty("max.batch.size", &[], WithoutEffect),
    KnownProperty("max.queue.size", &[], WithoutEffect),
    KnownProperty("max.queue.size.in.bytes", &[], WithoutEffect),
    KnownProperty("queue.provider.*", &[], WithoutEffect),
    KnownProperty("poll.interval.ms", &[], WithoutEffect),
    KnownProperty("poll.dispatch.interval.ms", &[], WithoutEffect),
    KnownProperty("query.fetch.size", &[], WithoutEffect),
    KnownProperty("executor.shutdown.timeout.ms", &[], WithoutEffect),
    KnownProperty("custom.metric.tags", &[], WithoutEffect),
    KnownProperty("custom.sanitize.pattern", &[], WithoutEffect),
    KnownProperty("advanced.metrics.enable", &[], WithoutEffect),
    KnownProperty("statistics.metrics.enabled", &[], WithoutEffect),
    KnownProperty("guardrail.*", &[], WithoutEffect),
    KnownProperty("openlineage.*", &[], WithoutEffect),
    KnownProperty("sourceinfo.struct.maker", &[], WithoutEffect),
    KnownProperty("include.schema.changes", &[], WithoutEffect),
    KnownProperty("include.schema.comments", &[], WithoutEffect),
    KnownProperty("log.position.check.enable", &[], WithoutEffect),
    KnownProperty("offset.activity.monitor.interval.ms", &[], WithoutEffect),
    KnownProperty("multi.partition.mode", &[], WithoutEffect),
    KnownProperty("table.mapping.storage.*", &[], WithoutEffect),
    KnownProperty("internal.*", &[], WithoutEffect),
    // Properties of Debezium Server and its engine.
    KnownProperty("offset.storage*", &[], WithoutEffect),
    KnownProperty("offset.flush.*", &[], WithoutEffect),
    KnownProperty("offset.commit.policy", &[], WithoutEffect),
    KnownProperty("schema.history.internal*", &[], WithoutEffect),
    KnownProperty("record.processing.*", &[], WithoutEffect),
    KnownProperty("task.management.timeout.ms", &[], WithoutEffect),
    KnownProperty("http.*", &[], WithoutEffect),
    KnownProperty(
        "debezium.sink.kafka.wait.message.delivery.timeout.ms",
        &[],
        WithoutEffect,
    ),
    KnownProperty(
        "debezium.sink.*",
        &[],
        Unsupported("this property belongs to a sink that Walpost does not support"),
    ),
    KnownProperty("debezium.api.*", &[], WithoutEffect),
    KnownProperty("quarkus.*", &[], WithoutEffect),
];

/// Properties that correspond to lines of walpost.toml. The report suggests one of these names for
/// an unknown property with a similar name.
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

/// Names that users commonly write by mistake, and names from earlier versions, each with the
/// correct name.
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

/// Current and former names of properties. A property that is set under its former name is imported
/// unless it is also set under its current name.
pub(super) const FORMER_NAMES: &[(&str, &str)] = &[
    ("table.include.list", "table.whitelist"),
    ("schema.include.list", "schema.whitelist"),
    ("topic.prefix", "database.server.name"),
];

/// Reports the properties of the source that no other module has requested.
pub(super) fn report_remaining(source: &mut Source, report: &mut Report) {
    let custom = list_members(source, &["converters", "post.processors"]);
    let remaining: Vec<_> = source
        .unrequested()
        .map(|(name, taken)| (name.to_owned(), taken))
        .collect();
    for (name, taken) in remaining {
        let is_custom = custom.iter().any(|custom| {
            name.strip_prefix(custom.as_str())
                .is_some_and(|rest| rest.starts_with('.'))
        });
        if is_custom {
            report.without_effect(&taken.written);
            continue;
        }
        match KNOWN
            .iter()
            .find(|KnownProperty(known, ..)| matches_name(&name, known))
        {
            Some(known) => report_property(known, &taken, report),
            None => report.unknown(&without_secret(&taken.written), unknown_message(&name)),
        }
    }
}

/// Returns the members of the comma-separated lists in the properties that `lists` names. The names
/// of other properties begin with these members.
fn list_members(source: &Source, lists: &[&str]) -> Vec<String> {
    let lists = source
        .unrequested()
        .filter(|(name, _)| lists.contains(name));
    lists.flat_map(|(_, taken)| taken.list()).collect()
}

fn matches_name(name: &str, known: &str) -> bool {
    match known.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == known,
    }
}

fn report_property(
    KnownProperty(_, harmless, handling): &KnownProperty,
    taken: &Taken,
    report: &mut Report,
) {
    let written = without_secret(&taken.written);
    let value: String = taken.value.split_whitespace().collect();
    let is_harmless = harmless
        .iter()
        .any(|harmless| value.eq_ignore_ascii_case(harmless));
    match handling {
        WithoutEffect => report.without_effect(&written),
        _ if is_harmless => report.without_effect(&written),
        Different(message) => report.different(&written, *message),
        ToDo(message) => report.task(&written, *message),
        Unsupported(message) => report.unsupported(&written, *message),
    }
}

/// Removes the salt from a property name such as `column.mask.hash.SHA-256.with.salt.SECRET`,
/// because the salt is secret.
fn without_secret(written: &str) -> String {
    match written.split_once(".with.salt.") {
        Some((name, _)) => format!("{name}.with.salt..."),
        None => written.to_owned(),
    }
}

/// Returns the message for an unknown property. Suggests a similar known name if there is one.
fn unknown_message(name: &str) -> String {
    if let Some((_, meant)) = OBSOLETE.iter().find(|(obsolete, _)| *obsolete == name) {
        return format!(
            "this is not a property of Debezium 3; did you mean {meant}? Debezium ignores it, and so does Walpost"
        );
    }
    let known = KNOWN
        .iter()
        .map(|KnownProperty(known, ..)| known.trim_end_matches(['*', '.']));
    match nearest(name, known.chain(CONVERTED_PROPERTIES.iter().copied())) {
        Some(known) => format!(
            "this is not a property of Debezium 3.7; did you mean {known}? Debezium ignores it, and so does Walpost"
        ),
        None => "this is not a known property of Debezium 3.7: find out which component uses it, and remove it if none does"
            .to_owned(),
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

    fn findings(properties: &[(&str, &str)]) -> Vec<Finding> {
        let mut report = Report::default();
        let mut text = "connector.class=C\n".to_owned();
        for (name, value) in properties {
            text += &format!("{name}={value}\n");
        }
        let mut source = Source::read(&text, &mut report).expect("properties");
        source.raw("connector.class");
        report_remaining(&mut source, &mut report);
        report.finish()
    }

    #[test]
    fn lists_ineffective_properties_in_a_single_finding() {
        let found = findings(&[
            ("tasks.max", "1"),
            ("poll.interval.ms", "10"),
            ("errors.tolerance", "none"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].message.ends_with(
                "walpost.toml does not need errors.tolerance, poll.interval.ms, tasks.max"
            ),
            "{found:?}"
        );
        assert!(!found[0].needs_action);
    }

    #[test]
    fn reports_normally_ignored_properties_whose_value_changes_behavior() {
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
            let found = findings(&[(name, value)]);
            assert_eq!((found.len(), found[0].group), (1, group), "{found:?}");
            assert_eq!(found[0].property, name);
        }
    }

    #[test]
    fn suggests_the_likely_name_for_a_misspelled_property() {
        for (name, expected) in [
            ("table.whitelist", "table.include.list"),
            ("slot.nam", "slot.name"),
            ("database.hostnam", "database.hostname"),
            ("debezium.expand.json.payload", "table.expand.json.payload"),
            ("max.batch.sizes", "max.batch.size"),
        ] {
            let found = findings(&[(name, "x")]);
            assert_eq!(found[0].group, Group::Unknown, "{found:?}");
            assert!(found[0].message.contains(expected), "{found:?}");
            assert!(found[0].needs_action);
        }
        let found = findings(&[("my.own.thing", "x")]);
        assert!(
            found[0].message.contains("not a known property"),
            "{found:?}"
        );
    }

    #[test]
    fn does_not_report_properties_of_custom_converters_as_unknown() {
        let found = findings(&[
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
    fn findings_omit_the_salt_in_column_mask_property_names() {
        let found = findings(&[("column.mask.hash.SHA-256.with.salt.hunter2", "a")]);
        assert!(!format!("{found:?}").contains("hunter2"), "{found:?}");
    }
}
