//! The base of all other folders: errors, settings, types, addresses and borrowed tensors.

pub mod config;
pub mod dtype;
pub mod error;
pub mod pointer;
pub mod tensor;
