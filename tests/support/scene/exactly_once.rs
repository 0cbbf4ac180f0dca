//! The mode of delivery, and checkpoints.

use super::super::checker::Resends;
use super::super::lsn::parse_lsn;
use super::super::records::Record;
use super::Scene;

impl Scene<'_> {
    /// Has Walpost deliver exactly once from here on, after a first checkpoint was set.
    pub(crate) fn exactly_once(mut self) -> Self {
        self.exactly_once = true;
        self.checkpoint("adopt")
            .arg("--yes")
            .finish()
            .expect_code(0);
        self.broker.wait_for_ends("walpost-checkpoints");
        self
    }

    /// As [`Scene::exactly_once`], or not.
    pub(crate) fn in_mode(self, exactly_once: bool) -> Self {
        match exactly_once {
            true => self.exactly_once(),
            false => self,
        }
    }

    /// Whether Walpost delivers exactly once.
    pub(crate) fn is_exactly_once(&self) -> bool {
        self.exactly_once
    }

    /// What the mode allows to be repeated after something broke so often.
    pub(crate) fn resends(&self, breaks: usize) -> Resends {
        match self.exactly_once {
            true => Resends::Never,
            false => Resends::AtMost(breaks),
        }
    }

    /// Those of the pipeline that are committed.
    pub(crate) fn checkpoints(&self) -> Vec<Record> {
        if self.exactly_once {
            // Those behind an open transaction, which can be another pipeline's, are not readable yet.
            self.broker.wait_for_ends("walpost-checkpoints");
        }
        let mut checkpoints = self.broker.read(&["walpost-checkpoints".to_owned()]);
        checkpoints.retain(|record| record.key() == self.name);
        checkpoints
    }

    /// What the pipeline's last checkpoint says is safe to confirm.
    pub(crate) fn safe_lsn(&self) -> u64 {
        let checkpoints = self.checkpoints();
        let last = checkpoints.last().expect("a checkpoint");
        let json: serde_json::Value = serde_json::from_str(last.text()).unwrap();
        parse_lsn(json["safe_lsn"].as_str().unwrap())
    }
}
