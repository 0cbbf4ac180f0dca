//! Recognizes servers that do not speak Kafka's protocol.

use std::borrow::Cow;

/// Prefix of librdkafka's error message when the first bytes of a different protocol are read as
/// the length of a response (`rdkafka_transport.c`).
const NO_LENGTH: &str = "Receive failed: Invalid response size ";
/// Part of the error message if no response has been received on the connection yet.
const FIRST_RESPONSE: &str = "in state APIVERSION_QUERY";
/// librdkafka's advice in the error message, which does not help if the server uses a different
/// protocol.
const ADVICE: &str = ": increase receive.message.max.bytes";

/// Replaces librdkafka's reason for a failed connection with the likely cause if the first response
/// was not in Kafka's protocol.
pub(super) fn explain(reason: &str) -> Cow<'_, str> {
    let parts = reason.split_once(NO_LENGTH).and_then(|(address, rest)| {
        let (_, state) = rest.split_once(ADVICE)?;
        state.contains(FIRST_RESPONSE).then_some((address, state))
    });
    match parts {
        Some((address, state)) => Cow::Owned(format!(
            "{address}the response does not use Kafka's protocol: another program is listening at this address, or the broker \
             expects TLS (security.protocol = ssl or sasl_ssl){state}"
        )),
        None => Cow::Borrowed(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_a_protocol_mismatch_only_if_the_first_response_is_invalid() {
        let reason = |state: &str| {
            format!(
                "db:5432/bootstrap: Receive failed: Invalid response size 1157627904 (0..100000000): increase \
                 receive.message.max.bytes (after 4ms in state {state})"
            )
        };
        assert_eq!(
            explain(&reason("APIVERSION_QUERY")),
            "db:5432/bootstrap: the response does not use Kafka's protocol: another program is listening at this address, or the \
             broker expects TLS (security.protocol = ssl or sasl_ssl) (after 4ms in state APIVERSION_QUERY)"
        );
        assert_eq!(explain(&reason("UP")), reason("UP"));
        assert_eq!(explain("Disconnected"), "Disconnected");
    }
}
