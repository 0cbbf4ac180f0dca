//! Opens connections: [`conninfo`] says where to and who we are, [`dial`] goes there.

pub mod conninfo;
pub mod dial;
