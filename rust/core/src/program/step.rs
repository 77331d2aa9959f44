//! One launch of a program: what runs, on which places.

use std::sync::Arc;

use crate::dispatch::Workspace;
use crate::error::Result;
use crate::gemm::{GemmIo, GemmPlan};
use crate::kernel::{DevPtr, Target};
use crate::linear::{Slot, WeightBuffer};
use crate::ops::activation::{ActivationBuffers, ActivationPlan};
use crate::ops::activation_backward::{ActivationBackwardBuffers, ActivationBackwardPlan};
use crate::ops::affine::AffinePlan;
use crate::ops::cast::{CastBuffers, CastPlan};
use crate::ops::cast_block::Unpack;
use crate::ops::dequantize::DequantizePlan;
use crate::ops::handover::{self, FOUND_AT, HandoverEntry, SCALE_AT};
use crate::ops::norm::{NormBuffers, NormPlan};
use crate::ops::norm_backward::{NormBackwardBuffers, NormBackwardPlan};
use crate::program::memory::{At, Resolver};
use crate::quantizer::{QuantIo, QuantPlan, Quantized};

/// One layout of a quantised tensor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QuantAt {
    pub(crate) data: At,
    pub(crate) scale: At,
}

impl QuantAt {
    fn resolve<'a>(&self, resolver: &Resolver<'a>) -> Quantized<'a> {
        Quantized { data: resolver.get(self.data), scale: resolver.get(self.scale) }
    }
}

/// Scales that were kept as bytes, which a cast writes out as f32.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnpackAt {
    pub(crate) packed: At,
    pub(crate) unpacked: At,
    pub(crate) count: usize,
}

/// An operand of a GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand {
    /// In high precision, or quantised with its scales.
    At(QuantAt),
    /// Row layout of a linear op's quantised weight.
    WeightRow(usize),
    /// Column layout of it.
    WeightCol(usize),
}

impl Operand {
    pub(crate) const fn high(at: At) -> Self {
        Self::At(QuantAt { data: at, scale: At::NONE })
    }

    fn resolve<'a>(&self, call: &Call<'a, '_>) -> Quantized<'a> {
        match *self {
            Self::At(at) => at.resolve(call.resolver),
            Self::WeightRow(linear) => {
                let weight = call.weights[linear];
                weight.segments.row(weight.data)
            }
            Self::WeightCol(linear) => {
                let weight = call.weights[linear];
                weight.segments.col(weight.data)
            }
        }
    }
}

/// A slot of delayed scaling.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SlotOf {
    /// Another recipe.
    None,
    /// A linear op's input.
    Input(usize),
    /// Its weight.
    Weight(usize),
    /// The gradient of its output.
    Grad(usize),
}

/// Delayed-scaling slots of one linear op; null pointers for other recipes.
#[derive(Clone, Copy, Debug)]
pub struct LinearSlots<'a> {
    /// The input's.
    pub input: Slot<'a>,
    /// The weight's.
    pub weight: Slot<'a>,
    /// The one of the output's gradient.
    pub grad: Slot<'a>,
}

impl LinearSlots<'_> {
    /// No slot.
    pub const NONE: Self = Self { input: Slot::NONE, weight: Slot::NONE, grad: Slot::NONE };
}

/// What a call brings beside addresses.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a, 'r> {
    pub(crate) resolver: &'r Resolver<'a>,
    pub(crate) workspace: Workspace<'a>,
    pub(crate) weights: &'r [WeightBuffer<'a>],
    /// Weights in high precision that must be quantised now.
    pub(crate) fresh: &'r [Option<DevPtr<'a>>],
    pub(crate) slots: &'r [LinearSlots<'a>],
    /// Plans of weight gradients that go elsewhere than into a tensor of the weight's type.
    pub(crate) weight_grads: &'r [Option<Arc<GemmPlan>>],
    /// Device float that makes weight quantisation a no-op when it is 1.
    pub(crate) skip_weight: DevPtr<'a>,
}

impl<'a> Call<'a, '_> {
    fn slot(&self, slot: SlotOf) -> Slot<'a> {
        let of = |linear: usize| self.slots.get(linear).copied().unwrap_or(LinearSlots::NONE);
        match slot {
            SlotOf::None => Slot::NONE,
            SlotOf::Input(linear) => of(linear).input,
            SlotOf::Weight(linear) => of(linear).weight,
            SlotOf::Grad(linear) => of(linear).grad,
        }
    }
}

/// FP8 output of a kernel that computes and quantises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fused {
    pub(crate) row: QuantAt,
    pub(crate) col: QuantAt,
    pub(crate) slot: SlotOf,
}

impl Fused {
    pub(crate) const NONE: Self = Self {
        row: QuantAt { data: At::NONE, scale: At::NONE },
        col: QuantAt { data: At::NONE, scale: At::NONE },
        slot: SlotOf::None,
    };
}

/// What a step launches.
#[derive(Debug)]
pub(crate) enum Action {
    Quantize {
        plan: QuantPlan,
        x: At,
        to: Fused,
        dbias: At,
        spare: At,
        unpack: UnpackAt,
    },
    Weight {
        linear: usize,
        plan: QuantPlan,
        spare: At,
    },
    Gemm {
        plan: Arc<GemmPlan>,
        x: Operand,
        w: Operand,
        bias: At,
        d: At,
        /// Row of the handover table whose linear op takes the result in FP8.
        handover: At,
    },
    /// Lays out the scales of values that GEMMs hand over in FP8, or raises their maxima.
    Handover {
        linears: Vec<usize>,
        table: At,
        after: bool,
    },
    WeightGrad {
        linear: usize,
        plan: Arc<GemmPlan>,
        dy: Operand,
        x: Operand,
        d: At,
    },
    Norm {
        plan: NormPlan,
        x: At,
        residual: At,
        sum: At,
        gamma: At,
        beta: At,
        y: At,
        mean: At,
        rstd: At,
        to: Fused,
    },
    NormBackward {
        plan: NormBackwardPlan,
        dy: At,
        x: At,
        gamma: At,
        mean: At,
        rstd: At,
        add: At,
        dx: At,
        dgamma: At,
        dbeta: At,
        partial: At,
    },
    Activation {
        plan: ActivationPlan,
        x: At,
        row_scale: At,
        y: At,
        to: Fused,
    },
    ActivationBackward {
        plan: ActivationBackwardPlan,
        dy: At,
        x: At,
        row_scale: At,
        dx: At,
        dbias: At,
        drow_scale: At,
        to: Fused,
        partial: At,
    },
    Affine {
        plan: AffinePlan,
        x: At,
        r: At,
        b: At,
        y: At,
    },
    ColumnSums {
        plan: CastPlan,
        x: At,
        out: At,
        partial: At,
    },
    Dequantize {
        plan: DequantizePlan,
        q: Operand,
        out: At,
    },
}

/// One launch.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    /// First and last op that it computes.
    pub(crate) ops: (usize, usize),
    /// What it is, for `explain`.
    pub(crate) text: &'static str,
}

impl Step {
    /// Launches it.
    pub(crate) fn run<'a>(&self, target: &mut Target<'_>, call: &Call<'a, '_>) -> Result<()> {
        let at = |at: &At| -> DevPtr<'a> { call.resolver.get(*at) };
        match &self.action {
            Action::Quantize { plan, x, to, dbias, spare, unpack } => {
                let UnpackAt { packed, unpacked, count } = unpack;
                let unpack = Unpack { packed: at(packed), unpacked: at(unpacked), count: *count };
                plan.run_unpacking(target, &quant_io(call, at(x), to, at(dbias), at(spare)), unpack)
            }
            Action::Weight { linear, plan, spare } => run_weight(target, call, *linear, plan, at(spare)),
            Action::Gemm { plan, x, w, bias, d, handover } => {
                let (d_scale, d_amax) = (at(handover).offset(SCALE_AT), at(handover).offset(FOUND_AT));
                plan.run(target, &GemmIo { d_scale, d_amax, ..gemm_io(call, x, w, at(bias), at(d)) })
            }
            Action::Handover { linears, table, after } => {
                let slots = linears.iter().map(|&linear| {
                    let slot = call.slot(SlotOf::Input(linear));
                    HandoverEntry { scale: slot.scale, amax: slot.amax }
                });
                handover::run(target, at(table), slots, *after)
            }
            Action::WeightGrad { linear, plan, dy, x, d } => {
                let plan = call.weight_grads.get(*linear).and_then(Option::as_ref).unwrap_or(plan);
                plan.run(target, &gemm_io(call, dy, x, DevPtr::null(), at(d)))
            }
            Action::Affine { plan, x, r, b, y } => plan.run(target, at(x), at(r), at(b), at(y)),
            Action::ColumnSums { plan, x, out, partial } => plan.run(
                target,
                &CastBuffers {
                    x: at(x),
                    dbias: at(out),
                    partial: at(partial),
                    counters: call.workspace.counters,
                    ..CastBuffers::NONE
                },
            ),
            Action::Dequantize { plan, q, out } => {
                let q = q.resolve(call);
                plan.run(target, q.data, at(out), q.scale)
            }
            Action::Norm { .. } | Action::NormBackward { .. } => self.run_norm(target, call),
            Action::Activation { .. } | Action::ActivationBackward { .. } => self.run_activation(target, call),
        }
    }

    fn run_norm<'a>(&self, target: &mut Target<'_>, call: &Call<'a, '_>) -> Result<()> {
        let at = |at: &At| -> DevPtr<'a> { call.resolver.get(*at) };
        let counters = call.workspace.counters;
        match &self.action {
            Action::Norm { plan, x, residual, sum, gamma, beta, y, mean, rstd, to } => {
                let slot = call.slot(to.slot);
                plan.run(
                    target,
                    &NormBuffers {
                        x: at(x),
                        residual: at(residual),
                        sum: at(sum),
                        gamma: at(gamma),
                        beta: at(beta),
                        y: at(y),
                        mean: at(mean),
                        rstd: at(rstd),
                        out: at(&to.row.data),
                        out_t: at(&to.col.data),
                        scale: slot.scale,
                        scale_inv: scale_inv(call, to),
                        amax: slot.amax,
                        ..NormBuffers::NONE
                    },
                )
            }
            Action::NormBackward { plan, dy, x, gamma, mean, rstd, add, dx, dgamma, dbeta, partial } => plan.run(
                target,
                &NormBackwardBuffers {
                    dy: at(dy),
                    x: at(x),
                    gamma: at(gamma),
                    mean: at(mean),
                    rstd: at(rstd),
                    add: at(add),
                    dx: at(dx),
                    dgamma: at(dgamma),
                    dbeta: at(dbeta),
                    partial: at(partial),
                    counters,
                },
            ),
            _ => Ok(()),
        }
    }

    fn run_activation<'a>(&self, target: &mut Target<'_>, call: &Call<'a, '_>) -> Result<()> {
        let at = |at: &At| -> DevPtr<'a> { call.resolver.get(*at) };
        let counters = call.workspace.counters;
        match &self.action {
            Action::Activation { plan, x, row_scale, y, to } => {
                let slot = call.slot(to.slot);
                plan.run(
                    target,
                    &ActivationBuffers {
                        x: at(x),
                        row_scale: at(row_scale),
                        y: at(y),
                        out: at(&to.row.data),
                        out_t: at(&to.col.data),
                        scale: slot.scale,
                        scale_inv: scale_inv(call, to),
                        amax: slot.amax,
                        ..ActivationBuffers::NONE
                    },
                )
            }
            Action::ActivationBackward { plan, dy, x, row_scale, dx, dbias, drow_scale, to, partial } => {
                let slot = call.slot(to.slot);
                plan.run(
                    target,
                    &ActivationBackwardBuffers {
                        dy: at(dy),
                        x: at(x),
                        row_scale: at(row_scale),
                        dx: at(dx),
                        dbias: at(dbias),
                        row_scale_grad: at(drow_scale),
                        out: at(&to.row.data),
                        out_t: at(&to.col.data),
                        scale: slot.scale,
                        scale_inv: scale_inv(call, to),
                        amax: slot.amax,
                        partial: at(partial),
                        counters,
                        ..ActivationBackwardBuffers::NONE
                    },
                )
            }
            _ => Ok(()),
        }
    }
}

/// Quantises a weight, unless the kept one serves.
fn run_weight<'a>(
    target: &mut Target<'_>,
    call: &Call<'a, '_>,
    linear: usize,
    plan: &QuantPlan,
    scratch: DevPtr<'a>,
) -> Result<()> {
    let Some(x) = call.fresh[linear] else { return Ok(()) };
    let to = call.weights[linear];
    let Slot { scale, amax } = call.slot(SlotOf::Weight(linear));
    let (row, col) = (to.segments.row(to.data), to.segments.col(to.data));
    let (noop, dbias, counters) = (call.skip_weight, DevPtr::null(), call.workspace.counters);
    target.trace.counters.weight_casts += 1;
    plan.run(target, &QuantIo { x, row, col, scale, amax, noop, dbias, scratch, counters })
}

/// Per-tensor scaling has one inverse scale, beside the row layout if there is one.
fn scale_inv<'a>(call: &Call<'a, '_>, to: &Fused) -> DevPtr<'a> {
    let scale = if to.row.data.is_some() { to.row.scale } else { to.col.scale };
    call.resolver.get(scale)
}

fn quant_io<'a>(call: &Call<'a, '_>, x: DevPtr<'a>, to: &Fused, dbias: DevPtr<'a>, scratch: DevPtr<'a>) -> QuantIo<'a> {
    let slot = call.slot(to.slot);
    QuantIo {
        x,
        row: to.row.resolve(call.resolver),
        col: to.col.resolve(call.resolver),
        scale: slot.scale,
        amax: slot.amax,
        noop: DevPtr::null(),
        dbias,
        scratch,
        counters: call.workspace.counters,
    }
}

fn gemm_io<'a>(call: &Call<'a, '_>, x: &Operand, w: &Operand, bias: DevPtr<'a>, d: DevPtr<'a>) -> GemmIo<'a> {
    let (x, w) = (x.resolve(call), w.resolve(call));
    GemmIo {
        x: x.data,
        x_scale: x.scale,
        w: w.data,
        w_scale: w.scale,
        bias,
        d,
        workspace: call.workspace.gemm,
        ..GemmIo::NONE
    }
}
