//! Host kernels of `cuda/loss/cross_entropy.cu`.

use half::{bf16, f16};
use rayon::prelude::*;
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::fp8::Real;
use crate::ops::cross_entropy::{CrossEntropyBwdParams, CrossEntropyParams};

/// Runs `cross_entropy_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &CrossEntropyParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::CrossEntropy(Float::F32) => forward::<f32>(p),
        KernelId::CrossEntropy(Float::F16) => forward::<f16>(p),
        KernelId::CrossEntropy(Float::Bf16) => forward::<bf16>(p),
        _ => return Err(Error::state("cross_entropy", id.symbol())),
    }
    Ok(())
}

/// Runs `cross_entropy_bwd_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run_bwd(p: &CrossEntropyBwdParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::CrossEntropyBwd(Float::F32) => backward::<f32>(p),
        KernelId::CrossEntropyBwd(Float::F16) => backward::<f16>(p),
        KernelId::CrossEntropyBwd(Float::Bf16) => backward::<bf16>(p),
        _ => return Err(Error::state("cross_entropy", id.symbol())),
    }
    Ok(())
}

/// Numbers of one row: the largest logit, the sum of exponentials, the sum of differences to the largest logit.
struct Sums {
    largest: f32,
    sum: f32,
    total: f32,
}

impl Sums {
    fn of<T: Real>(row: &[T], adds: bool) -> Self {
        let largest = row.iter().fold(f32::NEG_INFINITY, |most, x| most.max(x.to_f32())); // ignores NaN
        let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        // In f64: the many partial sums of a GPU's threads round as little.
        let sum = row.iter().map(|x| f64::from((x.to_f32() - base).exp())).sum::<f64>() as f32;
        let total = if adds { row.iter().map(|x| f64::from(x.to_f32() - base)).sum::<f64>() as f32 } else { 0.0 };
        Self { largest, sum, total }
    }
}

fn forward<T: Real + Sync>(p: &CrossEntropyParams<'_>) {
    let (rows, columns) = (p.rows as usize, p.columns as usize);
    let (logits, targets) = (p.logits.slice::<T>(rows * columns), p.target.slice::<i64>(rows));
    let whole = !p.losses.is_null();
    let found: Vec<[f32; 4]> = (0..rows)
        .into_par_iter()
        .map(|index| {
            let row = logits.get(index * columns..(index + 1) * columns).unwrap_or(&[]);
            let target = targets.get(index).copied();
            if whole && target == Some(p.ignored) {
                return [0.0; 4];
            }
            let Sums { largest, sum, total } = Sums::of(row, p.smoothing != 0.0);
            if !whole {
                return [0.0, largest, sum, total];
            }
            let chosen = target.and_then(|target| row.get(usize::try_from(target).ok()?));
            let wanted = chosen.map_or(f32::NEG_INFINITY, |chosen| chosen.to_f32() - largest);
            let loss = sum.ln() - (1.0 - p.smoothing) * wanted;
            let spread = if p.smoothing == 0.0 { 0.0 } else { p.smoothing / columns as f32 * total };
            [loss - spread, largest, sum.ln(), 0.0]
        })
        .collect();
    let write = |to: &mut [f32], at: usize| to.iter_mut().zip(&found).for_each(|(to, found)| *to = found[at]);
    if whole {
        write(p.losses.slice_mut::<f32>(rows), 0);
    }
    for part in 0..if p.statistics.is_null() {
        0
    } else if whole {
        2
    } else {
        3
    } {
        write(p.statistics.offset(4 * rows * part).slice_mut::<f32>(rows), part + 1);
    }
}

/// Row by row through a copy: `dlogits` may be the logits, and Rust's slices must not overlap.
fn backward<T: Real>(p: &CrossEntropyBwdParams<'_>) {
    let (rows, columns) = (p.rows as usize, p.columns as usize);
    let targets = p.target.slice::<i64>(rows);
    let statistics = p.statistics.slice::<f32>(2 * rows);
    let grads = p.grad.slice::<f32>(if p.grad_stride == 0 { 1 } else { rows });
    let vocabulary = p.vocabulary.slice::<f32>(1).first().copied().unwrap_or(columns as f32);
    let uniform = if p.smoothing == 0.0 { 0.0 } else { p.smoothing / vocabulary };
    let mut values = vec![0.0_f32; columns];
    for (index, &target) in targets.iter().enumerate() {
        let place = index * columns * size_of::<T>();
        let row = p.logits.offset(place).slice::<T>(columns);
        let (largest, log_sum) = (statistics[index], statistics[rows + index]);
        let grad = grads[index * p.grad_stride as usize];
        if target == p.ignored {
            values.fill(0.0);
        } else {
            for (value, x) in values.iter_mut().zip(row) {
                *value = ((x.to_f32() - largest) - log_sum).exp() - uniform;
            }
            if let Some(value) = usize::try_from(target).ok().and_then(|at| values.get_mut(at)) {
                *value -= 1.0 - p.smoothing;
            }
            for value in &mut values {
                *value *= grad;
            }
        }
        let to = p.dlogits.offset(place).slice_mut::<T>(columns);
        to.iter_mut().zip(&values).for_each(|(to, &value)| *to = T::from_f32(value));
    }
}
