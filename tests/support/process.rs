//! Signals, free ports, and who this process is.

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use super::reaper;
use super::wait::poll_until;

/// Sends a signal by its short name: `TERM`, `KILL`, `STOP`, `CONT`, `INT`, `QUIT`.
pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("sh")
        .args([
            "-c",
            r#"kill -s "$1" "$2""#,
            "signal",
            name,
            &pid.to_string(),
        ])
        .status()
        .expect("a shell");
    assert!(status.success(), "could not send {name} to process {pid}");
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

/// A port nobody listens on now.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
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
