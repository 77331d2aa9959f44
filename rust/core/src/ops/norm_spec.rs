//! The description of a norm, from which its plan and the division of rows are made.

use te_fast_kernels::{Float, Fp8};

use crate::ops::amax::ScaleRule;
use crate::runtime::lane::Limits;

/// The statistics that normalise a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance.
    LayerNorm,
    /// Mean square.
    RmsNorm,
}

/// The description of a norm, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "outputs are asked for one by one")]
pub struct NormSpec {
    /// Rows.
    pub rows: usize,
    /// Columns of a row; at least 1.
    pub cols: usize,
    /// Statistics.
    pub kind: NormKind,
    /// Type of the input, the residual, the sum and the result in high precision.
    pub input: Float,
    /// Type of gamma and beta.
    pub weight: Float,
    /// Factors are `gamma + 1`.
    pub zero_centered_gamma: bool,
    /// Added to the variance; not negative.
    pub eps: f32,
    /// Add a residual first, and write the sum.
    pub residual: bool,
    /// Write the result in high precision.
    pub high: bool,
    /// Type of the FP8 result; `None` casts nothing.
    pub fp8: Option<Fp8>,
    /// Write the FP8 row layout.
    pub rowwise: bool,
    /// Write the FP8 transposed layout.
    pub columnwise: bool,
    /// Write the statistics.
    pub stats: bool,
    /// Compute the scale for a later cast of the high-precision result; only if this op casts nothing.
    pub measures: Option<ScaleRule>,
    /// The device's limits for launches.
    pub limits: Limits,
}
