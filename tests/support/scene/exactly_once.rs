//! The delivery mode, and checkpoints.

use super::super::checker::Resends;
use super::super::lsn::parse_lsn;
use super::super::records::Record;
use super::Scene;

impl Scene<'_> {
    /// Creates the first checkpoint and makes Walpost deliver exactly once from now on.
    pub(crate) fn exactly_once(mut self) -> Self {
        self.exactly_once = true;
        self.checkpoint("adopt")
            .arg("--yes")
            .finish()
            .expect_code(0);
        self.broker.wait_for_markers("walpost-checkpoints");
        self
    }

    /// Calls [`Scene::exactly_once`] if the argument is true.
    pub(crate) fn in_mode(self, exactly_once: bool) -> Self {
        match exactly_once {
            true => self.exactly_once(),
            false => self,
        }
    }

    /// Returns whether Walpost delivers exactly once.
    pub(crate) fn is_exactly_once(&self) -> bool {
        self.exactly_once
    }

    /// Returns the repetitions that the mode allows after the given number of failures.
    pub(crate) fn resends(&self, breaks: usize) -> Resends {
        match self.exactly_once {
            true => Resends::Never,
            false => Resends::AtMost(breaks),
        }
    }

    /// Returns the committed checkpoints of the pipeline.
    pub(crate) fn checkpoints(&self) -> Vec<Record> {
        if self.exactly_once {
            // Checkpoints after an open transaction, possibly of another pipeline, are not readable
            // until it ends.
            self.broker.wait_for_markers("walpost-checkpoints");
        }
        let mut checkpoints = self.broker.read(&["walpost-checkpoints".to_owned()]);
        checkpoints.retain(|record| record.key() == self.name);
        checkpoints
    }

    /// Returns the position that is safe to confirm according to the pipeline's last checkpoint.
    pub(crate) fn safe_lsn(&self) -> u64 {
        let checkpoints = self.checkpoints();
        let last = checkpoints.last().expect("a checkpoint");
        let json: serde_json::Value = serde_json::from_str(last.text()).unwrap();
        parse_lsn(json["safe_lsn"].as_str().unwrap())
    }
}
