//! What bytes from outside are held to: one function a target of cargo-fuzz. Each panics where a
//! promise is broken, and each stands beside the code that it holds.
//!
//! `./dev fuzz` feeds them what libFuzzer makes up. The tests feed them `fuzz/corpus`, so that what
//! was found once stays mended.

pub use crate::config::fuzz::config;
pub use crate::outbox::envelope::fuzz::envelope;
pub use crate::outbox::fuzz::template;
pub use crate::pipeline::checkpoint::fuzz::checkpoint;
pub use crate::pipeline::core::fuzz::core;
pub use crate::postgres::connection::fuzz::frame;
pub use crate::postgres::conninfo::fuzz::conninfo;
pub use crate::postgres::copy::fuzz::copy;
pub use crate::postgres::dial::fuzz::startup;
pub use crate::postgres::pgoutput::fuzz::pgoutput;

#[cfg(test)]
mod tests;
