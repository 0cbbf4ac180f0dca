//! An operator's steps: starting, stopping and killing Walpost, and running its commands.

use std::mem;
use std::time::Duration;

use crate::support::wait::poll_until;
use crate::support::walpost::{Finished, Invocation};

use super::walk::Walk;

/// Maximum time for delivering everything committed, in multiples of the longest permitted pause
/// between deliveries.
const DELIVERY_TIMEOUT_PAUSES: u32 = 6;

impl Walk<'_> {
    pub(super) fn run(&mut self) {
        self.check_process();
        if self.walpost.is_some() {
            return;
        }
        if self.rng.bool() {
            self.follow_last_remedy();
        }
        let init = match self.rng.u32(..4) {
            0 => Some("--init"),
            _ => None,
        };
        self.start_run(init);
    }

    pub(super) fn start_run(&mut self, init: Option<&str>) {
        let file = self.file();
        let run = Invocation::new(["run", "--config"]).arg(&file);
        let walpost = run.args(init).env("WALPOST_LOCK_TIMEOUT", "2s").start();
        self.log_step(format!("walpost run {init:?}"));
        self.walpost = Some((walpost, file));
    }

    /// Saves the log of the process if it has exited by itself.
    pub(super) fn check_process(&mut self) {
        if let Some((walpost, _)) = &mut self.walpost
            && !walpost.is_running()
            && let Some((walpost, _)) = self.walpost.take()
        {
            let finished = walpost.finish();
            self.record_exit("ended by itself", &finished);
        }
    }

    fn record_exit(&mut self, how: &str, finished: &Finished) {
        self.log_step(format!(
            "walpost run: {how}: {:?}\n{}",
            finished.code, finished.stderr
        ));
        self.collect_evidence(&finished.stderr);
        self.last_log.clone_from(&finished.stderr);
    }

    pub(super) fn stop(&mut self) {
        self.check_process();
        if let Some((walpost, _)) = self.walpost.take() {
            let finished = walpost.terminate();
            self.record_exit("stopped", &finished);
        }
    }

    pub(super) fn kill(&mut self) {
        self.check_process();
        if let Some((walpost, _)) = self.walpost.take() {
            let finished = walpost.kill();
            self.record_exit("killed", &finished);
        }
    }

    /// Gives Walpost some time to confirm everything committed so far.
    pub(super) fn settle(&mut self) {
        let is_confirmed = self.has_confirmed(Duration::from_secs(4));
        self.log_step(format!("waited for Walpost: confirmed: {is_confirmed}"));
    }

    pub(super) fn has_confirmed(&mut self, within: Duration) -> bool {
        let goal = self.fixture.wal_position();
        self.has_confirmed_up_to(goal, within)
    }

    /// Waits until everything committed so far is confirmed. Stops waiting and returns false if no
    /// event is delivered within the duration `pause`.
    pub(super) fn catches_up(&mut self, pause: Duration) -> bool {
        let goal = self.fixture.wal_position();
        let topics = self.fixture.topics();
        let mut delivered = self.fixture.broker.ends(&topics);
        for _ in 0..DELIVERY_TIMEOUT_PAUSES {
            if self.has_confirmed_up_to(goal, pause) {
                return true;
            }
            let before = mem::replace(&mut delivered, self.fixture.broker.ends(&topics));
            if self.walpost.is_none() || delivered == before {
                return false;
            }
        }
        false
    }

    fn has_confirmed_up_to(&mut self, goal: u64, within: Duration) -> bool {
        let slot = self.slot();
        let sql = format!(
            "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}' AND confirmed_flush_lsn - '0/0' >= {goal})"
        );
        poll_until(within, || {
            self.check_process();
            (self.walpost.is_none() || self.fixture.db.is_true(&sql)).then_some(())
        });
        self.fixture.db.is_true(&sql)
    }

    pub(super) fn init(&mut self, arguments: &[&str]) -> bool {
        self.superuser_command(&["init"], arguments).code == Some(0)
    }

    pub(super) fn init_or_follow_remedy(&mut self) {
        match self.rng.bool() {
            true => _ = self.init(&[]),
            false => _ = self.check_and_follow(),
        }
    }

    pub(super) fn check(&mut self) -> Finished {
        self.command(&["check"], &[])
    }

    pub(super) fn maintain(&mut self) {
        self.superuser_command(&["maintain"], &["--retention=1s", "--delete-rows"]);
    }

    /// Adopts the slot's current position, so events that were delivered earlier may be repeated.
    pub(super) fn adopt(&mut self) -> bool {
        self.exclude_from_repeat_check();
        self.has_given_up = true;
        self.command(&["checkpoint", "adopt"], &["--yes"]).code == Some(0)
    }

    /// Excludes all events written so far from the check for duplicates.
    pub(super) fn exclude_from_repeat_check(&mut self) {
        self.collect_background();
        self.repeatable.extend(self.written.keys().cloned());
    }
}
