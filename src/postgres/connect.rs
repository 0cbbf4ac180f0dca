//! Opens connections: [`conninfo`] determines the server and the user, [`dial`] connects.

pub(crate) mod conninfo;
pub(crate) mod dial;
