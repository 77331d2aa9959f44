//! The dispatcher of `te_fast`: everything but Python.
//!
//! Devices, recipes, plans, quantizers and GEMMs, on CUDA or on the host, usable and benchable without Python,
//! torch or a GPU. `te_fast_py` binds this crate, which does not depend on it.

pub mod base;
pub mod cuda;
pub mod gemm;
pub mod host;
pub mod launch;
pub mod ops;
pub mod program;
pub mod quant;
pub mod recipe;
pub mod runtime;

pub use base::error::{Error, ErrorKind, Result};
pub(crate) use launch::params::params;
pub use te_fast_kernels::{Float, Fp8, Half, Image, KernelId, architectures, image_bytes};
