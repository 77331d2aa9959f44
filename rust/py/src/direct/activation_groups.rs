//! Activations of groups of rows into FP8 for direct use from Python: `te_fast.dispatch` wraps it.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::ops::activation_groups::{
    ActivationGroupsPlan, ActivationGroupsPointers, ActivationGroupsSpec, ActivationWay,
};
use te_fast_core::ops::cast_groups::{Division, GroupShape};
use te_fast_core::quant::quantizer::{QuantGroups, QuantSpec};
use te_fast_core::recipe::usage::Usage;

use crate::autocast::recipe::NativeRecipe;
use crate::direct::activation::FunctionArguments;
use crate::direct::call::DirectCall;
use crate::direct::quantize_groups::{outputs, shape_of, slots};
use crate::direct::tensors::{contiguous, matrix, sized};
use crate::error::IntoPython;
use crate::torch::process::state;

const OP: &str = "activation_groups";

/// Computes a gated activation of `[rows, 2 * cols]` whose rows `splits` counts, or with `dy` the gradient of `x`, and
/// quantises it: (row data, row scales, column data, column scales, gradient of `row_scale`), None for those that are
/// not requested.
#[pyfunction]
#[pyo3(signature = (x, dy, function, splits, recipe, layouts, slots_, row_scale, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn activation_groups<'py>(
    x: &Bound<'py, PyAny>,
    dy: Option<&Bound<'py, PyAny>>,
    function: FunctionArguments,
    splits: &Bound<'py, PyAny>,
    recipe: &Bound<'py, NativeRecipe>,
    layouts: (bool, bool),
    slots_: (Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>),
    row_scale: Option<&Bound<'py, PyAny>>,
) -> PyResult<[Option<Bound<'py, PyAny>>; 5]> {
    let py = x.py();
    let state = state(py)?;
    let view = contiguous(state, x, OP, "x")?;
    let recipe = recipe.get().0;
    let Some(input) = view.dtype().as_float() else {
        return Err(Error::dtype(OP, "x", "bfloat16", view.dtype())).python();
    };
    let (given, counts) = shape_of(state, OP, &view, Some(splits))?;
    let GroupShape { groups, rows, .. } = given;
    if given.cols % 2 != 0 {
        return Err(Error::shape(OP, "x", "of an even number of columns", given.cols)).python();
    }
    let scale = slots(state, OP, slots_.0.as_ref(), "scale", &view, groups)?;
    let amax = slots(state, OP, slots_.1.as_ref(), "amax", &view, groups)?;
    let call = DirectCall::new(state, py, OP, view.device())?;
    let row_scale_view = row_scale.map(|tensor| matrix(&call, tensor, "row_scale")).transpose()?;
    let row_scale_type = row_scale_view.as_ref().map(|view| call.float(view, "row_scale")).transpose()?;
    let way = match dy {
        None => ActivationWay::Forward,
        Some(_) => ActivationWay::Backward { row_scale_grad: row_scale.is_some() },
    };
    let (quantization, output) = if dy.is_none() { (recipe.input, recipe.fwd) } else { (recipe.grad, recipe.bwd) };
    let cast = QuantSpec {
        scaling: recipe.scaling,
        quantization,
        rows,
        cols: if dy.is_none() { given.cols / 2 } else { given.cols },
        input,
        output,
        usage: Usage { rowwise: layouts.0, columnwise: layouts.1 },
        dbias: false,
        groups: None,
        processors: state.dispatcher(py)?.0.multiprocessors(view.device()).python()?,
    };
    let counted = QuantGroups { count: groups, division: Division::Counted, slots: 1, gather: None };
    let spec = ActivationGroupsSpec {
        cast: cast.of_groups(counted).python()?,
        activation: function.activation(OP)?,
        interleave: function.interleave,
        row_scale: row_scale_type,
        way,
    };
    let plan = ActivationGroupsPlan::new(spec).python()?;
    let [row, row_data, col, col_data] = outputs(&call, &spec.cast.shape, plan.cast().shares_scale(), layouts)?;
    let factor = row_scale_type.map_or(DType::F32, DType::from);
    let wants = way == ActivationWay::Backward { row_scale_grad: true };
    let row_scale_grad = wants.then(|| call.empty(&[rows as i64], factor)).transpose()?;
    let io = ActivationGroupsPointers {
        x: view.data(),
        dy: sized(&call, dy, "dy", input.into(), rows * (given.cols / 2))?,
        row_scale: sized(&call, row_scale, "row_scale", factor, rows)?,
        row_scale_grad: call.pointer(row_scale_grad.as_ref())?,
        out: call.pointer(row.as_ref())?,
        out_t: call.pointer(col.as_ref())?,
        scale,
        scale_inv: call.pointer(if row.is_some() { row_data.as_ref() } else { col_data.as_ref() })?,
        scale_inv_t: call.pointer(col_data.as_ref())?,
        amax,
        splits: counts,
        ..ActivationGroupsPointers::default()
    };
    call.with_lane(plan.sums_bytes(), |lane| {
        let (sums, counters) = (lane.workspace.scratch, lane.workspace.counters);
        plan.run(&mut lane.target, &ActivationGroupsPointers { sums, counters, ..io })
    })?;
    Ok([row, row_data, col, col_data, row_scale_grad])
}
