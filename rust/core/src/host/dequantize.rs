//! Host kernels of `cuda/quantize/dequantize.cu`.

use half::{bf16, f16};
use rayon::prelude::*;
use te_fast_kernels::constants::tile::TILE;
use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::host::fp8::{PARALLEL_FROM, Real, decode_table};
use crate::ops::dequantize::DequantizeParams;

/// Runs `dequantize_*`, `dequantize_1d_*` and `dequantize_2d_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &DequantizeParams<'_>, id: KernelId) -> Result<()> {
    let (rows, blocks, ld) = (p.rows as usize, (p.cols as usize).div_ceil(TILE), p.scale_ld as usize);
    match id {
        KernelId::Dequantize(input, output) => to_type(p, input, output, p.scale_inv.slice(1), |_, _| 0),
        KernelId::Dequantize1d(input, output) => {
            to_type(p, input, output, p.scale_inv.slice(blocks * ld), |row, col| col / TILE * ld + row);
        }
        KernelId::Dequantize2d(input, output) => {
            let scales = p.scale_inv.slice(rows.div_ceil(TILE) * ld);
            to_type(p, input, output, scales, |row, col| row / TILE * ld + col / TILE);
        }
        _ => return Err(Error::state("dequantize", id.symbol())),
    }
    Ok(())
}

fn to_type(
    p: &DequantizeParams<'_>,
    input: Fp8,
    output: Float,
    scales: &[f32],
    index: impl Fn(usize, usize) -> usize + Sync,
) {
    let table = decode_table(input == Fp8::E4m3);
    match output {
        Float::F32 => dequantize::<f32>(p, table, scales, index),
        Float::F16 => dequantize::<f16>(p, table, scales, index),
        Float::Bf16 => dequantize::<bf16>(p, table, scales, index),
    }
}

fn dequantize<T: Real>(
    p: &DequantizeParams<'_>,
    table: &[f32; 256],
    scales: &[f32],
    index: impl Fn(usize, usize) -> usize + Sync,
) {
    let (rows, cols, ld) = (p.rows as usize, p.cols as usize, p.ld as usize);
    if rows == 0 || cols == 0 {
        return;
    }
    let q = p.q.slice::<u8>((rows - 1) * ld + cols);
    let line = |(row, out): (usize, &mut [T])| {
        for (col, (out, &byte)) in out.iter_mut().zip(&q[row * ld..]).enumerate() {
            *out = T::from_f32(table[usize::from(byte)] * scales[index(row, col)]);
        }
    };
    let out = p.out.slice_mut::<T>(rows * cols);
    if out.len() < PARALLEL_FROM {
        out.chunks_mut(cols).enumerate().for_each(line);
    } else {
        out.par_chunks_mut(cols).enumerate().for_each(line);
    }
}
