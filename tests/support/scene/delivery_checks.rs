//! Compares what Walpost has delivered with what was committed.

use super::super::checker::{self, Committed, Delivered, KilledState, Resends, Summary};
use super::super::wait::{WAIT_TIMEOUT, poll_until, wait_until};
use super::super::walpost::Walpost;
use super::Scene;

impl Scene<'_> {
    /// Kills Walpost and returns what was confirmed and delivered before.
    pub(crate) fn kill(&self, walpost: Walpost) -> KilledState {
        walpost.kill();
        self.record_killed()
    }

    /// Returns what a connector that has been killed had confirmed and delivered.
    pub(crate) fn record_killed(&self) -> KilledState {
        wait_until("the slot to be free", || !self.slot_is_active());
        let confirmed = self.confirmed();
        let topics = self.topics();
        let ends = match self.exactly_once {
            true => self.broker.written_offset(&topics),
            false => self.broker.ends(&topics),
        };
        KilledState { ends, confirmed }
    }

    /// Waits until everything committed is delivered and confirmed, stops Walpost, and checks
    /// everything that it delivered.
    pub(crate) fn settle(
        &self,
        walpost: Walpost,
        deaths: &[KilledState],
        resends: Resends,
    ) -> Summary {
        let history = self.history();
        // Polling the confirmed position is cheaper than reading records, most of which have
        // arrived once it is reached.
        let goal = self.wal_position();
        poll_until(WAIT_TIMEOUT, || (self.confirmed() >= goal).then_some(()));
        self.wait_for_ids(&history);
        self.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        self.check_delivered(deaths, resends)
    }

    /// Checks everything delivered so far.
    pub(crate) fn check_delivered(&self, deaths: &[KilledState], resends: Resends) -> Summary {
        let history = self.history();
        let records = self.records();
        let mut delivery: Vec<Delivered> = records.iter().map(Delivered::from).collect();
        delivery.retain(|delivered| !self.taken_back.contains(&delivered.id));
        for delivered in &mut delivery {
            if self.topics.may_have_moved(&delivered.place.0) {
                delivered.key = None;
            }
        }
        let verdict = checker::check(&history, &delivery, deaths, resends);
        verdict.unwrap_or_else(|violations| panic!("{violations}"))
    }

    /// Waits for the last event of the history. The checker finds out whether the other events
    /// arrived.
    pub(crate) fn wait_for_ids(&self, history: &[Committed]) {
        let Some(last) = history.last() else { return };
        let last_is_there = || {
            let records = self.records();
            records
                .iter()
                .any(|record| record.header("id") == last.id)
                .then_some(())
        };
        let arrived = self.receive_in_time(history.len())
            && poll_until(WAIT_TIMEOUT, last_is_there).is_some();
        if !arrived {
            eprintln!("the last event, {}, did not arrive", last.id);
            self.check_delivered(&[], Resends::AtMost(usize::MAX));
        }
    }
}
