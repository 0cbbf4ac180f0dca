//! Signals, free ports, and who this process is.

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

/// Sends a signal by its short name: `TERM`, `KILL`, `INT`, `QUIT`.
///
/// # Panics
/// There is no such process.
pub(crate) fn signal(pid: u32, name: &str) {
    assert!(
        try_signal(pid, name),
        "could not send {name} to process {pid}"
    );
}

/// As [`signal`], and says whether there was such a process.
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

/// Stops a process with SIGSTOP, and waits until the last of its threads stands still: on a busy
/// machine a process goes on for tens of milliseconds after the signal was sent.
///
/// # Panics
/// There is no such process, or it does not stop.
pub(crate) fn freeze(pid: u32) {
    signal(pid, "STOP");
    wait_until("the process to stand still", || {
        let process = Process::new(i32::try_from(pid).unwrap()).unwrap();
        // One that has ended since it was listed has no state: look again.
        let mut threads = process.tasks().unwrap().flatten();
        threads.all(|thread| thread.stat().is_ok_and(|stat| stat.state == 'T'))
    });
}

/// Goes on after [`freeze`].
///
/// # Panics
/// There is no such process.
pub(crate) fn thaw(pid: u32) {
    signal(pid, "CONT");
}

/// Waits until the child has ended, and takes it off the reaper's list.
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

/// A port nobody listens on now, and that this process has not given out before.
///
/// It is below the range from which Linux takes the ports of outgoing connections, so that none of
/// those gets it before the server does, or while the server is restarted.
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

/// Does not listen to find out: a process that another test is just starting would go on with that for a moment.
fn is_free(port: u16) -> bool {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket
        .set_reuse_address(true)
        .expect("an option of every socket");
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    socket.bind(&address.into()).is_ok()
}

/// The effective user of this process.
pub(crate) fn effective_user() -> u32 {
    std::fs::metadata(reaper::scratch()).unwrap().uid()
}

/// User and group number of an account.
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
