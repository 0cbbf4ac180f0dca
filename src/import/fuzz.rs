//! Fuzz target that imports arbitrary connector configurations.

/// Imports `data` as the configuration of a connector. If `data` contains a NUL character, the text
/// after it is the configuration of the connector's worker.
///
/// # Panics
/// Panics if the result is not valid TOML, or if it contains characters that could control a
/// terminal.
pub fn import(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let (connector, worker) = match text.split_once('\0') {
        Some((connector, worker)) => (connector, Some(worker)),
        None => (text, None),
    };
    let Ok(imported) = super::debezium(connector, worker) else {
        return;
    };
    let toml = imported.toml;
    let parsed: Result<toml::Table, _> = toml.parse();
    assert!(parsed.is_ok(), "{parsed:?}: {toml}");
    let is_unsafe = |c: char| c.is_control() && c != '\n';
    assert!(!toml.contains(is_unsafe), "{toml:?}");
}
