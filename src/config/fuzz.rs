//! Fuzz target that loads arbitrary configuration files and checks the resulting settings.

use std::time::Duration;

use super::values::{Bytes, parse_duration, parse_size};
use super::*;
use crate::kafka::properties;
use crate::outbox::headers::is_reserved;
use crate::outbox::route::is_topic_name;
use crate::pipeline::settings::SinkSettings;

/// A password that the fuzzer is unlikely to generate by chance.
const PASSWORD: &str = "q7Zr0vT2mXw9";
/// Lines in which the password is part of a value that must never appear in any output.
const SECRETS: [&str; 6] = [
    "\"sasl.password\" = \"q7Zr0vT2mXw9\"",
    "\"ssl.key.password\" = \"q7Zr0vT2mXw9\"",
    "\"sasl.pasword\" = \"q7Zr0vT2mXw9\"",
    "\"sasl.password\" = [\"q7Zr0vT2mXw9\"]",
    "postgres = \"postgresql://u:q7Zr0vT2mXw9@h/db\"",
    "postgres = \"host=h user=u password=q7Zr0vT2mXw9 sslmode=none\"",
];

/// Loads `data` as walpost.toml, after replacing each line that consists of `$` and a digit with a
/// line that contains a secret.
///
/// # Panics
/// Panics if any output contains a secret, or if the settings violate documented rules.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let must_hide_password = !text.contains(PASSWORD) && !text.contains(['\'', '\\']) && {
        // Within a multi-line string, the inserted lines would be ordinary text rather than
        // settings that contain secrets.
        !text.contains("\"\"\"")
    };
    let lines = text.lines().map(|line| match line.strip_prefix('$') {
        Some(digit) => {
            let index: Option<usize> = digit.parse().ok();
            let secret = index.and_then(|index| SECRETS.get(index));
            secret.copied().unwrap_or(line)
        }
        None => line,
    });
    let text = lines.collect::<Vec<_>>().join("\n");

    let shown = match loaded(&text) {
        Ok((read, settings)) => {
            settings.iter().for_each(check_settings);
            format!("{read} {settings:?}")
        }
        Err(error) => error,
    };
    assert!(!must_hide_password || !shown.contains(PASSWORD), "{shown}");
}

/// Loads the text without flags or environment variables. Returns the file's `Debug` output and the
/// settings or, on failure, the error's `Display` and `Debug` output.
fn loaded(text: &str) -> Result<(String, Vec<PipelineSettings>), String> {
    let file: super::File = syntax::parse(text).map_err(|(line, reason)| {
        let lines = text.matches('\n').count() + 1;
        assert!((1..=lines).contains(&line), "line {line} of {lines}");
        reason
    })?;
    file.pipeline.iter().for_each(check_values);
    let read = format!("{file:?}");
    let given = Given {
        connection: &ConnectionArgs::default(),
        records: None,
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    let env = |name: &str| (name == "USER").then(|| "me".to_owned());
    match load_file(
        Some((Path::new("walpost.toml"), file)),
        &given,
        &env,
        std::iter::empty(),
    ) {
        Ok(defined) => {
            let defined = defined.into_iter();
            Ok((read, defined.map(|defined| defined.settings).collect()))
        }
        Err(error) => Err(format!("{read} {error} {error:?}")),
    }
}

fn check_settings(settings: &PipelineSettings) {
    let is_name = |text: &str, max: usize| {
        (1..=max).contains(&text.len())
            && text
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_'))
    };
    assert!(is_name(&settings.name, 48));
    assert!(is_name(&settings.target.slot, 63));
    assert!((1..=63).contains(&settings.target.publication.len()));
    assert!(settings.window_records > 0 && settings.window_bytes > 0);
    assert!((1024..=1 << 30).contains(&settings.row_bytes_max));
    assert!(settings.link_timeout >= Duration::from_secs(1));
    assert!(is_topic_name(&settings.dead_letters.topic) || !settings.dead_letters.is_enabled());
    if let Some(table) = settings.target.outbox.table() {
        assert_eq!(table.to_string().parse().as_ref(), Ok(table));
    }
    for (name, template) in &settings.outbox.headers {
        assert!(!name.is_empty() && !is_reserved(name.as_bytes()));
        assert_eq!(template.to_string().parse().as_ref(), Ok(template));
    }
    if let SinkSettings::Kafka { properties, .. } = &settings.sink {
        assert_eq!(properties::check(properties), Ok(()));
    }
}

/// Checks how sizes and durations were parsed, using an independent parser for simple values.
fn check_values(pipeline: &FilePipeline) {
    let sizes = [&pipeline.window_bytes, &pipeline.max_row_bytes];
    for text in sizes.into_iter().flatten().map(ToString::to_string) {
        let found = parse_size(&text).map(|Bytes(bytes)| bytes);
        if let Some(expected) = parse_simple(&text, &SIZES) {
            assert_eq!(found, Ok(expected), "{text:?}");
        }
    }
    let durations = [&pipeline.link_timeout, &pipeline.drain_timeout];
    for text in durations.into_iter().flatten() {
        let found = parse_duration(text);
        if let Some(expected) = parse_simple(text, &DURATIONS) {
            assert_eq!(found, Ok(Duration::from_millis(expected)), "{text:?}");
        }
    }
}

const SIZES: [(&str, u64); 10] = [
    ("", 1),
    ("B", 1),
    ("kB", 1000),
    ("KB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];
/// The units of durations, each with its length in milliseconds.
const DURATIONS: [(&str, u64); 5] = [
    ("ms", 1),
    ("s", 1000),
    ("m", 60_000),
    ("h", 3_600_000),
    ("d", 86_400_000),
];

/// Parses a number of up to five digits that is followed by a unit in `units`.
fn parse_simple(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    let number = number.parse::<u64>().ok().filter(|_| digits <= 5)?;
    Some(number * factor)
}
