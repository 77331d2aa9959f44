//! Current scaling of one tensor in one launch: its amax, the scale that follows, and the cast.

use te_fast_kernels::constants::quantize::{self, CURRENT_WORKSPACE_BYTES, SPAN};
use te_fast_kernels::constants::tile::TILE_THREADS;
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::ops::amax::{ScaleNumbers, ScaleRule, check_eps};
use crate::ops::cast::{aligned, check_columns, tiles};
use crate::ops::cast_many::ManyEntry;
use crate::params;

const OP: &str = "cast_current";
/// Chunks per multiprocessor up to which a chunk is one span, and spans of the largest chunk.
const CHUNKS_PER_MULTIPROCESSOR: usize = 4;
const MOST_SPANS: usize = 4;

params! {
    /// Parameters of `cast_current_*`.
    pub struct CastCurrentParams<'a> [quantize::CAST_CURRENT_PARAMS_BYTES] for CastCurrent => host::cast_current::run {
        /// [`CastCurrentPlan::WORKSPACE_BYTES`], zeroed once when allocated. One launch at a time may use it.
        pub workspace: DevPtr<'a>,
        /// One f32, or null; 1.0 leaves every output as it is.
        pub noop: DevPtr<'a>,
        /// How the scale follows from the amax.
        pub rule: ScaleNumbers,
        /// Elements of a chunk.
        pub chunk: u64,
        /// The tensor.
        pub entry: ManyEntry<'a>,
    }
}

/// Buffers of one cast.
#[derive(Clone, Copy, Debug)]
pub struct CastCurrentPointers<'a> {
    /// Input, contiguous.
    pub x: DevPtr<'a>,
    /// FP8 bytes of the row layout, or null.
    pub out: DevPtr<'a>,
    /// FP8 bytes of the transposed layout, 16-byte aligned, or null.
    pub out_t: DevPtr<'a>,
    /// One f32 that receives `1 / scale`, or null.
    pub scale_inv: DevPtr<'a>,
    /// One f32, or null; 1.0 leaves every output as it is.
    pub noop: DevPtr<'a>,
    /// [`CastCurrentPlan::WORKSPACE_BYTES`], zero between launches.
    pub workspace: DevPtr<'a>,
}

/// A checked cast under current scaling.
#[derive(Clone, Copy, Debug)]
pub struct CastCurrentPlan {
    kernel: KernelId,
    grid: Grid,
    rule: ScaleRule,
    rows: u32,
    cols: u32,
    chunk: u64,
    chunks: u32,
}

impl CastCurrentPlan {
    /// Size of the workspace.
    pub const WORKSPACE_BYTES: usize = CURRENT_WORKSPACE_BYTES;

    /// A cast of `rows` x `cols` elements on a device with `multiprocessors` (any number for the host backend).
    ///
    /// # Errors
    /// An epsilon that is negative or not a number, or a shape beyond what a launch can index.
    pub fn new(rows: usize, cols: usize, input: Float, rule: ScaleRule, multiprocessors: u32) -> Result<Self> {
        check_eps(OP, rule.eps)?;
        check_columns(OP, cols)?;
        let (tiles_rows, tiles_cols) = tiles(OP, rows, cols)?;
        let Ok(short_rows) = u32::try_from(rows) else {
            return Err(Error::shape(OP, "the number of rows", "below 2**32", rows));
        };
        let count = rows * cols;
        let most = CHUNKS_PER_MULTIPROCESSOR * multiprocessors.max(1) as usize;
        let chunk = SPAN * count.div_ceil(SPAN * most).clamp(1, MOST_SPANS);
        let chunks = count.div_ceil(chunk).max(1);
        let blocks = chunks + (tiles_rows as usize * tiles_cols as usize).max(1);
        let Ok(blocks) = i32::try_from(blocks) else {
            return Err(Error::shape(OP, "the number of blocks", "below 2**31", blocks));
        };
        Ok(Self {
            kernel: KernelId::CastCurrent(input, rule.output),
            grid: Grid::linear(blocks as u32, TILE_THREADS),
            rule,
            rows: short_rows,
            cols: cols as u32,
            chunk: chunk as u64,
            chunks: chunks as u32,
        })
    }

    /// Launches the cast.
    ///
    /// # Errors
    /// A buffer that is needed is null or misaligned, or the launch fails.
    #[inline]
    pub fn run(&self, target: &mut Target<'_>, b: &CastCurrentPointers<'_>) -> Result<()> {
        let filled = self.rows != 0 && self.cols != 0;
        let missing = (filled && (b.x.is_null() || (b.out.is_null() && b.out_t.is_null())))
            || (b.workspace.is_null() && !target.is_host());
        if missing {
            return Err(Error::value(OP, "a buffer that the plan needs is null"));
        }
        if !target.is_host() {
            aligned(OP, "the transposed output", b.out_t)?;
        }
        let params = CastCurrentParams {
            workspace: b.workspace,
            noop: b.noop,
            rule: self.rule.into(),
            chunk: self.chunk,
            entry: ManyEntry {
                x: b.x,
                out: b.out,
                out_t: b.out_t,
                scale: DevPtr::null(),
                scale_inv: b.scale_inv,
                other: DevPtr::null(),
                rows: self.rows,
                cols: self.cols,
                chunks: self.chunks,
                first_tile: self.chunks,
            },
        };
        launch(target, self.kernel, self.grid, &params)
    }
}

#[cfg(test)]
mod tests {
    use te_fast_kernels::Fp8;

    use super::*;

    #[test]
    fn a_tensor_without_elements_has_one_chunk_and_one_tile() -> Result<()> {
        let rule = ScaleRule { output: Fp8::E4m3, eps: 0.0, pow2: false };
        for (rows, cols) in [(0, 513), (513, 0), (0, 0)] {
            let plan = CastCurrentPlan::new(rows, cols, Float::Bf16, rule, 132)?;
            assert_eq!(plan.grid.blocks, [2, 1, 1], "{rows} x {cols}");
        }
        Ok(())
    }
}
