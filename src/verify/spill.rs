//! Stores entries that may not fit into memory. Entries are partitioned by hash, and are kept in
//! memory until a limit is reached, and on disk after that. The temporary files have no names, so
//! no files remain after the process has terminated, even if it crashed.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};

use tempfile::SpooledTempFile;

use crate::file_error;

/// Maximum number of files. Each file uses a descriptor once it is on disk.
const FILES_MAX: usize = 64;
/// Minimum size of the portions in which entries are processed. The stored entries are read again
/// for each portion, so larger portions require fewer reads.
const PORTION_BYTES_MIN: u64 = 1 << 20;
const PORTION_BYTES_MAX: u64 = 1 << 30;
/// Entries with the same hash are processed together, and can use at least this much memory even if
/// the memory limit is lower, because a transaction can have millions of events.
const GROUP_BYTES_MIN: u64 = 512 << 20;

/// Returns an evenly distributed hash. Equal bytes have the same hash as long as the process runs.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// A sequence of entries.
pub(super) struct Journal {
    file: BufWriter<SpooledTempFile>,
    bytes: u64,
    entries: u64,
}

impl Journal {
    /// Creates a journal that is written to disk if it exceeds `memory` bytes.
    pub(super) fn new(memory: u64) -> Self {
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        Self {
            file: BufWriter::new(SpooledTempFile::new(memory)),
            bytes: 0,
            entries: 0,
        }
    }

    pub(super) fn push(&mut self, entry: &[u8]) -> io::Result<()> {
        let len = u32::try_from(entry.len()).map_err(io::Error::other)?;
        self.file
            .write_all(&len.to_ne_bytes())
            .and_then(|()| self.file.write_all(entry))
            .map_err(|error| with_folder(&error))?;
        self.bytes += u64::from(len);
        self.entries += 1;
        Ok(())
    }

    /// Calls `on_entry` with each entry, in the order in which the entries were added.
    pub(super) fn read(self, mut on_entry: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let entries = self.entries;
        read_through(&mut self.into_file()?, entries, &mut on_entry)
    }

    fn into_file(self) -> io::Result<SpooledTempFile> {
        self.file
            .into_inner()
            .map_err(|error| with_folder(error.error()))
    }
}

fn with_folder(error: &io::Error) -> io::Error {
    let folder = std::env::temp_dir();
    file_error::explained(&format!("temporary file in {}", folder.display()), error)
}

/// Reads the file of a [`Journal`] from the beginning.
fn read_through(
    file: &mut SpooledTempFile,
    entries: u64,
    on_entry: &mut impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    file.rewind()?;
    let mut file = BufReader::new(file);
    let mut entry = Vec::new();
    for _ in 0..entries {
        let mut len = [0; 4];
        file.read_exact(&mut len)?;
        entry.resize(u32::from_ne_bytes(len) as usize, 0);
        file.read_exact(&mut entry)?;
        on_entry(&entry)?;
    }
    Ok(())
}

/// Entries that are processed in any order, except that entries with the same hash are processed
/// together.
pub(super) struct Spill {
    parts: Vec<Journal>,
    portion_bytes: u64,
    contents: Contents,
}

/// A description of the entries in a [`Spill`].
#[derive(Clone, Copy)]
pub(super) struct Contents {
    /// A description of the entries that have the same hash, for use in an error message.
    pub(super) group: &'static str,
    /// The memory that an entry requires in addition to its bytes while it is being processed.
    pub(super) entry_overhead_bytes: u64,
}

impl Spill {
    /// Creates a `Spill` that uses `memory` bytes, half for stored entries and half for the entries
    /// being processed. A portion is split if it exceeds twice its intended size.
    pub(super) fn new(memory: u64, contents: Contents) -> Self {
        let part = memory / 2 / FILES_MAX as u64;
        Self {
            parts: (0..FILES_MAX).map(|_| Journal::new(part)).collect(),
            portion_bytes: (memory / 2).clamp(PORTION_BYTES_MIN, PORTION_BYTES_MAX),
            contents,
        }
    }

    pub(super) fn push(&mut self, hash: u64, entry: &[u8]) -> io::Result<()> {
        self.parts[part_index(hash)].push(entry)
    }

    /// Calls `on_portion` with all entries, divided into portions. Entries for which `hash_of`
    /// returns the same hash are in the same portion.
    ///
    /// # Errors
    /// Returns an error if the entries with one hash exceed the memory limit, if the temporary file
    /// can't be read, or if `on_portion` fails.
    pub(super) fn read(
        self,
        hash_of: impl Fn(&[u8]) -> u64,
        mut on_portion: impl FnMut(&[&[u8]]) -> io::Result<()>,
    ) -> io::Result<()> {
        let max_bytes = 2 * self.portion_bytes;
        let group_max_bytes = max_bytes.max(GROUP_BYTES_MIN);
        let Contents {
            group,
            entry_overhead_bytes,
        } = self.contents;
        for part in self.parts {
            let entries = part.entries;
            let size = part.bytes + entries * entry_overhead_bytes;
            let mut file = part.into_file()?;
            let count = size.div_ceil(self.portion_bytes);
            // Each portion is represented by a divisor and a remainder. The portion consists of the
            // entries whose hash has this remainder when it is divided by the divisor.
            let mut portions: Vec<_> = (0..count).map(|remainder| (count, remainder)).collect();
            while let Some((divisor, remainder)) = portions.pop() {
                let mut portion = Portion::default();
                read_through(&mut file, entries, &mut |entry| {
                    let hash = hash_of(entry);
                    if hash % divisor == remainder {
                        let max_bytes = match portion.contains_only(hash) {
                            true => group_max_bytes,
                            false => max_bytes,
                        };
                        portion.push(hash, entry, entry_overhead_bytes, max_bytes);
                    }
                    Ok(())
                })?;
                if !portion.is_full {
                    on_portion(&portion.entries())?;
                    continue;
                }
                let half = divisor
                    .checked_mul(2)
                    .filter(|_| portion.has_several_hashes);
                let Some(half) = half else {
                    return Err(io::Error::other(format!(
                        "{group} require more than {group_max_bytes} bytes of memory. Raise --memory"
                    )));
                };
                portions.extend([(half, remainder), (half, remainder + divisor)]);
            }
        }
        Ok(())
    }
}

/// The entries that are processed together.
#[derive(Default)]
struct Portion {
    bytes: Vec<u8>,
    lengths: Vec<usize>,
    /// The memory that the entries require.
    used_bytes: u64,
    /// Whether the entries in the portion exceed the portion's memory limit. Further entries are
    /// ignored.
    is_full: bool,
    first_hash: Option<u64>,
    has_several_hashes: bool,
}

impl Portion {
    /// Returns whether all entries in the portion have this hash.
    fn contains_only(&self, hash: u64) -> bool {
        !self.has_several_hashes && self.first_hash.is_none_or(|first| first == hash)
    }

    fn push(&mut self, hash: u64, entry: &[u8], overhead_bytes: u64, max_bytes: u64) {
        self.has_several_hashes = !self.contains_only(hash);
        self.first_hash = Some(hash);
        self.used_bytes += entry.len() as u64 + overhead_bytes;
        self.is_full |= self.used_bytes > max_bytes;
        if !self.is_full {
            self.bytes.extend_from_slice(entry);
            self.lengths.push(entry.len());
        }
    }

    fn entries(&self) -> Vec<&[u8]> {
        let mut rest = self.bytes.as_slice();
        let entries = self.lengths.iter().map(|len| {
            let (entry, remaining) = rest.split_at(*len);
            rest = remaining;
            entry
        });
        entries.collect()
    }
}

/// Returns the index in `Spill::parts` for a hash. The index consists of the upper bits, because
/// the lower bits determine to which portion of the part an entry belongs.
fn part_index(hash: u64) -> usize {
    // The result is less than `FILES_MAX`.
    usize::try_from(hash >> (u64::BITS - FILES_MAX.ilog2())).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    const CONTENTS: Contents = Contents {
        group: "the numbers",
        entry_overhead_bytes: 128,
    };

    fn numbers(entry: &[u8]) -> u64 {
        hash(&entry[..4])
    }

    /// Adds entries to a [`Spill`] with the given memory limit, and reads the entries back. Returns
    /// the entries and the number of portions in which they were read.
    fn through(memory: u64, count: u32) -> (BTreeMap<Vec<u8>, usize>, usize) {
        let mut spill = Spill::new(memory, CONTENTS);
        for copy in 0..2_u8 {
            for number in 0..count {
                let mut entry = number.to_ne_bytes().to_vec();
                entry.extend(std::iter::repeat_n(copy, 100));
                spill.push(numbers(&entry), &entry).expect("room");
            }
        }
        let (mut found, mut portions) = (BTreeMap::new(), 0);
        spill
            .read(numbers, |entries| {
                portions += 1;
                let mut copies = BTreeMap::<_, BTreeSet<_>>::new();
                for entry in entries {
                    *found.entry(entry.to_vec()).or_default() += 1;
                    copies.entry(&entry[..4]).or_default().insert(entry[4]);
                }
                assert!(copies.values().all(|both| both.len() == 2), "apart");
                Ok(())
            })
            .expect("readable");
        (found, portions)
    }

    #[test]
    fn returns_each_spilled_entry_exactly_once_and_groups_entries_by_hash() {
        let (in_memory, few) = through(1 << 30, 50_000);
        assert_eq!(in_memory.len(), 100_000);
        assert!(in_memory.values().all(|count| *count == 1));
        assert_eq!(few, FILES_MAX);
        // With a memory limit of zero, every entry is written to disk.
        let (on_disk, _) = through(0, 50_000);
        assert_eq!(on_disk, in_memory);
    }

    #[test]
    fn reads_spilled_entries_in_portions_if_they_exceed_the_memory_limit() {
        let mut spill = Spill::new(0, CONTENTS);
        let entry = |number: u32| [&number.to_ne_bytes()[..], &[7; 1000]].concat();
        // All entries have the same index in `parts`.
        let same = |entry: &[u8]| numbers(entry) >> 6;
        for number in 0..4000 {
            let entry = entry(number);
            spill.push(same(&entry), &entry).expect("room");
        }
        let (mut largest, mut all) = (0, 0);
        spill
            .read(same, |entries| {
                largest = largest.max(entries.len());
                all += entries.len();
                Ok(())
            })
            .expect("readable");
        assert_eq!(all, 4000);
        assert!(largest < 1500, "{largest}");
    }

    #[test]
    fn splits_a_portion_that_is_too_large_unless_all_its_entries_have_the_same_hash() {
        let read = |count: u32, overhead: u64, hash_of: fn(&[u8]) -> u64| {
            let contents = Contents {
                entry_overhead_bytes: overhead,
                ..CONTENTS
            };
            let mut spill = Spill::new(0, contents);
            for number in 0..count {
                let entry = [&number.to_ne_bytes()[..], &[7; 1000]].concat();
                spill.push(0, &entry).expect("room");
            }
            let (mut largest, mut all) = (0, 0);
            let read = spill.read(hash_of, |entries| {
                largest = largest.max(entries.len());
                all += entries.len();
                Ok(())
            });
            (
                read.map(|()| all).map_err(|error| error.to_string()),
                largest,
            )
        };
        // There are 8 hashes, and initially 5 portions. All hashes are multiples of 5 and of 64.
        let (all, largest) = read(4000, 128, |entry| numbers(entry) % 8 * 5 * 64);
        assert_eq!(all, Ok(4000));
        assert!((400..2000).contains(&largest), "{largest}");
        let (all, largest) = read(4000, 128, |_| 7);
        assert_eq!((all, largest), (Ok(4000), 4000));
        let (all, largest) = read(600, 1 << 20, |_| 7);
        let reason = "the numbers require more than 536870912 bytes of memory. Raise --memory";
        assert_eq!((all, largest), (Err(reason.to_owned()), 0));
    }

    #[test]
    fn journal_preserves_the_order_of_entries() {
        for memory in [0, 1 << 20] {
            let mut journal = Journal::new(memory);
            for number in 0..1000_u32 {
                let entry = number.to_ne_bytes();
                journal.push(&entry[..(number % 5) as usize]).expect("room");
            }
            let mut number = 0_u32;
            journal
                .read(|entry| {
                    assert_eq!(entry, &number.to_ne_bytes()[..(number % 5) as usize]);
                    number += 1;
                    Ok(())
                })
                .expect("readable");
            assert_eq!(number, 1000);
        }
    }
}
