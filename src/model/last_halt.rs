//! The reason for a pipeline's last halt, as stored in the database.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::time::unix_micros;

/// Maximum length of a stored reason; longer reasons are truncated.
const MAX_REASON_BYTES: usize = 4096;

/// A description of a pipeline's halt, with the time, the host and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastHalt {
    /// When the pipeline halted, in RFC 3339 format.
    pub at: String,
    /// The host that Walpost ran on.
    pub host: String,
    pub version: String,
    /// The text of the error, as it appears in the log.
    pub reason: String,
}

impl LastHalt {
    /// Creates a description of a halt that happened now, on this host.
    #[must_use]
    pub(crate) fn now(reason: &str) -> Self {
        // A text value in PostgreSQL can't contain NUL characters.
        let mut reason = reason.replace('\0', "?");
        let end = (0..=reason.len().min(MAX_REASON_BYTES)).rev();
        let end = end.into_iter().find(|&end| reason.is_char_boundary(end));
        reason.truncate(end.unwrap_or_default());
        let micros = i64::try_from(unix_micros()).unwrap_or_default();
        Self {
            at: format!(
                "{:.0}",
                Timestamp::from_microsecond(micros).unwrap_or_default()
            ),
            host: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            reason,
        }
    }

    /// Returns a one-line description.
    #[must_use]
    pub(crate) fn describe(&self) -> String {
        let Self {
            at,
            host,
            version,
            reason,
        } = self;
        format!("halted at {at} on {host} (Walpost {version}): {reason}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncates_a_long_reason_at_a_character_boundary() {
        let halt = LastHalt::now(&format!("a\0{}", "ü".repeat(MAX_REASON_BYTES)));
        assert!(halt.reason.starts_with("a?ü"), "{}", halt.reason);
        assert!(halt.reason.len() <= MAX_REASON_BYTES);
        assert!(halt.reason.len() > MAX_REASON_BYTES - 4);
        let text = halt.describe();
        assert!(
            text.contains(&format!("on {} (Walpost ", halt.host)),
            "{text}"
        );
    }
}
