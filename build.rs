//! What the linker is told of the program.

/// Functions of librdkafka in whose place the linker puts those of `src/main.rs`, which call them.
const WRAPPED: &[&str] = &[
    // See `wakeup`.
    "rd_kafka_msgq_allow_wakeup_at",
    // See `error_codes`.
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

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // With two dashes, the linker of `zig cc` does not know the option.
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        for function in WRAPPED {
            println!("cargo:rustc-link-arg-bins=-Wl,-wrap={function}");
        }
    }
}
