//! The three GEMMs of a linear op in FP8, and the sizes and recipes that they take.

use te_fast_kernels::{Float, Fp8};

use crate::base::dtype::DType;
use crate::base::error::{Error, Result};
use crate::gemm::problem::{Epilogue, Factor, Operand, Problem, ScaleMode};
use crate::recipe::definition::{BackwardOverride, Block, ROW_GRANULE, Recipe};

const OP: &str = "linear";
/// FP8 rows must be a multiple of this many bytes for the tensor cores.
const GRANULE: usize = 16;

/// The three GEMMs of a layer.
pub(crate) struct Problems<'a> {
    pub(crate) recipe: &'a Recipe,
    /// Rows of the input.
    pub(crate) rows: usize,
    /// Type of input, output and their gradients.
    pub(crate) activation: Float,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
}

/// Type of a bias: cuBLAS takes no FP32 bias with FP8 operands.
pub(crate) const fn bias_dtype(activation: Float) -> DType {
    match activation {
        Float::F16 => DType::F16,
        Float::F32 | Float::Bf16 => DType::Bf16,
    }
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

    pub(crate) fn fprop(&self, bias: Option<DType>) -> Problem {
        let &Self { recipe, rows, activation, in_features, out_features } = self;
        Problem {
            m: rows,
            n: out_features,
            k: in_features,
            x: Self::operand(recipe.fwd, recipe.input.block, in_features),
            w: Self::operand(recipe.fwd, recipe.weight.block, in_features),
            d: activation.into(),
            ldd: out_features,
            bias,
            alpha: Factor::ONE,
            epilogue: Epilogue::None,
            accumulate: false,
            fast_accumulation: !recipe.split_accumulator.fprop,
            exact: false,
            alignment: 256, // torch and te_fast allocate on at least that
        }
    }

    pub(crate) fn dgrad(&self) -> Problem {
        let &Self { recipe, rows, activation, in_features, out_features } = self;
        Problem {
            m: rows,
            n: in_features,
            k: out_features,
            x: Self::operand(recipe.bwd, recipe.grad.block, out_features),
            w: Self::operand(recipe.fwd, recipe.weight.block, out_features.next_multiple_of(GRANULE)),
            d: activation.into(),
            ldd: in_features,
            bias: None,
            alpha: Factor::ONE,
            epilogue: Epilogue::None,
            accumulate: false,
            fast_accumulation: !recipe.split_accumulator.dgrad,
            exact: false,
            alignment: 256, // torch and te_fast allocate on at least that
        }
    }

    /// The contraction runs over the rows, padded with zeros to what FP8 takes.
    pub(crate) fn wgrad(&self, d: DType, accumulate: bool, alignment: u16) -> Problem {
        let &Self { recipe, in_features, out_features, .. } = self;
        let rows = self.rows.next_multiple_of(GRANULE);
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
            exact: false,
            alignment,
        }
    }
}

/// Refuses options that contradict each other.
pub(crate) fn check_recipe(recipe: &Recipe, save_original_input: bool) -> Result<()> {
    if recipe.is_delayed() && recipe.backward_override != BackwardOverride::None {
        return Err(Error::value(OP, "delayed scaling has no backward_override; leave it at None"));
    }
    if recipe.is_delayed() && save_original_input {
        return Err(Error::value(
            OP,
            "save_original_input=True does not go with delayed scaling, whose scale changes before backward; use current or block scaling",
        ));
    }
    Ok(())
}

/// Transformer Engine's rule, with the remedy: features are multiples of 16.
pub(crate) fn check_features(in_features: usize, out_features: usize, input_grad: bool) -> Result<()> {
    if !in_features.is_multiple_of(GRANULE) {
        return Err(Error::shape(
            OP,
            "in_features",
            format!("a multiple of {GRANULE} for FP8 (pad the features by {})", GRANULE - in_features % GRANULE),
            in_features,
        ));
    }
    let granule = if input_grad { GRANULE } else { ROW_GRANULE };
    if !out_features.is_multiple_of(granule) {
        return Err(Error::shape(
            OP,
            "out_features",
            format!("a multiple of {granule} for FP8 (pad the features by {})", granule - out_features % granule),
            out_features,
        ));
    }
    Ok(())
}

/// The same for rows: multiples of 8. If other counts are allowed, the caller has appended the rows that the recipe's
/// GEMMs need.
pub(crate) fn check_rows(recipe: &Recipe, rows: usize, any_rows: bool) -> Result<()> {
    let missing = rows.next_multiple_of(ROW_GRANULE) - rows;
    if missing != 0 && !(any_rows && recipe.missing_rows(rows) == 0) {
        return Err(Error::shape(
            OP,
            "the product of the input's leading dimensions",
            format!("a multiple of {ROW_GRANULE} for FP8 (append {missing} rows, or call te_fast.auto_pad(True))"),
            rows,
        ));
    }
    Ok(())
}
