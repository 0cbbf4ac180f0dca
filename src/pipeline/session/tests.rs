use std::sync::Arc;

use super::error::SlotError;
use super::state::SessionState;
use crate::delivery::watermark::Watermark;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
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

/// Returns the state of a pipeline that has confirmed a position on one cluster, and the identity
/// of its slot.
fn session_state() -> (SessionState, SlotOf) {
    let settings = sim::settings(false, false, &mut fastrand::Rng::with_seed(1));
    let watched = Watched::new(&settings, &Arc::default());
    let mut session_state = SessionState::new(WINDOW, watched);
    session_state.system_id = Some("one".to_owned());
    session_state.timeline = 1;
    session_state.confirmed = Some(Watermark::new(WINDOW, CONFIRMED).confirmed());
    let of = SlotOf {
        pipeline: settings.name,
        target: settings.target,
        system_id: "one".to_owned(),
        timeline: 1,
    };
    (session_state, of)
}

fn identity(system_id: &str, timeline: u32) -> Identity {
    Identity {
        system_id: system_id.to_owned(),
        timeline,
        flushed: BEYOND,
    }
}

#[test]
fn another_cluster_is_refused() {
    let (mut session_state, _) = session_state();
    for timeline in [1, 2] {
        assert!(
            session_state
                .check_cluster(&identity("one", timeline))
                .is_ok()
        );
        let error = session_state
            .check_cluster(&identity("other", timeline))
            .expect_err("another cluster");
        let SlotError::OtherCluster { found, expected } = &error else {
            panic!("{error}");
        };
        assert_eq!((found.as_str(), expected.as_str()), ("other", "one"));
        assert_eq!(recovery::remedy(&error.into()), recovery::Remedy::Halt);
    }
    session_state.system_id = None;
    assert!(session_state.check_cluster(&identity("any", 1)).is_ok());
}

#[test]
fn slot_beyond_what_was_confirmed_was_moved_by_someone() {
    let (mut session_state, of) = session_state();
    for found in [Lsn::ZERO, CONFIRMED] {
        assert!(
            session_state.check_slot(&of, None, found).is_ok(),
            "{found}"
        );
    }
    let moved = session_state.check_slot(&of, None, BEYOND);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
    session_state.confirmed = None;
    assert!(session_state.check_slot(&of, None, BEYOND).is_ok());
}

/// Otherwise, once an instance has been a standby, it would never again detect that the slot was
/// moved.
#[test]
fn another_owner_of_the_slot_explains_its_place_once() {
    let (mut session_state, of) = session_state();
    session_state.record_other_owner();
    assert!(session_state.check_slot(&of, None, BEYOND).is_ok());
    let moved = session_state.check_slot(&of, None, BEYOND);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
}

/// The role may have lacked the privilege to write the row.
#[test]
fn slot_confirmed_without_a_record_was_not_moved() {
    let (mut session_state, of) = session_state();
    let before = Some(Lsn(CONFIRMED.0 - 1));
    assert!(session_state.check_slot(&of, before, CONFIRMED).is_ok());
    let moved = session_state.check_slot(&of, before, BEYOND);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
    // The memory of an instance that lost the slot to another one is not evidence.
    session_state.record_other_owner();
    let moved = session_state.check_slot(&of, before, CONFIRMED);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
}

/// A standby has no memory of its own, but every owner of the slot records its position.
#[test]
fn what_is_written_down_counts_whoever_had_the_slot() {
    let (mut session_state, of) = session_state();
    session_state.confirmed = None;
    session_state.record_other_owner();
    assert!(session_state.check_slot(&of, Some(BEYOND), BEYOND).is_ok());
    session_state.record_other_owner();
    let moved = session_state.check_slot(&of, Some(CONFIRMED), BEYOND);
    let Err(SlotError::SlotMoved { then, .. }) = moved else {
        panic!("{moved:?}");
    };
    assert!(then.contains("walpost skip --to"), "{then}");
}
