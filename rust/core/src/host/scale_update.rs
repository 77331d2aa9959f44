//! Host kernels of `cuda/quantize/scale_update.cu`.

use te_fast_kernels::KernelId;

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::ops::scale_update::{
    AmaxGatherFewParams, AmaxGatherParams, LiveAmax, ScaleEntry, ScaleUpdateFewParams, ScaleUpdateParams,
};

/// Runs `scale_update`.
///
/// # Errors
/// None; the signature is that of every host kernel.
#[expect(clippy::unnecessary_wraps, reason = "the signature is that of every host kernel")]
pub(crate) fn run(p: &ScaleUpdateParams<'_>, _: KernelId) -> Result<()> {
    let entries = p.entry.iter().take(p.entries as usize);
    entries.for_each(|entry| update(entry, p.history_len as usize, p.most_recent != 0));
    Ok(())
}

/// Runs `scale_update_few`.
///
/// # Errors
/// None; the signature is that of every host kernel.
#[expect(clippy::unnecessary_wraps, reason = "the signature is that of every host kernel")]
pub(crate) fn run_few(p: &ScaleUpdateFewParams<'_>, _: KernelId) -> Result<()> {
    let entries = p.entry.iter().take(p.entries as usize);
    entries.for_each(|entry| update(entry, p.history_len as usize, p.most_recent != 0));
    Ok(())
}

fn update(entry: &ScaleEntry<'_>, length: usize, most_recent: bool) {
    let tensors = entry.count as usize;
    let history = entry.history.slice_mut::<f32>(length * tensors);
    let scales = entry.scale.slice_mut::<f32>(tensors);
    let reduced = entry.reduced.slice::<f32>(tensors);
    for (c, scale) in scales.iter_mut().enumerate() {
        let last = reduced.get(c).copied().filter(|&amax| amax != 0.0).unwrap_or(history[c]);
        if last == 0.0 {
            continue;
        }
        let mut window = 0.0_f32;
        for i in 0..length {
            let next = if i + 1 < length { history[(i + 1) * tensors + c] } else { last };
            window = window.max(next); // ignores NaN
            history[i * tensors + c] = if i == 0 { 0.0 } else { next };
        }
        let amax = if most_recent { last } else { window };
        if amax > 0.0 && amax.is_finite() {
            *scale = (entry.max_scaled / amax).min(f32::MAX);
        }
    }
}

/// Runs `amax_gather`.
///
/// # Errors
/// None; the signature is that of every host kernel.
#[expect(clippy::unnecessary_wraps, reason = "the signature is that of every host kernel")]
pub(crate) fn gather(p: &AmaxGatherParams<'_>, _: KernelId) -> Result<()> {
    p.entry.iter().take(p.entries as usize).for_each(|entry| copy(entry, p.gathered));
    Ok(())
}

/// Runs `amax_gather_few`.
///
/// # Errors
/// None; the signature is that of every host kernel.
#[expect(clippy::unnecessary_wraps, reason = "the signature is that of every host kernel")]
pub(crate) fn gather_few(p: &AmaxGatherFewParams<'_>, _: KernelId) -> Result<()> {
    p.entry.iter().take(p.entries as usize).for_each(|entry| copy(entry, p.gathered));
    Ok(())
}

fn copy(entry: &LiveAmax<'_>, gathered: DevPtr<'_>) {
    let tensors = entry.count as usize;
    let gathered = gathered.offset(4 * entry.first as usize).slice_mut::<f32>(tensors);
    if entry.live.is_null() {
        gathered.fill(0.0);
    } else {
        gathered.copy_from_slice(entry.live.slice::<f32>(tensors));
    }
}
