//! Host kernels of `cuda/quantize/cast_current.cu`: an amax, then a cast. The host needs no workspace, so the workspace
//! stays zero.

use te_fast_kernels::{Float, Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::host::fp8::is_noop;
use crate::ops::amax::{AmaxParams, AmaxPointers, ScaleNumbers};
use crate::ops::cast_current::CastCurrentParams;
use crate::ops::cast_many::ManyEntry;

/// Runs `cast_current_*`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &CastCurrentParams<'_>, id: KernelId) -> Result<()> {
    let KernelId::CastCurrent(input, output) = id else {
        return Err(Error::state("cast_current", id.symbol()));
    };
    if is_noop(p.noop) { Ok(()) } else { run_entry(&p.entry, p.rule, (input, output)) }
}

/// Casts one tensor.
///
/// # Errors
/// None for these kernels.
pub(crate) fn run_entry(entry: &ManyEntry<'_>, rule: ScaleNumbers, (input, output): (Float, Fp8)) -> Result<()> {
    let mut scale = [0.0_f32];
    let scale = DevPtr::from_slice(&mut scale);
    let ScaleNumbers { fp8_max, eps, pow2, .. } = rule;
    let at = AmaxPointers { x: entry.x, scale, scale_inv: entry.scale_inv, ..AmaxPointers::default() };
    let amax = AmaxParams { at, count: host::cast_many::count(entry), fp8_max, eps, pow2, unused: 0 };
    host::amax::run(&amax, KernelId::Amax(input))?;
    host::cast_many::run_given(&ManyEntry { scale, scale_inv: DevPtr::null(), ..*entry }, (input, output))
}
