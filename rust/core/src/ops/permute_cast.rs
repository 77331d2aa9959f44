//! MoE permutation straight into FP8: a token is quantised once and written to each of its destinations.

use te_fast_kernels::constants::moe::{self, CAST_CHUNK, FILL_WORD, PIECE_ROWS, PIECE_SCALES, ROW_THREADS};
use te_fast_kernels::constants::tile::TILE;
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::host::fp8::scale_from_amax;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::cast::aligned;
use crate::ops::permute_map::{MakeMapParams, Making};
use crate::ops::row_map::{MapBuffers, MapShape, Prob, RowMapParams};
use crate::{params, pointers};

/// Number of these blocks per multiprocessor. They wait for other blocks, which always find room, since a
/// multiprocessor runs at least eight blocks.
const SCALE_BLOCKS: u32 = 4;

params! {
    /// Parameters of `permute_cast_*`.
    pub struct PermuteCastParams<'a> [moe::PERMUTE_CAST_PARAMS_BYTES] for PermuteCast => host::permute_cast::run {
        ..PermuteCastPointers,
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
        /// Last dimension of `scale_inv`.
        pub scale_ld: u32,
        /// Last dimension of `token_scales`.
        pub token_ld: u32,
        /// Inverse scale of a zero block.
        pub zero_scale: f32,
        /// Number of blocks at the end of the launch that copy scales to their places.
        pub scale_blocks: u32,
        /// How the launch makes the map.
        pub making: MakeMapParams<'a>,
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

/// The description of a permutation with cast.
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
    /// Multiprocessors of the device (any number for the host backend).
    pub multiprocessors: u32,
}

pointers! {
    /// Buffers of a permutation with cast.
    pub struct PermuteCastPointers {
        /// `[T, cols]`, 16-byte aligned.
        x,
        /// FP8 `[rows, cols]`, 16-byte aligned.
        out,
        /// `[T, slots]`, or null.
        probs,
        /// `[rows]`, or null.
        out_probs,
        /// One f32, per tensor.
        scale,
        /// One f32 to raise, per tensor, or null.
        amax,
        /// [`PermuteCastPlan::scratch_bytes`], 32-byte aligned, that the map's blocks fill: inverse scales f32 `[T, token_ld]`.
        token_scales,
        /// Set by the plan, after the scales: u32 `[rows]`, the token of a row, or `ZERO_ROW`.
        row_tokens,
        /// f32 [`PermuteCastPlan::scale_shape`], with blocks.
        scale_inv,
    }
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
        if spec.cols == 0 || !spec.cols.is_multiple_of(CAST_CHUNK) || i32::try_from(spec.cols).is_err() {
            let expected = "a positive multiple of 16 below 2**31";
            return Err(Error::shape("permute_quantize", "the hidden size", expected, spec.cols));
        }
        let plan = Self { spec };
        if u32::try_from(plan.scratch_bytes() / FILL_WORD).is_err() {
            return Err(Error::shape("permute_quantize", "tokens", "fewer, for scales in blocks", spec.shape.tokens));
        }
        Ok(plan)
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
            Scaling::Block { .. } => {
                4 * (self.spec.shape.tokens * self.token_ld() + self.spec.shape.rows.next_multiple_of(4))
            }
        }
    }

    /// Inverse scales of a token, whole pieces.
    fn token_ld(&self) -> usize {
        self.blocks().next_multiple_of(PIECE_SCALES)
    }

    /// Words of the scratch memory, which the map's blocks must fill.
    #[must_use]
    pub fn fill_words(&self) -> u32 {
        (self.scratch_bytes() / FILL_WORD) as u32
    }

    /// Launches it, map and all.
    ///
    /// # Errors
    /// A map that the launch does not make, misaligned buffers, or the driver's refusal.
    pub fn run(
        &self,
        target: &mut Target<'_>,
        b: &PermuteCastPointers<DevPtr<'_>>,
        map: &MapBuffers<'_>,
        making: &Making<'_>,
    ) -> Result<()> {
        let PermuteCastSpec { shape, input, output, .. } = self.spec;
        if making.params.blocks == 0 {
            // The map's blocks remove slots without a row, and fill the scratch memory so that absent scales can be
            // recognised.
            return Err(Error::state("permute_quantize", "the map must be a mask's that this launch makes"));
        }
        // Without rows, the map loses all its slots.
        if shape.rows == 0 && shape.tokens == 0 {
            return making.finish(target);
        }
        aligned("permute_quantize", "the input", b.x)?;
        aligned("permute_quantize", "the output", b.out)?;
        let params = self.params(b, map, making);
        let blocks = making.params.blocks + params.map.zero_blocks + shape.tokens as u32 + params.scale_blocks;
        launch(target, KernelId::PermuteCast(input, output), Grid::linear(blocks, ROW_THREADS), &params)
    }

    fn params<'a>(
        &self,
        b: &PermuteCastPointers<DevPtr<'a>>,
        map: &MapBuffers<'a>,
        making: &Making<'a>,
    ) -> PermuteCastParams<'a> {
        let PermuteCastSpec { shape, cols, input, output, prob, scaling, multiprocessors } = self.spec;
        let none = DevPtr::null();
        let params = PermuteCastParams {
            at: PermuteCastPointers { token_scales: none, row_tokens: none, scale_inv: none, ..*b },
            map: RowMapParams::new(&shape, map, shape.zero_blocks()),
            cols: cols as u32,
            eps: 0.0,
            pow2: 0,
            prob_type: Prob::code(prob),
            scale_ld: 0,
            token_ld: 0,
            zero_scale: 0.0,
            scale_blocks: 0,
            making: making.params,
        };
        let Scaling::Block { eps, pow2 } = scaling else { return params };
        let (blocks, scale_ld) = self.scale_shape();
        let pieces = scale_ld.div_ceil(PIECE_ROWS) * blocks.div_ceil(PIECE_SCALES);
        let wanted = pieces.div_ceil(ROW_THREADS as usize / 32);
        let row_tokens = b.token_scales.offset(4 * shape.tokens * self.token_ld());
        PermuteCastParams {
            at: PermuteCastPointers { scale: none, amax: none, row_tokens, ..*b },
            eps,
            pow2: u32::from(pow2),
            scale_ld: scale_ld as u32,
            token_ld: self.token_ld() as u32,
            zero_scale: 1.0 / scale_from_amax(0.0, output.max(), eps, largest(input), pow2),
            scale_blocks: wanted.min((SCALE_BLOCKS * multiprocessors) as usize) as u32,
            ..params
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::row_map::Layout;

    #[test]
    fn sizes_and_refusals() -> Result<()> {
        let shape = MapShape { tokens: 5, rows: 9, layout: Layout::Mask { experts: 2 } };
        let scaling = Scaling::Block { eps: 0.0, pow2: true };
        let spec = PermuteCastSpec {
            shape,
            cols: 144,
            input: Float::Bf16,
            output: Fp8::E4m3,
            prob: None,
            scaling,
            multiprocessors: 1,
        };
        let plan = PermuteCastPlan::new(spec)?;
        assert_eq!((plan.scale_shape(), plan.scratch_bytes()), ((2, 12), 4 * (5 * 8 + 12)));
        assert_eq!(PermuteCastPlan::new(PermuteCastSpec { scaling: Scaling::Tensor, ..spec })?.scratch_bytes(), 0);
        assert!(PermuteCastPlan::new(PermuteCastSpec { cols: 24, ..spec }).is_err());
        Ok(())
    }
}
