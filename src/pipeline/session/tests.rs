use std::sync::Arc;

use super::error::SlotError;
use super::state::SessionState;
use crate::delivery::watermark::Watermark;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::pipeline::recovery;
use crate::pipeline::sim;
use crate::pipeline::wal_budget::slot_monitor::Watched;
use crate::postgres::catalog::slot_state::SlotIdentity;
use crate::postgres::replication::Identity;

const WINDOW: Window = Window {
    records: 10,
    bytes: 1000,
};
const CONFIRMED: Lsn = Lsn(0x200);
const ABOVE_CONFIRMED: Lsn = Lsn(0x201);

/// Returns the state of a pipeline that has confirmed a position on cluster "one", and its slot's
/// identity.
fn session_state() -> (SessionState, SlotIdentity) {
    let settings = sim::settings(false, false, &mut fastrand::Rng::with_seed(1));
    let watched = Watched::new(&settings, &Arc::default());
    let mut session_state = SessionState::new(WINDOW, watched);
    session_state.system_id = Some("one".to_owned());
    session_state.timeline = 1;
    session_state.confirmed = Some(Watermark::new(WINDOW, CONFIRMED).confirmed());
    let slot = SlotIdentity {
        pipeline: settings.name,
        defined_by: settings.defined_by,
        target: settings.target,
        system_id: "one".to_owned(),
        timeline: 1,
    };
    (session_state, slot)
}

fn identity(system_id: &str, timeline: u32) -> Identity {
    Identity {
        system_id: system_id.to_owned(),
        timeline,
        flushed: ABOVE_CONFIRMED,
    }
}

#[test]
fn rejects_a_different_cluster() {
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
fn detects_a_slot_that_is_ahead_of_the_confirmed_position() {
    let (mut session_state, slot) = session_state();
    for found in [Lsn::ZERO, CONFIRMED] {
        assert!(
            session_state.check_slot(&slot, None, found).is_ok(),
            "{found}"
        );
    }
    let moved = session_state.check_slot(&slot, None, ABOVE_CONFIRMED);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
    session_state.confirmed = None;
    assert!(
        session_state
            .check_slot(&slot, None, ABOVE_CONFIRMED)
            .is_ok()
    );
}

/// A higher slot position is accepted once, because another Walpost instance may have confirmed it.
/// If it were accepted more than once, an instance that was once a standby could never detect that
/// something else moved the slot.
#[test]
fn accepts_a_higher_position_only_once_after_another_process_used_the_slot() {
    let (mut session_state, slot) = session_state();
    session_state.record_other_owner();
    assert!(
        session_state
            .check_slot(&slot, None, ABOVE_CONFIRMED)
            .is_ok()
    );
    let moved = session_state.check_slot(&slot, None, ABOVE_CONFIRMED);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
}

/// A position may be confirmed without being recorded if the role lacks the privilege to write to
/// `walpost.slot_state`.
#[test]
fn accepts_a_position_that_was_confirmed_but_not_recorded() {
    let (mut session_state, slot) = session_state();
    let before = Some(Lsn(CONFIRMED.0 - 1));
    assert!(session_state.check_slot(&slot, before, CONFIRMED).is_ok());
    let moved = session_state.check_slot(&slot, before, ABOVE_CONFIRMED);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
    // If another instance has used the slot in the meantime, the position that this instance
    // confirmed is ignored.
    session_state.record_other_owner();
    let moved = session_state.check_slot(&slot, before, CONFIRMED);
    assert!(matches!(moved, Err(SlotError::SlotMoved { .. })));
}

/// A standby has not confirmed any position itself, so the slot is compared with the position that
/// was recorded by the process that used the slot before.
#[test]
fn compares_the_slot_with_the_recorded_position_after_another_process_used_it() {
    let (mut session_state, slot) = session_state();
    session_state.confirmed = None;
    session_state.record_other_owner();
    assert!(
        session_state
            .check_slot(&slot, Some(ABOVE_CONFIRMED), ABOVE_CONFIRMED)
            .is_ok()
    );
    session_state.record_other_owner();
    let moved = session_state.check_slot(&slot, Some(CONFIRMED), ABOVE_CONFIRMED);
    let Err(SlotError::SlotMoved { then, .. }) = moved else {
        panic!("{moved:?}");
    };
    assert!(then.contains("walpost skip --to"), "{then}");
}
