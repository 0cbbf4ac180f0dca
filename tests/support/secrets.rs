//! What no program may print: a password, and in a log a payload.

use std::sync::{LazyLock, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;

/// Every password and passphrase of the tests contains this, so that it can be searched for where
/// none may be.
pub(crate) const SECRET: &str = "s3cr3t";

/// Every payload of the tests contains this, so that it can be searched for where no payload may
/// be.
pub(crate) const PAYLOAD_MARK: &str = "only-for-the-consumer";

/// [`SECRET`] as it is, percent-encoded, in hexadecimal, as a list of bytes, and in base64 behind
/// any number of other bytes.
static FORMS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let each = |form: fn(u8) -> String| SECRET.bytes().map(form).collect::<Vec<_>>();
    let base64 = |before: usize| {
        let bytes = [vec![0; before], SECRET.into()].concat();
        let text = STANDARD_NO_PAD.encode(&bytes);
        // The characters that are made of its bits alone.
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

/// Which stream of a program it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output, where records may be.
    Output,
    /// The log.
    Error,
}

/// Whether `text` holds what may not be in that stream.
pub(crate) fn is_leak(stream: Stream, text: &str) -> bool {
    FORMS.iter().any(|form| text.contains(form))
        || stream == Stream::Error && text.contains(PAYLOAD_MARK)
}

/// # Panics
/// `text`, which a program printed, holds what may not be in that stream.
pub(crate) fn expect_none(stream: Stream, text: &str) {
    let leaks: Vec<_> = text.lines().filter(|line| is_leak(stream, line)).collect();
    assert!(leaks.is_empty(), "a secret was printed: {leaks:#?}");
}

/// Leaks in what is read line by line as it comes.
#[derive(Default)]
pub(crate) struct Leaks(Mutex<Vec<String>>);

impl Leaks {
    /// Looks at a line.
    pub(crate) fn look(&self, stream: Stream, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        if is_leak(stream, &line) {
            self.0.lock().unwrap().push(line.into_owned());
        }
    }

    /// # Panics
    /// There were some.
    pub(crate) fn expect_none(&self) {
        let leaks = std::mem::take(&mut *self.0.lock().unwrap());
        assert!(leaks.is_empty(), "a secret was printed: {leaks:#?}");
    }
}
