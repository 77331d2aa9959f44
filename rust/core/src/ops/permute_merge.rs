//! The way back of an MoE permutation: rows of a token gathered and summed, and the gradient of that.

use te_fast_kernels::constants::moe::{self, ROW_THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::permute::{MapBuffers, MapShape, Prob, RowMapParams};
use crate::params;

params! {
    /// Parameters of `unpermute_fwd_*`.
    pub struct UnpermuteParams<'a> [moe::UNPERMUTE_PARAMS_BYTES] for UnpermuteFwd => host::permute_merge::run {
        /// Permuted rows.
        pub x: DevPtr<'a>,
        /// Rows of the tokens.
        pub out: DevPtr<'a>,
        /// Probabilities `[T, slots]`, or null for ones.
        pub probs: DevPtr<'a>,
        /// Values per permuted row `[rows]`, or null.
        pub in_probs: DevPtr<'a>,
        /// The same per token and slot `[T, slots]`, zero where there is no row.
        pub out_probs: DevPtr<'a>,
        /// The map.
        pub map: RowMapParams<'a>,
        /// Columns.
        pub cols: u64,
        /// Type of `probs`.
        pub prob_type: u32,
        /// Type of `in_probs` and `out_probs`.
        pub out_prob_type: u32,
    }
}

params! {
    /// Parameters of `unpermute_bwd_*`.
    pub struct UnpermuteBwdParams<'a> [moe::UNPERMUTE_BWD_PARAMS_BYTES] for UnpermuteBwd => host::permute_merge::run_bwd {
        /// Gradient of the tokens' rows.
        pub dout: DevPtr<'a>,
        /// Permuted rows.
        pub x: DevPtr<'a>,
        /// Gradient of the permuted rows.
        pub dx: DevPtr<'a>,
        /// Probabilities `[T, slots]`.
        pub probs: DevPtr<'a>,
        /// Their gradient, of the same type.
        pub dprobs: DevPtr<'a>,
        /// The map.
        pub map: RowMapParams<'a>,
        /// Columns.
        pub cols: u64,
        /// Type of the probabilities.
        pub prob_type: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// A checked unpermutation.
#[derive(Clone, Copy, Debug)]
pub struct UnpermutePlan {
    shape: MapShape,
    cols: usize,
    float: Float,
}

/// Buffers of an unpermutation.
#[derive(Clone, Copy, Debug)]
pub struct UnpermuteBuffers<'a> {
    /// `[rows, cols]`.
    pub x: DevPtr<'a>,
    /// `[T, cols]`.
    pub out: DevPtr<'a>,
    /// `[T, slots]`, or null for ones.
    pub probs: DevPtr<'a>,
    /// Type of `probs`.
    pub prob: Option<Prob>,
    /// `[rows]`, or null.
    pub in_probs: DevPtr<'a>,
    /// `[T, slots]`, with `in_probs`.
    pub out_probs: DevPtr<'a>,
    /// Type of `in_probs` and `out_probs`.
    pub out_prob: Option<Prob>,
    /// The map; its ends are not used.
    pub map: MapBuffers<'a>,
}

/// Buffers of its backward with probabilities.
#[derive(Clone, Copy, Debug)]
pub struct UnpermuteBwdBuffers<'a> {
    /// `[T, cols]`.
    pub dout: DevPtr<'a>,
    /// `[rows, cols]`.
    pub x: DevPtr<'a>,
    /// `[rows, cols]`.
    pub dx: DevPtr<'a>,
    /// `[T, slots]`.
    pub probs: DevPtr<'a>,
    /// `[T, slots]`.
    pub dprobs: DevPtr<'a>,
    /// Type of both.
    pub prob: Prob,
    /// The map, with its ends.
    pub map: MapBuffers<'a>,
}

impl UnpermutePlan {
    /// Checks the sizes.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index.
    pub fn new(shape: MapShape, cols: usize, float: Float) -> Result<Self> {
        shape.check("unpermute")?;
        Ok(Self { shape, cols, float })
    }

    /// Launches the forward.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, b: &UnpermuteBuffers<'_>) -> Result<()> {
        let params = UnpermuteParams {
            x: b.x,
            out: b.out,
            probs: b.probs,
            in_probs: b.in_probs,
            out_probs: b.out_probs,
            map: RowMapParams::new(&self.shape, &b.map, 0),
            cols: self.cols as u64,
            prob_type: Prob::code(b.prob),
            out_prob_type: Prob::code(b.out_prob),
        };
        launch(target, KernelId::UnpermuteFwd(self.float), Grid::linear(self.shape.tokens as u32, ROW_THREADS), &params)
    }

    /// Launches the backward with probabilities.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run_bwd(&self, target: &mut Target<'_>, b: &UnpermuteBwdBuffers<'_>) -> Result<()> {
        let zero_blocks = self.shape.zero_blocks();
        let params = UnpermuteBwdParams {
            dout: b.dout,
            x: b.x,
            dx: b.dx,
            probs: b.probs,
            dprobs: b.dprobs,
            map: RowMapParams::new(&self.shape, &b.map, zero_blocks),
            cols: self.cols as u64,
            prob_type: Prob::code(Some(b.prob)),
            unused: 0,
        };
        let grid = Grid::linear(zero_blocks + self.shape.tokens as u32, ROW_THREADS);
        launch(target, KernelId::UnpermuteBwd(self.float), grid, &params)
    }
}
