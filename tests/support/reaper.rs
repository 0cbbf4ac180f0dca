//! Ends servers and removes folders when this process is gone, even by SIGKILL.
//!
//! A child shell reads commands from a pipe whose only writer is this process. The kernel closes
//! the pipe when the process ends; the shell then ends every process still registered, unmounts every
//! [disk](super::disk) and removes the scratch folder.

use std::fmt::Display;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use procfs::{Current, Meminfo};
use rustix::fs::StatVfsMountFlags;

/// `$1` is the scratch folder. A PostgreSQL server that was told QUIT needs a moment to end its
/// children and free its shared memory; whoever does not go is killed.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
processes=
while read -r verb signal pid; do
  others=
  for p in $processes; do
    [ "${p#*:}" = "$pid" ] || others="$others $p"
  done
  processes=$others
  [ "$verb" = register ] && processes="$processes $signal:$pid"
done
for p in $processes; do kill -s "${p%%:*}" "${p#*:}"; kill -s CONT "${p#*:}"; done
tries=100
while [ "$tries" -gt 0 ]; do
  left=
  for p in $processes; do kill -s 0 "${p#*:}" && left=yes; done
  [ -z "$left" ] && break
  sleep 0.05
  tries=$((tries - 1))
done
for p in $processes; do kill -s KILL "${p#*:}"; done
for disk in "$1"/disk*; do [ -d "$disk" ] && umount -l "$disk"; done
rm -rf "$1" || { sleep 1; rm -rf "$1"; }
"#;

struct Reaper {
    scratch: PathBuf,
    commands: Mutex<ChildStdin>,
}

static REAPER: LazyLock<Reaper> = LazyLock::new(|| {
    let scratch = tempfile::Builder::new()
        .prefix("walpost-test-")
        .permissions(Permissions::from_mode(0o755))
        .tempdir_in(parent())
        .expect("a scratch folder")
        .keep();
    #[expect(
        clippy::zombie_processes,
        reason = "it outlives this process: that is what it is for"
    )]
    // A process group of its own: Ctrl-C on the terminal reaches the tests, not the one who tidies
    // up after them.
    let mut shell = Command::new("sh")
        .args(["-c", SCRIPT, "reaper"])
        .arg(&scratch)
        .process_group(0)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell");
    let commands = Mutex::new(shell.stdin.take().expect("the shell's standard input"));
    Reaper { scratch, commands }
});

/// Where the scratch folder is made: in memory where there is room, unless `TMPDIR` says otherwise. Servers make and remove some
/// hundred thousand files in a run, and to make one on ext4 takes the longer the more were removed in the last seconds. What is
/// measured is on a disk, as it is elsewhere.
fn parent() -> PathBuf {
    let is_measured = env!("CARGO_CRATE_NAME") == "bench";
    match std::env::var_os("TMPDIR").is_none() && !is_measured && has_room(MEMORY) {
        true => MEMORY.into(),
        false => std::env::temp_dir(),
    }
}

/// A file system in memory.
const MEMORY: &str = "/dev/shm";

/// A run takes 3 GiB of it at most.
const ROOM_BYTES: u64 = 8 << 30;

/// Programs can be run there, and so much fits into it and into memory.
fn has_room(folder: &str) -> bool {
    let Ok(found) = rustix::fs::statvfs(folder) else {
        return false;
    };
    let memory = Meminfo::current()
        .ok()
        .and_then(|memory| memory.mem_available);
    !found.f_flag.contains(StatVfsMountFlags::NOEXEC)
        && found.f_bavail.saturating_mul(found.f_frsize) >= ROOM_BYTES
        && memory.is_some_and(|bytes| bytes >= ROOM_BYTES)
}

/// The signal that ends a kind of process for good.
#[derive(Clone, Copy)]
pub(crate) enum Ending {
    /// PostgreSQL's immediate shutdown: the postmaster ends its children too.
    Quit,
    /// For whatever has no children and nothing to tidy.
    Kill,
}

impl Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Ending::Quit => "QUIT",
            Ending::Kill => "KILL",
        })
    }
}

/// Has `pid` ended when this process is gone, unless it is [`forget`]ten before.
pub(crate) fn register(pid: u32, ending: Ending) {
    tell(&format!("register {ending} {pid}\n"));
}

/// `pid` has ended and been waited for: the number may soon be somebody else's.
pub(crate) fn forget(pid: u32) {
    tell(&format!("forget - {pid}\n"));
}

/// A new empty folder, named after `purpose`, that goes when this process goes. Others may look
/// into it.
pub(crate) fn folder(purpose: &str) -> PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = scratch().join(format!("{purpose}{number}"));
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

/// The folder that holds all the others.
pub(crate) fn scratch() -> &'static Path {
    &REAPER.scratch
}

fn tell(command: &str) {
    let mut pipe = REAPER.commands.lock().unwrap();
    pipe.write_all(command.as_bytes())
        .expect("the reaper listens");
}
