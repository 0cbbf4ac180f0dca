//! Events of several tables.

use super::*;
use crate::outbox::settings::Format;
use crate::pipeline::settings::Undeliverable;
use crate::postgres::table_pattern::TablePatterns;

fn several(settings: OutboxSettings) -> Scene {
    let patterns = ["tenant_*.outbox".to_owned(), "public.outbox".to_owned()];
    let outbox = Outbox::Tables(TablePatterns::new(&patterns).expect("patterns"));
    let mut scene = Scene::for_outbox(outbox.clone());
    let mut watermark = Watermark::new(
        Window {
            records: 100,
            bytes: 100_000,
        },
        Lsn::ZERO,
    );
    watermark.reconnected(Lsn(0x100));
    scene.deliveries = watermark.deliveries();
    scene.core = Core::new(outbox, settings, watermark).expect("settings fit");
    scene.done(&begin(0x200));
    scene
}

/// Returns the description of a table with these text columns, in this order.
fn described(oid: u32, schema: &str, name: &str, columns: &[&str]) -> Vec<u8> {
    let mut out = [&b"R"[..], &oid.to_be_bytes(), schema.as_bytes(), b"\0"].concat();
    out.extend([name.as_bytes(), b"\0d"].concat());
    out.extend(u16::try_from(columns.len()).expect("few").to_be_bytes());
    for column in columns {
        out.extend(
            [
                b"\0",
                column.as_bytes(),
                b"\0",
                &25_u32.to_be_bytes(),
                &[255; 4],
            ]
            .concat(),
        );
    }
    out
}

/// Returns the row counts that monitoring shows for each table.
fn reported_rows(scene: &Scene) -> Vec<(String, u64)> {
    scene.core.report_rows();
    let stats = scene.core.delivery.watermark.stats();
    stats.tables().into_iter().collect()
}

fn row(oid: u32, values: &[&str]) -> Vec<u8> {
    [&b"I"[..], &oid.to_be_bytes(), &tuple(b'N', values)].concat()
}

const COLUMNS: [&str; 4] = ["id", "aggregatetype", "aggregateid", "payload"];

#[test]
fn each_table_has_its_own_columns_and_all_share_one_count() {
    let mut scene = several(OutboxSettings {
        topic: "{table.schema}.{table.name}.{aggregatetype}"
            .parse()
            .expect("a topic"),
        ..OutboxSettings::default()
    });
    let turned = ["payload", "more", "aggregateid", "aggregatetype", "id"];
    for message in [
        described(7, "tenant_b", "outbox", &turned),
        described(3, "tenant_a", "outbox", &COLUMNS),
        described(5, "public", "outbox", &COLUMNS),
        row(3, &["1", "order", "key", "a"]),
        row(7, &["b", "more", "key", "order", "2"]),
        row(5, &["3", "order", "key", "c"]),
        row(3, &["4", "order", "key", "d"]),
        commit(0x200),
    ] {
        scene.done(&message);
    }
    assert_eq!(
        scene.accepted(),
        [
            "tenant_a.outbox.order key a 00000000/00000200:0000000000",
            "tenant_b.outbox.order key b 00000000/00000200:0000000001",
            "public.outbox.order key c 00000000/00000200:0000000002",
            "tenant_a.outbox.order key d 00000000/00000200:0000000003",
        ]
    );
    let of = |table: &str, rows| (table.to_owned(), rows);
    let each = [
        of("public.outbox", 1),
        of("tenant_a.outbox", 2),
        of("tenant_b.outbox", 1),
    ];
    assert_eq!(reported_rows(&scene), each);
    assert_eq!(reported_rows(&scene), each, "each row once");
}

#[test]
fn a_table_that_is_renamed_is_none_of_them_any_more_and_one_may_become_one() {
    let mut scene = several(OutboxSettings::default());
    scene.done(&described(3, "tenant_a", "outbox", &COLUMNS));
    scene.done(&described(4, "tenant_a", "other", &COLUMNS));
    scene.done(&row(3, &["1", "order", "key", "a"]));
    scene.done(&described(4, "tenant_c", "outbox", &COLUMNS));
    scene.done(&row(4, &["2", "order", "key", "b"]));
    scene.done(&described(3, "tenant_a", "old", &COLUMNS));
    let of = |table: &str, rows| (table.to_owned(), rows);
    assert_eq!(
        reported_rows(&scene),
        [of("tenant_a.outbox", 1), of("tenant_c.outbox", 1)]
    );
    let error = scene.send(&row(3, &["3", "order", "key", "c"]));
    let text = error.expect_err("stops").to_string();
    for word in ["tenant_a.old", "tenant_*.outbox, public.outbox"] {
        assert!(text.contains(word), "{word} in {text}");
    }
}

#[test]
fn the_one_table_of_an_outbox_that_is_renamed_stops_it() {
    let mut scene = Scene::new();
    for message in [begin(0x200), outbox(), insert("a")] {
        scene.done(&message);
    }
    scene.done(&relation("renamed", &[("id", 25)]));
    let text = scene.send(&insert("b")).expect_err("stops").to_string();
    assert!(text.contains("public.renamed"), "{text}");
}

#[test]
fn a_table_whose_columns_are_not_known_is_asked_for_where_records_depend_on_that() {
    let mut scene = several(OutboxSettings {
        value_format: Format::JsonSchema,
        ..OutboxSettings::default()
    });
    let facts = |not_null| {
        let payload = ColumnFacts {
            name: "payload".to_owned(),
            domain: None,
            type_modifier: -1,
            not_null,
            default: None,
        };
        vec![payload]
    };
    scene
        .core
        .describe_columns(HashMap::from([(3, facts(true))]));
    scene.done(&described(3, "tenant_a", "outbox", &COLUMNS));
    let late = described(4, "tenant_b", "outbox", &COLUMNS);
    assert_eq!(scene.send(&late).expect("waits"), Step::NewTable(4));
    assert_eq!(scene.send(&late).expect("waits"), Step::NewTable(4));
    scene.core.describe_table(4, facts(false));
    scene.done(&late);
    // No description is requested for a table that is not an outbox.
    scene.done(&described(5, "other", "outbox", &COLUMNS));
    scene.done(&row(3, &["1", "order", "key", "a"]));
    scene.done(&row(4, &["2", "order", "key", "b"]));
    let optional = scene.accepted();
    let optional = optional
        .iter()
        .map(|record| record.contains("\"optional\":true"));
    assert_eq!(optional.collect::<Vec<_>>(), [false, true]);

    let mut scene = several(OutboxSettings::default());
    scene.done(&described(4, "tenant_b", "outbox", &COLUMNS));
}

#[test]
fn a_dead_letter_names_the_table_of_its_row() {
    let mut scene = several(OutboxSettings::default());
    let settings = DeadLetterSettings {
        unroutable: Undeliverable::DeadLetter,
        ..DeadLetterSettings::default()
    };
    scene.core.send_dead_letters("orders", &settings);
    for (oid, schema) in [(3, "tenant_a"), (4, "tenant_b")] {
        scene.done(&described(oid, schema, "outbox", &COLUMNS));
        scene.done(&row(oid, &["1", "no topic", "key", "a"]));
        let header = format!("walpost-source-table={schema}.outbox");
        assert!(
            scene.sink.headers.contains(&header),
            "{:?}",
            scene.sink.headers
        );
    }
}

const ROW_TABLE: [&str; 7] = [
    "id",
    "publication",
    "relation",
    "table_schema",
    "table_name",
    "column_list",
    "row_values",
];

fn older(publication: &str, schema: &str, values: &str) -> Vec<u8> {
    let columns = r#"[["payload",25],["id",25],["aggregatetype",25],["aggregateid",25]]"#;
    row(
        9,
        &["1", publication, "4", schema, "outbox", columns, values],
    )
}

#[test]
fn rows_from_before_a_table_was_added_are_events_of_it() {
    let mut scene = several(OutboxSettings {
        topic: "{table.schema}.{aggregatetype}".parse().expect("a topic"),
        ..OutboxSettings::default()
    });
    scene.core.read_older_rows_of("ours");
    for message in [
        described(3, "tenant_a", "outbox", &COLUMNS),
        described(9, "walpost", "outbox_row", &ROW_TABLE),
        older("ours", "tenant_b", r#"["a\"","1","order","key"]"#),
        older("theirs", "tenant_b", r#"["b","2","order","key"]"#),
        older("ours", "tenant_b", r#"[null,"3","order","key"]"#),
        row(3, &["4", "order", "key", "d"]),
        commit(0x200),
    ] {
        scene.done(&message);
    }
    assert_eq!(
        scene.accepted(),
        [
            "tenant_b.order key a\" 00000000/00000200:0000000000",
            "tenant_b.order key - 00000000/00000200:0000000002",
            "tenant_a.order key d 00000000/00000200:0000000003",
        ]
    );
    scene.deliver_all();
    assert_eq!(scene.confirmed(), Lsn(0x210));
}

#[test]
fn older_rows_that_can_t_be_read_or_are_of_no_outbox_stop_the_stream() {
    let stops = |message: &[u8], word: &str| {
        let mut scene = several(OutboxSettings::default());
        scene.core.read_older_rows_of("ours");
        scene.done(&described(9, "walpost", "outbox_row", &ROW_TABLE));
        let text = scene.send(message).expect_err(word).to_string();
        assert!(text.contains(word), "{word} in {text}");
        assert_eq!(scene.confirmed(), Lsn(0x100));
    };
    stops(
        &older("ours", "other", r#"["a","1","order","key"]"#),
        "other.outbox",
    );
    stops(
        &older("ours", "tenant_b", r#"["a","1","order"]"#),
        "another number of values",
    );
    stops(
        &older("ours", "tenant_b", "[1]"),
        "a list of columns or values",
    );
    stops(
        &row(9, &["1", "ours", "x", "tenant_b", "outbox", "[]", "[]"]),
        "an OID that is none",
    );
    let columns = r#"[["id",25]]"#;
    stops(
        &row(
            9,
            &["1", "ours", "4", "tenant_b", "outbox", columns, r#"["1"]"#],
        ),
        "has no column",
    );

    let mut scene = several(OutboxSettings::default());
    scene.core.read_older_rows_of("ours");
    let error = scene.send(&described(9, "walpost", "outbox_row", &ROW_TABLE[..4]));
    let text = error.expect_err("a column is missing").to_string();
    assert!(
        text.contains("walpost.outbox_row") && text.contains("\"table_name\""),
        "{text}"
    );
}

#[test]
fn older_rows_wait_for_the_columns_of_their_table_where_records_depend_on_them() {
    let mut scene = several(OutboxSettings {
        value_format: Format::JsonSchema,
        ..OutboxSettings::default()
    });
    scene.core.read_older_rows_of("ours");
    scene.done(&described(9, "walpost", "outbox_row", &ROW_TABLE));
    let message = older("ours", "tenant_b", r#"["a","1","order","key"]"#);
    assert_eq!(scene.send(&message).expect("waits"), Step::NewTable(4));
    scene.core.describe_table(4, Vec::new());
    scene.done(&message);
    assert_eq!(scene.accepted().len(), 1);
}
