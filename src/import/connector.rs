//! Converts the connector's own properties: the connection, the tables and the starting position.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::chain::Filter;
use super::document::{Section, text};
use super::java_regex;
use super::known::FORMER_NAMES;
use super::report::Report;
use super::source::{Source, Taken};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::table::{TableName, identifier};

/// Placeholder for a name that the user has to fill in.
const CHANGE_ME: &str = "change-me";

/// The characters to percent-encode in a URL: all except the unreserved characters of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

#[must_use]
pub(super) fn encoded(text: &str) -> String {
    utf8_percent_encode(text, RESERVED).to_string()
}

/// Takes the named property from the source. If the property is not set, takes the property with
/// the name that earlier Debezium versions used.
pub(super) fn take_or_obsolete(
    source: &mut Source,
    name: &str,
    report: &mut Report,
) -> Option<Taken> {
    if source.contains(name) {
        return source
            .take_property(name, report)
            .filter(|taken| !taken.value.trim().is_empty());
    }
    let (_, obsolete) = FORMER_NAMES.iter().find(|(new, _)| *new == name)?;
    let taken = source.take_property(obsolete, report)?;
    let message = format!(
        "this is not a property of Debezium 3: Debezium 2 renamed it to {name}, and the value was imported as {name}. Make sure \
         that the value is still correct"
    );
    report.unknown(&taken.written, message);
    Some(taken)
}

/// The roles that the imported configuration and the switch-over commands use to connect to the
/// database.
#[derive(Debug)]
pub(super) struct Roles {
    /// The role that the pipelines connect as.
    pub(super) user: String,
    /// A connection string for an administrator of the pipelines' database.
    pub(super) administrator: String,
}

/// Writes the pipelines' connection string. Returns the roles to use in the switch-over commands.
pub(super) fn connection(source: &mut Source, section: &mut Section, report: &mut Report) -> Roles {
    let mut written = Vec::new();
    let mut missing = Vec::new();
    let mut required =
        |name: &'static str, default: &str, source: &mut Source, report: &mut Report| {
            let taken = source
                .take_property(name, report)
                .filter(|taken| !taken.value.trim().is_empty());
            match taken {
                Some(taken) => {
                    written.push(taken.written.clone());
                    report.carried(&taken.written, "postgres");
                    taken.value.trim().to_owned()
                }
                None => {
                    if !source.contains(name) {
                        report.task(
                            name,
                            "this property is not set: specify the value in the postgres setting",
                        );
                    }
                    missing.push(name);
                    default.to_owned()
                }
            }
        };
    let host = required("database.hostname", "change-me.invalid", source, report);
    let user = required("database.user", CHANGE_ME, source, report);
    let database = required("database.dbname", CHANGE_ME, source, report);
    let port = source.take_property("database.port", report);
    let port = port.and_then(|taken| {
        let port = taken
            .value
            .trim()
            .parse::<u16>()
            .ok()
            .filter(|port| *port > 0);
        match port {
            Some(_) => report.carried(&taken.written, "postgres"),
            None => report.unsupported(
                &taken.written,
                "this value is not a port number: specify a number from 1 to 65535 in the postgres setting",
            ),
        }
        port
    });
    password(source, section, report);
    let parameters = tls(source, report);
    let hosts = hosts_in_url(&host, port);
    if host.contains(',') {
        let message = "this property lists several hosts, which are tried in turn until one accepts the connection. To skip \
             standbys, add target_session_attrs=read-write to the postgres setting";
        report.different("database.hostname", message);
    }
    let as_role = |user: &str, parameters: &[(String, String)]| {
        let parameters: Vec<_> = parameters
            .iter()
            .map(|(name, value)| format!("{name}={}", encoded(value)))
            .collect();
        let question = if parameters.is_empty() { "" } else { "?" };
        format!(
            "postgresql://{user}@{hosts}/{}{question}{}",
            encoded(&database),
            parameters.join("&")
        )
    };
    let mut url = as_role(&encoded(&user), &parameters);
    let mut of_admin: Vec<_> = parameters.clone();
    of_admin.retain(|(name, _)| ["sslmode", "sslrootcert"].contains(&name.as_str()));
    let mut administrator = as_role("postgres", &of_admin);
    if let Err(error) = Conninfo::parse(&url, &|_| None) {
        report.unsupported(
            "database.*",
            format!("these properties do not result in a valid connection string: {error}. Correct the postgres setting"),
        );
        url = format!("postgresql://{CHANGE_ME}@change-me.invalid/{CHANGE_ME}");
        administrator.clone_from(&url);
        missing.push("database.*");
    }
    let mut from = written.join(", ");
    if !missing.is_empty() {
        from = format!(
            "CHANGE THIS: {} could not be converted. {from}",
            missing.join(", ")
        );
    }
    section.set("postgres", text(&url), from.trim_end().to_owned());
    Roles {
        user,
        administrator,
    }
}

/// Formats a list of hosts for a URL. `port` applies only to the last host, because Debezium
/// appends the port to the list of hosts that it passes to JDBC.
fn hosts_in_url(list: &str, port: Option<u16>) -> String {
    let hosts: Vec<_> = list.split(',').map(str::trim).collect();
    let last = hosts.len() - 1;
    let hosts = hosts.iter().enumerate().map(|(index, host)| {
        let own = host.rsplit_once(':').filter(|(name, port)| {
            !name.contains(':') && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
        match (own, port) {
            (Some((name, own)), _) => format!("{}:{own}", host_in_url(name)),
            (None, Some(port)) if index == last => format!("{}:{port}", host_in_url(host)),
            // Write the default port explicitly, because a single port in a libpq URL would apply
            // to all hosts.
            (None, Some(_)) => format!("{}:5432", host_in_url(host)),
            (None, None) => host_in_url(host),
        }
    });
    hosts.collect::<Vec<_>>().join(",")
}

fn host_in_url(host: &str) -> String {
    match host.contains(':') && host.parse::<std::net::Ipv6Addr>().is_ok() {
        true => format!("[{host}]"),
        false => encoded(host),
    }
}

fn password(source: &mut Source, section: &mut Section, report: &mut Report) {
    const PASSWORD_REMEDY: &str = "set the password in PGPASSWORD, ~/.pgpass (mode 0600), or postgres in walpost.toml with \
         mode 0600";
    const KEY_REMEDY: &str = "set the private key's password with the sslpassword parameter of the connection string \
         (postgres in walpost.toml with mode 0600, or WALPOST_POSTGRES)";
    for name in ["database.password", "database.sslpassword"] {
        let Some(taken) = source.raw(name) else {
            continue;
        };
        let is_reference = super::source::reference(source.kind, &taken.value);
        let what = match is_reference {
            Some(reference) => format!("{reference}, which Walpost can't look up"),
            None => "the value is a secret, which was not copied".to_owned(),
        };
        let remedy = match name {
            "database.password" => PASSWORD_REMEDY,
            _ => KEY_REMEDY,
        };
        report.task(&taken.written, format!("{what}: {remedy}"));
        section.add_comment(format!("{}: {remedy}", taken.written));
    }
}

/// Converts the TLS properties, which have the same meaning as in the JDBC driver, to libpq
/// parameters.
fn tls(source: &mut Source, report: &mut Report) -> Vec<(String, String)> {
    let mut parameters = Vec::new();
    if let Some(taken) = source.take_property("database.sslmode", report) {
        let mode = taken.value.trim().to_ascii_lowercase();
        match mode.as_str() {
            "disable" | "prefer" | "require" | "verify-ca" | "verify-full" => {
                report.carried(&taken.written, "postgres");
                parameters.push(("sslmode".to_owned(), mode));
            }
            "allow" => {
                let message = "this mode allows Debezium to send the password over a connection without TLS before it tries TLS. \
                 Walpost never does that: sslmode=prefer is used instead";
                report.different(&taken.written, message);
                parameters.push(("sslmode".to_owned(), "prefer".to_owned()));
            }
            _ => report.unsupported(
                &taken.written,
                "this value is not a valid sslmode: expected disable, prefer, require, verify-ca or verify-full",
            ),
        }
    }
    for name in ["sslrootcert", "sslcert", "sslkey"] {
        let Some(taken) = source.take_property(&format!("database.{name}"), report) else {
            continue;
        };
        let file = taken.value.trim();
        if file.is_empty() {
            continue;
        }
        let is_der = [".pk8", ".der", ".p12", ".pfx"]
            .iter()
            .any(|end| file.to_ascii_lowercase().ends_with(end));
        if name == "sslkey" && is_der {
            let message = "this file contains a key in DER or PKCS#12, as JDBC expects. Walpost reads PEM, like libpq. Convert \
                 the key with openssl pkcs8 -inform DER -in FILE.pk8 -out FILE.pem, or openssl pkcs12 -in FILE.p12 -nodes \
                 -nocerts -out FILE.pem, and set sslkey in the postgres setting to that file, with mode 0600";
            report.task(&taken.written, message);
        } else {
            report.carried(&taken.written, "postgres");
        }
        parameters.push((name.to_owned(), file.to_owned()));
    }
    parameters
}

/// Returns the outbox tables. If they can't be determined, returns Walpost's default table.
pub(super) fn tables(
    source: &mut Source,
    prefix: Option<&str>,
    filter: Option<&Filter>,
    report: &mut Report,
) -> Vec<Table> {
    let schemas = take_or_obsolete(source, "schema.include.list", report);
    let listed = take_or_obsolete(source, "table.include.list", report);
    if let Some(schemas) = &schemas {
        report.without_effect(&schemas.written);
    }
    let mut found = Vec::new();
    for pattern in listed.iter().flat_map(Taken::list) {
        let from = listed
            .as_ref()
            .map(|listed| listed.written.clone())
            .unwrap_or_default();
        let Some((schema, name)) = literal(&pattern) else {
            let message = format!(
                "the list contains {pattern:?}, a regular expression: write a [[pipeline]] for each table that the expression \
                 matches"
            );
            report.unsupported(&from, message);
            continue;
        };
        let topic = format!("{}.{schema}.{name}", prefix.unwrap_or_default());
        if filter.is_some_and(|filter| !filter.accepts(&topic)) {
            let message = format!(
                "the list contains {schema}.{name}, whose changes do not pass through the outbox event router: keep Debezium for \
                 this table, and remove the outbox table from Debezium's list"
            );
            report.unsupported(&from, message);
            continue;
        }
        if format!("{schema}{name}")
            .chars()
            .any(|c| c.is_ascii_uppercase())
        {
            let message = format!(
                "the list contains {schema}.{name}: Debezium ignores the case of letters, but in walpost.toml a name in double \
                 quotes is case-sensitive. Make sure that this name has the same case as the table's name"
            );
            report.task(&from, message);
        }
        found.push(Table::new(schema, name, from));
    }
    if found.is_empty() && listed.is_none() {
        found.extend(filtered_table(prefix, filter));
    }
    if found.is_empty() {
        let (from, message) = match &listed {
            Some(listed) => (
                listed.written.as_str(),
                "the list contains no plain table name: specify the name of the outbox table in the table setting",
            ),
            None => (
                "table.include.list",
                "this property is not in the file, so Debezium reads all tables: specify the name of the outbox table in the \
                 table setting",
            ),
        };
        report.task(from, message);
        let comment =
            "CHANGE THIS: the outbox table could not be determined from table.include.list"
                .to_owned();
        found.push(Table::new(
            "public".to_owned(),
            "outbox".to_owned(),
            comment,
        ));
    }
    if let Some(listed) = listed {
        report.carried(&listed.written, "table");
    }
    if let Some(filter) = filter {
        report.carried(&filter.written, "table");
    }
    found
}

/// An outbox table.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) schema: String,
    pub(super) name: String,
    /// The name of the property that specifies the table.
    pub(super) from: String,
}

impl Table {
    fn new(schema: String, name: String, from: String) -> Self {
        Self { schema, name, from }
    }

    /// Returns the table's name in SQL syntax.
    #[must_use]
    pub(super) fn in_sql(&self) -> String {
        let TableName { schema, name } = TableName {
            schema: self.schema.clone(),
            name: self.name.clone(),
        };
        format!("{}.{}", identifier(&schema), identifier(&name))
    }
}

/// Returns the table's schema and name if the regular expression matches only a single, literal
/// name.
fn literal(pattern: &str) -> Option<(String, String)> {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    let pattern = pattern.strip_suffix('$').unwrap_or(pattern);
    let name = pattern.replace("\\.", ".");
    let is_name = |part: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| c.is_alphanumeric() || matches!(c, '_' | '-'))
    };
    let (schema, table) = name.split_once('.')?;
    (is_name(schema) && is_name(table)).then(|| (schema.to_owned(), table.to_owned()))
}

/// Returns the table whose records the predicate accepts, or `None` if the predicate may accept
/// records of more than one table.
fn filtered_table(prefix: Option<&str>, filter: Option<&Filter>) -> Option<Table> {
    let filter = filter.filter(|filter| !filter.is_negated())?;
    let rest = filter.java.trim_start_matches('^');
    let own = prefix.and_then(|prefix| {
        let dots = prefix.replace('.', "\\.");
        rest.strip_prefix(prefix)
            .or_else(|| rest.strip_prefix(&dots))
    });
    let rest = own.or_else(|| rest.strip_prefix(".*"))?;
    let rest = rest
        .strip_prefix("\\.")
        .or_else(|| rest.strip_prefix('.'))?;
    let (schema, name) = literal(rest)?;
    Some(Table::new(schema, name, filter.written.clone()))
}

/// Returns the name of Debezium's slot.
pub(super) fn slot(source: &mut Source, report: &mut Report) -> String {
    const DEFAULT: &str = "debezium";
    let Some(taken) = source.take_property("slot.name", report) else {
        return DEFAULT.to_owned();
    };
    let slot = taken.value.trim();
    let is_legal = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    if slot.is_empty() || slot.len() > 63 || !slot.bytes().all(is_legal) {
        let message = "this value is not a valid slot name, and PostgreSQL would reject it too: expected 1 to 63 characters of \
             a-z, 0-9 and _";
        report.unsupported(&taken.written, message);
        return DEFAULT.to_owned();
    }
    let message = "Debezium continues to use this slot. Walpost creates its own slot and publication, so that no event is missed \
     and you can switch back";
    report.different(&taken.written, message);
    slot.to_owned()
}

/// Writes the `snapshot` setting, which determines whether to deliver rows committed before the
/// slot was created.
pub(super) fn snapshot(source: &mut Source, section: &mut Section, report: &mut Report) {
    let taken = source.take_property("snapshot.mode", report);
    let mode = taken.as_ref().map_or("initial", |taken| taken.value.trim());
    let from = taken
        .as_ref()
        .map_or("the default of snapshot.mode", |taken| {
            taken.written.as_str()
        });
    let mode = match mode.to_ascii_lowercase().as_str() {
        "initial" | "when_needed" => "initial",
        "never" | "no_data" | "schema_only" => "never",
        other => {
            let message = match other {
                "always" => {
                    "in this mode, Debezium copies the table whenever the connector starts. Walpost copies the table only once: \
                     snapshot = \"initial\" is used instead; walpost replay sends rows again"
                }
                "initial_only" => {
                    "in this mode, Debezium copies the table and then stops. Walpost continues with new rows: snapshot = \
                     \"initial\" is used instead"
                }
                _ => {
                    "Walpost does not support this snapshot mode: expected initial or never. snapshot = \"initial\" is used \
                     instead"
                }
            };
            report.unsupported(from, message);
            "initial"
        }
    };
    if let Some(taken) = &taken {
        report.carried(&taken.written, format!("snapshot = {mode:?}"));
    }
    let comment = match mode {
        "initial" => format!(
            "{from}: rows that are older than the slot are delivered in the first run. If Debezium has delivered them, \
             as in the switch-over below, set snapshot = \"never\""
        ),
        _ => from.to_owned(),
    };
    section.set("snapshot", text(mode), comment);
}

/// Reports that Walpost does not run the SQL statement that Debezium runs at each heartbeat. If the
/// statement removes rows, also suggests settings with which Walpost removes them.
pub(super) fn heartbeat(source: &mut Source, section: &mut Section, report: &mut Report) {
    let Some(taken) = source.take_property("heartbeat.action.query", report) else {
        return;
    };
    let deletes = java_regex::pattern("(?i)(?s).*\\b(delete|truncate|drop)\\b.*");
    if deletes.is_ok_and(|deletes| deletes.matches_whole(&taken.value)) {
        let message = "this query removes rows at each heartbeat. Walpost does not run custom SQL: retention = \"7d\" with \
         delete_rows = true removes delivered rows, or drops partitions; see docs/retention.md";
        report.unsupported(&taken.written, message);
        let note = format!(
            "{} removes rows. In Walpost, retention removes delivered rows if both of these lines are uncommented",
            taken.written
        );
        section.add_comment(note);
        section.add_comment("   retention = \"7d\"");
        section.add_comment("   delete_rows = true");
    } else {
        let message = "this query has no equivalent and is not needed: Walpost also confirms WAL of other tables. After Debezium \
         is removed, drop the table to which the query writes";
        report.different(&taken.written, message);
    }
}

/// Writes the connector's remaining settings, each of which corresponds to one line of
/// walpost.toml.
pub(super) fn remaining(
    source: &mut Source,
    prefix: Option<&Taken>,
    section: &mut Section,
    report: &mut Report,
) {
    let headers = source.take_property("extended.headers.enabled", report);
    let has_headers = !headers.as_ref().is_some_and(|headers| headers.is("false"));
    if let Some(headers) = &headers {
        report.carried(&headers.written, "debezium_headers");
    }
    match prefix {
        Some(prefix) if has_headers => {
            let comment = format!(
                "{} is used because extended.headers.enabled is not false. This key adds the headers __debezium.context.* to each \
                 record. Remove the key if no consumer reads these headers; earlier versions of Debezium did not write them",
                prefix.written
            );
            section.set("debezium_headers", text(prefix.value.trim()), comment);
            report.carried(&prefix.written, "debezium_headers");
        }
        Some(prefix) => report.without_effect(&prefix.written),
        None => {}
    }
    if let Some(taken) = source.take_property("exactly.once.support", report) {
        match taken.is("required") {
            true => {
                section.set("delivery", text("exactly-once"), taken.written.clone());
                let message = "delivery = \"exactly-once\". Walpost records its position in the topic \
                 walpost-checkpoints, and needs privileges on that topic: see docs/exactly-once.md";
                report.task(&taken.written, message);
            }
            false => report.without_effect(&taken.written),
        }
    }
    if let Some(taken) = source.take_property("skipped.operations", report) {
        match taken
            .list()
            .iter()
            .any(|operation| operation.eq_ignore_ascii_case("c"))
        {
            true => {
                let message = "this property skips inserts, but the inserts are the outbox's events, so Walpost delivers them \
                 anyway";
                report.unsupported(&taken.written, message);
            }
            false => report.without_effect(&taken.written),
        }
    }
    topics(source, section, report);
}

fn topics(source: &mut Source, section: &mut Section, report: &mut Report) {
    let partitions = source.take_property("topic.creation.default.partitions", report);
    let replication = source.take_property("topic.creation.default.replication.factor", report);
    let number = |taken: &Taken| taken.value.trim().parse::<i32>().ok();
    let Some(partitions) = partitions else {
        if let Some(taken) = replication {
            report.task(
                &taken.written,
                "this property is set without a number of partitions: set create_topics, or create the topics yourself",
            );
        }
        return;
    };
    let Some(count) = number(&partitions).filter(|count| *count > 0) else {
        let message = "this value leaves the number of partitions to the broker, but Walpost's create_topics requires a number: \
         specify a number, or create the topics yourself";
        return report.task(&partitions.written, message);
    };
    let mut entries = vec![("partitions", count.to_string())];
    let mut from = partitions.written.clone();
    report.carried(&partitions.written, "create_topics");
    if let Some(taken) = replication {
        match number(&taken) {
            // -1 selects the broker's default, which also applies if the property is not set.
            Some(-1) => report.without_effect(&taken.written),
            Some(factor) if (1..=i32::from(i16::MAX)).contains(&factor) => {
                entries.push(("replication", factor.to_string()));
                from = format!("{from}, {}", taken.written);
                report.carried(&taken.written, "create_topics");
            }
            _ => report.unsupported(
                &taken.written,
                "this value is not a valid number of replicas: expected 1 or more",
            ),
        }
    }
    section.set("create_topics", super::document::table(entries), from);
}
