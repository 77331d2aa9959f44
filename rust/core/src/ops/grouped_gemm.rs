//! Matrix products of groups of rows (the experts of a mixture), all groups in one launch.
//!
//! The rows of group `e` begin at the sum of `up(split, align)` over the groups before it. The splits lie on the device, and
//! nothing on the host reads them: `rows` is a capacity.

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::target::{Backend, Target};
use crate::pointers;

const OP: &str = "grouped gemm";

/// Elements along one side of a scale's block; rows of groups that casts have padded begin at multiples of it.
pub const BLOCK: usize = 128;

/// Which dimension the groups cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupedKind {
    /// Rows of the result: `D[r, n] = Σ_k A[r, k] · B[e(r), n, k]`, forward and the input's gradient.
    Rows,
    /// The summed dimension: `D[e, n, k] = Σ_{r in e} A[r, n] · B[r, k]`, the weights' gradient.
    WeightGradient,
}

/// How the operands are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupedScaling {
    /// High precision.
    None,
    /// FP8 under one scale per group and operand.
    Tensor,
    /// FP8 under block scales: 1 × 128 of A; of B 128 × 128 ([`GroupedKind::Rows`]) or 1 × 128.
    Block,
}

/// A grouped product, without its pointers.
///
/// | | A | B | D |
/// | --- | --- | --- | --- |
/// | `Rows` | `[rows, k]` | `[groups, n, k]` | `[rows, n]` |
/// | `WeightGradient`, FP8 | `[n, rows]` | `[k, rows]` | `[groups, n, k]` |
/// | `WeightGradient`, high precision | `[rows, n]` | `[rows, k]` | `[groups, n, k]` |
///
/// FP8 operands of a weight gradient have the groups at multiples of 128 and zeros between them. Block scales are
/// `(⌈k/128⌉, scale_pitch)` of A and `(groups, ⌈n/128⌉, up(⌈k/128⌉, 4))` of B for `Rows`, `(rows/128, up(n, 4))` and `(rows/128,
/// up(k, 4))` for `WeightGradient`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedGemmSpec {
    /// Which dimension the groups cut.
    pub kind: GroupedKind,
    /// Groups, of which any may be empty.
    pub groups: usize,
    /// Rows that there is memory for; what splits say beyond them is never touched.
    pub rows: usize,
    /// See the table.
    pub n: usize,
    /// See the table.
    pub k: usize,
    /// Type of A.
    pub a: DType,
    /// Type of B.
    pub b: DType,
    /// Type of D.
    pub d: DType,
    /// Scales.
    pub scaling: GroupedScaling,
    /// Type of a bias `[groups, n]` ([`GroupedKind::Rows`]).
    pub bias: Option<DType>,
    /// `D += …` instead of `D = …` ([`GroupedKind::WeightGradient`]).
    pub accumulate: bool,
    /// Hopper's faster FP8 accumulation, which keeps fewer bits; not for block scales.
    pub fast_accumulation: bool,
    /// B is `[groups, k, n]`: weights as they lie, for the input's gradient in high precision ([`GroupedKind::Rows`]).
    pub b_k_outermost: bool,
    /// Rows of groups begin at multiples of this: 1 or a multiple of 16.
    pub align: usize,
    /// Elements between two rows of A's block scales ([`GroupedKind::Rows`]).
    pub scale_pitch: usize,
}

pointers! {
    /// Tensors of one grouped product.
    pub struct GroupedGemmPointers {
        /// First operand.
        a,
        /// Its inverse scales; null for high precision.
        a_scale,
        /// Second operand.
        b,
        /// Its inverse scales.
        b_scale,
        /// Rows of every group, i64.
        splits,
        /// Bias, null without.
        bias,
        /// Result. Rows that are no group's stay as they are, and so does what an empty group would be added to.
        d,
    }
}

/// A checked grouped product.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemmPlan {
    spec: GroupedGemmSpec,
}

impl GroupedGemmPlan {
    /// Checks `spec`.
    ///
    /// # Errors
    /// Types, scales or options that no grouped product takes.
    pub fn new(spec: GroupedGemmSpec) -> Result<Self> {
        let fp8 = |dtype| matches!(dtype, DType::E4m3 | DType::E5m2);
        let scaled = spec.scaling != GroupedScaling::None;
        if fp8(spec.a) != scaled || fp8(spec.b) != scaled || (!scaled && spec.a != spec.b) {
            let expected = if scaled { "FP8 operands" } else { "two operands of float32, float16 or bfloat16" };
            return Err(Error::dtype(OP, "an operand", expected, if fp8(spec.a) == scaled { spec.b } else { spec.a }));
        }
        if !scaled && spec.a.as_float().is_none() {
            return Err(Error::dtype(OP, "an operand", "float32, float16 or bfloat16", spec.a));
        }
        if spec.a == DType::E5m2 && spec.b == DType::E5m2 {
            let message = "E5M2 times E5M2 has no tensor-core instruction; use E4M3 for one operand";
            return Err(Error::unsupported(OP, message));
        }
        for dtype in [Some(spec.d), spec.bias].into_iter().flatten() {
            if dtype.as_float().is_none() {
                return Err(Error::dtype(OP, "the result or bias", "float32, float16 or bfloat16", dtype));
            }
        }
        let rows = spec.kind == GroupedKind::Rows;
        if rows && spec.accumulate || !rows && spec.bias.is_some() {
            return Err(Error::unsupported(
                OP,
                "a bias goes with rows, an addition to the result with weight gradients",
            ));
        }
        if spec.b_k_outermost && (!rows || scaled) {
            let message = "only high-precision products of rows take B with k outermost; FP8 has its column layout";
            return Err(Error::unsupported(OP, message));
        }
        if spec.align != 1 && !spec.align.is_multiple_of(16) || spec.align == 0 {
            return Err(Error::value(OP, "groups begin at multiples of 1 or of a multiple of 16"));
        }
        if rows && spec.scaling == GroupedScaling::Block && spec.scale_pitch < spec.rows {
            let expected = format!("a pitch of at least {} for the rows' scales", spec.rows);
            return Err(Error::layout(OP, "scale_pitch", expected, spec.scale_pitch));
        }
        if !rows && scaled && !spec.align.is_multiple_of(BLOCK) {
            let expected = "groups at multiples of 128 for an FP8 weight gradient";
            return Err(Error::layout(OP, "align", expected, spec.align));
        }
        Ok(Self { spec })
    }

    /// What it was made of.
    #[must_use]
    pub const fn spec(&self) -> &GroupedGemmSpec {
        &self.spec
    }

    /// Runs it; nothing without groups, rows or columns of the result.
    ///
    /// # Errors
    /// A null buffer, or the launch fails.
    pub fn run(&self, target: &mut Target<'_>, at: &GroupedGemmPointers<DevPtr<'_>>) -> Result<()> {
        let spec = &self.spec;
        if spec.groups == 0 || spec.n == 0 || (spec.k == 0 || spec.rows == 0) && spec.kind == GroupedKind::Rows {
            return Ok(());
        }
        if !target.trace.on_grouped_gemm(spec) {
            return Ok(());
        }
        match &mut target.backend {
            Backend::Host => host::grouped_gemm::run(spec, at),
            Backend::Cuda(_) => Err(Error::unsupported(OP, "there is no kernel for this device yet")),
        }
    }
}
