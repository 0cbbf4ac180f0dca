//! The binary: parses the command line and ends with its exit code.

#![expect(
    unsafe_code,
    reason = "a symbol that jemalloc reads has to have its name"
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

fn main() -> ExitCode {
    ExitCode::from(walpost::facade::main().code())
}
