//! Tensors of plain values, from FP8 bytes and their scales.

use pyo3::intern;
use pyo3::prelude::*;
use te_fast_core::base::dtype::DType;
use te_fast_core::ops::cast_block::scale_shape;
use te_fast_core::ops::dequantize::{DequantizePlan, DequantizePointers, DequantizeSpec};
use te_fast_core::recipe::definition::Block;
use te_fast_core::{Error, Fp8};

use crate::direct::call::DirectCall;
use crate::error::IntoPython;
use crate::tensor::kind::block_shape;
use crate::torch::process::State;
use crate::torch::reader::view_of;

const OP: &str = "dequantize";

/// FP8 bytes of a layout, under their scales, as a tensor of `dtype` and their shape.
pub(super) fn dequantized<'py>(
    state: &State,
    (data, scale): (&Bound<'py, PyAny>, &Bound<'py, PyAny>),
    (block, input, groups): (Block, Fp8, usize),
    dtype: &Bound<'py, PyAny>,
    columnwise: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = data.py();
    let floats = [DType::F32, DType::F16, DType::Bf16];
    let Some(output) = floats.into_iter().find(|&float| state.torch.dtype(py, float).is(dtype)) else {
        return Err(Error::dtype(OP, "dtype", "float32, float16 or bfloat16", dtype)).python();
    };
    let q = view_of(&state.reader, data, "data of the quantised tensor").python()?;
    let scales = view_of(&state.reader, scale, "scales of the quantised tensor").python()?;
    let call = DirectCall::new(state, py, OP, q.device())?;
    call.same_device(&scales, "scales of the quantised tensor")?;
    call.dtype(&scales, "scales of the quantised tensor", DType::F32)?;
    // The dimensions that are counted together are the last ones of a column layout.
    let lines = q.shape().get(usize::from(groups != 1)).map_or(1, |&size| size as usize);
    let one = q.numel() / groups;
    let (rows, cols) = if columnwise { (lines, one / lines.max(1)) } else { (q.rows() / groups, q.cols()) };
    let block = block_shape(block);
    let out = call.empty(q.shape(), output)?;
    if q.numel() == 0 {
        return Ok(out);
    }
    let count = block.map_or(1, |block| scale_shape(block, rows, cols).iter().product());
    match block {
        _ if groups != 1 && scales.numel() == groups * count => {}
        None if scales.numel() == groups => {}
        Some(block) if groups == 1 => {
            let expected = scale_shape(block, rows, cols).map(|size| size as i64);
            call.shape(&scales, "scales of the quantised tensor", &expected)?;
        }
        _ => {
            let expected = format!("{} scales", groups * count);
            return Err(Error::shape(OP, "scales", expected, format_args!("{:?}", scales.shape()))).python();
        }
    }
    let Some(output) = output.as_float() else { return Ok(out) };
    let plan = DequantizePlan::new(DequantizeSpec { rows, cols, ld: cols, input, output, block }).python()?;
    let to = call.pointer(Some(&out))?;
    let of_group = |group: usize| DequantizePointers {
        q: q.data().offset(group * one),
        out: to.offset(group * one * output.size()),
        scale_inv: scales.data().offset(group * count * size_of::<f32>()),
    };
    call.run(0, |target, _| (0..groups).try_for_each(|group| plan.run(target, &of_group(group))))?;
    Ok(out)
}

/// The tensor, or the stack of them, whose column layout, dequantised, is `columns`.
pub(super) fn from_columns<'py>(columns: &Bound<'py, PyAny>, groups: usize) -> PyResult<Bound<'py, PyAny>> {
    let py = columns.py();
    if groups != 1 {
        let rows = columns.call_method1(intern!(py, "transpose"), (-1, -2))?;
        return rows.call_method0(intern!(py, "contiguous"));
    }
    let dims = columns.call_method0(intern!(py, "dim"))?.extract::<i64>()?;
    let order: Vec<i64> = (1..dims).chain(0..dims.min(1)).collect();
    columns.call_method1(intern!(py, "permute"), (order,))?.call_method0(intern!(py, "contiguous"))
}
