//! A quantisation recipe as one small `Copy` value, and the layouts of each operand that the GEMMs of a linear layer
//! need under it. The binding translates Python recipes into this form, and plans read only this form.

use te_fast_kernels::Fp8;

use crate::base::error::{Error, Result};

/// Transformer Engine requires row counts in multiples of this.
pub const ROW_GRANULE: usize = 8;

/// The kind of scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Scaling {
    /// Per tensor, from the history of absolute maxima.
    Delayed,
    /// Per tensor, from the tensor itself.
    Current,
    /// Per 1×128 or 128×128 block.
    Block,
    /// Per 1×32 block with E8M0 scales (Blackwell).
    Mxfp8,
    /// Two-level 4-bit scaling (Blackwell).
    Nvfp4,
    /// A factory of the user's gives each layer another recipe.
    Custom,
}

/// Shape of the elements that share one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Block {
    /// The whole tensor.
    Tensor,
    /// 1×128 along the contraction dimension.
    Row,
    /// 128×128.
    Square,
}

impl Block {
    /// For messages.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Tensor => "one scale",
            Self::Row => "a scale per 1x128",
            Self::Square => "a scale per 128x128",
        }
    }
}

/// How one operand is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantization {
    /// Scales are rounded down to a power of two.
    pub power_2_scale: bool,
    /// Least absolute maximum that a scale is computed from.
    pub amax_epsilon: f32,
    /// Elements per scale.
    pub block: Block,
}

/// One flag for each GEMM of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PerGemm {
    /// Output of the forward pass.
    pub fprop: bool,
    /// Gradient of the input.
    pub dgrad: bool,
    /// Gradient of the weight.
    pub wgrad: bool,
}

/// Which value of the history the next scale comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AmaxAlgorithm {
    /// The largest of the window.
    Max,
    /// The newest.
    MostRecent,
}

/// Options of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Delayed {
    /// Scales are lowered by 2 to this power.
    pub margin: i32,
    /// Length of the window of absolute maxima.
    pub history_len: u32,
    /// Reads the window.
    pub algorithm: AmaxAlgorithm,
    /// Maxima are reduced over the autocast's process group.
    pub reduce_amax: bool,
    /// Names the user's own algorithms, which run in Python; 0 for none.
    pub custom: u32,
}

/// Precision of the backward pass, if it differs from the forward's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum BackwardOverride {
    /// Backward runs on quantised operands.
    None,
    /// High-precision operands are kept for backward.
    HighPrecision,
    /// Quantised operands are kept and dequantised in backward.
    Dequantized,
}

/// A recipe. Equal values quantise equally, so they share an epoch and a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// The kind of scaling.
    pub scaling: Scaling,
    /// Type of inputs and weights.
    pub fwd: Fp8,
    /// Type of gradients.
    pub bwd: Fp8,
    /// The layer's input.
    pub input: Quantization,
    /// The layer's weight.
    pub weight: Quantization,
    /// The gradient of the output.
    pub grad: Quantization,
    /// GEMMs that promote partial sums (no fast accumulation).
    pub split_accumulator: PerGemm,
    /// Fields of delayed scaling; [`Delayed::DEFAULT`] for every other recipe.
    pub delayed: Delayed,
    /// Precision of the backward pass.
    pub backward_override: BackwardOverride,
    /// Names the user's factory of a custom recipe; 0 for every other recipe.
    pub factory: u32,
}

impl Quantization {
    /// One scale per tensor, any value.
    pub const PER_TENSOR: Self = Self { power_2_scale: false, amax_epsilon: 0.0, block: Block::Tensor };
}

impl Delayed {
    /// Transformer Engine's defaults.
    pub const DEFAULT: Self =
        Self { margin: 0, history_len: 1024, algorithm: AmaxAlgorithm::Max, reduce_amax: true, custom: 0 };
}

impl Recipe {
    /// Transformer Engine's defaults of delayed scaling.
    pub const DELAYED: Self = Self {
        scaling: Scaling::Delayed,
        fwd: Fp8::E4m3,
        bwd: Fp8::E5m2,
        input: Quantization::PER_TENSOR,
        weight: Quantization::PER_TENSOR,
        grad: Quantization::PER_TENSOR,
        split_accumulator: PerGemm { fprop: false, dgrad: true, wgrad: true },
        delayed: Delayed::DEFAULT,
        backward_override: BackwardOverride::None,
        factory: 0,
    };

    /// Transformer Engine's defaults of per-tensor current scaling.
    pub const CURRENT: Self = Self { scaling: Scaling::Current, ..Self::DELAYED };

    /// Transformer Engine's defaults of block scaling.
    pub const BLOCK: Self = Self {
        scaling: Scaling::Block,
        bwd: Fp8::E4m3,
        input: Quantization { power_2_scale: true, amax_epsilon: 0.0, block: Block::Row },
        weight: Quantization { power_2_scale: true, amax_epsilon: 0.0, block: Block::Square },
        grad: Quantization { power_2_scale: true, amax_epsilon: 0.0, block: Block::Row },
        split_accumulator: PerGemm { fprop: true, dgrad: true, wgrad: true },
        ..Self::DELAYED
    };

    /// Whether a factory of the user's gives each layer a recipe of its own, for which the layer enters a region itself.
    #[must_use]
    pub const fn is_custom(&self) -> bool {
        matches!(self.scaling, Scaling::Custom)
    }

    /// Whether layers keep scales and histories between steps.
    #[must_use]
    pub const fn is_delayed(&self) -> bool {
        matches!(self.scaling, Scaling::Delayed)
    }

    /// Whether each tensor has one scale.
    #[must_use]
    pub const fn is_per_tensor(&self) -> bool {
        matches!(self.scaling, Scaling::Delayed | Scaling::Current)
    }

    /// Number of rows to append for GEMMs: cuBLASLt has block-scaled products only for multiples of 8 rows, and
    /// per-tensor products for any number.
    #[must_use]
    pub const fn missing_rows(&self, rows: usize) -> usize {
        if self.is_per_tensor() { 0 } else { rows.next_multiple_of(ROW_GRANULE) - rows }
    }

    /// Refuses values that kernels do not support.
    ///
    /// # Errors
    /// [`Value`](crate::base::error::ErrorKind::Value), naming the field.
    pub fn validate(&self) -> Result<()> {
        for (name, quantization) in [("input", self.input), ("weight", self.weight), ("grad", self.grad)] {
            if !quantization.amax_epsilon.is_finite() || quantization.amax_epsilon < 0.0 {
                let got = quantization.amax_epsilon;
                return Err(Error::value("recipe", format!("{name}: amax_epsilon must be finite and >= 0, got {got}")));
            }
        }
        if self.delayed.history_len == 0 {
            return Err(Error::value("recipe", "amax_history_len must be at least 1, got 0"));
        }
        if self.delayed.margin.unsigned_abs() > 126 {
            let got = self.delayed.margin;
            return Err(Error::value("recipe", format!("margin must be within -126..=126, got {got}")));
        }
        let blocks = [self.input.block, self.weight.block, self.grad.block];
        if self.scaling == Scaling::Block && blocks.iter().filter(|&&block| block == Block::Square).count() > 1 {
            return Err(Error::value("recipe", "a GEMM of two 128x128-blocked operands is not supported"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        for recipe in [Recipe::DELAYED, Recipe::CURRENT, Recipe::BLOCK] {
            assert!(recipe.validate().is_ok());
        }
    }

    #[test]
    fn invalid_fields_are_named() {
        let mut recipe = Recipe::DELAYED;
        recipe.delayed.history_len = 0;
        assert_eq!(recipe.validate().unwrap_err().to_string(), "recipe: amax_history_len must be at least 1, got 0");
        for epsilon in [f32::NAN, f32::INFINITY, -1.0] {
            let mut recipe = Recipe::CURRENT;
            recipe.grad.amax_epsilon = epsilon;
            assert!(recipe.validate().unwrap_err().to_string().starts_with("recipe: grad: amax_epsilon"));
        }
        let mut recipe = Recipe::BLOCK;
        recipe.input.block = Block::Square;
        assert!(recipe.validate().is_err());
        let mut recipe = Recipe::DELAYED;
        recipe.delayed.margin = i32::MIN;
        assert!(recipe.validate().is_err());
    }
}
