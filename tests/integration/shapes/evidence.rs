//! Output lines in which Walpost reports that events may be missing.

use crate::support::lsn::parse_lsn;

use super::events::WrittenEvent;
use super::walk::Walk;

/// Phrases that mark a line as a report of undelivered events.
const UNDELIVERED_PHRASES: [&str; 7] = [
    "may be missing",
    "may exist only in the table",
    "are not delivered",
    "is set aside",
    "was set aside",
    "was left out",
    "walpost skip --to",
];

/// Phrases that mark a line as a report that the database's history has diverged, in which case any
/// event may be missing.
const HISTORY_PHRASES: [&str; 5] = [
    "has diverged from the delivered WAL",
    "a different history",
    "restored to an earlier state",
    "which of its events are in Kafka",
    "which does not descend from it",
];

/// An output line that tells an operator which events may be missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Evidence {
    pub(super) line: String,
    pub(super) era: u32,
    /// The end of WAL at the time when the test read this line from Walpost's output.
    pub(super) now: u64,
    from: Option<u64>,
    to: Option<u64>,
    /// The tables that the line mentions; if empty, the line applies to every table.
    tables: Vec<String>,
}

impl Evidence {
    /// Parses a line, or returns `None` if it does not report missing events.
    pub(super) fn parse(line: &str, era: u32, now: u64) -> Option<Self> {
        let is_about_all = HISTORY_PHRASES.iter().any(|phrase| line.contains(phrase));
        if !is_about_all
            && !UNDELIVERED_PHRASES
                .iter()
                .any(|phrase| line.contains(phrase))
        {
            return None;
        }
        let lsn_after = |word: &str| {
            let mut places = line.match_indices(word);
            places.find_map(|(at, _)| lsn_at(&line[at + word.len()..]))
        };
        let from = lsn_after("after ").or_else(|| lsn_after("between "));
        let to = lsn_after("before ").or_else(|| lsn_after("and "));
        let skipped = lsn_after("skip --to ").filter(|_| from.is_none() && to.is_none());
        let from = from.or(skipped);
        let to = to.or(skipped.map(|lsn| lsn + 1));
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let words = line.split(|c| !is_part(c));
        let words = words.map(|word| word.trim_end_matches('.'));
        let tables = words.filter(|word| word.starts_with("tenant_") && word.contains('.'));
        let tables = match is_about_all {
            true => Vec::new(),
            false => tables.map(str::to_owned).collect(),
        };
        Some(Self {
            line: line.to_owned(),
            era,
            now,
            from: from.filter(|_| !is_about_all),
            to: to.filter(|_| !is_about_all),
            tables,
        })
    }

    /// Returns whether the given event is one of those that the line reports as possibly missing.
    pub(super) fn names(&self, event: &WrittenEvent) -> bool {
        let is_its_table =
            self.tables.is_empty() || self.tables.iter().any(|name| is_name_of(name, event));
        let is_in_range = match event.era == self.era {
            true => event.by > self.from.unwrap_or(0) && event.after < self.to.unwrap_or(self.now),
            false => event.era < self.era && self.from.is_none(),
        };
        is_its_table && is_in_range
    }
}

/// Returns whether `name` is, or may have been, the name of the event's table.
fn is_name_of(name: &str, event: &WrittenEvent) -> bool {
    let schema = |name: &str| name.split('.').next().map(str::to_owned);
    let is_former = [".old_", ".renamed_"]
        .iter()
        .any(|mark| name.contains(mark));
    name == event.table || is_former && schema(name) == schema(&event.table)
}

/// Parses the LSN at the beginning of `text`.
fn lsn_at(text: &str) -> Option<u64> {
    let is_part = |c: char| c.is_ascii_hexdigit() || c == '/';
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    let lsn = &text[..end];
    let (high, low) = lsn.split_once('/')?;
    (!high.is_empty() && !low.is_empty()).then(|| parse_lsn(lsn))
}

impl Walk<'_> {
    pub(super) fn collect_evidence(&mut self, text: &str) {
        let era = self.era;
        let now = self.end_of_wal();
        let new = text
            .lines()
            .filter_map(|line| Evidence::parse(line, era, now));
        let new: Vec<_> = new.collect();
        self.evidence.extend(new);
    }

    pub(super) fn end_of_wal(&self) -> u64 {
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";
        let rows = self.fixture.db.try_rows(sql).unwrap_or_default();
        let value = rows.first().and_then(|row| row.first().cloned().flatten());
        value.and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
    }
}
