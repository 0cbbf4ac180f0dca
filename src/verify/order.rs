//! Checks the order of records within partitions, and searches transactions for gaps.

use std::io;
use std::ops::RangeInclusive;

use super::Reporter;
use super::context::VerifyContext;
use super::entry::{Entry, EntryKind, Indexed};
use super::matching::RecordSet;
use super::report::Finding;
use super::spill::{Contents, Journal, Spill, hash};
use crate::model::lsn::{Lsn, Position};

/// Maximum number of gaps that are reported for a transaction.
const REPORTED_GAPS_MAX: usize = 20;

/// A description of a `Spill` that contains the events of transactions.
const TRANSACTIONS: Contents = Contents {
    group: "the events of a single transaction",
    entry_overhead_bytes: 64,
};

/// Checks whether the records in `journal`, which are in the order in which they were read, are in
/// commit order. `firsts` contains the first record of each event in the table. Only these records
/// are checked, because the origin of other records is unknown.
pub(super) fn check_order(
    journal: Journal,
    firsts: &RecordSet,
    memory: u64,
    context: &VerifyContext,
    reporter: &mut Reporter<'_>,
) -> io::Result<()> {
    let mut highest: Vec<Option<Position>> = vec![None; context.places.len()];
    let mut transactions = Spill::new(memory, TRANSACTIONS);
    journal.read(|bytes| {
        let entry = Entry::decode(bytes)?;
        let EntryKind::Record(record) = entry.kind else {
            return Ok(());
        };
        let Some(position) = record.position else {
            return Ok(());
        };
        let is_known = firsts.contains(record.number);
        let range = &context.complete_range;
        let is_complete = position.commit > range.after && position.commit < range.before;
        if is_complete && !context.copies.contains(&position.commit) {
            let indexed = Indexed { position, is_known };
            transactions.push(hash_of_commit(position.commit), &indexed.encode())?;
        }
        let highest = &mut highest[record.place as usize];
        match *highest {
            _ if !is_known => Ok(()),
            Some(behind) if position < behind => {
                reporter.counts.out_of_order += 1;
                reporter.add_finding(Finding::OutOfOrder {
                    id: String::from_utf8_lossy(entry.id).into_owned(),
                    at: context.location(&record),
                    position,
                    behind,
                })
            }
            _ => {
                *highest = Some(position);
                Ok(())
            }
        }
    })?;
    report_gaps(transactions, reporter)
}

fn hash_of_commit(commit: Lsn) -> u64 {
    hash(&commit.0.to_be_bytes())
}

/// Reports transactions with missing events.
fn report_gaps(transactions: Spill, reporter: &mut Reporter<'_>) -> io::Result<()> {
    let hash_of = |bytes: &[u8]| {
        Indexed::decode(bytes).map_or(0, |event| hash_of_commit(event.position.commit))
    };
    transactions.read(hash_of, |portion| {
        let mut events: Vec<_> = portion
            .iter()
            .map(|bytes| Indexed::decode(bytes))
            .collect::<io::Result<_>>()?;
        events.sort_unstable();
        let same = |one: &Indexed, other: &Indexed| one.position.commit == other.position.commit;
        for transaction in events.chunk_by(same) {
            if !transaction.iter().any(|event| event.is_known) {
                continue;
            }
            let missing = missing_ranges(transaction.iter().map(|event| event.position.index));
            if let Some(event) = transaction.first().filter(|_| !missing.is_empty()) {
                reporter.counts.gaps += 1;
                let commit = event.position.commit;
                reporter.add_finding(Finding::Gap { commit, missing })?;
            }
        }
        Ok(())
    })
}

/// Returns the missing ranges in a sequence that should contain every number from zero to its last
/// number. `numbers` must be in ascending order.
fn missing_ranges(numbers: impl Iterator<Item = u64>) -> Vec<RangeInclusive<u64>> {
    let mut next = 0;
    let mut missing = Vec::new();
    for number in numbers {
        if number > next && missing.len() < REPORTED_GAPS_MAX {
            missing.push(next..=number - 1);
        }
        next = next.max(number.saturating_add(1));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_numbers_missing_from_a_sequence() {
        let missing = |numbers: &[u64]| missing_ranges(numbers.iter().copied());
        assert_eq!(missing(&[]), []);
        assert_eq!(missing(&[0, 1, 1, 2]), []);
        assert_eq!(missing(&[1]), [0..=0]);
        assert_eq!(missing(&[0, 3, 3, 5]), [1..=2, 4..=4]);
        assert_eq!(missing(&[u64::MAX]), [0..=u64::MAX - 1]);
        let odd: Vec<_> = (0..30).map(|number| 2 * number + 1).collect();
        assert_eq!(
            missing(&odd).len(),
            REPORTED_GAPS_MAX,
            "further gaps are not reported"
        );
    }
}
