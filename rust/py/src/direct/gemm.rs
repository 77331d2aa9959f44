//! Matrix products for direct use from Python: `te_fast.dispatch` wraps this.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::gemm::problem::{Epilogue, Factor, GemmPointers, Operand, Problem, ScaleMode};
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{check_apart, contiguous, fp8_named};
use crate::error::IntoPython;
use crate::torch::process::{State, state};

/// One operand of [`gemm`]: (tensor, "e4m3" | "e5m2" | None, scales or None, scale mode 0-3, k outermost).
type OperandArguments<'py> = (Bound<'py, PyAny>, Option<String>, Option<Bound<'py, PyAny>>, u8, bool);

/// `d (+)= x · wᵀ + bias`.
#[pyfunction]
#[pyo3(signature = (x, w, d, bias, accumulate, fast_accumulation, exact, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn gemm<'py>(
    x: OperandArguments<'py>,
    w: OperandArguments<'py>,
    d: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    accumulate: bool,
    fast_accumulation: bool,
    exact: bool,
) -> PyResult<()> {
    let (py, state) = (d.py(), state(d.py())?);
    let result = contiguous(state, d, "gemm", "d")?;
    let device = result.device();
    let (x_view, x_operand, m, k) = operand(state, &x, "x")?;
    let (w_view, w_operand, n, w_k) = operand(state, &w, "w")?;
    let bias_view = bias.map(|bias| contiguous(state, bias, "gemm", "bias")).transpose()?;
    if k != w_k || result.rows() != m || result.cols() != n || bias_view.is_some_and(|bias| bias.numel() != n) {
        let got = format!("x {:?}, w {:?}, d {:?}", x_view.shape(), w_view.shape(), result.shape());
        return Err(Error::shape("gemm", "the operands", "x [m, k], w [n, k], out [m, n] and bias [n]", got)).python();
    }
    let mut others = [Some(x_view), Some(w_view), bias_view].into_iter().flatten().map(|view| view.device());
    if let Some(other) = others.find(|&other| other != device) {
        return Err(Error::device("gemm", "every operand", device, other)).python();
    }
    if exact {
        check_exact(device, [&x_operand, &w_operand])?;
    }
    check_apart(state, "gemm", &[Some(&x.0), Some(&w.0), bias], &[Some(d)])?;
    let problem = Problem {
        m,
        n,
        k,
        x: x_operand,
        w: w_operand,
        d: result.dtype(),
        ldd: n,
        bias: bias_view.map(|bias| bias.dtype()),
        alpha: Factor::ONE,
        epilogue: Epilogue::None,
        accumulate,
        fast_accumulation,
        exact,
        alignment: alignment([&x_view, &w_view, &result]),
    };
    let call = DirectCall::new(state, py, "gemm", device)?;
    let io = GemmPointers {
        x: x_view.data(),
        x_scale: call.pointer(x.2.as_ref())?,
        w: w_view.data(),
        w_scale: call.pointer(w.2.as_ref())?,
        bias: bias_view.map_or(DevPtr::null(), |bias| bias.data()),
        d: result.data(),
        ..GemmPointers::default()
    };
    let plan = state.dispatcher(py)?.0.gemm(device, problem).python()?;
    call.with_lane(0, |lane| {
        let workspace = lane.workspace.gemm;
        plan.run(&mut lane.target, &GemmPointers { workspace, ..io })
    })
}

/// The alignment of all tensors: the largest power of two up to 256.
fn alignment(tensors: [&TensorView<'_>; 3]) -> u16 {
    1 << tensors.map(|tensor| tensor.data().address().trailing_zeros().min(8)).into_iter().min().unwrap_or(0)
}

/// Only the host emulates tensor cores, for FP8.
fn check_exact(device: Device, operands: [&Operand; 2]) -> PyResult<()> {
    if device == Device::Cpu && operands.iter().all(|operand| operand.as_fp8().is_some()) {
        return Ok(());
    }
    let message = "exact=True is for FP8 operands on the CPU, which get the bits of Hopper's tensor cores";
    Err(Error::unsupported("gemm", message)).python()
}

fn operand<'a>(
    state: &State,
    arguments: &'a OperandArguments<'_>,
    what: &'static str,
) -> PyResult<(TensorView<'a>, Operand, usize, usize)> {
    let (tensor, fp8, scales, mode, k_outermost) = arguments;
    let view = contiguous(state, tensor, "gemm", what)?;
    let dtype = match fp8 {
        Some(name) => fp8_named(name)?.into(),
        None => view.dtype(),
    };
    if fp8.is_some() && view.dtype().size() != 1 {
        return Err(Error::dtype("gemm", what, "bytes for an FP8 operand", view.dtype())).python();
    }
    let (rows, cols) = (view.rows(), view.cols());
    let (outer, k) = if *k_outermost { (cols, rows) } else { (rows, cols) };
    let (scale, expected) = match mode {
        0 => (ScaleMode::None, 0),
        1 => (ScaleMode::Tensor, 1),
        2 => (ScaleMode::Block1d, scale_shape(BlockShape::OneDimensional, outer, k).iter().product()),
        _ => (ScaleMode::Block2d, scale_shape(BlockShape::TwoDimensional, outer, k).iter().product()),
    };
    let given = match scales {
        Some(scales) => {
            let scales = contiguous(state, scales, "gemm", "scale_inv")?;
            if scales.dtype() == DType::F32 && scales.device() == view.device() { scales.numel() } else { usize::MAX }
        }
        None => 0,
    };
    if given != expected || (scale == ScaleMode::None) != fp8.is_none() {
        return Err(Error::shape(
            "gemm",
            "scale_inv",
            format!("{expected} float32 on the operand's device ({what})"),
            format!("{given} elements"),
        ))
        .python();
    }
    Ok((view, Operand { dtype, scale, ld: cols, k_outermost: *k_outermost }, outer, k))
}
