//! Fixtures that run real servers, and tools that check how Walpost behaves with these servers.
//!
//! [`postgres`] and [`kafka`] start servers; [`fixture`] combines a database, topics and a
//! pipeline; [`under_load`] streams under load in both delivery modes; [`event`] writes events to
//! either kind of outbox; [`walpost`] runs the built binary; [`oracle`] lists the committed events,
//! and [`checker`] compares them with the delivered events. When the test process ends, the
//! [`reaper`] ends every process that the tests started, even if the test process was killed.
//!
//! `benches/` includes these files through `#[path]`.
#![allow(
    dead_code,
    reason = "each binary that includes these files uses only part of them"
)]
#![allow(
    clippy::unwrap_used,
    reason = "a panic is the only way to report a broken test set-up"
)]

pub(crate) mod broker_removal;
pub(crate) mod browser;
pub(crate) mod certificates;
pub(crate) mod checker;
pub(crate) mod cluster;
pub(crate) mod disk;
pub(crate) mod error_codes;
pub(crate) mod event;
pub(crate) mod fixture;
pub(crate) mod http;
pub(crate) mod intercepting_proxy;
pub(crate) mod kafka;
pub(crate) mod lag;
pub(crate) mod load;
pub(crate) mod lsn;
pub(crate) mod names;
pub(crate) mod oracle;
pub(crate) mod postgres;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod reaper;
pub(crate) mod records;
pub(crate) mod secrets;
pub(crate) mod session;
pub(crate) mod tokens;
pub(crate) mod under_load;
pub(crate) mod wait;
pub(crate) mod walpost;
pub(crate) mod walpost_role;
