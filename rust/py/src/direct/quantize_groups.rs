//! Quantisation of groups of rows for direct use from Python: `te_fast.dispatch` wraps it.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};
use te_fast_core::ops::cast_groups::{Division, GroupShape};
use te_fast_core::quant::quantizer::{QuantGroups, QuantPlan, QuantPointers, QuantSpec};
use te_fast_core::recipe::usage::Usage;

use crate::autocast::recipe::NativeRecipe;
use crate::direct::call::DirectCall;
use crate::direct::tensors::contiguous;
use crate::error::IntoPython;
use crate::torch::process::{State, state};

const OP: &str = "quantize_groups";

/// Quantises `[rows, cols]` whose rows `splits` counts, or without counts a stack `[groups, rows, cols]` of weights:
/// (row data, row scales, column data, column scales), None for those that are not requested.
#[pyfunction]
#[pyo3(signature = (x, splits, recipe, role, rowwise, columnwise, scale, amax, /))]
pub(crate) fn quantize_groups<'py>(
    x: &Bound<'py, PyAny>,
    splits: Option<&Bound<'py, PyAny>>,
    recipe: &Bound<'py, NativeRecipe>,
    role: &str,
    rowwise: bool,
    columnwise: bool,
    scale: Option<&Bound<'py, PyAny>>,
    amax: Option<&Bound<'py, PyAny>>,
) -> PyResult<[Option<Bound<'py, PyAny>>; 4]> {
    let py = x.py();
    let state = state(py)?;
    let view = contiguous(state, x, OP, "x")?;
    let recipe = recipe.get().0;
    let (quantization, output) = match role {
        "input" => (recipe.input, recipe.fwd),
        "weight" => (recipe.weight, recipe.fwd),
        "grad" => (recipe.grad, recipe.bwd),
        other => {
            return Err(Error::value(OP, format!("role must be input, weight or grad, got {other:?}"))).python();
        }
    };
    let Some(input) = view.dtype().as_float() else {
        return Err(Error::dtype(OP, "x", "float32, float16 or bfloat16", view.dtype())).python();
    };
    let (shape, counts) = shape_of(state, OP, &view, splits)?;
    let scale = slots(state, OP, scale, "scale", &view, shape.groups)?;
    let amax = slots(state, OP, amax, "amax", &view, shape.groups)?;
    if recipe.is_delayed() && scale.is_null() {
        return Err(Error::value(OP, "delayed scaling needs the scales of the groups")).python();
    }
    let call = DirectCall::new(state, py, OP, view.device())?;
    let processors = state.dispatcher(py)?.0.multiprocessors(view.device()).python()?;
    let GroupShape { groups, division, rows, cols } = shape;
    let plan = QuantPlan::new(&QuantSpec {
        scaling: recipe.scaling,
        quantization,
        rows,
        cols,
        input,
        output,
        usage: Usage { rowwise, columnwise },
        dbias: false,
        groups: Some(QuantGroups { count: groups, division, slots: 1, gather: None }),
        processors,
    })
    .python()?;
    let [row, row_scale, col, col_scale] = outputs(&call, &shape, plan.shares_scale(), (rowwise, columnwise))?;
    let io = QuantPointers {
        x: view.data(),
        row: call.pointer(row.as_ref())?,
        row_scale: call.pointer(row_scale.as_ref())?,
        col: call.pointer(col.as_ref())?,
        col_scale: call.pointer(col_scale.as_ref())?,
        scale,
        amax,
        splits: counts,
        ..QuantPointers::default()
    };
    call.with_lane(plan.scratch_bytes(), |lane| {
        let (scratch, counters) = (lane.workspace.scratch, lane.workspace.counters);
        plan.run(&mut lane.target, &QuantPointers { scratch, counters, ..io })
    })?;
    Ok([row, row_scale, col, col_scale])
}

/// Memory for row data, row scales, column data and column scales, if they are wanted.
pub(crate) fn outputs<'py>(
    call: &DirectCall<'_, 'py>,
    shape: &GroupShape,
    shares_scale: bool,
    (rowwise, columnwise): (bool, bool),
) -> PyResult<[Option<Bound<'py, PyAny>>; 4]> {
    let &GroupShape { groups, division, rows, cols } = shape;
    let size = |sizes: &[usize]| sizes.iter().map(|&size| size as i64).collect::<Vec<_>>();
    let scales = |rows: usize, cols: usize| match (shares_scale, division) {
        (true, _) => size(&[groups]),
        (false, Division::Counted) => size(&scale_shape(BlockShape::OneDimensional, rows, cols)),
        (false, Division::Equal) => {
            let [lines, pitch] = scale_shape(BlockShape::TwoDimensional, rows, cols);
            size(&[groups, lines, pitch])
        }
    };
    let ld = shape.transposed_ld();
    let (data, transposed) = match division {
        Division::Counted => (size(&[rows, cols]), size(&[cols, ld])),
        Division::Equal => (size(&[groups, rows, cols]), size(&[groups, cols, ld])),
    };
    let make = |wanted: bool, size: &[i64], dtype| wanted.then(|| call.empty(size, dtype)).transpose();
    let row = make(rowwise, &data, DType::U8)?;
    let row_scale = make(rowwise, &scales(rows, cols), DType::F32)?;
    let col = make(columnwise, &transposed, DType::U8)?;
    let col_scale = if rowwise && shares_scale && columnwise {
        row_scale.clone()
    } else {
        let rows = if division == Division::Counted { ld } else { rows };
        make(columnwise, &scales(cols, rows), DType::F32)?
    };
    Ok([row, row_scale, col, col_scale])
}

/// The groups of `x`, and the address of their counts.
pub(crate) fn shape_of<'a>(
    state: &State,
    op: &'static str,
    x: &TensorView<'_>,
    splits: Option<&'a Bound<'_, PyAny>>,
) -> PyResult<(GroupShape, DevPtr<'a>)> {
    let dims = if splits.is_some() { 2 } else { 3 };
    if x.shape().len() != dims {
        let expected = if dims == 2 { "(rows, cols), with splits" } else { "(groups, rows, cols), without splits" };
        return Err(Error::shape(op, "x", expected, format!("{:?}", x.shape()))).python();
    }
    let size = |dim: usize| x.shape()[dim] as usize;
    let Some(splits) = splits else {
        let shape = GroupShape { groups: size(0), division: Division::Equal, rows: size(1), cols: size(2) };
        return Ok((shape, DevPtr::null()));
    };
    let counts = contiguous(state, splits, op, "splits")?;
    if counts.dtype() != DType::I64 || counts.shape().len() != 1 || counts.device() != x.device() {
        let got = format!("{} of shape {:?} on {}", counts.dtype(), counts.shape(), counts.device());
        return Err(Error::shape(op, "splits", format!("int64 (groups,) on {}", x.device()), got)).python();
    }
    let groups = counts.numel();
    Ok((GroupShape { groups, division: Division::Counted, rows: size(0), cols: size(1) }, counts.data()))
}

/// One f32 for each group, or null.
pub(crate) fn slots<'a>(
    state: &State,
    op: &'static str,
    tensor: Option<&'a Bound<'_, PyAny>>,
    what: &'static str,
    x: &TensorView<'_>,
    groups: usize,
) -> PyResult<DevPtr<'a>> {
    let Some(tensor) = tensor else { return Ok(DevPtr::null()) };
    let view = contiguous(state, tensor, op, what)?;
    if view.dtype() != DType::F32 || view.numel() != groups || view.device() != x.device() {
        let got = format!("{} of shape {:?} on {}", view.dtype(), view.shape(), view.device());
        return Err(Error::shape(op, what, format!("{groups} float32 on {}", x.device()), got)).python();
    }
    Ok(view.data())
}
