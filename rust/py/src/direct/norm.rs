//! Norms for direct use from Python: `te_fast.dispatch` wraps these.

use pyo3::prelude::*;
use te_fast_core::base::dtype::DType;
use te_fast_core::ops::norm::{NormPlan, NormPointers};
use te_fast_core::ops::norm_spec::{NormKind, NormSpec};
use te_fast_core::{Error, Float};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{check_apart, fp8_of, matrix, sized, start};
use crate::error::IntoPython;
use crate::torch::process::state;
use crate::torch::reader::view_of;

/// Which norm, and its constants.
#[derive(FromPyObject)]
pub(crate) struct NormArguments {
    #[pyo3(item(0))]
    normalization: String,
    #[pyo3(item(1))]
    eps: f32,
    #[pyo3(item(2))]
    pub(crate) zero_centered_gamma: bool,
}

impl NormArguments {
    pub(crate) fn kind(&self, op: &'static str) -> PyResult<NormKind> {
        match self.normalization.as_str() {
            "LayerNorm" => Ok(NormKind::LayerNorm),
            "RMSNorm" => Ok(NormKind::RmsNorm),
            other => {
                Err(Error::value(op, format_args!("normalization must be 'LayerNorm' or 'RMSNorm', got '{other}'")))
                    .python()
            }
        }
    }
}

/// Tensors to read in addition to `x`; `None` if absent.
#[derive(FromPyObject)]
pub(crate) struct InputArguments<'py> {
    #[pyo3(item(0))]
    gamma: Bound<'py, PyAny>,
    #[pyo3(item(1))]
    beta: Option<Bound<'py, PyAny>>,
    #[pyo3(item(2))]
    residual: Option<Bound<'py, PyAny>>,
    #[pyo3(item(3))]
    scale: Option<Bound<'py, PyAny>>,
    #[pyo3(item(4))]
    amax: Option<Bound<'py, PyAny>>,
    #[pyo3(item(5))]
    noop: Option<Bound<'py, PyAny>>,
}

/// Tensors to write; `None` for those that are not requested.
#[derive(FromPyObject)]
pub(crate) struct OutputArguments<'py> {
    #[pyo3(item(0))]
    high: Option<Bound<'py, PyAny>>,
    #[pyo3(item(1))]
    rowwise: Option<Bound<'py, PyAny>>,
    #[pyo3(item(2))]
    columnwise: Option<Bound<'py, PyAny>>,
    #[pyo3(item(3))]
    scale_inv: Option<Bound<'py, PyAny>>,
    #[pyo3(item(4))]
    sum: Option<Bound<'py, PyAny>>,
    #[pyo3(item(5))]
    mean: Option<Bound<'py, PyAny>>,
    #[pyo3(item(6))]
    rstd: Option<Bound<'py, PyAny>>,
}

impl<'py> OutputArguments<'py> {
    fn all(&self) -> [Option<&Bound<'py, PyAny>>; 6] {
        [&self.high, &self.rowwise, &self.columnwise, &self.sum, &self.mean, &self.rstd].map(Option::as_ref)
    }

    /// Checks that outputs that belong together are requested together.
    fn check(&self, op: &'static str, kind: NormKind, residual: bool) -> te_fast_core::Result<()> {
        if self.sum.is_some() != residual {
            return Err(Error::value(op, "a residual needs a sum to write, and a sum a residual"));
        }
        if self.mean.is_some() != (self.rstd.is_some() && kind == NormKind::LayerNorm) {
            return Err(Error::value(op, "LayerNorm writes mean and rstd or neither, RMSNorm rstd or nothing"));
        }
        Ok(())
    }
}

/// Type of gamma, which the other parameters share.
pub(crate) fn weight_of(call: &DirectCall<'_, '_>, gamma: &Bound<'_, PyAny>) -> PyResult<Float> {
    call.float(&matrix(call, gamma, "gamma")?, "gamma")
}

/// Writes the norm of `x` to `outputs`.
#[pyfunction]
#[pyo3(signature = (x, function, inputs, outputs, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn norm(
    x: &Bound<'_, PyAny>,
    function: NormArguments,
    inputs: InputArguments<'_>,
    outputs: OutputArguments<'_>,
) -> PyResult<()> {
    let (py, op) = (x.py(), "norm");
    let state = state(py)?;
    let kind = function.kind(op)?;
    let tensors = [Some(x), Some(&inputs.gamma), inputs.beta.as_ref(), inputs.residual.as_ref()];
    let x = view_of(&state.reader, x, "x").python()?;
    let call = start(state, py, op, &x)?;
    check_apart(state, op, &tensors, &outputs.all())?;
    let (rows, cols) = call.matrix(&x, "x")?;
    let (input, weight) = (call.float(&x, "x")?, weight_of(&call, &inputs.gamma)?);
    let fp8 = fp8_of(&call, [&outputs.rowwise, &outputs.columnwise])?;
    outputs.check(op, kind, inputs.residual.is_some()).python()?;
    let limits = state.dispatcher(py)?.0.limits(call.place.device).python()?;
    let plan = NormPlan::new(NormSpec {
        rows,
        cols,
        kind,
        input,
        weight,
        zero_centered_gamma: function.zero_centered_gamma,
        eps: function.eps,
        residual: inputs.residual.is_some(),
        high: outputs.high.is_some(),
        fp8,
        rowwise: outputs.rowwise.is_some(),
        columnwise: outputs.columnwise.is_some(),
        stats: outputs.rstd.is_some(),
        measures: None,
        limits,
    })
    .python()?;
    let (byte, high, count) = (fp8.map_or(DType::U8, DType::from), DType::from(input), rows * cols);
    let one = |tensor, what| sized(&call, tensor, what, DType::F32, 1);
    let buffers = NormPointers {
        x: x.data(),
        residual: sized(&call, inputs.residual.as_ref(), "residual", high, count)?,
        sum: sized(&call, outputs.sum.as_ref(), "the sum", high, count)?,
        gamma: sized(&call, Some(&inputs.gamma), "gamma", weight.into(), cols)?,
        beta: sized(&call, inputs.beta.as_ref(), "beta", weight.into(), cols)?,
        y: sized(&call, outputs.high.as_ref(), "the output", high, count)?,
        mean: sized(&call, outputs.mean.as_ref(), "the mean", DType::F32, rows)?,
        rstd: sized(&call, outputs.rstd.as_ref(), "rstd", DType::F32, rows)?,
        out: sized(&call, outputs.rowwise.as_ref(), "the row layout", byte, plan.out_bytes())?,
        out_t: sized(&call, outputs.columnwise.as_ref(), "the transposed output", byte, plan.out_t_bytes())?,
        scale: one(inputs.scale.as_ref(), "scale")?,
        scale_inv: one(outputs.scale_inv.as_ref(), "scale_inv")?,
        amax: one(inputs.amax.as_ref(), "amax")?,
        noop: one(inputs.noop.as_ref(), "noop")?,
        ..NormPointers::default()
    };
    call.run(0, |target, _| plan.run(target, &buffers))
}
