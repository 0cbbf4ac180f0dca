//! Detects text that programs must not print: passwords anywhere, and payloads in logs.

use std::sync::{LazyLock, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;

/// Text that every password and passphrase in the tests contains, so that output can be searched
/// for it.
pub(crate) const SECRET: &str = "s3cr3t";

/// Text that every payload in the tests contains, so that logs can be searched for it.
pub(crate) const PAYLOAD_MARK: &str = "only-for-the-consumer";

/// The forms of [`SECRET`] to search for: unchanged, percent-encoded, in hexadecimal, as a list of
/// bytes, and in base64 at every alignment.
static FORMS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let each = |form: fn(u8) -> String| SECRET.bytes().map(form).collect::<Vec<_>>();
    let base64 = |before: usize| {
        let bytes = [vec![0; before], SECRET.into()].concat();
        let text = STANDARD_NO_PAD.encode(&bytes);
        // Keep only those base64 characters that encode bits of the secret and no others.
        text[(8 * before).div_ceil(6)..8 * bytes.len() / 6].to_owned()
    };
    vec![
        SECRET.to_owned(),
        each(|byte| format!("%{byte:02x}")).concat(),
        each(|byte| format!("{byte:02x}")).concat(),
        each(|byte| byte.to_string()).join(", "),
        base64(0),
        base64(1),
        base64(2),
    ]
});

/// One of a program's output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputStream {
    /// Standard output, which may contain records.
    Output,
    /// Standard error, which contains the log.
    Error,
}

/// Returns whether `text` contains something that must not appear in the stream.
pub(crate) fn is_leak(stream: OutputStream, text: &str) -> bool {
    FORMS.iter().any(|form| text.contains(form))
        || stream == OutputStream::Error && text.contains(PAYLOAD_MARK)
}

/// Asserts that the output of a program contains no secrets.
///
/// # Panics
/// Panics if `text` contains something that must not appear in the stream.
pub(crate) fn expect_none(stream: OutputStream, text: &str) {
    let leaks: Vec<_> = text.lines().filter(|line| is_leak(stream, line)).collect();
    assert!(leaks.is_empty(), "a secret was printed: {leaks:#?}");
}

/// Collects leaks from output that is checked line by line as it arrives.
#[derive(Default)]
pub(crate) struct Leaks(Mutex<Vec<String>>);

impl Leaks {
    /// Checks a line.
    pub(crate) fn check_line(&self, stream: OutputStream, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        if is_leak(stream, &line) {
            self.0.lock().unwrap().push(line.into_owned());
        }
    }

    /// Asserts that no leaks were found.
    ///
    /// # Panics
    /// Panics if leaks were found.
    pub(crate) fn expect_none(&self) {
        let leaks = std::mem::take(&mut *self.0.lock().unwrap());
        assert!(leaks.is_empty(), "a secret was printed: {leaks:#?}");
    }
}
