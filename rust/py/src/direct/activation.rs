//! Activation functions for direct use from Python: `te_fast.dispatch` wraps these.

use pyo3::prelude::*;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::activation::{Activation, ActivationPlan, ActivationPointers, ActivationSpec};
use te_fast_core::ops::activation_backward::{
    ActivationBackwardPlan, ActivationBackwardPointers, ActivationBackwardSpec,
};
use te_fast_core::{Error, Float};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{check_apart, fp8_of, matrix, sized, start};
use crate::error::IntoPython;
use crate::program::functions::{Constants, activation_of};
use crate::torch::process::state;
use crate::torch::reader::view_of;

/// A function with its constants.
#[derive(FromPyObject)]
pub(crate) struct FunctionArguments {
    #[pyo3(item(0))]
    name: String,
    #[pyo3(item(1))]
    pub(crate) interleave: usize,
    #[pyo3(item(2))]
    limit: f32,
    #[pyo3(item(3))]
    alpha: f32,
    #[pyo3(item(4))]
    offset: f32,
    #[pyo3(item(5))]
    beta1: f32,
    #[pyo3(item(6))]
    beta2: f32,
}

impl FunctionArguments {
    pub(crate) fn activation(&self, op: &'static str) -> PyResult<Activation> {
        let &Self { limit, alpha, offset, beta1, beta2, .. } = self;
        activation_of(op, &self.name, &Constants { limit, alpha, offset, beta1, beta2 })
    }
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
    column_sums: Option<Bound<'py, PyAny>>,
    #[pyo3(item(5))]
    row_scale_grad: Option<Bound<'py, PyAny>>,
}

impl<'py> OutputArguments<'py> {
    fn all(&self) -> [Option<&Bound<'py, PyAny>>; 5] {
        [&self.high, &self.rowwise, &self.columnwise, &self.column_sums, &self.row_scale_grad].map(Option::as_ref)
    }
}

/// Scalars of the cast and the factor per row.
#[derive(FromPyObject)]
pub(crate) struct ScaleArguments<'py> {
    #[pyo3(item(0))]
    scale: Option<Bound<'py, PyAny>>,
    #[pyo3(item(1))]
    amax: Option<Bound<'py, PyAny>>,
    #[pyo3(item(2))]
    noop: Option<Bound<'py, PyAny>>,
    #[pyo3(item(3))]
    row_scale: Option<Bound<'py, PyAny>>,
}

/// The inputs of both directions.
struct Common<'a> {
    rows: usize,
    cols: usize,
    input: Float,
    x: TensorView<'a>,
    row_scale: Option<Float>,
    row_scale_data: DevPtr<'a>,
    scale: DevPtr<'a>,
    amax: DevPtr<'a>,
    noop: DevPtr<'a>,
}

fn common<'a>(
    call: &DirectCall<'_, '_>,
    x: TensorView<'a>,
    activation: Activation,
    scales: &'a ScaleArguments<'_>,
) -> PyResult<Common<'a>> {
    let (rows, x_cols) = call.matrix(&x, "x")?;
    if x_cols % activation.halves() != 0 {
        return Err(Error::shape(call.op, "x", "of an even number of columns for a gated activation", x_cols)).python();
    }
    let one = |tensor: &'a Option<Bound<'_, PyAny>>, what| sized(call, tensor.as_ref(), what, DType::F32, 1);
    let row_scale_view = scales.row_scale.as_ref().map(|tensor| matrix(call, tensor, "row_scale")).transpose()?;
    let row_scale = row_scale_view.as_ref().map(|view| call.float(view, "row_scale")).transpose()?;
    if let Some(view) = row_scale_view.as_ref().filter(|view| view.numel() != rows) {
        return Err(Error::shape(call.op, "row_scale", format_args!("{rows} elements"), view.numel())).python();
    }
    Ok(Common {
        rows,
        cols: x_cols / activation.halves(),
        input: call.float(&x, "x")?,
        x,
        row_scale,
        row_scale_data: row_scale_view.map_or(DevPtr::null(), |view| view.data()),
        scale: one(&scales.scale, "scale")?,
        amax: one(&scales.amax, "amax")?,
        noop: one(&scales.noop, "noop")?,
    })
}

/// Writes the activation of `x` to `outputs`.
#[pyfunction]
#[pyo3(signature = (x, function, outputs, scales, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn activation(
    x: &Bound<'_, PyAny>,
    function: FunctionArguments,
    outputs: OutputArguments<'_>,
    scales: ScaleArguments<'_>,
) -> PyResult<()> {
    let (py, op) = (x.py(), "activation");
    let state = state(py)?;
    let activation = function.activation(op)?;
    let view = view_of(&state.reader, x, "x").python()?;
    let call = start(state, py, op, &view)?;
    check_apart(state, op, &[Some(x), scales.row_scale.as_ref()], &outputs.all())?;
    let c = common(&call, view, activation, &scales)?;
    let fp8 = fp8_of(&call, [&outputs.rowwise, &outputs.columnwise])?;
    let plan = ActivationPlan::new(ActivationSpec {
        rows: c.rows,
        cols: c.cols,
        activation,
        interleave: function.interleave,
        input: c.input,
        high: outputs.high.is_some(),
        fp8,
        rowwise: outputs.rowwise.is_some(),
        columnwise: outputs.columnwise.is_some(),
        row_scale: c.row_scale,
        measures: None,
    })
    .python()?;
    if outputs.column_sums.is_some() || outputs.row_scale_grad.is_some() {
        return Err(Error::value(op, "column_sums and row_scale_grad are outputs of the gradient")).python();
    }
    let byte = fp8.map_or(DType::U8, DType::from);
    let buffers = ActivationPointers {
        x: c.x.data(),
        y: sized(&call, outputs.high.as_ref(), "the output", c.input.into(), c.rows * c.cols)?,
        out: sized(&call, outputs.rowwise.as_ref(), "the row layout", byte, plan.out_bytes())?,
        out_t: sized(&call, outputs.columnwise.as_ref(), "the transposed output", byte, plan.out_t_bytes())?,
        row_scale: c.row_scale_data,
        scale: c.scale,
        scale_inv: sized(&call, outputs.scale_inv.as_ref(), "scale_inv", DType::F32, 1)?,
        amax: c.amax,
        noop: c.noop,
        ..ActivationPointers::default()
    };
    call.run(0, |target, _| plan.run(target, &buffers))
}

/// Writes the gradient of the activation of `x` to `outputs`.
#[pyfunction]
#[pyo3(signature = (dy, x, function, outputs, scales, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn activation_backward(
    dy: &Bound<'_, PyAny>,
    x: &Bound<'_, PyAny>,
    function: FunctionArguments,
    outputs: OutputArguments<'_>,
    scales: ScaleArguments<'_>,
) -> PyResult<()> {
    let (py, op) = (x.py(), "activation_backward");
    let state = state(py)?;
    let activation = function.activation(op)?;
    let view = view_of(&state.reader, x, "x").python()?;
    let call = start(state, py, op, &view)?;
    check_apart(state, op, &[Some(dy), Some(x), scales.row_scale.as_ref()], &outputs.all())?;
    let c = common(&call, view, activation, &scales)?;
    let fp8 = fp8_of(&call, [&outputs.rowwise, &outputs.columnwise])?;
    let plan = ActivationBackwardPlan::new(ActivationBackwardSpec {
        rows: c.rows,
        cols: c.cols,
        activation,
        interleave: function.interleave,
        input: c.input,
        high: outputs.high.is_some(),
        fp8,
        rowwise: outputs.rowwise.is_some(),
        columnwise: outputs.columnwise.is_some(),
        dbias: outputs.column_sums.is_some(),
        row_scale: c.row_scale,
        measures: None,
        row_scale_grad: outputs.row_scale_grad.is_some(),
        processors: state.dispatcher(py)?.0.multiprocessors(c.x.device()).python()?,
    })
    .python()?;
    let (byte, high) = (fp8.map_or(DType::U8, DType::from), DType::from(c.input));
    let factor = c.row_scale.map_or(DType::F32, DType::from);
    let stride = activation.halves() * c.cols;
    let buffers = ActivationBackwardPointers {
        dy: sized(&call, Some(dy), "dy", high, c.rows * c.cols)?,
        x: c.x.data(),
        dx: sized(&call, outputs.high.as_ref(), "the output", high, c.rows * stride)?,
        out: sized(&call, outputs.rowwise.as_ref(), "the row layout", byte, plan.out_bytes())?,
        out_t: sized(&call, outputs.columnwise.as_ref(), "the transposed output", byte, plan.out_t_bytes())?,
        row_scale: c.row_scale_data,
        row_scale_grad: sized(&call, outputs.row_scale_grad.as_ref(), "row_scale_grad", factor, c.rows)?,
        scale: c.scale,
        scale_inv: sized(&call, outputs.scale_inv.as_ref(), "scale_inv", DType::F32, 1)?,
        amax: c.amax,
        noop: c.noop,
        dbias: sized(&call, outputs.column_sums.as_ref(), "column_sums", high, stride)?,
        ..ActivationBackwardPointers::default()
    };
    call.with_lane(plan.partial_bytes(), |lane| {
        let (partial, counters) = (lane.workspace.scratch, lane.workspace.counters);
        plan.run(&mut lane.target, &ActivationBackwardPointers { partial, counters, ..buffers })
    })
}
