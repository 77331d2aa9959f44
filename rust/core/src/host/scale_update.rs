//! Host kernels of `cuda/scale_update.cu`.

use te_fast_kernels::KernelId;

use crate::error::Result;
use crate::ops::scale_update::{ScaleEntry, ScaleUpdateFewParams, ScaleUpdateParams};

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
