//! Delayed scaling: rolls the amax histories of all tensors of a direction and derives their next scales. If ranks
//! reduce maxima, it first gathers the live maxima into one tensor.

use te_fast_kernels::constants::common::WARP;
use te_fast_kernels::constants::quantize::{self, FEW_ENTRIES, MANY_ENTRIES, THREADS};
use te_fast_kernels::{Fp8, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host;
use crate::launch::grid::Grid;
use crate::launch::target::{Target, launch};
use crate::params;

/// Most blocks that share an entry's tensors.
const COLUMN: u32 = 64;

/// Histories and scales of one group of tensors, for instance of a layer's forward.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaleEntry<'a> {
    /// f32 `[history_len, count]`.
    pub history: DevPtr<'a>,
    /// f32 `[count]`.
    pub scale: DevPtr<'a>,
    /// f32 `[count]` of amaxes reduced over ranks, or null.
    pub reduced: DevPtr<'a>,
    /// Tensors.
    pub count: u32,
    /// Largest FP8 value, margin taken off: [`ScaleUpdatePlan::max_scaled`].
    pub max_scaled: f32,
}

impl ScaleEntry<'_> {
    /// An entry without tensors.
    pub const EMPTY: Self =
        Self { history: DevPtr::null(), scale: DevPtr::null(), reduced: DevPtr::null(), count: 0, max_scaled: 0.0 };
}

params! {
    /// Parameters of `scale_update`.
    pub struct ScaleUpdateParams<'a> [quantize::SCALE_UPDATE_PARAMS_BYTES] for ScaleUpdate => host::scale_update::run {
        /// Length of every history.
        pub history_len: u64,
        /// Entries in use.
        pub entries: u32,
        /// Use the latest amax instead of the largest of the history.
        pub most_recent: u32,
        /// The entries.
        pub entry: [ScaleEntry<'a>; MANY_ENTRIES],
    }
}

params! {
    /// Parameters of `scale_update_few`.
    pub struct ScaleUpdateFewParams<'a> [quantize::SCALE_UPDATE_FEW_PARAMS_BYTES] for ScaleUpdateFew => host::scale_update::run_few {
        /// Length of every history.
        pub history_len: u64,
        /// Entries in use.
        pub entries: u32,
        /// Use the latest amax instead of the largest of the history.
        pub most_recent: u32,
        /// The entries.
        pub entry: [ScaleEntry<'a>; FEW_ENTRIES],
    }
}

/// Which amax of the history makes the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AmaxChoice {
    /// The largest.
    Max,
    /// The latest.
    MostRecent,
}

/// The update of one recipe.
#[derive(Clone, Copy, Debug)]
pub struct ScaleUpdatePlan {
    history_len: usize,
    choice: AmaxChoice,
    margin: f32,
}

impl ScaleUpdatePlan {
    /// An update of histories of `history_len` slots.
    ///
    /// # Errors
    /// An empty history, or a margin that is not a number.
    pub fn new(history_len: usize, choice: AmaxChoice, margin: f32) -> Result<Self> {
        if history_len == 0 {
            return Err(Error::value("scale_update", "amax_history_len must be at least 1, got 0"));
        }
        if !margin.is_finite() {
            return Err(Error::value("scale_update", format_args!("margin must be finite, got {margin}")));
        }
        Ok(Self { history_len, choice, margin })
    }

    /// Largest value that a tensor cast to `output` is scaled to: `fp8_max * 2**-margin`.
    #[must_use]
    pub fn max_scaled(&self, output: Fp8) -> f32 {
        output.max() * (-self.margin).exp2()
    }

    /// Updates all entries: one launch for up to [`MANY_ENTRIES`], without a heap allocation.
    ///
    /// # Errors
    /// An entry with tensors but null pointers, or the launch fails.
    pub fn run(&self, target: &mut Target<'_>, entries: &[ScaleEntry<'_>]) -> Result<()> {
        if entries.iter().any(|entry| entry.count != 0 && (entry.history.is_null() || entry.scale.is_null())) {
            return Err(Error::value("scale_update", "an entry has tensors but no history or scale"));
        }
        let (history_len, most_recent) = (self.history_len as u64, u32::from(self.choice == AmaxChoice::MostRecent));
        for chunk in entries.chunks(MANY_ENTRIES) {
            let entries = chunk.len() as u32;
            let tensors = chunk.iter().map(|entry| entry.count).max().unwrap_or(0).clamp(1, COLUMN);
            let grid = Grid { blocks: [entries, tensors, 1], ..Grid::linear(entries, THREADS) };
            if chunk.len() <= FEW_ENTRIES {
                let entry = filled(ScaleEntry::EMPTY, chunk);
                let params = ScaleUpdateFewParams { history_len, entries, most_recent, entry };
                launch(target, KernelId::ScaleUpdateFew, grid, &params)?;
            } else {
                let entry = filled(ScaleEntry::EMPTY, chunk);
                let params = ScaleUpdateParams { history_len, entries, most_recent, entry };
                launch(target, KernelId::ScaleUpdate, grid, &params)?;
            }
        }
        Ok(())
    }
}

#[inline]
fn filled<T: Copy, const N: usize>(empty: T, chunk: &[T]) -> [T; N] {
    let mut entry = [empty; N];
    entry[..chunk.len()].copy_from_slice(chunk);
    entry
}

/// Live maxima of one group of tensors, and their place among the gathered maxima.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LiveAmax<'a> {
    /// f32 `[count]`, or null for tensors without any: 0.
    pub live: DevPtr<'a>,
    /// Index of the first one.
    pub first: u32,
    /// Tensors.
    pub count: u32,
}

impl LiveAmax<'_> {
    /// Maxima of no tensors.
    pub const EMPTY: Self = Self { live: DevPtr::null(), first: 0, count: 0 };
}

params! {
    /// Parameters of `amax_gather`.
    pub struct AmaxGatherParams<'a> [quantize::AMAX_GATHER_PARAMS_BYTES] for AmaxGather => host::scale_update::gather {
        /// f32, as long as the entries together.
        pub gathered: DevPtr<'a>,
        /// Entries in use.
        pub entries: u32,
        /// None.
        pub unused: u32,
        /// The entries.
        pub entry: [LiveAmax<'a>; MANY_ENTRIES],
    }
}

params! {
    /// Parameters of `amax_gather_few`.
    pub struct AmaxGatherFewParams<'a> [quantize::AMAX_GATHER_FEW_PARAMS_BYTES] for AmaxGatherFew => host::scale_update::gather_few {
        /// f32, as long as the entries together.
        pub gathered: DevPtr<'a>,
        /// Entries in use.
        pub entries: u32,
        /// None.
        pub unused: u32,
        /// The entries.
        pub entry: [LiveAmax<'a>; FEW_ENTRIES],
    }
}

/// Gathers live maxima into one tensor, for ranks to reduce: one launch for up to [`MANY_ENTRIES`] entries.
///
/// # Errors
/// `gathered` is null although there are maxima, or the launch fails.
pub fn gather_amax(target: &mut Target<'_>, entries: &[LiveAmax<'_>], gathered: DevPtr<'_>) -> Result<()> {
    if gathered.is_null() && entries.iter().any(|entry| entry.count != 0) {
        return Err(Error::value("amax_gather", "there are maxima, but no memory to write them to"));
    }
    for chunk in entries.chunks(MANY_ENTRIES) {
        let entries = chunk.len() as u32;
        let grid = Grid::linear(entries, WARP);
        if chunk.len() <= FEW_ENTRIES {
            let entry = filled(LiveAmax::EMPTY, chunk);
            let params = AmaxGatherFewParams { gathered, entries, unused: 0, entry };
            launch(target, KernelId::AmaxGatherFew, grid, &params)?;
        } else {
            let entry = filled(LiveAmax::EMPTY, chunk);
            let params = AmaxGatherParams { gathered, entries, unused: 0, entry };
            launch(target, KernelId::AmaxGather, grid, &params)?;
        }
    }
    Ok(())
}
