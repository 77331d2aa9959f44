//! The inverse of an MoE permutation: gathers and sums the rows of each token; and its gradient.

use te_fast_kernels::constants::moe::{self, ROW_THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::row_map::{MapBuffers, MapShape, Prob, RowMapParams};
use crate::{params, pointers};

params! {
    /// Parameters of `unpermute_fwd_*`.
    pub struct UnpermuteParams<'a> [moe::UNPERMUTE_PARAMS_BYTES] for UnpermuteFwd => host::permute_merge::run {
        ..UnpermutePointers,
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
        ..UnpermuteBwdPointers,
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

pointers! {
    /// Buffers of an unpermutation.
    pub struct UnpermutePointers {
        /// Permuted rows `[rows, cols]`.
        x,
        /// Rows of the tokens `[T, cols]`.
        out,
        /// Probabilities `[T, slots]`, or null for ones.
        probs,
        /// Values per permuted row `[rows]`, or null.
        in_probs,
        /// The same per token and slot `[T, slots]`, zero where there is no row.
        out_probs,
    }
}

pointers! {
    /// Buffers of its backward with probabilities.
    pub struct UnpermuteBwdPointers {
        /// Gradient of the tokens' rows `[T, cols]`.
        dout,
        /// Permuted rows `[rows, cols]`.
        x,
        /// Their gradient `[rows, cols]`.
        dx,
        /// Probabilities `[T, slots]`.
        probs,
        /// Their gradient, of the same type.
        dprobs,
    }
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

    /// Launches the forward by a map whose ends are not used; with the types of `probs`, and of `in_probs` and `out_probs`.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(
        &self,
        target: &mut Target<'_>,
        at: &UnpermutePointers<DevPtr<'_>>,
        map: &MapBuffers<'_>,
        (prob, out_prob): (Option<Prob>, Option<Prob>),
    ) -> Result<()> {
        let params = UnpermuteParams {
            at: *at,
            map: RowMapParams::new(&self.shape, map, 0),
            cols: self.cols as u64,
            prob_type: Prob::code(prob),
            out_prob_type: Prob::code(out_prob),
        };
        launch(target, KernelId::UnpermuteFwd(self.float), Grid::linear(self.shape.tokens as u32, ROW_THREADS), &params)
    }

    /// Launches the backward with probabilities of this type, by a map with its ends.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run_bwd(
        &self,
        target: &mut Target<'_>,
        at: &UnpermuteBwdPointers<DevPtr<'_>>,
        map: &MapBuffers<'_>,
        prob: Prob,
    ) -> Result<()> {
        let zero_blocks = self.shape.zero_blocks();
        let params = UnpermuteBwdParams {
            at: *at,
            map: RowMapParams::new(&self.shape, map, zero_blocks),
            cols: self.cols as u64,
            prob_type: Prob::code(Some(prob)),
            unused: 0,
        };
        let grid = Grid::linear(zero_blocks + self.shape.tokens as u32, ROW_THREADS);
        launch(target, KernelId::UnpermuteBwd(self.float), grid, &params)
    }
}
