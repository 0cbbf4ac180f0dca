//! What a server may ask of the client's side of SCRAM. postgres-protocol makes the proof; what it
//! takes without a look is refused here before.
//!
//! Spec: RFC 5802, 5.1 and 7; RFC 7677, 4.

use crate::postgres::connect::conninfo::exposure::Exposure;

/// Each costs the client two hashes, before the server has proven anything. postgres-protocol has the
/// same bound.
const ITERATIONS_MAX: u32 = 100_000;

/// With fewer, whoever asks can try passwords against the proof faster than is meant.
const ITERATIONS_MIN: u32 = 4096;

/// What is wrong with the server's first message, the answer to `initial`; None where nothing is, or
/// where it can't be read, which is found when it is used.
pub(crate) fn trouble(initial: &[u8], answer: &[u8], exposure: Exposure) -> Option<String> {
    let text = std::str::from_utf8(answer).ok()?;
    let mut members = text.split(',');
    let mut member = |name: &str| members.next()?.strip_prefix(name);
    let (nonce, salt, iterations) = (member("r=")?, member("s=")?, member("i=")?);
    let own = std::str::from_utf8(initial).ok()?.rsplit_once("r=")?.1;
    // Otherwise a proof that was heard before could be used again.
    if nonce == own {
        return Some("the server's nonce adds nothing to the client's".to_owned());
    }
    // Otherwise one table of passwords would do for everybody.
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
