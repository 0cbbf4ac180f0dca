//! Opens connections: [`conninfo`] parses connection strings, and [`dial`] connects to the server.

pub(crate) mod conninfo;
pub(crate) mod dial;
