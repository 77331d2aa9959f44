//! A linear op inside of a program: the quantisation of its operands, and its GEMMs, in FP8 or in high precision.

use std::sync::Arc;

use te_fast_kernels::constants::tile::TILE;
use te_fast_kernels::{Float, Fp8};

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::gemm::linear::{self as fp8_gemms, Problems, check_features, check_recipe, check_rows};
use crate::gemm::plan::GemmPlan;
use crate::gemm::problem::{Epilogue, Factor, Operand, Problem, ScaleMode};
use crate::ops::amax::ScaleRule;
use crate::ops::cast_groups::{Division, GroupShape, padded_rows};
use crate::ops::cast_many::{CastManyPlan, ManyInputs, ManyScales, TensorCast};
use crate::ops::dequantize::DequantizeSpec;
use crate::ops::grouped_gemm::{GroupedGemmPlan, GroupedGemmSpec, GroupedKind, GroupedScaling};
use crate::ops::transpose::TransposeSpec;
use crate::program::cast::Cast;
use crate::program::chain::{Chain, Groups, LinearCall, OP, Op, ProgramKey};
use crate::program::edge::{QuantizedKind, Rows};
use crate::program::weight_grad::WeightGradPlan;
use crate::quant::quantizer::{QuantGroups, QuantPlan, QuantSpec};
use crate::quant::value::{Slot, WeightBuffer, WeightLayout};
use crate::recipe::definition::{BackwardOverride, Block, PerGemm, Quantization, Recipe, Scaling};
use crate::recipe::usage::{Needs, Usage, Usages};
use crate::runtime::dispatcher::Dispatcher;

/// Alignment of all pointers of a GEMM, which torch's and te_fast's allocations have.
pub(crate) const ALIGNMENT: u16 = 256;

/// Layout of an input that is quantised again in backward.
const AGAIN: Usage = Usage { rowwise: false, columnwise: true };

/// Quantisation of a linear op's operands.
#[derive(Debug)]
pub(crate) struct Casts {
    pub(crate) recipe: Recipe,
    pub(crate) x: Cast,
    pub(crate) w: QuantPlan,
    pub(crate) dy: Option<Cast>,
    /// Quantisation of the input in backward, if forward saves it in high precision.
    pub(crate) x_again: Option<Cast>,
    pub(crate) usages: Usages,
    any_rows: bool,
}

/// Operands of the GEMMs in a linear op's backward.
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
    /// Rows of the input.
    pub(crate) rows: Rows,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// The experts; none for one weight.
    pub(crate) groups: Option<Groups>,
    pub(crate) activation: Float,
    pub(crate) weight: Float,
    pub(crate) device: Device,
    /// Whether the gradient of the input is needed.
    pub(crate) input_grad: bool,
    /// Whether the gradient of the weight is needed.
    pub(crate) weight_grad: bool,
    /// Whether the weight gradient is delayed until `backward_dw`.
    pub(crate) deferred: bool,
    /// Factor of the gradients: a [`Op::ConstantScale`] behind the op is not launched in backward.
    pub(crate) alpha: f32,
    /// None in high precision.
    pub(crate) casts: Option<Casts>,
    /// The input comes quantised.
    pub(crate) given: Option<QuantizedKind>,
    /// The activation whose result is the input, and is computed again in backward.
    pub(crate) recomputed: Option<usize>,
}

impl LinearOp {
    /// The linear op at `index` of `chain`, from whether an earlier tensor needs a gradient, and the device's
    /// multiprocessors.
    pub(crate) fn new(
        chain: &Chain,
        index: usize,
        key: &ProgramKey,
        recipe: Option<&Recipe>,
        (input_grad, processors): (bool, u32),
    ) -> Result<Self> {
        let link = &chain.links()[index];
        let Op::Linear { inputs, outputs, groups } = link.op else {
            return Err(Error::state(OP, "not a linear op"));
        };
        let (weight, weight_grad) = key.params[link.param];
        let bias = chain.bias_behind(index).map(|at| &chain.links()[at]);
        let bias_grad = bias.is_some_and(|bias| key.params[bias.param].1);
        let LinearCall { deferred, save_original_input } = key.linears[link.linear];
        let behind = chain.links()[index + 1..].iter().map(|link| link.op).find(|op| !matches!(op, Op::Identity));
        let alpha = match behind {
            Some(Op::ConstantScale { scale }) if groups.is_none() => scale,
            _ => 1.0,
        };
        let mut op = Self {
            rows: chain.rows_of(index),
            inputs,
            outputs,
            groups,
            activation: key.activation,
            weight,
            device: key.device,
            input_grad,
            weight_grad,
            deferred: deferred && weight_grad,
            alpha,
            casts: None,
            given: None,
            // If no earlier tensor needs a gradient, forward saves nothing for it.
            recomputed: chain.recomputed_before(index).filter(|_| input_grad),
        };
        if let Some(recipe) = recipe {
            check_recipe(recipe, save_original_input)?;
            if op.recomputed.is_some() && recipe.is_delayed() {
                let message = "activation_recompute_in_mlp=True does not go with delayed scaling, whose scale changes before backward; use current or block scaling";
                return Err(Error::value(OP, message));
            }
            let save_original_input = save_original_input || op.recomputed.is_some();
            if groups.is_some() && recipe.backward_override == BackwardOverride::Dequantized {
                let message = "experts take no backward_override='dequantized'; use 'high_precision', or none";
                return Err(Error::unsupported(OP, message));
            }
            check_features(inputs, outputs, input_grad)?;
            let needs = Needs { input_grad, weight_grad, save_original_input, recompute_later: false };
            op.casts = Some(op.casts(recipe, needs, bias_grad, processors)?);
            op.casts.iter_mut().for_each(|casts| casts.any_rows = key.any_rows);
        }
        Ok(op)
    }

    /// Takes a quantised input of the call, in the recipe's format. In high precision it is dequantised before.
    pub(crate) fn take(&mut self, given: QuantizedKind) -> Result<()> {
        let Some(casts) = &mut self.casts else { return Ok(()) };
        let Recipe { fwd, input, .. } = casts.recipe;
        if (given.dtype, given.block) != (fwd, input.block) {
            let message = format!(
                "the input is quantised to {:?} with {}, and the recipe of the region asks for {fwd:?} with {}; give its dequantize()",
                given.dtype,
                given.block.text(),
                input.block.text()
            );
            return Err(Error::state(OP, message));
        }
        let lacks_columns = casts.usages.input().columnwise || casts.x_again.is_some();
        if lacks_columns && given.block == Block::Row && !given.usage.columnwise {
            let message = "the input has its row layout alone, and the gradient of the weight needs the column layout, whose blocks of 1x128 follow from the original values alone; quantise with rowwise and columnwise usage, give its dequantize(), or recompute with use_reentrant=False";
            return Err(Error::state(OP, message));
        }
        casts.x_again = None;
        self.given = Some(given);
        Ok(())
    }

    fn casts(&self, recipe: &Recipe, needs: Needs, bias_grad: bool, processors: u32) -> Result<Casts> {
        let usages = Usages::of_linear(recipe, needs, false);
        let cast = |(rows, cols): (Rows, usize), input: Float, to: (Quantization, Fp8), usage: Usage, dbias: bool| {
            let ((quantization, output), scaling) = (to, recipe.scaling);
            let groups = None;
            let spec =
                QuantSpec { scaling, quantization, rows: 0, cols, input, output, usage, dbias, groups, processors };
            Cast::new(rows, spec)
        };
        let groups = |division, slots: fn(Groups) -> usize| {
            self.groups.map(|groups| QuantGroups { count: groups.count, division, slots: slots(groups), gather: None })
        };
        let counted = |slots| groups(Division::Counted, slots);
        let input = |usage| {
            let input = cast((self.rows, self.inputs), self.activation, (recipe.input, recipe.fwd), usage, false);
            input.of_groups(counted(|groups| groups.slots[0]))
        };
        let (outputs, weight) = (Rows::Fixed(self.outputs), (recipe.weight, recipe.fwd));
        let w = cast((outputs, self.inputs), self.weight, weight, usages.weight(), false)
            .of_groups(groups(Division::Equal, |groups| groups.slots[0]))
            .plan(self.outputs)?;
        let dy = usages.grad_output();
        // A separate launch sums the gradients of experts' biases.
        let bias_grad = bias_grad && self.groups.is_none();
        let grad = || {
            let grad = cast((self.rows, self.outputs), self.activation, (recipe.grad, recipe.bwd), dy, bias_grad);
            grad.of_groups(counted(|groups| groups.slots[1]))
        };
        let quantizes_again = recipe.backward_override == BackwardOverride::None;
        let again = quantizes_again && needs.save_original_input && needs.weight_grad;
        Ok(Casts {
            recipe: *recipe,
            x: input(usages.input()).with_byte_scales(),
            w,
            dy: (!dy.is_empty()).then(grad),
            x_again: again.then(|| input(AGAIN)),
            usages,
            any_rows: false,
        })
    }

    /// Refuses row counts of the chain's input that the GEMMs do not take.
    pub(crate) fn check_rows(&self, rows: usize) -> Result<()> {
        let rows = self.rows.count(rows);
        let casts = self.casts.as_ref().filter(|_| self.groups.is_none());
        casts.map_or(Ok(()), |casts| check_rows(&casts.recipe, rows, casts.any_rows))
    }

    /// Required type of a bias.
    pub(crate) fn bias_dtype(&self) -> Float {
        match (&self.casts, fp8_gemms::bias_dtype(self.activation)) {
            (None, _) => self.activation,
            (Some(_), DType::F16) => Float::F16,
            (Some(_), _) => Float::Bf16,
        }
    }

    /// Operands of its backward.
    pub(crate) fn backward(&self) -> BackwardOperands {
        match self.casts.as_ref().map(|casts| casts.recipe.backward_override) {
            None | Some(BackwardOverride::HighPrecision) => BackwardOperands::High,
            Some(BackwardOverride::None) => BackwardOperands::Quantized,
            Some(BackwardOverride::Dequantized) => BackwardOperands::Dequantized,
        }
    }

    /// Whether forward saves the row layout of the input for backward.
    pub(crate) fn keeps_row(&self) -> bool {
        self.weight_grad
            && match self.backward() {
                BackwardOperands::Dequantized => true,
                BackwardOperands::High => self.given.is_some(),
                BackwardOperands::Quantized => self.transposes_input().is_some(),
            }
    }

    /// How backward makes a missing column layout of a quantised input.
    pub(crate) fn transposes_input(&self) -> Option<TransposeSpec> {
        let given = self.given.filter(|given| !given.usage.columnwise)?;
        (self.backward() == BackwardOperands::Quantized).then(|| given.transpose(self.inputs))
    }

    /// Whether forward saves the input in high precision for backward.
    pub(crate) fn keeps_high(&self) -> bool {
        self.reads_high() && self.recomputed.is_none()
    }

    /// Whether backward reads the input in high precision.
    pub(crate) fn reads_high(&self) -> bool {
        self.weight_grad
            && self.given.is_none()
            && (self.backward() == BackwardOperands::High || self.x_again().is_some())
    }

    /// Quantises the input in backward, if forward saves it in high precision.
    pub(crate) fn x_again(&self) -> Option<&Cast> {
        self.casts.as_ref()?.x_again.as_ref()
    }

    /// The quantisation of the gradient, if GEMMs read it in FP8.
    pub(crate) fn dy(&self) -> Option<&Cast> {
        self.casts.as_ref()?.dy.as_ref()
    }

    /// The input's quantisation, if its scales are saved as bytes.
    pub(crate) fn packed_input(&self) -> Option<&Cast> {
        self.casts.as_ref().map(|casts| &casts.x).filter(|x| x.has_byte_scales() && self.given.is_none())
    }

    /// Dequantisation of input or weight to the type of the activations; none in high precision.
    pub(crate) fn dequantize(&self, of_weight: bool) -> Option<(DequantizeSpec, Rows)> {
        let Casts { recipe, .. } = self.casts.as_ref()?;
        let (rows, quantization) =
            if of_weight { (Rows::Fixed(self.outputs), recipe.weight) } else { (self.rows, recipe.input) };
        let kind = QuantizedKind { dtype: recipe.fwd, block: quantization.block, usage: Usage::default() };
        Some((kind.dequantize(self.inputs, self.activation), rows))
    }

    /// Rows of the weight, or of the stack of weights.
    pub(crate) fn weight_rows(&self) -> usize {
        self.outputs * self.groups.map_or(1, |groups| groups.count)
    }

    /// How the weight is quantised together with other weights, if a launch can do that.
    pub(crate) fn weight_cast(&self) -> Option<WeightCast> {
        let Casts { recipe, .. } = self.casts.as_ref().filter(|_| self.groups.is_none())?;
        let Quantization { power_2_scale: pow2, amax_epsilon: eps, block } = recipe.weight;
        let output = recipe.fwd;
        let scales = match (recipe.scaling, block) {
            (Scaling::Delayed, _) => ManyScales::Given,
            (Scaling::Current, _) => ManyScales::Current(ScaleRule { output, eps, pow2 }),
            (Scaling::Block, Block::Square) => ManyScales::Block { eps, pow2 },
            _ => return None,
        };
        Some(WeightCast { rows: self.outputs, cols: self.inputs, input: self.weight, output, scales })
    }

    /// How the quantised weight lies in memory.
    pub(crate) fn weight_layout(&self) -> WeightLayout {
        let casts = self.casts.as_ref();
        casts.map_or_else(WeightLayout::default, |casts| WeightLayout::new(&casts.w, casts.usages.weight()))
    }
}

/// The cast of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightCast {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Type of the weight.
    pub input: Float,
    /// Type of the cast.
    pub output: Fp8,
    /// Source of its scales.
    pub scales: ManyScales,
}

impl WeightCast {
    /// The launch of such weights.
    ///
    /// # Errors
    /// None for a recipe that a program was compiled with.
    pub fn plan(&self) -> Result<CastManyPlan> {
        CastManyPlan::new(ManyInputs::Plain(self.input), self.output, self.scales)
    }

    /// Whether one launch does both.
    #[must_use]
    pub fn is_with(&self, other: &Self) -> bool {
        (self.input, self.output, self.scales) == (other.input, other.output, other.scales)
    }

    /// Quantises the weight at `x` into `weight`, with its slot of delayed scaling.
    #[must_use]
    pub fn of<'a>(&self, x: DevPtr<'a>, weight: &WeightBuffer<'a>, slot: Slot<'a>) -> TensorCast<'a> {
        let (row, col) = (weight.row(), weight.col());
        let scale_inv =
            if row.data.is_null() && !matches!(self.scales, ManyScales::Block { .. }) { col.scale } else { row.scale };
        TensorCast {
            rows: self.rows,
            cols: self.cols,
            x,
            out: row.data,
            out_t: col.data,
            scale_inv,
            scale_inv_t: col.scale,
            scale: slot.scale,
            amax: slot.amax,
        }
    }
}

/// The epilogue of a forward GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    pub(crate) bias: bool,
    pub(crate) alpha: f32,
    pub(crate) epilogue: Epilogue,
    pub(crate) accumulate: bool,
}

/// One of the three GEMMs of a linear op, for any number of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Product {
    /// `x · Wᵀ` with its epilogue; into FP8 if the next op takes FP8.
    Forward { tail: Tail, into: Option<Fp8> },
    /// `dy · W`, written or added; into FP8 if the chain returns a quantised gradient.
    InputGrad { accumulate: bool, into: Option<Fp8> },
    /// `dyᵀ · x` into a tensor of the weight's type.
    WeightGrad,
}

impl LinearOp {
    fn high(&self, ld: usize, k_outermost: bool) -> Operand {
        Operand { dtype: self.activation.into(), scale: ScaleMode::None, ld, k_outermost }
    }

    fn problems(&self, rows: usize) -> Option<Problems<'_>> {
        let Casts { recipe, .. } = self.casts.as_ref()?;
        let (activation, in_features, out_features) = (self.activation, self.inputs, self.outputs);
        Some(Problems { recipe, rows, activation, in_features, out_features })
    }

    /// The GEMMs of a backward in FP8.
    fn backward_problems(&self, rows: usize) -> Option<Problems<'_>> {
        self.problems(rows).filter(|_| self.backward() == BackwardOperands::Quantized)
    }

    /// A product in high precision.
    pub(crate) fn plain([m, n, k]: [usize; 3], x: Operand, w: Operand, d: Float) -> Problem {
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
            exact: false,
            alignment: ALIGNMENT,
        }
    }

    /// The GEMM `product` for `rows` rows.
    pub(crate) fn plan(&self, dispatcher: &mut Dispatcher, rows: usize, product: Product) -> Result<Arc<GemmPlan>> {
        match product {
            Product::Forward { tail, into } => dispatcher.gemm(self.device, self.fprop(rows, tail, into)),
            Product::InputGrad { accumulate, into } => dispatcher.gemm(self.device, self.dgrad(rows, accumulate, into)),
            Product::WeightGrad => Err(Error::state(OP, "a weight gradient has a plan of its own")),
        }
    }

    fn fprop(&self, rows: usize, tail: Tail, into: Option<Fp8>) -> Problem {
        let Self { inputs, outputs, .. } = *self;
        let high = self.high(inputs, false);
        let problem = self.problems(rows).map_or_else(
            || Self::plain([rows, outputs, inputs], high, high, self.activation),
            |problems| problems.fprop(None),
        );
        Problem {
            d: into.map_or(problem.d, DType::from),
            bias: tail.bias.then(|| self.bias_dtype().into()),
            alpha: Factor::new(tail.alpha),
            epilogue: tail.epilogue,
            accumulate: tail.accumulate,
            ..problem
        }
    }

    fn dgrad(&self, rows: usize, accumulate: bool, into: Option<Fp8>) -> Problem {
        let Self { inputs, outputs, .. } = *self;
        let (dy, w) = (self.high(outputs, false), self.high(inputs, true));
        let problem = self
            .backward_problems(rows)
            .map_or_else(|| Self::plain([rows, inputs, outputs], dy, w, self.activation), |problems| problems.dgrad());
        let d = into.map_or(problem.d, DType::from);
        Problem { d, alpha: Factor::new(self.alpha), accumulate, ..problem }
    }

    /// Whether there is a product that writes the weight's gradient in this type. cuBLAS writes the operands' own type
    /// and FP32, and of FP8 operands each type.
    fn writes_weight_grad_in(&self, d: DType) -> bool {
        let in_fp8 = self.casts.is_some() && self.backward() == BackwardOperands::Quantized;
        in_fp8 || d == DType::F32 || d == self.activation.into()
    }

    /// The type of the weight's gradient where the caller brings no memory for it: the weight's own, or that of the
    /// operands if no product writes the weight's.
    pub(crate) fn weight_grad_dtype(&self) -> Float {
        if self.writes_weight_grad_in(self.weight.into()) { self.weight } else { self.activation }
    }

    /// `dyᵀ · x` into a tensor of this type and alignment, set or added.
    pub(crate) fn wgrad(
        &self,
        dispatcher: &mut Dispatcher,
        rows: usize,
        (d, accumulate): (DType, bool),
        alignment: u16,
    ) -> Result<WeightGradPlan> {
        let Self { inputs, outputs, .. } = *self;
        if let Some(groups) = self.groups {
            return self.grouped_wgrad(dispatcher, groups, rows, (d, accumulate)).map(WeightGradPlan::Grouped);
        }
        if !self.writes_weight_grad_in(d) {
            let message = format!(
                "the weight's gradient cannot be written as {d} while the layer computes in {}; give a main_grad of float32",
                DType::from(self.activation)
            );
            return Err(Error::unsupported(OP, message));
        }
        let problem = self.backward_problems(rows).map_or_else(
            || {
                let (dy, x) = (self.high(outputs, true), self.high(inputs, true));
                let problem = Self::plain([outputs, inputs, rows], dy, x, self.activation);
                Problem { d, accumulate, alignment, ..problem }
            },
            |problems| problems.wgrad(d, accumulate, alignment),
        );
        let plan = dispatcher.gemm(self.device, Problem { alpha: Factor::new(self.alpha), ..problem })?;
        Ok(WeightGradPlan::Dense(plan))
    }
}

/// The products of experts.
impl LinearOp {
    /// How the operands of a product are scaled, and their types: of gradient or input, and of the other operand.
    fn grouped_operands(&self, backward: bool) -> (GroupedScaling, DType, DType) {
        let quantized = !backward || self.backward() == BackwardOperands::Quantized;
        match self.casts.as_ref().filter(|_| quantized) {
            None => (GroupedScaling::None, self.activation.into(), self.activation.into()),
            Some(Casts { recipe, .. }) => {
                let scaling = if recipe.is_per_tensor() { GroupedScaling::Tensor } else { GroupedScaling::Block };
                let first = if backward { recipe.bwd } else { recipe.fwd };
                (scaling, first.into(), recipe.fwd.into())
            }
        }
    }

    fn is_fast(&self, scaling: GroupedScaling, split: impl Fn(&PerGemm) -> bool) -> bool {
        scaling == GroupedScaling::Tensor
            && self.casts.as_ref().is_some_and(|casts| !split(&casts.recipe.split_accumulator))
    }

    /// Forward, or the gradient of the input; none for one weight.
    pub(crate) fn grouped_plan(
        &self,
        dispatcher: &mut Dispatcher,
        rows: usize,
        product: Product,
    ) -> Result<Option<GroupedGemmPlan>> {
        let Some(groups) = self.groups else { return Ok(None) };
        let backward = matches!(product, Product::InputGrad { .. });
        let (scaling, a, b) = self.grouped_operands(backward);
        let (n, k) = if backward { (self.inputs, self.outputs) } else { (self.outputs, self.inputs) };
        let bias = matches!(product, Product::Forward { tail: Tail { bias: true, .. }, .. });
        let shape = GroupShape { groups: groups.count, division: Division::Counted, rows, cols: k };
        let spec = GroupedGemmSpec {
            kind: GroupedKind::Rows,
            groups: groups.count,
            rows,
            counted: rows,
            n,
            k,
            a,
            b,
            d: self.activation.into(),
            scaling,
            bias: bias.then(|| self.bias_dtype().into()),
            accumulate: false,
            b_k_outermost: backward && scaling == GroupedScaling::None,
            fast_accumulation: self.is_fast(scaling, |split| if backward { split.dgrad } else { split.fprop }),
            align: 1,
            scale_pitch: if scaling == GroupedScaling::Block { shape.row_scale_pitch() } else { 0 },
        };
        dispatcher.grouped_gemm(self.device, spec).map(Some)
    }

    fn grouped_wgrad(
        &self,
        dispatcher: &mut Dispatcher,
        groups: Groups,
        rows: usize,
        (d, accumulate): (DType, bool),
    ) -> Result<GroupedGemmPlan> {
        let (scaling, a, b) = self.grouped_operands(true);
        let padded = scaling != GroupedScaling::None;
        let spec = GroupedGemmSpec {
            kind: GroupedKind::WeightGradient,
            groups: groups.count,
            rows: if padded { padded_rows(rows, groups.count) } else { rows },
            counted: rows,
            n: self.outputs,
            k: self.inputs,
            a,
            b,
            d,
            scaling,
            bias: None,
            accumulate,
            b_k_outermost: false,
            fast_accumulation: self.is_fast(scaling, |split| split.wgrad),
            align: if padded { TILE } else { 1 },
            scale_pitch: 0,
        };
        dispatcher.grouped_gemm(self.device, spec)
    }
}
