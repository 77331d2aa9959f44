//! MoE permutation straight into FP8: a token is quantised once and written to each of its destinations.

use te_fast_kernels::{Float, Fp8, KernelId};

use crate::error::{Error, Result};
use crate::host;
use crate::host::fp8::scale_from_amax;
use crate::kernel::{DevPtr, Grid, Target, launch};
use crate::ops::cast::{TILE, aligned};
use crate::ops::permute::{MapBuffers, MapShape, Prob, ROW_THREADS, RowMapParams};
use crate::params;

/// Elements of one FP8 store.
const CHUNK: usize = 16;
const SCALE_TILE: usize = 64;
const SCALE_THREADS: u32 = 256;

params! {
    /// Parameters of `permute_cast_*`.
    pub struct PermuteCastParams<'a> [136] for PermuteCast => host::permute_cast::run {
        /// Rows of the tokens.
        pub x: DevPtr<'a>,
        /// Permuted FP8 rows.
        pub out: DevPtr<'a>,
        /// Probabilities `[T, slots]`, or null.
        pub probs: DevPtr<'a>,
        /// Permuted probabilities `[rows]`.
        pub out_probs: DevPtr<'a>,
        /// One f32 per tensor, null with blocks.
        pub scale: DevPtr<'a>,
        /// One f32 that is raised to the amax of the rows written, or null.
        pub amax: DevPtr<'a>,
        /// Inverse scales f32 `[T, blocks]`, null per tensor.
        pub token_scales: DevPtr<'a>,
        /// i32 `[rows]`, null per tensor.
        pub row_tokens: DevPtr<'a>,
        /// The map.
        pub map: RowMapParams<'a>,
        /// Columns.
        pub cols: u32,
        /// Smallest amax of a block.
        pub eps: f32,
        /// Scales are powers of two.
        pub pow2: u32,
        /// Type of the probabilities.
        pub prob_type: u32,
    }
}

params! {
    /// Parameters of `permute_scales`.
    pub struct PermuteScalesParams<'a> [48] for PermuteScales => host::permute_cast::run_scales {
        /// Inverse scales f32 `[T, blocks]`.
        pub token_scales: DevPtr<'a>,
        /// i32 `[rows]`: the token of a row, -1 for a zero row.
        pub row_tokens: DevPtr<'a>,
        /// f32 `[blocks, scale_ld]`.
        pub scale_inv: DevPtr<'a>,
        /// Rows.
        pub rows: u64,
        /// Last dimension of the scales.
        pub scale_ld: u64,
        /// Blocks of a row.
        pub blocks: u32,
        /// Inverse scale of a zero block.
        pub zero_scale: f32,
    }
}

/// Largest finite value.
const fn largest(float: Float) -> f32 {
    match float {
        Float::F32 => f32::MAX,
        Float::F16 => 65504.0,
        Float::Bf16 => f32::from_bits(0x7f7f_0000),
    }
}

/// How rows are quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// One given scale.
    Tensor,
    /// A scale per 128 elements of a row.
    Block {
        /// Smallest amax of a block.
        eps: f32,
        /// Scales are powers of two.
        pow2: bool,
    },
}

/// What a permutation with cast does.
#[derive(Clone, Copy, Debug)]
pub struct PermuteCastSpec {
    /// Sizes.
    pub shape: MapShape,
    /// Columns, a multiple of 16.
    pub cols: usize,
    /// Type of the rows.
    pub input: Float,
    /// FP8 format.
    pub output: Fp8,
    /// Type of the probabilities that move along.
    pub prob: Option<Prob>,
    /// Scales.
    pub scaling: Scaling,
}

/// Buffers of a permutation with cast.
#[derive(Clone, Copy, Debug)]
pub struct PermuteCastBuffers<'a> {
    /// `[T, cols]`, 16-byte aligned.
    pub x: DevPtr<'a>,
    /// FP8 `[rows, cols]`, 16-byte aligned.
    pub out: DevPtr<'a>,
    /// `[T, slots]`, or null.
    pub probs: DevPtr<'a>,
    /// `[rows]`, or null.
    pub out_probs: DevPtr<'a>,
    /// One f32, per tensor.
    pub scale: DevPtr<'a>,
    /// One f32 to raise, per tensor, or null.
    pub amax: DevPtr<'a>,
    /// f32 [`PermuteCastPlan::scale_shape`], with blocks.
    pub scale_inv: DevPtr<'a>,
    /// [`PermuteCastPlan::scratch_bytes`].
    pub scratch: DevPtr<'a>,
    /// The map, with its ends.
    pub map: MapBuffers<'a>,
}

/// A checked permutation with cast.
#[derive(Clone, Copy, Debug)]
pub struct PermuteCastPlan {
    spec: PermuteCastSpec,
}

impl PermuteCastPlan {
    /// Checks `spec`.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index, or columns that are no multiple of 16.
    pub fn new(spec: PermuteCastSpec) -> Result<Self> {
        spec.shape.check("permute_quantize")?;
        if spec.cols == 0 || !spec.cols.is_multiple_of(CHUNK) || i32::try_from(spec.cols).is_err() {
            let expected = "a positive multiple of 16 below 2**31";
            return Err(Error::shape("permute_quantize", "the hidden size", expected, spec.cols));
        }
        Ok(Self { spec })
    }

    fn blocks(&self) -> usize {
        self.spec.cols.div_ceil(TILE)
    }

    /// Shape of the inverse scales with blocks: (blocks, rows rounded up to 4).
    #[must_use]
    pub fn scale_shape(&self) -> (usize, usize) {
        (self.blocks(), self.spec.shape.rows.next_multiple_of(4))
    }

    /// Size of the scratch memory.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        match self.spec.scaling {
            Scaling::Tensor => 0,
            Scaling::Block { .. } => 4 * (self.spec.shape.tokens * self.blocks() + self.spec.shape.rows),
        }
    }

    /// Launches it; with blocks, two kernels.
    ///
    /// # Errors
    /// Misaligned buffers, or the driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, b: &PermuteCastBuffers<'_>) -> Result<()> {
        let PermuteCastSpec { shape, cols, input, output, prob, scaling } = self.spec;
        // Without rows there is still the map, which loses all its slots.
        if shape.rows == 0 && shape.tokens == 0 {
            return Ok(());
        }
        aligned("permute_quantize", "the input", b.x)?;
        aligned("permute_quantize", "the output", b.out)?;
        let zero_blocks = shape.zero_blocks();
        let (eps, pow2, blocks) = match scaling {
            Scaling::Tensor => (0.0, false, false),
            Scaling::Block { eps, pow2 } => (eps, pow2, true),
        };
        let row_tokens = b.scratch.offset(4 * shape.tokens * self.blocks());
        let params = PermuteCastParams {
            x: b.x,
            out: b.out,
            probs: b.probs,
            out_probs: b.out_probs,
            scale: if blocks { DevPtr::null() } else { b.scale },
            amax: if blocks { DevPtr::null() } else { b.amax },
            token_scales: if blocks { b.scratch } else { DevPtr::null() },
            row_tokens: if blocks { row_tokens } else { DevPtr::null() },
            map: RowMapParams::new(&shape, &b.map, zero_blocks),
            cols: cols as u32,
            eps,
            pow2: u32::from(pow2),
            prob_type: Prob::code(prob),
        };
        let grid = Grid::linear(zero_blocks + shape.tokens as u32, ROW_THREADS);
        launch(target, KernelId::PermuteCast(input, output), grid, &params)?;
        if !blocks || shape.rows == 0 {
            return Ok(());
        }
        let (scale_blocks, scale_ld) = self.scale_shape();
        let params = PermuteScalesParams {
            token_scales: b.scratch,
            row_tokens,
            scale_inv: b.scale_inv,
            rows: shape.rows as u64,
            scale_ld: scale_ld as u64,
            blocks: scale_blocks as u32,
            zero_scale: 1.0 / scale_from_amax(0.0, output.max(), eps, largest(input), pow2),
        };
        let tiles = scale_ld.div_ceil(SCALE_TILE) * scale_blocks.div_ceil(SCALE_TILE);
        launch(target, KernelId::PermuteScales, Grid::linear(tiles as u32, SCALE_THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::permute::Layout;

    #[test]
    fn sizes_and_refusals() -> Result<()> {
        let shape = MapShape { tokens: 5, rows: 9, layout: Layout::Mask { experts: 2 } };
        let scaling = Scaling::Block { eps: 0.0, pow2: true };
        let spec = PermuteCastSpec { shape, cols: 144, input: Float::Bf16, output: Fp8::E4m3, prob: None, scaling };
        let plan = PermuteCastPlan::new(spec)?;
        assert_eq!((plan.scale_shape(), plan.scratch_bytes()), ((2, 12), 4 * (10 + 9)));
        assert_eq!(PermuteCastPlan::new(PermuteCastSpec { scaling: Scaling::Tensor, ..spec })?.scratch_bytes(), 0);
        assert!(PermuteCastPlan::new(PermuteCastSpec { cols: 24, ..spec }).is_err());
        Ok(())
    }
}
