//! Runs the compiled binary as a process.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write as _};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use procfs::process::Process;

use super::http::Http;
use super::process::{freeze, signal, thaw, wait_for_exit};
use super::reaper::{self, Ending};
use super::secrets::{Leaks, OutputStream};
use super::wait::{WAIT_TIMEOUT, wait_for};

/// A Walpost command line that has not been started yet.
pub(crate) struct Invocation {
    command: Command,
    reads_output: bool,
    output: Option<File>,
    errors: Option<File>,
    needs_input: bool,
    answer: Option<String>,
}

/// A running Walpost process, which is killed when this value is dropped. If the test fails, the
/// process's log is printed. Its output is always searched for secrets, however the process ends.
pub(crate) struct Walpost {
    child: Child,
    standard_output: CapturedOutput,
    standard_error: CapturedOutput,
}

/// The exit code and output of a process that has exited.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The exit code, or `None` if a signal ended the process.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Writes a walpost.toml with the given text.
pub(crate) fn config_file(text: impl AsRef<str>) -> PathBuf {
    let file = reaper::folder("config").join("walpost.toml");
    fs::write(&file, text.as_ref()).unwrap();
    file
}

impl Invocation {
    /// Prepares `walpost <arguments>` with a clean environment: variables of this process that
    /// would configure Walpost are removed.
    pub(crate) fn new<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_walpost"));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("PG") || text.starts_with("WALPOST_") || text == "RUST_LOG" {
                command.env_remove(&name);
            }
        }
        command
            .env("HOME", reaper::scratch())
            // The tests run many Walpost processes at the same time, and these can't all listen on
            // the default port.
            .env("WALPOST_HTTP", "off")
            // Creating a slot waits for the transactions of all tests on the server, and some of
            // these stay open for a long time.
            .env("WALPOST_LOCK_TIMEOUT", "180s")
            .current_dir(reaper::scratch())
            .args(arguments);
        Self {
            command,
            reads_output: true,
            output: None,
            errors: None,
            needs_input: false,
            answer: None,
        }
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument.as_ref());
        self
    }

    pub(crate) fn args<S: AsRef<OsStr>>(self, arguments: impl IntoIterator<Item = S>) -> Self {
        arguments.into_iter().fold(self, Self::arg)
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Removes an environment variable that is set by default.
    pub(crate) fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    pub(crate) fn folder(mut self, path: &Path) -> Self {
        self.command.current_dir(path);
        self
    }

    /// Closes the read end of standard output as soon as the process has started.
    pub(crate) fn close_output(mut self) -> Self {
        self.reads_output = false;
        self
    }

    /// Redirects standard output to a file instead of capturing it.
    pub(crate) fn output_to(mut self, file: File) -> Self {
        self.output = Some(file);
        self
    }

    /// Redirects the log to a file instead of capturing it.
    pub(crate) fn log_to(mut self, file: File) -> Self {
        self.errors = Some(file);
        self
    }

    /// Starts the command through a shell with the given redirection.
    pub(crate) fn redirected(self, redirection: &str) -> Self {
        let line = format!("exec {} {redirection}", self.shell_words());
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &line]);
        self.wrapped_in(command)
    }

    /// Starts the command through a shell that first lowers a limit, by running `ulimit` with these
    /// arguments.
    pub(crate) fn limited(self, limit: &str) -> Self {
        let line = format!("ulimit {limit} && exec {}", self.shell_words());
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &line]);
        self.wrapped_in(command)
    }

    /// Runs the command in a mount namespace in which the folder is mounted read-only.
    pub(crate) fn with_read_only(self, folder: &Path) -> Self {
        let folder = folder.display();
        self.with_mounts(&format!(
            "mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
        ))
    }

    /// Runs the shell commands in `mounts` in a new mount namespace, then runs Walpost in the same
    /// namespace. If `mounts` fails, for example because this machine does not permit mounting,
    /// Walpost is not run and the exit code is 77, which Walpost does not use.
    pub(crate) fn with_mounts(self, mounts: &str) -> Self {
        let line = format!("{mounts} || exit 77; exec {}", self.shell_words());
        let mut command = Command::new("unshare");
        command.args([
            "--user",
            "--map-root-user",
            "--mount",
            "/bin/sh",
            "-c",
            &line,
        ]);
        self.wrapped_in(command)
    }

    /// Runs the command in a terminal of the given size, and captures its output.
    pub(crate) fn on_terminal(self, columns: usize, rows: usize) -> Self {
        let words = self.shell_words();
        let line = format!("stty columns {columns} rows {rows}; exec {words}");
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--command", &line, "/dev/null"]);
        command.env("SHELL", "/bin/sh");
        self.wrapped_in(command)
    }

    /// Returns the command line, quoted for a shell.
    fn shell_words(&self) -> String {
        let quoted = |text: &OsStr| format!("'{}'", text.to_str().unwrap().replace('\'', r"'\''"));
        let words = std::iter::once(self.command.get_program()).chain(self.command.get_args());
        let words: Vec<_> = words.map(quoted).collect();
        words.join(" ")
    }

    /// Replaces the command with `command`, which must start Walpost. Passes the environment
    /// variables of the replaced command to `command`.
    fn wrapped_in(mut self, mut command: Command) -> Self {
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.current_dir(reaper::scratch());
        self.command = command;
        self
    }

    /// Keeps standard input open, so that [`Walpost::answer`] can be called later.
    pub(crate) fn with_input(mut self) -> Self {
        self.needs_input = true;
        self
    }

    /// Answers the first question that the command will ask.
    pub(crate) fn answer(mut self, text: &str) -> Self {
        self.answer = Some(text.to_owned());
        self.with_input()
    }

    /// Starts the process, and waits until it is streaming.
    pub(crate) fn start_streaming(self) -> Walpost {
        let mut walpost = self.start();
        walpost.wait_for_log("streaming");
        walpost
    }

    pub(crate) fn start(mut self) -> Walpost {
        // Give the process its own process group. Otherwise, Ctrl-C would also reach Walpost, and
        // Walpost would drain instead of exiting immediately.
        let mut child = self
            .command
            .process_group(0)
            .stdin(if self.needs_input {
                Stdio::piped()
            } else {
                Stdio::null()
            })
            .stdout(self.output.map_or_else(Stdio::piped, Stdio::from))
            .stderr(self.errors.map_or_else(Stdio::piped, Stdio::from))
            .spawn()
            .expect("walpost starts");
        reaper::register(child.id(), Ending::Kill);
        let standard_output = match child.stdout.take() {
            Some(output) if self.reads_output => CapturedOutput::new(OutputStream::Output, output),
            _ => CapturedOutput::closed(),
        };
        let standard_error = match child.stderr.take() {
            Some(errors) => CapturedOutput::new(OutputStream::Error, errors),
            None => CapturedOutput::closed(),
        };
        let mut walpost = Walpost {
            child,
            standard_output,
            standard_error,
        };
        if let Some(text) = self.answer {
            walpost.answer(&text);
        }
        walpost
    }

    /// Starts the command and waits until it exits.
    pub(crate) fn finish(self) -> Finished {
        self.start().finish()
    }
}

impl Walpost {
    /// Waits for a log line that contains `text`, and returns it.
    pub(crate) fn wait_for_log(&mut self, text: &str) -> String {
        self.wait_for_logs(text, 1)
    }

    /// Waits for the `count`th log line that contains `text`, and returns it.
    pub(crate) fn wait_for_logs(&mut self, text: &str, count: usize) -> String {
        wait_for(&format!("log line {count} with {text:?}"), || {
            let line = self.standard_error.nth_line_with(text, count - 1);
            if line.is_none()
                && let Some(status) = self.child.try_wait().unwrap()
            {
                self.standard_error.join();
                let last = self.standard_error.nth_line_with(text, count - 1);
                return Some(
                    last.unwrap_or_else(|| panic!("exited with {status} before logging {text:?}")),
                );
            }
            line
        })
    }

    /// Returns a client for the process's HTTP server, which must have been started with `--http
    /// 127.0.0.1:0`.
    pub(crate) fn http(&mut self) -> Http {
        let line = self.wait_for_log("status at http://");
        let (_, address) = line.rsplit_once("http://").unwrap();
        Http::at(address.trim())
    }

    /// Returns how many log lines so far contain `text`.
    pub(crate) fn logged(&self, text: &str) -> usize {
        self.standard_error
            .text()
            .lines()
            .filter(|line| line.contains(text))
            .count()
    }

    /// Returns everything that the process has written to standard error.
    pub(crate) fn log(&self) -> String {
        self.standard_error.text()
    }

    /// Answers a question that the process has asked or will ask.
    pub(crate) fn answer(&mut self, text: &str) {
        let mut input = self.child.stdin.take().expect("an open standard input");
        // Ignore errors, because the process may have exited without asking.
        let _ = input.write_all(text.as_bytes());
    }

    /// Returns everything that the process has written to standard output.
    pub(crate) fn output(&self) -> String {
        self.standard_output.text()
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, named without the SIG prefix.
    pub(crate) fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Suspends the process.
    pub(crate) fn freeze(&self) {
        freeze(self.child.id());
    }

    /// Resumes the process after [`Walpost::freeze`].
    pub(crate) fn thaw(&self) {
        thaw(self.child.id());
    }

    /// Kills the process without a shutdown, as `kill -9` does.
    pub(crate) fn kill(mut self) -> Finished {
        self.signal("KILL");
        self.wait_for_exit(WAIT_TIMEOUT)
    }

    /// Stops the process with SIGTERM, as a service manager does, and waits until it exits.
    pub(crate) fn terminate(mut self) -> Finished {
        self.signal("TERM");
        self.wait_for_exit(WAIT_TIMEOUT)
    }

    /// Waits until the process exits.
    pub(crate) fn finish(mut self) -> Finished {
        self.wait_for_exit(WAIT_TIMEOUT)
    }

    /// Returns whether the process is still running.
    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the user and system CPU time used by all threads.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let process = Process::new(i32::try_from(self.child.id()).unwrap()).unwrap();
        let stat = process.stat().unwrap();
        (stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64
    }

    /// Returns the resident memory in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.memory("VmRSS:").expect("a running process")
    }

    /// Waits until the process exits and returns its peak resident memory in bytes.
    pub(crate) fn peak_memory_at_exit(&mut self) -> u64 {
        let mut peak = 0;
        while self.is_running() {
            peak = peak.max(self.memory("VmHWM:").unwrap_or(0));
        }
        peak
    }

    /// Returns the peak resident memory so far in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        self.memory("VmHWM:").expect("a running process")
    }

    /// Returns the named value from /proc/PID/status in bytes, or `None` if the process is exiting.
    fn memory(&self, name: &str) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kilobytes * 1024)
    }

    /// Asserts that the process, which must have exited, has printed no secrets.
    fn expect_no_leak(&mut self) {
        for stream in [&mut self.standard_output, &mut self.standard_error] {
            stream.join();
            stream.leaks.expect_none();
        }
    }

    fn wait_for_exit(&mut self, within: Duration) -> Finished {
        let status: ExitStatus = wait_for_exit(&mut self.child, within)
            .unwrap_or_else(|| panic!("walpost did not exit within {within:?}"));
        expect_no_crash(status);
        self.expect_no_leak();
        Finished {
            code: status.code(),
            stdout: self.standard_output.text(),
            stderr: self.standard_error.text(),
        }
    }
}

impl Drop for Walpost {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let status = wait_for_exit(&mut self.child, WAIT_TIMEOUT);
        if thread::panicking() {
            eprintln!("--- walpost {} ---\n{}", self.child.id(), self.log());
        } else {
            status.into_iter().for_each(expect_no_crash);
            self.expect_no_leak();
        }
    }
}

/// Asserts that no signal ended the process, except those that tests send.
fn expect_no_crash(status: ExitStatus) {
    // SIGINT, SIGKILL and SIGTERM.
    let is_known = |signal| [2, 9, 15].contains(&signal);
    assert!(
        status.signal().is_none_or(is_known),
        "walpost crashed: {status}"
    );
}

/// Returns the text that follows the first occurrence of `prefix`, up to the next space.
pub(crate) fn word_after<'t>(text: &'t str, prefix: &str) -> &'t str {
    let (_, rest) = text.split_once(prefix).expect(prefix);
    rest.split(' ').next().unwrap()
}

impl Finished {
    /// Asserts that the process exited with this code.
    pub(crate) fn expect_code(self, code: i32) -> Self {
        assert_eq!(
            self.code,
            Some(code),
            "exit code; standard output and error:\n{}\n{}",
            self.stdout,
            self.stderr
        );
        self
    }

    /// Returns whether standard output or the log contains the text, ignoring case.
    pub(crate) fn mentions(&self, text: &str) -> bool {
        let output = format!("{}\n{}", self.stdout, self.stderr).to_lowercase();
        output.contains(&text.to_lowercase())
    }

    /// Asserts that standard output or the log contains each of the strings, ignoring case.
    pub(crate) fn expect_mentions(self, texts: &[&str]) -> Self {
        let missing: String = texts.iter().filter(|text| !self.mentions(text)).fold(
            String::new(),
            |mut list, text| {
                write!(list, "\n  {text}").unwrap();
                list
            },
        );
        assert!(
            missing.is_empty(),
            "the output does not contain:{missing}\n--- output ---\n{}{}",
            self.stdout,
            self.stderr
        );
        self
    }
}

/// An output stream of a child process, captured as it arrives.
struct CapturedOutput {
    bytes: Arc<Mutex<Vec<u8>>>,
    leaks: Arc<Leaks>,
    reader: Option<JoinHandle<()>>,
}

impl CapturedOutput {
    fn new(which: OutputStream, stream: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let leaks = Arc::new(Leaks::default());
        let (shared, seen) = (Arc::clone(&bytes), Arc::clone(&leaks));
        let reader = thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while stream
                .read_until(b'\n', &mut line)
                .is_ok_and(|read| read > 0)
            {
                seen.check_line(which, &line);
                shared.lock().unwrap().append(&mut line);
            }
        });
        Self {
            bytes,
            leaks,
            reader: Some(reader),
        }
    }

    fn closed() -> Self {
        Self {
            bytes: Arc::default(),
            leaks: Arc::default(),
            reader: None,
        }
    }

    fn join(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }

    fn nth_line_with(&self, text: &str, n: usize) -> Option<String> {
        self.text()
            .lines()
            .filter(|line| line.contains(text))
            .nth(n)
            .map(str::to_owned)
    }
}
