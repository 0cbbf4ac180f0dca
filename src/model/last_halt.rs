//! Why a pipeline halted last, as the database keeps it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::time::unix_micros;

/// A longer reason is cut.
const MAX_REASON_BYTES: usize = 4096;

/// The halt of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastHalt {
    /// When it halted, in RFC 3339.
    pub at: String,
    /// The machine that Walpost ran on.
    pub host: String,
    /// Walpost's version.
    pub version: String,
    /// What the log says.
    pub reason: String,
}

impl LastHalt {
    /// A halt that happens now, on this machine.
    #[must_use]
    pub(crate) fn now(reason: &str) -> Self {
        // PostgreSQL stores no NUL.
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

    /// All of it in one line.
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
    fn long_reason_is_cut_between_characters() {
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
