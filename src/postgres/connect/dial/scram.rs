//! Checks what a server requests of the client in SCRAM. postgres-protocol computes the proof;
//! requests that it would accept unchecked are rejected here first.
//!
//! Spec: RFC 5802, 5.1 and 7; RFC 7677, 4.

use crate::postgres::connect::conninfo::exposure::Exposure;

/// Each iteration costs the client two hashes before the server has proven anything.
/// postgres-protocol has the same limit.
const ITERATIONS_MAX: u32 = 100_000;

/// With fewer iterations, the requester can test passwords against the proof faster than intended.
const ITERATIONS_MIN: u32 = 4096;

/// Returns what is wrong with the server's first message, which answers `initial`. Returns `None`
/// if nothing is wrong, or if the message can't be parsed; the latter is detected when the message
/// is used.
pub(crate) fn check_first_message(
    initial: &[u8],
    answer: &[u8],
    exposure: Exposure,
) -> Option<String> {
    let text = std::str::from_utf8(answer).ok()?;
    let mut members = text.split(',');
    let mut member = |name: &str| members.next()?.strip_prefix(name);
    let (nonce, salt, iterations) = (member("r=")?, member("s=")?, member("i=")?);
    let own = std::str::from_utf8(initial).ok()?.rsplit_once("r=")?.1;
    // Otherwise an earlier proof that was intercepted could be replayed.
    if nonce == own {
        return Some("the server's nonce adds nothing to the client's".to_owned());
    }
    // Otherwise a single precomputed table of passwords would work against all users.
    if salt.is_empty() {
        return Some("the server's salt is empty".to_owned());
    }
    let iterations: u64 = iterations.parse().ok()?;
    if iterations == 0 || iterations > u64::from(ITERATIONS_MAX) {
        return Some(format!(
            "the server asks for {iterations} iterations, expected 1 to {ITERATIONS_MAX}. Lower \
             scram_iterations there, and set the password again"
        ));
    }
    if iterations < u64::from(ITERATIONS_MIN) && exposure.is_open() {
        return Some(format!(
            "the server asks for {iterations} iterations, expected at least {ITERATIONS_MIN}, for the connection \
             {}. Raise scram_iterations there and set the password again. Or: {}",
            exposure.fault(),
            exposure.remedy()
        ));
    }
    None
}
