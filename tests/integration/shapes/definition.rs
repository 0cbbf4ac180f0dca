//! Changes to the pipeline's definition, made by an operator.

use std::fmt;
use std::fs;

use crate::support::process::{handles_hangup, try_signal};
use crate::support::wait::{WAIT_TIMEOUT, poll_until};

use super::walk::{TABLES, Walk};

/// The prefixes of the two topic templates, to which the aggregate type is appended.
pub(super) const TOPIC_PREFIX: &str = "outbox.event.";
pub(super) const OTHER_TOPIC_PREFIX: &str = "outbox.other.";

/// The pipeline's settings in walpost.toml.
#[derive(Clone, Debug)]
pub(super) struct PipelineDefinition {
    tables: TableScope,
    pub(super) exactly_once: bool,
    name: Version,
    slot: Version,
    publication: Version,
    /// Whether the topic uses the second prefix.
    has_other_topic: bool,
    /// A line to add to walpost.toml, or an empty string to add nothing. `window` has the same
    /// form.
    on_table_error: &'static str,
    window: &'static str,
}

/// The number of times that an object was renamed. It is appended to the object's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Version(u32);

impl Version {
    fn increment(&mut self) {
        self.0 += 1;
    }
}

/// Writes the suffix of an object's name, such as `_2`. The original name has no suffix.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            number => write!(f, "_{number}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableScope {
    Single,
    Several,
}

impl PipelineDefinition {
    pub(super) fn draw(rng: &mut fastrand::Rng) -> Self {
        Self {
            tables: match rng.u32(..3) {
                0 => TableScope::Single,
                _ => TableScope::Several,
            },
            exactly_once: rng.bool(),
            name: Version::default(),
            slot: Version::default(),
            publication: Version::default(),
            has_other_topic: false,
            on_table_error: match rng.u32(..3) {
                0 => "on_table_error = \"set-aside\"\n",
                _ => "",
            },
            // If Walpost sends one record at a time, delivery takes long enough for the test to
            // change database objects while events are still being delivered.
            window: match rng.u32(..3) {
                0 => "window_records = 1\n",
                _ => "",
            },
        }
    }

    pub(super) fn is_single(&self) -> bool {
        self.tables == TableScope::Single
    }

    /// Returns the pipeline's lines in walpost.toml.
    pub(super) fn settings(&self, name: &str) -> String {
        let tables = match self.tables {
            TableScope::Single => format!("table = \"{}\"\n", TABLES[0]),
            TableScope::Several => {
                format!("tables = [\"tenant_*.outbox\"]\n{}", self.on_table_error)
            }
        };
        let delivery = match self.exactly_once {
            true => "exactly-once",
            false => "at-least-once",
        };
        let topic = match self.has_other_topic {
            true => OTHER_TOPIC_PREFIX,
            false => TOPIC_PREFIX,
        };
        let (slot, publication) = (self.slot, self.publication);
        format!(
            "name = \"{name}{version}\"\nslot = \"walpost_{name}{slot}\"\npublication = \"walpost_{name}{publication}\"\n\
             delivery = \"{delivery}\"\n{tables}topic = \"{topic}{{aggregatetype}}\"\n{window}",
            version = self.name,
            window = self.window,
        )
    }
}

impl fmt::Display for PipelineDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let delivery = match self.exactly_once {
            true => "exactly-once",
            false => "at-least-once",
        };
        let window = match self.window {
            "" => "",
            _ => ", one record at a time",
        };
        write!(f, "{delivery}, {:?}{window}", self.tables)
    }
}

impl Walk<'_> {
    pub(super) fn change_definition(&mut self) {
        match self.rng.u32(..10) {
            0..=2 => self.toggle_tables(),
            9 if self.has_only_own_table() => return self.toggle_tables_during_copy(),
            9 => self.toggle_tables(),
            3..=4 => self.definition.has_other_topic = !self.definition.has_other_topic,
            // After a change of the pipeline's name, its slot, its publication or its mode, the
            // checkpoint may not match the new definition, so events may be repeated.
            other => {
                self.exclude_from_repeat_check();
                match other {
                    5 => self.definition.name.increment(),
                    6 => self.definition.slot.increment(),
                    7 => self.definition.publication.increment(),
                    _ => self.definition.exactly_once = !self.definition.exactly_once,
                }
            }
        }
        self.reload();
    }

    pub(super) fn slot(&self) -> String {
        format!("{}{}", self.fixture.slot(), self.definition.slot)
    }

    pub(super) fn publication(&self) -> String {
        format!("{}{}", self.fixture.slot(), self.definition.publication)
    }

    /// Switches the definition between one table and several tables. Does nothing if the pipeline
    /// has more than one table, because only [`super::outbox`] removes tables. Also adapts the
    /// publication.
    fn toggle_tables(&mut self) {
        match self.definition.tables {
            TableScope::Several if self.tables.len() > 1 => {}
            TableScope::Several => {
                self.definition.tables = TableScope::Single;
                let publication = self.publication();
                self.sql(&format!(
                    "ALTER PUBLICATION {publication} DROP TABLE walpost.outbox_row"
                ));
            }
            TableScope::Single => {
                self.definition.tables = TableScope::Several;
                // Change the publication either before or after the process reads the new
                // definition.
                if self.rng.bool() {
                    self.init(&[]);
                }
            }
        }
    }

    /// Returns whether `TABLES[0]` is the only outbox table, in which case the definition can
    /// switch from one table to several tables, or back to one table.
    fn has_only_own_table(&self) -> bool {
        self.tables == [TABLES[0]]
    }

    /// Starts a copy of the table by switching to a new slot, then changes the definition to
    /// several tables before the copy is complete.
    pub(super) fn toggle_tables_during_copy(&mut self) {
        self.exclude_from_repeat_check();
        if !self.definition.is_single() {
            self.toggle_tables();
        }
        self.stop();
        self.insert_many();
        self.definition.slot.increment();
        // Send one record at a time, so that the copy is still running when the definition changes.
        self.definition.window = "window_records = 1\n";
        self.init(&[]);
        self.start_run(None);
        if let Some((walpost, _)) = &mut self.walpost {
            poll_until(WAIT_TIMEOUT, || {
                let has_begun = walpost.log().contains("starting a snapshot");
                (has_begun || !walpost.is_running()).then_some(())
            });
        }
        self.toggle_tables();
        self.reload();
    }

    /// Changes the definition to several tables, so that the check at the end of the walk includes
    /// all tables.
    pub(super) fn define_all_tables(&mut self) {
        self.definition.tables = TableScope::Several;
    }

    /// Changes the definition back to a single table. If the copy of that table is incomplete,
    /// Walpost reports an error that requires this change.
    pub(super) fn define_single_table(&mut self) {
        self.definition.tables = TableScope::Single;
    }

    /// Writes the definition to the running process's configuration file, and makes the process
    /// reload it.
    pub(super) fn reload(&mut self) {
        let new = self.file();
        self.log_step(format!(
            "definition: {}",
            fs::read_to_string(&new).expect("the file")
        ));
        self.check_process();
        if let Some((walpost, file)) = &mut self.walpost {
            // A process that has just started does not handle SIGHUP yet.
            poll_until(WAIT_TIMEOUT, || {
                (handles_hangup(walpost.process_id()) || !walpost.is_running()).then_some(())
            });
            fs::copy(new, file).expect("the file");
            try_signal(walpost.process_id(), "HUP");
        }
    }
}
