//! Finds passwords on the command line, where every user of the machine can read them (`ps`,
//! `/proc/PID/cmdline`).

use clap::ArgMatches;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;

use crate::kafka::properties::is_secret;
use crate::postgres::connect::conninfo::Conninfo;

/// Returns a warning for each flag that contains a password.
#[must_use]
pub(crate) fn passwords(matches: &ArgMatches) -> Vec<String> {
    let mut flags = matches;
    // clap stores flags in the matches of the innermost subcommand.
    while let Some((_, inner)) = flags.subcommand() {
        flags = inner;
    }
    let is_flag = |id| {
        // `try_contains_id` returns an error if the command doesn't accept the flag.
        flags.try_contains_id(id).unwrap_or_default()
            && flags.value_source(id) == Some(ValueSource::CommandLine)
    };
    let mut found = Vec::new();
    if is_flag("postgres")
        && let Some(text) = flags.get_one::<String>("postgres")
        && Conninfo::contains_password(text)
    {
        found.push(warning(
            "--postgres",
            "Set the password in PGPASSWORD, ~/.pgpass, or postgres in walpost.toml with mode 0600",
        ));
    }
    if is_flag("kafka_property") {
        let given = flags
            .get_many::<String>("kafka_property")
            .unwrap_or_default();
        let names = given.filter_map(|property| Some(property.split_once('=')?.0.trim()));
        found.extend(names.filter(|name| is_secret(name)).map(|name| {
            let variable = name.to_uppercase().replace('.', "_");
            warning(
                &format!("-X {name}"),
                &format!(
                    "Set the password in WALPOST_KAFKA_{variable}, or under [kafka] in walpost.toml with mode 0600"
                ),
            )
        }));
    }
    found
}

fn warning(flag: &str, remedy: &str) -> String {
    format!(
        "{flag}: a password was passed on the command line, where any user on this machine can read it. {remedy}"
    )
}

/// Removes an unexpected argument from a usage error if the argument may contain a password. For
/// example, the user may have left out the flag before a connection string or a property.
#[must_use]
pub(crate) fn without_stray_values(mut error: clap::Error) -> clap::Error {
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidSubcommand] {
        if let Some(ContextValue::String(text)) = error.get(kind)
            && !text.starts_with('-')
            && text.contains(['=', '@'])
        {
            error.insert(kind, ContextValue::String("...".to_owned()));
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    fn warnings(words: &[&str]) -> String {
        let matches = Cli::command().try_get_matches_from(words).expect("parses");
        passwords(&matches).join("\n")
    }

    #[test]
    fn warns_about_passwords_in_flags_and_suggests_alternatives() {
        for string in [
            "postgresql://u:hunter2@h/d",
            "host=h password=hunter2",
            "postgresql://h/d?sslpassword=hunter2",
        ] {
            for command in ["init", "check", "run"] {
                let warnings = warnings(&["walpost", command, "--postgres", string]);
                assert!(
                    warnings.contains("--postgres") && warnings.contains("PGPASSWORD"),
                    "{warnings}"
                );
                assert!(!warnings.contains("hunter2"), "{warnings}");
            }
        }
        let warnings = warnings(&[
            "walpost",
            "checkpoint",
            "show",
            "-X",
            "linger.ms=5",
            "-Xsasl.password=hunter2",
            "--kafka-property=ssl.key.password=hunter2",
        ]);
        assert_eq!(warnings.lines().count(), 2, "{warnings}");
        for variable in ["SASL_PASSWORD", "SSL_KEY_PASSWORD"] {
            let variable = format!("WALPOST_KAFKA_{variable},");
            assert!(warnings.contains(&variable), "{warnings}");
        }
        assert!(!warnings.contains("hunter2"), "{warnings}");
    }

    #[test]
    fn does_not_warn_about_flags_without_a_password() {
        let run = warnings(&[
            "walpost",
            "run",
            "--postgres",
            "postgresql://u@h/d",
            "-Xacks=all",
        ]);
        assert_eq!(run, "");
        assert_eq!(warnings(&["walpost", "completions", "bash"]), "");
    }

    #[test]
    fn usage_errors_do_not_echo_unexpected_values() {
        for words in [
            ["walpost", "run", "postgresql://u:hunter2@h/d"].as_slice(),
            &["walpost", "run", "sasl.password=hunter2"],
            &["walpost", "postgresql://u:hunter2@h/d"],
            &["walpost", "run", "--postgers=postgresql://u:hunter2@h/d"],
            &["walpost", "run", "--kafka=a:1=", "-Yhunter2"],
        ] {
            let error = Cli::command()
                .try_get_matches_from(words)
                .expect_err("the arguments are invalid");
            let error = without_stray_values(error).to_string();
            assert!(!error.contains("hunter2"), "{words:?}: {error}");
        }
    }
}
