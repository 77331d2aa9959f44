//! Host kernels of `cuda/moe/permute_cast.cu`.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::moe::ZERO_ROW;
use te_fast_kernels::constants::tile::TILE;

use crate::base::error::{Error, Result};
use crate::host::fp8::{Format, Real, amax_bits, dispatch_types, read_scalar, scale_from_amax, write_scalar};
use crate::host::permute::{HostMap, Slot, copy_prob, is_zero_prob, store_prob, strike_dropped};
use crate::host::permute_map;
use crate::ops::permute_cast::PermuteCastParams;

/// Runs `permute_cast_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &PermuteCastParams<'_>, id: KernelId) -> Result<()> {
    let KernelId::PermuteCast(input, output) = id else { return Err(Error::state("permute_cast", id.symbol())) };
    permute_map::run(&p.making, id)?;
    dispatch_types!(input, output, cast(p));
    Ok(())
}

fn cast<T: Real, F: Format>(p: &PermuteCastParams<'_>) {
    let map = HostMap::new(&p.map);
    let cols = p.cols as usize;
    let (blocks, token_ld) = if p.token_scales.is_null() { (0, 0) } else { (cols.div_ceil(TILE), p.token_ld as usize) };
    let (x, out) = (p.x.slice::<T>(map.tokens * cols), p.out.slice_mut::<u8>(map.rows * cols));
    let token_scales = p.token_scales.slice_mut::<f32>(map.tokens * token_ld);
    let row_tokens = p.row_tokens.slice_mut::<u32>(map.rows);
    for row in map.gaps() {
        out[row * cols..][..cols].fill(0);
        if let Some(token) = row_tokens.get_mut(row) {
            *token = ZERO_ROW;
        }
        if !p.out_probs.is_null() {
            store_prob(p.out_probs, row, p.prob_type, 0.0);
        }
    }
    let mut amax = 0;
    let mut bytes = vec![0; cols];
    for token in 0..map.tokens {
        let values = &x[token * cols..][..cols];
        quantise::<T, F>(p, values, &mut bytes, &mut token_scales[token * token_ld..][..blocks]);
        for Slot { row, column } in map.token(token) {
            let Some(row) = row else { continue };
            let mut zero = false;
            if !p.probs.is_null() {
                let from = token * map.slots() + column;
                copy_prob(p.probs, from, p.out_probs, row, p.prob_type);
                zero = is_zero_prob(p.probs, from, p.prob_type);
            }
            if let Some(slot) = row_tokens.get_mut(row) {
                *slot = if zero { ZERO_ROW } else { token as u32 };
            }
            let to = &mut out[row * cols..][..cols];
            if zero {
                to.fill(0);
            } else {
                to.copy_from_slice(&bytes);
                amax = amax.max(amax_bits(values));
            }
        }
    }
    place_scales(p, token_scales, row_tokens);
    strike_dropped(&p.map);
    if let Some(former) = read_scalar(p.amax) {
        write_scalar(p.amax, former.max(f32::from_bits(amax)));
    }
}

fn quantise<T: Real, F: Format>(p: &PermuteCastParams<'_>, x: &[T], bytes: &mut [u8], inverse: &mut [f32]) {
    let given = read_scalar(p.scale);
    for (block, (x, bytes)) in x.chunks(TILE).zip(bytes.chunks_mut(TILE)).enumerate() {
        let scale = given
            .unwrap_or_else(|| scale_from_amax(f32::from_bits(amax_bits(x)), F::FP8.max(), p.eps, T::MAX, p.pow2 != 0));
        if let Some(inverse) = inverse.get_mut(block) {
            *inverse = 1.0 / scale;
        }
        bytes.iter_mut().zip(x).for_each(|(byte, value)| *byte = F::encode(value.to_f32() * scale));
    }
}

/// Scales of tokens into the places of their rows.
fn place_scales(p: &PermuteCastParams<'_>, token_scales: &[f32], row_tokens: &[u32]) {
    if p.token_scales.is_null() {
        return;
    }
    let (blocks, ld, token_ld) = ((p.cols as usize).div_ceil(TILE), p.scale_ld as usize, p.token_ld as usize);
    let place = |(block, line): (usize, &mut [f32])| {
        for (row, scale) in line.iter_mut().enumerate() {
            *scale = match row_tokens.get(row) {
                None => 0.0,
                Some(&ZERO_ROW) => p.zero_scale,
                Some(&token) => token_scales.get(token as usize * token_ld + block).copied().unwrap_or(f32::NAN),
            };
        }
    };
    p.scale_inv.slice_mut::<f32>(blocks * ld).chunks_mut(ld.max(1)).enumerate().for_each(place);
}
