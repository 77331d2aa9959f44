//! Host kernels of `cuda/quantize/cast_block.cu`.

use rayon::prelude::*;
use te_fast_kernels::KernelId;
use te_fast_kernels::constants::quantize::ZERO_SCALE_BYTE;
use te_fast_kernels::constants::tile::TILE;

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host::cast::transpose_with;
use crate::host::fp8::{
    Format, PARALLEL_FROM, Real, amax_bits, dispatch_types, is_noop, magnitude_bits, scale_from_amax,
};
use crate::ops::cast_block::{CastBlockParams, UnpackScalesParams};

/// Runs `cast_block_1d_*` and `cast_block_2d_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &CastBlockParams<'_>, id: KernelId) -> Result<()> {
    if is_noop(p.noop) {
        return Ok(());
    }
    unpack(p.packed, p.unpacked, p.packed_count as usize);
    match id {
        KernelId::CastBlock1d(input, output) => dispatch_types!(input, output, cast_1d(p)),
        KernelId::CastBlock2d(input, output) => dispatch_types!(input, output, cast_2d(p)),
        _ => return Err(Error::state("cast_block", id.symbol())),
    }
    Ok(())
}

fn block_scale<T: Real, F: Format>(p: &CastBlockParams<'_>, amax_bits: u32) -> f32 {
    scale_from_amax(f32::from_bits(amax_bits), F::FP8.max(), p.eps, T::MAX, p.pow2 != 0)
}

fn cast_1d<T: Real, F: Format>(p: &CastBlockParams<'_>) {
    let (rows, cols) = (p.rows as usize, p.cols as usize);
    let x = p.x.slice::<T>(rows * cols);
    if !p.out.is_null() {
        let scales = grid(rows, cols.div_ceil(TILE), |row, block| {
            let line = &x[row * cols..][..cols];
            block_scale::<T, F>(p, amax_bits(&line[block * TILE..cols.min((block + 1) * TILE)]))
        });
        encode_rows::<T, F>(p, x, |row, col| scales[row * cols.div_ceil(TILE) + col / TILE]);
        store_scales::<f32>(
            p.scale_inv.slice_mut(cols.div_ceil(TILE) * p.scale_ld as usize),
            p.scale_ld,
            rows,
            |block, row| scales[row * cols.div_ceil(TILE) + block],
        );
    }
    if !p.out_t.is_null() {
        let mut scales = grid(rows.div_ceil(TILE), cols, |_, _| 0.0);
        fill_column_scales::<T, F>(p, x, &mut scales);
        transpose_with(p.out_t, rows, cols, p.ld_t as usize, |row, col| {
            F::encode(x[row * cols + col].to_f32() * scales[row / TILE * cols + col])
        });
        let length = rows.div_ceil(TILE) * p.scale_ld_t as usize;
        let scale = |block: usize, col: usize| scales[block * cols + col];
        if p.byte_scales_t == 0 {
            store_scales(p.scale_inv_t.slice_mut::<f32>(length), p.scale_ld_t, cols, scale);
        } else {
            store_scales(p.scale_inv_t.slice_mut::<u8>(length), p.scale_ld_t, cols, scale);
        }
    }
}

/// Scales of the 128 x 1 blocks, `[ceil(rows/128)][cols]`.
fn fill_column_scales<T: Real, F: Format>(p: &CastBlockParams<'_>, x: &[T], scales: &mut [f32]) {
    let cols = p.cols as usize;
    let block = |(scales, x): (&mut [f32], &[T])| {
        let mut amax = vec![0; cols];
        for row in x.chunks(cols) {
            amax.iter_mut().zip(row).for_each(|(amax, &value)| *amax = (*amax).max(magnitude_bits(value)));
        }
        scales.iter_mut().zip(amax).for_each(|(scale, amax)| *scale = block_scale::<T, F>(p, amax));
    };
    if x.len() < PARALLEL_FROM {
        scales.chunks_mut(cols).zip(x.chunks(TILE * cols)).for_each(block);
    } else {
        scales.par_chunks_mut(cols).zip(x.par_chunks(TILE * cols)).for_each(block);
    }
}

fn cast_2d<T: Real, F: Format>(p: &CastBlockParams<'_>) {
    let (rows, cols) = (p.rows as usize, p.cols as usize);
    let x = p.x.slice::<T>(rows * cols);
    let (lines, blocks) = (rows.div_ceil(TILE), cols.div_ceil(TILE));
    let scales = grid(lines, blocks, |line, block| {
        let amax = (line * TILE..rows.min((line + 1) * TILE))
            .map(|row| amax_bits(&x[row * cols..][block * TILE..cols.min((block + 1) * TILE)]))
            .max();
        block_scale::<T, F>(p, amax.unwrap_or(0))
    });
    let scale_at = |row: usize, col: usize| scales[row / TILE * blocks + col / TILE];
    if !p.out.is_null() {
        encode_rows::<T, F>(p, x, scale_at);
        store_scales::<f32>(p.scale_inv.slice_mut(lines * p.scale_ld as usize), p.scale_ld, blocks, |line, block| {
            scales[line * blocks + block]
        });
    }
    if !p.out_t.is_null() {
        transpose_with(p.out_t, rows, cols, p.ld_t as usize, |row, col| {
            F::encode(x[row * cols + col].to_f32() * scale_at(row, col))
        });
        store_scales::<f32>(
            p.scale_inv_t.slice_mut(blocks * p.scale_ld_t as usize),
            p.scale_ld_t,
            lines,
            |block, line| scales[line * blocks + block],
        );
    }
}

/// A `[lines][width]` array of scales.
fn grid(lines: usize, width: usize, scale: impl Fn(usize, usize) -> f32 + Sync) -> Vec<f32> {
    let at = |i: usize| scale(i / width, i % width);
    // One scale stands for at least 128 elements.
    if lines * width * TILE < PARALLEL_FROM {
        (0..lines * width).map(at).collect()
    } else {
        (0..lines * width).into_par_iter().map(at).collect()
    }
}

/// `out[r][c] = fp8(x[r][c] * scale(r, c))`.
fn encode_rows<T: Real, F: Format>(p: &CastBlockParams<'_>, x: &[T], scale: impl Fn(usize, usize) -> f32 + Sync) {
    let cols = p.cols as usize;
    let line = |(row, (out, x)): (usize, (&mut [u8], &[T]))| {
        for (block, (out, x)) in out.chunks_mut(TILE).zip(x.chunks(TILE)).enumerate() {
            let scale = scale(row, block * TILE);
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = F::encode(x.to_f32() * scale));
        }
    };
    let out = p.out.slice_mut::<u8>(x.len());
    if x.len() < PARALLEL_FROM {
        out.chunks_mut(cols).zip(x.chunks(cols)).enumerate().for_each(line);
    } else {
        out.par_chunks_mut(cols).zip(x.par_chunks(cols)).enumerate().for_each(line);
    }
}

/// Stores `1 / scale(line, i)` for `i < width` and zeros up to the leading dimension.
fn store_scales<T: Inverse>(out: &mut [T], ld: u64, width: usize, scale: impl Fn(usize, usize) -> f32) {
    for (line, out) in out.chunks_mut((ld as usize).max(1)).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            *out = if i < width { T::of_scale(scale(line, i)) } else { T::ZERO };
        }
    }
}

/// A stored inverse scale.
trait Inverse: Copy {
    const ZERO: Self;
    fn of_scale(scale: f32) -> Self;
}

impl Inverse for f32 {
    const ZERO: Self = 0.0;
    fn of_scale(scale: f32) -> Self {
        1.0 / scale
    }
}

/// The inverse of a power of two as its biased exponent; 255 stands for zero.
impl Inverse for u8 {
    const ZERO: Self = ZERO_SCALE_BYTE;
    fn of_scale(scale: f32) -> Self {
        (254 - (scale.to_bits() >> 23)) as Self
    }
}

fn unpack_inverse(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000), // 2^-127, a subnormal
        <u8 as Inverse>::ZERO => 0.0,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Runs `unpack_block_scales`.
///
/// # Errors
/// None.
#[expect(clippy::unnecessary_wraps, reason = "the signature of host kernels")]
pub(crate) fn run_unpack(p: &UnpackScalesParams<'_>, _: KernelId) -> Result<()> {
    unpack(p.packed, p.unpacked, p.count as usize);
    Ok(())
}

fn unpack(packed: DevPtr<'_>, unpacked: DevPtr<'_>, count: usize) {
    let unpacked = unpacked.slice_mut::<f32>(count);
    unpacked.iter_mut().zip(packed.slice::<u8>(count)).for_each(|(out, &byte)| *out = unpack_inverse(byte));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fp8::scale_from_amax;

    #[test]
    fn every_power_of_two_scale_survives_as_a_byte() {
        let limits = [f32::MAX, f32::from_bits(0x7f7f_0000), 65504.0];
        // Every exponent of an amax, with the mantissas at its ends: subnormals, zero, infinity and NaN included.
        let amaxes = (0..=0xff_u32).flat_map(|exponent| [0, 1, 0x0040_0000, 0x007f_ffff].map(|m| exponent << 23 | m));
        for amax in amaxes.map(f32::from_bits) {
            for (fp8_max, for_inf) in [448.0, 57344.0].into_iter().flat_map(|fp8| limits.map(|limit| (fp8, limit))) {
                for eps in [0.0, 1e-38, 1e30] {
                    let scale = scale_from_amax(amax, fp8_max, eps, for_inf, true);
                    let kept = unpack_inverse(u8::of_scale(scale));
                    assert_eq!(kept.to_bits(), (1.0 / scale).to_bits(), "amax {amax}, scale {scale}");
                }
            }
        }
        assert_eq!(unpack_inverse(u8::ZERO).to_bits(), 0);
    }
}
