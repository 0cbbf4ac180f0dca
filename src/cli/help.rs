//! The help of each command: its own flags, followed by the flags that commands share, by topic.
//! Flags that a command does not use are hidden but still accepted, because variables and scripts
//! pass the same settings to every command.

use clap::{Command, CommandFactory};

use super::Cli;

const MODE: &[&str] = &["delivery", "exactly_once"];
const SNAPSHOT: &[&str] = &["snapshot"];
const UNDELIVERABLE: &[&str] = &[
    "on_oversize",
    "on_unroutable",
    "on_malformed",
    "on_table_error",
    "dead_letter_topic",
];
const TEMPLATES: &[&str] = &["topic", "key", "payload", "header", "null_payload"];
const TOPICS: &[&str] = &["create_topics"];
const WINDOW: &[&str] = &["window_bytes", "window_records"];
const ROW: &[&str] = &["max_row_bytes"];
const LINK: &[&str] = &["link_timeout"];
const DRAIN: &[&str] = &["drain_timeout"];
const KEPT: &[&str] = &["retention", "partitions_ahead", "delete_rows"];
const WAL_BUDGET: &[&str] = &["wal_budget_warn", "wal_budget_max", "wal_budget_on_max"];

/// The flags of `run` that a command does not use.
type Useless = &'static [&'static [&'static str]];

const CHECK: Useless = &[WINDOW, LINK, DRAIN];
const VERIFY: Useless = &[
    SNAPSHOT,
    UNDELIVERABLE,
    TOPICS,
    WINDOW,
    LINK,
    DRAIN,
    KEPT,
    WAL_BUDGET,
];
const REPLAY: Useless = &[MODE, SNAPSHOT, LINK, KEPT, WAL_BUDGET];
const SKIP: Useless = &[
    UNDELIVERABLE,
    TOPICS,
    WINDOW,
    ROW,
    LINK,
    DRAIN,
    KEPT,
    WAL_BUDGET,
];
const CHECKPOINT: Useless = &[
    MODE,
    SNAPSHOT,
    UNDELIVERABLE,
    TEMPLATES,
    TOPICS,
    WINDOW,
    ROW,
    LINK,
    DRAIN,
    KEPT,
    WAL_BUDGET,
];

/// Returns the command line.
pub(super) fn command() -> Command {
    let without = |useless: Useless| {
        move |command: Command| {
            command.mut_args(|arg| {
                let id = arg.get_id().as_str();
                let is_useless = useless.iter().any(|ids| ids.contains(&id));
                if is_useless { arg.hide(true) } else { arg }
            })
        }
    };
    Cli::command()
        .mut_subcommand("check", without(CHECK))
        .mut_subcommand("verify", without(VERIFY))
        .mut_subcommand("replay", without(REPLAY))
        .mut_subcommand("skip", without(SKIP))
        .mut_subcommand("checkpoint", |command| {
            command
                .mut_subcommand("show", without(CHECKPOINT))
                .mut_subcommand("adopt", without(CHECKPOINT))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn omitted_flags_exist_in_the_command() {
        for (path, useless) in [
            (&["check"][..], CHECK),
            (&["verify"], VERIFY),
            (&["replay"], REPLAY),
            (&["skip"], SKIP),
            (&["checkpoint", "show"], CHECKPOINT),
            (&["checkpoint", "adopt"], CHECKPOINT),
        ] {
            let command = command();
            let found = path.iter().fold(&command, |command, name| {
                command.find_subcommand(name).expect("a command")
            });
            let hidden = found.get_arguments().filter(|arg| arg.is_hide_set());
            let ids: usize = useless.iter().map(|ids| ids.len()).sum();
            assert_eq!(hidden.count(), ids, "{path:?}");
        }
    }
}
