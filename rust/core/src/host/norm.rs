//! Host kernels of `cuda/norm/norm.cu` and `cuda/norm/norm_short.cu`. Statistics come from FP64 sums, so that they
//! differ from the GPU's only by the rounding of the GPU's sums. All later arithmetic is FP32, as on the GPU.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::cast::transpose_with;
use crate::host::fp8::{Real, is_noop, read_scalar, write_scalar};
use crate::host::rows::{Outputs, Values, for_row_groups, raise, row_bytes, write_measured};
use crate::ops::norm::NormParams;

/// Runs `norm_*`, `norm_transpose_*`, `norm_long_*`, `norm_short_*` and `norm_short_transpose_*`, which differ only in
/// how they divide the work.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &NormParams<'_>, id: KernelId) -> Result<()> {
    let (KernelId::Norm(input)
    | KernelId::NormTranspose(input)
    | KernelId::NormLong(input)
    | KernelId::NormShort(input)
    | KernelId::NormShortTranspose(input)) = id
    else {
        return Err(Error::state("norm", id.symbol()));
    };
    match input {
        Float::F32 => norm::<f32>(p),
        Float::F16 => norm::<f16>(p),
        Float::Bf16 => norm::<bf16>(p),
    }
    Ok(())
}

/// Mean and inverse deviation of a row of `T`; no mean for RMSNorm.
fn stats<T: Real>(row: &[f32], rms: bool, eps: f32) -> (f32, f32) {
    let count = row.len() as f64;
    let sum = row.iter().map(|&x| f64::from(x)).sum::<f64>();
    let mean = if rms { 0.0 } else { (sum / count) as f32 };
    let squares = row.iter().map(|&x| f64::from(x - mean).powi(2)).sum::<f64>();
    // For 16-bit elements the GPU subtracts sum times mean from the squares in both norms. Infinity times RMSNorm's
    // mean of zero is NaN, which is also the result of Transformer Engine's tuned kernels.
    let apart = if rms && size_of::<T>() == 2 { (sum as f32) * mean } else { 0.0 };
    (mean, 1.0 / ((squares / count) as f32 - apart + eps).sqrt())
}

fn norm<T: Real>(p: &NormParams<'_>) {
    if is_noop(p.noop) {
        return;
    }
    let (rows, cols, ld_t) = (p.rows as usize, p.cols as usize, p.ld_t as usize);
    let x = p.x.slice::<T>(rows * cols);
    let scale = read_scalar(p.scale).unwrap_or(1.0);
    write_scalar(p.scale_inv, 1.0 / scale);
    let mut spare = Vec::new();
    let bytes = row_bytes(p.out, p.out_t, &mut spare, rows * cols);
    let outputs = Outputs { high: p.y, bytes, scale, e5m2: p.e5m2 != 0, stride: cols, rounds: !p.measured.is_null() };
    let (gamma, beta) = (Values::new(p.gamma, p.weight_kind), Values::new(p.beta, p.weight_kind));
    let one = if p.zero_centered != 0 { 1.0 } else { 0.0 };
    let factors: Vec<f32> = (0..cols).map(|col| gamma.get(col) + one).collect();
    let summands: Vec<f32> = (0..cols).map(|col| if p.beta.is_null() { 0.0 } else { beta.get(col) }).collect();
    let largest = for_row_groups(rows, x.len(), |group| {
        let mut line = vec![0.0_f32; cols];
        group
            .map(|row| {
                line.iter_mut().zip(&x[row * cols..]).for_each(|(to, x)| *to = x.to_f32());
                add_residual::<T>(p, row, &mut line);
                let (mean, rstd) = stats::<T>(&line, p.rms != 0, p.eps);
                write_scalar(p.mean.offset(row * 4), mean);
                write_scalar(p.rstd.offset(row * 4), rstd);
                for (value, (factor, summand)) in line.iter_mut().zip(factors.iter().zip(&summands)) {
                    *value = (*value - mean) * rstd * factor + summand;
                }
                outputs.store::<T>(row, &line)
            })
            .fold(0, u32::max)
    });
    raise(p.amax, largest.iter().copied());
    write_measured(p.measured, &p.rule, largest.into_iter());
    let bytes = bytes.slice::<u8>(rows * cols);
    transpose_with(p.out_t, rows, cols, ld_t, |row, col| bytes[row * cols + col]);
}

/// Adds the residual to a row, if there is one, and stores the rounded sum.
fn add_residual<T: Real>(p: &NormParams<'_>, row: usize, line: &mut [f32]) {
    if p.residual.is_null() {
        return;
    }
    let first = row * line.len() * size_of::<T>();
    let residual = p.residual.offset(first).slice::<T>(line.len());
    let sum = p.sum.offset(first).slice_mut::<T>(line.len());
    for ((value, residual), sum) in line.iter_mut().zip(residual).zip(sum) {
        *sum = T::from_f32(*value + residual.to_f32());
        *value = sum.to_f32();
    }
}
