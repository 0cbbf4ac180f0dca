//! Codecs for the formats in which PostgreSQL sends data. They do not perform I/O.

pub(crate) mod copy_text;
pub(crate) mod frame;
pub(crate) mod pgoutput;
