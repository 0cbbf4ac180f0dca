//! Makes the linker replace some of librdkafka's functions with wrappers in `src/main.rs`, which
//! call the originals.

use std::path::PathBuf;

/// librdkafka's public functions that return error codes. The module `error_codes` wraps these
/// functions.
const RETURN_ERROR_CODES: &[&str] = &[
    "rd_kafka_ConfigEntry_source",
    "rd_kafka_ConfigResource_error",
    "rd_kafka_error_code",
    "rd_kafka_event_error",
    "rd_kafka_event_message_array",
    "rd_kafka_event_message_next",
    "rd_kafka_fatal_error",
    "rd_kafka_flush",
    "rd_kafka_get_watermark_offsets",
    "rd_kafka_last_error",
    "rd_kafka_metadata",
    "rd_kafka_offsets_for_times",
    "rd_kafka_position",
    "rd_kafka_query_watermark_offsets",
    "rd_kafka_seek",
    "rd_kafka_topic_result_error",
];

/// librdkafka's private function that the module `wakeup` replaces.
const WAKEUP: &str = "rd_kafka_msgq_allow_wakeup_at";

/// The librdkafka header that declares [`WAKEUP`].
const WAKEUP_HEADER: &str = "src/rdkafka_msg.h";

/// The declaration of [`WAKEUP`] for which `wakeup` was written. If the declaration in librdkafka's
/// header is different, the function may also behave differently, so it is not replaced.
const WAKEUP_DECLARATION: &str = "rd_bool_t rd_kafka_msgq_allow_wakeup_at(\
    rd_kafka_msgq_t *rkmq, const rd_kafka_msgq_t *dest_rkmq, rd_ts_t *next_wakeup, rd_ts_t now, \
    rd_ts_t linger_us, int32_t batch_msg_cnt, int64_t batch_msg_bytes);";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=DEP_RDKAFKA_ROOT");
    println!("cargo:rustc-check-cfg=cfg(replaces_wakeup)");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        RETURN_ERROR_CODES
            .iter()
            .for_each(|function| wrap(function));
        match check_wakeup() {
            Ok(()) => {
                wrap(WAKEUP);
                println!("cargo:rustc-cfg=replaces_wakeup");
            }
            Err(reason) => println!(
                "cargo:warning=librdkafka's {WAKEUP} is not replaced: {reason}. Walpost works without it, but a producer polls \
                 without a pause while it waits for a broker. Compare `wakeup` in src/main.rs with librdkafka's source"
            ),
        }
    }
}

/// Makes the linker replace a function with its wrapper at each call. The option is spelled with a
/// single dash, because the linker of `zig cc` does not recognize the option with two dashes.
fn wrap(function: &str) {
    println!("cargo:rustc-link-arg-bins=-Wl,-wrap={function}");
}

/// Checks that the linked version of librdkafka contains [`WAKEUP_DECLARATION`].
fn check_wakeup() -> Result<(), String> {
    let root =
        std::env::var("DEP_RDKAFKA_ROOT").map_err(|_| "its source is not known".to_owned())?;
    let header = PathBuf::from(root).join(WAKEUP_HEADER);
    println!("cargo:rerun-if-changed={}", header.display());
    let text = std::fs::read_to_string(&header)
        .map_err(|error| format!("{}: {error}", header.display()))?;
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    match words(&text).contains(&words(WAKEUP_DECLARATION)) {
        true => Ok(()),
        false => Err(format!("{} declares it in another way", header.display())),
    }
}
