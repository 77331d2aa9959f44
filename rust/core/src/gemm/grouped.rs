//! The description of a product of groups of rows: the experts of a mixture, each with its own matrix.

use crate::base::dtype::DType;

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
    /// Rows that there is memory for; rows that splits count beyond these are never touched.
    pub rows: usize,
    /// Rows that splits may count; larger counts are cut off. This is less than `rows` if casts have padded the groups
    /// ([`GroupedKind::WeightGradient`]), since a cast writes padding only for so many rows.
    pub counted: usize,
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
