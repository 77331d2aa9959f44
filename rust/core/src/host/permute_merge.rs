//! Host kernels of `cuda/moe/permute_merge.cu`.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::fp8::Real;
use crate::host::permute::{HostMap, Slot, copy_prob, load_prob, store_prob};
use crate::ops::permute_merge::{UnpermuteBwdParams, UnpermuteParams};

/// Runs `unpermute_fwd_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &UnpermuteParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::UnpermuteFwd(Float::F32) => merge::<f32>(p),
        KernelId::UnpermuteFwd(Float::F16) => merge::<f16>(p),
        KernelId::UnpermuteFwd(Float::Bf16) => merge::<bf16>(p),
        _ => return Err(Error::state("unpermute", id.symbol())),
    }
    Ok(())
}

/// Runs `unpermute_bwd_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run_bwd(p: &UnpermuteBwdParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::UnpermuteBwd(Float::F32) => spread::<f32>(p),
        KernelId::UnpermuteBwd(Float::F16) => spread::<f16>(p),
        KernelId::UnpermuteBwd(Float::Bf16) => spread::<bf16>(p),
        _ => return Err(Error::state("unpermute_bwd", id.symbol())),
    }
    Ok(())
}

fn merge<T: Real>(p: &UnpermuteParams<'_>) {
    let map = HostMap::new(&p.map);
    let cols = p.cols as usize;
    let (x, out) = (p.x.slice::<T>(map.rows * cols), p.out.slice_mut::<T>(map.tokens * cols));
    let mut sum = vec![0.0; cols];
    for token in 0..map.tokens {
        sum.fill(0.0);
        let first = token * map.slots();
        if !p.out_probs.is_null() {
            (0..map.slots()).for_each(|slot| store_prob(p.out_probs, first + slot, p.out_prob_type, 0.0));
        }
        for Slot { row, column } in map.token(token) {
            let Some(row) = row else { continue };
            if !p.out_probs.is_null() {
                copy_prob(p.in_probs, row, p.out_probs, first + column, p.out_prob_type);
            }
            let prob = if p.probs.is_null() { 1.0 } else { load_prob(p.probs, first + column, p.prob_type) };
            sum.iter_mut().zip(&x[row * cols..]).for_each(|(sum, value)| *sum += prob * value.to_f32());
        }
        out[token * cols..][..cols].iter_mut().zip(&sum).for_each(|(out, &sum)| *out = T::from_f32(sum));
    }
}

fn spread<T: Real>(p: &UnpermuteBwdParams<'_>) {
    let map = HostMap::new(&p.map);
    let cols = p.cols as usize;
    let (dout, x) = (p.dout.slice::<T>(map.tokens * cols), p.x.slice::<T>(map.rows * cols));
    let dx = p.dx.slice_mut::<T>(map.rows * cols);
    for row in map.gaps() {
        dx[row * cols..][..cols].fill(T::from_f32(0.0));
    }
    for token in 0..map.tokens {
        let first = token * map.slots();
        (0..map.slots()).for_each(|slot| store_prob(p.dprobs, first + slot, p.prob_type, 0.0));
        let grad = &dout[token * cols..][..cols];
        for Slot { row, column } in map.token(token) {
            let Some(row) = row else { continue };
            let prob = load_prob(p.probs, first + column, p.prob_type);
            // A running sum in FP32 loses digits over thousands of columns. The GPU adds many short sums.
            let mut dot = 0.0_f64;
            let rows = dx[row * cols..][..cols].iter_mut().zip(&x[row * cols..]);
            for ((dx, value), grad) in rows.zip(grad) {
                dot += f64::from(grad.to_f32()) * f64::from(value.to_f32());
                *dx = T::from_f32(prob * grad.to_f32());
            }
            store_prob(p.dprobs, first + column, p.prob_type, dot as f32);
        }
    }
}
