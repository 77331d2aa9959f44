//! Launches of kernels: geometry, parameters, target, counters and recorder.

pub mod grid;
pub mod params;
pub mod pointers;
pub mod target;
pub mod trace;
