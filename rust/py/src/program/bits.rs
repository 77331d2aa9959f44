//! What a call asks for beside its tensors, as one integer that crosses the autograd function.

use te_fast_core::quant::weight::Microbatch;

/// Flags of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bits(pub(crate) u32);

impl Bits {
    pub(crate) const FIRST_MICROBATCH: u32 = 1;
    pub(crate) const LATER_MICROBATCH: u32 = 2;

    pub(crate) const fn has(self, bit: u32) -> bool {
        self.0 & bit != 0
    }

    pub(crate) fn of_microbatch(is_first: Option<bool>) -> u32 {
        match is_first {
            Some(true) => Self::FIRST_MICROBATCH,
            Some(false) => Self::LATER_MICROBATCH,
            None => 0,
        }
    }

    pub(crate) const fn microbatch(self) -> Microbatch {
        if self.has(Self::FIRST_MICROBATCH) {
            Microbatch::First
        } else if self.has(Self::LATER_MICROBATCH) {
            Microbatch::Later
        } else {
            Microbatch::Unknown
        }
    }
}
