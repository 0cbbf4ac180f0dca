//! Runs a configured program that prints a secret: a password or a token.
//!
//! The program runs without a shell and with a time limit. The program's standard output is
//! returned to the caller and not used for anything else. The program's standard error is discarded
//! instead of being included in error messages, because error messages appear in the log and on the
//! unauthenticated status page, and standard error may contain the secret, in any encoding, or the
//! program's own credentials.
//!
//! The permissions of the program and of every folder in its path are checked before each run,
//! because they may change at any time after Walpost has read its configuration.
#![expect(
    unsafe_code,
    reason = "`isolate` runs between fork and exec, where only system calls are allowed"
)]

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode, OFlags, RawDir, openat};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, Signal, WaitOptions, geteuid, getpid, kill_process, kill_process_group,
    set_child_subreaper, setsid, waitpid,
};

use crate::trusted_path::{self, PathError};

/// How long a program may take to print its secret and exit.
pub(crate) const RUN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a secret, in bytes.
const MAX_SECRET_BYTES: usize = 64 << 10;
/// How often to check whether a program has exited while another process keeps the program's output
/// open.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long to wait for the descendants of a killed program to end. Only processes of another user
/// can run for longer, because Walpost can't kill them.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// A program and its arguments.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Program {
    path: String,
    arguments: Vec<String>,
}

/// The reason why a program did not print a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Another user could have modified the program.
    #[error("the program was not run: {0}")]
    Untrusted(Box<PathError>),
    /// The operating system could not start the program.
    #[error("the program failed to start: {0}")]
    Start(String),
    /// The program was killed because it exceeded its time limit.
    #[error(
        "the program did not exit within {} s and was killed. {}",
        limit.as_secs(),
        hint()
    )]
    Slow {
        /// The program's time limit.
        limit: Duration,
    },
    /// The exit status of the program is not 0.
    #[error("the program failed with {status}. {}", hint())]
    Failed {
        /// The exit status.
        status: ExitStatus,
    },
    /// The program wrote nothing to standard output.
    #[error("the program printed nothing. {}", hint())]
    Nothing,
    /// The output is too long to be a secret.
    #[error(
        "the program printed more than {MAX_SECRET_BYTES} bytes; expected a password or a token"
    )]
    TooMuch,
}

/// Explains how to find the cause of a failure.
fn hint() -> String {
    format!(
        "The program's standard error is not shown, because it may contain secrets. Run the program by hand as uid {}, or \
         redirect its standard error to a file",
        geteuid().as_raw()
    )
}

impl fmt::Debug for Program {
    // The arguments are omitted, because they can be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

impl Program {
    /// Creates a program from its path and arguments, as in the configuration.
    ///
    /// # Errors
    /// Returns an error if the first element is not an absolute path, or if an argument is invalid.
    /// The message states what was expected.
    pub(crate) fn new(argv: &[String]) -> Result<Self, String> {
        let Some((path, arguments)) = argv.split_first() else {
            return Err(
                "expected a program and its arguments: [\"/usr/bin/...\", \"...\"]".to_owned(),
            );
        };
        if !Path::new(path).is_absolute() {
            return Err(format!(
                "{path:?} is not an absolute path; the program is not searched for in PATH. Expected a path like \"/usr/bin/aws\", \
                 and each argument as a separate string"
            ));
        }
        if argv.iter().any(|argument| argument.contains('\0')) {
            return Err("a program and its arguments must not contain NUL".to_owned());
        }
        Ok(Self {
            path: path.clone(),
            arguments: arguments.to_vec(),
        })
    }

    /// Returns the path of the program, without its arguments, which can be secrets.
    #[must_use]
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Runs the program and returns its output. Blocks for at most `limit`, plus [`KILL_TIMEOUT`]
    /// if the program has to be killed.
    ///
    /// # Errors
    /// Returns an error if the program failed or was not run. The error does not contain any of the
    /// program's output.
    pub(crate) fn run(&self, limit: Duration) -> Result<Vec<u8>, ProgramError> {
        trusted_path::check_program(Path::new(&self.path)).map_err(|error| match error {
            PathError::Io { reason, .. } => ProgramError::Start(reason),
            error => ProgramError::Untrusted(error.into()),
        })?;
        let until = Instant::now() + limit;
        let start_error = |error: io::Error| ProgramError::Start(error.to_string());
        let mut child = self.spawn().map_err(start_error)?;
        let mut output = Output::new(child.stdout.take());
        let status = match wait_for_exit(&mut child, &mut output, until) {
            // The program has been reaped, and another process may now have the program's process
            // ID, so don't kill any process.
            Ok(Some(status)) => status,
            ended => {
                kill(&mut child);
                return Err(match ended {
                    Err(error) => start_error(error),
                    Ok(_) => ProgramError::Slow { limit },
                });
            }
        };
        output.read_rest(until).map_err(start_error)?;
        if !status.success() {
            return Err(ProgramError::Failed { status });
        }
        match output.bytes.len() {
            0 => Err(ProgramError::Nothing),
            1..=MAX_SECRET_BYTES => Ok(output.bytes),
            _ => Err(ProgramError::TooMuch),
        }
    }

    fn spawn(&self) -> io::Result<Child> {
        #[expect(clippy::disallowed_methods, reason = "`run` has checked the program")]
        let mut command = Command::new(&self.path);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        // SAFETY: `isolate` only makes system calls: it neither allocates memory nor acquires a
        // lock that another thread might have held at the time of the fork.
        unsafe { command.pre_exec(isolate) };
        command.spawn()
    }
}

/// Prepares the new process for the program.
///
/// The process gets its own session without a terminal, so that the program can't prompt the user.
/// The process also becomes the new parent of its orphaned descendants, so that [`kill`] finds a
/// descendant even if the descendant has moved to another session or process group. The process
/// inherits only the standard streams. All other descriptors are marked close-on-exec, because
/// librdkafka and other C libraries open descriptors without `O_CLOEXEC`.
fn isolate() -> io::Result<()> {
    setsid()?;
    set_child_subreaper(Some(getpid()))?;
    close_descriptors_on_exec()?;
    Ok(())
}

/// Marks every descriptor above standard error as close-on-exec. Reads the descriptors from /proc,
/// because some supported kernels and seccomp filters do not allow close_range(2).
fn close_descriptors_on_exec() -> Result<(), Errno> {
    const FD_FOLDER: &CStr = c"/proc/self/fd";
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, FD_FOLDER, flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&folder, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let Some(number) = parse_descriptor(entry.file_name().to_bytes()) else {
            // `.` and `..`
            continue;
        };
        if number > 2 {
            // SAFETY: the descriptor is open, because this process has no other thread that could
            // close it, and it is borrowed only for this call.
            let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
            fcntl_setfd(descriptor, FdFlags::CLOEXEC)?;
        }
    }
    Ok(())
}

fn parse_descriptor(name: &[u8]) -> Option<RawFd> {
    std::str::from_utf8(name).ok()?.parse().ok()
}

/// Reads the program's output until the program exits. Returns `None` if `until` is reached first.
///
/// # Errors
/// Returns an error if reading the output or waiting for the program fails. In this case, the
/// program has not been reaped, so the caller can kill it.
fn wait_for_exit(
    child: &mut Child,
    output: &mut Output<impl Read + AsFd>,
    until: Instant,
) -> io::Result<Option<ExitStatus>> {
    let mut pause = Duration::from_millis(1);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        match output.pipe {
            None => {
                std::thread::sleep(pause.min(left));
                pause = (pause * 2).min(EXIT_POLL_INTERVAL);
            }
            Some(_) => _ = output.wait(left.min(EXIT_POLL_INTERVAL))?,
        }
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
    }
}

/// Kills the program and every process that it started, including processes that have left its
/// session. The program must not have been reaped, because its ID could then belong to another
/// process. Processes that the program runs as another user, for example through sudo, survive,
/// because Walpost is not permitted to signal them.
fn kill(child: &mut Child) {
    let Some(root) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
        return;
    };
    // Stop the program first, so that it can't start more processes and its descendants can't
    // become children of init. Errors from sending signals are ignored: they mean that a process
    // has ended in the meantime, or belongs to another user.
    let _ = kill_process(root, Signal::STOP);
    let until = Instant::now() + KILL_TIMEOUT;
    let mut killed = HashSet::new();
    // A single scan can miss a process that starts while /proc is being read.
    let mut quiet_passes = 0;
    while quiet_passes < 2 && Instant::now() < until {
        let descendants = descendants(root);
        for pid in &descendants {
            let _ = kill_process(*pid, Signal::KILL);
        }
        if descendants.is_empty() {
            quiet_passes += 1;
        } else {
            quiet_passes = 0;
            killed.extend(descendants);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let _ = kill_process_group(root, Signal::KILL);
    let _ = kill_process(root, Signal::KILL);
    let _ = child.wait();
    // If Walpost is the first process in a container, no other process reaps the killed processes.
    if getpid() == Pid::INIT {
        for pid in killed {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

/// Returns the descendants of `root` that have not ended.
fn descendants(root: Pid) -> HashSet<Pid> {
    let processes = running_processes();
    let mut found = HashSet::new();
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        let children = processes.iter().filter(|(_, ppid)| **ppid == parent);
        let new = children.filter_map(|(pid, _)| found.insert(*pid).then_some(*pid));
        parents.extend(new.collect::<Vec<_>>());
    }
    found
}

/// Returns the parent of each process that has not ended.
fn running_processes() -> HashMap<Pid, Pid> {
    #[expect(clippy::disallowed_methods, reason = "only the kernel writes to /proc")]
    let Ok(entries) = fs::read_dir("/proc") else {
        return HashMap::new();
    };
    let process = |entry: io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        let pid = Pid::from_raw(name.to_str()?.parse().ok()?)?;
        let path = Path::new("/proc").join(name).join("stat");
        #[expect(clippy::disallowed_methods, reason = "only the kernel writes to /proc")]
        let stat = fs::read(path).ok()?;
        Some((pid, parent(&stat)?))
    };
    entries.filter_map(process).collect()
}

/// Parses the parent process from /proc/PID/stat, unless the process is a zombie; see
/// proc_pid_stat(5). The preceding command name can contain any characters.
fn parent(stat: &[u8]) -> Option<Pid> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = stat[end + 1..].split(|byte| *byte == b' ').skip(1);
    let state = fields.next()?;
    let parent = std::str::from_utf8(fields.next()?).ok()?;
    let parent = Pid::from_raw(parent.parse().ok()?)?;
    (!matches!(state, b"Z" | b"X")).then_some(parent)
}

/// The output of the program.
struct Output<R> {
    /// The pipe, or `None` once it has been closed.
    pipe: Option<R>,
    bytes: Vec<u8>,
}

impl<R: Read + AsFd> Output<R> {
    fn new(pipe: Option<R>) -> Self {
        let bytes = Vec::new();
        Self { pipe, bytes }
    }

    /// Waits until output is available, for at most `limit`, and reads it. Returns whether output
    /// was available.
    fn wait(&mut self, limit: Duration) -> io::Result<bool> {
        let Some(pipe) = &self.pipe else {
            return Ok(false);
        };
        let limit = rustix::event::Timespec::try_from(limit).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&limit)) {
            Ok(0) | Err(Errno::INTR) => Ok(false),
            Ok(_) => self.read().map(|()| true),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the output that the program wrote before it exited. Does not wait for end of file,
    /// because another process that inherited the pipe may keep it open indefinitely.
    fn read_rest(&mut self, until: Instant) -> io::Result<()> {
        while self.wait(Duration::ZERO)? && Instant::now() < until {}
        Ok(())
    }

    /// Reads the available output. Stores at most one byte more than the maximum size of a secret,
    /// in order to detect a secret that is too long.
    fn read(&mut self) -> io::Result<()> {
        let Some(pipe) = &mut self.pipe else {
            return Ok(());
        };
        let mut bytes = [0; 4096];
        match pipe.read(&mut bytes) {
            Ok(0) => self.pipe = None,
            Ok(count) => {
                let free = (MAX_SECRET_BYTES + 1).saturating_sub(self.bytes.len());
                self.bytes.extend_from_slice(&bytes[..count.min(free)]);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn shell(script: &str) -> Program {
        let argv = ["/bin/sh", "-c", script].map(str::to_owned);
        Program::new(&argv).expect("a program")
    }

    fn run(script: &str) -> Result<String, String> {
        let ran = shell(script).run(Duration::from_secs(30));
        ran.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .map_err(|error| error.to_string())
    }

    /// Returns whether a process has ended, even if it has not been reaped yet.
    fn has_ended(pid: &str) -> bool {
        let state = fs::read_to_string(format!("/proc/{pid}/stat"));
        state.map_or(true, |state| state.contains(") Z "))
    }

    fn wait_until(event: &str, condition: impl Fn() -> bool) {
        let started_at = Instant::now();
        while !condition() {
            let elapsed = started_at.elapsed();
            assert!(
                elapsed < Duration::from_secs(30),
                "timed out waiting for {event}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A pipe that can be read once. Later attempts fail.
    struct ReadableOnce(fs::File, bool);

    impl AsFd for ReadableOnce {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    impl Read for ReadableOnce {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            match std::mem::replace(&mut self.1, true) {
                false => Ok(1),
                true => Err(io::Error::other("failed")),
            }
        }
    }

    /// If waiting returned an error after the program was reaped, the caller would kill whichever
    /// process has the program's process ID by then.
    #[test]
    fn waiting_does_not_fail_once_the_program_has_been_reaped() {
        let mut child = shell("exit 0").spawn().expect("a process");
        let pid = child.id().to_string();
        wait_until("the program to exit", || has_ended(&pid));
        let zero = fs::File::open("/dev/zero").expect("a file");
        let mut output = Output::new(Some(ReadableOnce(zero, false)));
        let until = Instant::now() + Duration::from_secs(30);
        let ended = wait_for_exit(&mut child, &mut output, until);
        assert!(matches!(ended, Ok(Some(status)) if status.success()));
        output.read_rest(until).expect_err("the pipe fails");
    }

    #[test]
    fn returns_the_output_or_the_reason_for_the_failure() {
        assert_eq!(
            run("echo secret; echo noise >&2"),
            Ok("secret\n".to_owned())
        );
        let error = run("echo part; exit 3").expect_err("it fails");
        assert!(
            error.starts_with("the program failed with exit status: 3. "),
            "{error}"
        );
        assert!(error.contains("Run the program by hand"), "{error}");
        let error = run("true").expect_err("nothing");
        assert!(
            error.starts_with("the program printed nothing. "),
            "{error}"
        );
        let error = run("kill -9 $$").expect_err("killed");
        assert!(error.contains("signal: 9"), "{error}");
    }

    #[test]
    fn omits_output_and_standard_error_from_error_messages() {
        let long = "0123456789abcdef".repeat(40);
        for script in [
            "echo hunter2hunter2; echo got hunter2h >&2; exit 1".to_owned(),
            "echo hunter2hunter2; echo hunter2hunter2 | base64 >&2; exit 1".to_owned(),
            "echo hunter2hunter2; echo hunter2hunter2 | rev >&2; exit 1".to_owned(),
            // Standard error contains only the end of the secret, and is longer than the part of
            // standard error that an earlier version of Walpost included in error messages.
            format!("echo hunter2{long}; echo {long} >&2; exit 1"),
            // Standard error contains the program's own credentials.
            "echo x; echo 'curl -u hunter2' >&2; exit 1".to_owned(),
        ] {
            let error = run(&script).expect_err("it fails");
            for part in ["hunter2", "aHVudGVy", "2retnuh", "89abcdef"] {
                assert!(!error.contains(part), "{script}: {error}");
            }
        }
    }

    #[test]
    fn rejects_output_that_is_too_long() {
        let error = run("head -c 300000 /dev/zero").expect_err("too much");
        assert!(error.contains("more than 65536 bytes"), "{error}");
    }

    #[test]
    fn kills_all_descendants_of_a_program_that_times_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("pids");
        // The script starts a child, a process in its own session, and an orphaned process that has
        // a child.
        let script = format!(
            "exec 9>>{}; sleep 1000 & echo $! >&9; setsid sh -c 'echo $$ >&9; sleep 1000' & \
             (setsid env -i sh -c 'echo $$ >&9; sleep 1000 & echo $! >&9; wait' &) & wait",
            file.display()
        );
        let lines = || fs::read_to_string(&file).unwrap_or_default();
        let program = shell(&script);
        let running = std::thread::spawn(move || {
            let limit = Duration::from_secs(5);
            program.run(limit)
        });
        wait_until("all processes to start", || lines().lines().count() == 4);
        let ran = running.join().expect("no panic");
        assert!(matches!(ran, Err(ProgramError::Slow { .. })), "{ran:?}");
        for pid in lines().lines() {
            wait_until("a descendant to end", || has_ended(pid));
        }
    }

    #[test]
    fn passes_only_the_standard_streams_to_the_program() {
        // The file is opened without `O_CLOEXEC`, like librdkafka's pipes.
        let file = fs::File::open("/dev/null").expect("a device");
        fcntl_setfd(&file, FdFlags::empty()).expect("a descriptor");
        let listed = run("ls -l /proc/self/fd").expect("a list");
        let targets: Vec<_> = listed
            .lines()
            .filter_map(|line| line.split(" -> ").nth(1))
            .collect();
        // The fourth descriptor is the directory, which `ls` itself opens.
        assert_eq!(targets.len(), 4, "{listed}");
        drop(file);
    }

    #[test]
    fn runs_the_program_in_a_session_without_a_terminal() {
        let sessions = run("cut -d ' ' -f 1,6 /proc/$$/stat").expect("a process");
        let (pid, session) = sessions.trim().split_once(' ').expect("two numbers");
        assert_eq!(pid, session);
    }

    #[test]
    fn does_not_wait_for_output_that_another_process_keeps_open() {
        let started_at = Instant::now();
        assert_eq!(run("sleep 5 & echo secret"), Ok("secret\n".to_owned()));
        assert!(started_at.elapsed() < Duration::from_secs(4));
    }

    #[test]
    fn runs_the_program_without_a_shell_or_a_path_search() {
        let argv = ["/bin/echo", "$HOME", "`id`", ";", "*"].map(str::to_owned);
        let program = Program::new(&argv).expect("a program");
        let printed = program.run(RUN_TIMEOUT).expect("output");
        assert_eq!(printed, b"$HOME `id` ; *\n");
        assert_eq!(format!("{program:?}"), "/bin/echo");
        for argv in [&[][..], &["echo"], &["./echo", "x"], &["/bin/echo", "a\0b"]] {
            let argv: Vec<_> = argv.iter().map(|text| (*text).to_owned()).collect();
            Program::new(&argv).expect_err("no program");
        }
        let missing = Program::new(&["/nonexistent/program".to_owned()]).expect("a program");
        let error = missing
            .run(RUN_TIMEOUT)
            .expect_err("the program does not exist")
            .to_string();
        assert!(error.contains("failed to start: No such file"), "{error}");
    }

    /// The program is reached through a symbolic link whose folder becomes writable by other users.
    #[test]
    fn checks_permissions_of_the_program_before_each_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::create_dir_all(path("releases/1")).expect("a folder");
        fs::create_dir(path("app")).expect("a folder");
        let script = path("releases/1/password");
        fs::write(&script, "#!/bin/sh\necho secret\n").expect("a program");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("a mode");
        std::os::unix::fs::symlink("../releases/1", path("app/current")).expect("a link");
        let argv = [path("app/current/password").display().to_string()];
        let program = Program::new(&argv).expect("a program");
        assert_eq!(program.run(RUN_TIMEOUT), Ok(b"secret\n".to_vec()));
        fs::set_permissions(path("app"), fs::Permissions::from_mode(0o777)).expect("a mode");
        let error = program
            .run(RUN_TIMEOUT)
            .expect_err("other users can replace the link");
        assert!(matches!(error, ProgramError::Untrusted(_)), "{error}");
        assert!(error.to_string().contains("chmod go-w"), "{error}");
    }

    #[test]
    fn parses_the_parent_pid_regardless_of_the_process_name() {
        let parse = |stat: &str| parent(stat.as_bytes()).map(Pid::as_raw_nonzero);
        assert_eq!(parse("7 (a) S 1").map(|pid| pid.get()), Some(1));
        assert_eq!(parse("7 (a)Z) S 5").map(|pid| pid.get()), Some(5));
        for stat in ["7 (a) Z 1", "7 (a) S 0", "7 (a", "7 (a)", "7 (a) S", ""] {
            assert_eq!(parse(stat), None, "{stat}");
        }
    }
}
