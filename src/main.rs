//! The binary: parses the command line and ends with its exit code.

#![expect(
    unsafe_code,
    reason = "symbols that jemalloc reads and librdkafka calls have to have their names"
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
/// wakes the thread anyhow, so it may sleep.
#[cfg(target_os = "linux")]
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

fn main() -> ExitCode {
    ExitCode::from(walpost::facade::main().code())
}
