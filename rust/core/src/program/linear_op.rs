//! A linear op inside a program: how its operands are quantised, and which GEMMs run, in FP8 or in high precision.

use std::sync::Arc;

use te_fast_kernels::{Float, Fp8};

use crate::dispatch::{Dispatcher, aligned};
use crate::error::{Error, Result};
use crate::gemm::{Epilogue, Factor, GemmPlan, Operand, Problem, ScaleMode};
use crate::linear::{LinearKey, LinearPlan, Segments};
use crate::linear_gemms::{Problems, check_recipe, check_sizes};
use crate::linear_operands::{OperandSpecs, UnpackedScales};
use crate::ops::cast_block::BlockShape;
use crate::ops::dequantize::{DequantizePlan, DequantizeSpec};
use crate::program::chain::{Chain, OP, Op, ProgramKey};
use crate::quantizer::QuantPlan;
use crate::recipe::{BackwardOverride, Block, Needs, Recipe, Usage, Usages};
use crate::tensor::{DType, Device};

/// Every pointer of a GEMM is at least this aligned: torch and te_fast allocate so.
const ALIGNMENT: u16 = 256;

/// Quantisation of a linear op's operands.
#[derive(Debug)]
pub(crate) struct Quantized {
    pub(crate) recipe: Recipe,
    pub(crate) key: LinearKey,
    pub(crate) x: QuantPlan,
    pub(crate) w: QuantPlan,
    pub(crate) dy: Option<QuantPlan>,
    pub(crate) usages: Usages,
}

/// What the GEMMs of a linear op's backward multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackwardOperands {
    /// All in FP8.
    Quantized,
    /// All in high precision.
    High,
    /// The gradient in high precision, with input and weight as forward quantised them.
    Dequantized,
}

/// A linear op, for one key.
#[derive(Debug)]
pub(crate) struct LinearOp {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) rows: usize,
    pub(crate) activation: Float,
    pub(crate) weight: Float,
    pub(crate) device: Device,
    /// Gradient of the input is wanted.
    pub(crate) input_grad: bool,
    /// Gradient of the weight is wanted.
    pub(crate) weight_grad: bool,
    /// Factor of the gradients: a [`Op::ConstantScale`] behind the op is not launched in backward.
    pub(crate) alpha: f32,
    /// None in high precision.
    pub(crate) quantized: Option<Quantized>,
}

impl LinearOp {
    /// The linear op at `index` of `chain`; `input_grad` says whether anything before it wants a gradient.
    pub(crate) fn new(
        chain: &Chain,
        index: usize,
        key: &ProgramKey,
        recipe: Option<&Recipe>,
        input_grad: bool,
        processors: u32,
    ) -> Result<Self> {
        let link = &chain.links()[index];
        let Op::Linear { inputs, outputs } = link.op else {
            return Err(Error::state(OP, "not a linear op"));
        };
        let (weight, weight_grad) = key.params[link.param];
        let bias = chain.links().get(index + 1).filter(|next| matches!(next.op, Op::Bias { .. }));
        let bias_grad = bias.is_some_and(|bias| key.params[bias.param].1);
        let needs = Needs { input_grad, weight_grad, save_original_input: false, recompute_later: false };
        let linear_key = LinearKey {
            epoch: key.epoch.unwrap_or(0),
            rows: key.rows,
            activation: key.activation,
            weight,
            device: key.device,
            needs,
            bias_grad,
            bias: bias.is_some(),
            any_rows: key.any_rows,
        };
        let quantized = recipe
            .map(|recipe| Quantized::new(recipe, linear_key, inputs, outputs, processors))
            .transpose()
            .map_err(|error| error.within(&link.label))?;
        let behind = chain.links()[index + 1..].iter().map(|link| link.op).find(|op| !matches!(op, Op::Identity));
        let alpha = if let Some(Op::ConstantScale { scale }) = behind { scale } else { 1.0 };
        let (activation, device, rows) = (key.activation, key.device, key.rows);
        Ok(Self { inputs, outputs, rows, activation, weight, device, input_grad, weight_grad, alpha, quantized })
    }

    /// Type that a bias must come in.
    pub(crate) fn bias_dtype(&self) -> Float {
        match (&self.quantized, LinearPlan::bias_dtype(self.activation)) {
            (None, _) => self.activation,
            (Some(_), DType::F16) => Float::F16,
            (Some(_), _) => Float::Bf16,
        }
    }

    fn high(&self, ld: usize, k_outermost: bool) -> Operand {
        Operand { dtype: self.activation.into(), scale: ScaleMode::None, ld, k_outermost }
    }

    fn problems(&self) -> Option<Problems<'_>> {
        let Quantized { recipe, key, .. } = self.quantized.as_ref()?;
        Some(Problems { recipe, key, in_features: self.inputs, out_features: self.outputs })
    }

    /// The GEMMs of a backward in FP8.
    fn backward_problems(&self) -> Option<Problems<'_>> {
        self.problems().filter(|_| self.backward() == BackwardOperands::Quantized)
    }

    /// What its backward multiplies.
    pub(crate) fn backward(&self) -> BackwardOperands {
        match self.quantized.as_ref().map(|quantized| quantized.recipe.backward_override) {
            None | Some(BackwardOverride::HighPrecision) => BackwardOperands::High,
            Some(BackwardOverride::None) => BackwardOperands::Quantized,
            Some(BackwardOverride::Dequantized) => BackwardOperands::Dequantized,
        }
    }

    /// Whether forward leaves the row layout of the input to backward.
    pub(crate) fn keeps_row(&self) -> bool {
        self.weight_grad && self.backward() == BackwardOperands::Dequantized
    }

    /// Whether forward leaves the input in high precision to backward.
    pub(crate) fn keeps_high(&self) -> bool {
        self.weight_grad && self.backward() == BackwardOperands::High
    }

    /// The quantised input, or weight, back in the type of the activations; none in high precision.
    pub(crate) fn dequantize(&self, of_weight: bool) -> Result<Option<DequantizePlan>> {
        let Some(Quantized { recipe, .. }) = &self.quantized else { return Ok(None) };
        let (rows, quantization) = if of_weight { (self.outputs, recipe.weight) } else { (self.rows, recipe.input) };
        let block = match quantization.block {
            Block::Tensor => None,
            Block::Row => Some(BlockShape::OneDimensional),
            Block::Square => Some(BlockShape::TwoDimensional),
        };
        let (cols, input, output) = (self.inputs, recipe.fwd, self.activation);
        DequantizePlan::new(DequantizeSpec { rows, cols, ld: cols, input, output, block }).map(Some)
    }

    /// Bytes of the gradient in high precision, where a dequantised input lies behind it.
    pub(crate) fn high_grad_bytes(&self) -> usize {
        aligned(self.rows * self.outputs * self.activation.size())
    }

    fn plain(size: [usize; 3], x: Operand, w: Operand, d: Float) -> Problem {
        let [m, n, k] = size;
        Problem {
            m,
            n,
            k,
            x,
            w,
            d: d.into(),
            ldd: n,
            bias: None,
            alpha: Factor::ONE,
            epilogue: Epilogue::None,
            accumulate: false,
            fast_accumulation: false,
            alignment: ALIGNMENT,
        }
    }

    /// `x · Wᵀ`, with what is fused behind it; into FP8 for an op that takes it so.
    pub(crate) fn fprop(&self, dispatcher: &mut Dispatcher, tail: Tail, d: Option<Fp8>) -> Result<Arc<GemmPlan>> {
        let Self { rows, inputs, outputs, .. } = *self;
        let problem = self.problems().map_or_else(
            || {
                Self::plain(
                    [rows, outputs, inputs],
                    self.high(inputs, false),
                    self.high(inputs, false),
                    self.activation,
                )
            },
            |problems| problems.fprop(),
        );
        let problem = Problem {
            d: d.map_or(problem.d, DType::from),
            bias: tail.bias.then(|| self.bias_dtype().into()),
            alpha: Factor::new(tail.alpha),
            epilogue: tail.epilogue,
            accumulate: tail.accumulate,
            ..problem
        };
        dispatcher.gemm(self.device, problem)
    }

    /// `dy · W`.
    pub(crate) fn dgrad(&self, dispatcher: &mut Dispatcher, accumulate: bool) -> Result<Arc<GemmPlan>> {
        let Self { rows, inputs, outputs, .. } = *self;
        let problem = self.backward_problems().map_or_else(
            || {
                Self::plain(
                    [rows, inputs, outputs],
                    self.high(outputs, false),
                    self.high(inputs, true),
                    self.activation,
                )
            },
            |problems| problems.dgrad(),
        );
        dispatcher.gemm(self.device, Problem { alpha: Factor::new(self.alpha), accumulate, ..problem })
    }

    /// `dyᵀ · x` into `d`.
    pub(crate) fn wgrad(
        &self,
        dispatcher: &mut Dispatcher,
        d: DType,
        accumulate: bool,
        alignment: u16,
    ) -> Result<Arc<GemmPlan>> {
        let Self { rows, inputs, outputs, .. } = *self;
        let problem = self.backward_problems().map_or_else(
            || {
                let (dy, x) = (self.high(outputs, true), self.high(inputs, true));
                let problem = Self::plain([outputs, inputs, rows], dy, x, self.activation);
                Problem { d, accumulate, alignment, ..problem }
            },
            |problems| problems.wgrad(d, accumulate, alignment),
        );
        dispatcher.gemm(self.device, Problem { alpha: Factor::new(self.alpha), ..problem })
    }

    /// The weight's gradient into a tensor of the weight's type.
    pub(crate) fn own_wgrad(&self, dispatcher: &mut Dispatcher) -> Result<Arc<GemmPlan>> {
        self.wgrad(dispatcher, self.weight.into(), false, ALIGNMENT)
    }

    /// Where the quantised weight's layouts lie in a buffer of its own.
    pub(crate) fn weight_segments(&self) -> Segments {
        self.quantized
            .as_ref()
            .map_or_else(Segments::default, |quantized| Segments::behind(0, &quantized.w, quantized.usages.weight()))
    }
}

impl LinearOp {
    /// Layouts of the output's gradient in a buffer of their own, and behind them the scales of the input that were
    /// kept as bytes; empty in high precision and where no GEMM reads the gradient.
    pub(crate) fn grad_segments(&self) -> (Segments, Option<UnpackedScales>) {
        let Some(Quantized { x, dy: Some(dy), usages, .. }) = &self.quantized else {
            return (Segments::default(), None);
        };
        let mut segments = Segments::behind(0, dy, usages.grad_output());
        let scales = UnpackedScales::behind(&mut segments, x);
        (segments, scales)
    }
}

/// What is fused behind a forward GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    pub(crate) bias: bool,
    pub(crate) alpha: f32,
    pub(crate) epilogue: Epilogue,
    pub(crate) accumulate: bool,
}

impl Quantized {
    fn new(recipe: &Recipe, key: LinearKey, inputs: usize, outputs: usize, processors: u32) -> Result<Self> {
        check_recipe(recipe, &key)?;
        check_sizes(recipe, &key, inputs, outputs)?;
        let usages = Usages::of_linear(recipe, key.needs, false);
        let spec = OperandSpecs { recipe, key: &key, usages, in_features: inputs, out_features: outputs, processors };
        let (x, w, dy) = (spec.x()?, spec.w()?, spec.dy()?);
        Ok(Self { recipe: *recipe, key, x, w, dy, usages })
    }

    /// The layouts of the input that `usage` names, in a buffer of their own.
    pub(crate) fn x_segments(&self, usage: Usage) -> Segments {
        Segments::behind(0, &self.x, usage)
    }
}
