//! Cross entropy for Python: `te_fast.losses` calls it.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::cross_entropy::{
    CrossEntropyBwdPointers, CrossEntropyPlan, CrossEntropyPointers, CrossEntropySpec,
};

use crate::direct::call::{DirectCall, Input};
use crate::error::IntoPython;
use crate::torch::process::state;
use crate::torch::reader::view_of;

const OP: &str = "cross_entropy";

/// The losses of whole rows, and the statistics, or none for losses without backward.
#[pyfunction]
#[pyo3(signature = (logits, target, ignored, smoothing, keeps, /))]
pub(crate) fn cross_entropy_forward<'py>(
    logits: &Bound<'py, PyAny>,
    target: &Bound<'py, PyAny>,
    ignored: i64,
    smoothing: f32,
    keeps: bool,
) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
    let py = logits.py();
    let state = state(py)?;
    let (logits, target) = (Input::new(state, logits, "logits")?, Input::new(state, target, "the target")?);
    let (logits, target) = (logits.view(state)?, target.view(state)?);
    let call = DirectCall::new(state, py, OP, logits.device())?;
    let spec = read(&call, &logits, ignored, smoothing)?;
    let rows = check_target(&call, &target, &spec)?;
    let losses = call.empty(&[rows], DType::F32)?;
    let statistics = if keeps { Some(call.empty(&[2, rows], DType::F32)?) } else { None };
    let at = CrossEntropyPointers {
        logits: logits.data(),
        target: target.data(),
        losses: call.pointer(Some(&losses))?,
        statistics: call.pointer(statistics.as_ref())?,
    };
    let plan = CrossEntropyPlan::new(spec).python()?;
    call.run(0, |target, _| plan.run(target, &at))?;
    Ok((losses, statistics))
}

/// Statistics `[3, rows]` of parts of rows: the largest logit, the sum of exponentials and the sum of logits, both relative
/// to the largest one.
#[pyfunction]
#[pyo3(signature = (logits, smoothing, /))]
pub(crate) fn cross_entropy_part<'py>(logits: &Bound<'py, PyAny>, smoothing: f32) -> PyResult<Bound<'py, PyAny>> {
    let py = logits.py();
    let state = state(py)?;
    let logits = Input::new(state, logits, "logits")?;
    let logits = logits.view(state)?;
    let call = DirectCall::new(state, py, OP, logits.device())?;
    let spec = read(&call, &logits, 0, smoothing)?;
    let statistics = call.empty(&[3, spec.rows as i64], DType::F32)?;
    let null = DevPtr::null();
    let at = CrossEntropyPointers {
        logits: logits.data(),
        target: null,
        losses: null,
        statistics: call.pointer(Some(&statistics))?,
    };
    let plan = CrossEntropyPlan::new(spec).python()?;
    call.run(0, |target, _| plan.run(target, &at))?;
    Ok(statistics)
}

/// The gradient of logits in `dlogits`, which may be the logits. `grad` has one number for each row, or the same for all.
#[pyfunction]
#[pyo3(signature = (logits, target, statistics, grad, vocabulary, dlogits, ignored, smoothing, /))]
pub(crate) fn cross_entropy_backward(
    logits: &Bound<'_, PyAny>,
    target: &Bound<'_, PyAny>,
    statistics: &Bound<'_, PyAny>,
    grad: &Bound<'_, PyAny>,
    vocabulary: Option<&Bound<'_, PyAny>>,
    dlogits: &Bound<'_, PyAny>,
    ignored: i64,
    smoothing: f32,
) -> PyResult<()> {
    let py = logits.py();
    let state = state(py)?;
    let given = view_of(&state.reader, grad, "the gradient").python()?;
    let is_one = given.numel() > 1 && given.strides() == [0];
    let grad = if is_one { None } else { Some(Input::new(state, grad, "the gradient")?) };
    let grad = grad.as_ref().map_or(Ok(given), |grad| grad.view(state))?;
    let [logits, target, statistics, dlogits] =
        [(logits, "logits"), (target, "the target"), (statistics, "statistics"), (dlogits, "the logits' gradient")]
            .map(|(tensor, what)| Input::new(state, tensor, what));
    let (logits, target, statistics, dlogits) = (logits?, target?, statistics?, dlogits?);
    if dlogits.is_copy() {
        return Err(Error::value(OP, "the logits' gradient is written in place and must be contiguous")).python();
    }
    let (logits, target) = (logits.view(state)?, target.view(state)?);
    let (statistics, dlogits) = (statistics.view(state)?, dlogits.view(state)?);
    let vocabulary = Input::optional(state, vocabulary, "the vocabulary")?;
    let vocabulary = vocabulary.as_ref().map(|vocabulary| vocabulary.view(state)).transpose()?;
    let call = DirectCall::new(state, py, OP, logits.device())?;
    let spec = read(&call, &logits, ignored, smoothing)?;
    let rows = check_target(&call, &target, &spec)?;
    let (shape, parts): (&[i64], &[i64]) = (&[rows], &[2, rows]);
    for (view, what, shape, dtype) in [
        (&statistics, "statistics", parts, DType::F32),
        (&grad, "the gradient", shape, DType::F32),
        (&dlogits, "the logits' gradient", logits.shape(), logits.dtype()),
    ] {
        call.same_device(view, what)?;
        call.shape(view, what, shape)?;
        call.dtype(view, what, dtype)?;
    }
    if let Some(vocabulary) = &vocabulary {
        call.same_device(vocabulary, "the vocabulary")?;
        call.shape(vocabulary, "the vocabulary", &[])?;
        call.dtype(vocabulary, "the vocabulary", DType::F32)?;
    }
    let at = CrossEntropyBwdPointers {
        logits: logits.data(),
        target: target.data(),
        statistics: statistics.data(),
        grad: grad.data(),
        vocabulary: vocabulary.map_or(DevPtr::null(), |vocabulary| vocabulary.data()),
        dlogits: dlogits.data(),
    };
    let plan = CrossEntropyPlan::new(spec).python()?;
    call.run(0, |target, _| plan.run_bwd(target, &at, is_one))
}

/// The sizes of logits.
fn read(
    call: &DirectCall<'_, '_>,
    logits: &TensorView<'_>,
    ignored: i64,
    smoothing: f32,
) -> PyResult<CrossEntropySpec> {
    let (rows, columns) = call.matrix(logits, "logits")?;
    let input = call.float(logits, "logits")?;
    Ok(CrossEntropySpec { rows, columns, input, ignored, smoothing })
}

/// The number of rows, each of which must have a target.
fn check_target(call: &DirectCall<'_, '_>, target: &TensorView<'_>, spec: &CrossEntropySpec) -> PyResult<i64> {
    let rows = spec.rows as i64;
    call.same_device(target, "the target")?;
    call.shape(target, "the target", &[rows])?;
    call.dtype(target, "the target", DType::I64)?;
    Ok(rows)
}
