//! Limits on data in flight, in records and bytes.

/// A number of records and a number of bytes: either the amount of data in flight (that is, read
/// but not durable yet), or a limit on that amount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    pub records: u64,
    /// Total size of the keys, values and headers in bytes, including a fixed overhead for each
    /// record and header.
    pub bytes: u64,
}

impl Window {
    /// Applies `change` to the number of records and to the number of bytes.
    pub(crate) fn map(self, change: impl Fn(u64) -> u64) -> Self {
        Self {
            records: change(self.records),
            bytes: change(self.bytes),
        }
    }

    pub(crate) fn minus(self, other: Self) -> Self {
        Self {
            records: self.records - other.records,
            bytes: self.bytes - other.bytes,
        }
    }

    pub(crate) fn is_within(self, other: Self) -> bool {
        self.records <= other.records && self.bytes <= other.bytes
    }
}
