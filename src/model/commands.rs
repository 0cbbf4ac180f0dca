//! Walpost commands for use in messages, each with the options needed to load this process's
//! configuration.

use std::sync::Arc;

use crate::escape::shell_word_on_one_line;

/// Formats commands that run with this process's configuration. All commands in messages are formatted with this type, so
/// that they work when they are pasted into a shell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Commands(Arc<Options>);

/// The options that determine the configuration. They do not contain secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Flags that every command accepts, with their values.
    pub common: Vec<(&'static str, String)>,
    /// Flags accepted only by commands that create or read records, with their values.
    pub records: Vec<(&'static str, String)>,
}

/// Flags that can be given more than once.
const REPEATABLE_FLAGS: [&str; 2] = ["--kafka-property", "--header"];
/// Commands that create or read records.
const RECORD_COMMANDS: [&str; 6] = ["run", "check", "checkpoint", "replay", "skip", "verify"];

impl Commands {
    #[must_use]
    pub(crate) fn new(options: Options) -> Self {
        Self(Arc::new(options))
    }

    /// Creates commands with the option `--pipeline`, for callers that have only the pipeline's
    /// name and not its configuration.
    #[must_use]
    pub(crate) fn for_pipeline(name: &str) -> Self {
        Self::new(Options {
            common: vec![("--pipeline", name.to_owned())],
            records: Vec::new(),
        })
    }

    /// Returns commands that use the connection settings in the configuration file, if there is
    /// one, rather than the administrator's connection string that was passed to `init`.
    #[must_use]
    pub(crate) fn without_administrator(&self) -> Self {
        let has_file = self.0.common.iter().any(|(flag, _)| *flag == "--config");
        let mut options = Options::clone(&self.0);
        options
            .common
            .retain(|(flag, _)| !has_file || *flag != "--postgres");
        Self::new(options)
    }

    /// Returns the commands to run after `init`. With a configuration file, these are the commands from
    /// [`Self::without_administrator`]. Without a configuration file, the commands connect as `role`, and contain a
    /// placeholder for the brokers if no brokers were specified.
    #[must_use]
    pub(crate) fn after_init(&self, role: Option<&str>) -> Self {
        let commands = self.without_administrator();
        let mut options = Options::clone(&commands.0);
        if options.common.iter().any(|(flag, _)| *flag == "--config") {
            return commands;
        }
        for (flag, value) in &mut options.common {
            if let ("--postgres", Some(role)) = (*flag, role) {
                *value = with_user(value, role);
            }
        }
        if !options.records.iter().any(|(flag, _)| *flag == "--kafka") {
            options
                .records
                .insert(0, ("--kafka", "HOST:PORT".to_owned()));
        }
        Self::new(options)
    }

    /// Returns the command that consists of `words`, starting with the subcommand, followed by the options that `words` does
    /// not already contain. Words are quoted for a shell if necessary.
    #[must_use]
    pub(crate) fn print<const N: usize>(&self, words: [&str; N]) -> String {
        self.print_words(&words)
    }

    /// Like [`Self::print`], but for a number of words that is not known at compile time.
    #[must_use]
    pub(crate) fn print_words(&self, words: &[&str]) -> String {
        let mut command = "walpost".to_owned();
        let mut add = |word: &str| {
            command.push(' ');
            command.push_str(&shell_word_on_one_line(word));
        };
        words.iter().for_each(|word| add(word));
        let has_records = words
            .first()
            .is_some_and(|word| RECORD_COMMANDS.contains(word));
        let records = self.0.records.iter().filter(|_| has_records);
        // `pipeline` commands only send a request to a running process, and already contain the names of pipelines, so
        // they need no option other than `--config`.
        let is_control = words.first() == Some(&"pipeline");
        for (flag, value) in self.0.common.iter().chain(records) {
            if is_control && *flag != "--config" {
                continue;
            }
            if REPEATABLE_FLAGS.contains(flag) || !words.contains(flag) {
                add(flag);
                add(value);
            }
        }
        command
    }
}

/// Returns the connection string with `role` as the user, or unchanged if the role's name would
/// need quoting. In the keyword/value format, the user is appended, because the last value of a
/// repeated parameter takes effect.
fn with_user(connection: &str, role: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if role.is_empty() || !role.chars().all(is_plain) {
        return connection.to_owned();
    }
    let Some((scheme, rest)) = connection.split_once("://") else {
        return format!("{connection} user={role}");
    };
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host = authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host);
    format!("{scheme}://{role}@{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands() -> Commands {
        Commands::new(Options {
            common: vec![
                ("--pipeline", "orders".to_owned()),
                ("--config", "/etc/it's here/walpost.toml".to_owned()),
            ],
            records: vec![("--kafka", "localhost:9092".to_owned())],
        })
    }

    #[test]
    fn adds_only_options_that_the_command_accepts_and_quotes_them_for_the_shell() {
        assert_eq!(
            commands().print(["init", "--slot", "a b"]),
            r"walpost init --slot 'a b' --pipeline orders --config '/etc/it'\''s here/walpost.toml'"
        );
        let skip = commands().print(["skip", "--to", "0/1"]);
        assert!(skip.starts_with("walpost skip --to 0/1 --pipeline orders --config "));
        assert!(skip.ends_with(" --kafka localhost:9092"), "{skip}");
    }

    #[test]
    fn commands_suggested_by_init_connect_as_the_created_role() {
        for (administrator, expected) in [
            (
                "postgresql://postgres@/shop?host=/run",
                "'postgresql://w@/shop?host=/run'",
            ),
            ("postgresql://db:5433/shop", "postgresql://w@db:5433/shop"),
            ("host=db user=postgres", "'host=db user=postgres user=w'"),
        ] {
            let init = Commands::new(Options {
                common: vec![("--postgres", administrator.to_owned())],
                records: Vec::new(),
            });
            assert_eq!(
                init.after_init(Some("w")).print(["run"]),
                format!("walpost run --postgres {expected} --kafka HOST:PORT")
            );
        }
        let with_file = commands().after_init(Some("w")).print(["check"]);
        assert_eq!(with_file, commands().print(["check"]));
    }

    #[test]
    fn does_not_repeat_an_option_that_the_command_already_contains() {
        let check = commands().print(["init", "--pipeline", "other"]);
        assert!(check.starts_with("walpost init --pipeline other --config "));
        let restart = commands().print(["pipeline", "restart", "orders"]);
        assert!(restart.starts_with("walpost pipeline restart orders --config "));
        assert!(!restart.contains("--pipeline"), "{restart}");
        assert_eq!(Commands::default().print(["init"]), "walpost init");
    }
}
