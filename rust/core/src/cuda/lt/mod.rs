//! cuBLASLt.

pub mod api;
mod attributes;
pub mod dense;
pub mod grouped;
