//! `layer(x)`: from Python's call to the program without a Python frame.

pub(crate) mod call;
pub(crate) mod module;
pub(crate) mod snapshot;
