//! The FP8 linear layer: `y = x · Wᵀ + b` with quantised operands, forward and backward, as one plan.
//!
//! A plan fixes, for one key, which operands are quantised in which layouts, where their bytes lie in the memory of
//! a call, and which GEMMs run. A call brings pointers only.

use std::sync::Arc;

use te_fast_kernels::{Float, Fp8};

use crate::dispatch::{Dispatcher, Lane, Workspace, aligned};
use crate::error::{Error, Result};
use crate::gemm::{GemmIo, GemmPlan, Operand, Problem, ScaleMode};
use crate::kernel::{DevPtr, Target};
use crate::quantizer::{QuantIo, QuantPlan, QuantSpec, Quantized};
use crate::recipe::{BackwardOverride, Block, Needs, Recipe, Usage, Usages};
use crate::tensor::{DType, Device};
use crate::trace::{CLOCK, Stage};

const OP: &str = "linear";
/// FP8 rows must be a multiple of this many bytes for the tensor cores.
const GRANULE: usize = 16;
/// Row counts must be a multiple of this, as in Transformer Engine.
const ROW_GRANULE: usize = 8;

/// What a plan is made for, and found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearKey {
    /// Epoch of the autocast region.
    pub epoch: u64,
    /// Rows of the input, all leading dimensions together.
    pub rows: usize,
    /// Type of input, output and their gradients.
    pub activation: Float,
    /// Type of the weight and its gradient.
    pub weight: Float,
    /// Device of every operand.
    pub device: Device,
    /// Gradients needed and how the input is kept.
    pub needs: Needs,
    /// Gradient of the bias.
    pub bias_grad: bool,
    /// A bias is added in the GEMM.
    pub bias: bool,
    /// Rows of any count are taken, not multiples of 8 alone.
    pub any_rows: bool,
}

/// Byte offsets of one operand's quantised layouts in a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    pub(crate) row: usize,
    pub(crate) row_scale: usize,
    pub(crate) col: usize,
    pub(crate) col_scale: usize,
    /// Layouts that are there.
    pub usage: Usage,
    /// Bytes of the buffer up to the end of these.
    pub bytes: usize,
}

impl Segments {
    /// Lays the layouts of `plan` that `usage` names out behind `start`.
    fn behind(start: usize, plan: &QuantPlan, usage: Usage) -> Self {
        let mut bytes = start;
        let mut take = |count: usize| {
            let offset = bytes;
            bytes = aligned(offset + count);
            offset
        };
        let mut segments = Self { usage, ..Self::default() };
        if usage.rowwise {
            segments.row = take(plan.row_bytes());
            segments.row_scale = take(plan.row_scale_bytes());
        }
        if usage.columnwise {
            segments.col = take(plan.col_bytes());
            let shared = usage.rowwise && plan.shares_scale();
            segments.col_scale = if shared { segments.row_scale } else { take(plan.col_scale_bytes()) };
        }
        Self { bytes, ..segments }
    }

    /// The row layout in `buffer`; null pointers when it is not there.
    #[must_use]
    pub fn row(self, buffer: DevPtr<'_>) -> Quantized<'_> {
        if self.usage.rowwise {
            Quantized { data: buffer.offset(self.row), scale: buffer.offset(self.row_scale) }
        } else {
            Quantized::NONE
        }
    }

    /// The column layout in `buffer`; null pointers when it is not there.
    #[must_use]
    pub fn col(self, buffer: DevPtr<'_>) -> Quantized<'_> {
        if self.usage.columnwise {
            Quantized { data: buffer.offset(self.col), scale: buffer.offset(self.col_scale) }
        } else {
            Quantized::NONE
        }
    }
}

/// Scale and live absolute maximum of one slot of delayed scaling; null pointers for other recipes.
#[derive(Clone, Copy, Debug)]
pub struct Slot<'a> {
    /// Scale to quantise with.
    pub scale: DevPtr<'a>,
    /// Maximum to raise.
    pub amax: DevPtr<'a>,
}

impl Slot<'_> {
    /// No slot.
    pub const NONE: Self = Self { scale: DevPtr::null(), amax: DevPtr::null() };
}

/// A quantised weight, as its layer keeps it.
#[derive(Clone, Copy, Debug)]
pub struct WeightBuffer<'a> {
    /// The buffer.
    pub data: DevPtr<'a>,
    /// What lies where in it.
    pub segments: Segments,
}

/// Pointers of a forward.
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// Input, contiguous.
    pub x: DevPtr<'a>,
    /// Weight in high precision when it must be quantised now.
    pub fresh_weight: Option<DevPtr<'a>>,
    /// Where the quantised weight is or goes.
    pub weight: WeightBuffer<'a>,
    /// Bias in the type of [`LinearPlan::bias_dtype`], null without.
    pub bias: DevPtr<'a>,
    /// Output.
    pub y: DevPtr<'a>,
    /// [`LinearPlan::saved_bytes`] bytes kept for backward; null when nothing is.
    pub saved: DevPtr<'a>,
    /// Delayed-scaling slots of input and weight.
    pub slots: [Slot<'a>; 2],
    /// A device float that makes weight quantisation a no-op when it is 1 (CUDA graphs); null without.
    pub skip_weight: DevPtr<'a>,
}

/// Pointers of a backward; gradients that are not wanted are null.
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// Gradient of the output, contiguous.
    pub dy: DevPtr<'a>,
    /// The input in high precision, when the plan keeps it instead of its quantised form.
    pub x: DevPtr<'a>,
    /// What forward kept.
    pub saved: DevPtr<'a>,
    /// The quantised weight.
    pub weight: WeightBuffer<'a>,
    /// Gradient of the input.
    pub dx: DevPtr<'a>,
    /// Gradient of the weight.
    pub dw: DevPtr<'a>,
    /// Gradient of the bias, in the type of the output.
    pub db: DevPtr<'a>,
    /// Delayed-scaling slot of the output's gradient.
    pub slot: Slot<'a>,
    /// Delayed-scaling slot of the input, for plans that quantise it again.
    pub input_slot: Slot<'a>,
    /// Keeps the quantised gradient here for a later [`LinearPlan::weight_grad`]; null for the call's scratch.
    pub kept_dy: DevPtr<'a>,
}

/// Everything about one kind of call of one layer that does not change from call to call.
#[derive(Debug)]
pub struct LinearPlan {
    key: LinearKey,
    recipe: Recipe,
    in_features: usize,
    out_features: usize,
    x: QuantPlan,
    w: QuantPlan,
    dy: Option<QuantPlan>,
    x_again: Option<QuantPlan>,
    fprop: Arc<GemmPlan>,
    dgrad: Option<Arc<GemmPlan>>,
    wgrad: Option<Arc<GemmPlan>>,
    x_row: Segments,
    saved: Segments,
    weight: Segments,
    dy_segments: Segments,
    x_again_segments: Segments,
    forward_scratch: usize,
    backward_scratch: usize,
}

impl LinearPlan {
    /// Plans calls of a layer with `in_features` and `out_features` under `recipe`. The device must be current.
    ///
    /// # Errors
    /// Sizes that FP8 GEMMs cannot take (naming the padding needed), or what the device or cuBLAS lacks.
    pub fn new(dispatcher: &mut Dispatcher, recipe: &Recipe, key: LinearKey, in_features: usize, out_features: usize) -> Result<Self> {
        check_recipe(recipe, &key)?;
        check_sizes(&key, in_features, out_features)?;
        let LinearKey { rows, activation, device, needs, .. } = key;
        let processors = dispatcher.multiprocessors(device)?;
        let usages = Usages::of_linear(recipe, needs, false);
        let spec = |rows, cols, input, output, quantization, usage, dbias| QuantSpec {
            scaling: recipe.scaling, quantization, rows, cols, input, output, usage, dbias, processors,
        };
        let x = QuantPlan::new(&spec(rows, in_features, activation, recipe.fwd, recipe.input, usages.input(), false))?;
        let w = QuantPlan::new(&spec(out_features, in_features, key.weight, recipe.fwd, recipe.weight, usages.weight(), false))?;
        let dy_usage = usages.grad_output();
        let dy = (!dy_usage.is_empty())
            .then(|| QuantPlan::new(&spec(rows, out_features, activation, recipe.bwd, recipe.grad, dy_usage, key.bias_grad)))
            .transpose()?;
        let again = Usage { rowwise: false, columnwise: true };
        let x_again = (needs.save_original_input && needs.weight_grad)
            .then(|| QuantPlan::new(&spec(rows, in_features, activation, recipe.fwd, recipe.input, again, false)))
            .transpose()?;

        let problems = Problems { recipe, key: &key, in_features, out_features };
        let fprop = dispatcher.gemm(device, problems.fprop())?;
        let dgrad = needs.input_grad.then(|| dispatcher.gemm(device, problems.dgrad())).transpose()?;
        let wgrad = needs.weight_grad
            .then(|| dispatcher.gemm(device, problems.wgrad(key.weight.into(), false, 256)))
            .transpose()?;

        let x_row = Segments::behind(0, &x, Usage { rowwise: true, columnwise: false });
        let saved = Segments::behind(0, &x, Usage { rowwise: false, columnwise: usages.input().columnwise });
        let weight = Segments::behind(0, &w, usages.weight());
        let dy_segments = dy.as_ref().map_or_else(Segments::default, |dy| Segments::behind(0, dy, dy_usage));
        let x_again_segments = x_again.as_ref().map_or_else(Segments::default, |plan| Segments::behind(dy_segments.bytes, plan, again));
        let forward_scratch = x_row.bytes + x.scratch_bytes().max(w.scratch_bytes());
        let backward_scratch = x_again_segments.bytes.max(dy_segments.bytes)
            + dy.as_ref().map_or(0, QuantPlan::scratch_bytes).max(x_again.as_ref().map_or(0, QuantPlan::scratch_bytes));
        Ok(Self {
            key, recipe: *recipe, in_features, out_features, x, w, dy, x_again, fprop, dgrad, wgrad,
            x_row, saved, weight, dy_segments, x_again_segments, forward_scratch, backward_scratch,
        })
    }

    /// What it was made for.
    #[must_use]
    pub fn key(&self) -> &LinearKey {
        &self.key
    }

    /// The recipe in it.
    #[must_use]
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Bytes that forward keeps for backward.
    #[must_use]
    pub fn saved_bytes(&self) -> usize {
        if self.saved.usage.is_empty() { 0 } else { self.saved.bytes }
    }

    /// Where the quantised weight's layouts lie in a buffer of the layer's.
    #[must_use]
    pub fn weight_segments(&self) -> Segments {
        self.weight
    }

    /// Bytes of the quantised gradient, for a caller that keeps it.
    #[must_use]
    pub fn kept_dy_bytes(&self) -> usize {
        self.dy_segments.bytes
    }

    /// Private bytes of a forward.
    #[must_use]
    pub fn forward_scratch(&self) -> usize {
        self.forward_scratch
    }

    /// Private bytes of a backward.
    #[must_use]
    pub fn backward_scratch(&self) -> usize {
        self.backward_scratch
    }

    /// Type that the bias must come in: cuBLAS takes none of FP32 beside FP8 operands.
    #[must_use]
    pub const fn bias_dtype(activation: Float) -> DType {
        match activation {
            Float::F16 => DType::F16,
            Float::F32 | Float::Bf16 => DType::Bf16,
        }
    }

    /// Quantises the input, and the weight if it is fresh, and multiplies.
    ///
    /// # Errors
    /// A launch's refusal.
    #[inline]
    pub fn forward(&self, lane: &mut Lane<'_>, io: &Forward<'_>) -> Result<()> {
        let Lane { target, workspace } = lane;
        let workspace = *workspace;
        let mut row = self.x_row.row(workspace.scratch);
        let col = self.saved.col(io.saved);
        if self.x.shares_scale() && !col.data.is_null() {
            row.scale = col.scale; // one scale serves both layouts, and backward reads it from what was kept
        }
        let slot = io.slots[0];
        self.x.run(target, &quant_io(io.x, row, col, slot, workspace, self.x_row.bytes))?;
        if let Some(weight) = io.fresh_weight {
            let data = io.weight.data;
            let (w_row, w_col) = (io.weight.segments.row(data), io.weight.segments.col(data));
            let mut w_io = quant_io(weight, w_row, w_col, io.slots[1], workspace, self.x_row.bytes);
            w_io.noop = io.skip_weight;
            target.trace.counters.weight_casts += 1;
            self.w.run(target, &w_io)?;
        }
        let weight = io.weight.segments.row(io.weight.data);
        let gemm = GemmIo {
            x: row.data, x_scale: row.scale, w: weight.data, w_scale: weight.scale,
            bias: io.bias, d: io.y, workspace: workspace.gemm,
        };
        CLOCK.mark(Stage::Cast);
        let result = self.fprop.run(target, &gemm);
        CLOCK.mark(Stage::Gemm);
        result
    }

    /// Quantises the gradient of the output and computes the gradients that the plan has.
    ///
    /// With `io.dw` null and the plan's weight gradient wanted, the quantised gradient stays in `io.kept_dy`.
    ///
    /// # Errors
    /// A launch's refusal.
    #[inline]
    pub fn backward(&self, lane: &mut Lane<'_>, io: &Backward<'_>) -> Result<()> {
        self.run_backward(lane, self.wgrad.as_deref(), io)
    }

    /// The same with the weight's gradient going through a plan from [`LinearPlan::weight_grad_plan`].
    ///
    /// # Errors
    /// A launch's refusal.
    pub fn backward_into(&self, lane: &mut Lane<'_>, wgrad: &GemmPlan, io: &Backward<'_>) -> Result<()> {
        self.run_backward(lane, Some(wgrad), io)
    }

    #[inline]
    fn run_backward(&self, lane: &mut Lane<'_>, wgrad: Option<&GemmPlan>, io: &Backward<'_>) -> Result<()> {
        let Lane { target, workspace } = lane;
        let workspace = *workspace;
        let buffer = if io.kept_dy.is_null() { workspace.scratch } else { io.kept_dy };
        let (dy_row, dy_col) = self.dy_layouts(buffer);
        if let Some(dy) = &self.dy {
            let mut dy_io = quant_io(io.dy, dy_row, dy_col, io.slot, workspace, self.backward_spare());
            dy_io.dbias = io.db;
            dy.run(target, &dy_io)?;
        }
        if let Some(dgrad) = &self.dgrad {
            let weight = io.weight.segments.col(io.weight.data);
            let gemm = GemmIo {
                x: dy_row.data, x_scale: dy_row.scale, w: weight.data, w_scale: weight.scale,
                bias: DevPtr::null(), d: io.dx, workspace: workspace.gemm,
            };
            dgrad.run(target, &gemm)?;
        }
        match wgrad {
            Some(wgrad) if !io.dw.is_null() => self.run_weight_grad(target, workspace, wgrad, io, dy_col),
            _ => Ok(()),
        }
    }

    /// Offset of what casts need for themselves in backward's scratch.
    fn backward_spare(&self) -> usize {
        self.x_again_segments.bytes.max(self.dy_segments.bytes)
    }

    /// The weight's gradient alone, from a gradient that [`LinearPlan::backward`] kept, with a plan from
    /// [`LinearPlan::weight_grad_plan`].
    ///
    /// # Errors
    /// A launch's refusal.
    pub fn weight_grad(&self, lane: &mut Lane<'_>, wgrad: &GemmPlan, io: &Backward<'_>) -> Result<()> {
        let Lane { target, workspace } = lane;
        let (_, dy_col) = self.dy_layouts(io.kept_dy);
        self.run_weight_grad(target, *workspace, wgrad, io, dy_col)
    }

    /// The GEMM of a weight gradient that goes into a buffer of the caller's: `main_grad`, added or set.
    ///
    /// # Errors
    /// See [`Dispatcher::gemm`].
    pub fn weight_grad_plan(&self, dispatcher: &mut Dispatcher, d: DType, accumulate: bool, address: usize) -> Result<Arc<GemmPlan>> {
        let problems = Problems { recipe: &self.recipe, key: &self.key, in_features: self.in_features, out_features: self.out_features };
        let alignment = 1_usize << address.trailing_zeros().min(8);
        dispatcher.gemm(self.key.device, problems.wgrad(d, accumulate, alignment as u16))
    }

    fn dy_layouts<'a>(&self, buffer: DevPtr<'a>) -> (Quantized<'a>, Quantized<'a>) {
        (self.dy_segments.row(buffer), self.dy_segments.col(buffer))
    }

    fn run_weight_grad(&self, target: &mut Target<'_>, workspace: Workspace<'_>, wgrad: &GemmPlan, io: &Backward<'_>, dy: Quantized<'_>) -> Result<()> {
        let x = match &self.x_again {
            Some(again) => {
                let x = self.x_again_segments.col(workspace.scratch);
                again.run(target, &quant_io(io.x, Quantized::NONE, x, io.input_slot, workspace, self.backward_spare()))?;
                x
            }
            None => self.saved.col(io.saved),
        };
        let gemm = GemmIo {
            x: dy.data, x_scale: dy.scale, w: x.data, w_scale: x.scale,
            bias: DevPtr::null(), d: io.dw, workspace: workspace.gemm,
        };
        wgrad.run(target, &gemm)
    }
}

#[inline]
fn quant_io<'a>(x: DevPtr<'a>, row: Quantized<'a>, col: Quantized<'a>, slot: Slot<'a>, workspace: Workspace<'a>, spare: usize) -> QuantIo<'a> {
    QuantIo {
        x, row, col,
        scale: slot.scale,
        amax: slot.amax,
        noop: DevPtr::null(),
        dbias: DevPtr::null(),
        scratch: workspace.scratch.offset(spare),
        counters: workspace.counters,
    }
}

/// The three GEMMs of a layer.
struct Problems<'a> {
    recipe: &'a Recipe,
    key: &'a LinearKey,
    in_features: usize,
    out_features: usize,
}

impl Problems<'_> {
    fn operand(&self, fp8: Fp8, block: Block, ld: usize) -> Operand {
        let scale = match block {
            Block::Tensor => ScaleMode::Tensor,
            Block::Row => ScaleMode::Block1d,
            Block::Square => ScaleMode::Block2d,
        };
        Operand { dtype: fp8.into(), scale, ld, k_outermost: false }
    }

    fn fprop(&self) -> Problem {
        let &Self { recipe, key, in_features, out_features } = self;
        Problem {
            m: key.rows,
            n: out_features,
            k: in_features,
            x: self.operand(recipe.fwd, recipe.input.block, in_features),
            w: self.operand(recipe.fwd, recipe.weight.block, in_features),
            d: key.activation.into(),
            ldd: out_features,
            bias: key.bias.then_some(LinearPlan::bias_dtype(key.activation)),
            accumulate: false,
            fast_accumulation: !recipe.split_accumulator.fprop,
            alignment: 256, // torch and te_fast allocate on at least that
        }
    }

    fn dgrad(&self) -> Problem {
        let &Self { recipe, key, in_features, out_features } = self;
        Problem {
            m: key.rows,
            n: in_features,
            k: out_features,
            x: self.operand(recipe.bwd, recipe.grad.block, out_features),
            w: self.operand(recipe.fwd, recipe.weight.block, out_features.next_multiple_of(GRANULE)),
            d: key.activation.into(),
            ldd: in_features,
            bias: None,
            accumulate: false,
            fast_accumulation: !recipe.split_accumulator.dgrad,
            alignment: 256, // torch and te_fast allocate on at least that
        }
    }

    /// The contraction runs over the rows, padded with zeros to what FP8 takes.
    fn wgrad(&self, d: DType, accumulate: bool, alignment: u16) -> Problem {
        let &Self { recipe, key, in_features, out_features } = self;
        let rows = key.rows.next_multiple_of(GRANULE);
        Problem {
            m: out_features,
            n: in_features,
            k: rows,
            x: self.operand(recipe.bwd, recipe.grad.block, rows),
            w: self.operand(recipe.fwd, recipe.input.block, rows),
            d,
            ldd: in_features,
            bias: None,
            accumulate,
            fast_accumulation: !recipe.split_accumulator.wgrad,
            alignment,
        }
    }
}

fn check_recipe(recipe: &Recipe, key: &LinearKey) -> Result<()> {
    if recipe.backward_override != BackwardOverride::None {
        return Err(Error::unsupported(OP, "the recipe's backward_override is not supported yet; leave it at None"));
    }
    if recipe.is_delayed() && key.needs.save_original_input {
        return Err(Error::value(OP, "save_original_input=True does not go with delayed scaling, whose scale changes before backward; use current or block scaling"));
    }
    Ok(())
}

/// Transformer Engine's rule, with the remedy: leading dimensions of 8, the last of 16.
fn check_sizes(key: &LinearKey, in_features: usize, out_features: usize) -> Result<()> {
    if !in_features.is_multiple_of(GRANULE) {
        return Err(Error::shape(OP, "in_features", format!("a multiple of {GRANULE} for FP8 (pad the features by {})", GRANULE - in_features % GRANULE), in_features));
    }
    let granule = if key.needs.input_grad { GRANULE } else { ROW_GRANULE };
    if !out_features.is_multiple_of(granule) {
        return Err(Error::shape(OP, "out_features", format!("a multiple of {granule} for FP8 (pad the features by {})", granule - out_features % granule), out_features));
    }
    if !key.any_rows && !key.rows.is_multiple_of(ROW_GRANULE) {
        let missing = ROW_GRANULE - key.rows % ROW_GRANULE;
        return Err(Error::shape(
            OP,
            "the product of the input's leading dimensions",
            format!("a multiple of {ROW_GRANULE} for FP8 (append {missing} rows, or call te_fast.auto_pad(True))"),
            key.rows,
        ));
    }
    Ok(())
}
