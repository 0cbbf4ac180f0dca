use super::*;

fn time(text: &str) -> Timestamp {
    text.parse().expect(text)
}

fn table(name: &str) -> TableName {
    TableName {
        schema: "public".to_owned(),
        name: name.to_owned(),
    }
}

fn partition(name: &str, lower: &str, upper: &str) -> Partition {
    Partition {
        name: table(name),
        bounds: Bounds {
            lower: Some(time(lower)),
            upper: Some(time(upper)),
        },
        is_default: false,
        is_pending: false,
        mark: None,
    }
}

/// Returns facts as of noon on 2025-11-22, with the slot at 0/100.
fn facts_with(partitions: Vec<Partition>) -> RetentionFacts {
    RetentionFacts {
        now: time("2025-11-22T12:00:00Z"),
        oldest_open: None,
        partitions,
        detached: Vec::new(),
        slot: Some(("s".to_owned(), Lsn(0x100))),
    }
}

/// Returns the partitions that are created, as "name lower upper".
fn planned_names(partitions: Vec<Partition>, ahead: u32) -> Vec<String> {
    plan_missing(&table("outbox"), &facts_with(partitions), ahead)
        .into_iter()
        .map(|step| match step {
            RetentionStep::Make(name, range) => format!("{} {range}", name.name),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn partitions_are_made_as_those_that_are_there() {
    let day = partition("d", "2025-11-22T00:00:00Z", "2025-11-23T00:00:00Z");
    assert_eq!(
        planned_names(vec![day.clone()], 1),
        ["outbox_p20251123 2025-11-23T00:00:00Z to 2025-11-24T00:00:00Z"]
    );
    let hour = partition("h", "2025-11-22T11:00:00Z", "2025-11-22T12:00:00Z");
    assert_eq!(
        planned_names(vec![hour], 1),
        [
            "outbox_p2025112212 2025-11-22T12:00:00Z to 2025-11-22T13:00:00Z",
            "outbox_p2025112213 2025-11-22T13:00:00Z to 2025-11-22T14:00:00Z"
        ]
    );
    let month = partition("m", "2025-10-01T00:00:00Z", "2025-11-01T00:00:00Z");
    assert_eq!(
        planned_names(vec![month], 3)[3],
        "outbox_p202602 2026-02-01T00:00:00Z to 2026-03-01T00:00:00Z"
    );
    let local_day = partition("l", "2025-11-21T23:00:00Z", "2025-11-22T23:00:00Z");
    assert_eq!(
        planned_names(vec![local_day], 1),
        ["outbox_p2025112223 2025-11-22T23:00:00Z to 2025-11-23T23:00:00Z"]
    );
    let brief = partition("b", "2025-11-22T11:59:59.5Z", "2025-11-22T12:00:00Z");
    assert_eq!(
        planned_names(vec![brief], 0),
        ["outbox_p20251122120000_000000 2025-11-22T12:00:00Z to 2025-11-22T12:00:00.5Z"]
    );
    assert!(planned_names(Vec::new(), 3).is_empty());
}

#[test]
fn gaps_are_filled_and_existing_partitions_unchanged() {
    let old = partition("o", "2025-11-01T00:00:00Z", "2025-11-02T00:00:00Z");
    let far = partition("f", "2035-11-24T00:00:00Z", "2035-11-25T00:00:00Z");
    let next = partition("n", "2025-11-23T00:00:00Z", "2025-11-24T00:00:00Z");
    let names: Vec<_> = planned_names(vec![old, far.clone(), next], 2)
        .iter()
        .map(|made| made[..16].to_owned())
        .collect();
    assert_eq!(names, ["outbox_p20251122", "outbox_p20251124"]);
    // The only partition is in the future, created when the clock was ahead.
    assert_eq!(planned_names(vec![far], 0).len(), 1);
    let mut open = partition("x", "2025-11-22T00:00:00Z", "2025-11-23T00:00:00Z");
    open.bounds.upper = None;
    let day = partition("d", "2025-11-21T00:00:00Z", "2025-11-22T00:00:00Z");
    assert!(planned_names(vec![open, day], 5).is_empty());
}

#[test]
fn a_name_has_at_most_63_bytes() {
    let long = table(&"ä".repeat(31));
    let day = partition("d", "2025-11-22T00:00:00Z", "2025-11-23T00:00:00Z");
    for step in plan_missing(&long, &facts_with(vec![day]), 1) {
        let RetentionStep::Make(name, _) = step else {
            panic!()
        };
        assert_eq!(name.name.len(), 62);
        assert!(name.name.ends_with("ä_p20251123"), "{}", name.name);
    }
}

const RETENTION: SignedDuration = SignedDuration::from_hours(24);

/// Returns the steps and waits for a partition of 2025-11-20 with this mark.
fn steps(mark: Option<PartitionMark>) -> (Vec<RetentionStep>, Vec<RemovalWait>) {
    removals(&facts_with(vec![old(mark)]), RETENTION)
}

fn old(mark: Option<PartitionMark>) -> Partition {
    Partition {
        mark,
        ..partition("o", "2025-11-20T00:00:00Z", "2025-11-21T00:00:00Z")
    }
}

fn delivered(at: &str) -> Option<PartitionMark> {
    Some(PartitionMark::Delivered(time(at)))
}

#[test]
fn partition_is_removed_step_by_step_and_never_before_the_slot() {
    let closed = |lsn| Some(PartitionMark::Closed(Lsn(lsn)));
    assert!(matches!(steps(None).0[..], [RetentionStep::Close(_)]));
    assert!(matches!(
        steps(closed(0x100)).0[..],
        [RetentionStep::NoteDelivered(_)]
    ));
    let (done, waits) = steps(closed(0x101));
    assert!(done.is_empty());
    assert!(matches!(
        waits[..],
        [RemovalWait::Slot {
            needed: Lsn(0x101),
            ..
        }]
    ));
    let (done, waits) = steps(delivered("2025-11-21T12:00:01Z"));
    assert!(done.is_empty());
    assert!(matches!(waits[..], [RemovalWait::Age { .. }]));
    let (done, _) = steps(delivered("2025-11-21T12:00:00Z"));
    assert!(matches!(done[..], [RetentionStep::Detach(_)]));
    // The partition was attached again by hand.
    assert!(matches!(
        steps(Some(PartitionMark::Detached(Lsn(1)))).0[..],
        [RetentionStep::Close(_)]
    ));
}

#[test]
fn detached_partition_is_dropped_once_the_slot_has_passed_it() {
    let of = |mark| {
        let mut found = facts_with(Vec::new());
        found.detached.push(Detached {
            oid: 1,
            name: table("o"),
            mark,
            comment_end: String::new(),
        });
        removals(&found, RETENTION)
    };
    assert!(matches!(
        of(Some(PartitionMark::Detached(Lsn(0x100)))).0[..],
        [RetentionStep::Drop(_)]
    ));
    let (done, waits) = of(Some(PartitionMark::Detached(Lsn(0x101))));
    assert!(done.is_empty() && waits.len() == 1);
    assert!(matches!(
        of(delivered("2025-11-21T00:00:00Z")).0[..],
        [RetentionStep::NoteDetached(_)]
    ));
    assert!(of(None).0.is_empty());
}

#[test]
fn without_a_slot_nothing_is_removed() {
    let mut found = facts_with(vec![old(None), old(delivered("2025-11-01T00:00:00Z"))]);
    found.slot = None;
    assert_eq!(removals(&found, RETENTION), (Vec::new(), Vec::new()));
}

#[test]
fn clock_set_back_restarts_the_retention() {
    let (done, _) = steps(delivered("2035-01-01T00:00:00Z"));
    assert!(matches!(done[..], [RetentionStep::NoteDelivered(_)]));
}

#[test]
fn what_is_not_over_and_the_default_partition_stay() {
    let today = partition("d", "2025-11-22T00:00:00Z", "2025-11-23T00:00:00Z");
    let mut open = old(None);
    open.bounds.upper = None;
    let default = Partition {
        is_default: true,
        ..open.clone()
    };
    assert!(
        removals(&facts_with(vec![today, open, default]), RETENTION)
            .0
            .is_empty()
    );
}

#[test]
fn a_transaction_that_began_in_its_time_holds_a_partition() {
    let of = |began: &str| {
        let mut found = facts_with(vec![old(delivered("2025-11-21T00:00:00Z"))]);
        found.oldest_open = Some((time(began), 7));
        removals(&found, RETENTION)
    };
    let (done, waits) = of("2025-11-20T23:59:59Z");
    assert!(done.is_empty());
    assert!(matches!(
        waits[..],
        [RemovalWait::Transaction { pid: 7, .. }]
    ));
    assert!(matches!(
        of("2025-11-21T00:00:00Z").0[..],
        [RetentionStep::Detach(_)]
    ));
}

#[test]
fn a_detaching_that_was_interrupted_is_ended_if_it_was_ours() {
    let of = |mark| {
        let pending = Partition {
            is_pending: true,
            ..old(mark)
        };
        removals(&facts_with(vec![pending]), RETENTION)
    };
    assert!(matches!(
        of(delivered("2025-11-21T00:00:00Z")).0[..],
        [RetentionStep::Finalize(_)]
    ));
    let (done, waits) = of(None);
    assert!(done.is_empty());
    assert!(matches!(waits[..], [RemovalWait::Pending { .. }]));
}
