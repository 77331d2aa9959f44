//! Host kernel of `cuda/quantize/transpose.cu`.

use rayon::prelude::*;
use te_fast_kernels::KernelId;
use te_fast_kernels::constants::tile::TILE;

use crate::base::error::Result;
use crate::host::fp8::PARALLEL_FROM;
use crate::ops::transpose::TransposeParams;

/// Runs `transpose_fp8`.
///
/// # Errors
/// None.
#[expect(clippy::unnecessary_wraps, reason = "the signature of host kernels")]
pub(crate) fn run(p: &TransposeParams<'_>, _: KernelId) -> Result<()> {
    let (rows, cols, ld_t) = (p.rows as usize, p.cols as usize, p.ld_t as usize);
    let (q, out) = (p.q.slice::<u8>(rows * cols), p.out_t.slice_mut::<u8>(cols * ld_t));
    // A strip of columns at a time reads each line of the input once.
    let strip = |(strip, out): (usize, &mut [u8])| {
        let first = strip * TILE;
        for row in 0..rows {
            for (local, &byte) in q[row * cols + first..(row + 1) * cols].iter().take(TILE).enumerate() {
                out[local * ld_t + row] = byte;
            }
        }
        out.chunks_mut(ld_t).for_each(|column| column[rows..].fill(0));
    };
    if out.len() < PARALLEL_FROM {
        out.chunks_mut(TILE * ld_t).enumerate().for_each(strip);
    } else {
        out.par_chunks_mut(TILE * ld_t).enumerate().for_each(strip);
    }
    if !p.scale.is_null() {
        let (ld, ld_t, scale_rows) = (p.scale_ld as usize, p.scale_ld_t as usize, rows.div_ceil(TILE));
        let scale = p.scale.slice::<f32>(scale_rows * ld);
        for (at, out) in p.scale_t.slice_mut::<f32>(cols.div_ceil(TILE) * ld_t).iter_mut().enumerate() {
            let (col, row) = (at / ld_t, at % ld_t);
            *out = if row < scale_rows { scale[row * ld + col] } else { 0.0 };
        }
    }
    Ok(())
}
