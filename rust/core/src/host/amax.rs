//! Host kernels of `cuda/quantize/amax.cu`. The host needs no workspace, so the workspace stays zero.

use half::{bf16, f16};
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::host::cast::tensor_amax_bits;
use crate::host::fp8::{is_noop, read_scalar, scale_from_amax, write_scalar};
use crate::ops::amax::{AmaxParams, ScaleFromAmaxParams};

/// Runs `amax_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &AmaxParams<'_>, id: KernelId) -> Result<()> {
    let KernelId::Amax(input) = id else {
        return Err(Error::state("amax", id.symbol()));
    };
    if is_noop(p.noop) {
        return Ok(());
    }
    let count = p.count as usize;
    let amax = f32::from_bits(match input {
        Float::F32 => tensor_amax_bits(p.x.slice::<f32>(count)),
        Float::F16 => tensor_amax_bits(p.x.slice::<f16>(count)),
        Float::Bf16 => tensor_amax_bits(p.x.slice::<bf16>(count)),
    });
    write_scalar(p.amax, amax);
    if !p.scale.is_null() {
        let scale = scale_from_amax(amax, p.fp8_max, p.eps, f32::MAX, p.pow2 != 0);
        write_scalar(p.scale, scale);
        write_scalar(p.scale_inv, 1.0 / scale);
    }
    Ok(())
}

/// Runs `scale_from_amax`.
///
/// # Errors
/// None; the signature is that of every host kernel.
#[expect(clippy::unnecessary_wraps, reason = "the signature is that of every host kernel")]
pub(crate) fn run_scale(p: &ScaleFromAmaxParams<'_>, _: KernelId) -> Result<()> {
    let amax = read_scalar(p.amax).unwrap_or(0.0);
    let scale = scale_from_amax(amax, p.fp8_max, p.eps, f32::MAX, p.pow2 != 0);
    write_scalar(p.scale, scale);
    write_scalar(p.scale_inv, 1.0 / scale);
    Ok(())
}
