//! Names of relations that are not the outbox, for log messages, errors and journal entries.

use std::collections::HashMap;

/// Maximum number of names. When it is reached, all names are removed, because a server can
/// describe any number of tables.
const NAMES_MAX: usize = 10_000;

/// The names of relations that are not the outbox, by OID. They include the partitions of the
/// outbox, which the stream also describes, although their rows have the OID of the root table.
#[derive(Default)]
pub(super) struct OtherTables(HashMap<u32, String>);

impl OtherTables {
    pub(super) fn insert(&mut self, oid: u32, name: String) {
        if self.0.len() >= NAMES_MAX && !self.0.contains_key(&oid) {
            self.0.clear();
        }
        self.0.insert(oid, name);
    }

    pub(super) fn name(&self, oid: u32) -> Option<&String> {
        self.0.get(&oid)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_number_of_names_and_keeps_the_latest() {
        let mut others = OtherTables::default();
        for oid in 0..100_000 {
            others.insert(oid, oid.to_string());
            assert!(others.0.len() <= NAMES_MAX);
            assert_eq!(others.name(oid), Some(&oid.to_string()));
        }
        others.insert(99_999, "renamed".to_owned());
        assert_eq!(others.name(99_999), Some(&"renamed".to_owned()));
    }
}
