//! Maxima, and scales from maxima, separate from the cast, since ranks reduce the maxima in between.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::ops::amax::{AmaxPlan, AmaxPointers, ScaleRule, scale_from_amax};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{contiguous, fp8_named, single_f32};
use crate::error::IntoPython;
use crate::torch::process::state;

/// The largest magnitude of a tensor, one float32; NaN does not count.
#[pyfunction]
#[pyo3(signature = (x, /))]
pub(crate) fn amax<'py>(x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let state = state(x.py())?;
    let view = contiguous(state, x, "amax", "x")?;
    let Some(input) = view.dtype().as_float() else {
        return Err(Error::dtype("amax", "x", "float32, float16 or bfloat16", view.dtype())).python();
    };
    let call = DirectCall::new(state, x.py(), "amax", view.device())?;
    let processors = state.dispatcher(x.py())?.0.multiprocessors(view.device()).python()?;
    // The rule only matters for the scale, which is not computed here.
    let rule = ScaleRule { output: fp8_named("e4m3")?, eps: 0.0, pow2: false };
    let plan = AmaxPlan::new(view.numel(), input, rule, processors).python()?;
    let out = call.empty(&[1], DType::F32)?;
    let io = AmaxPointers { x: view.data(), amax: call.pointer(Some(&out))?, ..AmaxPointers::default() };
    call.with_lane(0, |lane| plan.run(&mut lane.target, &AmaxPointers { workspace: lane.workspace.counters, ..io }))?;
    Ok(out)
}

/// The scale of current scaling from a maximum, one float32.
#[pyfunction]
#[pyo3(signature = (amax, fp8, eps, pow2, /))]
pub(crate) fn scale_of_amax<'py>(
    amax: &Bound<'py, PyAny>,
    fp8: &str,
    eps: f32,
    pow2: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(amax.py())?;
    let view = contiguous(state, amax, "scale_of_amax", "amax")?;
    let from = single_f32(state, Some(amax), "amax", &view)?;
    let call = DirectCall::new(state, amax.py(), "scale_of_amax", view.device())?;
    let scale = call.empty(&[1], DType::F32)?;
    let to = call.pointer(Some(&scale))?;
    let rule = ScaleRule { output: fp8_named(fp8)?, eps, pow2 };
    call.run(0, |target, _| scale_from_amax(target, &rule, from, to, DevPtr::null()))?;
    Ok(scale)
}
