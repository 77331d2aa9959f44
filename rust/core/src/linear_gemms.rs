//! The three GEMMs of an FP8 linear layer, and the sizes and recipes that they take.

use te_fast_kernels::Fp8;

use crate::error::{Error, Result};
use crate::gemm::{Epilogue, Factor, Operand, Problem, ScaleMode};
use crate::linear::{LinearKey, LinearPlan};
use crate::recipe::{BackwardOverride, Block, ROW_GRANULE, Recipe};
use crate::tensor::DType;

const OP: &str = "linear";
/// FP8 rows must be a multiple of this many bytes for the tensor cores.
const GRANULE: usize = 16;

/// The three GEMMs of a layer.
pub(crate) struct Problems<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) key: &'a LinearKey,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
}

impl Problems<'_> {
    fn operand(fp8: Fp8, block: Block, ld: usize) -> Operand {
        let scale = match block {
            Block::Tensor => ScaleMode::Tensor,
            Block::Row => ScaleMode::Block1d,
            Block::Square => ScaleMode::Block2d,
        };
        Operand { dtype: fp8.into(), scale, ld, k_outermost: false }
    }

    pub(crate) fn fprop(&self) -> Problem {
        let &Self { recipe, key, in_features, out_features } = self;
        Problem {
            m: key.rows,
            n: out_features,
            k: in_features,
            x: Self::operand(recipe.fwd, recipe.input.block, in_features),
            w: Self::operand(recipe.fwd, recipe.weight.block, in_features),
            d: key.activation.into(),
            ldd: out_features,
            bias: key.bias.then_some(LinearPlan::bias_dtype(key.activation)),
            alpha: Factor::ONE,
            epilogue: Epilogue::None,
            accumulate: false,
            fast_accumulation: !recipe.split_accumulator.fprop,
            alignment: 256, // torch and te_fast allocate on at least that
        }
    }

    pub(crate) fn dgrad(&self) -> Problem {
        let &Self { recipe, key, in_features, out_features } = self;
        Problem {
            m: key.rows,
            n: in_features,
            k: out_features,
            x: Self::operand(recipe.bwd, recipe.grad.block, out_features),
            w: Self::operand(recipe.fwd, recipe.weight.block, out_features.next_multiple_of(GRANULE)),
            d: key.activation.into(),
            ldd: in_features,
            bias: None,
            alpha: Factor::ONE,
            epilogue: Epilogue::None,
            accumulate: false,
            fast_accumulation: !recipe.split_accumulator.dgrad,
            alignment: 256, // torch and te_fast allocate on at least that
        }
    }

    /// The contraction runs over the rows, padded with zeros to what FP8 takes.
    pub(crate) fn wgrad(&self, d: DType, accumulate: bool, alignment: u16) -> Problem {
        let &Self { recipe, key, in_features, out_features } = self;
        let rows = key.rows.next_multiple_of(GRANULE);
        Problem {
            m: out_features,
            n: in_features,
            k: rows,
            x: Self::operand(recipe.bwd, recipe.grad.block, rows),
            w: Self::operand(recipe.fwd, recipe.input.block, rows),
            d,
            ldd: in_features,
            bias: None,
            alpha: Factor::ONE,
            epilogue: Epilogue::None,
            accumulate,
            fast_accumulation: !recipe.split_accumulator.wgrad,
            alignment,
        }
    }
}

/// What contradicts itself.
pub(crate) fn check_recipe(recipe: &Recipe, key: &LinearKey) -> Result<()> {
    if recipe.is_delayed() && recipe.backward_override != BackwardOverride::None {
        return Err(Error::value(OP, "delayed scaling has no backward_override; leave it at None"));
    }
    if recipe.is_delayed() && key.needs.save_original_input {
        return Err(Error::value(
            OP,
            "save_original_input=True does not go with delayed scaling, whose scale changes before backward; use current or block scaling",
        ));
    }
    Ok(())
}

/// The same, and what programs of one linear op run instead.
pub(crate) fn check_plan(recipe: &Recipe, key: &LinearKey) -> Result<()> {
    check_recipe(recipe, key)?;
    if recipe.backward_override != BackwardOverride::None {
        return Err(Error::unsupported(OP, "a plan of one layer has no backward_override; compile a program"));
    }
    Ok(())
}

/// Transformer Engine's rule, with the remedy: leading dimensions of 8, the last of 16. Other numbers of rows, where they
/// are allowed, come with the rows that the recipe's GEMMs need appended.
pub(crate) fn check_sizes(recipe: &Recipe, key: &LinearKey, in_features: usize, out_features: usize) -> Result<()> {
    if !in_features.is_multiple_of(GRANULE) {
        return Err(Error::shape(
            OP,
            "in_features",
            format!("a multiple of {GRANULE} for FP8 (pad the features by {})", GRANULE - in_features % GRANULE),
            in_features,
        ));
    }
    let granule = if key.needs.input_grad { GRANULE } else { ROW_GRANULE };
    if !out_features.is_multiple_of(granule) {
        return Err(Error::shape(
            OP,
            "out_features",
            format!("a multiple of {granule} for FP8 (pad the features by {})", granule - out_features % granule),
            out_features,
        ));
    }
    let missing = key.rows.next_multiple_of(ROW_GRANULE) - key.rows;
    if missing != 0 && !(key.any_rows && recipe.missing_rows(key.rows) == 0) {
        return Err(Error::shape(
            OP,
            "the product of the input's leading dimensions",
            format!("a multiple of {ROW_GRANULE} for FP8 (append {missing} rows, or call te_fast.auto_pad(True))"),
            key.rows,
        ));
    }
    Ok(())
}
