//! What a person sees of the program while it runs.

pub mod logging;
pub mod outage;
