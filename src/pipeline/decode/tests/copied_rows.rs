//! Rows of a snapshot, which precede the stream.

use super::*;
use crate::delivery::chunks::KeyType;
use crate::outbox::columns::{Mapping, TableColumn};

impl Scene {
    /// Starts a copy that is ordered by a text and a number.
    fn copying(before: Option<CopyProgress>) -> Self {
        let columns = ["id", "aggregatetype", "aggregateid", "payload"];
        let columns = columns.map(|name| TableColumn { name, type_oid: 25 });
        let settings = OutboxSettings::default();
        let mapping = Mapping::bind(&settings, "public.outbox", &columns).expect("they fit");
        let mut scene = Self::new();
        let key = [("area", KeyType::Text), ("number", KeyType::Integer)];
        let begun = scene.core.begin_snapshot(CopyFrom {
            snapshot_lsn: Lsn(0x200),
            mapping,
            key: key.map(|(name, kind)| (name.to_owned(), kind)).to_vec(),
            before,
        });
        begun.expect("the stream resumes before it");
        scene
    }

    fn copy(&mut self, line: &str) -> Result<Step, CoreError> {
        self.core.snapshot_row(line.as_bytes(), &mut self.sink)
    }
}

/// Returns the line of a row with this ID, kind and key.
fn line(id: &str, kind: &str, key: [&str; 2]) -> String {
    [id, kind, "key", "text", key[0], key[1]].join("\t") + "\n"
}

#[test]
fn a_copy_is_resumed_behind_the_whole_key_of_its_last_row() {
    let mut scene = Scene::copying(None);
    assert_eq!(scene.core.copied(), None);
    for (id, key) in [("a", ["east", "7"]), ("b", ["west", "9"])] {
        let step = scene.copy(&line(id, "order", key));
        assert_eq!(step.expect("goes on"), Step::Done);
    }
    let of = |texts: [&str; 2]| texts.map(str::to_owned).to_vec();
    let first = Chunk {
        snapshot_lsn: Lsn(0x200),
        upto: Some(of(["west", "9"])),
    };
    let copied = CopyProgress {
        key: of(["area", "number"]),
        rows: 2,
        chunks: vec![first.clone()],
    };
    assert_eq!(scene.core.copied(), Some(copied.clone()));
    // A row that the sink does not accept does not count as copied.
    scene.sink.answers = vec![Ok(Produced::Full)];
    let step = scene.copy(&line("c", "order", ["west", "10"]));
    assert_eq!(step.expect("waits"), Step::Full);
    assert_eq!(scene.core.copied(), Some(copied.clone()));
    assert_eq!(
        scene.accepted(),
        [
            "outbox.event.order key text 00000000/000001FF:0000000000",
            "outbox.event.order key text 00000000/000001FF:0000000001",
        ]
    );

    let mut scene = Scene::copying(Some(copied.clone()));
    assert_eq!(scene.core.copied(), Some(copied.clone()));
    let step = scene.copy(&line("c", "order", ["west", "10"]));
    assert_eq!(step.expect("goes on"), Step::Done);
    assert!(scene.accepted()[0].ends_with(":0000000002"));
    scene.core.end_snapshot().expect("there was one");
    let second = Chunk {
        snapshot_lsn: Lsn(0x200),
        upto: None,
    };
    let all = CopyProgress {
        rows: 3,
        chunks: vec![first, second],
        ..copied
    };
    assert_eq!(scene.core.copied(), Some(all));
}

#[test]
fn a_row_whose_key_can_not_be_compared_stops_the_copy() {
    let mut scene = Scene::copying(None);
    let error = scene.copy(&line("a", "order", ["east", "x"]));
    let text = error.expect_err("stops").to_string();
    for word in ["public.outbox", "000001FF:0000000000", "its key is none"] {
        assert!(text.contains(word), "{word:?} in {text:?}");
    }
    assert_eq!(scene.core.copied(), None);
    assert!(scene.accepted().is_empty());
}

#[test]
fn topics_ahead_in_a_copy_are_those_of_its_next_lines() {
    let lines = [
        line("a", "order", ["east", "1"]),
        line("b", "bill", ["east", "2"]),
        line("c", "no topic", ["east", "3"]),
        line("d", "order", ["east", "4"]),
        "no line\n".to_owned(),
        line("e", "other", ["east", "5"]),
    ];
    let ahead = |scene: &Scene| {
        let lines = lines.iter().map(String::as_bytes);
        scene.core.snapshot_topics_ahead(lines)
    };
    assert!(ahead(&Scene::new()).is_empty());
    let scene = Scene::copying(None);
    assert_eq!(
        ahead(&scene),
        ["outbox.event.order", "outbox.event.bill"],
        "none behind what can't be read"
    );
    assert!(scene.accepted().is_empty());
    assert_eq!(scene.core.copied(), None, "what was looked at is not taken");
}
