//! Scales and maxima of FP8 values that GEMMs store under delayed scaling.

use te_fast_kernels::KernelId;
use te_fast_kernels::constants::quantize;
pub use te_fast_kernels::constants::quantize::HANDOVER_ENTRIES as ENTRIES;

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::params;

/// One value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HandoverEntry<'a> {
    /// The scale of its slot of delayed scaling.
    pub scale: DevPtr<'a>,
    /// The maximum of its slot, which is raised; null to leave it.
    pub amax: DevPtr<'a>,
    /// Set to the inverse scale; null to leave it out.
    pub inverse: DevPtr<'a>,
    /// The maximum that the GEMM found; null before the GEMM.
    pub found: DevPtr<'a>,
}

impl HandoverEntry<'_> {
    const NONE: Self =
        Self { scale: DevPtr::null(), amax: DevPtr::null(), inverse: DevPtr::null(), found: DevPtr::null() };
}

params! {
    /// Parameters of `handover`.
    pub struct HandoverParams<'a> [quantize::HANDOVER_PARAMS_BYTES] for Handover => host::handover::run {
        /// The values.
        pub entries: [HandoverEntry<'a>; ENTRIES],
        /// Entries in use.
        pub count: u32,
        /// Zero.
        pub unused: u32,
    }
}

/// Writes the inverse scales, and raises the slots' maxima.
///
/// # Errors
/// A null pointer, or the launch fails.
pub fn run<'a>(target: &mut Target<'_>, values: impl ExactSizeIterator<Item = HandoverEntry<'a>>) -> Result<()> {
    let mut values = values;
    while values.len() != 0 {
        let mut entries = [HandoverEntry::NONE; ENTRIES];
        let mut count = 0;
        for (entry, value) in entries.iter_mut().zip(values.by_ref().take(ENTRIES)) {
            if value.scale.is_null() && !value.inverse.is_null() {
                return Err(Error::state("handover", "a scale of delayed scaling is missing"));
            }
            *entry = value;
            count += 1;
        }
        let params = HandoverParams { entries, count, unused: 0 };
        launch(target, KernelId::Handover, Grid::linear(1, ENTRIES as u32), &params)?;
    }
    Ok(())
}
