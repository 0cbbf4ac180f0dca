//! The calls with which a client is given a token for SASL/OAUTHBEARER, from whatever thread. rdkafka makes them only while it
//! polls the client itself. They are librdkafka 2.12's, `src/rdkafka.h`.
#![expect(
    unsafe_code,
    reason = "librdkafka is a C library, and this is the boundary to it"
)]

use std::ffi::CString;

use rdkafka::bindings::{rd_kafka_oauthbearer_set_token, rd_kafka_oauthbearer_set_token_failure};
use rdkafka::client::{Client, ClientContext};
use rdkafka::error::RDKafkaErrorCode;

use super::token::{Token, now_millis};

/// Has the client prove with the token who we are, from its next connection on. Where a broker wants that proven again on
/// an open one, librdkafka does it with the token that it has by then.
///
/// Says whether librdkafka takes it: not where it has expired, or the mechanism is another one. Its reason is not told, as it
/// can have the token in it.
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
    // SAFETY: the client is there, and all texts are for the whole call, in which they are copied.
    let code = unsafe {
        rd_kafka_oauthbearer_set_token(
            client.native_ptr(),
            *value,
            token.told_expiry_millis(now_millis()),
            *principal,
            extensions.as_mut_ptr(),
            extensions.len(),
            reason.as_mut_ptr(),
            reason.len(),
        )
    };
    RDKafkaErrorCode::from(code) == RDKafkaErrorCode::NoError
}

/// There is no token for the client. librdkafka asks for one again in ten seconds.
pub(super) fn no_token<C: ClientContext>(client: &Client<C>, reason: &str) {
    // A reason has no NUL, and must not be empty.
    if let Ok(reason) = CString::new(format!("no token: {reason}").replace('\0', "")) {
        // SAFETY: the client is there, and the text is copied.
        unsafe { rd_kafka_oauthbearer_set_token_failure(client.native_ptr(), reason.as_ptr()) };
    }
}
