//! Tests for the rows of a snapshot, which are read before the stream.

use super::*;
use crate::delivery::chunks::KeyType;
use crate::outbox::columns::{Mapping, TableColumn};

impl Fixture {
    /// Starts a copy whose rows are ordered by a text column and then a numeric column.
    fn copying(before: Option<CopyProgress>) -> Self {
        let columns = ["id", "aggregatetype", "aggregateid", "payload"];
        let columns = columns.map(|name| TableColumn { name, type_oid: 25 });
        let settings = OutboxSettings::default();
        let mapping = Mapping::bind(&settings, "public.outbox", &columns).expect("they fit");
        let mut fixture = Self::new();
        let key = [("area", KeyType::Text), ("number", KeyType::Integer)];
        let started = fixture.core.begin_snapshot(CopyFrom {
            snapshot_lsn: Lsn(0x200),
            mapping,
            key: key.map(|(name, kind)| (name.to_owned(), kind)).to_vec(),
            before,
        });
        started.expect("the snapshot is after the resume position");
        fixture
    }

    fn copy(&mut self, line: &str) -> Result<Step, CoreError> {
        self.core.snapshot_row(line.as_bytes(), &mut self.sink)
    }
}

/// Returns the line of `COPY` output for a row with this ID, aggregate type and key.
fn line(id: &str, kind: &str, key: [&str; 2]) -> String {
    [id, kind, "key", "text", key[0], key[1]].join("\t") + "\n"
}

#[test]
fn resumes_a_copy_after_the_last_accepted_row() {
    let mut fixture = Fixture::copying(None);
    assert_eq!(fixture.core.copied(), None);
    for (id, key) in [("a", ["east", "7"]), ("b", ["west", "9"])] {
        let step = fixture.copy(&line(id, "order", key));
        assert_eq!(step.expect("success"), Step::Done);
    }
    let texts = |texts: [&str; 2]| texts.map(str::to_owned).to_vec();
    let first = Chunk {
        snapshot_lsn: Lsn(0x200),
        upto: Some(texts(["west", "9"])),
    };
    let copied = CopyProgress {
        key: texts(["area", "number"]),
        rows: 2,
        chunks: vec![first.clone()],
    };
    assert_eq!(fixture.core.copied(), Some(copied.clone()));
    // A row counts as copied only once the sink has accepted it.
    fixture.sink.results = vec![Ok(Produced::Full)];
    let step = fixture.copy(&line("c", "order", ["west", "10"]));
    assert_eq!(step.expect("success"), Step::Full);
    assert_eq!(fixture.core.copied(), Some(copied.clone()));
    assert_eq!(
        fixture.accepted(),
        [
            "outbox.event.order key text 00000000/000001FF:0000000000",
            "outbox.event.order key text 00000000/000001FF:0000000001",
        ]
    );

    let mut fixture = Fixture::copying(Some(copied.clone()));
    assert_eq!(fixture.core.copied(), Some(copied.clone()));
    let step = fixture.copy(&line("c", "order", ["west", "10"]));
    assert_eq!(step.expect("success"), Step::Done);
    assert!(fixture.accepted()[0].ends_with(":0000000002"));
    fixture.core.end_snapshot().expect("a snapshot");
    let second = Chunk {
        snapshot_lsn: Lsn(0x200),
        upto: None,
    };
    let all = CopyProgress {
        rows: 3,
        chunks: vec![first, second],
        ..copied
    };
    assert_eq!(fixture.core.copied(), Some(all));
}

#[test]
fn stops_the_copy_at_a_row_whose_key_cannot_be_compared() {
    let mut fixture = Fixture::copying(None);
    let error = fixture.copy(&line("a", "order", ["east", "x"]));
    let text = error.expect_err("an error").to_string();
    for word in [
        "public.outbox",
        "000001FF:0000000000",
        "the row's key can't be compared",
    ] {
        assert!(text.contains(word), "{word:?} in {text:?}");
    }
    assert_eq!(fixture.core.copied(), None);
    assert!(fixture.accepted().is_empty());
}

#[test]
fn lists_the_topics_of_the_rows_to_be_copied_next() {
    let lines = [
        line("a", "order", ["east", "1"]),
        line("b", "bill", ["east", "2"]),
        line("c", "no topic", ["east", "3"]),
        line("d", "order", ["east", "4"]),
        "no line\n".to_owned(),
        line("e", "other", ["east", "5"]),
    ];
    let ahead = |fixture: &Fixture| {
        let lines = lines.iter().map(String::as_bytes);
        fixture.core.snapshot_topics_ahead(lines)
    };
    assert!(ahead(&Fixture::new()).is_empty());
    let fixture = Fixture::copying(None);
    assert_eq!(
        ahead(&fixture),
        ["outbox.event.order", "outbox.event.bill"],
        "topics of rows after an invalid line must not be listed"
    );
    assert!(fixture.accepted().is_empty());
    assert_eq!(
        fixture.core.copied(),
        None,
        "listing topics must not change the progress of the copy"
    );
}
