//! What a quantisation recipe asks for, as one small `Copy` value, and which layouts of each operand the GEMMs of a
//! linear layer then need. The binding describes Python recipes in these terms; plans read them and nothing else.

use te_fast_kernels::Fp8;

use crate::error::{Error, Result};

/// Transformer Engine wants row counts to be multiples of this.
pub const ROW_GRANULE: usize = 8;

/// How scales come about.
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
    /// Quantizers made by the user's factory.
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

/// What delayed scaling adds.
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

/// Precision of the backward pass where it differs from the forward's.
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

/// A recipe. Equal values quantise alike, so they share an epoch and a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// How scales come about.
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

    /// Rows to append until GEMMs take them: cuBLASLt has block-scaled ones for multiples of 8 only, per-tensor ones for
    /// any number.
    #[must_use]
    pub const fn missing_rows(&self, rows: usize) -> usize {
        if self.is_per_tensor() { 0 } else { rows.next_multiple_of(ROW_GRANULE) - rows }
    }

    /// Refuses values that no kernel can work with.
    ///
    /// # Errors
    /// [`Value`](crate::error::ErrorKind::Value), naming the field.
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

/// Layouts of one quantised operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usage {
    /// As the tensor lies.
    pub rowwise: bool,
    /// Transposed, so that the other dimension is contracted.
    pub columnwise: bool,
}

impl Usage {
    /// Whether no layout is needed: the operand is not quantised.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        !self.rowwise && !self.columnwise
    }
}

/// Layouts of the three operands of a linear layer, as a bit set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usages(u8);

/// What a call needs beyond its output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
pub struct Needs {
    /// Gradient of the input.
    pub input_grad: bool,
    /// Gradient of the weight.
    pub weight_grad: bool,
    /// The input is kept in high precision and quantised again in backward.
    pub save_original_input: bool,
    /// First phase of activation recomputation: the weight made now serves the second phase's backward too.
    pub recompute_later: bool,
}

impl Usages {
    const INPUT: u8 = 0;
    const WEIGHT: u8 = 2;
    const GRAD_OUTPUT: u8 = 4;

    /// Layouts that the GEMMs of a linear layer read.
    ///
    /// FP8 tensor cores of Ada and Hopper contract along rows of both operands only, so dgrad takes the weight
    /// columnwise, and wgrad takes the input and the gradient columnwise. Where `any_layout` GEMMs exist, one
    /// layout of a per-tensor scaled operand serves them all.
    #[must_use]
    pub const fn of_linear(recipe: &Recipe, needs: Needs, any_layout: bool) -> Self {
        let quantized_backward = matches!(recipe.backward_override, BackwardOverride::None);
        let dgrad = needs.input_grad && quantized_backward;
        let wgrad = needs.weight_grad && quantized_backward;
        let transposes = !(any_layout && recipe.is_per_tensor());
        let weight_columnwise = dgrad || (needs.recompute_later && quantized_backward);
        Self::EMPTY
            .with(Self::INPUT, true, wgrad && transposes && !needs.save_original_input)
            .with(Self::WEIGHT, true, weight_columnwise && transposes)
            .with(Self::GRAD_OUTPUT, dgrad || (wgrad && !transposes), wgrad && transposes)
    }

    const EMPTY: Self = Self(0);

    const fn with(self, shift: u8, rowwise: bool, columnwise: bool) -> Self {
        Self(self.0 | ((rowwise as u8) | (columnwise as u8) << 1) << shift)
    }

    const fn at(self, shift: u8) -> Usage {
        let bits = self.0 >> shift;
        Usage { rowwise: bits & 1 != 0, columnwise: bits & 2 != 0 }
    }

    /// The bits, as part of a plan's key.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The input.
    #[must_use]
    pub const fn input(self) -> Usage {
        self.at(Self::INPUT)
    }

    /// The weight.
    #[must_use]
    pub const fn weight(self) -> Usage {
        self.at(Self::WEIGHT)
    }

    /// The gradient of the output.
    #[must_use]
    pub const fn grad_output(self) -> Usage {
        self.at(Self::GRAD_OUTPUT)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usage(rowwise: bool, columnwise: bool) -> Usage {
        Usage { rowwise, columnwise }
    }

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

    #[test]
    fn inference_needs_rows_only() {
        let usages = Usages::of_linear(&Recipe::DELAYED, Needs::default(), false);
        assert_eq!(usages.input(), usage(true, false));
        assert_eq!(usages.weight(), usage(true, false));
        assert!(usages.grad_output().is_empty());
    }

    #[test]
    fn backward_override_quantises_no_gradient() {
        let needs = Needs { input_grad: true, weight_grad: true, ..Needs::default() };
        for backward_override in [BackwardOverride::HighPrecision, BackwardOverride::Dequantized] {
            let recipe = Recipe { backward_override, ..Recipe::CURRENT };
            let usages = Usages::of_linear(&recipe, needs, false);
            assert_eq!(usages.input(), usage(true, false));
            assert_eq!(usages.weight(), usage(true, false));
            assert!(usages.grad_output().is_empty());
        }
    }

    /// Operands as GEMMs read them: fprop (input row, weight row), dgrad (gradient row, weight column),
    /// wgrad (gradient column, input column).
    fn union_of_gemms(needs: Needs) -> [Usage; 3] {
        let mut reads = vec![(0, true), (1, true)];
        if needs.input_grad {
            reads.extend([(2, true), (1, false)]);
        }
        if needs.weight_grad {
            reads.push((2, false));
            if !needs.save_original_input {
                reads.push((0, false));
            }
        }
        if needs.recompute_later {
            reads.push((1, false));
        }
        let mut usages = [Usage::default(); 3];
        for (operand, rowwise) in reads {
            let slot: &mut Usage = &mut usages[operand];
            if rowwise { slot.rowwise = true } else { slot.columnwise = true }
        }
        usages
    }

    proptest! {
        #[test]
        fn usages_are_the_union_of_what_gemms_read(bits in 0_u8..16, kind in 0_usize..3) {
            let needs = Needs {
                input_grad: bits & 1 != 0,
                weight_grad: bits & 2 != 0,
                save_original_input: bits & 4 != 0,
                recompute_later: bits & 8 != 0,
            };
            let recipe = [Recipe::DELAYED, Recipe::CURRENT, Recipe::BLOCK][kind];
            let usages = Usages::of_linear(&recipe, needs, false);
            prop_assert_eq!([usages.input(), usages.weight(), usages.grad_output()], union_of_gemms(needs));
            let anywhere = Usages::of_linear(&recipe, needs, true);
            if recipe.is_per_tensor() {
                for one in [anywhere.input(), anywhere.weight(), anywhere.grad_output()] {
                    prop_assert!(!one.columnwise);
                }
                prop_assert_eq!(anywhere.grad_output().rowwise, needs.input_grad || needs.weight_grad);
            } else {
                prop_assert_eq!(anywhere, usages);
            }
        }
    }
}
