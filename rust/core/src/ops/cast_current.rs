//! Current scaling of one tensor in one launch: its amax, the scale that follows, and the cast.

use te_fast_kernels::constants::quantize::{
    self, BLOCKS_EARLY, BLOCKS_ELSEWHERE, BLOCKS_F32, BLOCKS_HOPPER, CURRENT_SLOTS, CURRENT_WORKSPACE_BYTES,
};
use te_fast_kernels::constants::tile::{TILE, TILE_THREADS};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::DeviceFacts;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Backend, Target, launch};
use crate::ops::amax::{ScaleNumbers, ScaleRule, check_eps};
use crate::ops::cast::{aligned, check_columns, tiles};
use crate::ops::cast_many::ManyEntry;
use crate::params;

const OP: &str = "cast_current";
/// Shared memory of a block besides its slots: a tile's transposed bytes, and the kilobyte that CUDA takes.
const BLOCK_BYTES: usize = 17_500;
/// The same of a multiprocessor, which blocks cannot ask for.
const RESERVED_BYTES: usize = 1 << 10;
/// Blocks that a multiprocessor should have at least: while one waits, others read.
const BLOCKS_AT_LEAST: usize = 2;

params! {
    /// Parameters of `cast_current_*`.
    pub struct CastCurrentParams<'a> [quantize::CAST_CURRENT_PARAMS_BYTES] for CastCurrent => host::cast_current::run {
        /// [`CastCurrentPlan::WORKSPACE_BYTES`], zeroed once when allocated. One launch at a time may use it.
        pub workspace: DevPtr<'a>,
        /// One f32, or null; 1.0 leaves every output as it is.
        pub noop: DevPtr<'a>,
        /// How the scale follows from the amax.
        pub rule: ScaleNumbers,
        /// Tiles that a block keeps.
        pub slots: u32,
        /// 0.
        pub unused: u32,
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
    input: Float,
    rule: ScaleRule,
    rows: u32,
    cols: u32,
    tiles: u64,
}

impl CastCurrentPlan {
    /// Size of the workspace.
    pub const WORKSPACE_BYTES: usize = CURRENT_WORKSPACE_BYTES;

    /// A cast of `rows` x `cols` elements.
    ///
    /// # Errors
    /// An epsilon that is negative or not a number, or a shape beyond what a launch can index.
    pub fn new(rows: usize, cols: usize, input: Float, rule: ScaleRule) -> Result<Self> {
        check_eps(OP, rule.eps)?;
        check_columns(OP, cols)?;
        let (tiles_rows, tiles_cols) = tiles(OP, rows, cols)?;
        let Ok(short_rows) = u32::try_from(rows) else {
            return Err(Error::shape(OP, "the number of rows", "below 2**32", rows));
        };
        let tiles = (u64::from(tiles_rows) * u64::from(tiles_cols)).max(1);
        check_tiles(OP, tiles)?;
        Ok(Self { input, rule, rows: short_rows, cols: cols as u32, tiles })
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
        let blocks = Blocks::of(target, self.tiles, self.input.size(), u32::MAX);
        let params = CastCurrentParams {
            workspace: b.workspace,
            noop: b.noop,
            rule: self.rule.into(),
            slots: blocks.slots,
            unused: 0,
            entry: ManyEntry {
                x: b.x,
                out: b.out,
                out_t: b.out_t,
                scale: DevPtr::null(),
                scale_inv: b.scale_inv,
                other: DevPtr::null(),
                rows: self.rows,
                cols: self.cols,
            },
        };
        launch(target, KernelId::CastCurrent(self.input, self.rule.output), blocks.grid, &params)
    }
}

/// Tiles are numbered by 31 bits.
pub(crate) fn check_tiles(op: &'static str, tiles: u64) -> Result<()> {
    if i32::try_from(tiles).is_ok() {
        return Ok(());
    }
    Err(Error::shape(op, "the number of tiles of 128 x 128", "below 2**31", tiles))
}

/// Blocks that have registers on a multiprocessor, as `quantize/block.cuh` caps them.
fn blocks_by_registers((major, minor): (u32, u32), element_bytes: usize) -> u32 {
    match (element_bytes, major, minor) {
        (4.., ..) => BLOCKS_F32,
        (_, 9, _) => BLOCKS_HOPPER,
        (_, ..8, _) | (_, 8, ..9) => BLOCKS_EARLY,
        _ => BLOCKS_ELSEWHERE,
    }
}

/// The blocks of a launch, and the tiles that each of them keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    pub(crate) grid: Grid,
    pub(crate) slots: u32,
}

impl Blocks {
    /// For so many tiles, kept as elements of `element_bytes`, by a kernel that has `most` blocks on a multiprocessor.
    #[inline]
    pub(crate) fn of(target: &Target<'_>, tiles: u64, element_bytes: usize, most: u32) -> Self {
        match &target.backend {
            Backend::Cuda(queue) => {
                let &DeviceFacts { capability, multiprocessors, shared_bytes, .. } = queue.device.facts();
                let most = blocks_by_registers(capability, element_bytes).min(most);
                Self::on((multiprocessors, most), shared_bytes as usize, tiles, element_bytes)
            }
            Backend::Host => Self::on((1, 1), 0, tiles, element_bytes),
        }
    }

    /// Of a device: one slot if as many blocks as there are tiles run at once, else as many slots as leave room for
    /// [`BLOCKS_AT_LEAST`].
    fn on((multiprocessors, most): (u32, u32), shared_bytes: usize, tiles: u64, element_bytes: usize) -> Self {
        let (slot, memory) = (TILE * TILE * element_bytes, shared_bytes + RESERVED_BYTES);
        let blocks =
            |slots: usize| multiprocessors as usize * (memory / (BLOCK_BYTES + slots * slot)).clamp(1, most as usize);
        let one = blocks(1);
        let slots = if tiles <= one as u64 {
            1
        } else {
            ((memory / BLOCKS_AT_LEAST).saturating_sub(BLOCK_BYTES) / slot).clamp(1, CURRENT_SLOTS)
        };
        let count = tiles.min(blocks(slots) as u64) as u32;
        let grid = Grid::linear(count, TILE_THREADS).with_shared((slots * slot) as u32);
        Self { grid, slots: slots as u32 }
    }
}

#[cfg(test)]
mod tests {
    use te_fast_kernels::Fp8;
    use te_fast_kernels::constants::quantize::BLOCKS_CURRENT_MANY;

    use super::*;

    /// Tiles, slots, blocks on an H100.
    fn on_hopper(tiles: u64, element_bytes: usize) -> (u32, u32) {
        let Blocks { grid, slots } =
            Blocks::on((132, blocks_by_registers((9, 0), element_bytes)), 227 << 10, tiles, element_bytes);
        assert_eq!(grid.shared_bytes as usize, slots as usize * TILE * TILE * element_bytes);
        (slots, grid.blocks[0])
    }

    #[test]
    fn every_tile_of_a_small_tensor_has_a_block_and_large_ones_have_more_slots() {
        assert_eq!(on_hopper(1, 2), (1, 1));
        assert_eq!(on_hopper(528, 2), (1, 528));
        assert_eq!(on_hopper(529, 2), (3, 264));
        assert_eq!(on_hopper(1 << 20, 2), (3, 264));
        assert_eq!(on_hopper(1000, 4), (1, 264));
    }

    #[test]
    fn blocks_that_have_no_registers_are_not_counted_on() {
        let many = |tiles| {
            let Blocks { grid, slots } = Blocks::on((132, BLOCKS_CURRENT_MANY), 227 << 10, tiles, 2);
            (slots, grid.blocks[0])
        };
        assert_eq!([many(264), many(265), many(528)], [(1, 264), (3, 264), (3, 264)]);
        let residents = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)].map(|capability| blocks_by_registers(capability, 2));
        assert_eq!(residents, [2, 3, 4, 3, 3]);
        assert_eq!(blocks_by_registers((9, 0), 4), 2);
    }

    #[test]
    fn slots_fit_where_shared_memory_is_small() {
        for shared_bytes in [99 << 10, 163 << 10, 227 << 10] {
            for element_bytes in [2, 4] {
                for tiles in [1, 100, 10_000] {
                    let Blocks { grid, slots } = Blocks::on((100, 4), shared_bytes, tiles, element_bytes);
                    assert!(slots >= 1 && grid.shared_bytes as usize + BLOCK_BYTES <= shared_bytes + RESERVED_BYTES);
                }
            }
        }
    }

    #[test]
    fn a_tensor_without_elements_has_one_tile() -> Result<()> {
        let rule = ScaleRule { output: Fp8::E4m3, eps: 0.0, pow2: false };
        for (rows, cols) in [(0, 513), (513, 0), (0, 0)] {
            assert_eq!(CastCurrentPlan::new(rows, cols, Float::Bf16, rule)?.tiles, 1, "{rows} x {cols}");
        }
        Ok(())
    }
}
