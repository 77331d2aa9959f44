//! What a norm computes, which its plan and the choice of how threads share a row are made from.

use te_fast_kernels::{Float, Fp8};

use crate::ops::amax::ScaleRule;
use crate::runtime::lane::Limits;

/// Which statistics a row is normalised by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance.
    LayerNorm,
    /// Mean square.
    RmsNorm,
}

/// What a norm does, apart from where its buffers are.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "outputs are asked for one by one")]
pub struct NormSpec {
    /// Rows.
    pub rows: usize,
    /// Columns, which one row's statistics are over; at least 1.
    pub cols: usize,
    /// Statistics.
    pub kind: NormKind,
    /// Type of the input, the residual, the sum and the result in high precision.
    pub input: Float,
    /// Type of gamma and beta.
    pub weight: Float,
    /// Factors are `gamma + 1`.
    pub zero_centered_gamma: bool,
    /// What is added to the variance; not negative.
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
    /// Find the scale that the result in high precision is quantised with; where nothing is cast here.
    pub measures: Option<ScaleRule>,
    /// What a launch can have on the device.
    pub limits: Limits,
}
