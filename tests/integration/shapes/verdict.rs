//! Evaluates a finished random walk: compares the committed events with the delivered events and
//! with the events that Walpost reported as possibly missing.

use std::collections::HashSet;
use std::fmt;
use std::ops::{AddAssign, Range};
use std::time::Duration;

use super::events::WrittenEvent;
use super::evidence::Evidence;
use super::walk::Walk;

/// After the last step, Walpost must deliver an event, confirm the last event, or halt within this
/// time.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(90);

/// Maximum number of remedies to follow one after another.
const MAX_REMEDIES: u32 = 12;

/// The result of evaluating one or more walks.
#[derive(Debug, Default)]
pub(super) struct WalkVerdict {
    committed: usize,
    /// Number of events that were not delivered, but that Walpost reported in output that an
    /// operator reads.
    named: usize,
    /// Number of walks that ended with a halt or a finding that no supported remedy resolves.
    unfinished: usize,
}

impl AddAssign for WalkVerdict {
    fn add_assign(&mut self, other: Self) {
        self.committed += other.committed;
        self.named += other.named;
        self.unfinished += other.unfinished;
    }
}

impl fmt::Display for WalkVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} events were committed, {} were not delivered and are named, {} walks end with a halt or a finding",
            self.committed, self.named, self.unfinished
        )
    }
}

impl Walk<'_> {
    pub(super) fn evaluate(mut self, seed: u64) -> WalkVerdict {
        self.background.write_to(Vec::new());
        self.collect_background();
        self.end_all();
        self.restore_access();
        self.restore_topic();
        let is_clean = self.follow_remedies();
        self.stop();
        self.count_records();
        let remaining = self.remaining_evidence();
        let wrong = self.find_wrong(is_clean, &remaining);
        assert!(
            wrong.is_empty(),
            "WALPOST_TEST_SEED={seed}\n{}\n{}",
            self.step_log(),
            wrong.join("\n")
        );
        if !is_clean {
            eprintln!("walk {seed} ends with: {}", self.reason());
        }
        let missing = |id: &&String| !self.times.contains_key(*id);
        WalkVerdict {
            committed: self.written.len(),
            named: self.written.keys().filter(missing).count(),
            unfinished: usize::from(!is_clean),
        }
    }

    /// Runs `walpost check`, and returns its `FAILED` lines and the errors in the log of the
    /// `walpost run` process that ended most recently.
    fn reason(&mut self) -> String {
        let check = self.check();
        let lines = check.stdout.lines();
        let findings = lines.filter(|line| line.starts_with("FAILED"));
        let log = self.last_log.clone();
        let errors = log.lines().filter(|line| line.contains(" ERROR "));
        findings.chain(errors).collect::<Vec<_>>().join("\n")
    }

    /// Follows remedies until no more are suggested. Returns whether Walpost then delivers
    /// everything and `check` reports no findings.
    fn follow_remedies(&mut self) -> bool {
        for _ in 0..MAX_REMEDIES {
            self.stop();
            self.init(&[]);
            self.start_run(None);
            let is_confirmed = self.catches_up(RECOVERY_TIMEOUT);
            if is_confirmed && self.definition.is_single() {
                self.define_all_tables();
                continue;
            }
            let has_followed = match &self.walpost {
                Some((walpost, _)) if !is_confirmed => {
                    let log = walpost.log();
                    let says_why = log.contains(" WARN ") || log.contains(" ERROR ");
                    self.has_stalled |= !says_why;
                    self.check_and_follow()
                }
                Some(_) => self.check_and_follow(),
                None => self.follow_last_remedy(),
            };
            if !has_followed {
                let has_findings = self.check().code != Some(0);
                return is_confirmed && !has_findings;
            }
        }
        false
    }

    /// Returns the undelivered events that `check` still reports at the end.
    fn remaining_evidence(&mut self) -> Vec<Evidence> {
        let (era, now) = (self.era, self.end_of_wal());
        let check = self.check();
        let lines = check.stdout.lines();
        lines
            .filter_map(|line| Evidence::parse(line, era, now))
            .collect()
    }

    fn find_wrong(&self, is_clean: bool, remaining: &[Evidence]) -> Vec<String> {
        let rows_in_outboxes = self.rows_in_outboxes();
        let due = self.tables_with_due_copy();
        let unused = self.events_of_unused_slots();
        let pending = self.confirmed_at_most();
        let mut wrong = Vec::new();
        for (id, event) in &self.written {
            let times = self.times.get(id).copied();
            let is_repeated = times.is_some_and(|times| times > 1);
            if is_repeated && self.definition.exactly_once && !self.repeatable.contains(id) {
                wrong.push(format!("{id} was delivered {times:?} times: {event:?}"));
            }
            if times.is_some() || !event.is_certain {
                continue;
            }
            // Walpost has halted, but the slot still retains the event.
            let is_pending = !is_clean
                && (event.era == self.era && event.by > pending || due.contains(&event.table));
            let is_in_unused_slot = event.era == self.era && unused.contains(&event.by);
            let is_named = self.evidence.iter().any(|evidence| evidence.names(event))
                || self.is_reported_child(event)
                || is_in_unused_slot;
            let is_in_table = rows_in_outboxes.contains(id);
            let is_reported = remaining.iter().any(|evidence| evidence.names(event));
            let is_overlooked = is_in_table && !is_reported && !is_in_unused_slot;
            if is_clean && is_overlooked && !self.is_child(event) {
                wrong.push(format!(
                    "{id} is in a table, was not delivered, and check finds nothing: {event:?}"
                ));
            } else if !is_pending && !is_named {
                wrong.push(format!("{id} is lost, and nothing names it: {event:?}"));
            } else if !self.has_given_up && !self.exists(id) {
                wrong.push(format!(
                    "{id} was deleted before it was delivered: {event:?}"
                ));
            }
        }
        if self.has_stalled {
            wrong.push("Walpost neither delivered nor said why".to_owned());
        }
        wrong.sort();
        wrong
    }

    fn is_child(&self, event: &WrittenEvent) -> bool {
        event.table.contains("_child_")
    }

    /// Returns whether Walpost reported the child table that contains the event. PostgreSQL never
    /// sends rows of child tables.
    pub(super) fn is_reported_child(&self, event: &WrittenEvent) -> bool {
        let mut lines = self.step_log_lines();
        self.is_child(event)
            && lines.any(|line| {
                let mut words = line
                    .split([' ', ','])
                    .map(|word| word.trim_end_matches('.'));
                line.contains("not delivered") && words.any(|word| word == event.table)
            })
    }

    fn step_log_lines(&self) -> impl Iterator<Item = &str> {
        self.evidence.iter().map(|evidence| evidence.line.as_str())
    }

    /// Returns the tables whose older rows `run` has yet to copy, according to the journal.
    fn tables_with_due_copy(&self) -> HashSet<String> {
        let slot = self.slot();
        let rows = self.fixture.db.try_rows(&format!(
            "SELECT j.detail ->> 'table' FROM walpost.journal j WHERE j.slot = '{slot}' AND j.action = 'snapshot'
             GROUP BY 1 HAVING bool_and(j.detail ->> 'state' = 'due')"
        ));
        let rows = rows.unwrap_or_default();
        rows.into_iter().flatten().flatten().collect()
    }

    /// Returns the range of positions that precede the current slot but that another slot of the
    /// pipeline could still deliver. `check` reports such slots.
    fn events_of_unused_slots(&self) -> Range<u64> {
        let slot = self.slot();
        let rows = self.fixture.db.try_rows(&format!(
            "SELECT (min(r.confirmed_flush_lsn) - '0/0')::bigint + 1, (max(s.created_lsn) - '0/0')::bigint + 1
             FROM pg_replication_slots r, walpost.slot_state s
             WHERE r.slot_name <> '{slot}' AND r.database = current_database() AND s.slot = '{slot}'"
        ));
        let number = |text: &Option<String>| text.as_ref()?.parse().ok();
        let rows = rows.unwrap_or_default();
        match rows.first().map(Vec::as_slice) {
            Some([from, to]) => number(from).unwrap_or(0)..number(to).unwrap_or(0),
            _ => 0..0,
        }
    }

    /// Returns the ids of all rows in the outbox tables.
    fn rows_in_outboxes(&self) -> HashSet<String> {
        let mut ids = HashSet::new();
        for table in super::walk::TABLES {
            let sql = format!("SELECT id FROM ONLY {table}");
            let partitioned = format!("SELECT id FROM {table}");
            let rows = match self.fixture.db.try_rows(&format!(
                "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass('{table}')"
            )) {
                Ok(rows) => rows,
                Err(_) => continue,
            };
            let Some(kind) = rows.first() else { continue };
            let sql = match kind[0].as_deref() {
                Some("t") => partitioned,
                _ => sql,
            };
            let rows = self.fixture.db.rows(&sql);
            ids.extend(rows.into_iter().filter_map(|row| row.into_iter().next()?));
        }
        ids
    }

    /// Returns whether any table contains the row.
    fn exists(&self, id: &str) -> bool {
        let tables = self.fixture.db.rows(
            "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE n.nspname LIKE 'tenant%' AND c.relkind = 'r'",
        );
        tables.into_iter().flatten().flatten().any(|table| {
            let sql = format!("SELECT EXISTS (SELECT FROM ONLY {table} WHERE id = '{id}')");
            self.fixture.db.is_true(&sql)
        })
    }

    /// Returns the slot's confirmed position. If the slot is missing, which `run` and `check`
    /// report, returns its recorded position instead.
    fn confirmed_at_most(&self) -> u64 {
        let slot = self.slot();
        let confirmed = self.fixture.db.value(&format!(
            "SELECT (coalesce((SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'),
                 (SELECT confirmed_lsn FROM walpost.slot_state WHERE slot = '{slot}')) - '0/0')::bigint"
        ));
        confirmed.map_or(0, |lsn| lsn.parse().expect("a number"))
    }
}
