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

/// Returns the data for planning the maintenance of a table at noon on 2025-11-22, with the slot at
/// 0/100.
fn facts_with(partitions: Vec<Partition>) -> RetentionFacts {
    RetentionFacts {
        now: time("2025-11-22T12:00:00Z"),
        oldest_open: None,
        partitions,
        detached: Vec::new(),
        slot: Some(("s".to_owned(), Lsn(0x100))),
    }
}

/// Returns the planned partitions in the form "name lower to upper".
fn planned_names(partitions: Vec<Partition>, ahead: u32) -> Vec<String> {
    plan_missing(&table("outbox"), &facts_with(partitions), ahead)
        .into_iter()
        .map(|step| match step {
            RetentionStep::Create(name, range) => format!("{} {range}", name.name),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn creates_partitions_with_the_width_of_existing_partitions() {
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
fn fills_gaps_between_partitions_without_changing_existing_partitions() {
    let old = partition("o", "2025-11-01T00:00:00Z", "2025-11-02T00:00:00Z");
    let far = partition("f", "2035-11-24T00:00:00Z", "2035-11-25T00:00:00Z");
    let next = partition("n", "2025-11-23T00:00:00Z", "2025-11-24T00:00:00Z");
    let names: Vec<_> = planned_names(vec![old, far.clone(), next], 2)
        .iter()
        .map(|made| made[..16].to_owned())
        .collect();
    assert_eq!(names, ["outbox_p20251122", "outbox_p20251124"]);
    // The only partition is for a future time, because it was created while the clock was ahead.
    assert_eq!(planned_names(vec![far], 0).len(), 1);
    let mut open = partition("x", "2025-11-22T00:00:00Z", "2025-11-23T00:00:00Z");
    open.bounds.upper = None;
    let day = partition("d", "2025-11-21T00:00:00Z", "2025-11-22T00:00:00Z");
    assert!(planned_names(vec![open, day], 5).is_empty());
}

#[test]
fn limits_partition_names_to_63_bytes() {
    let long = table(&"ä".repeat(31));
    let day = partition("d", "2025-11-22T00:00:00Z", "2025-11-23T00:00:00Z");
    for step in plan_missing(&long, &facts_with(vec![day]), 1) {
        let RetentionStep::Create(name, _) = step else {
            panic!()
        };
        assert_eq!(name.name.len(), 62);
        assert!(name.name.ends_with("ä_p20251123"), "{}", name.name);
    }
}

const RETENTION: SignedDuration = SignedDuration::from_hours(24);

/// Returns the planned steps, and the reasons to wait, for a partition that covers 2025-11-20 and
/// whose comment records this removal progress.
fn steps(mark: Option<PartitionMark>) -> (Vec<RetentionStep>, Vec<RemovalWait>) {
    plan_removals(&facts_with(vec![old(mark)]), RETENTION)
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
fn removes_a_partition_in_steps_after_the_slot_has_passed_it() {
    let closed = |lsn| Some(PartitionMark::Closed(Lsn(lsn)));
    assert!(matches!(steps(None).0[..], [RetentionStep::MarkClosed(_)]));
    assert!(matches!(
        steps(closed(0x100)).0[..],
        [RetentionStep::MarkDelivered(_)]
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
    // If a partition was detached and then attached again, its removal starts over.
    assert!(matches!(
        steps(Some(PartitionMark::Detached(Lsn(1)))).0[..],
        [RetentionStep::MarkClosed(_)]
    ));
}

#[test]
fn drops_a_detached_partition_after_the_slot_has_passed_its_detach_position() {
    let plan_with = |mark| {
        let mut found = facts_with(Vec::new());
        found.detached.push(Detached {
            oid: 1,
            name: table("o"),
            mark,
            comment_end: String::new(),
        });
        plan_removals(&found, RETENTION)
    };
    assert!(matches!(
        plan_with(Some(PartitionMark::Detached(Lsn(0x100)))).0[..],
        [RetentionStep::Drop(_)]
    ));
    let (done, waits) = plan_with(Some(PartitionMark::Detached(Lsn(0x101))));
    assert!(done.is_empty() && waits.len() == 1);
    assert!(matches!(
        plan_with(delivered("2025-11-21T00:00:00Z")).0[..],
        [RetentionStep::MarkDetached(_)]
    ));
    assert!(plan_with(None).0.is_empty());
}

#[test]
fn removes_nothing_without_a_slot() {
    let mut found = facts_with(vec![old(None), old(delivered("2025-11-01T00:00:00Z"))]);
    found.slot = None;
    assert_eq!(plan_removals(&found, RETENTION), (Vec::new(), Vec::new()));
}

#[test]
fn restarts_the_retention_period_if_the_clock_is_set_back() {
    let (done, _) = steps(delivered("2035-01-01T00:00:00Z"));
    assert!(matches!(done[..], [RetentionStep::MarkDelivered(_)]));
}

#[test]
fn keeps_current_partitions_and_the_default_partition() {
    let today = partition("d", "2025-11-22T00:00:00Z", "2025-11-23T00:00:00Z");
    let mut open = old(None);
    open.bounds.upper = None;
    let default = Partition {
        is_default: true,
        ..open.clone()
    };
    assert!(
        plan_removals(&facts_with(vec![today, open, default]), RETENTION)
            .0
            .is_empty()
    );
}

#[test]
fn keeps_a_partition_while_a_transaction_from_its_time_range_is_open() {
    let plan_with = |began: &str| {
        let mut found = facts_with(vec![old(delivered("2025-11-21T00:00:00Z"))]);
        found.oldest_open = Some((time(began), 7));
        plan_removals(&found, RETENTION)
    };
    let (done, waits) = plan_with("2025-11-20T23:59:59Z");
    assert!(done.is_empty());
    assert!(matches!(
        waits[..],
        [RemovalWait::Transaction { pid: 7, .. }]
    ));
    assert!(matches!(
        plan_with("2025-11-21T00:00:00Z").0[..],
        [RetentionStep::Detach(_)]
    ));
}

#[test]
fn finishes_an_interrupted_detach_only_if_walpost_started_it() {
    let plan_with = |mark| {
        let pending = Partition {
            is_pending: true,
            ..old(mark)
        };
        plan_removals(&facts_with(vec![pending]), RETENTION)
    };
    assert!(matches!(
        plan_with(delivered("2025-11-21T00:00:00Z")).0[..],
        [RetentionStep::Finalize(_)]
    ));
    let (done, waits) = plan_with(None);
    assert!(done.is_empty());
    assert!(matches!(waits[..], [RemovalWait::Pending { .. }]));
}
