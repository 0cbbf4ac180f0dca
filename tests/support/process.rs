//! Sends signals, finds free ports, and looks up users.

use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use procfs::process::Process;
use socket2::{Domain, Socket, Type};

use super::reaper;
use super::wait::{poll_until, wait_until};

/// Sends a signal, named without the SIG prefix, such as `TERM`, `KILL`, `INT` or `QUIT`.
///
/// # Panics
/// Panics if the process does not exist.
pub(crate) fn signal(pid: u32, name: &str) {
    assert!(
        try_signal(pid, name),
        "could not send {name} to process {pid}"
    );
}

/// Like [`signal`], but returns whether the process exists instead of panicking.
pub(crate) fn try_signal(pid: u32, name: &str) -> bool {
    let status = Command::new("sh")
        .args([
            "-c",
            r#"kill -s "$1" "$2""#,
            "signal",
            name,
            &pid.to_string(),
        ])
        .stderr(Stdio::null())
        .status();
    status.expect("a shell").success()
}

/// Returns whether a process has installed a handler for SIGHUP. Without a handler, the signal
/// would terminate the process.
pub(crate) fn handles_hangup(pid: u32) -> bool {
    let process = Process::new(i32::try_from(pid).unwrap());
    let status = process.and_then(|process| process.status());
    status.is_ok_and(|status| status.sigcgt & 1 != 0)
}

/// Suspends a process with SIGSTOP and waits until all of its threads have stopped. On a busy
/// machine, the threads stop tens of milliseconds after the signal is sent.
///
/// # Panics
/// Panics if the process does not exist or does not stop.
pub(crate) fn freeze(pid: u32) {
    signal(pid, "STOP");
    wait_until("all threads of the process to stop", || {
        let process = Process::new(i32::try_from(pid).unwrap()).unwrap();
        // If a thread ends after the list of threads is read, the thread's state can't be read. The
        // next poll then reads the list again.
        let mut threads = process.tasks().unwrap().flatten();
        threads.all(|thread| thread.stat().is_ok_and(|stat| stat.state == 'T'))
    });
}

/// Resumes a process after [`freeze`].
///
/// # Panics
/// Panics if the process does not exist.
pub(crate) fn thaw(pid: u32) {
    signal(pid, "CONT");
}

/// Waits until the child has exited, and then unregisters it from the reaper.
pub(crate) fn wait_for_exit(child: &mut Child, within: Duration) -> Option<ExitStatus> {
    let pid = child.id();
    let status = poll_until(within, || {
        child.try_wait().expect("a child can be waited for")
    });
    if status.is_some() {
        reaper::forget(pid);
    }
    status
}

/// Returns a port on which no process is listening and which this function has not returned before.
///
/// The port is outside the range that Linux uses for outgoing connections. Otherwise, an outgoing
/// connection could use the port before the server binds it, or while the server restarts.
pub(crate) fn free_port() -> u16 {
    const PORTS: Range<u16> = 10_000..32_000;
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(fastrand::u16(PORTS)));
    loop {
        let port = NEXT.fetch_add(1, Ordering::Relaxed);
        if !PORTS.contains(&port) {
            NEXT.store(PORTS.start, Ordering::Relaxed);
        } else if is_free(port) {
            return port;
        }
    }
}

/// Returns whether the port can be bound. Does not listen on it: if another test forked a process
/// at that moment, the process would inherit the listening socket and keep it open until it called
/// exec.
fn is_free(port: u16) -> bool {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket
        .set_reuse_address(true)
        .expect("an option of every socket");
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    socket.bind(&address.into()).is_ok()
}

/// Returns the effective user ID of this process.
pub(crate) fn effective_user() -> u32 {
    std::fs::metadata(reaper::scratch()).unwrap().uid()
}

/// Returns the user ID and group ID of a user.
pub(crate) fn account(name: &str) -> Option<(u32, u32)> {
    let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != name {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some((uid, gid))
    })
}
