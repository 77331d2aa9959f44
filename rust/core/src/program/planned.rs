//! The launches of a program for one row count: plans, and pointers as numbers of a call's address table.

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::gemm::plan::GemmPlan;
use crate::gemm::problem::GemmPointers;
use crate::launch::target::Target;
use crate::ops::activation::{ActivationPlan, ActivationPointers};
use crate::ops::activation_backward::{ActivationBackwardPlan, ActivationBackwardPointers};
use crate::ops::activation_groups::{ActivationGroupsPlan, ActivationGroupsPointers};
use crate::ops::affine::{AffinePlan, AffinePointers};
use crate::ops::cast::{CastPlan, CastPointers};
use crate::ops::cast_block::unpack_scales;
use crate::ops::dequantize::{DequantizePlan, DequantizePointers};
use crate::ops::grouped_gemm::{GroupedGemmPlan, GroupedGemmPointers};
use crate::ops::handover::{self, HandoverEntry};
use crate::ops::norm::{NormPlan, NormPointers};
use crate::ops::norm_backward::{NormBackwardPlan, NormBackwardPointers};
use crate::ops::route::{RoutePlan, RoutePointers};
use crate::ops::router::{RouterBwdPointers, RouterPlan, RouterPointers};
use crate::ops::sum_groups::{SumGroupsPlan, SumGroupsPointers};
use crate::ops::transpose::{TransposePlan, TransposePointers};
use crate::program::bindings::Bindings;
use crate::program::chain::OP;
use crate::program::port::Cell;
use crate::program::weight_grad::WeightGradPlan;
use crate::quant::quantizer::{QuantPlan, QuantPointers};

/// The launch of a step.
#[derive(Debug)]
pub(crate) enum Planned {
    Quantize(QuantPlan, QuantPointers<Cell>),
    Weight(QuantPlan, QuantPointers<Cell>),
    Gemm(Arc<GemmPlan>, GemmPointers<Cell>),
    /// A linear op's weight gradient, by the call's plan if it has one.
    WeightGrad(usize, Option<WeightGradPlan>, GemmPointers<Cell>, Cell),
    GroupedGemm(GroupedGemmPlan, GroupedGemmPointers<Cell>),
    SumGroups(SumGroupsPlan, SumGroupsPointers<Cell>),
    /// Scale, maximum, inverse scale and found maximum of each value.
    Handover(Vec<[Cell; 4]>),
    Norm(NormPlan, NormPointers<Cell>),
    NormBackward(NormBackwardPlan, NormBackwardPointers<Cell>),
    Activation(ActivationPlan, ActivationPointers<Cell>),
    ActivationBackward(ActivationBackwardPlan, ActivationBackwardPointers<Cell>),
    ActivationGroups(ActivationGroupsPlan, ActivationGroupsPointers<Cell>),
    Affine(AffinePlan, AffinePointers<Cell>),
    ColumnSums(CastPlan, CastPointers<Cell>),
    Dequantize(DequantizePlan, DequantizePointers<Cell>),
    Transpose(TransposePlan, TransposePointers<Cell>),
    Route(RoutePlan, RoutePointers<Cell>),
    Router(RouterPlan, RouterPointers<Cell>),
    RouterBackward(RouterPlan, RouterBwdPointers<Cell>),
    /// Number of scales that were saved as bytes, and the place of their floats.
    Unpack(usize, [Cell; 2]),
}

impl Planned {
    /// Launches it on the addresses of a call.
    pub(crate) fn run<'a>(&self, target: &mut Target<'_>, call: &Bindings<'_, 'a>) -> Result<()> {
        let get = |cell: &Cell| -> DevPtr<'a> { call.at(*cell) };
        match self {
            Self::Quantize(plan, at) => plan.run(target, &at.map(get)),
            Self::Weight(plan, at) => {
                let pointers = at.map(get);
                if pointers.x.is_null() {
                    return Ok(()); // the kept weight is used
                }
                target.trace.counters.weight_casts += 1;
                plan.run(target, &pointers)
            }
            Self::Gemm(plan, at) => plan.run(target, &at.map(get)),
            Self::GroupedGemm(plan, at) => plan.run(target, &at.map(get)),
            Self::SumGroups(plan, at) => plan.run(target, &at.map(get)),
            Self::WeightGrad(linear, own, at, splits) => match call.weight_grad(*linear).or(own.as_ref()) {
                Some(plan) => plan.run(target, &at.map(get), get(splits)),
                None => Err(Error::state(OP, "a weight gradient that waited was asked for without a plan")),
            },
            Self::Handover(values) => {
                let entries = values.iter().map(|value| {
                    let [scale, amax, inverse, found] = value.each_ref().map(get);
                    HandoverEntry { scale, amax, inverse, found }
                });
                handover::run(target, entries)
            }
            Self::Norm(plan, at) => plan.run(target, &at.map(get)),
            Self::NormBackward(plan, at) => plan.run(target, &at.map(get)),
            Self::Activation(plan, at) => plan.run(target, &at.map(get)),
            Self::ActivationBackward(plan, at) => plan.run(target, &at.map(get)),
            Self::ActivationGroups(plan, at) => plan.run(target, &at.map(get)),
            Self::Affine(plan, at) => plan.run(target, &at.map(get)),
            Self::ColumnSums(plan, at) => plan.run(target, &at.map(get)),
            Self::Dequantize(plan, at) => plan.run(target, &at.map(get)),
            Self::Transpose(plan, at) => plan.run(target, &at.map(get)),
            Self::Route(plan, at) => plan.run(target, &at.map(get)),
            Self::Router(plan, at) => plan.run(target, &at.map(get)),
            Self::RouterBackward(plan, at) => plan.run_bwd(target, &at.map(get)),
            Self::Unpack(count, [packed, unpacked]) => unpack_scales(target, get(packed), get(unpacked), *count),
        }
    }

    /// Whether it is a matrix product.
    pub(crate) const fn is_gemm(&self) -> bool {
        matches!(self, Self::Gemm(..) | Self::WeightGrad(..) | Self::GroupedGemm(..))
    }

    /// What multiplies, and why; empty if it is no product of two matrices, and on the host.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Gemm(plan, _) => plan.reason(),
            Self::WeightGrad(_, Some(plan), ..) => plan.reason(),
            Self::GroupedGemm(plan, _) => plan.reason(),
            _ => "",
        }
    }

    /// Whether every call launches it.
    pub(crate) const fn is_certain(&self) -> bool {
        !matches!(self, Self::Weight(..))
    }
}
