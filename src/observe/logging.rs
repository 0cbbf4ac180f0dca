//! Logs to standard error, as text or JSON. Every event is written as a single line, regardless of
//! what its message and fields contain. A line contains no terminal control sequences except for
//! the colors that this module sets. [`log_queue`](super::log_queue) writes the lines.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::panic::{PanicHookInfo, set_hook};
use std::sync::LazyLock;

use tracing::field::{Field, Visit};
use tracing::{Level, Metadata, error, warn};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FormatFields, MakeWriter};

use super::log_queue::{Importance, LogQueue};
use crate::escape::{self, Escaping};
use crate::progress;
use crate::progress::BarSafeStderr;

static QUEUE: LazyLock<LogQueue> = LazyLock::new(LogQueue::default);

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Text, colored on a terminal.
    #[default]
    Auto,
    /// Text without colors.
    Text,
    /// One JSON object per line.
    Json,
}

/// Starts logging for the whole program. `filter` is a level, or directives as accepted by
/// `tracing_subscriber::EnvFilter`. Dropping the returned guard waits, for a limited time, until
/// all lines are written.
///
/// # Errors
/// Returns an error if the filter is invalid or if the log thread can't be started.
pub(crate) fn start(format: LogFormat, filter: &str) -> Result<FlushGuard, String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        format!("--log-level {filter:?}: {error}; expected error, warn, info, debug or trace")
    })?;
    QUEUE
        .write_to(BarSafeStderr, |count| {
            warn!(
                count,
                "log lines were dropped: standard error was not read in time, or could not be written to"
            );
        })
        .map_err(|error| format!("failed to start the thread that writes the log: {error}"))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // `tracing_subscriber` would print its own errors to standard error, and panic if standard
        // error is closed.
        .log_internal_errors(false)
        .with_target(false);
    match format {
        LogFormat::Json => builder
            .json()
            .flatten_event(true)
            .with_writer(EscapedJson(QueueWriters))
            .init(),
        LogFormat::Text | LogFormat::Auto => builder
            .with_ansi(format == LogFormat::Auto && progress::is_terminal())
            .fmt_fields(EscapedFields)
            .with_writer(QueueWriters)
            .init(),
    }
    set_hook(Box::new(log_panic));
    Ok(FlushGuard)
}

/// Waits until all lines are written, unless writing to standard error is blocked.
pub(crate) fn flush() {
    QUEUE.flush();
}

/// Returns the number of log lines dropped since the process started.
pub(crate) fn dropped_lines() -> u64 {
    QUEUE.dropped()
}

/// Calls [`flush`] when dropped.
pub(crate) struct FlushGuard;

impl Drop for FlushGuard {
    fn drop(&mut self) {
        flush();
    }
}

/// Logs a panic. Replaces the standard library's hook, which blocks if standard error is not read.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let backtrace = Backtrace::capture();
    match backtrace.status() {
        BacktraceStatus::Captured => error!(%backtrace, "{panic}"),
        _ => error!("{panic}"),
    }
    // Write the message now, because the process may abort after this hook returns.
    flush();
}

/// Creates a writer for each line, according to its level.
struct QueueWriters;

impl MakeWriter<'_> for QueueWriters {
    type Writer = QueueWriter;

    fn make_writer(&self) -> QueueWriter {
        QueueWriter(Importance::Normal)
    }

    fn make_writer_for(&self, metadata: &Metadata<'_>) -> QueueWriter {
        QueueWriter(match *metadata.level() {
            Level::DEBUG | Level::TRACE => Importance::Verbose,
            Level::INFO | Level::WARN | Level::ERROR => Importance::Normal,
        })
    }
}

/// Appends each line to the queue.
struct QueueWriter(Importance);

impl Write for QueueWriter {
    /// Accepts the entire buffer: `tracing_subscriber` writes a whole line at once.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        QUEUE.push(self.0, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats messages and fields like `tracing_subscriber`, but escapes control characters. Escaping
/// the finished line instead would also escape the control sequences for colors.
struct EscapedFields;

impl<'writer> FormatFields<'writer> for EscapedFields {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let mut visitor = Fields {
            writer: &mut writer,
            is_first: true,
            written: Ok(()),
        };
        fields.record(&mut visitor);
        visitor.written
    }
}

struct Fields<'f, 'writer> {
    writer: &'f mut Writer<'writer>,
    is_first: bool,
    written: fmt::Result,
}

impl Fields<'_, '_> {
    fn write(&mut self, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
        // Omit the fields that describe where a message from the `log` crate originated. For a
        // PostgreSQL notice, they would contain the path of a source file.
        if field.name().starts_with("log.") {
            return Ok(());
        }
        let separator = if self.is_first { "" } else { " " };
        self.is_first = false;
        self.writer.write_str(separator)?;
        match field.name() {
            "message" => {}
            name if self.writer.has_ansi_escapes() => {
                write!(self.writer, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?;
            }
            name => write!(self.writer, "{name}=")?,
        }
        write!(Escaping(self.writer), "{value:?}")
    }
}

impl Visit for Fields<'_, '_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.written.is_ok() {
            self.written = self.write(field, value);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.record_debug(field, &format_args!("{value}")),
            _ => self.record_debug(field, &value),
        }
    }
}

/// A writer that escapes terminal control characters in JSON lines.
struct EscapedJson<W>(W);

impl<W: Write> Write for EscapedJson<W> {
    /// Accepts the entire buffer, which is always a whole line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.0.write_all(escape::in_json(&text).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl MakeWriter<'_> for EscapedJson<QueueWriters> {
    type Writer = EscapedJson<QueueWriter>;

    fn make_writer(&self) -> Self::Writer {
        EscapedJson(self.0.make_writer())
    }

    fn make_writer_for(&self, metadata: &Metadata<'_>) -> Self::Writer {
        EscapedJson(self.0.make_writer_for(metadata))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, PoisonError};

    use tracing::info;
    use tracing::subscriber::with_default;

    use super::*;

    const EVIL: &str = "x\x1b]0;owned\x07\nERROR\rfake\u{9b}2J\u{7f}\u{202e}\u{2028}é";

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            lines.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        fn text(&self) -> String {
            let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            String::from_utf8(lines.clone()).expect("text")
        }
    }

    fn log_events() {
        let source = io::Error::other(EVIL);
        let dynamic: &(dyn std::error::Error + 'static) = &source;
        error!(plain = EVIL, shown = %EVIL, debug = ?[EVIL], error = dynamic, count = 1, "{EVIL}");
        info!("another");
    }

    fn text_output(is_coloured: bool) -> String {
        let lines = Lines::default();
        let to = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(is_coloured)
            .without_time()
            .with_target(false)
            .fmt_fields(EscapedFields)
            .with_writer(move || to.clone())
            .finish();
        with_default(subscriber, log_events);
        lines.text()
    }

    #[test]
    fn writes_an_event_as_one_line_without_control_characters() {
        let text = text_output(false);
        let shown = r"x\u{1b}]0;owned\u{7}\nERROR\rfake\u{9b}2J\u{7f}\u{202e}\u{2028}é";
        assert_eq!(
            text,
            format!(
                "ERROR {shown} plain=\"{shown}\" shown={shown} debug=[\"{shown}\"] error={shown} count=1\n INFO another\n"
            )
        );
    }

    #[test]
    fn writes_no_control_sequences_other_than_colors_to_a_terminal() {
        let text = text_output(true);
        assert!(text.contains("\x1b["), "{text:?}");
        let mut plain = text;
        for colour in ["\x1b[0m", "\x1b[2m", "\x1b[3m", "\x1b[31m", "\x1b[32m"] {
            plain = plain.replace(colour, "");
        }
        assert_eq!(plain, text_output(false));
    }

    #[test]
    fn writes_an_event_in_json_as_one_line_without_control_characters() {
        let lines = Lines::default();
        let to = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_writer(move || EscapedJson(to.clone()))
            .finish();
        with_default(subscriber, log_events);
        let text = lines.text();
        assert_eq!(text.lines().count(), 2, "{text:?}");
        assert!(!text.contains(|c| c != '\n' && escape::is_control(c)));
        let line = text.lines().next().expect("a line");
        let event: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(event["message"], EVIL);
        assert_eq!(event["shown"], EVIL);
    }
}
