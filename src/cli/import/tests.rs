use proptest::prelude::*;

use super::*;
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::{self, Given, GivenSink};
use crate::import::report::Group;
use crate::kafka::topics::CreateTopics;
use crate::pipeline::settings::{Delivery, PipelineSettings, SinkSettings, SnapshotMode};

/// Loads the pipelines from the contents of a walpost.toml.
fn settings(text: &str) -> Result<Vec<PipelineSettings>, String> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("walpost.toml");
    fs::write(&path, text).expect("written");
    let connection = ConnectionArgs {
        config: Some(path),
        ..ConnectionArgs::default()
    };
    let given = Given {
        connection: &connection,
        records: Some(&RecordArgs::default()),
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    let loaded = config::load(&given, &|_| None, std::iter::empty());
    loaded
        .map(|loaded| loaded.pipelines)
        .map_err(|error| error.to_string())
}

fn import(text: &str) -> Imported {
    import_with(text, None)
}

fn import_with(text: &str, worker: Option<&str>) -> Imported {
    let imported = import::debezium(text, worker).unwrap_or_else(|error| panic!("{error}: {text}"));
    if let Err(error) = settings(&imported.toml) {
        panic!("{error}:\n{}", imported.toml);
    }
    imported
}

/// Returns a complete connector configuration, in which the properties in `overrides` replace or
/// extend the default properties. The value `-` removes a property.
fn connector(overrides: &[(&str, &str)]) -> String {
    let mut config: serde_json::Map<_, _> = [
        (
            "connector.class",
            "io.debezium.connector.postgresql.PostgresConnector",
        ),
        ("database.hostname", "db.example.com"),
        ("database.user", "debezium"),
        ("database.dbname", "shop"),
        ("topic.prefix", "lab"),
        ("slot.name", "debezium"),
        ("table.include.list", "public.outbox"),
        ("transforms", "outbox"),
        (
            "transforms.outbox.type",
            "io.debezium.transforms.outbox.EventRouter",
        ),
        (
            "key.converter",
            "org.apache.kafka.connect.storage.StringConverter",
        ),
        (
            "value.converter",
            "org.apache.kafka.connect.storage.StringConverter",
        ),
        (
            "producer.override.bootstrap.servers",
            "kafka1.example.com:9092",
        ),
    ]
    .iter()
    .chain(overrides)
    .map(|(name, value)| ((*name).to_owned(), serde_json::Value::from(*value)))
    .collect();
    config.retain(|_, value| value != "-");
    serde_json::json!({ "name": "shop-outbox", "config": config }).to_string()
}

/// Returns a connector configuration with the given properties of the outbox event router.
fn router(properties: &[(&str, &str)]) -> String {
    let names: Vec<_> = properties
        .iter()
        .map(|(name, _)| format!("transforms.outbox.{name}"))
        .collect();
    let values = properties.iter().map(|(_, value)| *value);
    let overrides: Vec<_> = names.iter().map(String::as_str).zip(values).collect();
    connector(&overrides)
}

fn document(imported: &Imported) -> toml::Table {
    imported.toml.parse().expect("TOML")
}

/// Returns the value of a key in the first pipeline of the generated walpost.toml.
fn key(imported: &Imported, name: &str) -> Option<toml::Value> {
    document(imported)["pipeline"][0].get(name).cloned()
}

fn string_value(imported: &Imported, name: &str) -> Option<String> {
    key(imported, name).map(|value| {
        value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
    })
}

/// Returns the group of each finding about a property, and whether the finding requires action by
/// the user.
fn findings_for(imported: &Imported, property: &str) -> Vec<(Group, bool)> {
    let findings = imported
        .findings
        .iter()
        .filter(|finding| finding.property == property);
    findings
        .map(|finding| (finding.group, finding.needs_action))
        .collect()
}

fn report_text(imported: &Imported) -> String {
    let lines = imported
        .findings
        .iter()
        .map(|finding| format!("{}: {}\n", finding.property, finding.message));
    lines.collect()
}

#[test]
fn imports_a_complete_connector_without_manual_steps() {
    let imported = import(&connector(&[]));
    let open: Vec<_> = imported
        .findings
        .iter()
        .filter(|finding| finding.needs_action)
        .collect();
    assert!(open.is_empty(), "{open:?}");
    let settings = settings(&imported.toml).expect("valid").remove(0);
    assert_eq!(settings.name, "shop_outbox");
    let postgres = &settings.postgres;
    assert_eq!((postgres.dbname(), postgres.user()), ("shop", "debezium"));
    assert_eq!(postgres.servers(), "db.example.com:5432");
    assert_eq!(settings.target.outbox.to_string(), "table public.outbox");
    assert_eq!(settings.target.slot, "walpost_shop_outbox");
    assert_eq!(settings.snapshot, SnapshotMode::Initial);
    assert_eq!(settings.delivery, Delivery::AtLeastOnce);
    assert_eq!(
        string_value(&imported, "topic").as_deref(),
        Some("outbox.event.{aggregatetype}")
    );
    assert_eq!(
        string_value(&imported, "key").as_deref(),
        Some("{aggregateid}")
    );
    assert_eq!(
        string_value(&imported, "debezium_headers").as_deref(),
        Some("lab")
    );
    assert_eq!(
        string_value(&imported, "null_payload").as_deref(),
        Some("tombstone")
    );
    for key_name in [
        "key_format",
        "value_format",
        "header_format",
        "route",
        "envelope",
        "timestamp",
    ] {
        assert_eq!(key(&imported, key_name), None, "{key_name}");
    }
}

#[test]
fn writes_the_original_property_in_a_comment_above_each_setting() {
    let imported = import(&router(&[
        ("table.field.event.key", "tenant"),
        ("table.field.event.timestamp", "at"),
    ]));
    let lines: Vec<_> = imported.toml.lines().collect();
    for pair in lines.windows(2) {
        if pair[1].contains(" = ") && !pair[1].starts_with('#') {
            assert!(pair[0].starts_with("# "), "{pair:?}");
        }
    }
    for (property, line) in [
        (
            "# transforms.outbox.table.field.event.key",
            "key = \"{tenant}\"",
        ),
        (
            "# transforms.outbox.table.field.event.timestamp",
            "timestamp = \"at\"",
        ),
        (
            "# producer.override.bootstrap.servers",
            "\"bootstrap.servers\" = \"kafka1.example.com:9092\"",
        ),
    ] {
        assert!(
            imported.toml.contains(&format!("{property}\n{line}\n")),
            "{line}: {}",
            imported.toml
        );
    }
}

#[test]
fn converts_a_constant_prefix_and_suffix_to_a_topic_template() {
    for (regex, replacement, expected) in [
        (
            "(?<routedByValue>.*)",
            "outbox.event.${routedByValue}",
            "outbox.event.{aggregatetype}",
        ),
        ("(.*)", "$1", "{aggregatetype}"),
        ("^(.*)$", "${1}", ""),
        ("(.*)", "$1_x", "{aggregatetype}_x"),
        (".*", "a.$0.v1", "a.{aggregatetype}.v1"),
        (".*", "events", "events"),
    ] {
        let imported = import(&router(&[
            ("route.topic.regex", regex),
            ("route.topic.replacement", replacement),
        ]));
        if expected.is_empty() {
            // In Java, the name of a capturing group can't start with a digit.
            let property = "transforms.outbox.route.topic.replacement";
            assert_eq!(
                findings_for(&imported, property),
                [(Group::Unsupported, true)],
                "{replacement}"
            );
            continue;
        }
        assert_eq!(
            string_value(&imported, "topic").as_deref(),
            Some(expected),
            "{regex} {replacement}"
        );
        assert_eq!(key(&imported, "route"), None);
    }
}

#[test]
fn converts_a_topic_regex_and_replacement_to_a_route() {
    let route = |regex: &str, replacement: &str| {
        let imported = import(&router(&[
            ("route.by.field", "type"),
            ("route.topic.regex", regex),
            ("route.topic.replacement", replacement),
        ]));
        assert_eq!(key(&imported, "topic"), None);
        let route = key(&imported, "route").expect("a route");
        ["column", "regex", "replacement"]
            .map(|key| route[key].as_str().expect("a text").to_owned())
    };
    assert_eq!(
        route("h2-(.*)-v([0-9]+)", "t.$1.$2"),
        ["type", "h2-(.*)-v([0-9]+)", "t.$1.$2"]
    );
    assert_eq!(
        route("(?<a>[a-z]+)\\.(.*)", "$2_${a}x"),
        ["type", "(?<a>[a-z]+)\\.(.*)", "${2}_${a}x"]
    );
    assert_eq!(
        route("(\\d+)-(.*)", "a\\$b.$2"),
        ["type", "([0-9]+)-(.*)", "a$$b.$2"]
    );
    for regex in ["(?!internal)(.*)", "(.*)\\1", "(.*+)"] {
        let imported = import(&router(&[("route.topic.regex", regex)]));
        let property = "transforms.outbox.route.topic.regex";
        assert_eq!(
            findings_for(&imported, property),
            [(Group::Unsupported, true)],
            "{regex}"
        );
        assert!(
            imported.toml.contains("CHANGE THIS: the rule"),
            "{}",
            imported.toml
        );
    }
}

#[test]
fn converts_debezium_additional_fields_to_the_corresponding_settings() {
    let imported = import(&router(&[
        (
            "table.fields.additional.placement",
            "type:header:eventType, tenant:envelope ,kind:envelope:sort,part:partition,a:HEADER",
        ),
        ("table.field.event.id", "uid"),
    ]));
    let line = "headers = [[\"id\", \"{uid}\"], [\"eventType\", \"{type}\"], [\"a\", \"{a}\"]]\n";
    assert!(
        imported.toml.contains(line),
        "expected the headers in the same order as in Debezium: {}",
        imported.toml
    );
    let headers = |placement: &str| {
        let imported = import(&router(&[("table.fields.additional.placement", placement)]));
        let line = imported
            .toml
            .lines()
            .find(|line| line.starts_with("headers = "));
        line.map(str::to_owned)
    };
    let table = "headers = { id = \"{id}\", type = \"{type}\" }";
    assert_eq!(headers("type:header").as_deref(), Some(table));
    let twice = "headers = [[\"id\", \"{id}\"], [\"id\", \"{type}\"]]";
    assert_eq!(headers("type:header:id").as_deref(), Some(twice));
    assert_eq!(
        string_value(&imported, "header_format").as_deref(),
        Some("simple")
    );
    assert_eq!(
        key(&imported, "envelope"),
        Some(vec!["tenant", "kind:sort"].into())
    );
    assert_eq!(
        string_value(&imported, "partition").as_deref(),
        Some("part")
    );

    for placement in [
        "a",
        "a:b",
        "a:header:b:c",
        ":partition",
        "a:envelope:x,b:envelope:x",
        "a:envelope:payload",
        "a:header:walpost-position",
        "{:header",
    ] {
        let imported = import(&router(&[("table.fields.additional.placement", placement)]));
        let property = "transforms.outbox.table.fields.additional.placement";
        assert!(
            findings_for(&imported, property).contains(&(Group::Unsupported, true)),
            "{placement}"
        );
    }
}

#[test]
fn maps_kafka_connect_converters_to_walpost_formats() {
    let json = "org.apache.kafka.connect.json.JsonConverter";
    let check = |overrides: &[(&str, &str)], expected: [Option<&str>; 3]| {
        let imported = import(&connector(overrides));
        let found = ["key_format", "value_format", "header_format"]
            .map(|name| string_value(&imported, name));
        assert_eq!(
            found.each_ref().map(Option::as_deref),
            expected,
            "{overrides:?}"
        );
        imported
    };
    check(
        &[("key.converter", json)],
        [Some("json-schema"), None, None],
    );
    check(
        &[
            ("key.converter", json),
            ("key.converter.schemas.enable", "false"),
        ],
        [Some("json"), None, None],
    );
    check(
        &[
            ("value.converter", json),
            ("value.converter.schemas.enable", "true"),
        ],
        [None, Some("json-schema"), None],
    );
    check(
        &[(
            "value.converter",
            "org.apache.kafka.connect.converters.ByteArrayConverter",
        )],
        [None, Some("bytes"), None],
    );
    check(
        &[(
            "value.converter",
            "io.debezium.converters.BinaryDataConverter",
        )],
        [None, Some("bytes"), None],
    );
    check(
        &[
            ("header.converter", json),
            ("header.converter.schemas.enable", "false"),
        ],
        [None, None, Some("json")],
    );
    for class in [
        "io.confluent.connect.avro.AvroConverter",
        "io.confluent.connect.protobuf.ProtobufConverter",
        "io.debezium.converters.CloudEventsConverter",
        "io.confluent.connect.json.JsonSchemaConverter",
        "com.example.Own",
    ] {
        let overrides = [
            ("value.converter", class),
            ("value.converter.schema.registry.url", "http://r"),
        ];
        let imported = check(&overrides, [None, None, None]);
        assert_eq!(
            findings_for(&imported, "value.converter")[0],
            (Group::Unsupported, true),
            "{class}"
        );
    }
    let nulls = import(&connector(&[(
        "value.converter.replace.null.with.default",
        "false",
    )]));
    assert_eq!(key(&nulls, "null_default"), None);
    assert_eq!(
        key(&import(&connector(&[])), "null_default"),
        Some(true.into())
    );
}

#[test]
fn imports_converters_from_the_worker_file_and_reports_if_the_file_is_missing() {
    let given = connector(&[
        ("key.converter", "-"),
        ("value.converter", "-"),
        ("producer.override.bootstrap.servers", "-"),
    ]);
    let without = import(&given);
    for property in ["key.converter", "value.converter", "bootstrap.servers"] {
        assert!(
            findings_for(&without, property).contains(&(Group::Different, true)),
            "{property}: {without:?}"
        );
    }
    assert_eq!(
        string_value(&without, "value_format").as_deref(),
        Some("json-schema")
    );
    assert!(
        without
            .toml
            .contains("\"bootstrap.servers\" = \"change-me.invalid:9092\""),
        "{}",
        without.toml
    );

    let worker = "bootstrap.servers=kafka1:9092,kafka2:9092\nkey.converter=org.apache.kafka.connect.storage.StringConverter\n\
                  value.converter=org.apache.kafka.connect.json.JsonConverter\nvalue.converter.schemas.enable=false\n\
                  producer.compression.type=zstd\ngroup.id=connect\n";
    let with = import_with(&given, Some(worker));
    let open: Vec<_> = with
        .findings
        .iter()
        .filter(|finding| finding.needs_action)
        .collect();
    assert!(open.is_empty(), "{open:?}");
    assert_eq!(string_value(&with, "value_format").as_deref(), Some("json"));
    let kafka = &document(&with)["kafka"];
    assert_eq!(
        kafka["bootstrap.servers"].as_str(),
        Some("kafka1:9092,kafka2:9092")
    );
    assert_eq!(kafka["compression.type"].as_str(), Some("zstd"));
}

#[test]
fn imports_payload_expansion_settings() {
    let json = [
        (
            "value.converter",
            "org.apache.kafka.connect.json.JsonConverter",
        ),
        ("value.converter.schemas.enable", "false"),
        ("transforms.outbox.table.expand.json.payload", "true"),
        (
            "transforms.outbox.table.json.payload.null.behavior",
            "optional_bytes",
        ),
        (
            "transforms.outbox.table.json.payload.empty.array.behavior",
            "optional_string",
        ),
    ];
    let imported = import(&connector(&json));
    assert_eq!(key(&imported, "expand_payload"), Some(true.into()));
    assert_eq!(
        string_value(&imported, "expand_null").as_deref(),
        Some("optional-bytes")
    );
    assert_eq!(
        string_value(&imported, "expand_empty_array").as_deref(),
        Some("optional-string")
    );
    assert_eq!(
        key(&imported, "null_payload"),
        None,
        "JsonConverter writes null"
    );
    assert!(
        report_text(&imported)
            .contains("Walpost delivers top-level arrays and integers of more than 64 bits"),
        "{}",
        report_text(&imported)
    );

    let unexpanded = import(&connector(&json[..2]));
    assert_eq!(key(&unexpanded, "expand_payload"), None);
    let tombstone = import(&connector(&[
        json[0],
        json[1],
        ("transforms.outbox.route.tombstone.on.empty.payload", "true"),
    ]));
    assert_eq!(
        string_value(&tombstone, "null_payload").as_deref(),
        Some("tombstone")
    );
    assert_eq!(
        string_value(&tombstone, "empty_payload").as_deref(),
        Some("tombstone")
    );

    // With ByteArrayConverter, Debezium's task fails if the value is an object.
    let bytes = import(&connector(&[
        (
            "value.converter",
            "org.apache.kafka.connect.converters.ByteArrayConverter",
        ),
        json[2],
        json[3],
        (
            "transforms.outbox.table.fields.additional.placement",
            "a:envelope",
        ),
    ]));
    for name in ["expand_payload", "expand_null", "envelope"] {
        assert_eq!(key(&bytes, name), None, "{name}");
    }
    for name in [
        "table.expand.json.payload",
        "table.fields.additional.placement",
    ] {
        let found = findings_for(&bytes, &format!("transforms.outbox.{name}"));
        assert!(
            found.contains(&(Group::Unsupported, true)),
            "{name}: {found:?}"
        );
    }
}

#[test]
fn imported_configuration_and_report_contain_no_password() {
    let jaas = "org.apache.kafka.common.security.scram.ScramLoginModule required username=\"wal\\\"post\" password=\"hunter2;\";";
    let imported = import(&connector(&[
        ("database.password", "hunter2"),
        ("database.sslpassword", "hunter2"),
        ("producer.override.sasl.jaas.config", jaas),
        ("producer.override.sasl.mechanism", "SCRAM-SHA-512"),
        ("producer.override.security.protocol", "SASL_SSL"),
        (
            "producer.override.ssl.truststore.location",
            "/etc/trust.jks",
        ),
        ("producer.override.ssl.truststore.password", "hunter2"),
        ("producer.override.ssl.keystore.location", "/etc/key.p12"),
        ("producer.override.ssl.keystore.type", "PKCS12"),
        ("producer.override.ssl.keystore.password", "hunter2"),
        ("producer.override.ssl.key.password", "hunter2"),
        ("producer.override.ssl.keystore.key", "hunter2"),
        ("value.converter.basic.auth.user.info", "u:hunter2"),
        ("database.pasword", "hunter2"),
        ("my.own", "hunter2"),
    ]));
    assert!(!imported.toml.contains("hunter2"), "{}", imported.toml);
    assert!(
        !format!("{:?}", imported.findings).contains("hunter2"),
        "{}",
        report_text(&imported)
    );
    for property in [
        "database.password",
        "database.sslpassword",
        "producer.override.sasl.jaas.config",
    ] {
        assert!(
            findings_for(&imported, property).contains(&(Group::Different, true)),
            "{property}"
        );
    }
    assert!(
        report_text(&imported).contains("did you mean database.password?"),
        "{}",
        report_text(&imported)
    );
    let kafka = &document(&imported)["kafka"];
    for (name, expected) in [
        ("sasl.username", "wal\"post"),
        ("sasl.mechanisms", "SCRAM-SHA-512"),
        ("security.protocol", "SASL_SSL"),
        ("ssl.ca.location", "/etc/walpost/kafka-ca.pem"),
        ("ssl.keystore.location", "/etc/key.p12"),
    ] {
        assert_eq!(kafka[name].as_str(), Some(expected), "{name}");
    }
}

#[test]
fn imports_oauthbearer_settings_for_a_token_endpoint() {
    let jaas = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required clientId=\"debezium\" \
                clientSecret=\"hunter2\" scope='events write' extension_logicalCluster=\"lkc-1\" extension_identityPoolId=\"pool-1\" \
                ssl.truststore.location=\"/etc/trust.jks\";";
    let handler =
        "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler";
    let url = "https://login.example.com/oauth2/token";
    let login = [
        ("producer.override.security.protocol", "SASL_SSL"),
        ("producer.override.sasl.mechanism", "OAUTHBEARER"),
        ("producer.override.sasl.jaas.config", jaas),
        (
            "producer.override.sasl.login.callback.handler.class",
            handler,
        ),
        ("producer.override.sasl.oauthbearer.token.endpoint.url", url),
        ("producer.override.sasl.login.retry.backoff.ms", "100"),
        (
            "producer.override.sasl.oauthbearer.header.urlencode",
            "true",
        ),
    ];
    let imported = import(&connector(&login));
    assert!(!imported.toml.contains("hunter2"), "{}", imported.toml);
    let kafka = &document(&imported)["kafka"];
    for (name, expected) in [
        ("sasl.mechanisms", "OAUTHBEARER"),
        ("sasl.oauthbearer.method", "oidc"),
        ("sasl.oauthbearer.token.endpoint.url", url),
        ("sasl.oauthbearer.client.id", "debezium"),
        ("sasl.oauthbearer.scope", "events write"),
        ("sasl.oauthbearer.header.urlencode", "true"),
        (
            "sasl.oauthbearer.extensions",
            "logicalCluster=lkc-1,identityPoolId=pool-1",
        ),
    ] {
        assert_eq!(kafka[name].as_str(), Some(expected), "{name}");
    }
    let found = findings_for(&imported, "producer.override.sasl.jaas.config");
    assert!(found.contains(&(Group::Different, true)), "{found:?}");
    let printed = report_text(&imported);
    for text in [
        "WALPOST_KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET",
        "https.ca.location",
    ] {
        assert!(printed.contains(text), "{printed}");
    }
    // KIP-1139 replaces the JAAS options with separate properties.
    let mut newer = login.to_vec();
    newer[2].1 = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;";
    newer.extend([
        (
            "producer.override.sasl.oauthbearer.client.credentials.client.id",
            "debezium",
        ),
        (
            "producer.override.sasl.oauthbearer.client.credentials.client.secret",
            "hunter2",
        ),
    ]);
    let imported = import(&connector(&newer));
    assert!(!imported.toml.contains("hunter2"), "{}", imported.toml);
    let kafka = &document(&imported)["kafka"];
    assert_eq!(
        kafka["sasl.oauthbearer.client.id"].as_str(),
        Some("debezium")
    );
    let secret = "producer.override.sasl.oauthbearer.client.credentials.client.secret";
    assert_eq!(findings_for(&imported, secret), [(Group::Different, true)]);
}

#[test]
fn requires_a_token_command_for_custom_login_callback_handlers() {
    let imported = import(&connector(&[
        ("producer.override.security.protocol", "SASL_SSL"),
        ("producer.override.sasl.mechanism", "OAUTHBEARER"),
        (
            "producer.override.sasl.jaas.config",
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;",
        ),
        (
            "producer.override.sasl.login.callback.handler.class",
            "software.amazon.msk.auth.iam.IAMOAuthBearerLoginCallbackHandler",
        ),
    ]));
    let printed = report_text(&imported);
    assert!(printed.contains("kafka_token_command"), "{printed}");
    assert!(imported.toml.contains("CHANGE THIS"), "{}", imported.toml);
    let handler = "producer.override.sasl.login.callback.handler.class";
    assert_eq!(
        findings_for(&imported, handler),
        [(Group::Unsupported, true)]
    );
}

#[test]
fn reports_config_provider_references_as_manual_steps() {
    let imported = import(&connector(&[
        ("database.hostname", "${env:DB_HOST}"),
        (
            "database.password",
            "${file:/run/secrets/db.properties:password}",
        ),
        ("database.user", "${secretsManager:db:user}"),
    ]));
    for (property, expected) in [
        (
            "database.hostname",
            "the value refers to an environment variable of the Connect worker, ${env:DB_HOST}",
        ),
        (
            "database.password",
            "the value refers to a file on the Connect worker",
        ),
        (
            "database.user",
            "the value refers to a secret from one of the Connect worker's config providers",
        ),
    ] {
        assert!(
            findings_for(&imported, property)
                .iter()
                .any(|(_, needs_action)| *needs_action),
            "{property}"
        );
        assert!(
            report_text(&imported).contains(expected),
            "{expected}: {}",
            report_text(&imported)
        );
    }
    assert_eq!(
        string_value(&imported, "postgres").as_deref(),
        Some("postgresql://change-me@change-me.invalid/shop")
    );
}

#[test]
fn converts_connection_properties_to_an_equivalent_url() {
    let imported = import(&connector(&[
        ("database.hostname", "::1"),
        ("database.port", "5433"),
        ("database.user", "a b@c/d"),
        ("database.dbname", "shop?x=1&y%"),
        ("database.sslmode", "verify-full"),
        ("database.sslrootcert", "/etc/ca & co.pem"),
        ("database.sslkey", "/etc/key.pk8"),
    ]));
    let settings = settings(&imported.toml).expect("valid").remove(0);
    let postgres = &settings.postgres;
    assert_eq!(
        (postgres.dbname(), postgres.user()),
        ("shop?x=1&y%", "a b@c/d")
    );
    assert_eq!(postgres.servers(), "[::1]:5433");
    let url = string_value(&imported, "postgres").expect("a URL");
    assert!(
        url.ends_with(
            "?sslmode=verify-full&sslrootcert=%2Fetc%2Fca%20%26%20co.pem&sslkey=%2Fetc%2Fkey.pk8"
        ),
        "{url}"
    );
    assert!(
        report_text(&imported).contains("openssl pkcs8 -inform DER"),
        "{}",
        report_text(&imported)
    );
    let allow = import(&connector(&[("database.sslmode", "allow")]));
    assert!(
        string_value(&allow, "postgres")
            .expect("a URL")
            .ends_with("?sslmode=prefer")
    );
}

#[test]
fn creates_a_pipeline_and_slot_for_each_table_listed_by_name() {
    let imported = import(&connector(&[(
        "table.include.list",
        "public.outbox, sales\\.events,order.user",
    )]));
    let settings = settings(&imported.toml).expect("valid");
    let found: Vec<_> = settings
        .iter()
        .map(|settings| {
            let target = &settings.target;
            (target.outbox.to_string(), target.slot.clone())
        })
        .collect();
    let expected = [
        ("table public.outbox", "walpost_shop_outbox_outbox"),
        ("table sales.events", "walpost_shop_outbox_events"),
        ("table \"order\".\"user\"", "walpost_shop_outbox_user"),
    ];
    assert_eq!(
        found,
        expected.map(|(table, slot)| (table.to_owned(), slot.to_owned()))
    );
    let slots = "IN ('walpost_shop_outbox_outbox', 'walpost_shop_outbox_events', 'walpost_shop_outbox_user')";
    assert!(imported.toml.contains(slots), "{}", imported.toml);
}

#[test]
fn reports_table_patterns_and_missing_table_lists_as_manual_steps() {
    for list in ["public\\..*", "(public|sales).outbox", "outbox", "-"] {
        let imported = import(&connector(&[("table.include.list", list)]));
        let needs_action = findings_for(&imported, "table.include.list")
            .iter()
            .any(|(_, needs_action)| *needs_action);
        assert!(needs_action, "{list}: {}", report_text(&imported));
        assert!(imported.toml.contains("CHANGE THIS: the outbox"), "{list}");
    }
}

#[test]
fn selects_tables_according_to_the_transform_predicate() {
    let with = |pattern: &str, negate: &str, tables: &str| {
        import(&connector(&[
            ("table.include.list", tables),
            ("transforms.outbox.predicate", "isOutbox"),
            ("transforms.outbox.negate", negate),
            ("predicates", "isOutbox"),
            (
                "predicates.isOutbox.type",
                "org.apache.kafka.connect.transforms.predicates.TopicNameMatches",
            ),
            ("predicates.isOutbox.pattern", pattern),
        ]))
    };
    let check = |imported: &Imported, expected: &str, needs_action: bool| {
        assert_eq!(
            string_value(imported, "table").as_deref(),
            Some(expected),
            "{}",
            report_text(imported)
        );
        assert_eq!(
            imported.findings.iter().any(|finding| finding.needs_action),
            needs_action,
            "{}",
            report_text(imported)
        );
    };
    check(
        &with(".*outbox.*", "false", "public.outbox"),
        "public.outbox",
        false,
    );
    check(
        &with("lab\\.public\\.outbox", "false", "public.outbox"),
        "public.outbox",
        false,
    );
    let imported = with(
        "lab\\.public\\.outbox",
        "false",
        "public.orders,public.outbox",
    );
    check(&imported, "public.outbox", true);
    assert!(
        report_text(&imported).contains(
            "the list contains public.orders, whose changes do not pass through the outbox event router"
        ),
        "{}",
        report_text(&imported)
    );
    check(
        &with(
            "lab\\.public\\.orders",
            "true",
            "public.orders,public.outbox",
        ),
        "public.outbox",
        true,
    );
    check(
        &with("lab\\.sales\\.outbox", "false", "-"),
        "sales.outbox",
        false,
    );
    check(
        &with("(?!x).*", "false", "public.outbox"),
        "public.outbox",
        true,
    );
}

#[test]
fn reports_unsupported_transforms_that_change_records() {
    let with = |chain: &str, class: &str, more: &[(&str, &str)]| {
        let overrides = [("transforms", chain), ("transforms.other.type", class)];
        import(&connector(&[&overrides[..], more].concat()))
    };
    let unsupported = |imported: &Imported| {
        findings_for(imported, "transforms.other.type") == [(Group::Unsupported, true)]
    };
    assert!(unsupported(&with(
        "outbox,other",
        "org.apache.kafka.connect.transforms.RegexRouter",
        &[]
    )));
    assert!(unsupported(&with(
        "outbox,other",
        "org.apache.kafka.connect.transforms.InsertHeader",
        &[]
    )));
    assert!(unsupported(&with(
        "other,outbox",
        "io.debezium.transforms.Filter",
        &[]
    )));
    assert!(!unsupported(&with(
        "other,outbox",
        "io.debezium.transforms.ByLogicalTableRouter",
        &[]
    )));
    assert!(!unsupported(&with("outbox", "com.example.Idle", &[])));
    let tombstones = [
        ("transforms.other.predicate", "t"),
        ("predicates", "t"),
        (
            "predicates.t.type",
            "org.apache.kafka.connect.transforms.predicates.RecordIsTombstone",
        ),
    ];
    let filter = "org.apache.kafka.connect.transforms.Filter";
    assert!(!unsupported(&with("other,outbox", filter, &tombstones)));
    assert!(unsupported(&with("outbox,other", filter, &tombstones)));
    let elsewhere = [
        ("transforms.other.predicate", "t"),
        ("predicates", "t"),
        (
            "predicates.t.type",
            "org.apache.kafka.connect.transforms.predicates.TopicNameMatches",
        ),
        ("predicates.t.pattern", "lab.public.orders"),
    ];
    assert!(!unsupported(&with("other,outbox", filter, &elsewhere)));
}

#[test]
fn rejects_unsupported_connectors() {
    let error = |text: &str| import::debezium(text, None).expect_err(text).to_string();
    let text = error(&connector(&[("transforms", "-")]));
    assert!(text.contains("inserts of an outbox table"), "{text}");
    let text = error(&connector(&[(
        "connector.class",
        "io.debezium.connector.mysql.MySqlConnector",
    )]));
    assert!(
        text.contains("MySqlConnector") && text.contains("PostgreSQL"),
        "{text}"
    );
}

#[test]
fn converts_producer_properties_to_librdkafka_properties() {
    let imported = import(&connector(&[
        ("producer.override.max.request.size", "2000000"),
        ("producer.override.linger.ms", "5"),
        ("producer.override.batch.size", "65536"),
        ("producer.override.compression.type", "zstd"),
        ("producer.override.acks", "all"),
        ("producer.override.retries", "3"),
        ("producer.override.delivery.timeout.ms", "1000"),
        ("producer.override.buffer.memory", "1000"),
        ("producer.override.enable.idempotence", "false"),
        (
            "producer.override.max.in.flight.requests.per.connection",
            "5",
        ),
        ("producer.override.key.serializer", "S"),
        ("producer.override.lingr.ms", "5"),
        ("producer.override.request.timeout.ms", "soon"),
        (
            "producer.override.ssl.endpoint.identification.algorithm",
            "",
        ),
        ("producer.override.interceptor.classes", "com.example.I"),
    ]));
    let kafka = document(&imported)["kafka"]
        .as_table()
        .expect("a table")
        .clone();
    for (name, expected) in [
        ("message.max.bytes", "2000000"),
        ("linger.ms", "5"),
        ("batch.size", "65536"),
        ("compression.type", "zstd"),
        ("ssl.endpoint.identification.algorithm", "none"),
    ] {
        assert_eq!(kafka[name].as_str(), Some(expected), "{name}");
    }
    assert_eq!(kafka.len(), 6, "{kafka:?}");
    for (name, group) in [
        ("retries", Group::Different),
        ("delivery.timeout.ms", Group::Different),
        ("buffer.memory", Group::Different),
        ("enable.idempotence", Group::Different),
        ("max.in.flight.requests.per.connection", Group::Different),
        ("interceptor.classes", Group::Unsupported),
        ("request.timeout.ms", Group::Unsupported),
        ("lingr.ms", Group::Unknown),
    ] {
        assert_eq!(
            findings_for(&imported, &format!("producer.override.{name}"))[0].0,
            group,
            "{name}"
        );
    }
    assert!(
        report_text(&imported).contains("did you mean linger.ms?"),
        "{}",
        report_text(&imported)
    );
}

#[test]
fn converts_connector_properties_to_configuration_keys() {
    let imported = import(&connector(&[
        ("snapshot.mode", "no_data"),
        ("topic.creation.default.partitions", "12"),
        ("topic.creation.default.replication.factor", "-1"),
        ("exactly.once.support", "required"),
        ("extended.headers.enabled", "false"),
        (
            "heartbeat.action.query",
            "DELETE FROM outbox WHERE created_at < now() - interval '7 days'",
        ),
        ("transforms.outbox.tracing.span.context.field", "trace"),
    ]));
    let settings = settings(&imported.toml).expect("valid").remove(0);
    assert_eq!(settings.snapshot, SnapshotMode::Never);
    assert!(matches!(settings.delivery, Delivery::ExactlyOnce(_)));
    let create = match settings.sink {
        SinkSettings::Kafka { create_topics, .. } => create_topics,
        SinkSettings::Stdout => None,
    };
    assert_eq!(
        create,
        Some(CreateTopics {
            partitions: 12,
            replication: -1
        })
    );
    assert_eq!(key(&imported, "debezium_headers"), None);
    assert_eq!(
        string_value(&imported, "tracing_span_context").as_deref(),
        Some("trace")
    );
    assert_eq!(
        findings_for(&imported, "heartbeat.action.query"),
        [(Group::Unsupported, true)]
    );
    assert!(
        report_text(&imported).contains("retention = \"7d\""),
        "{}",
        report_text(&imported)
    );
    let harmless = import(&connector(&[(
        "heartbeat.action.query",
        "UPDATE heartbeat SET at = now()",
    )]));
    assert_eq!(
        findings_for(&harmless, "heartbeat.action.query"),
        [(Group::Different, false)]
    );
    for (mode, expected, needs_action) in [
        ("initial", "initial", false),
        ("when_needed", "initial", false),
        ("never", "never", false),
        ("always", "initial", true),
        ("initial_only", "initial", true),
        ("custom", "initial", true),
    ] {
        let imported = import(&connector(&[("snapshot.mode", mode)]));
        assert_eq!(
            string_value(&imported, "snapshot").as_deref(),
            Some(expected),
            "{mode}"
        );
        let open = findings_for(&imported, "snapshot.mode")
            .iter()
            .any(|(_, needs_action)| *needs_action);
        assert_eq!(open, needs_action, "{mode}");
    }
}

#[test]
fn cutover_commands_contain_the_configured_names() {
    let imported = import(&connector(&[
        ("slot.name", "dbz_shop"),
        ("database.port", "5433"),
    ]));
    for command in [
        "#      walpost init --config walpost.toml --role 'debezium' --postgres 'postgresql://postgres@db.example.com:5433/shop'\n",
        "WHERE debezium.slot_name = 'dbz_shop' AND walpost.slot_name IN ('walpost_shop_outbox')\"\n",
        "#      curl -fsS -X PUT http://localhost:8083/connectors/shop-outbox/stop\n",
        "#      sed -i 's/^snapshot = \"initial\"$/snapshot = \"never\"/' walpost.toml\n",
        "-c \"SELECT pg_catalog.pg_drop_replication_slot('dbz_shop')\"\n",
    ] {
        assert!(
            imported.toml.contains(command),
            "{command}: {}",
            imported.toml
        );
    }
    assert!(
        imported
            .toml
            .lines()
            .any(|line| line == "snapshot = \"initial\""),
        "the sed command replaces this line"
    );
    let never = import(&connector(&[("snapshot.mode", "never")]));
    assert!(!never.toml.contains("sed -i"), "{}", never.toml);
    let quoted = import(&connector(&[("database.user", "it's")]));
    assert!(
        quoted.toml.contains(r"--role 'it'\''s' "),
        "{}",
        quoted.toml
    );
    // Walpost's slot must not have the same name as Debezium's, which still exists.
    let same = import(&connector(&[("slot.name", "walpost_shop_outbox")]));
    assert_eq!(
        string_value(&same, "slot").as_deref(),
        Some("walpost_shop_outbox_new")
    );
}

#[test]
fn imports_debezium_server_properties() {
    let imported = import(
        "# a server\n\
         debezium.sink.type=kafka\n\
         debezium.sink.kafka.producer.bootstrap.servers=kafka1:9092\n\
         debezium.sink.kafka.producer.key.serializer=org.apache.kafka.common.serialization.StringSerializer\n\
         debezium.source.connector.class=io.debezium.connector.postgresql.PostgresConnector\n\
         debezium.source.offset.storage.file.filename=data/offsets.dat\n\
         debezium.source.database.hostname=db\n\
         debezium.source.database.user=debezium\n\
         debezium.source.database.password=${DB_PASSWORD}\n\
         debezium.source.database.dbname=shop\n\
         debezium.source.topic.prefix=lab\n\
         debezium.source.table.include.list=public.outbox\n\
         debezium.transforms=outbox\n\
         debezium.transforms.outbox.type=io.debezium.transforms.outbox.EventRouter\n\
         debezium.transforms.outbox.route.topic.replacement=shop.$${routedByValue}\n\
         debezium.transforms.outbox.table.fields.additional.placement=\\\n\
         \x20   type:header:eventType\n\
         debezium.format.key=simplestring\n\
         debezium.format.value=json\n\
         debezium.format.value.schemas.enable=false\n\
         %dev.debezium.source.database.hostname=localhost\n\
         quarkus.log.level=INFO\n",
    );
    assert_eq!(
        string_value(&imported, "topic").as_deref(),
        Some("shop.{aggregatetype}"),
        "{}",
        report_text(&imported)
    );
    assert_eq!(key(&imported, "key_format"), None);
    assert_eq!(
        string_value(&imported, "value_format").as_deref(),
        Some("json")
    );
    assert_eq!(
        string_value(&imported, "header_format").as_deref(),
        Some("json-schema")
    );
    assert_eq!(
        string_value(&imported, "postgres").as_deref(),
        Some("postgresql://debezium@db/shop")
    );
    assert_eq!(string_value(&imported, "name").as_deref(), Some("outbox"));
    assert!(
        imported.toml.contains("systemctl stop debezium-server"),
        "{}",
        imported.toml
    );
    let to_do: Vec<_> = imported
        .findings
        .iter()
        .filter(|finding| finding.needs_action)
        .collect();
    assert_eq!(to_do.len(), 1, "{to_do:?}");
    assert_eq!(to_do[0].property, "debezium.source.database.password");
    assert_eq!(
        findings_for(&imported, "%dev.debezium.source.database.hostname"),
        [(Group::Different, false)]
    );
}

#[test]
fn suggests_names_for_misspelled_and_obsolete_properties() {
    let imported = import(&connector(&[
        ("table.include.list", "-"),
        ("table.whitelist", "sales.outbox"),
        ("topic.prefix", "-"),
        ("database.server.name", "lab"),
        ("debezium.expand.json.payload", "true"),
        ("transforms.outbox.route.by.id", "x"),
        ("transforms.outbox.route.topic.regexp", "x"),
        ("transforms.outbox.table.field.event.kee", "x"),
    ]));
    assert_eq!(
        string_value(&imported, "table").as_deref(),
        Some("sales.outbox")
    );
    assert_eq!(
        string_value(&imported, "debezium_headers").as_deref(),
        Some("lab")
    );
    for (property, meant) in [
        ("table.whitelist", "table.include.list"),
        ("database.server.name", "topic.prefix"),
        ("debezium.expand.json.payload", "table.expand.json.payload"),
        (
            "transforms.outbox.route.by.id",
            "transforms.outbox.route.by.field",
        ),
        (
            "transforms.outbox.route.topic.regexp",
            "transforms.outbox.route.topic.regex",
        ),
        (
            "transforms.outbox.table.field.event.kee",
            "transforms.outbox.table.field.event.key",
        ),
    ] {
        let found = imported
            .findings
            .iter()
            .find(|finding| finding.property == property && finding.group == Group::Unknown);
        let found = found.unwrap_or_else(|| panic!("{property}: {}", report_text(&imported)));
        assert!(
            found.needs_action && found.message.contains(meant),
            "{found:?}"
        );
    }
}

#[test]
fn does_not_overwrite_existing_files() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("walpost.toml");
    assert_eq!(write(&path, "a"), Ok(()));
    let error = write(&path, "b").expect_err("it exists");
    assert!(error.contains("already exists"), "{error}");
    assert_eq!(fs::read_to_string(&path).expect("read"), "a");
}

/// Generates known property names and arbitrary text.
fn name() -> impl Strategy<Value = String> {
    const KNOWN: &[&str] = &[
        "connector.class",
        "name",
        "database.hostname",
        "database.port",
        "database.user",
        "database.password",
        "database.dbname",
        "database.sslmode",
        "database.sslkey",
        "table.include.list",
        "schema.include.list",
        "topic.prefix",
        "slot.name",
        "snapshot.mode",
        "transforms",
        "transforms.outbox.type",
        "transforms.outbox.predicate",
        "transforms.outbox.negate",
        "transforms.outbox.route.by.field",
        "transforms.outbox.route.topic.regex",
        "transforms.outbox.route.topic.replacement",
        "transforms.outbox.table.fields.additional.placement",
        "transforms.outbox.table.field.event.id",
        "transforms.outbox.table.field.event.key",
        "transforms.outbox.table.field.event.payload",
        "transforms.outbox.table.field.event.timestamp",
        "transforms.outbox.table.expand.json.payload",
        "transforms.outbox.tracing.span.context.field",
        "predicates",
        "predicates.p.type",
        "predicates.p.pattern",
        "key.converter",
        "key.converter.schemas.enable",
        "value.converter",
        "header.converter",
        "producer.override.bootstrap.servers",
        "producer.override.sasl.mechanism",
        "producer.override.security.protocol",
        "producer.override.sasl.login.callback.handler.class",
        "producer.override.sasl.oauthbearer.token.endpoint.url",
        "producer.override.sasl.jaas.config",
        "producer.override.linger.ms",
        "producer.override.security.protocol",
        "producer.override.ssl.truststore.location",
        "producer.override.ssl.truststore.type",
        "topic.creation.default.partitions",
        "topic.creation.default.replication.factor",
        "heartbeat.action.query",
        "exactly.once.support",
        "column.mask.hash.x.with.salt.y",
    ];
    prop_oneof![8 => proptest::sample::select(KNOWN).prop_map(str::to_owned), 1 => any::<String>()]
}

/// Generates values that are valid for some properties, and arbitrary text.
fn value() -> impl Strategy<Value = String> {
    const KNOWN: &[&str] = &[
        "outbox",
        "outbox,p",
        "io.debezium.transforms.outbox.EventRouter",
        "p",
        "true",
        "false",
        "(.*)",
        "a$1{}",
        "${a:b}",
        "$$",
        "\\",
        "public.outbox,a.b,\u{e4}.\"",
        "a:header,b:envelope:c,d:partition",
        "[a-&&]",
        "(?<x>\\p{Alpha}[^]]",
        "JKS",
        "PEM",
        "org.apache.kafka.connect.json.JsonConverter",
        "PlainLoginModule required username=\"a",
        "OAUTHBEARER",
        "SASL_SSL",
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required clientId=\"a\" extension_\u{e4}=b",
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
        "12",
        "-1",
        "verify-full",
        "org.apache.kafka.connect.transforms.predicates.TopicNameMatches",
        "\u{0}\u{1b}[31m\u{202e}\n",
        "",
    ];
    prop_oneof![3 => proptest::sample::select(KNOWN).prop_map(str::to_owned), 1 => any::<String>()]
}

proptest! {
    #[test]
    fn import_produces_a_valid_file_or_an_error_for_any_properties(
        mut properties in proptest::collection::vec((name(), value()), 0..14),
        is_complete in any::<bool>(),
    ) {
        if is_complete {
            for (name, value) in [
                ("connector.class", "PostgresConnector"),
                ("transforms", "outbox"),
                ("transforms.outbox.type", "io.debezium.transforms.outbox.EventRouter"),
            ] {
                properties.push((name.to_owned(), value.to_owned()));
            }
        }
        let json: serde_json::Map<_, _> = properties.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
        let imported = import::debezium(&serde_json::Value::from(json).to_string(), None);
        prop_assert!(imported.is_ok() || !is_complete, "{:?}", imported);
        if let Ok(imported) = imported {
            let loaded = settings(&imported.toml);
            prop_assert!(loaded.is_ok(), "{:?}\n{}", loaded, imported.toml);
            let is_printable = |c: char| c == '\n' || !crate::escape::is_control(c);
            prop_assert!(imported.toml.chars().all(is_printable), "{:?}", imported.toml);
        }
    }

    #[test]
    fn does_not_panic_on_arbitrary_text(text in any::<String>(), worker in any::<String>(), prefix in "(debezium\\.source\\.)?connector\\.class=PostgresConnector\n|\\{|\\[|") {
        let text = format!("{prefix}{text}");
        let _ = import::debezium(&text, Some(&worker));
        let server = format!("debezium.source.connector.class=PostgresConnector\ndebezium.transforms=o\ndebezium.transforms.o.type=io.debezium.transforms.outbox.EventRouter\n{text}");
        if let Ok(imported) = import::debezium(&server, None) {
            let loaded = settings(&imported.toml);
            prop_assert!(loaded.is_ok(), "{:?}\n{}", loaded, imported.toml);
        }
    }
}

#[test]
fn rejects_yaml_and_explains_how_to_get_json() {
    const CLASS: &str = "connector.class: io.debezium.connector.postgresql.PostgresConnector";
    for text in [
        format!("apiVersion: kafka.strimzi.io/v1beta2\nspec:\n  config:\n    {CLASS}\n"),
        format!("  config:\n    {CLASS}\n    database.hostname: \"db.example.com\"\n"),
        format!("{CLASS}\ndatabase.hostname: \"db.example.com\"\n"),
        "---\nname: 'x'\n".to_owned(),
    ] {
        let error = import::debezium(&text, None).expect_err(&text);
        assert!(error.to_string().contains("kubectl get"), "{error}");
    }
    let worker = "spec:\n  config:\n    key.converter: \"org.apache.kafka.connect.storage.StringConverter\"\n";
    let error = import::debezium(&connector(&[]), Some(worker)).expect_err(worker);
    assert!(error.to_string().contains("NAME=VALUE"), "{error}");
    // A colon within a value does not mean that the file is YAML.
    import_with(
        &connector(&[]),
        Some("# config:\nbootstrap.servers=kafka:9092\n"),
    );
}

#[test]
fn converts_multiple_hosts_and_ports_to_a_connection_url() {
    for (hosts, port, expected) in [
        (
            "a.example.com,b.example.com",
            "5433",
            "a.example.com:5432,b.example.com:5433",
        ),
        (
            "a.example.com:5434, b.example.com",
            "5433",
            "a.example.com:5434,b.example.com:5433",
        ),
        (
            "a.example.com,b.example.com",
            "",
            "a.example.com,b.example.com",
        ),
        ("fd00::1", "5433", "[fd00::1]:5433"),
    ] {
        let mut overrides = vec![("database.hostname", hosts)];
        if !port.is_empty() {
            overrides.push(("database.port", port));
        }
        let imported = import(&connector(&overrides));
        let url = format!("postgresql://debezium@{expected}/shop");
        assert!(imported.toml.contains(&url), "{url} in {}", imported.toml);
    }
}

#[test]
fn reports_settings_that_change_the_delivered_bytes() {
    let findings = |overrides: &[(&str, &str)]| {
        let findings = import(&connector(overrides)).findings.into_iter();
        let has_no_effect = |finding: &Finding| finding.property == "without effect in Walpost";
        findings.partition::<Vec<_>, _>(has_no_effect)
    };
    const BINARY: (&str, &str) = (
        "value.converter",
        "io.debezium.converters.BinaryDataConverter",
    );
    const LONG: (&str, &str) = (
        "key.converter",
        "org.apache.kafka.connect.converters.LongConverter",
    );
    for (overrides, property) in [
        (
            &[
                BINARY,
                (
                    "value.converter.delegate.converter.type",
                    "org.apache.kafka.connect.json.JsonConverter",
                ),
            ][..],
            "value.converter.delegate.converter.type",
        ),
        (&[("binary.handling.mode", "hex")], "binary.handling.mode"),
        (
            &[BINARY, ("value.converter.of.another", "x")],
            "value.converter.of.another",
        ),
        (&[LONG], "key.converter"),
    ] {
        let (without_effect, others) = findings(overrides);
        assert!(
            without_effect
                .iter()
                .all(|finding| !finding.message.contains(property)),
            "{without_effect:?}"
        );
        let found: Vec<_> = others
            .iter()
            .filter(|finding| finding.property == property)
            .collect();
        assert!(
            !found.is_empty() && found.iter().all(|finding| finding.needs_action),
            "{found:?}"
        );
    }
}
