//! Options of a call beside its tensors.

use te_fast_core::quant::weight::Microbatch;

/// The quantised results that a call requests inside of a region: Transformer Engine's `fp8_output` and `fp8_grad`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InFp8 {
    pub(crate) output: bool,
    pub(crate) grad: bool,
}

/// The options of a call, as one argument of the autograd function.
pub(crate) struct Asked {
    pub(crate) microbatch: Microbatch,
    pub(crate) in_fp8: InFp8,
}

impl Asked {
    pub(crate) const fn number(&self) -> u8 {
        let microbatch = match self.microbatch {
            Microbatch::Unknown => 0,
            Microbatch::First => 1,
            Microbatch::Later => 2,
        };
        microbatch | (self.in_fp8.output as u8) << 2 | (self.in_fp8.grad as u8) << 3
    }

    pub(crate) const fn of(number: u8) -> Self {
        let microbatch = match number & 3 {
            1 => Microbatch::First,
            2 => Microbatch::Later,
            _ => Microbatch::Unknown,
        };
        Self { microbatch, in_fp8: InFp8 { output: number & 4 != 0, grad: number & 8 != 0 } }
    }
}
