//! Fuzzing of checkpoints, because any user with write access to their topic can write arbitrary
//! data.

use crate::delivery::checkpoint::{Checkpoint, Delivered, Last, Resume, ServerState, Switch};
use crate::model::lsn::{Lsn, Position};
use crate::pipeline::exactly_once::duplicate_filter::overlap::Overlap;
use crate::postgres::wire::pgoutput::Begin;

/// Processes the bytes as a checkpoint from its topic.
///
/// # Panics
/// The decoded checkpoint is encoded differently, or resuming from it goes beyond what it covers.
pub fn checkpoint(data: &[u8]) {
    let Ok(checkpoint) = Checkpoint::decode(data) else {
        return;
    };
    let text = checkpoint.encode();
    assert_eq!(Checkpoint::decode(&text).as_ref(), Ok(&checkpoint));

    let here = ServerState {
        system_id: checkpoint.system_id.clone(),
        timeline: checkpoint.timeline,
        history: Vec::new(),
        slot: checkpoint.slot.clone(),
        confirmed: checkpoint.safe_lsn,
        flushed: Lsn(u64::MAX),
    };
    let as_it_was = Resume {
        epoch: checkpoint.epoch,
        safe_lsn: checkpoint.safe_lsn,
        delivered: checkpoint.delivered.clone(),
        snapshot: checkpoint.snapshot.clone(),
        phantom: None,
    };
    assert_eq!(checkpoint.resume(&here), Ok(as_it_was));
    if let Some(Delivered::UpTo(last)) = &checkpoint.delivered {
        check_redelivery(last);
    }

    // A standby was promoted that had everything, a part or nothing of it.
    let Lsn(safe) = checkpoint.safe_lsn;
    for at in [u64::MAX, safe, safe / 2, 0].map(Lsn) {
        let promoted = ServerState {
            timeline: checkpoint.timeline.wrapping_add(1),
            history: vec![Switch {
                timeline: checkpoint.timeline,
                at,
            }],
            confirmed: Lsn(at.0.min(safe)),
            ..here.clone()
        };
        let resume = checkpoint.resume(&promoted).expect("it goes on");
        assert_eq!(resume.safe_lsn, promoted.confirmed);
        assert!(resume.epoch >= checkpoint.epoch);
        let lost = |last: &Last| last.commit_lsn >= at;
        let has_lost = match &checkpoint.delivered {
            Some(Delivered::UpTo(last)) => lost(last),
            Some(Delivered::Before(lsn)) => *lsn > at,
            None => false,
        };
        assert_eq!(resume.phantom.is_some(), has_lost);
        match resume.delivered {
            Some(Delivered::UpTo(last)) => assert!(!lost(&last)),
            Some(Delivered::Before(from)) if has_lost => assert_eq!(from, at),
            // Nothing on the new timeline is omitted.
            Some(Delivered::Before(from)) => {
                let Some(Delivered::Before(before)) = checkpoint.delivered else {
                    panic!("{:?} became {from}", checkpoint.delivered);
                };
                assert_eq!(from, before.min(at), "nothing new is left out");
            }
            other => assert_eq!(other, checkpoint.delivered),
        }
        let copied = resume.snapshot.iter().flat_map(|copied| &copied.chunks);
        assert!(copied.into_iter().all(|chunk| chunk.snapshot_lsn <= at));
        let ahead = ServerState {
            confirmed: Lsn(promoted.confirmed.0.saturating_add(1)),
            ..promoted
        };
        let is_ahead = ahead.confirmed > resume.safe_lsn;
        assert_eq!(checkpoint.resume(&ahead).is_err(), is_ahead);
    }
}

/// Sends the last transaction again, and checks that only its delivered part is omitted.
fn check_redelivery(last: &Last) {
    let position = last.position();
    let id = last.event_id.as_deref().map(str::as_bytes);
    let delivered = Some(Delivered::UpTo(last.clone()));
    let overlap =
        || Overlap::new(delivered.clone(), Lsn::ZERO, position.commit).expect("it comes again");
    let mut dedup_of_another = overlap();
    let mut overlap = overlap();
    let begin = Begin {
        commit: position.commit,
        time_micros: last.commit_time,
        xid: last.xid,
    };
    overlap.begin(&begin).expect("it is the one it was");
    assert_eq!(overlap.is_delivered(position, || id), Ok(true));
    if let Some(index) = position.index.checked_add(1) {
        let next = Position { index, ..position };
        assert_eq!(overlap.is_delivered(next, || None), Ok(false));
        let end = position.commit;
        assert_eq!(overlap.commit(position.commit, end, index), Ok(true));
    }
    let end = position.commit;
    assert!(overlap.commit(end, end, position.index).is_err());
    if let Some(beyond) = end.0.checked_add(1) {
        assert!(dedup_of_another.idle(Lsn(beyond)).is_err());
    }
    let other = Begin {
        xid: begin.xid ^ 1,
        ..begin
    };
    assert!(overlap.begin(&other).is_err());
}
