//! Host kernels of `cuda/quantize/cast_many.cu`: those of one tensor, one after the other.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::quantize::SCALE_ALIGN;
use te_fast_kernels::constants::tile::{TILE, TRANSPOSED_ALIGN};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::ops::amax::{AmaxParams, AmaxPointers};
use crate::ops::cast::{CastParams, CastPointers, CastTransposeParams};
use crate::ops::cast_block::CastBlockParams;
use crate::ops::cast_many::{CastManyParams, ManyEntry};
use crate::ops::strips::StripPlan;

/// Runs `amax_many_*`, `cast_many_*` and `cast_block_many_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &CastManyParams<'_>, id: KernelId) -> Result<()> {
    p.entry.iter().take(p.entries as usize).try_for_each(|entry| match id {
        KernelId::AmaxMany(input) => host::amax::run(&amax(p, entry), KernelId::Amax(input)),
        KernelId::CastMany(input, output) if entry.out_t.is_null() => {
            host::cast::run(&cast(entry), KernelId::Cast(input, output))
        }
        KernelId::CastMany(input, output) => {
            host::cast::run_transpose(&cast_transpose(entry), KernelId::CastTranspose(input, output))
        }
        // No tile, no kernel.
        KernelId::CastBlockMany(..) if entry.rows == 0 || entry.cols == 0 => Ok(()),
        KernelId::CastBlockMany(input, output) => {
            host::cast_block::run(&cast_block(p, entry), KernelId::CastBlock2d(input, output))
        }
        _ => Err(Error::state("cast_many", id.symbol())),
    })
}

fn count(entry: &ManyEntry<'_>) -> u64 {
    u64::from(entry.rows) * u64::from(entry.cols)
}

fn amax<'a>(p: &CastManyParams<'a>, entry: &ManyEntry<'a>) -> AmaxParams<'a> {
    let &CastManyParams { fp8_max, eps, pow2, .. } = p;
    let at = AmaxPointers { x: entry.x, scale: entry.scale, ..AmaxPointers::default() };
    AmaxParams { at, count: count(entry), fp8_max, eps, pow2, unused: 0 }
}

fn cast<'a>(entry: &ManyEntry<'a>) -> CastParams<'a> {
    let &ManyEntry { x, out, scale, scale_inv, other: amax, .. } = entry;
    CastParams { x, out, scale, scale_inv, amax, noop: DevPtr::null(), count: count(entry), reverse: 0, unused: 0 }
}

fn cast_transpose<'a>(entry: &ManyEntry<'a>) -> CastTransposeParams<'a> {
    let &ManyEntry { x, out, out_t, scale, scale_inv, other: amax, rows, cols, .. } = entry;
    CastTransposeParams {
        at: CastPointers { x, out, out_t, scale, scale_inv, amax, ..CastPointers::default() },
        rows: rows.into(),
        cols: cols.into(),
        ld_t: u64::from(rows).next_multiple_of(TRANSPOSED_ALIGN as u64),
        strips: StripPlan::single_tiles(1, 1),
        reverse: 0,
    }
}

fn cast_block<'a>(p: &CastManyParams<'a>, entry: &ManyEntry<'a>) -> CastBlockParams<'a> {
    let &ManyEntry { x, out, out_t, scale_inv, other: scale_inv_t, rows, cols, .. } = entry;
    let (tiles_rows, tiles_cols) = (rows.div_ceil(TILE as u32), cols.div_ceil(TILE as u32));
    let padded = |tiles: u32| u64::from(tiles).next_multiple_of(SCALE_ALIGN as u64);
    CastBlockParams {
        x,
        out,
        out_t,
        scale_inv,
        scale_inv_t,
        noop: DevPtr::null(),
        rows: rows.into(),
        cols: cols.into(),
        ld_t: u64::from(rows).next_multiple_of(TRANSPOSED_ALIGN as u64),
        scale_ld: padded(tiles_cols),
        scale_ld_t: padded(tiles_rows),
        packed: DevPtr::null(),
        unpacked: DevPtr::null(),
        packed_count: 0,
        tiles_rows,
        tiles_cols,
        eps: p.eps,
        pow2: p.pow2,
        byte_scales_t: 0,
        padding: 0,
    }
}
