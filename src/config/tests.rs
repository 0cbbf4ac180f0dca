use std::time::Duration;

use super::*;
use crate::outbox::reserved_topics::TopicUse;
use crate::outbox::settings::{
    EmptyPayload, Expansion, Format, HeaderFormat, HeadersColumn, NullPayload, OutboxSettings,
    Untyped,
};
use crate::pipeline::settings::{DeadLetterSettings, Retention, SinkSettings, Undeliverable};
use crate::postgres::target::Outbox;

/// Loads the configuration as if the configuration file contained `toml`, with these flags and
/// environment variables.
fn load_text(
    toml: &str,
    connection: ConnectionArgs,
    records: &RecordArgs,
    env: &[(&str, &str)],
) -> Result<Vec<PipelineSettings>, ConfigError> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("walpost.toml");
    std::fs::write(&path, toml).expect("written");
    let connection = ConnectionArgs {
        config: (!toml.is_empty()).then_some(path),
        ..connection
    };
    let given = Given {
        connection: &connection,
        records: Some(records),
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    let variable = |name: &str| {
        let found = env.iter().find(|(key, _)| *key == name);
        found
            .map(|(_, value)| (*value).to_owned())
            .or((name == "USER").then(|| "me".to_owned()))
    };
    let vars = env
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Ok(load(&given, &variable, vars)?.pipelines)
}

fn from_toml(toml: &str) -> Result<Vec<PipelineSettings>, ConfigError> {
    load_text(toml, ConnectionArgs::default(), &RecordArgs::default(), &[])
}

fn error(toml: &str) -> String {
    from_toml(toml).expect_err(toml).to_string()
}

fn property<'s>(settings: &'s PipelineSettings, name: &str) -> Option<&'s str> {
    match &settings.sink {
        SinkSettings::Kafka { properties, .. } => properties.get(name).map(String::as_str),
        SinkSettings::Stdout => None,
    }
}

const MINIMAL: &str = r#"
    [kafka]
    "bootstrap.servers" = "broker:9092"
    [[pipeline]]
    postgres = "postgresql://walpost@db/shop"
"#;

#[test]
fn fills_in_defaults_for_a_minimal_file() {
    let settings = from_toml(MINIMAL).expect("loads").remove(0);
    assert_eq!(settings.name, "outbox");
    assert_eq!(settings.target.outbox.to_string(), "table public.outbox");
    assert_eq!(settings.target.slot, "walpost_outbox");
    assert_eq!(settings.target.publication, "walpost_outbox");
    assert_eq!(settings.outbox, OutboxSettings::default());
    assert_eq!(
        (settings.window_bytes, settings.window_records),
        (8 << 20, 100_000)
    );
    assert_eq!(settings.row_bytes_max, 64 << 20);
    assert_eq!(settings.link_timeout, Duration::from_secs(60));
    assert_eq!(settings.drain_timeout, Duration::from_secs(30));
    let unset = Retention {
        keep: None,
        ahead: 7,
        delete_rows: false,
    };
    assert_eq!(settings.retention, unset);
}

#[test]
fn reads_every_configuration_key_of_a_pipeline() {
    let settings = from_toml(
        r#"
        [kafka]
        "bootstrap.servers" = "broker:9092"
        "linger.ms" = 3
        [[pipeline]]
        name = "orders"
        postgres = "host=db dbname=shop"
        table = "shop.events"
        publication = "p"
        slot = "s"
        topic = "t"
        key = "{tenant}:{id}"
        payload = "body"
        null_payload = "tombstone"
        key_format = "json"
        value_format = "json-schema"
        expand_payload = true
        expand_null = "optional-bytes"
        expand_empty_array = "optional-string"
        envelope = ["tenant", "type:eventType"]
        empty_payload = "tombstone"
        null_default = true
        header_format = "simple"
        debezium_headers = "lab"
        tracing_span_context = "tracingspancontext"
        headers = { type = "{type}" }
        headers_column = ""
        timestamp = "created_at"
        partition = "shard"
        window_bytes = "1MiB"
        window_records = 10
        max_row_bytes = 2097152
        link_timeout = "5s"
        drain_timeout = "1m"
        retention = "24h"
        partitions_ahead = 3
        delete_rows = true
        create_topics = { partitions = 3 }
        kafka = { "linger.ms" = 7, "socket.nagle.disable" = true }
        "#,
    )
    .expect("loads")
    .remove(0);
    assert_eq!(settings.name, "orders");
    let postgres = &settings.postgres;
    assert_eq!((postgres.dbname(), postgres.user()), ("shop", "me"));
    assert_eq!(postgres.servers(), "db:5432");
    assert_eq!(settings.target.outbox.to_string(), "table shop.events");
    assert_eq!(
        (
            settings.target.publication.as_str(),
            settings.target.slot.as_str()
        ),
        ("p", "s")
    );
    let outbox = settings.outbox.clone();
    assert_eq!(
        (outbox.topic.to_string(), outbox.key.to_string()),
        ("t".into(), "{tenant}:{id}".into())
    );
    assert_eq!(
        (outbox.payload.as_str(), outbox.null_payload),
        ("body", NullPayload::Tombstone)
    );
    assert_eq!(
        outbox.headers,
        [("type".to_owned(), "{type}".parse().expect("template"))]
    );
    assert_eq!(outbox.headers_column, HeadersColumn::Off);
    assert_eq!(
        (outbox.key_format, outbox.value_format, outbox.header_format),
        (Format::Json, Format::JsonSchema, HeaderFormat::Simple)
    );
    let kept = Expansion {
        nulls: Untyped::Keep,
        empty_arrays: Untyped::Keep,
    };
    assert_eq!(outbox.expand_payload, Some(kept));
    let members = [("tenant", "tenant"), ("type", "eventType")];
    let members = members.map(|(column, name)| (column.to_owned(), name.to_owned()));
    assert_eq!(outbox.envelope, members);
    assert_eq!(
        (outbox.empty_payload, outbox.null_default),
        (EmptyPayload::Tombstone, true)
    );
    let debezium = outbox.debezium_headers.expect("headers");
    assert_eq!(
        (debezium.logical_name.as_str(), debezium.run_id.len()),
        ("lab", 36)
    );
    assert_eq!(
        outbox.tracing_span_context.as_deref(),
        Some("tracingspancontext")
    );
    assert_eq!(
        (outbox.timestamp.as_deref(), outbox.partition.as_deref()),
        (Some("created_at"), Some("shard"))
    );
    assert_eq!(
        (settings.window_bytes, settings.window_records),
        (1 << 20, 10)
    );
    assert_eq!(settings.row_bytes_max, 2 << 20);
    assert_eq!(
        (
            settings.link_timeout.as_secs(),
            settings.drain_timeout.as_secs()
        ),
        (5, 60)
    );
    let retention = Retention {
        keep: Some(Duration::from_secs(24 * 3600)),
        ahead: 3,
        delete_rows: true,
    };
    assert_eq!(settings.retention, retention);
    assert_eq!(property(&settings, "linger.ms"), Some("7"));
    assert_eq!(property(&settings, "socket.nagle.disable"), Some("true"));
    match settings.sink {
        SinkSettings::Kafka {
            create_topics: Some(create),
            ..
        } => {
            assert_eq!((create.partitions, create.replication), (3, -1));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn outbox_with_logical_messages_accepts_a_prefix_but_not_a_table() {
    let outbox = |lines: &str| from_toml(&format!("{MINIMAL}\noutbox = \"messages\"\n{lines}"));
    let prefix = |prefix: &str| Outbox::Messages {
        prefix: prefix.to_owned(),
    };
    let loaded = |lines: &str| outbox(lines).expect("loads").remove(0).target.outbox;
    assert_eq!(loaded(""), prefix("walpost_outbox"));
    assert_eq!(loaded("name = \"orders\""), prefix("walpost_orders"));
    assert_eq!(loaded("prefix = \"Orders.v1\""), prefix("Orders.v1"));

    let text = outbox("table = \"public.outbox\"")
        .expect_err("both")
        .to_string();
    assert!(
        text.contains("table: an outbox that uses logical decoding messages has no table"),
        "{text}"
    );
    let text = error(&format!("{MINIMAL}\nprefix = \"x\""));
    assert!(
        text.contains("prefix: a prefix is used only with logical decoding messages"),
        "{text}"
    );
    for bad in ["", "a b", &"x".repeat(64)] {
        let text = outbox(&format!("prefix = \"{bad}\""))
            .expect_err(bad)
            .to_string();
        assert!(text.contains("1 to 63 characters"), "{text}");
    }
}

#[test]
fn requires_a_separate_topic_for_dead_letters() {
    let letters = |lines: &str| {
        let settings = from_toml(&format!("{MINIMAL}\n{lines}"));
        settings.expect("loads").remove(0).dead_letters
    };
    assert_eq!(letters(""), DeadLetterSettings::default());
    let unroutable = "on_unroutable = \"dead-letter\"\n";
    let enabled = letters(unroutable);
    assert_eq!(
        (enabled.oversize, enabled.unroutable, enabled.topic.as_str()),
        (
            Undeliverable::Halt,
            Undeliverable::DeadLetter,
            "walpost-dead-letters"
        )
    );
    let named = letters("on_oversize = \"dead-letter\"\ndead_letter_topic = \"d\"");
    assert_eq!(
        (named.oversize, named.topic.as_str()),
        (Undeliverable::DeadLetter, "d")
    );
    let assert_rejected = |lines: &str, words: &[&str]| {
        let text = error(&format!("{MINIMAL}\n{lines}"));
        for word in words {
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
    };
    let topic = |name: &str| format!("{unroutable}dead_letter_topic = \"{name}\"\n");
    for name in ["", ".", "a b", &"x".repeat(250)] {
        assert_rejected(&topic(name), &["dead_letter_topic", "1 to 249 characters"]);
    }
    assert_rejected(
        &format!("{}topic = \"t\"", topic("t")),
        &["dead_letter_topic", "already used for events"],
    );
    let checkpoints = "delivery = \"exactly-once\"\ncheckpoint = { topic = \"c\" }";
    assert_rejected(
        &format!("{}{checkpoints}", topic("c")),
        &["dead_letter_topic", "already used for checkpoints"],
    );
    assert_rejected(
        "dead_letter_topic = \"d\"",
        &["dead_letter_topic", "Set on_oversize or on_unroutable"],
    );
    assert_rejected(
        "on_oversize = \"drop\"",
        &["line 7", "on_oversize", "`halt` or `dead-letter`"],
    );
    assert_rejected(
        "outbox = \"messages\"\non_oversize = \"dead-letter\"",
        &["on_oversize", "anywhere else"],
    );
    assert!(
        !letters("on_malformed = \"dead-letter\"").is_enabled(),
        "rows can't be malformed"
    );
    let as_messages = letters("outbox = \"messages\"\ndead_letter_topic = \"d\"");
    assert_eq!(
        (as_messages.malformed, as_messages.unroutable),
        (Undeliverable::DeadLetter, Undeliverable::Halt)
    );
    let halts = letters("outbox = \"messages\"\non_malformed = \"halt\"");
    assert!(!halts.is_enabled());
    let as_messages = letters(&format!("outbox = \"messages\"\n{unroutable}"));
    assert_eq!(as_messages.unroutable, Undeliverable::DeadLetter);
}

#[test]
fn rejects_a_constant_topic_that_is_reserved() {
    let assert_rejected = |lines: &str, words: &[&str]| {
        let text = error(&format!("{MINIMAL}\n{lines}"));
        for word in words {
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
    };
    for (name, usage) in [
        ("walpost-checkpoints", "for checkpoints"),
        ("walpost-dead-letters", "for dead letters"),
        ("__consumer_offsets", "for Kafka's internal topics"),
    ] {
        let line = format!("topic = \"{name}\"");
        let another = "choose another topic";
        assert_rejected(&line, &["topic: topic \"", name, usage, another]);
    }
    assert_rejected(
        "topic = \"c\"\ndelivery = \"exactly-once\"\ncheckpoint = { topic = \"c\" }",
        &["topic \"c\" is reserved for checkpoints"],
    );
    let other = "\n[[pipeline]]\nname = \"b\"\npostgres = \"host=h user=u dbname=d\"\n";
    assert_rejected(
        &format!("topic = \"d\"{other}on_oversize = \"dead-letter\"\ndead_letter_topic = \"d\""),
        &["topic \"d\" is reserved for dead letters"],
    );
}

#[test]
fn rejects_topics_used_for_checkpoints_and_dead_letters() {
    let dead = "on_unroutable = \"dead-letter\"\ndead_letter_topic = ";
    for (topic, usage) in [
        ("walpost-checkpoints", "for checkpoints"),
        ("__consumer_offsets", "for Kafka's internal topics"),
    ] {
        let text = error(&format!("{MINIMAL}\n{dead}\"{topic}\""));
        assert!(
            text.contains("dead_letter_topic: topic") && text.contains(usage),
            "{text}"
        );
    }
    let exactly_once = "delivery = \"exactly-once\"\ncheckpoint = { topic = ";
    let text = error(&format!(
        "{MINIMAL}\n{exactly_once}\"walpost-dead-letters\" }}"
    ));
    assert!(text.contains("reserved for dead letters"), "{text}");
    let other = "\n[[pipeline]]\nname = \"b\"\npostgres = \"host=h user=u dbname=d\"\n";
    let both = format!("{MINIMAL}\n{dead}\"x\"\n{other}{exactly_once}\"x\" }}");
    let text = error(&both);
    assert!(
        text.contains("both pipelines use the same topic for different purposes"),
        "{text}"
    );
    // Several pipelines may share a topic if they use it for the same purpose.
    let same = format!("{MINIMAL}\n{dead}\"x\"\n{other}{dead}\"x\"");
    let loaded = load_text(
        &same,
        ConnectionArgs::default(),
        &RecordArgs::default(),
        &[],
    );
    assert_eq!(loaded.expect("loads").len(), 2);
}

#[test]
fn reserves_checkpoint_topics_of_pipelines_that_are_not_selected() {
    let other = "[[pipeline]]\nname = \"b\"\npostgres = \"host=h user=u dbname=d\"\n\
                 delivery = \"exactly-once\"\ncheckpoint = { topic = \"of-b\" }\n";
    let text = format!("{MINIMAL}\nname = \"a\"\ntopic = \"{{aggregatetype}}\"\n{other}");
    let load = |pipeline: &[&str]| {
        let connection = ConnectionArgs {
            pipeline: pipeline.iter().map(|&name| name.to_owned()).collect(),
            ..ConnectionArgs::default()
        };
        let found = load_text(&text, connection, &RecordArgs::default(), &[]);
        found.expect("loads").remove(0).outbox.reserved_topics
    };
    // Pipeline b's topic is reserved even if b is not selected, because another process may run b.
    for selected in [&[][..], &["a"]] {
        assert_eq!(load(selected).find("of-b"), Some(TopicUse::Checkpoints));
        assert_eq!(load(selected).find("of-a"), None);
    }
}

/// Returns the variant of `TopicUse` that follows this one, so that a loop can iterate over all
/// variants. If a variant is added to `TopicUse`, this function does not compile until it handles
/// that variant.
fn next_topic_use(topic_use: TopicUse) -> Option<TopicUse> {
    match topic_use {
        TopicUse::Checkpoints => Some(TopicUse::DeadLetters),
        TopicUse::DeadLetters => Some(TopicUse::KafkaInternal),
        TopicUse::KafkaInternal => None,
    }
}

#[test]
fn reserves_each_topic_that_walpost_itself_uses() {
    let text = format!(
        "{MINIMAL}\nname = \"a\"\ntopic = \"{{aggregatetype}}\"\ndelivery = \"exactly-once\"\n\
         checkpoint = {{ topic = \"checkpoints-of-a\" }}\non_unroutable = \"dead-letter\"\ndead_letter_topic = \"dead-of-a\"\n"
    );
    let settings = from_toml(&text).expect("loads").remove(0);
    let own: Vec<_> = settings.own_topics().collect();
    for topic_use in
        std::iter::successors(Some(TopicUse::Checkpoints), |&last| next_topic_use(last))
    {
        let topic = own.iter().find(|(_, found)| *found == topic_use);
        match topic_use {
            TopicUse::KafkaInternal => assert_eq!(topic, None),
            _ => {
                let (topic, _) = topic.unwrap_or_else(|| panic!("no topic for {topic_use}"));
                assert_eq!(settings.outbox.reserved_topics.find(topic), Some(topic_use));
            }
        }
    }
}

#[test]
fn flags_override_environment_variables_which_override_the_configuration_file() {
    let records = RecordArgs {
        kafka: Some("flag:1".to_owned()),
        kafka_property: vec!["linger.ms=1".to_owned()],
        topic: Some("from-flag".to_owned()),
        ..RecordArgs::default()
    };
    let env = [
        ("WALPOST_KAFKA_BOOTSTRAP_SERVERS", "env:1"),
        ("WALPOST_KAFKA_LINGER_MS", "2"),
        ("WALPOST_KAFKA_SASL_USERNAME", "me"),
    ];
    let toml = format!("{MINIMAL}\ntopic = \"from-file\"\nkey = \"from-file\"");
    let settings = load_text(&toml, ConnectionArgs::default(), &records, &env)
        .expect("loads")
        .remove(0);
    assert_eq!(settings.outbox.topic.to_string(), "from-flag");
    assert_eq!(settings.outbox.key.to_string(), "from-file");
    assert_eq!(property(&settings, "bootstrap.servers"), Some("flag:1"));
    assert_eq!(property(&settings, "linger.ms"), Some("1"));
    assert_eq!(property(&settings, "sasl.username"), Some("me"));
}

#[test]
fn error_names_the_environment_variable_that_sets_an_unknown_property() {
    let env = [("WALPOST_KAFKA_SERVICE_HOST", "10.0.0.1")];
    let error = load_text(
        MINIMAL,
        ConnectionArgs::default(),
        &RecordArgs::default(),
        &env,
    );
    let text = error.expect_err("no such property").to_string();
    assert!(text.contains("WALPOST_KAFKA_SERVICE_HOST"), "{text}");
}

#[test]
fn loads_a_single_pipeline_without_a_file() {
    let connection = ConnectionArgs {
        postgres: Some("postgresql://db/shop".to_owned()),
        pipeline: vec!["orders".to_owned()],
        ..ConnectionArgs::default()
    };
    let records = RecordArgs {
        kafka: Some("b:1".to_owned()),
        ..RecordArgs::default()
    };
    let settings = load_text("", connection, &records, &[])
        .expect("loads")
        .remove(0);
    assert_eq!(
        (settings.name.as_str(), settings.target.slot.as_str()),
        ("orders", "walpost_orders")
    );
    let error = load_text("", ConnectionArgs::default(), &records, &[]).expect_err("no database");
    assert!(error.to_string().contains("WALPOST_POSTGRES"), "{error}");
    let from_env = load_text("", ConnectionArgs::default(), &records, &[("PGHOST", "db")]);
    let loaded = from_env.expect("loads");
    let postgres = &loaded[0].postgres;
    assert_eq!((postgres.dbname(), postgres.user()), ("me", "me"));
    assert_eq!(postgres.servers(), "db:5432");
}

#[test]
fn error_for_an_unknown_key_contains_its_line_and_a_suggestion() {
    let text = error(&format!("{MINIMAL}\n    topc = \"x\""));
    for word in ["line 7", "`topc`", "did you mean `topic`?"] {
        assert!(text.contains(word), "{word:?} in {text:?}");
    }
    let text = error("[pipelin]\n");
    assert!(text.contains("did you mean `pipeline`?"), "{text}");
}

#[test]
fn rejects_unquoted_property_names_that_contain_dots() {
    for line in [
        "bootstrap.servers = \"b:9092\"",
        "ssl.ca.location = \"/ca\"",
    ] {
        let text = error(&format!("[kafka]\n{line}\n"));
        let key = line.split('.').next().expect("a key");
        for word in [
            "line 2",
            &format!("kafka.{key}"),
            "in quotes: \"bootstrap.servers\"",
        ] {
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
    }
}

#[test]
fn error_for_an_invalid_value_names_its_key() {
    let check = |line: &str, words: &[&str]| {
        let text = error(&format!("{MINIMAL}\n    {line}"));
        words
            .iter()
            .for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
    };
    check("name = \"No\"", &["name", "a-z"]);
    check("slot = \"a-b\"", &["slot", "a-b"]);
    check("table = \"a.b.c\"", &["table", "SCHEMA.TABLE"]);
    check("topic = \"{a\"", &["topic", "has no closing brace"]);
    check(
        "headers = { walpost-position = \"x\" }",
        &["headers", "walpost-position"],
    );
    check("headers = { \"a\\u0000\" = \"x\" }", &["headers"]);
    check("window_bytes = \"much\"", &["window_bytes", "16MiB"]);
    check("window_records = 0", &["window_records"]);
    check("link_timeout = \"5\"", &["link_timeout", "30s"]);
    check("link_timeout = \"5ms\"", &["link_timeout", "at least 1s"]);
    check("null_payload = \"x\"", &["line 7", "tombstone"]);
    check("null_payload = \"formatted\"", &["line 7", "tombstone"]);
    check("value_format = \"avro\"", &["line 7", "json-schema"]);
    check("topic = \"{at:rfc3339}\"", &["topic", "colons"]);
    check(
        "topic = \"outbox/{aggregatetype}\"",
        &["topic", "can't contain '/'"],
    );
    check(
        "topic = \"{aggregatetype} {{x}}\"",
        &["topic", "can't contain ' '"],
    );
    check("topic = \"a:b\"", &["topic \"a:b\"", "1 to 249"]);
    check(
        "expand_null = \"ignore\"",
        &["expand_null", "expand_payload = true"],
    );
    check(
        "value_format = \"bytes\"\nenvelope = [\"a\"]",
        &["value_format", "envelope"],
    );
    check("envelope = [\"payload\"]", &["envelope", "payload:NAME"]);
    check("envelope = [\"a:x\", \"b:x\"]", &["envelope", "b:NAME"]);
    check("envelope = [\":x\"]", &["envelope", "COLUMN:NAME"]);
    let route = |regex: &str, replacement: &str| {
        format!("route = {{ column = \"a\", regex = '{regex}', replacement = '{replacement}' }}")
    };
    check(
        &format!("topic = \"t\"\n{}", route("(.*)", "$1")),
        &["route", "topic and route"],
    );
    check(&route("(", "x"), &["route", "regex", "unclosed group"]);
    check(&route("(?=a)", "x"), &["route", "look-around"]);
    check(&route("(.*)", "x.$2"), &["route", "group \"2\""]);
    check(&route("(.*)", "$1_x"), &["route", "group \"1_x\"", "${1}"]);
    check("headers = [[\"a\"]]", &["headers"]);
    check("create_topics = { partitions = 0 }", &["create_topics"]);
    check("kafka = { acks = 1 }", &["acks", "is not allowed"]);
}

#[test]
fn keeps_the_order_of_headers_in_an_array_and_sorts_those_in_a_table() {
    let names = |line: &str| {
        let settings = from_toml(&format!("{MINIMAL}\n{line}\n"))
            .expect(line)
            .remove(0);
        let names = settings.outbox.headers.into_iter().map(|(name, _)| name);
        names.collect::<Vec<_>>()
    };
    assert_eq!(names("headers = { b = \"{x}\", a = \"{y}\" }"), ["a", "b"]);
    assert_eq!(
        names("headers = [[\"b\", \"{x}\"], [\"a\", \"{y}\"]]"),
        ["b", "a"]
    );
}

#[test]
fn accepts_a_route_instead_of_a_topic() {
    let line = "route = { column = \"kind\", regex = '(?<all>.*)', replacement = 'e.${all}.$$' }";
    let settings = from_toml(&format!("{MINIMAL}\n{line}\n"))
        .expect("loads")
        .remove(0);
    let topic = settings.outbox.topic;
    assert_eq!(topic.columns().collect::<Vec<_>>(), ["kind"]);
    assert_eq!(topic.constant(), None);
    assert_eq!(topic.to_string(), "{kind} =~ (?<all>.*) => e.${all}.$$");
}

#[test]
fn selects_pipelines_by_name_and_rejects_pipelines_that_share_a_slot() {
    let two = format!(
        "{MINIMAL}\n[[pipeline]]\nname = \"b\"\npostgres = \"postgresql://walpost@db/shop\"\n"
    );
    let names = |settings: Vec<PipelineSettings>| -> Vec<_> {
        settings.into_iter().map(|s| s.name).collect()
    };
    assert_eq!(names(from_toml(&two).expect("loads")), ["outbox", "b"]);
    let chosen = |name: &str| {
        let connection = ConnectionArgs {
            pipeline: vec![name.to_owned()],
            ..ConnectionArgs::default()
        };
        load_text(&two, connection, &RecordArgs::default(), &[])
    };
    assert_eq!(names(chosen("b").expect("loads")), ["b"]);
    let text = chosen("c").expect_err("none such").to_string();
    assert!(
        text.contains("\"c\"") && text.contains("outbox, b"),
        "{text}"
    );
    let topic = RecordArgs {
        topic: Some("t".to_owned()),
        ..RecordArgs::default()
    };
    let text = load_text(&two, ConnectionArgs::default(), &topic, &[])
        .expect_err("several")
        .to_string();
    assert!(text.contains("--pipeline"), "{text}");
    assert!(error(&two.replace("\"b\"", "\"outbox\"")).contains("same name"));
    assert!(error(&format!("{two}slot = \"walpost_outbox\"")).contains("same slot"));
}

#[test]
fn errors_and_debug_output_contain_no_password() {
    let secret = "s3cr3t";
    let file = format!(
        "[kafka]\n\"bootstrap.servers\" = \"b:1\"\n\"sasl.password\" = \"{secret}\"\n\
         [[pipeline]]\npostgres = \"postgresql://u:{secret}@db/shop\"\n"
    );
    let settings = from_toml(&file).expect("loads");
    assert!(!format!("{settings:?}").contains(secret), "{settings:?}");
    for broken in [
        format!("{file}topc = 1"),
        file.replace("postgres =", "postgre ="),
        file.replace("@db/shop\"", "@db/shop"),
        file.replace("/shop", "/shop?sslmod=x"),
        file.replace("\"sasl.password\" =", "\"sasl.pasword\" ="),
    ] {
        let text = error(&broken);
        assert!(!text.contains(secret), "{text}");
    }
}

/// Loads a pipeline with these settings, and with `--table` if `table` is given.
/// `accepts_single_table` determines whether the command accepts `--table`.
fn with_tables(
    settings: &str,
    table: Option<&str>,
    accepts_single_table: bool,
) -> Result<Outbox, String> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("walpost.toml");
    std::fs::write(&path, format!("{MINIMAL}\n{settings}")).expect("written");
    let connection = ConnectionArgs {
        config: Some(path),
        table: table.map(str::to_owned),
        ..ConnectionArgs::default()
    };
    let given = Given {
        connection: &connection,
        records: None,
        sink: GivenSink::ForDelivery(None),
        accepts_single_table,
    };
    let loaded = load(&given, &|_| None, std::iter::empty());
    let mut pipelines = loaded.map_err(|error| error.to_string())?.pipelines;
    Ok(pipelines.remove(0).target.outbox)
}

#[test]
fn rejects_the_table_flag_for_commands_that_require_all_tables() {
    const TABLES: &str = "tables = [\"tenant_*.outbox\", \"Shop\"]";
    let all = with_tables(TABLES, None, false).expect("loads");
    assert_eq!(all.to_string(), "tables tenant_*.outbox, public.shop");
    assert!(all.table().is_none() && all.is_several() && !all.is_messages());
    let one = with_tables(TABLES, Some("tenant_1.outbox"), true).expect("loads");
    assert_eq!(one.to_string(), "table tenant_1.outbox");
    assert!(one.includes("public", "shop") && !one.includes("public", "outbox"));

    let check = |settings: &str, table, accepts_single_table, words: &[&str]| {
        let error = with_tables(settings, table, accepts_single_table).expect_err(settings);
        for word in words {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    };
    check(
        TABLES,
        Some("tenant_1.outbox"),
        false,
        &["--table", "all of them"],
    );
    check(
        TABLES,
        Some("other.outbox"),
        true,
        &["other.outbox", "tenant_*.outbox"],
    );
    check("tables = []", None, false, &["tables", "pattern"]);
    for (more, words) in [
        ("table = \"a.b\"", ["table and tables", "Remove one"]),
        ("prefix = \"p\"", ["prefix", "Remove prefix"]),
        (
            "snapshot = \"never\"",
            ["snapshot", "Remove the snapshot setting"],
        ),
        ("outbox = \"messages\"", ["tables", "no table"]),
        (
            "wal_budget = { max = \"1GB\", on_max = \"drop-slot\" }",
            ["on_max", "one table"],
        ),
    ] {
        let settings = format!("{TABLES}\n{more}");
        check(&settings, None, false, &words);
    }
}

fn syntax_error(text: &str) -> (usize, String) {
    super::syntax::parse::<super::File>(text).expect_err("a syntax error")
}

#[test]
fn error_about_a_variable_reference_suggests_an_environment_variable() {
    let (line, reason) = syntax_error("[kafka]\n\"sasl.password\" = \"${KAFKA_PW}\"\n");
    assert_eq!(line, 2);
    for word in [
        "sasl.password",
        "${KAFKA_PW}",
        "set WALPOST_KAFKA_SASL_PASSWORD",
    ] {
        assert!(reason.contains(word), "{word:?} in {reason:?}");
    }
}

#[test]
fn rejects_variables_in_arrays_and_nested_tables() {
    for text in [
        "[[pipeline]]\npostgres = \"postgresql://u:${PW}@h/d\"",
        "[[pipeline]]\npassword_command = [\"cat\", \"${SECRET}\"]",
        "[[pipeline]]\n[pipeline.kafka]\n\"client.id\" = \"a-${HOSTNAME}\"",
    ] {
        let (_, reason) = syntax_error(text);
        assert!(reason.contains("are not expanded"), "{reason}");
    }
}

#[test]
fn accepts_dollar_signs_that_do_not_refer_to_variables() {
    for value in ["$1", "${", "${}", "${a b}", "$A"] {
        let text = format!("[[pipeline]]\ntopic = {value:?}\n");
        assert!(super::syntax::parse::<super::File>(&text).is_ok(), "{text}");
    }
    let route = "[[pipeline]]\nroute = { column = \"a\", regex = \"b\", replacement = \"${c}\" }";
    assert!(super::syntax::parse::<super::File>(route).is_ok());
}

#[test]
fn error_suggests_the_nearest_key_before_listing_all_keys() {
    let (_, reason) = syntax_error("[[pipeline]]\nretenton = \"7d\"");
    assert!(
        reason.starts_with(
            "unknown field `retenton`; did you mean `retention`? expected one of `name`"
        ),
        "{reason}"
    );
    let (_, reason) = syntax_error("[[pipeline]]\ndelivery = \"exactlyonce\"");
    assert!(
        reason.starts_with(
            "pipeline[0].delivery: unknown variant `exactlyonce`; did you mean `exactly-once`?"
        ),
        "{reason}"
    );
}

#[test]
fn error_describes_the_expected_format_without_naming_rust_types() {
    for (setting, expected) in [
        (
            "create_topics = 12",
            "a table like { partitions = 12, replication = 3 }",
        ),
        (
            "checkpoint = \"x\"",
            "a table like { topic = \"TOPIC\", replication = 3 }",
        ),
        (
            "wal_budget = \"10GiB\"",
            "a table like { warn = \"10GiB\", max = \"40GiB\" }",
        ),
        (
            "route = \"x\"",
            "a table like { column = \"COLUMN\", regex = \"REGEX\", replacement = \"TEXT\" }",
        ),
        ("tables = \"a.*\"", "an array in [brackets]"),
        (
            "headers = [\"id\"]",
            "an array of two strings: [\"NAME\", \"TEMPLATE\"]",
        ),
        ("delete_rows = \"yes\"", "true or false"),
    ] {
        let (_, reason) = syntax_error(&format!("[[pipeline]]\n{setting}"));
        let end = format!(", expected {expected}");
        assert!(reason.contains(&end), "{end:?} in {reason:?}");
    }
}

#[test]
fn error_suggests_double_brackets_for_arrays_of_tables() {
    let (line, reason) = syntax_error("\n[pipeline]\npostgres = \"x\"");
    assert_eq!(line, 2);
    assert!(reason.contains("write [[pipeline]]"), "{reason}");
    let (_, reason) = syntax_error("[fleet.source]\ndirectory = \"x\"");
    assert!(reason.contains("write [[fleet.source]]"), "{reason}");
}

/// A pipeline that is defined by a row reads its credentials again from the template of the source
/// that returned the row.
#[test]
fn rereads_credentials_from_the_template_that_defined_the_pipeline() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("walpost.toml");
    let source = |name: &str| {
        format!(
            "[[fleet.source]]\npostgres = \"postgresql://r@h/d\"\nquery = \"SELECT 1\"\n\
             template = {{ name = \"{name}_{{a}}\", kafka = {{ \"sasl.password\" = \"{name}\" }} }}\n"
        )
    };
    std::fs::write(&path, source("first") + &source("second")).expect("a file");
    let file = file::read(&path).expect("a valid file");
    let ids: Vec<_> = file.queries().map(query::QuerySource::id).collect();
    let values = BTreeMap::from([("a".to_owned(), Some("p".to_owned()))]);
    for (id, expected) in ids.iter().zip(["first", "second"]) {
        let name = format!("{expected}_p");
        let row = query::DefiningRows::default().set(&name, id.clone(), &values);
        let origin = file::Origin::Row {
            file: path.clone(),
            row,
            source: String::new(),
        };
        let (_, pipeline) = selection::read_again(&path, &origin, &name).expect("a pipeline");
        let kafka = pipeline.kafka.expect("Kafka properties");
        assert_eq!(kafka["sasl.password"].to_string(), expected);
    }
}

/// If the names could be the same, a row of one source could redefine a pipeline that is defined by
/// a row of the other source.
#[test]
fn rejects_two_templates_that_could_produce_the_same_pipeline_name() {
    let parse = |first: &str, second: &str| {
        let source = |query: &str, template: &str| {
            format!(
                "[[fleet.source]]\npostgres = \"postgresql://r@h/d\"\nquery = \"{query}\"\ntemplate = {{ {template} }}\n"
            )
        };
        let text = source("SELECT 1", first) + &source("SELECT 2", second);
        super::syntax::parse::<super::File>(&text).map_err(|(_, reason)| reason)
    };
    let name = |name: &str| format!("name = \"{name}\"");
    for (first, second) in [
        ("{a}", "{a}"),
        ("{a}", "b_{a}"),
        ("a_{a}", "a_{b}_{c}"),
        ("a{a}", "a_{a}"),
        ("{a}_x", "b_{a}"),
        ("{a}_x", "{a}_{b}_x"),
        ("a_{a}", "a_b"),
        ("a_b", "a_b"),
        ("{source.a}", "{a}"),
    ] {
        for (first, second) in [(first, second), (second, first)] {
            let reason = parse(&name(first), &name(second)).expect_err(first);
            for text in [
                "found two sources whose pipelines could have the same name",
                &format!("{first:?}"),
                &format!("{second:?}"),
            ] {
                assert!(reason.contains(text), "{text} in {reason}");
            }
        }
    }
    for (first, second) in [
        ("a_{a}", "b_{a}"),
        ("{a}_x", "{a}_y"),
        ("a_{a}", "ab_{a}"),
        ("a_{a}_x", "a_{a}_y"),
        ("a_{a}", "a"),
        ("a_{a}_b", "a_b"),
        ("a", "aa"),
    ] {
        for (first, second) in [(first, second), (second, first)] {
            parse(&name(first), &name(second)).expect(first);
        }
    }
    let checkpoints = "name = \"a_{a}\", checkpoint = { topic = \"own.{a}\" }";
    let dead_letters = |topic| format!("name = \"b_{{a}}\", dead_letter_topic = \"{topic}\"");
    for topic in ["own.{a}", "own_{a}.dead", "{a}.dead", "own.dead"] {
        let reason = parse(checkpoints, &dead_letters(topic)).expect_err(topic);
        assert!(
            reason
                .contains("found two sources that could use the same topic for different purposes"),
            "{reason}"
        );
        parse(&dead_letters(topic), checkpoints).expect_err(topic);
    }
    parse(checkpoints, &dead_letters("dead.{a}")).expect("two topics");
}

/// Returns a configuration file with two parts: a pipeline with the settings `pipeline`, and a
/// source whose database can't be reached. `template` is part of the source's template.
fn file_with_source(pipeline: &str, template: &str) -> String {
    format!(
        "{MINIMAL}\nname = \"b\"\n{pipeline}\n[[fleet.source]]\npostgres = \"postgresql://r@127.0.0.1:1/d\"\n\
         query = \"SELECT 1\"\n\
         template = {{ name = \"shard_{{name}}\", postgres = \"postgresql://u@h/{{name}}\", {template} }}\n"
    )
}

#[test]
fn reserves_topics_named_in_a_pipeline_template_even_if_its_query_fails() {
    let template = "delivery = \"exactly-once\", checkpoint = { topic = \"shards.cp\" }, \
                    on_unroutable = \"dead-letter\", dead_letter_topic = \"{name}.dead\"";
    let text = file_with_source("topic = \"{aggregatetype}\"", template);
    let [b] = &from_toml(&text).expect("loads")[..] else {
        panic!("expected only the pipeline that the file defines");
    };
    let find = |topic: &str| b.outbox.reserved_topics.find(topic);
    for topic in ["shards.cp", "shards_cp"] {
        assert_eq!(find(topic), Some(TopicUse::Checkpoints), "{topic}");
    }
    for topic in ["a.dead", "b_dead"] {
        assert_eq!(find(topic), Some(TopicUse::DeadLetters), "{topic}");
    }
    assert_eq!(find("shards.events"), None);
}

#[test]
fn rejects_pipelines_that_use_topics_reserved_by_a_pipeline_template() {
    let template =
        "checkpoint = { topic = \"outbox.{name}.cp\" }, dead_letter_topic = \"dead-{name}\"";
    let exactly_once = "delivery = \"exactly-once\"\ncheckpoint = { topic = \"dead-x\" }";
    let dead = "on_unroutable = \"dead-letter\"\ndead_letter_topic = \"outbox.x.cp\"";
    for (pipeline, words) in [
        ("topic = \"dead-a\"", ["topic: ", "for dead letters"]),
        (
            "topic = \"outbox_x_cp\"",
            ["topic: ", "\"outbox.{name}.cp\""],
        ),
        (
            "topic = \"dead-{aggregatetype}\"",
            ["always produces", "\"dead-{name}\""],
        ),
        (
            "topic = \"outbox.{table.name}.{aggregatetype}.cp\"",
            ["always produces", "for checkpoints"],
        ),
        (exactly_once, ["checkpoint: ", "\"dead-{name}\""]),
        (dead, ["dead_letter_topic: ", "\"outbox.{name}.cp\""]),
    ] {
        let text = error(&file_with_source(pipeline, template));
        for word in words {
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
    }
    // The pipeline in the file may use the default topics, even if they match the source's
    // template.
    let template = "checkpoint = { topic = \"walpost-{name}\" }";
    let loaded = from_toml(&file_with_source("topic = \"x-{aggregatetype}\"", template));
    assert_eq!(loaded.expect("loads").len(), 1);
}

/// Loads the file from [`file_with_source`] as if its query had returned rows with these names.
/// Returns the definition of the pipeline in the file.
fn definition_with_rows(template: &str, rows: &[&str]) -> Definition {
    let text = file_with_source("topic = \"{aggregatetype}\"", template);
    let path = std::path::Path::new("walpost.toml");
    let mut file: File = super::syntax::parse(&text).expect("a file");
    let source = file.queries().next().expect("a source").clone();
    for name in rows {
        let row = BTreeMap::from([("name".to_owned(), Some((*name).to_owned()))]);
        let filled = source.fill_template(&row).expect("filled");
        let mut pipeline = FilePipeline::from_template(filled).expect("a pipeline");
        pipeline.origin = file::Origin::Row {
            file: path.to_owned(),
            row: query::DefiningRows::default().set(name, source.id(), &row),
            source: String::new(),
        };
        file.pipeline.push(pipeline);
    }
    let given = Given {
        connection: &ConnectionArgs::default(),
        records: None,
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    let defined = load_file(Some((path, file)), &given, &|_| None, std::iter::empty());
    defined.expect("loads").remove(0).definition
}

/// A pipeline is restarted if its definition changes. A role that can add rows must not be able to
/// restart the pipelines in the file.
#[test]
fn rows_added_to_the_pipeline_registry_do_not_change_other_pipelines() {
    let template = "delivery = \"exactly-once\", checkpoint = { topic = \"{name}.cp\" }, \
                    on_unroutable = \"dead-letter\", dead_letter_topic = \"{name}.dead\"";
    let before = definition_with_rows(template, &[]);
    assert!(before == definition_with_rows(template, &["a"]));
    assert!(before == definition_with_rows(template, &["a", "b"]));
    let other_template = "on_unroutable = \"dead-letter\", dead_letter_topic = \"{name}.other\"";
    assert!(before != definition_with_rows(other_template, &[]));
}
