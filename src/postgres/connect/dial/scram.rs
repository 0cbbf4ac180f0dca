//! Validates a server's first SCRAM message. postgres-protocol, which computes the proof, would
//! accept some unsafe messages, so this module rejects them first.
//!
//! Spec: RFC 5802, 5.1 and 7; RFC 7677, 4.

use crate::postgres::connect::conninfo::exposure::Exposure;

/// Maximum number of iterations. The client computes two hashes per iteration before the server has
/// proven its identity, so an attacker could otherwise keep the client busy. postgres-protocol has
/// the same limit.
const ITERATIONS_MAX: u32 = 100_000;

/// Minimum number of iterations. With fewer, an attacker who obtains the proof could guess the
/// password faster than intended.
const ITERATIONS_MIN: u32 = 4096;

/// Returns the reason to reject `answer`, the server's first message, which is a reply to the
/// client's message `initial`. Returns `None` if the message is acceptable, or if it can't be
/// parsed, which postgres-protocol detects.
pub(crate) fn check_first_message(
    initial: &[u8],
    answer: &[u8],
    exposure: Exposure,
) -> Option<String> {
    let text = std::str::from_utf8(answer).ok()?;
    let mut members = text.split(',');
    let mut member = |name: &str| members.next()?.strip_prefix(name);
    let (nonce, salt, iterations) = (member("r=")?, member("s=")?, member("i=")?);
    // Split the message into attributes before searching for "r=", because the nonce itself can
    // contain this text.
    let mut attributes = std::str::from_utf8(initial).ok()?.split(',');
    let own = attributes.find_map(|attribute| attribute.strip_prefix("r="))?;
    // If the server adds nothing to the client's nonce, an attacker could replay an intercepted
    // proof.
    if nonce == own {
        return Some("the server's nonce is the same as the client's".to_owned());
    }
    // Without a salt, an attacker could use the same precomputed table of passwords against all
    // users.
    if salt.is_empty() {
        return Some("the server's salt is empty".to_owned());
    }
    let iterations: u64 = iterations.parse().ok()?;
    if iterations == 0 || iterations > u64::from(ITERATIONS_MAX) {
        return Some(format!(
            "the server requests {iterations} iterations, expected 1 to {ITERATIONS_MAX}. Lower \
             scram_iterations on the server, and set the password again"
        ));
    }
    if iterations < u64::from(ITERATIONS_MIN) && exposure.is_open() {
        return Some(format!(
            "the server requests {iterations} iterations, expected at least {ITERATIONS_MIN}, because \
             {}. Raise scram_iterations on the server and set the password again. Alternatively: {}",
            exposure.fault("the connection"),
            exposure.remedy()
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_a_server_nonce_that_only_repeats_the_client_nonce() {
        for nonce in ["fyko+d2l", "ar=b", "r=", "r=r=b"] {
            let initial = format!("n,,n=,r={nonce}");
            let check = |sent: &str| {
                let answer = format!("r={sent},s=c2FsdA==,i=4096");
                check_first_message(initial.as_bytes(), answer.as_bytes(), Exposure::Proven)
            };
            let reason = check(nonce).unwrap_or_default();
            assert!(reason.contains("nonce"), "{nonce}: {reason:?}");
            assert_eq!(check(&format!("{nonce}more")), None, "{nonce}");
        }
    }
}
