//! The CUDA driver and cuBLASLt, without te_fast's own logic.

pub mod context;
pub mod device;
mod functions;
pub mod graph;
pub mod images;
pub mod learned;
pub mod lt;
pub mod memory;
pub mod tensor_map;
pub mod zeroed;
