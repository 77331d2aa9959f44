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

/// Row `index` of an addend of this type, into `row`; nothing if there is no addend.
fn read(from: DevPtr<'_>, dtype: u32, index: usize, row: &mut [f32]) {
    fn typed<T: Real>(from: DevPtr<'_>, index: usize, row: &mut [f32]) {
        let cols = row.len();
        let values = from.offset(index * cols * size_of::<T>()).slice::<T>(cols);
        row.iter_mut().zip(values).for_each(|(value, added)| *value = added.to_f32());
    }
    match dtype {
        0 => typed::<f32>(from, index, row),
        1 => typed::<f16>(from, index, row),
        _ => typed::<bf16>(from, index, row),
    }
}

/// Row by row through a copy: `y` may be `x` or `r`, and Rust's slices must not overlap.
fn affine<X: Real, Y: Real>(p: &AffineParams<'_>) {
    let cols = p.cols as usize;
    let row = |from: DevPtr<'_>| vec![0.0_f32; if from.is_null() { 0 } else { cols }];
    let (mut values, mut r, mut b) = (vec![0.0_f32; cols], row(p.r), row(p.b));
    read(p.b, p.b_type, 0, &mut b);
    for index in 0..p.rows as usize {
        let x = p.x.offset(index * cols * size_of::<X>());
        values.iter_mut().zip(x.slice::<X>(cols)).for_each(|(value, x)| *value = p.alpha * x.to_f32());
        read(p.r, p.r_type, index, &mut r);
        values.iter_mut().zip(&r).for_each(|(value, r)| *value += r);
        values.iter_mut().zip(&b).for_each(|(value, b)| *value += b);
        let y = p.y.offset(index * cols * size_of::<Y>());
        y.slice_mut::<Y>(cols).iter_mut().zip(&values).for_each(|(y, &value)| *y = Y::from_f32(value));
    }
}
