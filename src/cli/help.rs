//! Builds the help of each command. The help lists the command's own flags, followed by shared
//! flags grouped by topic. Flags that a command does not use are hidden but still accepted, because
//! environment variables and scripts pass the same settings to every command.

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
const RETENTION: &[&str] = &["retention", "partitions_ahead", "delete_rows"];
const WAL_BUDGET: &[&str] = &["wal_budget_warn", "wal_budget_max", "wal_budget_on_max"];

/// Flags of `run` that another command accepts but does not use.
type Unused = &'static [&'static [&'static str]];

const CHECK: Unused = &[WINDOW, LINK, DRAIN];
const VERIFY: Unused = &[
    SNAPSHOT,
    UNDELIVERABLE,
    TOPICS,
    WINDOW,
    LINK,
    DRAIN,
    RETENTION,
    WAL_BUDGET,
];
const REPLAY: Unused = &[MODE, SNAPSHOT, LINK, RETENTION, WAL_BUDGET];
const SKIP: Unused = &[
    UNDELIVERABLE,
    TOPICS,
    WINDOW,
    ROW,
    LINK,
    DRAIN,
    RETENTION,
    WAL_BUDGET,
];
const CHECKPOINT: Unused = &[
    MODE,
    SNAPSHOT,
    UNDELIVERABLE,
    TEMPLATES,
    TOPICS,
    WINDOW,
    ROW,
    LINK,
    DRAIN,
    RETENTION,
    WAL_BUDGET,
];

/// Returns the clap command. Hides from each subcommand's help the flags that the subcommand does
/// not use.
pub(super) fn command() -> Command {
    let without = |unused: Unused| {
        move |command: Command| {
            command.mut_args(|arg| {
                let id = arg.get_id().as_str();
                let is_unused = unused.iter().any(|ids| ids.contains(&id));
                if is_unused { arg.hide(true) } else { arg }
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
    fn hidden_flag_lists_contain_only_existing_flags() {
        for (path, unused) in [
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
            let ids: usize = unused.iter().map(|ids| ids.len()).sum();
            assert_eq!(hidden.count(), ids, "{path:?}");
        }
    }
}
