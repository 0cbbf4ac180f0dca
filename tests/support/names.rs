//! Names that are unique to a test.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns the test's name, shortened and with a number appended. It is valid for a database, a
/// slot and a topic.
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
