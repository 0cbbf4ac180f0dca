//! Fuzzes the decoding of checkpoints, because anyone with write access to the checkpoint topic can
//! write arbitrary data to it.

use crate::delivery::checkpoint::{Checkpoint, Delivered, Last, Resume, ServerState, Switch};
use crate::model::lsn::{Lsn, Position};
use crate::pipeline::exactly_once::duplicate_filter::overlap::Overlap;
use crate::postgres::wire::pgoutput::Begin;

/// Decodes `data` as a checkpoint, and resumes from that checkpoint on servers in various states.
///
/// # Panics
/// Panics if a decoded checkpoint changes when it is encoded and decoded again, or if resuming from
/// it skips events that it does not cover.
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
    let unchanged = Resume {
        epoch: checkpoint.epoch,
        safe_lsn: checkpoint.safe_lsn,
        delivered: checkpoint.delivered.clone(),
        snapshot: checkpoint.snapshot.clone(),
        phantom: None,
    };
    assert_eq!(checkpoint.resume(&here), Ok(unchanged));
    if let Some(Delivered::UpTo(last)) = &checkpoint.delivered {
        check_redelivery(last);
    }

    // The promoted standby had received all, some or none of the WAL that the checkpoint covers.
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
        let resume = checkpoint.resume(&promoted).expect("a valid history");
        assert_eq!(resume.safe_lsn, promoted.confirmed);
        assert!(resume.epoch >= checkpoint.epoch);
        let is_lost = |last: &Last| last.commit_lsn >= at;
        let has_lost = match &checkpoint.delivered {
            Some(Delivered::UpTo(last)) => is_lost(last),
            Some(Delivered::Before(lsn)) => *lsn > at,
            None => false,
        };
        assert_eq!(resume.phantom.is_some(), has_lost);
        match resume.delivered {
            Some(Delivered::UpTo(last)) => assert!(!is_lost(&last)),
            Some(Delivered::Before(from)) if has_lost => assert_eq!(from, at),
            // No events on the new timeline are skipped.
            Some(Delivered::Before(from)) => {
                let Some(Delivered::Before(before)) = checkpoint.delivered else {
                    panic!("{:?} became {from}", checkpoint.delivered);
                };
                assert_eq!(
                    from,
                    before.min(at),
                    "events on the new timeline must not be omitted"
                );
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

/// Resends the last transaction, and checks that only its delivered events are skipped.
fn check_redelivery(last: &Last) {
    let position = last.position();
    let id = last.event_id.as_deref().map(str::as_bytes);
    let delivered = Some(Delivered::UpTo(last.clone()));
    let overlap =
        || Overlap::new(delivered.clone(), Lsn::ZERO, position.commit).expect("an overlap");
    let mut second_overlap = overlap();
    let mut overlap = overlap();
    let begin = Begin {
        commit: position.commit,
        time_micros: last.commit_time,
        xid: last.xid,
    };
    overlap.begin(&begin).expect("the same transaction");
    assert_eq!(overlap.is_delivered(position, || id), Ok(true));
    if let Some(index) = position.index.checked_add(1) {
        let next = Position { index, ..position };
        assert_eq!(overlap.is_delivered(next, || None), Ok(false));
        let end = position.commit;
        assert_eq!(overlap.commit(position.commit, end, index), Ok(true));
    }
    let end = position.commit;
    assert!(overlap.commit(end, end, position.index).is_err());
    if let Some(after) = end.0.checked_add(1) {
        assert!(second_overlap.process_keepalive(Lsn(after)).is_err());
    }
    let other = Begin {
        xid: begin.xid ^ 1,
        ..begin
    };
    assert!(overlap.begin(&other).is_err());
}
