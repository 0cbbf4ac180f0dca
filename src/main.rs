//! The binary: runs the command line and returns its exit code.

#![expect(
    unsafe_code,
    reason = "required to export symbols for jemalloc and librdkafka, and to initialize OpenSSL"
)]

use std::process::ExitCode;

/// The allocator for the program and for librdkafka, whose `malloc` is replaced at link time.
/// librdkafka allocates each record on one thread and frees it on another, which is slow with the
/// system's allocator.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// jemalloc options. Free memory is returned to the operating system after 100 ms instead of 10 s,
/// so that memory used during a short peak is not kept.
#[unsafe(export_name = "malloc_conf")]
pub static MALLOC_CONF: &[u8] = b"dirty_decay_ms:100\0";

/// Makes librdkafka's threads sleep, rather than spin, while a batch waits for an earlier request
/// to complete.
///
/// If a batch is ready but an earlier request to its partition is still in flight, librdkafka polls
/// with a timeout of 0 until the response arrives, which keeps a CPU core busy. (In librdkafka
/// 2.12, `rd_kafka_toppar_producer_serve` compares `rktp_msgs_inflight`, a number of records, with
/// a number of requests.) The thread can sleep instead, because the response wakes it. This module
/// is not compiled if `build.rs` finds a different declaration in librdkafka's source.
#[cfg(all(target_os = "linux", replaces_wakeup))]
mod wakeup {
    use std::ffi::{c_uchar, c_void};

    /// Maximum time that a thread sleeps while a batch is ready, in microseconds. librdkafka rounds
    /// the value down to milliseconds.
    const SLEEP_MICROS: i64 = 5_000;

    unsafe extern "C" {
        fn __real_rd_kafka_msgq_allow_wakeup_at(
            queue: *mut c_void,
            ahead: *const c_void,
            next: *mut i64,
            now: i64,
            linger_micros: i64,
            batch_records: i32,
            batch_bytes: i64,
        ) -> c_uchar;
    }

    /// Returns whether a batch is ready, and lowers `next` to the time when the thread must check
    /// its queue again. If a batch is ready, the thread checks again after [`SLEEP_MICROS`] instead
    /// of immediately. The linker replaces librdkafka's function with this function, as configured
    /// in `build.rs`.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_msgq_allow_wakeup_at(
        queue: *mut c_void,
        ahead: *const c_void,
        next: *mut i64,
        now: i64,
        linger_micros: i64,
        batch_records: i32,
        batch_bytes: i64,
    ) -> c_uchar {
        // SAFETY: librdkafka's arguments are passed on unchanged; `next` is valid or null.
        unsafe {
            let before = next.as_ref().copied();
            let is_ready = __real_rd_kafka_msgq_allow_wakeup_at(
                queue,
                ahead,
                next,
                now,
                linger_micros,
                batch_records,
                batch_bytes,
            );
            if is_ready != 0
                && let (Some(next), Some(before)) = (next.as_mut(), before)
            {
                *next = (*next).max(before.min(now + SLEEP_MICROS));
            }
            is_ready
        }
    }
}

/// Replaces error codes that a broker returns but librdkafka's enumeration does not contain.
///
/// The bindings declare the codes as a Rust enum. Returning a number outside the enum is undefined
/// behavior, and can crash the process with all its pipelines. As configured in `build.rs`, the
/// linker replaces librdkafka's functions with the functions in this module, for both rdkafka and
/// this crate. No other function of librdkafka returns a broker's error code to Rust.
#[cfg(target_os = "linux")]
mod error_codes {
    use std::ffi::{c_char, c_int, c_void};
    use std::ptr::null;

    use rdkafka_sys::bindings::{rd_kafka_metadata, rd_kafka_topic_partition_list_t};
    use walpost::facade::replace_unknown;

    macro_rules! return_known_codes {
        ($($wrap:ident, $real:ident($($argument:ident: $type:ty),*);)*) => { $(
            unsafe extern "C" {
                fn $real($($argument: $type),*) -> c_int;
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn $wrap($($argument: $type),*) -> c_int {
                // SAFETY: the caller's arguments are passed on unchanged.
                replace_unknown(unsafe { $real($($argument),*) })
            }
        )* };
    }

    return_known_codes! {
        __wrap_rd_kafka_ConfigResource_error, __real_rd_kafka_ConfigResource_error(resource: *const c_void);
        __wrap_rd_kafka_error_code, __real_rd_kafka_error_code(error: *const c_void);
        __wrap_rd_kafka_event_error, __real_rd_kafka_event_error(event: *mut c_void);
        __wrap_rd_kafka_fatal_error, __real_rd_kafka_fatal_error(client: *mut c_void, text: *mut c_char, size: usize);
        __wrap_rd_kafka_flush, __real_rd_kafka_flush(client: *mut c_void, millis: c_int);
        __wrap_rd_kafka_get_watermark_offsets, __real_rd_kafka_get_watermark_offsets(
            client: *mut c_void, topic: *const c_char, partition: i32, low: *mut i64, high: *mut i64
        );
        __wrap_rd_kafka_last_error, __real_rd_kafka_last_error();
        __wrap_rd_kafka_query_watermark_offsets, __real_rd_kafka_query_watermark_offsets(
            client: *mut c_void, topic: *const c_char, partition: i32, low: *mut i64, high: *mut i64, millis: c_int
        );
        __wrap_rd_kafka_seek, __real_rd_kafka_seek(topic: *mut c_void, partition: i32, offset: i64, millis: c_int);
        __wrap_rd_kafka_topic_result_error, __real_rd_kafka_topic_result_error(result: *const c_void);
    }

    unsafe extern "C" {
        fn __real_rd_kafka_ConfigEntry_source(entry: *const c_void) -> c_int;
        fn __real_rd_kafka_event_message_array(
            event: *mut c_void,
            messages: *mut *mut c_int,
            size: usize,
        ) -> usize;
        fn __real_rd_kafka_event_message_next(event: *mut c_void) -> *mut c_int;
        fn __real_rd_kafka_metadata(
            client: *mut c_void,
            all_topics: c_int,
            topic: *mut c_void,
            metadata: *mut *const rd_kafka_metadata,
            millis: c_int,
        ) -> c_int;
        fn __real_rd_kafka_offsets_for_times(
            client: *mut c_void,
            list: *mut rd_kafka_topic_partition_list_t,
            millis: c_int,
        ) -> c_int;
        fn __real_rd_kafka_position(
            client: *mut c_void,
            list: *mut rd_kafka_topic_partition_list_t,
        ) -> c_int;
    }

    /// Replaces an error code in place.
    ///
    /// # Safety
    /// The pointer must be null or point to an error code.
    unsafe fn replace(code: *mut c_int) {
        // SAFETY: guaranteed by the caller. The codes are in memory that librdkafka has allocated,
        // so they are writable.
        if let Some(code) = unsafe { code.as_mut() } {
            *code = replace_unknown(*code);
        }
    }

    /// Replaces the error codes of the partitions in a list.
    ///
    /// # Safety
    /// The pointer must be null or point to a valid list.
    unsafe fn replace_in(list: *mut rd_kafka_topic_partition_list_t) {
        if list.is_null() {
            return;
        }
        // SAFETY: guaranteed by the caller. No reference is created to memory that may contain an
        // unknown code.
        unsafe {
            for at in 0..usize::try_from((*list).cnt).unwrap_or(0) {
                replace((&raw mut (*(*list).elems.add(at)).err).cast());
            }
        }
    }

    /// Returns the source of a broker's configuration entry. Returns `UNKNOWN` for a number above
    /// `DEFAULT`, because rdkafka's enum does not contain such numbers.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_ConfigEntry_source(entry: *const c_void) -> c_int {
        const UNKNOWN: c_int = 0;
        const DEFAULT: c_int = 5;
        // SAFETY: the caller's argument is passed on unchanged.
        match unsafe { __real_rd_kafka_ConfigEntry_source(entry) } {
            source @ UNKNOWN..=DEFAULT => source,
            _ => UNKNOWN,
        }
    }

    /// Returns the next message, with its error code replaced. The error code is the first field of
    /// a message.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_event_message_next(event: *mut c_void) -> *mut c_int {
        // SAFETY: the caller's argument is passed on unchanged, and the event owns the message.
        unsafe {
            let message = __real_rd_kafka_event_message_next(event);
            replace(message);
            message
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_event_message_array(
        event: *mut c_void,
        messages: *mut *mut c_int,
        size: usize,
    ) -> usize {
        // SAFETY: the caller's arguments are passed on unchanged, and librdkafka has set the first
        // `count` elements of `messages`.
        unsafe {
            let count = __real_rd_kafka_event_message_array(event, messages, size);
            for at in 0..count {
                replace(*messages.add(at));
            }
            count
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_metadata(
        client: *mut c_void,
        all_topics: c_int,
        topic: *mut c_void,
        metadata: *mut *const rd_kafka_metadata,
        millis: c_int,
    ) -> c_int {
        // SAFETY: the caller's arguments are passed on unchanged. `metadata` is set if there is no
        // error, and its arrays have the lengths stored next to them. No reference is created to
        // memory that may contain an unknown code.
        unsafe {
            let code = __real_rd_kafka_metadata(client, all_topics, topic, metadata, millis);
            let found = if code == 0 { *metadata } else { null() };
            if !found.is_null() {
                for at in 0..usize::try_from((*found).topic_cnt).unwrap_or(0) {
                    let topic = (*found).topics.add(at);
                    replace((&raw mut (*topic).err).cast());
                    for at in 0..usize::try_from((*topic).partition_cnt).unwrap_or(0) {
                        replace((&raw mut (*(*topic).partitions.add(at)).err).cast());
                    }
                }
            }
            replace_unknown(code)
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_offsets_for_times(
        client: *mut c_void,
        list: *mut rd_kafka_topic_partition_list_t,
        millis: c_int,
    ) -> c_int {
        // SAFETY: the caller's arguments are passed on unchanged.
        unsafe {
            let code = __real_rd_kafka_offsets_for_times(client, list, millis);
            replace_in(list);
            replace_unknown(code)
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_position(
        client: *mut c_void,
        list: *mut rd_kafka_topic_partition_list_t,
    ) -> c_int {
        // SAFETY: the caller's arguments are passed on unchanged.
        unsafe {
            let code = __real_rd_kafka_position(client, list);
            replace_in(list);
            replace_unknown(code)
        }
    }
}

/// Prevents OpenSSL from loading a configuration file.
mod openssl_configuration {
    use std::ffi::{c_int, c_void};
    use std::ptr::null;

    // OpenSSL 3 defines these constants in openssl/crypto.h.
    const OPENSSL_INIT_NO_LOAD_CONFIG: u64 = 0x80;
    /// Prevents OpenSSL from freeing its memory when the process exits, because other threads may
    /// still use that memory.
    const OPENSSL_INIT_NO_ATEXIT: u64 = 0x80000;

    unsafe extern "C" {
        fn OPENSSL_init_crypto(options: u64, settings: *const c_void) -> c_int;
    }

    /// Initializes OpenSSL without its configuration file. The file, by default
    /// /usr/local/ssl/openssl.cnf, can name libraries to load, and OpenSSL does not check which users
    /// can write to it. The options passed to OpenSSL apply only to the first initialization, so
    /// this function must run before anything else uses OpenSSL.
    pub(super) fn ignore() {
        // SAFETY: the settings may be null (OPENSSL_init_crypto(3)).
        unsafe {
            OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, null());
        }
    }
}

fn main() -> ExitCode {
    openssl_configuration::ignore();
    ExitCode::from(walpost::facade::main().code())
}
