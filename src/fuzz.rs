//! What bytes from outside are held to: one function a target of cargo-fuzz. Each panics where a
//! promise is broken, and each stands beside the code that it holds.
//!
//! `./dev fuzz` feeds them what libFuzzer makes up. The tests feed them `fuzz/corpus`, so that what
//! was found once stays fixed.

pub use crate::config::fuzz::config;
pub use crate::outbox::envelope::fuzz::envelope;
pub use crate::outbox::expand::fuzz::expand;
pub use crate::outbox::fuzz::template;
pub use crate::pipeline::decode::fuzz::core;
pub use crate::pipeline::exactly_once::fuzz::checkpoint;
pub use crate::postgres::catalog::copy::fuzz::copy;
pub use crate::postgres::connect::conninfo::fuzz::conninfo;
pub use crate::postgres::connect::dial::fuzz::startup;
pub use crate::postgres::replication::fuzz::frame;
pub use crate::postgres::wire::pgoutput::fuzz::pgoutput;

#[cfg(test)]
mod tests;
