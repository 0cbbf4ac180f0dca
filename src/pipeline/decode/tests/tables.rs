//! Tests for outboxes with several tables.

use super::*;
use crate::model::commands::Commands;
use crate::outbox::settings::Format;
use crate::pipeline::settings::Undeliverable;
use crate::postgres::catalog::table_state::AcceptedNames;
use crate::postgres::table_pattern::TablePatterns;

fn several(settings: OutboxSettings) -> Fixture {
    let patterns = ["tenant_*.outbox".to_owned(), "public.outbox".to_owned()];
    let outbox = Outbox::Tables(TablePatterns::new(&patterns).expect("patterns"));
    let mut fixture = Fixture::for_outbox(outbox.clone());
    let mut watermark = Watermark::new(
        Window {
            records: 100,
            bytes: 100_000,
        },
        Lsn::ZERO,
    );
    watermark.reconnected(Lsn(0x100));
    fixture.deliveries = watermark.deliveries();
    fixture.core = Core::new(outbox, settings, watermark).expect("settings fit");
    fixture.process(&begin(0x200));
    fixture
}

/// Processes a relation message for a table whose description has not been loaded, and then again
/// after an empty description was loaded.
fn process_new_table(fixture: &mut Fixture, oid: u32, schema: &str, name: &str) {
    let relation = described(oid, schema, name, &COLUMNS);
    let step = fixture.send(&relation).expect("success");
    assert_eq!(step, Step::NewTable(oid));
    fixture.core.describe_table(oid, Vec::new(), Vec::new());
    fixture.process(&relation);
}

/// Returns a relation message for a table with these text columns, in this order.
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

/// Returns the number of rows reported to monitoring for each table.
fn reported_rows(fixture: &Fixture) -> Vec<(String, u64)> {
    fixture.core.report_rows();
    let stats = fixture.core.delivery.watermark.stats();
    stats.tables().into_iter().collect()
}

fn row(oid: u32, values: &[&str]) -> Vec<u8> {
    [&b"I"[..], &oid.to_be_bytes(), &tuple(b'N', values)].concat()
}

const COLUMNS: [&str; 4] = ["id", "aggregatetype", "aggregateid", "payload"];

#[test]
fn maps_each_table_by_its_own_columns_and_assigns_row_numbers_across_tables() {
    let mut fixture = several(OutboxSettings {
        topic: "{table.schema}.{table.name}.{aggregatetype}"
            .parse()
            .expect("a topic"),
        ..OutboxSettings::default()
    });
    for oid in [3, 5, 7] {
        fixture.core.describe_table(oid, Vec::new(), Vec::new());
    }
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
        fixture.process(&message);
    }
    assert_eq!(
        fixture.accepted(),
        [
            "tenant_a.outbox.order key a 00000000/00000200:0000000000",
            "tenant_b.outbox.order key b 00000000/00000200:0000000001",
            "public.outbox.order key c 00000000/00000200:0000000002",
            "tenant_a.outbox.order key d 00000000/00000200:0000000003",
        ]
    );
    let count = |table: &str, rows| (table.to_owned(), rows);
    let each = [
        count("public.outbox", 1),
        count("tenant_a.outbox", 2),
        count("tenant_b.outbox", 1),
    ];
    assert_eq!(reported_rows(&fixture), each);
    assert_eq!(reported_rows(&fixture), each, "each row is counted once");
}

#[test]
fn delivers_rows_only_while_the_table_name_matches_a_configured_pattern() {
    let mut fixture = several(OutboxSettings::default());
    process_new_table(&mut fixture, 3, "tenant_a", "outbox");
    fixture.process(&described(4, "tenant_a", "other", &COLUMNS));
    fixture.process(&row(3, &["1", "order", "key", "a"]));
    process_new_table(&mut fixture, 4, "tenant_c", "outbox");
    fixture.process(&row(4, &["2", "order", "key", "b"]));
    fixture.process(&described(3, "tenant_a", "old", &COLUMNS));
    let count = |table: &str, rows| (table.to_owned(), rows);
    assert_eq!(
        reported_rows(&fixture),
        [count("tenant_a.outbox", 1), count("tenant_c.outbox", 1)]
    );
    let error = fixture.send(&row(3, &["3", "order", "key", "c"]));
    let text = error.expect_err("an error").to_string();
    for word in ["tenant_a.old", "tenant_*.outbox, public.outbox"] {
        assert!(text.contains(word), "{word} in {text}");
    }
}

#[test]
fn rejects_rows_after_the_only_outbox_table_was_renamed() {
    let mut fixture = Fixture::new();
    for message in [begin(0x200), outbox(), insert("a")] {
        fixture.process(&message);
    }
    fixture.process(&relation("renamed", &[("id", 25)]));
    let text = fixture
        .send(&insert("b"))
        .expect_err("an error")
        .to_string();
    assert!(text.contains("public.renamed"), "{text}");
}

#[test]
fn requests_column_details_of_a_table_if_the_record_format_requires_them() {
    let mut fixture = several(OutboxSettings {
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
    fixture
        .core
        .describe_columns(HashMap::from([(3, facts(true))]));
    fixture.core.accept_names(
        vec![AcceptedNames {
            oid: 3,
            names: Vec::new(),
            unchecked_before: Lsn::ZERO,
        }],
        &Commands::default(),
    );
    fixture.process(&described(3, "tenant_a", "outbox", &COLUMNS));
    let late = described(4, "tenant_b", "outbox", &COLUMNS);
    assert_eq!(fixture.send(&late).expect("success"), Step::NewTable(4));
    assert_eq!(fixture.send(&late).expect("success"), Step::NewTable(4));
    fixture.core.describe_table(4, facts(false), Vec::new());
    fixture.process(&late);
    // The catalog's description is not needed for a table that is not an outbox.
    fixture.process(&described(5, "other", "outbox", &COLUMNS));
    fixture.process(&row(3, &["1", "order", "key", "a"]));
    fixture.process(&row(4, &["2", "order", "key", "b"]));
    let optional = fixture.accepted();
    let optional = optional
        .iter()
        .map(|record| record.contains("\"optional\":true"));
    assert_eq!(optional.collect::<Vec<_>>(), [false, true]);
}

#[test]
fn adds_the_table_name_to_dead_letters() {
    let mut fixture = several(OutboxSettings::default());
    let settings = DeadLetterSettings {
        unroutable: Undeliverable::DeadLetter,
        ..DeadLetterSettings::default()
    };
    fixture.core.send_dead_letters("orders", &settings);
    for (oid, schema) in [(3, "tenant_a"), (4, "tenant_b")] {
        process_new_table(&mut fixture, oid, schema, "outbox");
        fixture.process(&row(oid, &["1", "no topic", "key", "a"]));
        let header = format!("walpost-source-table={schema}.outbox");
        assert!(
            fixture.sink.headers.contains(&header),
            "{:?}",
            fixture.sink.headers
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
fn delivers_rows_that_a_table_contained_when_it_was_added() {
    let mut fixture = several(OutboxSettings {
        topic: "{table.schema}.{aggregatetype}".parse().expect("a topic"),
        ..OutboxSettings::default()
    });
    fixture.core.describe_table(3, Vec::new(), Vec::new());
    fixture.core.read_older_rows_of("ours");
    for message in [
        described(3, "tenant_a", "outbox", &COLUMNS),
        described(9, "walpost", "outbox_row", &ROW_TABLE),
        older("ours", "tenant_b", r#"["a\"","1","order","key"]"#),
        older("theirs", "tenant_b", r#"["b","2","order","key"]"#),
        older("ours", "tenant_b", r#"[null,"3","order","key"]"#),
        row(3, &["4", "order", "key", "d"]),
        commit(0x200),
    ] {
        fixture.process(&message);
    }
    assert_eq!(
        fixture.accepted(),
        [
            "tenant_b.order key a\" 00000000/00000200:0000000000",
            "tenant_b.order key - 00000000/00000200:0000000002",
            "tenant_a.order key d 00000000/00000200:0000000003",
        ]
    );
    fixture.deliver_all();
    assert_eq!(fixture.confirmed(), Lsn(0x210));
}

#[test]
fn rejects_invalid_existing_rows_of_an_added_table_and_rows_of_other_tables() {
    let stops = |message: &[u8], word: &str| {
        let mut fixture = several(OutboxSettings::default());
        fixture.core.read_older_rows_of("ours");
        fixture.process(&described(9, "walpost", "outbox_row", &ROW_TABLE));
        let text = fixture.send(message).expect_err(word).to_string();
        assert!(text.contains(word), "{word} in {text}");
        assert_eq!(fixture.confirmed(), Lsn(0x100));
    };
    stops(
        &older("ours", "other", r#"["a","1","order","key"]"#),
        "other.outbox",
    );
    stops(
        &older("ours", "tenant_b", r#"["a","1","order"]"#),
        "number of values differs",
    );
    stops(
        &older("ours", "tenant_b", "[1]"),
        "invalid columns or values",
    );
    stops(
        &row(9, &["1", "ours", "x", "tenant_b", "outbox", "[]", "[]"]),
        "an invalid OID",
    );
    let columns = r#"[["id",25]]"#;
    stops(
        &row(
            9,
            &["1", "ours", "4", "tenant_b", "outbox", columns, r#"["1"]"#],
        ),
        "has no column",
    );

    let mut fixture = several(OutboxSettings::default());
    fixture.core.read_older_rows_of("ours");
    let error = fixture.send(&described(9, "walpost", "outbox_row", &ROW_TABLE[..4]));
    let text = error.expect_err("a column is missing").to_string();
    assert!(
        text.contains("walpost.outbox_row") && text.contains("\"table_name\""),
        "{text}"
    );
}

#[test]
fn requests_column_details_for_rows_that_a_table_contained_when_it_was_added() {
    let mut fixture = several(OutboxSettings {
        value_format: Format::JsonSchema,
        ..OutboxSettings::default()
    });
    fixture.core.read_older_rows_of("ours");
    fixture.process(&described(9, "walpost", "outbox_row", &ROW_TABLE));
    let message = older("ours", "tenant_b", r#"["a","1","order","key"]"#);
    assert_eq!(fixture.send(&message).expect("success"), Step::NewTable(4));
    fixture.core.describe_table(4, Vec::new(), Vec::new());
    fixture.process(&message);
    assert_eq!(fixture.accepted().len(), 1);
}
