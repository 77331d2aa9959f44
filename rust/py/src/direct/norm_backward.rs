//! Gradients of norms for direct use from Python: `te_fast.dispatch` wraps these.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::ops::norm_backward::{NormBackwardPlan, NormBackwardPointers, NormBackwardSpec};
use te_fast_core::ops::norm_spec::NormKind;

use crate::direct::norm::{NormArguments, weight_of};
use crate::direct::tensors::{check_apart, sized, start};
use crate::error::IntoPython;
use crate::torch::process::state;
use crate::torch::reader::view_of;

/// Tensors to read in addition to `x`; `None` if absent.
#[derive(FromPyObject)]
pub(crate) struct InputArguments<'py> {
    #[pyo3(item(0))]
    dy: Bound<'py, PyAny>,
    #[pyo3(item(1))]
    gamma: Bound<'py, PyAny>,
    #[pyo3(item(2))]
    mean: Option<Bound<'py, PyAny>>,
    #[pyo3(item(3))]
    rstd: Bound<'py, PyAny>,
    #[pyo3(item(4))]
    add: Option<Bound<'py, PyAny>>,
}

/// Tensors to write; `None` for those that are not requested.
#[derive(FromPyObject)]
pub(crate) struct OutputArguments<'py> {
    #[pyo3(item(0))]
    dx: Option<Bound<'py, PyAny>>,
    #[pyo3(item(1))]
    dgamma: Option<Bound<'py, PyAny>>,
    #[pyo3(item(2))]
    dbeta: Option<Bound<'py, PyAny>>,
}

/// Writes the gradients of the norm of `x` to `outputs`.
#[pyfunction]
#[pyo3(signature = (x, function, inputs, outputs, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn norm_backward(
    x: &Bound<'_, PyAny>,
    function: NormArguments,
    inputs: InputArguments<'_>,
    outputs: OutputArguments<'_>,
) -> PyResult<()> {
    let (py, op) = (x.py(), "norm_backward");
    let state = state(py)?;
    let kind = function.kind(op)?;
    let [dy, gamma, rstd] = [&inputs.dy, &inputs.gamma, &inputs.rstd].map(Some);
    let tensors = [Some(x), dy, gamma, rstd, inputs.mean.as_ref(), inputs.add.as_ref()];
    let x = view_of(&state.reader, x, "x").python()?;
    let call = start(state, py, op, &x)?;
    check_apart(state, op, &tensors, &[&outputs.dx, &outputs.dgamma, &outputs.dbeta].map(Option::as_ref))?;
    let (rows, cols) = call.matrix(&x, "x")?;
    let (input, weight) = (call.float(&x, "x")?, weight_of(&call, &inputs.gamma)?);
    if inputs.mean.is_some() != (kind == NormKind::LayerNorm) {
        return Err(Error::value(op, "LayerNorm needs the forward's mean, RMSNorm has none")).python();
    }
    let limits = state.dispatcher(py)?.0.limits(call.place.device).python()?;
    let plan = NormBackwardPlan::new(NormBackwardSpec {
        rows,
        cols,
        kind,
        input,
        weight,
        zero_centered_gamma: function.zero_centered_gamma,
        add: inputs.add.is_some(),
        dx: outputs.dx.is_some(),
        dgamma: outputs.dgamma.is_some(),
        dbeta: outputs.dbeta.is_some(),
        limits,
    })
    .python()?;
    let (high, count) = (DType::from(input), rows * cols);
    let buffers = NormBackwardPointers {
        dy: sized(&call, Some(&inputs.dy), "dy", high, count)?,
        x: x.data(),
        gamma: sized(&call, Some(&inputs.gamma), "gamma", weight.into(), cols)?,
        mean: sized(&call, inputs.mean.as_ref(), "the mean", DType::F32, rows)?,
        rstd: sized(&call, Some(&inputs.rstd), "rstd", DType::F32, rows)?,
        add: sized(&call, inputs.add.as_ref(), "add", high, count)?,
        dx: sized(&call, outputs.dx.as_ref(), "the gradient of x", high, count)?,
        dgamma: sized(&call, outputs.dgamma.as_ref(), "the gradient of gamma", weight.into(), cols)?,
        dbeta: sized(&call, outputs.dbeta.as_ref(), "the gradient of beta", weight.into(), cols)?,
        ..NormBackwardPointers::default()
    };
    call.with_lane(plan.partial_bytes(), |lane| {
        let (partial, counters) = (lane.workspace.scratch, lane.workspace.counters);
        plan.run(&mut lane.target, &NormBackwardPointers { partial, counters, ..buffers })
    })
}
