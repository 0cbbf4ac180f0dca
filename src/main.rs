//! The binary: parses the command line and ends with its exit code.

#![expect(
    unsafe_code,
    reason = "exports symbols that jemalloc reads and librdkafka calls"
)]

use std::process::ExitCode;

/// Also for librdkafka, whose `malloc` this replaces when the binary is linked. It allocates each
/// record on one thread and frees it on another, which the system's allocator is slow at.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// jemalloc's options. Memory that is free goes back to the system after 100 ms instead of 10 s: what
/// a busy second took is not kept over a quiet hour.
#[unsafe(export_name = "malloc_conf")]
pub static MALLOC_CONF: &[u8] = b"dirty_decay_ms:100\0";

/// When librdkafka's threads look at their queues again.
///
/// A batch that is ready is sent at once, or can't be sent yet, as a request to its partition is in flight. librdkafka then polls
/// with a timeout of 0 until the response comes, and takes a whole processor meanwhile (librdkafka 2.12,
/// `rd_kafka_toppar_producer_serve`, for which `rktp_msgs_inflight` counts records where it means requests). The response
/// wakes the thread anyhow, so it may sleep. Left out if `build.rs` finds another declaration in librdkafka's source.
#[cfg(all(target_os = "linux", replaces_wakeup))]
mod wakeup {
    use std::ffi::{c_uchar, c_void};

    /// How long it sleeps at most while a batch is ready, in microseconds. librdkafka rounds it down to milliseconds.
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

    /// Says whether a batch is ready, and brings `next` forward to when the thread has to look again. `build.rs` has the
    /// linker put it in the place of librdkafka's function.
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
        // SAFETY: these are librdkafka's own arguments; it gives a place for `next`, or none.
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

/// Error codes, which brokers choose, as numbers that librdkafka's enumeration has.
///
/// In the bindings they are a Rust enum, so that a number it lacks is undefined behaviour; it ended the process, with all its
/// pipelines. `build.rs` has the linker put these functions in the place of librdkafka's, for rdkafka as for this crate: they
/// are all through which a broker's code gets from librdkafka to Rust.
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
                // SAFETY: these are the caller's own arguments.
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

    /// Replaces a code where it is.
    ///
    /// # Safety
    /// A code is there, or the pointer is null.
    unsafe fn replace(code: *mut c_int) {
        // SAFETY: as the caller says. What librdkafka has returned is in memory that it has allocated.
        if let Some(code) = unsafe { code.as_mut() } {
            *code = replace_unknown(*code);
        }
    }

    /// Replaces the codes of partitions.
    ///
    /// # Safety
    /// The list is valid, or the pointer is null.
    unsafe fn replace_in(list: *mut rd_kafka_topic_partition_list_t) {
        if list.is_null() {
            return;
        }
        // SAFETY: as the caller says. No reference is made of what can have an unknown code in it.
        unsafe {
            for at in 0..usize::try_from((*list).cnt).unwrap_or(0) {
                replace((&raw mut (*(*list).elems.add(at)).err).cast());
            }
        }
    }

    /// The source of a broker's setting, which is an enum in the bindings too; rdkafka accepts these alone.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_ConfigEntry_source(entry: *const c_void) -> c_int {
        const UNKNOWN: c_int = 0;
        const DEFAULT: c_int = 5;
        // SAFETY: this is the caller's own argument.
        match unsafe { __real_rd_kafka_ConfigEntry_source(entry) } {
            source @ UNKNOWN..=DEFAULT => source,
            _ => UNKNOWN,
        }
    }

    /// The code is the first member of a message.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_rd_kafka_event_message_next(event: *mut c_void) -> *mut c_int {
        // SAFETY: this is the caller's own argument; the message is the event's.
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
        // SAFETY: these are the caller's own arguments; so many of `messages` are set.
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
        // SAFETY: these are the caller's own arguments; `metadata` is set where there is no error, and its arrays have the
        // lengths that are beside them. No reference is made of what can have an unknown code in it.
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
        // SAFETY: these are the caller's own arguments.
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
        // SAFETY: these are the caller's own arguments.
        unsafe {
            let code = __real_rd_kafka_position(client, list);
            replace_in(list);
            replace_unknown(code)
        }
    }
}

fn main() -> ExitCode {
    ExitCode::from(walpost::facade::main().code())
}
