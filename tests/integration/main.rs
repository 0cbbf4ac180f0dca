//! Tests Walpost's guarantees with the built binary and real servers.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

#[path = "../support/mod.rs"]
mod support;

/// Generates two tests, one for each kind of outbox, from functions that take an
/// [`Outbox`](support::event::Outbox): `name::test_passes_with_an_outbox_table` and
/// `name::test_passes_with_logical_decoding_messages`.
macro_rules! for_each_outbox {
    ($($name:ident)*) => { $(
        mod $name {
            #[test]
            fn test_passes_with_an_outbox_table() {
                super::$name($crate::support::event::Outbox::Table);
            }

            #[test]
            fn test_passes_with_logical_decoding_messages() {
                super::$name($crate::support::event::Outbox::Messages);
            }
        }
    )* };
}

/// Generates two tests, one for each mode, from functions with a parameter that states whether the
/// mode is exactly-once: `name::test_passes_in_at_least_once_mode` and
/// `name::test_passes_in_exactly_once_mode`.
macro_rules! in_both_modes {
    ($($name:ident)*) => { $(
        mod $name {
            #[test]
            fn test_passes_in_at_least_once_mode() {
                super::$name(false);
            }

            #[test]
            fn test_passes_in_exactly_once_mode() {
                super::$name(true);
            }
        }
    )* };
}

/// Generates three tests from functions that take a [`Fixture`](support::fixture::Fixture) on the
/// shared servers: `name::test_passes_with_an_outbox_table` and
/// `name::test_passes_with_logical_decoding_messages` in at-least-once mode, and
/// `name::test_passes_in_exactly_once_mode` with an outbox table.
macro_rules! for_each_fixture {
    ($($name:ident)*) => { $(
        mod $name {
            use $crate::support::event::Outbox;
            use $crate::support::fixture::Fixture;

            #[test]
            fn test_passes_with_an_outbox_table() {
                super::$name(Fixture::with_outbox(Outbox::Table));
            }

            #[test]
            fn test_passes_with_logical_decoding_messages() {
                super::$name(Fixture::with_outbox(Outbox::Messages));
            }

            #[test]
            fn test_passes_in_exactly_once_mode() {
                super::$name(Fixture::new().exactly_once());
            }
        }
    )* };
}

mod administrator;
mod budget;
mod check_findings;
mod checker;
mod cluster;
mod commands;
mod crash;
mod dead_letters;
mod debezium;
mod deploy;
mod disk;
mod drain;
mod encoding;
mod event_limits;
mod exactly_once;
mod failover;
mod file_limits;
mod first_hour;
mod former_slot;
mod golden;
mod halt;
mod held;
mod hidden_rows;
mod hostile_rows;
mod hostile_server;
mod http;
mod idle;
mod init;
mod injection;
mod isolation;
mod kafka_codes;
mod kafka_rights;
mod kafka_security;
mod kafka_setup;
mod logging;
mod mapping;
mod matrix;
mod messages;
mod metrics;
mod missing;
mod mistakes;
mod network;
mod order;
mod outage;
mod owner;
mod page;
mod partition_count;
mod partitions;
mod payload;
mod planted;
mod postgres_security;
mod prerequisites;
mod printed_commands;
mod privileges;
mod published;
mod readme;
mod reconnects;
mod refused;
mod refused_records;
mod relation;
mod reload;
mod rented;
mod replay;
mod reserved_topics;
mod restored;
mod retention;
mod rotation;
mod row_forms;
mod secrets;
mod server_crash;
mod server_shutdown;
mod servers;
mod shapes;
mod skip;
mod slot_state;
mod snapshot;
mod soak;
mod socket_owner;
mod standby;
mod status;
mod stdout;
mod supervisor;
mod synchronous;
mod systemd;
mod tables;
mod tokens;
mod topic_identity;
mod topics;
mod unpublished_wal;
mod upgrade;
mod verify;
mod watchdog;
