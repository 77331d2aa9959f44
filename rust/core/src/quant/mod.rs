//! Quantised values: how they are made, and whether a kept value can still be used.

pub mod cache;
pub mod content;
pub mod graph_memory;
pub mod quantizer;
pub mod together;
pub mod value;
pub mod weight;
