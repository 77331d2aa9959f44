//! Autocast regions, recipes and delayed scaling for Python.

mod groups;
pub(crate) mod recipe;
pub(crate) mod recompute;
pub(crate) mod region;
pub(crate) mod slots;
