//! Products of groups of rows for direct use from Python: `te_fast.dispatch` wraps this.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::grouped_gemm::{BLOCK, GroupedGemmPointers, GroupedGemmSpec, GroupedKind, GroupedScaling};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{check_apart, contiguous, matrix, sized};
use crate::error::IntoPython;
use crate::torch::process::state;

const OP: &str = "grouped gemm";

/// A tensor and its inverse scales.
type Scaled<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// `d (+)= a · bᵀ` of every group's rows.
#[pyfunction]
#[pyo3(signature = (a, b, d, splits, bias, weight_gradient, accumulate, fast_accumulation, align, /))]
#[expect(clippy::too_many_arguments, reason = "called by one wrapper in Python")]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn grouped_gemm<'py>(
    a: Scaled<'py>,
    b: Scaled<'py>,
    d: &Bound<'py, PyAny>,
    splits: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    weight_gradient: bool,
    accumulate: bool,
    fast_accumulation: bool,
    align: i64,
) -> PyResult<()> {
    let (py, state) = (d.py(), state(d.py())?);
    let result = contiguous(state, d, OP, "d")?;
    let call = DirectCall::new(state, py, OP, result.device())?;
    let (a_view, b_view) = (matrix(&call, &a.0, "a")?, matrix(&call, &b.0, "b")?);
    let split_view = matrix(&call, splits, "splits")?;
    call.dtype(&split_view, "splits", DType::I64)?;
    let (groups, fp8) = (split_view.numel(), matches!(a_view.dtype(), DType::E4m3 | DType::E5m2));
    let kind = if weight_gradient { GroupedKind::WeightGradient } else { GroupedKind::Rows };
    let (rows, n, k) = sizes(kind, fp8, &a_view, &b_view)?;
    check_shapes(&call, kind, [&a_view, &b_view, &result], [groups, rows, n, k])?;
    check_apart(state, OP, &[Some(&a.0), Some(&b.0), Some(splits), bias], &[Some(d)])?;

    let given = a.1.as_ref().map(|scales| contiguous(state, scales, OP, "the scales of a")).transpose()?;
    let (scaling, counts, scale_pitch) = scales(kind, fp8, given.as_ref(), groups, rows, n, k);
    let bias_dtype = bias.map(|bias| contiguous(state, bias, OP, "bias")).transpose()?.map(|bias| bias.dtype());
    let spec = GroupedGemmSpec {
        kind,
        groups,
        rows,
        counted: rows,
        n,
        k,
        a: a_view.dtype(),
        b: b_view.dtype(),
        d: result.dtype(),
        scaling,
        bias: bias_dtype,
        accumulate,
        b_k_outermost: false,
        fast_accumulation,
        align: usize::try_from(align).unwrap_or(0),
        scale_pitch,
    };
    let plan = state.dispatcher(py)?.0.grouped_gemm(result.device(), spec).python()?;
    check_scales(&call, scaling, [(a.1.as_ref(), counts[0]), (b.1.as_ref(), counts[1])])?;
    let at = GroupedGemmPointers {
        a: a_view.data(),
        a_scale: call.pointer(a.1.as_ref())?,
        b: b_view.data(),
        b_scale: call.pointer(b.1.as_ref())?,
        splits: split_view.data(),
        bias: bias_dtype.map_or(Ok(DevPtr::null()), |dtype| sized(&call, bias, "bias", dtype, groups * n))?,
        d: result.data(),
        workspace: DevPtr::null(),
    };
    call.with_lane(0, |lane| plan.run(&mut lane.target, &GroupedGemmPointers { workspace: lane.workspace.gemm, ..at }))
}

/// Whether cuBLASLt's product of groups is taken on a GPU for operands of a type: `float16`, `bfloat16` or `fp8`.
#[pyfunction]
#[pyo3(signature = (index, operands, /))]
pub(crate) fn cublas_multiplies_groups(py: Python<'_>, index: u16, operands: &str) -> PyResult<bool> {
    let (state, device) = (state(py)?, Device::Cuda(index));
    let (scaling, grad, weight) = match operands {
        "float16" => (GroupedScaling::None, DType::F16, DType::F16),
        "bfloat16" => (GroupedScaling::None, DType::Bf16, DType::Bf16),
        "fp8" => (GroupedScaling::Tensor, DType::E5m2, DType::E4m3),
        _ => return Err(Error::value("grouped_gemm", format_args!("unknown operands {operands:?}"))).python(),
    };
    let spec = GroupedGemmSpec {
        kind: GroupedKind::Rows,
        groups: 2,
        rows: 2 * BLOCK,
        counted: 2 * BLOCK,
        n: BLOCK,
        k: BLOCK,
        a: weight,
        b: weight,
        d: if scaling == GroupedScaling::None { weight } else { DType::Bf16 },
        scaling,
        bias: None,
        accumulate: false,
        fast_accumulation: scaling == GroupedScaling::Tensor,
        b_k_outermost: false,
        align: BLOCK,
        scale_pitch: 0,
    };
    let input_grad =
        GroupedGemmSpec { a: grad, b_k_outermost: scaling == GroupedScaling::None, fast_accumulation: false, ..spec };
    let weight_grad = GroupedGemmSpec { kind: GroupedKind::WeightGradient, b_k_outermost: false, ..input_grad };
    let added = GroupedGemmSpec { accumulate: true, d: DType::F32, ..weight_grad };
    let _guard = state.guard(py, device)?;
    let mut dispatcher = state.dispatcher(py)?;
    for spec in [spec, input_grad, weight_grad, added] {
        if !dispatcher.0.cublas_multiplies(index, &spec).python()? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Rows, n and k.
fn sizes(kind: GroupedKind, fp8: bool, a: &TensorView<'_>, b: &TensorView<'_>) -> PyResult<(usize, usize, usize)> {
    match (kind, a.shape(), b.shape()) {
        (GroupedKind::Rows, &[rows, k], &[_, n, _]) => Ok((rows as usize, n as usize, k as usize)),
        (GroupedKind::WeightGradient, &[n, rows], &[k, _]) if fp8 => Ok((rows as usize, n as usize, k as usize)),
        (GroupedKind::WeightGradient, &[rows, n], &[_, k]) if !fp8 => Ok((rows as usize, n as usize, k as usize)),
        (_, a, b) => {
            let expected =
                "a [rows, k] and b [groups, n, k]; for a weight gradient [rows, n] and [rows, k], in FP8 transposed";
            Err(Error::shape(OP, "the operands", expected, format_args!("{a:?} and {b:?}"))).python()
        }
    }
}

/// B and D must have the shapes that go with A, and the splits.
fn check_shapes(
    call: &DirectCall<'_, '_>,
    kind: GroupedKind,
    [a, b, d]: [&TensorView<'_>; 3],
    sizes: [usize; 4],
) -> PyResult<()> {
    let [groups, rows, n, k] = sizes.map(|size| size as i64);
    let fp8 = a.dtype().size() == 1;
    let (b_shape, d_shape): (&[i64], &[i64]) = match kind {
        GroupedKind::Rows => (&[groups, n, k], &[rows, n]),
        GroupedKind::WeightGradient => (if fp8 { &[k, rows] } else { &[rows, k] }, &[groups, n, k]),
    };
    call.shape(b, "b", b_shape)?;
    call.shape(d, "d", d_shape)?;
    if k == 0 && kind == GroupedKind::Rows {
        return Err(Error::shape(OP, "a", "at least one column", format!("{:?}", a.shape()))).python();
    }
    Ok(())
}

/// FP8 operands have as many scales as their layout asks for, others none.
fn check_scales(
    call: &DirectCall<'_, '_>,
    scaling: GroupedScaling,
    given: [(Option<&Bound<'_, PyAny>>, usize); 2],
) -> PyResult<()> {
    for (scales, count) in given {
        match (scales, scaling) {
            (None, GroupedScaling::None) => {}
            (Some(scales), GroupedScaling::Tensor | GroupedScaling::Block) => {
                sized(call, Some(scales), "an operand's scales", DType::F32, count)?;
            }
            _ => return Err(Error::value(OP, "FP8 operands come with scales, others without")).python(),
        }
    }
    Ok(())
}

/// How the operands are scaled, how many scales each has, and the pitch of A's.
fn scales(
    kind: GroupedKind,
    fp8: bool,
    given: Option<&TensorView<'_>>,
    groups: usize,
    rows: usize,
    n: usize,
    k: usize,
) -> (GroupedScaling, [usize; 2], usize) {
    if !fp8 {
        return (GroupedScaling::None, [0; 2], 0);
    }
    if given.is_none_or(|given| given.shape().len() < 2) {
        return (GroupedScaling::Tensor, [groups; 2], 0);
    }
    let up4 = |count: usize| count.next_multiple_of(4);
    let blocks = k.div_ceil(BLOCK);
    match kind {
        GroupedKind::Rows => {
            let pitch = given.map_or(0, TensorView::cols).max(rows);
            (GroupedScaling::Block, [blocks * pitch, groups * n.div_ceil(BLOCK) * up4(blocks)], pitch)
        }
        GroupedKind::WeightGradient => {
            let strips = rows.div_ceil(BLOCK);
            (GroupedScaling::Block, [strips * up4(n), strips * up4(k)], 0)
        }
    }
}
