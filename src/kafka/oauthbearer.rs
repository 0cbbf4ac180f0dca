//! Sets a client's SASL/OAUTHBEARER token from any thread. rdkafka sets tokens only while rdkafka
//! itself polls the client. The functions are declared as in `src/rdkafka.h` of librdkafka 2.12.
#![expect(unsafe_code, reason = "calls librdkafka, which is a C library")]

use std::ffi::CString;

use rdkafka::bindings::{rd_kafka_oauthbearer_set_token, rd_kafka_oauthbearer_set_token_failure};
use rdkafka::client::{Client, ClientContext};
use rdkafka::error::RDKafkaErrorCode;

use super::token::{Token, now_millis};

/// Sets the token that the client uses to authenticate new connections. If a broker requires an
/// open connection to reauthenticate, librdkafka uses whichever token is current at that time.
///
/// Returns whether librdkafka accepts the token. A token is rejected if it has expired, or if the
/// client uses a different SASL mechanism. librdkafka's reason is not returned because it may
/// contain the token.
#[must_use]
pub(super) fn set_token<C: ClientContext>(client: &Client<C>, token: &Token) -> bool {
    let mut texts = vec![&token.value, &token.principal];
    for (name, value) in &token.extensions {
        texts.extend([name, value]);
    }
    let texts = texts.into_iter().map(|text| CString::new(text.as_str()));
    let Ok(texts) = texts.collect::<Result<Vec<_>, _>>() else {
        return false;
    };
    let mut pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
    let [value, principal, extensions @ ..] = &mut *pointers else {
        return false;
    };
    let mut reason = [0; 512];
    // SAFETY: the client is valid, and all strings live for the whole call, which copies them.
    let code = unsafe {
        rd_kafka_oauthbearer_set_token(
            client.native_ptr(),
            *value,
            token.librdkafka_expiry_millis(now_millis()),
            *principal,
            extensions.as_mut_ptr(),
            extensions.len(),
            reason.as_mut_ptr(),
            reason.len(),
        )
    };
    RDKafkaErrorCode::from(code) == RDKafkaErrorCode::NoError
}

/// Reports to the client that no token could be obtained. librdkafka requests another token after
/// ten seconds.
pub(super) fn fail_token<C: ClientContext>(client: &Client<C>, reason: &str) {
    // librdkafka requires a non-empty reason, and a C string can't contain NUL.
    if let Ok(reason) = CString::new(format!("no token: {reason}").replace('\0', "")) {
        // SAFETY: the client is valid, and the string is copied.
        unsafe { rd_kafka_oauthbearer_set_token_failure(client.native_ptr(), reason.as_ptr()) };
    }
}
