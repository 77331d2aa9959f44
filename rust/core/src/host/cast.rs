//! Host kernels of `cuda/quantize/cast.cu` and `cuda/quantize/cast_transpose.cu`.

use rayon::prelude::*;
use te_fast_kernels::KernelId;
use te_fast_kernels::constants::tile::TILE;

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host::fp8::{Format, PARALLEL_FROM, Real, amax_bits, dispatch_types, is_noop, read_scalar, write_scalar};
use crate::ops::cast::{CastParams, CastTransposeParams};

/// Elements that one task casts.
const SPAN: usize = 1 << 14;
/// Columns that one task transposes or sums.
const STRIP: usize = 64;

/// Runs `cast_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &CastParams<'_>, id: KernelId) -> Result<()> {
    let KernelId::Cast(input, output) = id else {
        return Err(Error::state("cast", id.symbol()));
    };
    dispatch_types!(input, output, cast(p));
    Ok(())
}

/// Runs `cast_transpose_*` and `cast_transpose_dbias_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run_transpose(p: &CastTransposeParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::CastTranspose(input, output) => dispatch_types!(input, output, cast_transpose(p, false)),
        KernelId::CastTransposeDbias(input, output) => dispatch_types!(input, output, cast_transpose(p, true)),
        _ => return Err(Error::state("cast_transpose", id.symbol())),
    }
    Ok(())
}

fn cast<T: Real, F: Format>(p: &CastParams<'_>) {
    if is_noop(p.noop) {
        return;
    }
    let x = p.x.slice::<T>(p.count as usize);
    let scale = read_scalar(p.scale).unwrap_or(1.0);
    write_scalar(p.scale_inv, 1.0 / scale);
    encode::<T, F>(x, p.out.slice_mut(x.len()), scale);
    raise_amax(p.amax, x);
}

fn cast_transpose<T: Real, F: Format>(p: &CastTransposeParams<'_>, dbias: bool) {
    if is_noop(p.noop) {
        return;
    }
    let (rows, cols, ld_t) = (p.rows as usize, p.cols as usize, p.ld_t as usize);
    let x = p.x.slice::<T>(rows * cols);
    raise_amax(p.amax, x);
    if dbias {
        column_sums(x, rows, cols, p.dbias.slice_mut(cols));
    }
    let Some(scale) = read_scalar(p.scale) else {
        return;
    };
    write_scalar(p.scale_inv, 1.0 / scale);
    encode::<T, F>(x, if p.out.is_null() { &mut [] } else { p.out.slice_mut(x.len()) }, scale);
    if p.out.is_null() {
        transpose_with(p.out_t, rows, cols, ld_t, |row, col| F::encode(x[row * cols + col].to_f32() * scale));
    } else {
        let bytes = p.out.slice::<u8>(x.len());
        transpose_with(p.out_t, rows, cols, ld_t, |row, col| bytes[row * cols + col]);
    }
}

/// `out[i] = fp8(x[i] * scale)`; nothing for an empty `out`.
fn encode<T: Real, F: Format>(x: &[T], out: &mut [u8], scale: f32) {
    let span = |(out, x): (&mut [u8], &[T])| {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = F::encode(x.to_f32() * scale));
    };
    if out.len() < PARALLEL_FROM {
        span((out, x));
    } else {
        out.par_chunks_mut(SPAN).zip(x.par_chunks(SPAN)).for_each(span);
    }
}

/// `*amax = max(*amax, max |x|)`.
fn raise_amax<T: Real>(amax: DevPtr<'_>, x: &[T]) {
    if let [slot] = amax.slice_mut::<u32>(1) {
        *slot = (*slot).max(tensor_amax_bits(x));
    }
}

/// Bits of the largest magnitude of a tensor.
pub(crate) fn tensor_amax_bits<T: Real>(x: &[T]) -> u32 {
    if x.len() < PARALLEL_FROM { amax_bits(x) } else { x.par_chunks(SPAN).map(amax_bits).reduce(|| 0, u32::max) }
}

/// `out_t[c * ld + r] = byte(r, c)`, zero from `rows` to `ld`; nothing for null.
pub(crate) fn transpose_with(
    out_t: DevPtr<'_>,
    rows: usize,
    cols: usize,
    ld: usize,
    byte: impl Fn(usize, usize) -> u8 + Sync,
) {
    if out_t.is_null() || ld == 0 {
        return;
    }
    let strip = |(index, strip): (usize, &mut [u8])| {
        // Through a small square, so that neither side strides through memory.
        let mut square = [[0_u8; STRIP]; STRIP];
        let width = strip.len() / ld;
        for row0 in (0..ld).step_by(STRIP) {
            let height = STRIP.min(ld - row0);
            for r in 0..height {
                for (c, column) in square[..width].iter_mut().enumerate() {
                    column[r] = if row0 + r < rows { byte(row0 + r, index * STRIP + c) } else { 0 };
                }
            }
            for (column, out) in square.iter().zip(strip.chunks_mut(ld)) {
                out[row0..row0 + height].copy_from_slice(&column[..height]);
            }
        }
    };
    let out_t = out_t.slice_mut::<u8>(cols * ld);
    if out_t.len() < PARALLEL_FROM {
        out_t.chunks_mut(STRIP * ld).enumerate().for_each(strip);
    } else {
        out_t.par_chunks_mut(STRIP * ld).enumerate().for_each(strip);
    }
}

/// Column sums in the order that `cuda/tile/column_sums.cuh` has for strips of one tile.
fn column_sums<T: Real>(x: &[T], rows: usize, cols: usize, dbias: &mut [T]) {
    let strip = |(index, dbias): (usize, &mut [T])| {
        let mut classes = [[0.0_f32; STRIP]; 8];
        for tile in 0..rows.div_ceil(TILE) {
            let sums = tile_sums(x, rows, cols, tile * TILE, index * STRIP, dbias.len());
            classes[tile % 8].iter_mut().zip(&sums).for_each(|(total, sum)| *total += sum);
        }
        for (c, out) in dbias.iter_mut().enumerate() {
            let rest = classes[1..].iter().fold(classes[0][c], |total, class| total + class[c]);
            *out = T::from_f32(rest);
        }
    };
    if x.len() < PARALLEL_FROM {
        dbias.chunks_mut(STRIP).enumerate().for_each(strip);
    } else {
        dbias.par_chunks_mut(STRIP).enumerate().for_each(strip);
    }
}

/// Sums of `width` columns over one tile: 8 pairs of groups of 8 rows.
fn tile_sums<T: Real>(x: &[T], rows: usize, cols: usize, row0: usize, col0: usize, width: usize) -> [f32; STRIP] {
    let mut total = [0.0_f32; STRIP];
    for pair in 0..8 {
        let even = group_sums(x, rows, cols, row0 + pair * 16, col0, width);
        let odd = group_sums(x, rows, cols, row0 + pair * 16 + 8, col0, width);
        for (total, (even, odd)) in total.iter_mut().zip(even.iter().zip(&odd)) {
            *total = if pair == 0 { even + odd } else { *total + (even + odd) };
        }
    }
    total
}

/// Sums of `width` columns over 8 rows; rows outside the tensor count as zeros.
fn group_sums<T: Real>(x: &[T], rows: usize, cols: usize, row0: usize, col0: usize, width: usize) -> [f32; STRIP] {
    let mut sums = [0.0_f32; STRIP];
    for row in row0..row0 + 8 {
        if row >= rows {
            // Adding the zero keeps the sign of zero that the GPU gets.
            for sum in &mut sums {
                *sum = if row == row0 { 0.0 } else { *sum + 0.0 };
            }
            continue;
        }
        let line = &x[row * cols + col0..][..width];
        for (sum, value) in sums.iter_mut().zip(line) {
            *sum = if row == row0 { value.to_f32() } else { *sum + value.to_f32() };
        }
    }
    sums
}
