//! Ends servers and removes directories when this process ends, even if it is killed by SIGKILL.
//!
//! A child shell reads commands from a pipe whose only writer is this process. The kernel closes
//! the pipe when the process ends. The shell then ends every process that is still registered,
//! unmounts every [disk](super::disk) and removes the scratch directory.

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

/// The shell's script. `$1` is the scratch directory. A PostgreSQL server that receives SIGQUIT
/// needs some time to end its children and free its shared memory. Processes that remain after that
/// are killed.
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
        .tempdir_in(scratch_parent())
        .expect("a scratch directory")
        .keep();
    #[expect(
        clippy::zombie_processes,
        reason = "the shell must outlive this process"
    )]
    // The shell gets its own process group. Otherwise, Ctrl-C in the terminal would reach the
    // shell, which has to clean up after the tests.
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

/// Returns the directory in which to create the scratch directory. It is in memory if there is
/// enough space and `TMPDIR` is not set, because a run creates and removes several hundred thousand
/// files. On ext4, creating files becomes slower the more files were removed in the preceding
/// seconds. Benchmarks use a disk, as production systems do.
fn scratch_parent() -> PathBuf {
    let is_measured = env!("CARGO_CRATE_NAME") == "bench";
    match std::env::var_os("TMPDIR").is_none() && !is_measured && has_free_space(MEMORY_FILE_SYSTEM)
    {
        true => MEMORY_FILE_SYSTEM.into(),
        false => std::env::temp_dir(),
    }
}

/// The mount point of an in-memory file system.
const MEMORY_FILE_SYSTEM: &str = "/dev/shm";

/// Minimum free space for creating the scratch directory in memory. A run needs at most 3 GiB.
const MIN_FREE_BYTES: u64 = 8 << 30;

/// Returns true if programs may be run from the directory, and if both its file system and memory
/// have at least [`MIN_FREE_BYTES`] free.
fn has_free_space(folder: &str) -> bool {
    let Ok(found) = rustix::fs::statvfs(folder) else {
        return false;
    };
    let memory = Meminfo::current()
        .ok()
        .and_then(|memory| memory.mem_available);
    !found.f_flag.contains(StatVfsMountFlags::NOEXEC)
        && found.f_bavail.saturating_mul(found.f_frsize) >= MIN_FREE_BYTES
        && memory.is_some_and(|bytes| bytes >= MIN_FREE_BYTES)
}

/// The signal that ends a process.
#[derive(Clone, Copy)]
pub(crate) enum Ending {
    /// SIGQUIT, on which the postmaster ends its child processes and exits immediately.
    Quit,
    /// SIGKILL, for processes that have no children and nothing to clean up.
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

/// Registers `pid` to be ended when this process ends, unless [`forget`] is called first.
pub(crate) fn register(pid: u32, ending: Ending) {
    send_command(&format!("register {ending} {pid}\n"));
}

/// Unregisters `pid` after the process has exited and been waited for, because the ID may be
/// reused.
pub(crate) fn forget(pid: u32) {
    send_command(&format!("forget - {pid}\n"));
}

/// Creates an empty directory whose name begins with `purpose`. It is readable by other users and
/// removed when this process ends.
pub(crate) fn folder(purpose: &str) -> PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = scratch().join(format!("{purpose}{number}"));
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

/// Returns the scratch directory, which contains all of this process's other directories.
pub(crate) fn scratch() -> &'static Path {
    &REAPER.scratch
}

fn send_command(command: &str) {
    let mut pipe = REAPER.commands.lock().unwrap();
    pipe.write_all(command.as_bytes())
        .expect("the reaper listens");
}
