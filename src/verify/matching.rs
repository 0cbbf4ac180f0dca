//! Matches the rows and records of each event to find events that are missing, repeated, misplaced
//! or unexpected.

use std::io;

use super::Reporter;
use super::context::{End, VerifyContext};
use super::entry::{Entry, EntryKind, Record, Row};
use super::report::Finding;
use super::spill::{Contents, Spill, hash};

/// Maximum number of locations that are reported for a repeated event.
const REPORTED_LOCATIONS_MAX: usize = 5;

/// A description of a `Spill` that contains the rows and records of events.
pub(super) const EVENTS: Contents = Contents {
    group: "the rows and records that share an event ID",
    entry_overhead_bytes: 128,
};

/// One bit for each record, indexed by the record's number.
#[derive(Default)]
pub(super) struct RecordSet {
    words: Vec<u64>,
}

impl RecordSet {
    pub(super) fn new(count: u64) -> Self {
        let words = usize::try_from(count.div_ceil(64)).unwrap_or(usize::MAX);
        Self {
            words: vec![0; words],
        }
    }

    pub(super) fn set(&mut self, number: u64) {
        if let Some(word) = self
            .word_index(number)
            .and_then(|at| self.words.get_mut(at))
        {
            *word |= 1 << (number % 64);
        }
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        let word = self.word_index(number).and_then(|at| self.words.get(at));
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    fn word_index(&self, number: u64) -> Option<usize> {
        usize::try_from(number / 64).ok()
    }
}

/// Returns the hash of the event's ID. A `Spill` processes entries with the same hash together.
pub(super) fn part_hash(entry: &[u8]) -> u64 {
    Entry::decode(entry).map_or(0, |entry| hash(entry.id))
}

/// Matches rows with records. Returns the set of the first records of all events, which are the
/// records that must be in order.
pub(super) fn match_entries(
    entries: Spill,
    records: u64,
    context: &VerifyContext,
    reporter: &mut Reporter<'_>,
) -> io::Result<RecordSet> {
    let mut firsts = RecordSet::new(records);
    entries.read(part_hash, |portion| {
        let mut entries: Vec<_> = portion
            .iter()
            .map(|bytes| Entry::decode(bytes))
            .collect::<io::Result<_>>()?;
        entries.sort_unstable_by_key(|entry| (entry.id, order(&entry.kind)));
        for same in entries.chunk_by(|one, other| one.id == other.id) {
            let event = Event::from_entries(same);
            event.report(context, reporter, &mut firsts)?;
        }
        Ok(())
    })?;
    Ok(firsts)
}

/// Returns a sort key that puts rows first, followed by records in the order in which they were
/// read.
fn order(kind: &EntryKind) -> (bool, u64) {
    match kind {
        EntryKind::Row(_) => (false, 0),
        EntryKind::Record(record) => (true, record.number),
    }
}

/// All rows and records of one event.
struct Event<'e> {
    id: &'e [u8],
    /// The rows of the event, which can be several if the table allows duplicate IDs.
    rows: Vec<Row>,
    /// The records that were not sent by a replay.
    records: Vec<Record>,
    replays: u64,
}

impl<'e> Event<'e> {
    fn from_entries(entries: &[Entry<'e>]) -> Self {
        let mut event = Self {
            id: entries.first().map_or(b"", |entry| entry.id),
            rows: Vec::new(),
            records: Vec::new(),
            replays: 0,
        };
        for entry in entries {
            match entry.kind {
                EntryKind::Row(row) => event.rows.push(row),
                EntryKind::Record(record) if record.is_replay => event.replays += 1,
                EntryKind::Record(record) => event.records.push(record),
            }
        }
        event
    }

    fn name(&self) -> String {
        String::from_utf8_lossy(self.id).into_owned()
    }

    fn report(
        &self,
        context: &VerifyContext,
        reporter: &mut Reporter<'_>,
        firsts: &mut RecordSet,
    ) -> io::Result<()> {
        reporter.counts.replayed += self.replays;
        if self.rows.is_empty() {
            return self.report_unexpected(context, reporter);
        }
        let copies = self.records.len();
        for record in self.records.iter().take(self.rows.len()) {
            firsts.set(record.number);
        }
        if copies > self.rows.len() {
            self.report_repeated(context, reporter)?;
        }
        let delivered = match self.replays {
            0 => copies.min(self.rows.len()),
            _ => self.rows.len(),
        };
        reporter.counts.delivered += delivered as u64;
        // If several rows have the same ID but not all of them were delivered, it is impossible to
        // tell which of the rows were delivered. In that case, report the last rows as undelivered.
        for row in &self.rows[delivered..] {
            self.report_undelivered(row, context, reporter)?;
        }
        for record in &self.records {
            self.report_misplaced(record, context, reporter)?;
        }
        Ok(())
    }

    fn report_unexpected(
        &self,
        context: &VerifyContext,
        reporter: &mut Reporter<'_>,
    ) -> io::Result<()> {
        let Some(first) = self.records.first() else {
            return Ok(());
        };
        let is_newer = |record: &Record| {
            let snapshot_lsn = context.snapshot_before;
            record
                .position
                .is_some_and(|position| position.commit >= snapshot_lsn)
        };
        if context.is_range {
            reporter.counts.outside += 1;
            return Ok(());
        }
        if is_newer(first) {
            reporter.counts.newer += 1;
            return Ok(());
        }
        reporter.counts.unexpected += 1;
        if self.records.len() > 1 {
            self.report_repeated(context, reporter)?;
        }
        reporter.unexpected(|| Finding::Unexpected {
            id: Some(self.name()),
            at: context.location(first),
        })
    }

    fn report_repeated(
        &self,
        context: &VerifyContext,
        reporter: &mut Reporter<'_>,
    ) -> io::Result<()> {
        reporter.counts.repeated += 1;
        let first = self.records.iter().take(REPORTED_LOCATIONS_MAX);
        reporter.add_finding(Finding::Repeated {
            id: self.name(),
            copies: self.records.len(),
            at: first.map(|record| context.location(record)).collect(),
        })
    }

    fn report_undelivered(
        &self,
        row: &Row,
        context: &VerifyContext,
        reporter: &mut Reporter<'_>,
    ) -> io::Result<()> {
        if context.dead_letters.contains(self.id) {
            reporter.counts.dead_letters += 1;
            return reporter.add_finding(Finding::DeadLetter {
                id: self.name(),
                topic: context.dead_letters.topic.clone(),
            });
        }
        let topic = context.topic(row.topic);
        match (&context.delivered, topic.is_hidden) {
            (End::NotReached, _) | (End::Reached, true) => {
                reporter.counts.pending += 1;
                return Ok(());
            }
            (End::Reached, false) => {}
        }
        // A record is produced after its row is created. Therefore, if the row was created before
        // the oldest remaining record was produced, the row's record may have expired.
        let may_have_expired = match (row.created, topic.expired_before) {
            (Some(created), Some(expired_before)) => created < expired_before,
            _ => false,
        };
        if may_have_expired {
            reporter.counts.expired += 1;
            return Ok(());
        }
        reporter.counts.missing += 1;
        reporter.add_finding(Finding::Missing {
            id: self.name(),
            topic: topic.name.clone(),
        })
    }

    fn report_misplaced(
        &self,
        record: &Record,
        context: &VerifyContext,
        reporter: &mut Reporter<'_>,
    ) -> io::Result<()> {
        let place = context.place(record.place);
        let differs = |row: &Row| {
            if row.topic != place.topic {
                Some("topic")
            } else if row.key != record.key {
                Some("key")
            } else if row
                .partition
                .is_some_and(|partition| partition != place.partition)
            {
                Some("partition")
            } else {
                None
            }
        };
        // A record that matches any of the rows is correct. If the record matches no row, the first
        // row determines the expected location.
        let Some(differs) = self
            .rows
            .iter()
            .map(differs)
            .reduce(|first, other| other.and(first))
            .flatten()
        else {
            return Ok(());
        };
        reporter.counts.misplaced += 1;
        reporter.add_finding(Finding::Misplaced {
            id: self.name(),
            at: context.location(record),
            topic: context.topic(self.rows[0].topic).name.clone(),
            differs,
        })
    }
}
