//! How much may be in flight, in records and bytes.

/// How much may be between reading and durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    pub records: u64,
    /// Bytes, as a tag counts them.
    pub bytes: u64,
}

impl Window {
    /// Both parts, each changed in the same way.
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
