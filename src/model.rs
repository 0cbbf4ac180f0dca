//! Plain values shared by every module. Nothing in this module performs I/O or imports another module of this crate,
//! apart from [`crate::escape`].

pub(crate) mod commands;
pub(crate) mod dead_letters;
pub(crate) mod dropped_slot;
pub(crate) mod exit;
pub(crate) mod last_halt;
pub(crate) mod lifecycle;
pub(crate) mod lsn;
pub(crate) mod outage;
pub(crate) mod rounded;
pub(crate) mod set_aside;
pub(crate) mod statistics;
pub(crate) mod time;
pub(crate) mod vitals;
pub(crate) mod window;
