//! A program that the configuration names, and that prints a secret: a password or a token.
//!
//! It is run without a shell, and not for ever. What it prints is given to who asked and goes nowhere else. What it says on
//! standard error is for the person who wrote it, and is told where it fails. Imports nothing of ours.

use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process_group};

/// How long it may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);
/// What a secret can have at most, in bytes.
const OUTPUT_BYTES_MAX: usize = 64 << 10;
/// How much of standard error is told, in bytes: the end, where the reason most often is.
const SAID_BYTES_MAX: usize = 400;
/// How soon it is seen that it has ended and somebody else still has its output open.
const LOOK: Duration = Duration::from_millis(50);

/// A program and its arguments.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Program {
    path: String,
    arguments: Vec<String>,
}

/// It gave nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// There is no process.
    #[error("can't be started: {0}")]
    Start(String),
    /// It was ended by us.
    #[error("has not ended within {} s, and was killed{said}", limit.as_secs())]
    Slow {
        limit: Duration,
        /// See [`ProgramError::Failed`].
        said: String,
    },
    /// Its exit code is not 0.
    #[error("has ended with {status}{said}")]
    Failed {
        status: ExitStatus,
        /// What it has written to standard error, as it goes on after the status.
        said: String,
    },
    /// There is nothing on standard output.
    #[error("has printed nothing{0}")]
    Nothing(String),
    /// What it prints is no secret.
    #[error("has printed more than {OUTPUT_BYTES_MAX} bytes, expected a password or a token")]
    TooMuch,
}

impl fmt::Debug for Program {
    // Its arguments can be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

impl Program {
    /// Of a program and its arguments, as the configuration has them.
    ///
    /// # Errors
    /// There is no program that can be started so; the message says what was expected.
    pub(crate) fn new(argv: &[String]) -> Result<Self, String> {
        let Some((path, arguments)) = argv.split_first() else {
            return Err(
                "expected a program and its arguments: [\"/usr/bin/...\", \"...\"]".to_owned(),
            );
        };
        if !Path::new(path).is_absolute() {
            return Err(format!(
                "{path:?} is no absolute path, and no shell looks for the program: expected one like \"/usr/bin/aws\", and each \
                 argument in quotes of its own"
            ));
        }
        if argv.iter().any(|argument| argument.contains('\0')) {
            return Err("a program and its arguments have no NUL in them".to_owned());
        }
        Ok(Self {
            path: path.clone(),
            arguments: arguments.to_vec(),
        })
    }

    /// Where it is. Its arguments are shown to nobody: they can be secrets.
    #[must_use]
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Runs it, and gives what it has printed. Blocks for as long as `limit`.
    ///
    /// # Errors
    /// It can't be started, takes too long, fails, or prints nothing or too much.
    pub(crate) fn run(&self, limit: Duration) -> Result<Vec<u8>, ProgramError> {
        let until = Instant::now() + limit;
        let mut child = Command::new(&self.path)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // What it has started itself is ended with it.
            .process_group(0)
            .spawn()
            .map_err(|error| ProgramError::Start(error.to_string()))?;
        let mut output = Pipe::new(child.stdout.take());
        let mut said = Pipe::new(child.stderr.take());
        let ended = until_ended(&mut child, &mut output, &mut said, until);
        let status = match ended {
            Ok(Some(status)) => status,
            ended => {
                kill(&mut child);
                let said = said.told(&output.bytes);
                return Err(match ended {
                    Err(error) => ProgramError::Start(error.to_string()),
                    Ok(_) => ProgramError::Slow { limit, said },
                });
            }
        };
        let said = said.told(&output.bytes);
        if !status.success() {
            return Err(ProgramError::Failed { status, said });
        }
        match output.bytes.len() {
            0 => Err(ProgramError::Nothing(said)),
            1..=OUTPUT_BYTES_MAX => Ok(output.bytes),
            _ => Err(ProgramError::TooMuch),
        }
    }
}

/// Reads what it prints until it has ended; nothing where it has not by then.
fn until_ended(
    child: &mut Child,
    output: &mut Pipe<impl Read + AsFd>,
    said: &mut Pipe<impl Read + AsFd>,
    until: Instant,
) -> io::Result<Option<ExitStatus>> {
    let mut pause = Duration::from_millis(1);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        match (&output.from, &said.from) {
            (None, None) => {
                std::thread::sleep(pause.min(left));
                pause = (pause * 2).min(LOOK);
            }
            _ => _ = wait(output, said, left.min(LOOK))?,
        }
        if let Some(status) = child.try_wait()? {
            // What it has written is there. Who has inherited its output from it can have that open for ever.
            while wait(output, said, Duration::ZERO)? {
                if Instant::now() >= until {
                    break;
                }
            }
            return Ok(Some(status));
        }
    }
}

/// Waits for something to read, and reads it; says whether there was something.
fn wait(
    output: &mut Pipe<impl Read + AsFd>,
    said: &mut Pipe<impl Read + AsFd>,
    limit: Duration,
) -> io::Result<bool> {
    let mut are_ready = [false; 2];
    {
        let fds = [
            output.from.as_ref().map(AsFd::as_fd),
            said.from.as_ref().map(AsFd::as_fd),
        ];
        let mut asked: Vec<_> = fds
            .iter()
            .flatten()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        if asked.is_empty() {
            return Ok(false);
        }
        let limit = rustix::event::Timespec::try_from(limit).map_err(io::Error::other)?;
        match poll(&mut asked, Some(&limit)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let mut answers = asked.iter().map(|fd| !fd.revents().is_empty());
        for (ready, fd) in are_ready.iter_mut().zip(&fds) {
            *ready = fd.is_some() && answers.next().unwrap_or_default();
        }
    }
    let [output_is_ready, said_is_ready] = are_ready;
    if output_is_ready {
        output.read(OUTPUT_BYTES_MAX)?;
    }
    if said_is_ready {
        said.read(SAID_BYTES_MAX)?;
    }
    Ok(output_is_ready || said_is_ready)
}

fn kill(child: &mut Child) {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(group) = group {
        // It can have ended meanwhile.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

/// What comes from the program.
struct Pipe<R> {
    /// Nothing once it has closed it.
    from: Option<R>,
    bytes: Vec<u8>,
}

impl<R: Read> Pipe<R> {
    fn new(from: Option<R>) -> Self {
        let bytes = Vec::new();
        Self { from, bytes }
    }

    /// Reads what is there. Of more than `bytes_max` bytes the end is kept, and one byte more than that tells of it.
    fn read(&mut self, bytes_max: usize) -> io::Result<()> {
        let Some(from) = &mut self.from else {
            return Ok(());
        };
        let mut bytes = [0; 4096];
        match from.read(&mut bytes) {
            Ok(0) => self.from = None,
            Ok(count) => {
                self.bytes.extend_from_slice(&bytes[..count]);
                let surplus = self.bytes.len().saturating_sub(bytes_max + 1);
                self.bytes.drain(..surplus);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What was said, as it goes on after a message; nothing of it where the secret is in it.
    fn told(&self, output: &[u8]) -> String {
        let secret = output.trim_ascii();
        let repeats = |secret: &[u8]| {
            !secret.is_empty()
                && self
                    .bytes
                    .windows(secret.len())
                    .any(|window| window == secret)
        };
        let lines = secret.split(|byte| *byte == b'\n');
        let text = String::from_utf8_lossy(&self.bytes);
        match text.trim() {
            "" => String::new(),
            _ if lines.into_iter().any(|line| repeats(line.trim_ascii())) => {
                ". What it said on standard error repeats what it has printed, and is not shown"
                    .to_owned()
            }
            text => format!(". It said: {text}"),
        }
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn what_it_prints_is_given_and_what_it_says_is_told_where_it_fails() {
        assert_eq!(
            run("echo secret; echo noise >&2"),
            Ok("secret\n".to_owned())
        );
        let error = run("echo part; echo no such role >&2; exit 3").expect_err("it fails");
        assert_eq!(
            error,
            "has ended with exit status: 3. It said: no such role"
        );
        let error = run("echo nobody is logged in >&2").expect_err("nothing");
        assert_eq!(error, "has printed nothing. It said: nobody is logged in");
        let error = run("kill -9 $$").expect_err("killed");
        assert!(error.contains("signal: 9"), "{error}");
    }

    #[test]
    fn secret_that_it_repeats_on_standard_error_is_not_told() {
        for script in [
            "echo hunter2; echo got hunter2 >&2; exit 1",
            "echo '{'; echo hunter2; echo '}'; echo 'got { hunter2 }' >&2; exit 1",
        ] {
            let error = run(script).expect_err("it fails");
            assert!(!error.contains("hunter2"), "{error}");
            assert!(error.contains("is not shown"), "{error}");
        }
    }

    #[test]
    fn end_of_much_that_is_said_is_told_and_too_much_that_is_printed_is_refused() {
        let error =
            run("i=0; while [ $i -lt 3000 ]; do echo line $i >&2; i=$((i+1)); done; exit 1");
        let error = error.expect_err("it fails");
        assert!(error.ends_with("line 2999"), "{error}");
        assert!(error.len() < 2 * SAID_BYTES_MAX, "{error}");
        let error = run("head -c 300000 /dev/zero").expect_err("too much");
        assert!(error.contains("more than 65536 bytes"), "{error}");
    }

    #[test]
    fn program_that_does_not_end_is_killed_with_what_it_has_started() {
        let began = Instant::now();
        let limit = Duration::from_millis(200);
        let ran = shell("echo waiting >&2; sleep 1000 & echo $! >&2; wait").run(limit);
        let Err(ProgramError::Slow { said, .. }) = ran else {
            panic!("{ran:?}");
        };
        assert!(began.elapsed() < Duration::from_secs(20));
        let child = said.rsplit(char::is_whitespace).next().expect("a number");
        let is_there = || {
            let state = std::fs::read_to_string(format!("/proc/{child}/stat"));
            state.is_ok_and(|state| !state.contains(") Z "))
        };
        while is_there() {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "{child} is there"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn output_that_another_process_has_open_is_not_waited_for() {
        let began = Instant::now();
        assert_eq!(run("sleep 5 & echo secret"), Ok("secret\n".to_owned()));
        assert!(began.elapsed() < Duration::from_secs(4));
    }

    #[test]
    fn no_shell_reads_the_arguments_and_no_path_is_searched() {
        let argv = ["/bin/echo", "$HOME", "`id`", ";", "*"].map(str::to_owned);
        let program = Program::new(&argv).expect("a program");
        let printed = program.run(LIMIT).expect("output");
        assert_eq!(printed, b"$HOME `id` ; *\n");
        assert_eq!(format!("{program:?}"), "/bin/echo");
        for argv in [&[][..], &["echo"], &["./echo", "x"], &["/bin/echo", "a\0b"]] {
            let argv: Vec<_> = argv.iter().map(|text| (*text).to_owned()).collect();
            Program::new(&argv).expect_err("no program");
        }
        let missing = Program::new(&["/nonexistent/program".to_owned()]).expect("a program");
        let error = missing.run(LIMIT).expect_err("there is none").to_string();
        assert!(error.contains("can't be started: No such file"), "{error}");
    }
}
