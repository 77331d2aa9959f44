//! How a kernel is launched: geometry, parameters, target, and who is told.

pub mod grid;
pub mod params;
pub mod pointers;
pub mod target;
pub mod trace;
