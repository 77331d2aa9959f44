//! The layouts of each operand that the GEMMs of a linear layer need, as a pure function of recipe and call.

use crate::recipe::definition::{BackwardOverride, Recipe};

/// Layouts of one quantised operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usage {
    /// In the tensor's own order.
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

/// Needs of a call beyond its output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
pub struct Needs {
    /// Gradient of the input.
    pub input_grad: bool,
    /// Gradient of the weight.
    pub weight_grad: bool,
    /// The input is kept in high precision and quantised again in backward.
    pub save_original_input: bool,
    /// First phase of activation recomputation: the second phase's backward also uses this FP8 weight.
    pub recompute_later: bool,
}

impl Usages {
    const INPUT: u8 = 0;
    const WEIGHT: u8 = 2;
    const GRAD_OUTPUT: u8 = 4;

    /// Layouts that the GEMMs of a linear layer read.
    ///
    /// FP8 tensor cores of Ada and Hopper contract only along rows of both operands, so dgrad takes the weight
    /// columnwise, and wgrad takes the input and the gradient columnwise. If `any_layout` GEMMs exist, one layout of a
    /// per-tensor scaled operand serves them all.
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
