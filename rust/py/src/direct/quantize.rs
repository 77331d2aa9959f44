//! Quantisation and its reverse for direct use from Python: `te_fast.dispatch` wraps these.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};
use te_fast_core::ops::dequantize::{DequantizePlan, DequantizePointers, DequantizeSpec};
use te_fast_core::quant::quantizer::{QuantPlan, QuantPointers, QuantSpec};
use te_fast_core::recipe::definition::Block;
use te_fast_core::recipe::usage::Usage;

use crate::autocast::recipe::NativeRecipe;
use crate::direct::call::DirectCall;
use crate::direct::tensors::{check_apart, contiguous, fp8_named, single_f32};
use crate::error::IntoPython;
use crate::torch::process::state;

/// Columns per row of one scale in block scaling.
const GRANULE: usize = 16;

/// Quantises `x` as the operand `role` of a GEMM under `recipe`: (row data, row scales, column data, column scales,
/// column sums), None for those that are not requested.
#[pyfunction]
#[pyo3(signature = (x, recipe, role, rowwise, columnwise, scale, amax, dbias, /))]
pub(crate) fn quantize<'py>(
    x: &Bound<'py, PyAny>,
    recipe: &Bound<'py, NativeRecipe>,
    role: &str,
    rowwise: bool,
    columnwise: bool,
    scale: Option<&Bound<'py, PyAny>>,
    amax: Option<&Bound<'py, PyAny>>,
    dbias: bool,
) -> PyResult<[Option<Bound<'py, PyAny>>; 5]> {
    let py = x.py();
    let state = state(py)?;
    let view = contiguous(state, x, "quantize", "x")?;
    let recipe = recipe.get().0;
    let (quantization, output) = match role {
        "input" => (recipe.input, recipe.fwd),
        "weight" => (recipe.weight, recipe.fwd),
        "grad" => (recipe.grad, recipe.bwd),
        other => {
            return Err(Error::value("quantize", format!("role must be input, weight or grad, got {other:?}")))
                .python();
        }
    };
    let Some(input) = view.dtype().as_float() else {
        return Err(Error::dtype("quantize", "x", "float32, float16 or bfloat16", view.dtype())).python();
    };
    let scale = single_f32(state, scale, "scale", &view)?;
    if recipe.is_delayed() && scale.is_null() {
        return Err(Error::value("quantize", "delayed scaling needs a scale")).python();
    }
    let (rows, cols) = (view.rows(), view.cols());
    let call = DirectCall::new(state, py, "quantize", view.device())?;
    let processors = state.dispatcher(py)?.0.multiprocessors(view.device()).python()?;
    let usage = Usage { rowwise, columnwise };
    let plan = QuantPlan::new(&QuantSpec {
        scaling: recipe.scaling,
        quantization,
        rows,
        cols,
        input,
        output,
        usage,
        dbias,
        groups: None,
        processors,
    })
    .python()?;

    let block = match quantization.block {
        Block::Tensor => None,
        Block::Row => Some(BlockShape::OneDimensional),
        Block::Square => Some(BlockShape::TwoDimensional),
    };
    let scales = |rows, cols| -> Vec<i64> {
        block.map_or_else(|| vec![1], |block| scale_shape(block, rows, cols).iter().map(|&size| size as i64).collect())
    };
    let make = |wanted: bool, size: &[i64], dtype| wanted.then(|| call.empty(size, dtype)).transpose();
    let row = make(rowwise, view.shape(), DType::U8)?;
    let row_scale = make(rowwise, &scales(rows, cols), DType::F32)?;
    let col = make(columnwise, &[cols as i64, rows.next_multiple_of(GRANULE) as i64], DType::U8)?;
    let col_scale = if rowwise && columnwise && plan.shares_scale() {
        row_scale.clone()
    } else {
        make(columnwise, &scales(cols, rows), DType::F32)?
    };
    let sums = make(dbias, &[cols as i64], input.into())?;
    let io = QuantPointers {
        x: view.data(),
        row: call.pointer(row.as_ref())?,
        row_scale: call.pointer(row_scale.as_ref())?,
        col: call.pointer(col.as_ref())?,
        col_scale: call.pointer(col_scale.as_ref())?,
        scale,
        amax: single_f32(state, amax, "amax", &view)?,
        dbias: call.pointer(sums.as_ref())?,
        ..QuantPointers::default()
    };
    call.with_lane(plan.scratch_bytes(), |lane| {
        let (scratch, counters) = (lane.workspace.scratch, lane.workspace.counters);
        plan.run(&mut lane.target, &QuantPointers { scratch, counters, ..io })
    })?;
    Ok([row, row_scale, col, col_scale, sums])
}

/// FP8 bytes `[rows, ld]` back to `dtype` `[rows, cols]`; `block` is 0 (one scale), 1 (1x128) or 2 (128x128).
#[pyfunction]
#[pyo3(signature = (data, scale_inv, fp8, block, cols, out, /))]
pub(crate) fn dequantize<'py>(
    data: &Bound<'py, PyAny>,
    scale_inv: &Bound<'py, PyAny>,
    fp8: &str,
    block: u8,
    cols: usize,
    out: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let py = data.py();
    let state = state(py)?;
    let q = contiguous(state, data, "dequantize", "data")?;
    let scales = contiguous(state, scale_inv, "dequantize", "scale_inv")?;
    let result = contiguous(state, out, "dequantize", "out")?;
    let (rows, ld) = (q.rows(), q.cols());
    let Some(output) = result.dtype().as_float() else {
        return Err(Error::dtype("dequantize", "out", "float32, float16 or bfloat16", result.dtype())).python();
    };
    let block = match block {
        0 => None,
        1 => Some(BlockShape::OneDimensional),
        _ => Some(BlockShape::TwoDimensional),
    };
    let expected = block.map_or(1, |block| scale_shape(block, rows, cols).iter().product());
    if q.dtype().size() != 1
        || result.numel() != rows * cols
        || scales.numel() != expected
        || scales.dtype() != DType::F32
    {
        let got = format!("{:?}, {:?} and {:?}", q.shape(), scales.shape(), result.shape());
        return Err(Error::shape(
            "dequantize",
            "data, scale_inv and out",
            format!("bytes [{rows}, {ld}], {expected} float32 scales and {rows} x {cols} results"),
            got,
        ))
        .python();
    }
    if q.device() != scales.device() || q.device() != result.device() {
        return Err(Error::device("dequantize", "scale_inv and out", q.device(), result.device())).python();
    }
    check_apart(state, "dequantize", &[Some(data), Some(scale_inv)], &[Some(out)])?;
    let plan =
        DequantizePlan::new(DequantizeSpec { rows, cols, ld, input: fp8_named(fp8)?, output, block }).python()?;
    let pointers = DequantizePointers { q: q.data(), out: result.data(), scale_inv: scales.data() };
    DirectCall::new(state, py, "dequantize", q.device())?.run(0, |target, _| plan.run(target, &pointers))
}
