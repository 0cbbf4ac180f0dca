//! Compares the tables in the documentation with the program's actual flags, settings and errors.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use walpost::facade::METRICS;
use walpost::facade::dead_letter;
use walpost::facade::{Properties, PropertyError, check, client_config};

use super::markdown::{in_backticks, in_repository, page};
use crate::support::walpost::{Invocation, config_file};

const CONFIGURATION: &str = "docs/configuration.md";
const TROUBLESHOOTING: &str = "docs/troubleshooting.md";

/// A flag as described by `--help`.
#[derive(Debug, PartialEq, Eq)]
struct Flag {
    name: String,
    variable: Option<String>,
    default: Option<String>,
}

fn flags(command: &[&str]) -> Vec<Flag> {
    let help = Invocation::new(command.iter().chain(&["--help"]))
        // If these variables were set, `--help` would show their values.
        .without_env("WALPOST_HTTP")
        .without_env("WALPOST_LOCK_TIMEOUT")
        .finish()
        .expect_code(0)
        .stdout;
    let mut abouts: Vec<String> = Vec::new();
    for line in help.lines() {
        match (flag_line(line), abouts.last_mut()) {
            (Some(flag), _) => abouts.push(flag.to_owned()),
            // Join the lines of a description that `--help` wraps.
            (None, Some(about)) => {
                about.push(' ');
                about.push_str(line.trim());
            }
            (None, None) => {}
        }
    }
    assert!(abouts.len() > 4, "no flags in:\n{help}");
    let flag = |about: &String| {
        let within = |open: &str| {
            let rest = about.split_once(open)?.1;
            Some(rest.split_once(']')?.0.trim_end_matches('=').to_owned())
        };
        Flag {
            name: word(about).to_owned(),
            variable: within("[env: "),
            default: within("[default: ").or_else(|| replaced(about)),
        }
    };
    abouts.iter().map(flag).collect()
}

/// Returns the default of a flag that takes a list.
fn replaced(about: &str) -> Option<String> {
    let rest = about.split_once("replaces the default ")?.1;
    rest.split(' ').next().map(str::to_owned)
}

/// Returns the part of a `--help` line that starts with the flag, or `None` if the line contains no
/// flag. Lines that continue a description are recognized by their deeper indentation.
fn flag_line(line: &str) -> Option<&str> {
    let text = line.trim_start();
    let text = match text.split_once(", ") {
        Some((short, long)) if short.len() == 2 => long,
        _ => text,
    };
    let is_flag = text.starts_with("--") && line.starts_with("  ") && !line.starts_with("        ");
    is_flag.then_some(text)
}

fn word(text: &str) -> &str {
    text.split([' ', '=', ',']).next().unwrap_or_default()
}

/// Returns the flag, variable and default in each row of the documentation's two tables of flags.
fn documented() -> Vec<Flag> {
    let row = |cells: &[String; 3]| {
        let given = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let [name, variable, default] = cells;
        Flag {
            name: name.clone(),
            variable: given(variable),
            default: given(default).filter(|text| text != "none"),
        }
    };
    let first = |cell: &Vec<String>| cell[0].clone();
    let tables = |heading| page(CONFIGURATION).tables(heading);
    let keys = tables("Keys of a pipeline").into_iter().map(|cells| {
        assert_eq!(cells.len(), 6, "{cells:?}");
        [first(&cells[1]), first(&cells[2]), first(&cells[4])]
    });
    let others = tables("Flags without a key").into_iter().map(|cells| {
        assert_eq!(cells.len(), 5, "{cells:?}");
        [first(&cells[0]), first(&cells[1]), first(&cells[3])]
    });
    keys.chain(others)
        .filter(|cells| !cells[0].is_empty())
        .map(|cells| row(&cells))
        .collect()
}

#[test]
fn documentation_lists_every_flag_with_its_environment_variable_and_default() {
    let documented = documented();
    let mut known = BTreeSet::new();
    for command in [
        &["init"][..],
        &["check"],
        &["checkpoint", "show"],
        &["checkpoint", "adopt"],
        &["import", "debezium"],
        &["maintain"],
        &["replay"],
        &["run"],
        &["skip"],
        &["verify"],
        &["status"],
        &["pipeline", "list"],
        &["pipeline", "reload"],
    ] {
        for flag in flags(command) {
            let found = documented.iter().find(|row| row.name == flag.name);
            let found = found
                .unwrap_or_else(|| panic!("{command:?} {} is not in the reference", flag.name));
            // Every Kafka property has its own environment variable, so `--help` can't list them
            // all.
            if flag.name != "--kafka-property" {
                assert_eq!(found.variable, flag.variable, "variable of {}", flag.name);
            }
            assert_eq!(found.default, flag.default, "default of {}", flag.name);
            known.insert(flag.name);
        }
    }
    for row in documented {
        assert!(known.contains(&row.name), "no command has {}", row.name);
    }
}

#[test]
fn documentation_lists_all_configuration_keys_and_no_others() {
    let file = config_file("[[pipeline]]\nthis_is_no_key = 1\n");
    let refused = Invocation::new(["check", "--config"])
        .arg(file)
        .finish()
        .expect_code(2)
        .stderr;
    let known = refused.split_once("expected one of ").unwrap().1;
    let known = known.split("; did you mean").next().unwrap();
    let known: BTreeSet<_> = in_backticks(known).into_iter().collect();
    assert!(known.len() > 10, "{refused}");
    let documented: BTreeSet<_> = page(CONFIGURATION)
        .tables("Keys of a pipeline")
        .into_iter()
        .map(|cells| cells[0][0].clone())
        .collect();
    assert_eq!(documented, known);
}

#[test]
fn documentation_lists_all_exported_metrics_and_no_others() {
    let text = |cell: &[String]| cell.join(", ");
    let documented: Vec<_> = page("docs/monitoring.md")
        .tables("Metrics")
        .iter()
        .map(|cells| [&cells[0], &cells[1], &cells[2], &cells[3]].map(|cell| text(cell)))
        .collect();
    let known: Vec<_> = METRICS
        .iter()
        .map(|metric| {
            let kind = format!("{:?}", metric.source.kind()).to_lowercase();
            let labels = metric.source.labels().join(", ");
            [metric.name.to_owned(), kind, labels, metric.help.to_owned()]
        })
        .collect();
    assert_eq!(documented, known);
}

#[test]
fn documentation_lists_kafka_properties_that_walpost_sets_or_rejects() {
    let with = |name: &str, value: &str| {
        let brokers = ("bootstrap.servers".to_owned(), "localhost:9092".to_owned());
        Properties::from([brokers, (name.to_owned(), value.to_owned())])
    };
    let config = client_config(&Properties::new(), "walpost-<pipeline>");
    let mut documented = BTreeSet::new();
    for cells in page(CONFIGURATION).tables("Kafka") {
        let (names, value) = (&cells[0], &cells[1][0]);
        for name in names {
            documented.insert(name.clone());
            let refused = |value: &str| {
                let checked = check(&with(name, value));
                matches!(checked, Err(PropertyError::Refused { name: refused, .. }) if refused == *name)
            };
            if value == "may not be set" {
                assert!(refused("1"), "{name} is not rejected");
            } else if refused("another") {
                assert!(!refused(value), "{name} = {value} is refused");
            } else {
                assert_eq!(config.get(name), Some(value.as_str()), "{name}");
            }
        }
    }
    for name in config.config_map().keys() {
        assert!(documented.contains(*name), "{name} is not in the reference");
    }
}

/// Returns the first sentence of an error's format string, with each value replaced by `…`.
fn first_sentence(format: &str) -> String {
    let format = format.replace("\\\"", "\"").replace("\\\\", "\\");
    let mut sentence = String::new();
    let mut rest = format.as_str();
    while let Some(c) = rest.chars().next() {
        let ends = [". ", "; "].iter().any(|end| rest.starts_with(end));
        if ends {
            break;
        }
        match rest.strip_prefix("{{").or(rest.strip_prefix("}}")) {
            Some(after) => {
                sentence.push(c);
                rest = after;
            }
            None if c == '{' => {
                sentence.push('…');
                rest = rest.split_once('}').unwrap().1;
            }
            None if rest.starts_with("\\\n") => rest = rest[1..].trim_start(),
            None => {
                sentence.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    sentence
}

/// Returns the part of `src/` that declares an error's format strings: the body of an enum, or the
/// attribute of a struct.
fn declaration<'s>(sources: &'s str, name: &str) -> &'s str {
    if let Some(start) = sources.find(&format!("enum {name} {{")) {
        let body = &sources[start..];
        return &body[..body.find("\n}").unwrap()];
    }
    let end = sources
        .find(&format!("struct {name} {{"))
        .unwrap_or_else(|| panic!("no error {name}"));
    let before = &sources[..end];
    &before[before.rfind("#[error(").unwrap()..]
}

/// Returns the format strings that an error declares.
fn formats(sources: &str, name: &str) -> Vec<String> {
    let declaration = declaration(sources, name);
    declaration
        .split("#[error(")
        .skip(1)
        .filter_map(|rest| {
            let rest = rest.trim_start().strip_prefix('"')?;
            let end = rest
                .match_indices('"')
                .find(|(at, _)| !rest[..*at].ends_with('\\'))?;
            Some(rest[..end.0].to_owned())
        })
        .collect()
}

/// Returns the concatenated text of all given files and of all files in the given folders.
pub(super) fn sources(paths: &[&str]) -> String {
    let mut sources = String::new();
    for path in paths {
        read_sources(&in_repository(path), &mut sources);
    }
    sources
}

fn read_sources(path: &Path, into: &mut String) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            read_sources(&entry.unwrap().path(), into);
        }
    } else if let Ok(text) = fs::read_to_string(path) {
        // Skip files that are not UTF-8 text, such as images.
        into.push_str(&text);
    }
}

#[test]
fn troubleshooting_page_covers_every_error_that_halts_a_pipeline() {
    let sources = sources(&["src"]);
    let troubleshooting = &page(TROUBLESHOOTING).text;
    let mut missing = Vec::new();
    let errors = [
        ("Problem", 15),
        ("RoleRefused", 1),
        ("NotTheServer", 1),
        ("NotRecorded", 1),
        ("CoreError", 10),
        ("SlotError", 3),
        ("SlotInUse", 1),
        ("StreamError", 2),
        ("ExactlyOnceError", 2),
        ("WalBudgetError", 2),
        ("SlotDropped", 1),
        ("SinkError", 7),
        ("ConnectionError", 5),
        ("CatalogError", 3),
        ("RouteError", 5),
        ("MappingError", 5),
        ("EnvelopeError", 5),
        ("DialError", 8),
        ("RetentionError", 10),
        ("RemovalWait", 4),
        ("SnapshotError", 6),
        ("ImportError", 10),
    ];
    for stage in declaration(&sources, "PipelineError")
        .split("#[from] ")
        .skip(1)
    {
        let name = stage.split(')').next().unwrap();
        let name = name.trim_start_matches("Box<").trim_end_matches('>');
        assert!(errors.iter().any(|(error, _)| *error == name), "{name}");
    }
    for (name, least) in errors {
        let formats = formats(&sources, name);
        assert!(formats.len() >= least, "{name}: {formats:?}");
        for format in formats {
            // Merge adjacent placeholders: in some format strings, the placeholder for a remedy
            // directly follows the placeholder for a value.
            let sentence = first_sentence(&format).replace("……", "…");
            let words = sentence.split(['…', ' ', ',', ':']);
            // Skip format strings that consist only of placeholders, because they contain no words
            // to search for.
            let is_empty = words.filter(|word| word.len() > 2).count() == 0;
            if !is_empty && !troubleshooting.contains(&sentence) {
                missing.push(format!("{name}: {sentence}"));
            }
        }
    }
    assert!(missing.is_empty(), "not in {TROUBLESHOOTING}: {missing:#?}");
}

#[test]
fn log_lines_quoted_on_the_troubleshooting_page_exist_in_the_source_code() {
    let sources = sources(&["src"]);
    for line in [
        "standing by",
        "Kafka is unreachable; waiting until it is reachable",
        "Kafka broker connection failed",
        "Kafka producer failed",
        "PostgreSQL has a new timeline",
        "Kafka did not accept the row at ",
        "not all records were acknowledged in time; they will be sent again after a restart",
        "halted: ",
        "reconnecting",
        "sent a dead letter for ",
    ] {
        let is_told = page(TROUBLESHOOTING).text.contains(line.trim_end());
        assert!(is_told, "{TROUBLESHOOTING}: {line}");
        assert!(sources.contains(line), "src: {line}");
    }
}

#[test]
fn documentation_lists_all_dead_letter_headers_and_no_others() {
    let documented: BTreeSet<_> = page("docs/dead-letters.md")
        .tables("Headers")
        .into_iter()
        .flat_map(|cells| cells[0].clone())
        .collect();
    let known = [
        dead_letter::ERROR,
        dead_letter::ERROR_MESSAGE,
        dead_letter::SOURCE_TABLE,
        dead_letter::SOURCE_PREFIX,
        dead_letter::SOURCE_TOPIC,
        dead_letter::SOURCE_HEADERS,
        dead_letter::EVENT_ID,
        dead_letter::PAYLOAD_BYTES,
        dead_letter::TRUNCATED,
        dead_letter::PIPELINE,
    ];
    assert_eq!(documented, known.map(String::from).into());
}
