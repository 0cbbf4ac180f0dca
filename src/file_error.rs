//! Explains errors that occur when a file is written: which limit was reached, and how to raise it.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Returns the error from writing `file`, with the explanation from [`reason`].
pub(crate) fn explained(file: &str, error: &io::Error) -> io::Error {
    let text = format!("failed to write {file}: {}", reason(error));
    io::Error::new(error.kind(), text)
}

/// Returns the system's error message, followed by the remedy if a limit was reached.
pub(crate) fn reason(error: &io::Error) -> String {
    let remedy = error.raw_os_error().and_then(|code| {
        let limit = |resource| getrlimit(resource).current;
        remedy(Errno::from_raw_os_error(code), limit)
    });
    match remedy {
        Some(remedy) => format!("{error}. {remedy}"),
        None => error.to_string(),
    }
}

fn remedy(error: Errno, limit: impl Fn(Resource) -> Option<u64>) -> Option<String> {
    Some(match error {
        Errno::FBIG => match limit(Resource::Fsize) {
            Some(bytes) => format!(
                "The maximum size of a file is {bytes} bytes (RLIMIT_FSIZE). Raise it: ulimit -f unlimited, or in a \
                 systemd unit LimitFSIZE=infinity"
            ),
            None => "The file system does not allow a larger file. Write to another file system"
                .to_owned(),
        },
        Errno::NOSPC | Errno::DQUOT => {
            "Free some space, or write to another file system; for temporary files, set TMPDIR"
                .to_owned()
        }
        Errno::MFILE => format!(
            "The limit on open files and connections is {} (RLIMIT_NOFILE). Raise it: ulimit -n 65536, or in a systemd \
             unit LimitNOFILE=65536",
            limit(Resource::Nofile).unwrap_or_default()
        ),
        Errno::NFILE => {
            "The system-wide limit on open files has been reached. Raise it: sysctl fs.file-max=NUMBER"
                .to_owned()
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explains_how_to_raise_the_limit_that_was_reached() {
        for (error, limit, expected) in [
            (Errno::FBIG, Some(512), "is 512 bytes"),
            (
                Errno::FBIG,
                None,
                "The file system does not allow a larger file",
            ),
            (Errno::NOSPC, None, "TMPDIR"),
            (Errno::DQUOT, None, "TMPDIR"),
            (
                Errno::MFILE,
                Some(20),
                "The limit on open files and connections is 20",
            ),
            (Errno::NFILE, None, "sysctl fs.file-max"),
        ] {
            let remedy = remedy(error, |_| limit).expect("a remedy");
            assert!(remedy.contains(expected), "{remedy}");
        }
        assert_eq!(remedy(Errno::IO, |_| None), None);
    }

    #[test]
    fn names_the_file_that_could_not_be_written() {
        let error = io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error());
        let text = explained("report.jsonl", &error).to_string();
        let expected =
            "failed to write report.jsonl: No space left on device (os error 28). Free some space";
        assert!(text.starts_with(expected), "{text}");
    }
}
