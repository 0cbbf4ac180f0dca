use serde_json::json;

use super::*;
use crate::delivery::chunks::Chunk;

const SAFE_LSN: Lsn = Lsn(0x500);

fn last() -> Last {
    Last {
        commit_lsn: Lsn(0x400),
        index: 2,
        xid: 741,
        commit_time: 816_000_000_000_000,
        event_id: Some("406c07f3".to_owned()),
    }
}

fn server() -> ServerState {
    ServerState {
        system_id: "7".to_owned(),
        timeline: 1,
        history: Vec::new(),
        slot: "walpost_orders".to_owned(),
        confirmed: Lsn(0x300),
        flushed: Lsn(0x1000),
    }
}

fn checkpoint() -> Checkpoint {
    Checkpoint {
        safe_lsn: SAFE_LSN,
        delivered: Some(Delivered::UpTo(last())),
        partitions: [("t".to_owned(), 3)].into(),
        ..Checkpoint::first(4, &server())
    }
}

/// Returns the state of the server after a failover at LSN `at`.
fn promoted(at: Lsn) -> ServerState {
    ServerState {
        timeline: 2,
        history: vec![Switch { timeline: 1, at }],
        ..server()
    }
}

#[test]
fn decodes_encoded_checkpoints() {
    let mut checkpoint = checkpoint();
    assert_eq!(
        String::from_utf8_lossy(&checkpoint.encode()),
        r#"{"version":1,"epoch":4,"system_id":"7","timeline":1,"slot":"walpost_orders","safe_lsn":"0/500","delivered":{"up_to":{"commit_lsn":"0/400","index":2,"xid":741,"commit_time":816000000000000,"event_id":"406c07f3"}},"partitions":{"t":3}}"#
    );
    for delivered in [
        checkpoint.delivered.clone(),
        Some(Delivered::Before(Lsn(1))),
        None,
    ] {
        checkpoint.delivered = delivered;
        assert_eq!(
            Checkpoint::decode(&checkpoint.encode()),
            Ok(checkpoint.clone())
        );
    }
}

/// Returns the checkpoints from a file that contains values stored by an earlier version of
/// Walpost. The test `tests/integration/upgrade.rs` writes such files.
fn checkpoints_at_rest(file: &str) -> Vec<&str> {
    let checkpoint = |line| {
        #[derive(serde::Deserialize)]
        struct Line<'l> {
            kind: &'l str,
            #[serde(borrow)]
            value: &'l serde_json::value::RawValue,
        }
        let line: Line<'_> = serde_json::from_str(line).expect("a line");
        (line.kind == "checkpoint").then_some(line.value.get())
    };
    file.lines().filter_map(checkpoint).collect()
}

#[test]
fn reads_and_writes_the_checkpoints_in_the_golden_file() {
    let mut found = Vec::new();
    let mut copies = 0;
    for text in checkpoints_at_rest(include_str!("../../../tests/golden/at_rest.jsonl")) {
        let checkpoint = Checkpoint::decode(text.as_bytes()).expect(text);
        assert_eq!(String::from_utf8_lossy(&checkpoint.encode()), text);
        if let Some(copied) = &checkpoint.snapshot {
            copies += 1;
            let [chunk] = &copied.chunks[..] else {
                panic!("{:?}", copied.chunks);
            };
            let stored: serde_json::Value = serde_json::from_str(text).expect(text);
            let stored = &stored["snapshot"];
            assert_eq!(stored["rows"], copied.rows);
            assert_eq!(stored["key"], json!(copied.key));
            let stored = &stored["chunks"][0];
            assert_eq!(stored["snapshot_lsn"], chunk.snapshot_lsn.to_string());
            assert_eq!(
                stored["upto"],
                json!(chunk.upto.as_deref().expect("an unfinished copy"))
            );
        }
        found.push((checkpoint.delivered, checkpoint.snapshot));
    }
    assert_eq!(copies, 1);
    let is_found = |wanted: &dyn Fn(&Option<Delivered>, bool) -> bool| {
        assert!(
            found
                .iter()
                .any(|(delivered, copied)| wanted(delivered, copied.is_some()))
        );
    };
    is_found(&|delivered, _| delivered.is_none());
    is_found(&|delivered, copied| matches!(delivered, Some(Delivered::Before(_))) && copied);
    is_found(&|delivered, _| matches!(delivered, Some(Delivered::UpTo(_))));
}

#[test]
fn rejects_invalid_checkpoints() {
    let error = |text: &str| Checkpoint::decode(text.as_bytes()).expect_err(text);
    assert_eq!(
        error(r#"{"version": 2, "x": 1}"#),
        CheckpointError::Version(2)
    );
    for text in ["", "[]", "{}", r#"{"version": 1}"#, r#"{"version": -1}"#] {
        assert!(
            matches!(error(text), CheckpointError::Unreadable(_)),
            "{text}"
        );
    }
    let good = String::from_utf8(checkpoint().encode()).expect("text");
    error(&good.replace("0/500", "500"));
    error(&good.replace("\"epoch\"", "\"epoche\""));
}

#[test]
fn resumes_if_the_timeline_is_unchanged() {
    let resume = checkpoint().resume(&server()).expect("a valid history");
    assert_eq!(resume.epoch, 4);
    assert_eq!(resume.safe_lsn, SAFE_LSN);
    assert_eq!(resume.delivered, Some(Delivered::UpTo(last())));
    assert_eq!(resume.phantom, None);
}

#[test]
fn accepts_a_slot_behind_the_checkpoint_but_not_ahead_of_it() {
    let at = |confirmed| ServerState {
        confirmed,
        ..server()
    };
    assert!(checkpoint().resume(&at(SAFE_LSN)).is_ok());
    assert!(matches!(
        checkpoint().resume(&at(Lsn(SAFE_LSN.0 + 1))),
        Err(HistoryError::SlotAhead { .. })
    ));
}

#[test]
fn rejects_a_server_whose_wal_ends_before_the_last_position_read() {
    let resume = |checkpoint: &Checkpoint, flushed| {
        let server = ServerState {
            flushed,
            ..server()
        };
        checkpoint.resume(&server)
    };
    let ends_at = |checkpoint: &Checkpoint, reach: u64| {
        assert!(resume(checkpoint, Lsn(reach)).is_ok(), "{reach:x}");
        let error = resume(checkpoint, Lsn(reach - 1)).expect_err("restored");
        assert!(
            matches!(error, HistoryError::LogEndsBefore { .. }),
            "{error}"
        );
    };
    ends_at(&checkpoint(), SAFE_LSN.0);
    // In the middle of a large transaction, the safe LSN is lower than the last position read from
    // the stream.
    let midway = Checkpoint {
        safe_lsn: Lsn(0x350),
        ..checkpoint()
    };
    ends_at(&midway, 0x401);
    let idle = Checkpoint {
        delivered: None,
        ..checkpoint()
    };
    ends_at(&idle, SAFE_LSN.0);
    let skipped = Checkpoint {
        delivered: Some(Delivered::Before(Lsn(0x600))),
        ..checkpoint()
    };
    ends_at(&skipped, 0x600);
    // While a copy is in progress, the safe LSN is lower than the LSN of the copy's last snapshot.
    let copied = |chunks: &[u64]| CopyProgress {
        key: vec!["id".to_owned()],
        rows: 2,
        chunks: chunks
            .iter()
            .map(|snapshot_lsn| Chunk {
                snapshot_lsn: Lsn(*snapshot_lsn),
                upto: Some(vec!["1".to_owned()]),
            })
            .collect(),
    };
    let copying = Checkpoint {
        delivered: Some(Delivered::Before(SAFE_LSN)),
        snapshot: Some(copied(&[SAFE_LSN.0, 0x700])),
        ..checkpoint()
    };
    ends_at(&copying, 0x700);
    let copied_before = ServerState {
        flushed: Lsn(0x600),
        ..promoted(Lsn(0x600))
    };
    assert!(copying.resume(&copied_before).is_ok());
    // The server does not need to have the WAL that was lost in the failover.
    let after = ServerState {
        flushed: Lsn(0x380),
        ..promoted(Lsn(0x380))
    };
    assert!(checkpoint().resume(&after).is_ok());
    let restored_after = ServerState {
        flushed: Lsn(0x37f),
        ..promoted(Lsn(0x380))
    };
    assert!(checkpoint().resume(&restored_after).is_err());
}

#[test]
fn rejects_a_checkpoint_for_a_different_cluster_or_slot() {
    let other = ServerState {
        system_id: "8".to_owned(),
        ..server()
    };
    let error = checkpoint().resume(&other).expect_err("another cluster");
    assert!(matches!(error, HistoryError::OtherCluster { .. }));
    let other = ServerState {
        slot: "other".to_owned(),
        ..server()
    };
    let error = checkpoint().resume(&other).expect_err("another slot");
    assert!(matches!(error, HistoryError::OtherSlot { .. }));
}

#[test]
fn resumes_after_a_failover_that_lost_no_events() {
    let resume = checkpoint()
        .resume(&promoted(Lsn(0x600)))
        .expect("a valid history");
    assert_eq!(
        resume,
        checkpoint().resume(&server()).expect("a valid history")
    );
    // The checkpoint's safe LSN is after the timeline switch, but all published events precede the
    // switch, so the epoch does not change.
    let resume = checkpoint()
        .resume(&promoted(Lsn(0x480)))
        .expect("a valid history");
    assert_eq!((resume.epoch, resume.safe_lsn), (4, Lsn(0x480)));
    assert_eq!(resume.delivered, Some(Delivered::UpTo(last())));
}

#[test]
fn starts_a_new_epoch_after_a_failover_that_lost_published_events() {
    for at in [Lsn(0x380), Lsn(0x400)] {
        let resume = checkpoint().resume(&promoted(at)).expect("a valid history");
        assert_eq!((resume.epoch, resume.safe_lsn), (5, at));
        assert_eq!(resume.delivered, Some(Delivered::Before(at)));
        let to = last().position();
        assert_eq!(resume.phantom, Some(Phantom { from: at, to }));
    }
}

#[test]
fn resumes_identically_from_a_checkpoint_rewritten_for_the_new_timeline() {
    let copied = |snapshot_lsn| CopyProgress {
        key: vec!["id".to_owned()],
        rows: 1,
        chunks: vec![Chunk {
            snapshot_lsn,
            upto: None,
        }],
    };
    let before = Checkpoint {
        snapshot: Some(copied(SAFE_LSN)),
        ..checkpoint()
    };
    let at = Lsn(0x380);
    let standby = promoted(at);
    let resume = before.resume(&standby).expect("a valid history");
    let resumed = before.resumed(&standby, &resume);
    let expected = Checkpoint {
        epoch: 5,
        timeline: 2,
        safe_lsn: at,
        delivered: Some(Delivered::Before(at)),
        snapshot: Some(copied(at)),
        ..before
    };
    assert_eq!(resumed, expected);
    let again = resumed.resume(&standby).expect("a valid history");
    let without_phantom = Resume {
        phantom: None,
        ..resume
    };
    assert_eq!(again, without_phantom);
}

#[test]
fn keeps_the_epoch_if_the_failover_position_equals_the_processed_position() {
    let at = Lsn(0x400);
    let checkpoint = Checkpoint {
        delivered: Some(Delivered::Before(at)),
        ..checkpoint()
    };
    let resume = checkpoint.resume(&promoted(at)).expect("a valid history");
    assert_eq!((resume.epoch, resume.phantom), (4, None));
    assert_eq!(resume.delivered, checkpoint.delivered);
}

#[test]
fn rejects_a_timeline_that_does_not_descend_from_the_checkpoint() {
    for (timeline, history) in [
        (2, vec![]),
        (
            3,
            vec![Switch {
                timeline: 2,
                at: SAFE_LSN,
            }],
        ),
    ] {
        let other = ServerState {
            timeline,
            history,
            ..server()
        };
        let error = checkpoint().resume(&other).expect_err("another timeline");
        assert!(matches!(error, HistoryError::OtherTimeline { .. }));
    }
}

#[test]
fn caps_snapshot_lsns_of_copied_chunks_at_the_timeline_switch_point() {
    let chunk = |snapshot_lsn, upto: Option<&str>| Chunk {
        snapshot_lsn,
        upto: upto.map(|key| vec![key.to_owned()]),
    };
    let copied = |chunks: &[Chunk]| CopyProgress {
        key: vec!["id".to_owned()],
        rows: 7,
        chunks: chunks.to_vec(),
    };
    let checkpoint = Checkpoint {
        delivered: Some(Delivered::Before(Lsn(0x400))),
        snapshot: Some(copied(&[
            chunk(Lsn(0x400), Some("k")),
            chunk(Lsn(0x480), None),
        ])),
        ..checkpoint()
    };
    assert_eq!(
        Checkpoint::decode(&checkpoint.encode()),
        Ok(checkpoint.clone())
    );
    let same = checkpoint.resume(&server()).expect("a valid history");
    assert_eq!(
        (same.epoch, same.snapshot),
        (4, checkpoint.snapshot.clone())
    );
    let at = Lsn(0x380);
    let resume = checkpoint.resume(&promoted(at)).expect("a valid history");
    assert_eq!(
        (resume.epoch, resume.delivered),
        (5, Some(Delivered::Before(at)))
    );
    assert_eq!(
        resume.snapshot,
        Some(copied(&[chunk(at, Some("k")), chunk(at, None)]))
    );
    let later = checkpoint
        .resume(&promoted(Lsn(0x440)))
        .expect("a valid history");
    assert_eq!(
        (later.epoch, later.delivered),
        (4, checkpoint.delivered.clone())
    );
    assert_eq!(
        later.snapshot.map(|copied| copied.last_snapshot_lsn()),
        Some(Lsn(0x440))
    );
}

#[test]
fn skipping_marks_only_the_skipped_transactions_as_processed() {
    let skipped = |to: u64| {
        let found = checkpoint().skipped(Lsn(to));
        (found.safe_lsn, found.delivered)
    };
    // Skip to an LSN after all events that are in Kafka.
    assert_eq!(
        skipped(0x600),
        (Lsn(0x600), Some(Delivered::Before(Lsn(0x600))))
    );
    assert_eq!(
        skipped(0x401),
        (SAFE_LSN, Some(Delivered::Before(Lsn(0x401))))
    );
    // The events before these LSNs are already in Kafka, so `delivered` does not change.
    for to in [0x350, 0x400] {
        assert_eq!(skipped(to), (SAFE_LSN, Some(Delivered::UpTo(last()))));
    }
    let twice = checkpoint().skipped(Lsn(0x600)).skipped(Lsn(0x550));
    assert_eq!(twice, checkpoint().skipped(Lsn(0x600)));
    let further = checkpoint().skipped(Lsn(0x550)).skipped(Lsn(0x600));
    assert_eq!(further, twice);
    let slot = ServerState {
        confirmed: Lsn(0x600),
        ..server()
    };
    let resume = twice.resume(&slot).expect("a valid history");
    assert_eq!((resume.epoch, resume.safe_lsn), (4, Lsn(0x600)));
}

#[test]
fn delivers_all_new_events_after_a_failover_that_lost_skipped_events() {
    let skipped = checkpoint().skipped(Lsn(0x600));
    let resume = skipped
        .resume(&promoted(Lsn(0x450)))
        .expect("a valid history");
    assert_eq!(resume.safe_lsn, Lsn(0x450));
    assert_eq!(resume.delivered, Some(Delivered::Before(Lsn(0x450))));
    let resume = skipped
        .resume(&promoted(Lsn(0x700)))
        .expect("a valid history");
    assert_eq!(resume.delivered, Some(Delivered::Before(Lsn(0x600))));
}

#[test]
fn limits_the_number_of_recorded_topics_but_keeps_topics_in_use() {
    const BYTES: usize = 10_000;
    let mut checkpoint = Checkpoint::first(1, &server());
    let used = "used";
    checkpoint.record_partitions(used, 3, BYTES, |_| false);
    for number in 0..100_000 {
        let topic = format!("topic-{number}");
        checkpoint.record_partitions(&topic, 1, BYTES, |known| known == used);
        assert!(checkpoint.partitions.contains_key(&topic));
    }
    assert!(checkpoint.encode().len() < BYTES + 500);
    assert_eq!(
        checkpoint.record_partitions(used, 4, BYTES, |_| true),
        Some(3)
    );
    // If all topics are in use, new topics are not recorded.
    let known = checkpoint.partitions.clone();
    for number in 0..1000 {
        checkpoint.record_partitions(&format!("late-{number}"), 1, BYTES, |_| true);
    }
    assert!(checkpoint.partitions.contains_key(used));
    assert!(checkpoint.encode().len() < BYTES + 500);
    assert!(
        known
            .keys()
            .all(|topic| checkpoint.partitions.contains_key(topic))
    );
    // Lowering the size limit removes recorded topics, even topics that are in use.
    checkpoint.record_partitions(used, 4, 100, |_| true);
    assert!(checkpoint.encode().len() < 600);
}

#[test]
fn removes_only_as_many_recorded_topics_as_the_limit_requires() {
    let bytes = |topics: usize| topics * ("aa".len() + PARTITION_ENTRY_BYTES);
    let recorded = |topics: &[&str], bytes_max, in_use: bool| {
        let mut checkpoint = Checkpoint::first(1, &server());
        for topic in ["aa", "bb", "cc"] {
            checkpoint.record_partitions(topic, 1, bytes(3), |_| false);
        }
        for topic in topics {
            checkpoint.record_partitions(topic, 1, bytes_max, |_| in_use);
        }
        checkpoint.partitions.into_keys().collect::<Vec<_>>()
    };
    assert_eq!(recorded(&[], 0, false), ["aa", "bb", "cc"]);
    assert_eq!(recorded(&["dd"], bytes(3), false), ["bb", "cc", "dd"]);
    assert_eq!(recorded(&["dd"], bytes(3), true), ["aa", "bb", "cc"]);
    // Lowering the size limit removes recorded topics.
    assert_eq!(recorded(&["cc"], bytes(2), false), ["bb", "cc"]);
    assert_eq!(recorded(&["cc"], bytes(1), true), ["aa"]);
}
