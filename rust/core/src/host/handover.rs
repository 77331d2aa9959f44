//! Host kernel of `cuda/quantize/handover.cu`.

use te_fast_kernels::KernelId;

use crate::base::error::{Error, Result};
use crate::host::fp8::{read_scalar, write_scalar};
use crate::ops::handover::{FOUND_AT, HandoverParams, ROW_BYTES, SCALE_AT};

/// Runs `handover`.
///
/// # Errors
/// An id that does not take these parameters.
pub(crate) fn run(p: &HandoverParams<'_>, id: KernelId) -> Result<()> {
    if id != KernelId::Handover {
        return Err(Error::state("handover", id.symbol()));
    }
    for (index, entry) in p.entries.iter().enumerate().take(p.count as usize) {
        let row = p.table.offset((p.first as usize + index) * ROW_BYTES);
        let found = row.offset(FOUND_AT);
        if p.after == 0 {
            let scale = read_scalar(entry.scale).unwrap_or(1.0);
            write_scalar(row, 1.0 / scale);
            write_scalar(row.offset(SCALE_AT), scale);
            write_scalar(found, 0.0);
        } else if !entry.amax.is_null() {
            let found = read_scalar(found).unwrap_or(0.0);
            if found > read_scalar(entry.amax).unwrap_or(0.0) {
                write_scalar(entry.amax, found);
            }
        }
    }
    Ok(())
}
