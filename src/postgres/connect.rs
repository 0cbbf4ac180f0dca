//! Opens connections: [`conninfo`] says where to and who we are, [`dial`] goes there.

pub(crate) mod conninfo;
pub(crate) mod dial;
