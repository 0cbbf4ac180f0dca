//! Broker error codes that librdkafka's enumeration does not contain.
//!
//! rdkafka reads librdkafka's codes as a Rust enum, and reading a number outside that enum is
//! undefined behavior. Brokers may return any 16-bit number: newer brokers have codes that
//! librdkafka does not list, and a malicious broker can return any number. Therefore, the binary
//! passes every code through [`replace_unknown`] before Rust code reads it: see `error_codes` in
//! src/main.rs.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use rdkafka::types::RDKafkaRespErr;
use tracing::warn;

/// Apache Kafka's `UNKNOWN_SERVER_ERROR`, which replaces unknown codes.
const UNKNOWN: c_int = RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN as c_int;
/// Maximum number of distinct codes that are logged. Each code is logged once.
const LOGGED_CODES_MAX: usize = 100;

static LOGGED_CODES: Mutex<BTreeSet<c_int>> = Mutex::new(BTreeSet::new());

thread_local! {
    static LAST: Cell<Option<c_int>> = const { Cell::new(None) };
}

/// Returns `code` if librdkafka's enumeration contains it, and `UNKNOWN_SERVER_ERROR` otherwise.
#[must_use]
pub fn replace_unknown(code: c_int) -> c_int {
    if code == 0 || RDKafkaRespErr::try_from(code).is_ok() {
        return code;
    }
    // Accessing the thread-local value fails only if the thread is exiting.
    let _ = LAST.try_with(|last| last.set(Some(code)));
    let mut logged = LOGGED_CODES.lock().unwrap_or_else(PoisonError::into_inner);
    let is_new = logged.len() < LOGGED_CODES_MAX && logged.insert(code);
    drop(logged);
    if is_new {
        warn!(
            code,
            "a broker returned an error code that librdkafka does not define; treating it as UNKNOWN_SERVER_ERROR"
        );
    }
    UNKNOWN
}

/// Returns the last error code that was replaced on this thread, as the broker returned it, and
/// clears the stored value.
pub(super) fn take_last() -> Option<c_int> {
    LAST.take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_unrecognized_error_codes_to_unknown() {
        for code in [0, -1, 3, 87, -195] {
            assert_eq!(replace_unknown(code), code);
        }
        assert_eq!(take_last(), None);
        for code in [98, 120, 500, 9999, i32::from(i16::MIN), i32::MAX] {
            assert_eq!(replace_unknown(code), UNKNOWN);
            assert_eq!(take_last(), Some(code));
            assert_eq!(take_last(), None);
        }
    }
}
