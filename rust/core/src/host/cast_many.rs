//! Host kernels of `cuda/quantize/cast_many.cu`, which run the kernel of one tensor for each tensor.

use half::{bf16, f16};
use te_fast_kernels::constants::quantize::SCALE_ALIGN;
use te_fast_kernels::constants::tile::{TILE, TRANSPOSED_ALIGN};
use te_fast_kernels::{Float, Fp8, Half, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::host::fp8::Real;
use crate::ops::amax::ScaleNumbers;
use crate::ops::cast::{CastParams, CastPointers, CastTransposeParams};
use crate::ops::cast_block::CastBlockParams;
use crate::ops::cast_many::{CastManyParams, ManyEntry};
use crate::ops::strips::StripPlan;

/// Runs `cast_many_*`, `cast_block_many_*` and `cast_current_many_*`, rounded or not.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &CastManyParams<'_>, id: KernelId) -> Result<()> {
    let entries = &p.entry[..p.entries as usize];
    let float = |half| match half {
        Half::F16 => Float::F16,
        Half::Bf16 => Float::Bf16,
    };
    let (nominal, kernel) = match id {
        KernelId::CastCurrentManyRounded(half) => (half, KernelId::CastCurrentMany(float(half), Fp8::E4m3)),
        KernelId::CastManyRounded(half) => (half, KernelId::CastMany(float(half), Fp8::E4m3)),
        KernelId::CastBlockManyRounded(half) => (half, KernelId::CastBlockMany(float(half), Fp8::E4m3)),
        _ => return entries.iter().try_for_each(|entry| run_entry(p, entry, id)),
    };
    entries.iter().try_for_each(|entry| match nominal {
        Half::F16 => run_rounded::<f16>(p, entry, kernel),
        Half::Bf16 => run_rounded::<bf16>(p, entry, kernel),
    })
}

/// The kernel of rounded elements.
fn run_rounded<T: Real>(p: &CastManyParams<'_>, entry: &ManyEntry<'_>, id: KernelId) -> Result<()> {
    let mut rounded: Vec<T> = entry.x.slice::<f32>(count(entry) as usize).iter().map(|&x| T::from_f32(x)).collect();
    run_entry(p, &ManyEntry { x: DevPtr::from_slice(&mut rounded), ..*entry }, id)
}

fn run_entry(p: &CastManyParams<'_>, entry: &ManyEntry<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::CastCurrentMany(input, output) => {
            let rule = ScaleNumbers { fp8_max: p.fp8_max, eps: p.eps, pow2: p.pow2, unused: 0 };
            host::cast_current::run_entry(entry, rule, (input, output))
        }
        KernelId::CastMany(input, output) => run_given(entry, (input, output)),
        // Without a tile there is no kernel to run.
        KernelId::CastBlockMany(..) if entry.rows == 0 || entry.cols == 0 => Ok(()),
        KernelId::CastBlockMany(input, output) => {
            host::cast_block::run(&cast_block(p, entry), KernelId::CastBlock2d(input, output))
        }
        _ => Err(Error::state("cast_many", id.symbol())),
    }
}

/// Casts one tensor by the scale that it is given.
///
/// # Errors
/// None for these kernels.
pub(crate) fn run_given(entry: &ManyEntry<'_>, (input, output): (Float, Fp8)) -> Result<()> {
    if entry.out_t.is_null() {
        host::cast::run(&cast(entry), KernelId::Cast(input, output))
    } else {
        host::cast::run_transpose(&cast_transpose(entry), KernelId::CastTranspose(input, output))
    }
}

/// Elements of a tensor.
pub(crate) fn count(entry: &ManyEntry<'_>) -> u64 {
    u64::from(entry.rows) * u64::from(entry.cols)
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
