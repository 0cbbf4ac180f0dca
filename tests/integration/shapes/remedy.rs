//! An operator's response to a halt or a finding: running the commands that Walpost suggests.

use std::mem;

use crate::support::walpost::word_after;

use super::events::WrittenEvent;
use super::evidence::Evidence;
use super::walk::{TABLES, Walk};

impl Walk<'_> {
    /// Follows the remedy in the last error that the most recent `walpost run` process logged.
    pub(super) fn follow_last_remedy(&mut self) -> bool {
        let log = mem::take(&mut self.last_log);
        let error = log.lines().rev().find(|line| line.contains(" ERROR "));
        error.is_some_and(|line| self.follow(line))
    }

    /// Runs `walpost check` and follows the remedies in its findings. Returns whether any remedy
    /// was followed.
    pub(super) fn check_and_follow(&mut self) -> bool {
        let check = self.check();
        let text = format!("{}\n{}", check.stdout, check.stderr);
        let mut has_followed = false;
        for line in text.lines() {
            if line.starts_with("FAILED") || line.starts_with("WARNING") {
                has_followed |= self.follow(line);
            }
        }
        has_followed
    }

    /// Applies the remedy that a line of output suggests. Returns whether the line contained a
    /// remedy that this test can apply and that succeeded.
    fn follow(&mut self, line: &str) -> bool {
        if line.contains("contains tables other than") {
            let (_, command) = line
                .split_once("remove the other tables: ")
                .expect("the command");
            let (command, _) = command.split_once(" pipeline=").unwrap_or((command, ""));
            return self.sql(command);
        }
        if let Some((_, rest)) = line.split_once(": ALTER TABLE ")
            && rest.contains(" NO INHERIT ")
        {
            return self.sql(&format!("ALTER TABLE {rest}"));
        }
        if line.contains("max.message.bytes") {
            self.restore_topic();
            return true;
        }
        if line.contains("copy of the older rows of table") {
            self.define_single_table();
            return true;
        }
        if line.contains("these events can't be read with this publication") {
            let slot = self.slot();
            let is_dropped = self.sql(&format!(
                "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
            ));
            self.init(&[]);
            return is_dropped;
        }
        // Add the table to the publication first. The rows that were committed while the table was
        // not published can be replayed only after that.
        if line.contains("does not contain table") && line.contains("ADD TABLE") {
            return self.publish_table(line);
        }
        if line.contains("walpost replay --dropped-slots") {
            return self.replay(line, "--dropped-slots");
        }
        if line.contains("--set-aside --table") || line.contains("replay --set-aside") {
            return self.replay(line, "--set-aside");
        }
        if line.contains("ADD TABLE") {
            return self.publish_table(line);
        }
        if line.contains("walpost skip") && line.contains("--to ") {
            let to = word_after(line, "--to ")
                .trim_end_matches(['.', ';', ','])
                .to_owned();
            // An operator would not skip the events if the replay failed.
            if !self.replay_reported(line) {
                return false;
            }
            self.has_given_up = true;
            return self.command(&["skip"], &["--to", &to, "--yes"]).code == Some(0);
        }
        if line.contains("walpost checkpoint adopt") {
            return self.replay_reported(line) && self.replay_previewed() && self.adopt();
        }
        if line.contains("walpost init") {
            return self.init_and_follow();
        }
        false
    }

    /// Adds the table named in a line of output to the publication, and replays the rows of that
    /// table.
    fn publish_table(&mut self, line: &str) -> bool {
        let publication = self.publication();
        let table = word_after(line, "ADD TABLE ");
        let table = table.trim_end_matches(['.', ';', ',']).to_owned();
        let has_added = self.sql(&format!(
            "ALTER PUBLICATION {publication} ADD TABLE {table}"
        ));
        self.replay_from_beginning(&table);
        has_added
    }

    /// Runs `walpost init`. If `init` reports a child table, moves its rows into the outbox and
    /// ends the inheritance.
    fn init_and_follow(&mut self) -> bool {
        let init = self.superuser_command(&["init"], &[]);
        let error = init
            .stderr
            .lines()
            .find(|line| line.contains(" NO INHERIT "));
        let Some((_, rest)) = error.and_then(|line| line.split_once(": ALTER TABLE ")) else {
            return init.code == Some(0);
        };
        let (child, rest) = rest.split_once(" NO INHERIT ").expect("two tables");
        let outbox = rest
            .split(' ')
            .next()
            .expect("a table")
            .trim_end_matches('.');
        let after = self.end_of_wal();
        let has_moved = self.sql(&format!(
            "BEGIN; INSERT INTO {outbox} SELECT * FROM ONLY {child}; ALTER TABLE {child} NO INHERIT {outbox}; COMMIT"
        ));
        if has_moved {
            self.move_child_events(child, outbox, after);
        }
        has_moved
    }

    /// Records that the child table's events are now in the outbox. Their rows were inserted into
    /// the outbox after the WAL position `after`.
    fn move_child_events(&mut self, child: &str, outbox: &str, after: u64) {
        let (era, by) = (self.era, self.end_of_wal());
        for event in self
            .written
            .values_mut()
            .filter(|event| event.table == child)
        {
            *event = WrittenEvent {
                table: outbox.to_owned(),
                era,
                after,
                by,
                is_certain: event.is_certain,
            };
        }
    }

    /// Replays the rows that `walpost checkpoint adopt` lists in its preview. The error that halted
    /// the pipeline does not mention these rows if the slot was moved again after the halt.
    fn replay_previewed(&mut self) -> bool {
        let preview = self.command(&["checkpoint", "adopt"], &[]);
        let lines: Vec<_> = preview.stdout.lines().map(str::to_owned).collect();
        lines.iter().all(|line| self.replay_reported(line))
    }

    fn replay(&mut self, line: &str, which: &str) -> bool {
        let mut arguments = vec![which, "--yes"];
        let table = line.contains("--table ").then(|| {
            let word = word_after(line, "--table ");
            word.trim_matches(['.', ';', ',', '\'']).to_owned()
        });
        if let Some(table) = &table {
            arguments.extend(["--table", table]);
        }
        self.command(&["replay"], &arguments).code == Some(0)
    }

    /// Replays the rows that a line reports as possibly missing, selecting them by the time at
    /// which they were written. Returns false if the replay fails.
    fn replay_reported(&mut self, line: &str) -> bool {
        self.collect_background();
        let Some(evidence) = Evidence::parse(line, self.era, self.end_of_wal()) else {
            return true;
        };
        let mut has_succeeded = true;
        for table in TABLES {
            let named = |event: &WrittenEvent| event.table == table && evidence.names(event);
            let ids = self.written.iter().filter(|(_, event)| named(event));
            let ids: Vec<_> = ids.map(|(id, _)| format!("'{id}'")).collect();
            let times = self.fixture.db.try_rows(&format!(
                "SELECT min(created_at), max(created_at) FROM {table} WHERE id = ANY (ARRAY[{}]::uuid[])",
                ids.join(", ")
            ));
            let times = times.ok().and_then(|rows| rows.into_iter().next());
            if let Some([Some(first), Some(last)]) = times.as_deref() {
                has_succeeded &= self.replay_between(table, first, Some(last));
            }
        }
        has_succeeded
    }

    /// Replays every row of the table that was written since this random walk began.
    fn replay_from_beginning(&mut self, table: &str) {
        let started_at = self.started_at().to_owned();
        self.replay_between(table, &started_at, None);
    }

    /// Replays the rows of a table written between two times. Returns false only if the replay
    /// fails; does nothing if the definition does not include the table.
    fn replay_between(&mut self, table: &str, first: &str, last: Option<&str>) -> bool {
        let [first, last] = [Some(first), last].map(|time| time.map(|time| time.replace(' ', "T")));
        let mut arguments = vec!["--yes"];
        for (flag, value) in [("--from", first.as_deref()), ("--to", last.as_deref())] {
            arguments.extend(value.map(|value| [flag, value]).into_iter().flatten());
        }
        match self.is_single() {
            true if table != TABLES[0] => return true,
            true => {}
            false => arguments.extend(["--table", table]),
        }
        let replay = self.command(&["replay"], &arguments);
        matches!(replay.code, Some(0 | 2))
    }

    fn is_single(&self) -> bool {
        self.definition.is_single()
    }
}
