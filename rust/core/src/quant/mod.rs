//! Quantised values: how they are made, and whether a kept one still serves.

pub mod cache;
pub mod content;
pub mod graph_memory;
pub mod quantizer;
pub mod together;
pub mod value;
pub mod weight;
