//! Host kernels of `cuda/activation/activation_groups.cu` and `cuda/activation/activation_groups_backward.cu`: those of
//! the activation and of the cast, one after the other.

use half::bf16;
use te_fast_kernels::{Float, KernelId};

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::host::{activation, activation_backward, cast_groups};
use crate::ops::activation::{ActivationParams, ActivationPointers};
use crate::ops::activation_backward::{ActivationBackwardParams, ActivationBackwardPointers};
use crate::ops::activation_groups::ActivationGroupsParams;
use crate::ops::amax::ScaleNumbers;
use crate::ops::cast_groups::{CastGroupsParams, CastGroupsPointers};
use crate::ops::strips::StripPlan;

/// The host kernels walk without a plan.
const STRIPS: StripPlan = StripPlan::single_tiles(1, 1);
const INPUT: Float = Float::Bf16;

/// Runs `activation_*groups` and `activation_backward_*groups`.
///
/// # Errors
/// An id or a curve that does not take these parameters.
pub(crate) fn run(p: &ActivationGroupsParams<'_>, id: KernelId) -> Result<()> {
    let mut result = vec![bf16::ZERO; (p.cast.rows * p.cast.cols) as usize];
    let to = DevPtr::from_slice(&mut result);
    let cast = match id {
        KernelId::ActivationCastGroups(output) => {
            forward(p, to)?;
            KernelId::CastGroups(INPUT, output)
        }
        KernelId::ActivationCastBlockGroups(output) => {
            forward(p, to)?;
            KernelId::CastBlockGroups1d(INPUT, output)
        }
        KernelId::ActivationBackwardCastGroups(output) => {
            backward(p, to)?;
            KernelId::CastGroups(INPUT, output)
        }
        KernelId::ActivationBackwardCastBlockGroups(output) => {
            backward(p, to)?;
            KernelId::CastBlockGroups1d(INPUT, output)
        }
        _ => return Err(Error::state("activation_groups", id.symbol())),
    };
    let at = CastGroupsPointers { x: to, ..p.cast.at };
    cast_groups::run(&CastGroupsParams { at, ..p.cast }, cast)
}

fn forward<'a>(p: &ActivationGroupsParams<'a>, y: DevPtr<'a>) -> Result<()> {
    let at = ActivationPointers { x: p.cast.x, y, row_scale: p.row_scale, ..ActivationPointers::default() };
    let params = ActivationParams {
        at,
        rows: p.cast.rows,
        cols: p.cast.cols,
        ld_t: 0,
        constants: p.constants,
        strips: STRIPS,
        curve: p.curve,
        row_scale_kind: p.row_scale_kind,
        interleave: p.interleave,
        e5m2: 0,
        rule: ScaleNumbers::default(),
    };
    activation::run(&params, KernelId::ActivationGated(INPUT))
}

fn backward<'a>(p: &ActivationGroupsParams<'a>, dx: DevPtr<'a>) -> Result<()> {
    let at = ActivationBackwardPointers {
        dy: p.dy,
        x: p.cast.x,
        dx,
        row_scale: p.row_scale,
        row_scale_grad: p.row_scale_grad,
        ..ActivationBackwardPointers::default()
    };
    let params = ActivationBackwardParams {
        at,
        rows: p.cast.rows,
        cols: p.cast.cols / 2,
        ld_t: 0,
        constants: p.constants,
        strips: STRIPS,
        curve: p.curve,
        row_scale_kind: p.row_scale_kind,
        interleave: p.interleave,
        e5m2: 0,
        rule: ScaleNumbers::default(),
    };
    activation_backward::run(&params, KernelId::ActivationGatedBackward(INPUT))
}
