//! Host kernel of `cuda/quantize/handover.cu`.

use te_fast_kernels::KernelId;

use crate::base::error::{Error, Result};
use crate::host::fp8::{read_scalar, write_scalar};
use crate::ops::handover::HandoverParams;

/// Runs `handover`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &HandoverParams<'_>, id: KernelId) -> Result<()> {
    if id != KernelId::Handover {
        return Err(Error::state("handover", id.symbol()));
    }
    for entry in p.entries.iter().take(p.count as usize) {
        if !entry.inverse.is_null() {
            write_scalar(entry.inverse, 1.0 / read_scalar(entry.scale).unwrap_or(1.0));
        }
        if !entry.amax.is_null() {
            let found = read_scalar(entry.found).unwrap_or(0.0);
            if found > read_scalar(entry.amax).unwrap_or(0.0) {
                write_scalar(entry.amax, found);
            }
        }
    }
    Ok(())
}
