//! The dispatcher of `te_fast`: everything but Python.
//!
//! Devices, recipes, plans, quantizers and GEMMs, on CUDA or on the host, usable and benchable without Python,
//! torch or a GPU. `te_fast_py` binds it; nothing here knows of it.

pub mod autocast;
pub mod autocast_scopes;
pub mod config;
pub mod cublaslt;
mod cublaslt_attributes;
pub mod delayed;
pub mod device_memory;
pub mod dispatch;
pub mod driver;
mod driver_functions;
pub mod error;
pub mod gemm;
pub mod graph;
pub mod host;
pub mod kernel;
pub mod layer;
pub mod linear;
mod linear_gemms;
mod linear_operands;
pub mod ops;
pub mod program;
pub mod quantizer;
pub mod recipe;
pub mod tensor;
pub mod trace;

pub use error::{Error, ErrorKind, Result};
pub use te_fast_kernels::{Float, Fp8, Image, KernelId, architectures, image_bytes};
