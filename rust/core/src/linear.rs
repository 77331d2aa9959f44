//! The FP8 linear layer: `y = x · Wᵀ + b` with quantised operands, forward and backward, as one plan.
//!
//! A plan fixes, for one key, which operands are quantised in which layouts, where their bytes lie in the memory of
//! a call, and which GEMMs run. A call brings pointers only.

use std::sync::Arc;

use te_fast_kernels::Float;

use crate::dispatch::{Dispatcher, Lane, Workspace};
use crate::error::Result;
use crate::gemm::{GemmIo, GemmPlan};
use crate::kernel::{DevPtr, Target};
use crate::linear_gemms::{Problems, check_plan, check_sizes};
pub use crate::linear_operands::Segments;
use crate::linear_operands::{OperandSpecs, UnpackedScales};
use crate::ops::cast_block::Unpack;
use crate::quantizer::{QuantIo, QuantPlan, Quantized};
use crate::recipe::{Needs, Recipe, Usage, Usages};
use crate::tensor::{DType, Device};
use crate::trace::{CLOCK, Stage};

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
    x_scales: Option<UnpackedScales>,
    x_again_segments: Segments,
    forward_scratch: usize,
    backward_scratch: usize,
}

impl LinearPlan {
    /// Plans calls of a layer with `in_features` and `out_features` under `recipe`. The device must be current.
    ///
    /// # Errors
    /// Sizes that FP8 GEMMs cannot take (naming the padding needed), or what the device or cuBLAS lacks.
    pub fn new(
        dispatcher: &mut Dispatcher,
        recipe: &Recipe,
        key: LinearKey,
        in_features: usize,
        out_features: usize,
    ) -> Result<Self> {
        check_plan(recipe, &key)?;
        check_sizes(recipe, &key, in_features, out_features)?;
        let LinearKey { device, needs, .. } = key;
        let processors = dispatcher.multiprocessors(device)?;
        let usages = Usages::of_linear(recipe, needs, false);
        let spec = OperandSpecs { recipe, key: &key, usages, in_features, out_features, processors };
        let (x, w, dy, x_again) = (spec.x()?, spec.w()?, spec.dy()?, spec.x_again()?);

        let problems = Problems { recipe, key: &key, in_features, out_features };
        let fprop = dispatcher.gemm(device, problems.fprop())?;
        let dgrad = needs.input_grad.then(|| dispatcher.gemm(device, problems.dgrad())).transpose()?;
        let wgrad = needs
            .weight_grad
            .then(|| dispatcher.gemm(device, problems.wgrad(key.weight.into(), false, 256)))
            .transpose()?;

        let x_row = Segments::behind(0, &x, Usage { rowwise: true, columnwise: false });
        let saved = Segments::behind(0, &x, Usage { rowwise: false, columnwise: usages.input().columnwise });
        let weight = Segments::behind(0, &w, usages.weight());
        let optional = |plan: &Option<QuantPlan>, start, usage| {
            plan.as_ref().map_or_else(Segments::default, |plan| Segments::behind(start, plan, usage))
        };
        let mut dy_segments = optional(&dy, 0, usages.grad_output());
        let x_scales = UnpackedScales::behind(&mut dy_segments, &x);
        let x_again_segments = optional(&x_again, dy_segments.bytes, OperandSpecs::AGAIN);
        let forward_scratch = x_row.bytes + x.scratch_bytes().max(w.scratch_bytes());
        let backward_scratch = x_again_segments.bytes.max(dy_segments.bytes)
            + dy.as_ref().map_or(0, QuantPlan::scratch_bytes).max(x_again.as_ref().map_or(0, QuantPlan::scratch_bytes));
        Ok(Self {
            key,
            recipe: *recipe,
            in_features,
            out_features,
            x,
            w,
            dy,
            x_again,
            fprop,
            dgrad,
            wgrad,
            x_row,
            saved,
            weight,
            dy_segments,
            x_scales,
            x_again_segments,
            forward_scratch,
            backward_scratch,
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

    /// Elements of the input.
    #[must_use]
    pub fn input_elements(&self) -> usize {
        self.key.rows * self.in_features
    }

    /// Columns of the output.
    #[must_use]
    pub fn out_cols(&self) -> usize {
        self.out_features
    }

    /// Where the quantised weight's layouts lie in a buffer of the layer's.
    #[must_use]
    pub fn weight_segments(&self) -> Segments {
        self.weight
    }

    /// Bytes of the quantised gradient and of what the weight's gradient reads beside it, for a caller that keeps it.
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
            x: row.data,
            x_scale: row.scale,
            w: weight.data,
            w_scale: weight.scale,
            bias: io.bias,
            d: io.y,
            workspace: workspace.gemm,
            ..GemmIo::NONE
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
            let packed = self.saved.col(io.saved).scale;
            let unpack = self.x_scales.map_or(Unpack::NONE, |scales| scales.unpack(packed, buffer));
            dy.run_unpacking(target, &dy_io, unpack)?;
        }
        if let Some(dgrad) = &self.dgrad {
            let weight = io.weight.segments.col(io.weight.data);
            let gemm = GemmIo {
                x: dy_row.data,
                x_scale: dy_row.scale,
                w: weight.data,
                w_scale: weight.scale,
                d: io.dx,
                workspace: workspace.gemm,
                ..GemmIo::NONE
            };
            dgrad.run(target, &gemm)?;
        }
        match wgrad {
            Some(wgrad) if !io.dw.is_null() => self.run_weight_grad(target, workspace, wgrad, io, buffer),
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
        self.run_weight_grad(target, *workspace, wgrad, io, io.kept_dy)
    }

    /// The GEMM of a weight gradient that goes into a buffer of the caller's: `main_grad`, added or set.
    ///
    /// # Errors
    /// See [`Dispatcher::gemm`].
    pub fn weight_grad_plan(
        &self,
        dispatcher: &mut Dispatcher,
        d: DType,
        accumulate: bool,
        address: usize,
    ) -> Result<Arc<GemmPlan>> {
        let problems = Problems {
            recipe: &self.recipe,
            key: &self.key,
            in_features: self.in_features,
            out_features: self.out_features,
        };
        let alignment = 1_usize << address.trailing_zeros().min(8);
        dispatcher.gemm(self.key.device, problems.wgrad(d, accumulate, alignment as u16))
    }

    fn dy_layouts<'a>(&self, buffer: DevPtr<'a>) -> (Quantized<'a>, Quantized<'a>) {
        (self.dy_segments.row(buffer), self.dy_segments.col(buffer))
    }

    fn run_weight_grad(
        &self,
        target: &mut Target<'_>,
        workspace: Workspace<'_>,
        wgrad: &GemmPlan,
        io: &Backward<'_>,
        buffer: DevPtr<'_>,
    ) -> Result<()> {
        let (_, dy) = self.dy_layouts(buffer);
        let x = if let Some(again) = &self.x_again {
            let x = self.x_again_segments.col(workspace.scratch);
            again.run(target, &quant_io(io.x, Quantized::NONE, x, io.input_slot, workspace, self.backward_spare()))?;
            x
        } else {
            let kept = self.saved.col(io.saved);
            Quantized { scale: self.x_scales.map_or(kept.scale, |scales| scales.of(buffer)), ..kept }
        };
        let gemm = GemmIo {
            x: dy.data,
            x_scale: dy.scale,
            w: x.data,
            w_scale: x.scale,
            d: io.dw,
            workspace: workspace.gemm,
            ..GemmIo::NONE
        };
        wgrad.run(target, &gemm)
    }
}

#[inline]
fn quant_io<'a>(
    x: DevPtr<'a>,
    row: Quantized<'a>,
    col: Quantized<'a>,
    slot: Slot<'a>,
    workspace: Workspace<'a>,
    spare: usize,
) -> QuantIo<'a> {
    QuantIo {
        x,
        row,
        col,
        scale: slot.scale,
        amax: slot.amax,
        noop: DevPtr::null(),
        dbias: DevPtr::null(),
        scratch: workspace.scratch.offset(spare),
        counters: workspace.counters,
    }
}
