//! The names of relations other than the outbox, for use in log messages, errors and journal
//! entries.

use std::collections::HashMap;

/// Maximum number of names to keep. When another name would exceed this limit, all names kept so
/// far are discarded. The limit is needed because a server can describe any number of tables.
const NAMES_MAX: usize = 10_000;

/// The names of relations other than the outbox, by OID. These include the outbox's partitions: the
/// stream describes them too, although it sends their rows under the root table's OID.
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
    fn keeps_only_the_most_recent_table_names_up_to_a_limit() {
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
