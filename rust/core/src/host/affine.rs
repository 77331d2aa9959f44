//! Host kernels of `cuda/quantize/affine.cu`.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host::fp8::Real;
use crate::ops::affine::AffineParams;

/// Runs `affine_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &AffineParams<'_>, id: KernelId) -> Result<()> {
    match id {
        KernelId::Affine(Float::F32) => from_type::<f32>(p),
        KernelId::Affine(Float::F16) => from_type::<f16>(p),
        KernelId::Affine(Float::Bf16) => from_type::<bf16>(p),
        _ => return Err(Error::state("affine", id.symbol())),
    }
    Ok(())
}

fn from_type<X: Real>(p: &AffineParams<'_>) {
    match p.y_type {
        0 => affine::<X, f32>(p),
        1 => affine::<X, f16>(p),
        _ => affine::<X, bf16>(p),
    }
}

/// One row's addend as FP32; empty if there is none.
fn row(p: &AffineParams<'_>) -> Vec<f32> {
    fn read<T: Real>(b: DevPtr<'_>, cols: usize) -> Vec<f32> {
        b.slice::<T>(cols).iter().map(|value| value.to_f32()).collect()
    }
    let cols = p.cols as usize;
    match p.b_type {
        0 => read::<f32>(p.b, cols),
        1 => read::<f16>(p.b, cols),
        _ => read::<bf16>(p.b, cols),
    }
}

/// Row by row through a copy: `y` may be `x` or `r`, and Rust's slices must not overlap.
fn affine<X: Real, Y: Real>(p: &AffineParams<'_>) {
    let (cols, b) = (p.cols as usize, row(p));
    let mut values = vec![0.0_f32; cols];
    for index in 0..p.rows as usize {
        let x = p.x.offset(index * cols * size_of::<X>());
        values.iter_mut().zip(x.slice::<X>(cols)).for_each(|(value, x)| *value = p.alpha * x.to_f32());
        let r = p.r.offset(index * cols * size_of::<X>());
        values.iter_mut().zip(r.slice::<X>(cols)).for_each(|(value, r)| *value += r.to_f32());
        values.iter_mut().zip(&b).for_each(|(value, b)| *value += b);
        let y = p.y.offset(index * cols * size_of::<Y>());
        y.slice_mut::<Y>(cols).iter_mut().zip(&values).for_each(|(y, &value)| *y = Y::from_f32(value));
    }
}
