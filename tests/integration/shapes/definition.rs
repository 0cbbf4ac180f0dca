//! The definition of the pipeline, which an operator changes.

use std::fmt;
use std::fs;

use crate::support::process::{handles_hangup, try_signal};
use crate::support::wait::{WAIT_TIMEOUT, poll_until};

use super::walk::{TABLES, Walk};

/// The topics of the two templates, without the aggregate type.
pub(super) const TOPIC: &str = "outbox.event.";
pub(super) const OTHER_TOPIC: &str = "outbox.other.";

/// The pipeline's settings in walpost.toml.
#[derive(Clone, Debug)]
pub(super) struct Definition {
    tables: Tables,
    pub(super) exactly_once: bool,
    name: Version,
    slot: Version,
    publication: Version,
    /// Whether the topic is named by the second of two templates.
    has_other_topic: bool,
    /// Lines of walpost.toml, or empty.
    on_table_error: &'static str,
    window: &'static str,
}

/// The number of times that something was renamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Version(u32);

impl Version {
    fn increment(&mut self) {
        self.0 += 1;
    }
}

/// Formats the suffix of the name.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            number => write!(f, "_{number}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tables {
    Single,
    Several,
}

impl Definition {
    pub(super) fn draw(dice: &mut fastrand::Rng) -> Self {
        Self {
            tables: match dice.u32(..3) {
                0 => Tables::Single,
                _ => Tables::Several,
            },
            exactly_once: dice.bool(),
            name: Version::default(),
            slot: Version::default(),
            publication: Version::default(),
            has_other_topic: false,
            on_table_error: match dice.u32(..3) {
                0 => "on_table_error = \"set-aside\"\n",
                _ => "",
            },
            // With one record at a time, delivery is slow enough for changes to happen meanwhile.
            window: match dice.u32(..3) {
                0 => "window_records = 1\n",
                _ => "",
            },
        }
    }

    pub(super) fn is_single(&self) -> bool {
        self.tables == Tables::Single
    }

    /// Returns lines of walpost.toml.
    pub(super) fn settings(&self, name: &str) -> String {
        let tables = match self.tables {
            Tables::Single => format!("table = \"{}\"\n", TABLES[0]),
            Tables::Several => format!("tables = [\"tenant_*.outbox\"]\n{}", self.on_table_error),
        };
        let delivery = match self.exactly_once {
            true => "exactly-once",
            false => "at-least-once",
        };
        let topic = match self.has_other_topic {
            true => OTHER_TOPIC,
            false => TOPIC,
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

impl fmt::Display for Definition {
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
        match self.dice.u32(..10) {
            0..=2 => self.toggle_tables(),
            9 if self.is_alone() => return self.toggle_tables_during_copy(),
            9 => self.toggle_tables(),
            3..=4 => self.definition.has_other_topic = !self.definition.has_other_topic,
            // The checkpoint will belong to another pipeline, slot or mode.
            other => {
                self.may_repeat();
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

    /// Changes the publication along with the definition only while no other table was added to it:
    /// [`super::outbox`] removes tables.
    fn toggle_tables(&mut self) {
        match self.definition.tables {
            Tables::Several if self.tables.len() > 1 => {}
            Tables::Several => {
                self.definition.tables = Tables::Single;
                let publication = self.publication();
                self.sql(&format!(
                    "ALTER PUBLICATION {publication} DROP TABLE walpost.outbox_row"
                ));
            }
            Tables::Single => {
                self.definition.tables = Tables::Several;
                // Either before or after the process reads the new definition.
                if self.dice.bool() {
                    self.init(&[]);
                }
            }
        }
    }

    /// Returns whether the definition may name either one table or several.
    fn is_alone(&self) -> bool {
        self.tables == [TABLES[0]]
    }

    /// Makes the first start with another slot copy the table, and changes the definition to
    /// several tables before the copy is complete.
    pub(super) fn toggle_tables_during_copy(&mut self) {
        self.may_repeat();
        if !self.definition.is_single() {
            self.toggle_tables();
        }
        self.stop();
        self.insert_many();
        self.definition.slot.increment();
        // With one record at a time, the copy is slow enough.
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

    /// Defines all tables, which the end of the walk compares.
    pub(super) fn define_all_tables(&mut self) {
        self.definition.tables = Tables::Several;
    }

    /// Defines a single table, as the error requires if the copy of a single table is not complete.
    pub(super) fn define_single_table(&mut self) {
        self.definition.tables = Tables::Single;
    }

    /// Writes the definition to the file of the running process, and makes the process reload it.
    pub(super) fn reload(&mut self) {
        let new = self.file();
        self.note(format!(
            "definition: {}",
            fs::read_to_string(&new).expect("the file")
        ));
        self.look_after();
        if let Some((walpost, file)) = &mut self.walpost {
            // A process that has just started does not handle the signal yet.
            poll_until(WAIT_TIMEOUT, || {
                (handles_hangup(walpost.process_id()) || !walpost.is_running()).then_some(())
            });
            fs::copy(new, file).expect("the file");
            try_signal(walpost.process_id(), "HUP");
        }
    }
}
