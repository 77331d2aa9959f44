//! Scales of FP8 values that one GEMM writes and the next one reads, for a chain of linear ops in one launch.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::quantize;
pub use te_fast_kernels::constants::quantize::{
    HANDOVER_ENTRIES as ENTRIES, HANDOVER_FOUND_AT as FOUND_AT, HANDOVER_ROW_BYTES as ROW_BYTES,
    HANDOVER_SCALE_AT as SCALE_AT,
};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::params;

/// One tensor's slot of delayed scaling.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HandoverEntry<'a> {
    /// The scale.
    pub scale: DevPtr<'a>,
    /// The maximum to raise; null in a recomputation.
    pub amax: DevPtr<'a>,
}

params! {
    /// Parameters of `handover`.
    pub struct HandoverParams<'a> [quantize::HANDOVER_PARAMS_BYTES] for Handover => host::handover::run {
        /// The slots.
        pub entries: [HandoverEntry<'a>; ENTRIES],
        /// f32 `[first + count, 12]`.
        pub table: DevPtr<'a>,
        /// Row of the first entry.
        pub first: u32,
        /// Entries in use.
        pub count: u32,
        /// Raise the maxima instead of arranging the scales.
        pub after: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// Fills the table before the GEMMs, or raises the slots' maxima after them.
///
/// # Errors
/// A null pointer, or the launch fails.
pub fn run<'a>(
    target: &mut Target<'_>,
    table: DevPtr<'a>,
    slots: impl ExactSizeIterator<Item = HandoverEntry<'a>>,
    after: bool,
) -> Result<()> {
    let (mut slots, mut first) = (slots, 0);
    while slots.len() != 0 {
        let mut entries = [HandoverEntry { scale: DevPtr::null(), amax: DevPtr::null() }; ENTRIES];
        let mut count = 0;
        for (entry, slot) in entries.iter_mut().zip(slots.by_ref().take(ENTRIES)) {
            if slot.scale.is_null() {
                return Err(Error::state("handover", "a scale of delayed scaling is missing"));
            }
            *entry = slot;
            count += 1;
        }
        let params = HandoverParams { entries, table, first, count, after: u32::from(after), unused: 0 };
        launch(target, KernelId::Handover, Grid::linear(1, ENTRIES as u32), &params)?;
        first += count;
    }
    Ok(())
}
