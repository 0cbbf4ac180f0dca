//! Generates names that are unique to a test.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns a shortened form of the test's name with a number, valid as the name of a database, a
/// slot or a topic.
pub(crate) fn unique_name() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let thread = std::thread::current();
    let path = thread.name().unwrap_or("main");
    let (_, test) = path.split_once("::").unwrap_or(("", path));
    let short: String = test
        .replace("::", "_")
        .chars()
        .filter(|c| c.is_ascii_lowercase() || *c == '_' || c.is_ascii_digit())
        .take(32)
        .collect();
    format!("t{number}_{}", short.trim_end_matches('_'))
}
