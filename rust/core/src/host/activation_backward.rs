//! Host kernels of `cuda/activation/activation_backward.cu`. Sums over rows and columns are in f64, so that they are at
//! least as accurate as the GPU's.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::activation::{Function, Halves};
use crate::host::cast::transpose_with;
use crate::host::fp8::{Real, is_noop, read_scalar, write_scalar};
use crate::host::rows::{Outputs, Values, for_row_groups, raise, row_bytes, write_measured};
use crate::ops::activation_backward::ActivationBackwardParams;

/// Runs `activation_backward_*` and `activation_gated_backward_*`.
///
/// # Errors
/// An id or a curve that does not take these parameters.
pub(crate) fn run(p: &ActivationBackwardParams<'_>, id: KernelId) -> Result<()> {
    let (count, float) = match id {
        KernelId::ActivationBackward(float) => (1, float),
        KernelId::ActivationGatedBackward(float) => (2, float),
        _ => return Err(Error::state("activation_backward", id.symbol())),
    };
    let function = Function::new(p.curve, p.constants)?;
    let halves = Halves { cols: p.cols as usize, interleave: p.interleave as usize, count };
    match float {
        Float::F32 => backward::<f32>(p, &function, halves),
        Float::F16 => backward::<f16>(p, &function, halves),
        Float::Bf16 => backward::<bf16>(p, &function, halves),
    }
    Ok(())
}

/// One row: its gradient into `dx`; returns the gradient of its factor.
fn differentiate<T: Real>(
    function: &Function,
    halves: Halves,
    (dy, x): (&[T], &[T]),
    factor: f32,
    dx: &mut [f32],
) -> f64 {
    let mut dot = 0.0;
    for (col, dy) in dy.iter().map(|dy| dy.to_f32()).enumerate() {
        let (first, second) = (halves.column(col, 0), halves.column(col, 1));
        let (activated, up) = (function.activated(x[first].to_f32()), dy * factor);
        if halves.count == 1 {
            dx[first] = up * activated.slope;
            dot += f64::from(dy) * f64::from(activated.value);
        } else {
            let linear = function.linear(x[second].to_f32());
            dx[first] = up * linear.value * activated.slope;
            dx[second] = up * activated.value * linear.slope;
            dot += f64::from(dy) * f64::from(activated.value * linear.value);
        }
    }
    dot
}

fn backward<T: Real>(p: &ActivationBackwardParams<'_>, function: &Function, halves: Halves) {
    if is_noop(p.noop) {
        return;
    }
    let (rows, cols, stride, ld_t) = (p.rows as usize, p.cols as usize, halves.stride(), p.ld_t as usize);
    let (dy, x) = (p.dy.slice::<T>(rows * cols), p.x.slice::<T>(rows * stride));
    let scale = read_scalar(p.scale).unwrap_or(1.0);
    write_scalar(p.scale_inv, 1.0 / scale);
    let mut spare = Vec::new();
    let bytes = row_bytes(p.out, p.out_t, &mut spare, rows * stride);
    let outputs = Outputs { high: p.dx, bytes, scale, e5m2: p.e5m2 != 0, stride, rounds: !p.measured.is_null() };
    let factors = Values::new(p.row_scale, p.row_scale_kind);
    let factor_grads = Values::new(p.row_scale_grad, p.row_scale_kind);
    let summed = if p.dbias.is_null() { 0 } else { stride };
    let groups = for_row_groups(rows, x.len(), |group| {
        let (mut dx, mut sums, mut largest) = (vec![0.0_f32; stride], vec![0.0_f64; summed], 0);
        for row in group {
            let lines = (&dy[row * cols..][..cols], &x[row * stride..][..stride]);
            factor_grads.set(row, differentiate(function, halves, lines, factors.get(row), &mut dx) as f32);
            sums.iter_mut().zip(&dx).for_each(|(sum, &dx)| *sum += f64::from(dx));
            largest = outputs.store::<T>(row, &dx).max(largest);
        }
        (sums, largest)
    });
    raise(p.amax, groups.iter().map(|(_, largest)| *largest));
    write_measured(p.measured, &p.rule, groups.iter().map(|(_, largest)| *largest));
    let mut total = vec![0.0_f64; summed];
    for (sums, _) in &groups {
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
    let dbias = p.dbias.slice_mut::<T>(stride);
    dbias.iter_mut().zip(&total).for_each(|(out, &sum)| *out = T::from_f32(sum as f32));
    let bytes = bytes.slice::<u8>(rows * stride);
    transpose_with(p.out_t, rows, stride, ld_t, |row, col| bytes[row * stride + col]);
}
