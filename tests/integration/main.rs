//! What Walpost promises, asked of the built binary between real servers.
#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]

#[path = "../support/mod.rs"]
mod support;

/// Makes a test for each kind of outbox of functions that take an
/// [`Outbox`](support::event::Outbox): `name::table` and `name::log`.
macro_rules! for_each_outbox {
    ($($name:ident)*) => { $(
        mod $name {
            #[test]
            fn table() {
                super::$name($crate::support::event::Outbox::Table);
            }

            #[test]
            fn log() {
                super::$name($crate::support::event::Outbox::Log);
            }
        }
    )* };
}

mod checker;
mod cluster;
mod commands;
mod crash;
mod disk;
mod drain;
mod exactly_once;
mod golden;
mod halt;
mod idle;
mod init;
mod kafka_security;
mod log;
mod mapping;
mod matrix;
mod missing;
mod network;
mod order;
mod outage;
mod partitions;
mod payload;
mod postgres_security;
mod readme;
mod refused;
mod relation;
mod servers;
mod soak;
mod standby;
mod stdout;
mod supervisor;
