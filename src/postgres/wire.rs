//! What goes over the wire, as bytes: pure codecs.

pub(crate) mod copy_text;
pub(crate) mod frame;
pub(crate) mod pgoutput;
