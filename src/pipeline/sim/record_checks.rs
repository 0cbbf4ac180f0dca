//! Compares the delivered events with the committed and copied events.

use std::collections::BTreeSet;
use std::ops::Range;

/// Checks exactly-once delivery: the rows in `copies` must come first, in the order of their IDs,
/// followed by the remaining events in `expected`, in order.
pub(super) fn check_exactly_once(
    found: &[u64],
    expected: &[u64],
    copies: &[Vec<u64>],
) -> Result<(), String> {
    let copied: BTreeSet<u64> = copies.iter().flatten().copied().collect();
    let mut last = 0;
    let is_first = |id: &&u64| copied.contains(*id) && std::mem::replace(&mut last, **id) < **id;
    let first: Vec<u64> = found.iter().take_while(is_first).copied().collect();
    let rest = expected
        .iter()
        .filter(|id| first.binary_search(id).is_err());
    let whole: Vec<u64> = first.iter().chain(rest).copied().collect();
    match found == whole && whole.len() == expected.len() {
        true => Ok(()),
        false => Err(difference(found, &whole)),
    }
}

/// Checks at-least-once delivery: every event in `expected` must be delivered, and repeated events
/// must be in order and without gaps. Every copy must start at its first row, and must be followed
/// by the events that the copy does not contain. If a restore of the database undid some copies,
/// `undone` contains the range of these copies, and the number of events that precede the restored
/// slot's position, from which the stream continues.
pub(super) fn check_at_least_once(
    found: &[u64],
    expected: &[u64],
    mut copies: Vec<Vec<u64>>,
    undone: Option<(Range<usize>, usize)>,
) -> Result<(), String> {
    let begins_in_stream = copies.is_empty() || copies.iter().any(Vec::is_empty);
    // Add an empty copy. A stream that does not directly follow a real copy is treated as if it
    // followed this copy.
    let stream = copies.len();
    copies.push(Vec::new());
    // All points that delivery may have reached. A point consists of the index of a copy, and the
    // number of events delivered from this copy and from the stream that follows the copy.
    let mut positions: BTreeSet<(usize, usize)> = begins_in_stream
        .then_some((stream, 0))
        .into_iter()
        .collect();
    for id in found {
        let rank = expected.iter().position(|other| other == id);
        let rank = rank.ok_or_else(|| format!("event {id} was never committed"))?;
        let mut next = BTreeSet::new();
        for (copy, count) in positions {
            let rows = &copies[copy];
            if rows.get(count).or(expected.get(count)) == Some(id) {
                next.insert((copy, count + 1));
            }
            let follows_undone_copy = undone
                .as_ref()
                .is_some_and(|(copies, before)| copies.contains(&copy) && rank <= *before);
            if count >= rows.len() && rank <= count || follows_undone_copy {
                next.insert((stream, rank + 1));
            }
        }
        let begun = copies
            .iter()
            .enumerate()
            .filter(|(_, rows)| rows.first() == Some(id));
        next.extend(begun.map(|(copy, _)| (copy, 1)));
        if next.is_empty() {
            return Err(format!("event {id} was delivered out of order"));
        }
        positions = next;
    }
    let found: BTreeSet<&u64> = found.iter().collect();
    match expected.iter().find(|id| !found.contains(id)) {
        None => Ok(()),
        Some(id) => Err(format!("event {id} is missing")),
    }
}

fn difference(found: &[u64], expected: &[u64]) -> String {
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    let at = at.unwrap_or(found.len().min(expected.len()));
    let from = at.saturating_sub(2);
    let part = |ids: &[u64]| format!("{:?}", &ids[from.min(ids.len())..ids.len().min(at + 4)]);
    format!(
        "starting at record {from}, the partition contains {} instead of {}; it contains {} records instead of {}",
        part(found),
        part(expected),
        found.len(),
        expected.len()
    )
}
