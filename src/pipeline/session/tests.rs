use std::sync::Arc;

use super::memory::Memory;
use crate::delivery::watermark::Watermark;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::pipeline::error::PipelineError;
use crate::pipeline::recovery;
use crate::pipeline::sim;
use crate::pipeline::wal_budget::slot_monitor::Watched;
use crate::postgres::catalog::slot_state::SlotOf;
use crate::postgres::replication::Identity;

const WINDOW: Window = Window {
    records: 10,
    bytes: 1000,
};
const CONFIRMED: Lsn = Lsn(0x200);
const BEYOND: Lsn = Lsn(0x201);

/// The memory of a pipeline that has confirmed something on one cluster, and its target.
fn memory() -> (Memory, SlotOf) {
    let settings = sim::settings(false, false, &mut fastrand::Rng::with_seed(1));
    let watched = Watched::new(&settings, &Arc::default());
    let mut memory = Memory::new(WINDOW, watched);
    memory.system_id = Some("one".to_owned());
    memory.timeline = 1;
    memory.confirmed = Some(Watermark::new(WINDOW, CONFIRMED).confirmed());
    let of = SlotOf {
        pipeline: settings.name,
        target: settings.target,
        system_id: "one".to_owned(),
        timeline: 1,
    };
    (memory, of)
}

fn identity(system_id: &str, timeline: u32) -> Identity {
    Identity {
        system_id: system_id.to_owned(),
        timeline,
        flushed: BEYOND,
    }
}

#[test]
fn another_cluster_is_not_gone_on_with() {
    let (mut memory, _) = memory();
    for timeline in [1, 2] {
        assert!(memory.check_cluster(&identity("one", timeline)).is_ok());
        let error = memory
            .check_cluster(&identity("other", timeline))
            .expect_err("another cluster");
        let PipelineError::OtherCluster { found, expected } = &error else {
            panic!("{error}");
        };
        assert_eq!((found.as_str(), expected.as_str()), ("other", "one"));
        assert_eq!(recovery::remedy(&error), recovery::Remedy::Halt);
    }
    memory.system_id = None;
    assert!(memory.check_cluster(&identity("any", 1)).is_ok());
}

#[test]
fn slot_beyond_what_was_confirmed_was_moved_by_someone() {
    let (mut memory, of) = memory();
    for found in [Lsn::ZERO, CONFIRMED] {
        assert!(memory.check_slot(&of, None, found).is_ok(), "{found}");
    }
    let moved = memory.check_slot(&of, None, BEYOND);
    assert!(matches!(moved, Err(PipelineError::SlotMoved { .. })));
    memory.confirmed = None;
    assert!(memory.check_slot(&of, None, BEYOND).is_ok());
}

/// Otherwise nobody would ever notice again that the slot was moved, once a standby has waited.
#[test]
fn another_owner_of_the_slot_explains_its_place_once() {
    let (mut memory, of) = memory();
    memory.note_another_owner();
    assert!(memory.check_slot(&of, None, BEYOND).is_ok());
    let moved = memory.check_slot(&of, None, BEYOND);
    assert!(matches!(moved, Err(PipelineError::SlotMoved { .. })));
}

/// Who stands by has no memory of its own, and whoever has had the slot has written down how far it is.
#[test]
fn what_is_written_down_counts_whoever_had_the_slot() {
    let (mut memory, of) = memory();
    memory.confirmed = None;
    memory.note_another_owner();
    assert!(memory.check_slot(&of, Some(BEYOND), BEYOND).is_ok());
    memory.note_another_owner();
    let moved = memory.check_slot(&of, Some(CONFIRMED), BEYOND);
    let Err(PipelineError::SlotMoved { then, .. }) = moved else {
        panic!("{moved:?}");
    };
    assert!(then.contains("walpost skip --pipeline"), "{then}");
}
