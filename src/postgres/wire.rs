//! What goes over the wire, as bytes: pure codecs.

pub mod copy_text;
pub mod frame;
pub mod pgoutput;
