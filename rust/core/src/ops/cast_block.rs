//! Block-scaled cast to FP8, 1 x 128 or 128 x 128, in row layout, transposed layout or both.

use te_fast_kernels::constants::quantize::{self, SCALE_ALIGN};
use te_fast_kernels::constants::tile::{TILE, TILE_THREADS, TRANSPOSED_ALIGN};
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::amax::check_eps;
use crate::ops::cast::{aligned, check_columns, tiles};
use crate::{params, pointers};

/// Number of blocks that unpack scales; more blocks would have too little work.
const UNPACK_BLOCKS: usize = 256;
const OP: &str = "unpack_scales";

params! {
    /// Parameters of `cast_block_1d_*` and `cast_block_2d_*`.
    pub struct CastBlockParams<'a> [quantize::CAST_BLOCK_PARAMS_BYTES] for CastBlock1d | CastBlock2d => host::cast_block::run {
        /// Input `[rows, cols]`.
        pub x: DevPtr<'a>,
        /// FP8 bytes `[rows, cols]`, or null.
        pub out: DevPtr<'a>,
        /// FP8 bytes `[cols, ld_t]`, or null.
        pub out_t: DevPtr<'a>,
        /// Scales of `out`.
        pub scale_inv: DevPtr<'a>,
        /// Scales of `out_t`.
        pub scale_inv_t: DevPtr<'a>,
        /// One f32, or null; 1.0 leaves every output as it is.
        pub noop: DevPtr<'a>,
        /// Rows of the input.
        pub rows: u64,
        /// Columns of the input.
        pub cols: u64,
        /// Leading dimension of `out_t`.
        pub ld_t: u64,
        /// Last dimension of `scale_inv`.
        pub scale_ld: u64,
        /// Last dimension of `scale_inv_t`.
        pub scale_ld_t: u64,
        /// Scales as bytes that this launch unpacks, or null.
        pub packed: DevPtr<'a>,
        /// Where their f32 go.
        pub unpacked: DevPtr<'a>,
        /// How many.
        pub packed_count: u64,
        /// Tiles along the rows.
        pub tiles_rows: u32,
        /// Tiles along the columns.
        pub tiles_cols: u32,
        /// Smallest amax.
        pub eps: f32,
        /// Round scales down to powers of two.
        pub pow2: u32,
        /// Scales of `out_t` are bytes.
        pub byte_scales_t: u32,
        /// Zero.
        pub padding: u32,
    }
}

/// Shape of a scaling block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockShape {
    /// 1 x 128 along the contraction: rows of the row layout, columns for the transposed layout.
    OneDimensional,
    /// 128 x 128.
    TwoDimensional,
}

/// The description of a block cast, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub struct CastBlockSpec {
    /// Rows of the input.
    pub rows: usize,
    /// Columns of the input.
    pub cols: usize,
    /// Type of the input.
    pub input: Float,
    /// Type of the output.
    pub output: Fp8,
    /// Shape of a scaling block.
    pub block: BlockShape,
    /// Write the row layout.
    pub rowwise: bool,
    /// Write the transposed layout.
    pub columnwise: bool,
    /// Smallest amax.
    pub eps: f32,
    /// Round scales down to powers of two.
    pub pow2: bool,
    /// Write the transposed layout's scales as bytes, which a later cast unpacks; only with 1 x 128 blocks and `pow2`.
    pub byte_scales_t: bool,
}

params! {
    /// Parameters of `unpack_block_scales`.
    pub struct UnpackScalesParams<'a> [quantize::UNPACK_SCALES_PARAMS_BYTES] for UnpackScales => host::cast_block::run_unpack {
        /// Scales as bytes.
        pub packed: DevPtr<'a>,
        /// Where their f32 go.
        pub unpacked: DevPtr<'a>,
        /// How many.
        pub count: u64,
    }
}

/// Converts `count` scales from bytes to floats, if no cast of the call does so.
///
/// # Errors
/// A null buffer, or the launch fails.
pub fn unpack_scales(target: &mut Target<'_>, packed: DevPtr<'_>, unpacked: DevPtr<'_>, count: usize) -> Result<()> {
    if packed.is_null() || unpacked.is_null() {
        return Err(Error::value(OP, "a buffer of scales is null"));
    }
    let blocks = count.div_ceil(TILE_THREADS as usize).clamp(1, UNPACK_BLOCKS);
    let params = UnpackScalesParams { packed, unpacked, count: count as u64 };
    launch(target, KernelId::UnpackScales, Grid::linear(blocks as u32, TILE_THREADS), &params)
}

pointers! {
    /// Buffers of one block cast; null if the plan does not use them.
    pub struct CastBlockPointers {
        /// Input `[rows, cols]`, contiguous.
        x,
        /// [`CastBlockPlan::out_bytes`].
        out,
        /// [`CastBlockPlan::out_t_bytes`], 16-byte aligned.
        out_t,
        /// f32 of [`CastBlockPlan::scale_shape`].
        scale_inv,
        /// f32 of [`CastBlockPlan::scale_t_shape`], bytes with `byte_scales_t`.
        scale_inv_t,
        /// One f32, or null; 1.0 leaves every output as it is.
        noop,
        /// Scales of another tensor to unpack in the same launch, as bytes: the exponents of powers of two, 255 for zero.
        packed,
        /// Where their f32 go.
        unpacked,
    }
}

/// A checked block cast: kernel and grid are chosen.
#[derive(Clone, Copy, Debug)]
pub struct CastBlockPlan {
    spec: CastBlockSpec,
    kernel: KernelId,
    grid: Grid,
    ld_t: usize,
    scale_shape: [usize; 2],
    scale_t_shape: [usize; 2],
    tiles: (u32, u32),
    /// Scales of another tensor that the launch unpacks.
    unpacks: usize,
}

/// Shape of the row layout's scales for a tensor of `rows` by `cols`; of the transposed layout's with the two swapped.
#[must_use]
pub const fn scale_shape(block: BlockShape, rows: usize, cols: usize) -> [usize; 2] {
    let blocks = cols.div_ceil(TILE);
    match block {
        BlockShape::OneDimensional => [blocks, rows.next_multiple_of(SCALE_ALIGN)],
        BlockShape::TwoDimensional => [rows.div_ceil(TILE), blocks.next_multiple_of(SCALE_ALIGN)],
    }
}

impl CastBlockPlan {
    /// Checks `spec` and picks the kernel.
    ///
    /// # Errors
    /// A shape beyond what a launch can index, a bad epsilon, or nothing to write.
    pub fn new(spec: CastBlockSpec) -> Result<Self> {
        if !(spec.rowwise || spec.columnwise) {
            return Err(Error::value("cast_block", "no output is asked for; ask for rowwise or columnwise"));
        }
        check_eps("cast_block", spec.eps)?;
        if spec.byte_scales_t && !(spec.pow2 && spec.block == BlockShape::OneDimensional) {
            return Err(Error::value("cast_block", "scales as bytes are powers of two, of 1x128 blocks"));
        }
        check_columns("cast_block", spec.cols)?;
        let tiles = tiles("cast_block", spec.rows, spec.cols)?;
        let kernel = match spec.block {
            BlockShape::OneDimensional => KernelId::CastBlock1d(spec.input, spec.output),
            BlockShape::TwoDimensional => KernelId::CastBlock2d(spec.input, spec.output),
        };
        Ok(Self {
            spec,
            kernel,
            grid: Grid::linear(tiles.0 * tiles.1, TILE_THREADS),
            ld_t: if spec.columnwise { spec.rows.next_multiple_of(TRANSPOSED_ALIGN) } else { 0 },
            scale_shape: scale_shape(spec.block, spec.rows, spec.cols),
            scale_t_shape: scale_shape(spec.block, spec.cols, spec.rows),
            tiles,
            unpacks: 0,
        })
    }

    /// The spec of the plan.
    #[must_use]
    pub const fn spec(&self) -> &CastBlockSpec {
        &self.spec
    }

    /// Leading dimension of the transposed layout: rows, rounded up to 16; the padding is zero.
    #[must_use]
    pub const fn transposed_ld(&self) -> usize {
        self.ld_t
    }

    /// Size of the row layout.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        if self.spec.rowwise { self.spec.rows * self.spec.cols } else { 0 }
    }

    /// Size of the transposed layout.
    #[must_use]
    pub const fn out_t_bytes(&self) -> usize {
        self.ld_t * self.spec.cols
    }

    /// Shape of the row layout's scales.
    #[must_use]
    pub const fn scale_shape(&self) -> [usize; 2] {
        self.scale_shape
    }

    /// Shape of the transposed layout's scales.
    #[must_use]
    pub const fn scale_t_shape(&self) -> [usize; 2] {
        self.scale_t_shape
    }

    /// Size of the row layout's scales.
    #[must_use]
    pub const fn scale_bytes(&self) -> usize {
        if self.spec.rowwise { self.scale_shape[0] * self.scale_shape[1] * 4 } else { 0 }
    }

    /// Size of the transposed layout's scales.
    #[must_use]
    pub const fn scale_t_bytes(&self) -> usize {
        let bytes = if self.spec.byte_scales_t { 1 } else { 4 };
        if self.spec.columnwise { self.scale_t_shape[0] * self.scale_t_shape[1] * bytes } else { 0 }
    }

    /// The same, also unpacking a number of another tensor's scales in the launch.
    #[must_use]
    pub const fn unpacking(mut self, count: usize) -> Self {
        self.unpacks = count;
        self
    }

    /// Launches the cast; does nothing for an empty tensor, which has no outputs.
    ///
    /// # Errors
    /// A buffer that the plan needs is null or misaligned, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, buffers: &CastBlockPointers<DevPtr<'_>>) -> Result<()> {
        let (b, spec) = (buffers, &self.spec);
        if self.grid.is_empty() {
            return Ok(());
        }
        let missing = b.x.is_null()
            || (spec.rowwise && (b.out.is_null() || b.scale_inv.is_null()))
            || (spec.columnwise && (b.out_t.is_null() || b.scale_inv_t.is_null()));
        if missing {
            return Err(Error::value("cast_block", "a buffer that the plan needs is null"));
        }
        if spec.columnwise && !target.is_host() {
            aligned("cast_block", "the transposed output", b.out_t)?;
        }
        let params = CastBlockParams {
            x: b.x,
            out: b.out.when(spec.rowwise),
            out_t: b.out_t.when(spec.columnwise),
            scale_inv: b.scale_inv.when(spec.rowwise),
            scale_inv_t: b.scale_inv_t.when(spec.columnwise),
            noop: b.noop,
            rows: spec.rows as u64,
            cols: spec.cols as u64,
            ld_t: self.ld_t as u64,
            scale_ld: self.scale_shape[1] as u64,
            scale_ld_t: self.scale_t_shape[1] as u64,
            packed: b.packed,
            unpacked: b.unpacked,
            packed_count: self.unpacks as u64,
            tiles_rows: self.tiles.0,
            tiles_cols: self.tiles.1,
            eps: spec.eps,
            pow2: u32::from(spec.pow2),
            byte_scales_t: u32::from(spec.byte_scales_t),
            padding: 0,
        };
        launch(target, self.kernel, self.grid, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_shapes_are_those_of_transformer_engine() {
        assert_eq!(scale_shape(BlockShape::OneDimensional, 130, 300), [3, 132]);
        assert_eq!(scale_shape(BlockShape::TwoDimensional, 130, 300), [2, 4]);
        assert_eq!(scale_shape(BlockShape::TwoDimensional, 300, 130), [3, 4]);
        assert_eq!(scale_shape(BlockShape::OneDimensional, 0, 300), [3, 0]);
    }
}
