//! Matrix products: problems, and the plans that run them.

pub mod grouped;
pub(crate) mod linear;
pub mod plan;
pub mod problem;
