//! Products of groups on the host: a matrix product of [`gemm`](super::gemm) for each.

use crate::base::dtype::DType;
use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::gemm::problem::{Epilogue, Factor, GemmPointers, Operand, Problem, ScaleMode};
use crate::host::gemm;
use crate::ops::grouped_gemm::{BLOCK, GroupedGemmPointers, GroupedGemmSpec, GroupedKind, GroupedScaling};

/// Rows of one group.
struct Span {
    start: usize,
    len: usize,
}

/// Runs `spec`.
///
/// # Errors
/// None: the plan has checked the types.
pub(crate) fn run(spec: &GroupedGemmSpec, at: &GroupedGemmPointers<DevPtr<'_>>) -> Result<()> {
    let (mut start, mut left) = (0, spec.counted);
    for (group, &split) in at.splits.slice::<i64>(spec.groups).iter().enumerate() {
        let len = usize::try_from(split).unwrap_or(0).min(spec.rows - start).min(left);
        left -= len;
        let span = Span { start, len };
        start = (start + len.next_multiple_of(spec.align)).min(spec.rows);
        match spec.kind {
            GroupedKind::Rows => rows(spec, at, group, &span)?,
            GroupedKind::WeightGradient => weight_gradient(spec, at, group, &span)?,
        }
    }
    Ok(())
}

fn operand(dtype: DType, scale: ScaleMode, ld: usize, k_outermost: bool) -> Operand {
    Operand { dtype, scale, ld, k_outermost }
}

fn rows(spec: &GroupedGemmSpec, at: &GroupedGemmPointers<DevPtr<'_>>, group: usize, span: &Span) -> Result<()> {
    let &GroupedGemmSpec { n, k, a, b, d, scaling, bias, fast_accumulation, .. } = spec;
    if span.len == 0 {
        return Ok(());
    }
    let blocks = k.div_ceil(BLOCK);
    // The scales of the group's rows, side by side as a product by itself has them.
    let mut row_scales = Vec::new();
    let (x_scale, w_scale, modes) = match scaling {
        GroupedScaling::None => (DevPtr::null(), DevPtr::null(), [ScaleMode::None; 2]),
        GroupedScaling::Tensor => (at.a_scale.offset(group * 4), at.b_scale.offset(group * 4), [ScaleMode::Tensor; 2]),
        GroupedScaling::Block => {
            let all = at.a_scale.slice::<f32>(blocks * spec.scale_pitch);
            let pitch = span.len.next_multiple_of(4);
            for line in all.chunks(spec.scale_pitch) {
                row_scales.extend_from_slice(&line[span.start..span.start + span.len]);
                row_scales.resize(row_scales.len().next_multiple_of(pitch), 0.0);
            }
            let one = n.div_ceil(BLOCK) * blocks.next_multiple_of(4) * 4;
            let modes = [ScaleMode::Block1d, ScaleMode::Block2d];
            (DevPtr::from_slice(&mut row_scales), at.b_scale.offset(group * one), modes)
        }
    };
    let problem = Problem {
        m: span.len,
        n,
        k,
        x: operand(a, modes[0], k, false),
        w: operand(b, modes[1], if spec.b_k_outermost { n } else { k }, spec.b_k_outermost),
        d,
        ldd: n,
        bias,
        alpha: Factor::ONE,
        epilogue: Epilogue::None,
        accumulate: false,
        fast_accumulation,
        exact: false,
        alignment: 16,
    };
    let io = GemmPointers {
        x: at.a.offset(span.start * k * a.size()),
        x_scale,
        w: at.b.offset(group * n * k * b.size()),
        w_scale,
        bias: at.bias.offset(bias.map_or(0, |bias| group * n * bias.size())),
        d: at.d.offset(span.start * n * d.size()),
        ..GemmPointers::default()
    };
    gemm::run(&problem, &io)
}

fn weight_gradient(
    spec: &GroupedGemmSpec,
    at: &GroupedGemmPointers<DevPtr<'_>>,
    group: usize,
    span: &Span,
) -> Result<()> {
    let &GroupedGemmSpec { n, k, a, b, d, scaling, accumulate, fast_accumulation, .. } = spec;
    if span.len == 0 && accumulate {
        return Ok(());
    }
    let mut scales = [Vec::new(), Vec::new()];
    let start_block = span.start / BLOCK;
    let blocks = span.len.div_ceil(BLOCK);
    let mut pointers = [at.a_scale, at.b_scale];
    let mode = match scaling {
        GroupedScaling::None => ScaleMode::None,
        GroupedScaling::Tensor => {
            pointers = pointers.map(|scale| scale.offset(group * 4));
            ScaleMode::Tensor
        }
        GroupedScaling::Block => {
            for ((scales, pointer), outer) in scales.iter_mut().zip(&mut pointers).zip([n, k]) {
                let pitch = outer.next_multiple_of(4);
                *scales = pointer.offset(start_block * pitch * 4).slice::<f32>(blocks * pitch).to_vec();
                *pointer = DevPtr::from_slice(scales);
            }
            ScaleMode::Block1d
        }
    };
    // FP8 operands have the rows innermost, others outermost.
    let outermost = scaling == GroupedScaling::None;
    let first = |dtype: DType, outer: usize| span.start * dtype.size() * if outermost { outer } else { 1 };
    let problem = Problem {
        m: n,
        n: k,
        k: span.len,
        x: operand(a, mode, if outermost { n } else { spec.rows }, outermost),
        w: operand(b, mode, if outermost { k } else { spec.rows }, outermost),
        d,
        ldd: k,
        bias: None,
        alpha: Factor::ONE,
        epilogue: Epilogue::None,
        accumulate,
        fast_accumulation,
        exact: false,
        alignment: 16,
    };
    let io = GemmPointers {
        x: at.a.offset(first(a, n)),
        x_scale: pointers[0],
        w: at.b.offset(first(b, k)),
        w_scale: pointers[1],
        d: at.d.offset(group * n * k * d.size()),
        ..GemmPointers::default()
    };
    gemm::run(&problem, &io)
}
