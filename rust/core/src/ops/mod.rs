//! Operations: one file per op family, each with its parameter struct, a plan that checks shapes and picks the
//! kernel and grid once, and a `run` that fills the struct and launches.
