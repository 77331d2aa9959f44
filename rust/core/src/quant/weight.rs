//! The record of a quantised weight that a layer keeps between calls.
//!
//! The binding owns the buffers. This module decides whether a kept weight is still up to date.

use crate::base::dtype::{DType, Device};
use crate::quant::value::WeightLayout;

/// Transformer Engine's `is_first_microbatch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Microbatch {
    /// True: quantise the weight and keep it.
    First,
    /// False: use the kept weight.
    Later,
    /// None: quantise the weight if it may have changed.
    Unknown,
}

impl From<Option<bool>> for Microbatch {
    fn from(is_first: Option<bool>) -> Self {
        is_first.map_or(Self::Unknown, |is_first| if is_first { Self::First } else { Self::Later })
    }
}

impl From<Microbatch> for Option<bool> {
    fn from(microbatch: Microbatch) -> Self {
        match microbatch {
            Microbatch::First => Some(true),
            Microbatch::Later => Some(false),
            Microbatch::Unknown => None,
        }
    }
}

/// The identity of a weight's content, as far as the host can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightToken {
    /// Address of its first element.
    pub address: usize,
    /// torch's version counter; none for inference tensors.
    pub version: Option<u64>,
    /// Element type.
    pub dtype: DType,
}

/// How a weight was quantised, or is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightRecord {
    /// The weight.
    pub token: WeightToken,
    /// Its device.
    pub device: Device,
    /// Layouts and their places.
    pub layout: WeightLayout,
    /// Epoch of the autocast region.
    pub epoch: u64,
    /// Number of updates of the scales; 0 if scales follow from the weight alone.
    pub generation: u64,
    /// [`Dispatcher::cache_epoch`](crate::runtime::dispatcher::Dispatcher::cache_epoch).
    pub cache_epoch: u64,
    /// Whether the call needs gradients. Writes that leave no trace (`weight.data.copy_`) often exchange weights
    /// between training and evaluation, so neither uses the other's FP8 weight.
    pub training: bool,
    /// [`Dispatcher::optimizer_steps`](crate::runtime::dispatcher::Dispatcher::optimizer_steps): optimizers that write
    /// through raw pointers, and sharding that gathers weights outside of torch, do not change the version counter.
    pub optimizer_steps: u64,
}

impl WeightRecord {
    /// Whether a call that would quantise `wanted` can use this kept weight. The caller must also check that the
    /// weight's memory was not freed since, because another tensor may have its address.
    ///
    /// A graph under capture runs later, on weights that may have changed by then, so it reuses a weight only with
    /// [`Microbatch::Later`].
    #[must_use]
    #[inline]
    pub fn serves(&self, wanted: &Self, microbatch: Microbatch, capturing: bool) -> bool {
        let (there, needed) = (self.layout.usage, wanted.layout.usage);
        let fits = self.epoch == wanted.epoch
            && self.cache_epoch == wanted.cache_epoch
            && self.device == wanted.device
            && self.token == wanted.token
            && (there.rowwise || !needed.rowwise)
            && (there.columnwise || !needed.columnwise);
        let unchanged = self.generation == wanted.generation
            && self.training == wanted.training
            && self.optimizer_steps == wanted.optimizer_steps
            && self.token.version.is_some();
        fits && match microbatch {
            Microbatch::First => false,
            Microbatch::Later => true,
            Microbatch::Unknown => unchanged && !capturing,
        }
    }
}

impl WeightRecord {
    /// Whether two calls quantise one weight into the same places under one recipe, ignoring its content.
    #[must_use]
    pub fn is_of_the_same_call(&self, other: &Self) -> bool {
        self.token.address == other.token.address
            && self.token.dtype == other.token.dtype
            && self.device == other.device
            && self.layout == other.layout
            && self.epoch == other.epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::usage::Usage;

    fn record() -> WeightRecord {
        let usage = Usage { rowwise: true, columnwise: false };
        WeightRecord {
            token: WeightToken { address: 4096, version: Some(3), dtype: DType::Bf16 },
            device: Device::Cpu,
            layout: WeightLayout { usage, ..WeightLayout::default() },
            epoch: 1,
            generation: 5,
            cache_epoch: 0,
            training: false,
            optimizer_steps: 2,
        }
    }

    fn reuses(change: impl Fn(&mut WeightRecord), microbatch: Microbatch) -> bool {
        let mut wanted = record();
        change(&mut wanted);
        record().serves(&wanted, microbatch, false)
    }

    #[test]
    fn an_unchanged_weight_is_reused_unless_it_is_the_first_microbatch() {
        assert!(reuses(|_| {}, Microbatch::Unknown));
        assert!(reuses(|_| {}, Microbatch::Later));
        assert!(!reuses(|_| {}, Microbatch::First));
    }

    #[test]
    fn no_microbatch_reuses_another_weight() {
        let changes: [fn(&mut WeightRecord); 7] = [
            |wanted| wanted.token.address = 8192,
            |wanted| wanted.token.version = Some(4),
            |wanted| wanted.token.dtype = DType::F16,
            |wanted| wanted.device = Device::Cuda(0),
            |wanted| wanted.epoch = 2,
            |wanted| wanted.cache_epoch = 1,
            |wanted| wanted.layout.usage.columnwise = true,
        ];
        for change in changes {
            assert!(!reuses(change, Microbatch::Unknown));
            assert!(!reuses(change, Microbatch::Later));
        }
    }

    #[test]
    fn what_hints_at_a_change_counts_for_the_unknown_microbatch_alone() {
        let changes: [fn(&mut WeightRecord); 3] =
            [|wanted| wanted.generation = 6, |wanted| wanted.training = true, |wanted| wanted.optimizer_steps = 3];
        for change in changes {
            assert!(!reuses(change, Microbatch::Unknown));
            assert!(reuses(change, Microbatch::Later));
        }
    }

    #[test]
    fn a_capture_reuses_only_what_it_is_told_to() {
        assert!(!record().serves(&record(), Microbatch::Unknown, true));
        assert!(record().serves(&record(), Microbatch::Later, true));
    }

    #[test]
    fn a_weight_without_version_is_quantised_each_time() {
        let mut kept = record();
        kept.token.version = None;
        assert!(!kept.serves(&kept, Microbatch::Unknown, false));
    }
}
