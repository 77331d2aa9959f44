//! MoE permutation into FP8, padding and chunk sorting as Python sees them.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use te_fast_core::kernel::DevPtr;
use te_fast_core::ops::pad::{Integers, Move, PadBuffers, PadPlan, PadSpec, Splits};
use te_fast_core::ops::permute::{Layout, MapBuffers, MapShape};
use te_fast_core::ops::permute_cast::{PermuteCastBuffers, PermuteCastPlan, PermuteCastSpec, Scaling};
use te_fast_core::ops::permute_map::{MapOutputs, MapPlan, MapSpec};
use te_fast_core::tensor::{DType, TensorView};
use te_fast_core::{Error, Float, Fp8};

use crate::error::IntoPython;
use crate::permute::{MapTensors, Wanted, map_outputs, routing_of};
use crate::permute_call::{Call, Input};
use crate::state::state;

/// How the caller wants rows quantised.
#[derive(FromPyObject)]
pub(crate) struct CastArguments<'py> {
    #[pyo3(item(0))]
    e5m2: bool,
    #[pyo3(item(1))]
    scale: Option<Bound<'py, PyAny>>,
    #[pyo3(item(2))]
    amax: Option<Bound<'py, PyAny>>,
    #[pyo3(item(3))]
    eps: f32,
    #[pyo3(item(4))]
    pow2: bool,
}

fn one_f32<'a>(call: &Call<'_, '_>, tensor: Option<&'a Bound<'_, PyAny>>, what: &'static str) -> PyResult<DevPtr<'a>> {
    let Some(tensor) = tensor else { return Ok(DevPtr::null()) };
    let view = crate::tensor::view_of(&call.state.reader, tensor, what).python()?;
    call.same_device(&view, what)?;
    call.dtype(&view, what, DType::F32)?;
    if view.numel() != 1 {
        return Err(Error::shape(call.op, what, "one element", view.numel())).python();
    }
    Ok(view.data())
}

/// Map, permutation and cast: (data, `scale_inv`, `permuted_probs`, `row_id_map`, `pad_offsets`, `padded_counts`).
/// `cast` is (e5m2, scale, amax, eps, pow2); with a scale the cast is per tensor, without one in blocks of 128.
#[pyfunction]
#[pyo3(signature = (inp, routing_map, probs, rows, align, cast, /))]
pub(crate) fn moe_permute_cast<'py>(
    inp: &Bound<'py, PyAny>,
    routing_map: &Bound<'py, PyAny>,
    probs: Option<&Bound<'py, PyAny>>,
    rows: usize,
    align: usize,
    cast: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let (py, op) = (inp.py(), "moe_permute_quantize");
    let state = state(py)?;
    let cast: CastArguments<'py> = cast.extract()?;
    let (inp, routing_map) = (Input::new(state, inp, "inp")?, Input::new(state, routing_map, "routing_map")?);
    let probs = Input::optional(state, probs, "probs")?;
    let (x, routing_view) = (inp.view(state)?, routing_map.view(state)?);
    let probs_view = probs.as_ref().map(|probs| probs.view(state)).transpose()?;
    let call = Call::new(state, py, op, x.device())?;
    let (tokens, cols) = call.matrix(&x, "inp")?;
    let input = call.float(&x, "inp")?;
    let (layout, routing) = routing_of(&call, &routing_view, false, tokens)?;
    let shape = MapShape { tokens, rows, layout };
    let prob = call.probs(probs_view.as_ref(), tokens, shape.slots())?;
    let map_plan = MapPlan::new(MapSpec { shape, routing, align: align.max(1) }).python()?;
    let scaling =
        if cast.scale.is_some() { Scaling::Tensor } else { Scaling::Block { eps: cast.eps, pow2: cast.pow2 } };
    let output = if cast.e5m2 { Fp8::E5m2 } else { Fp8::E4m3 };
    let plan = PermuteCastPlan::new(PermuteCastSpec { shape, cols, input, output, prob, scaling }).python()?;

    let map = MapTensors::new(&call, &shape, &map_plan, Wanted { pads: align > 0, ends: false })?;
    let out = call.empty(&[rows as i64, cols as i64], output.into())?;
    let out_probs = prob.map(|prob| call.empty(&[rows as i64], prob.into())).transpose()?;
    let (blocks, ld) = plan.scale_shape();
    let scale_inv =
        if cast.scale.is_some() { None } else { Some(call.empty(&[blocks as i64, ld as i64], DType::F32)?) };
    let outputs = map_outputs(&call, &routing_view, &map)?;
    let buffers = PermuteCastBuffers {
        x: x.data(),
        out: call.pointer(Some(&out))?,
        probs: probs_view.map_or(DevPtr::null(), |view| view.data()),
        out_probs: call.pointer(out_probs.as_ref())?,
        scale: one_f32(&call, cast.scale.as_ref(), "scale")?,
        amax: one_f32(&call, cast.amax.as_ref(), "amax")?,
        scale_inv: call.pointer(scale_inv.as_ref())?,
        scratch: DevPtr::null(),
        map: MapBuffers {
            map: outputs.row_id_map,
            pad_offsets: outputs.pad_offsets,
            ends: DevPtr::null(),
            partials: 1,
        },
    };
    let ends_bytes = (4 * map_plan.experts()).next_multiple_of(256);
    let map_bytes = map_plan.scratch_bytes().next_multiple_of(256);
    call.run(ends_bytes + map_bytes + plan.scratch_bytes(), |target, ends| {
        map_plan.run(target, &MapOutputs { ends, scratch: ends.offset(ends_bytes), ..outputs })?;
        let scratch = ends.offset(ends_bytes + map_bytes);
        plan.run(target, &PermuteCastBuffers { scratch, map: MapBuffers { ends, ..buffers.map }, ..buffers })
    })?;
    debug_assert!(matches!(shape.layout, Layout::Mask { .. }));
    (out, scale_inv, out_probs, map.row_id_map, map.pad_offsets, map.padded_counts).into_pyobject(py)
}

/// A vector of integers on the call's device.
fn integers<'a>(call: &Call<'_, '_>, view: &TensorView<'a>, what: &'static str) -> PyResult<(Integers<'a>, usize)> {
    call.same_device(view, what)?;
    let wide = match view.dtype() {
        DType::I32 => false,
        DType::I64 => true,
        other => return Err(Error::dtype(call.op, what, "torch.int32 or torch.int64", other)).python(),
    };
    match view.shape() {
        &[count] => Ok((Integers { data: view.data(), wide }, count as usize)),
        other => Err(Error::shape(call.op, what, "of one dimension", format_args!("{other:?}"))).python(),
    }
}

/// One probability per row, or none.
fn row_probs(call: &Call<'_, '_>, probs: Option<&TensorView<'_>>, rows: usize) -> PyResult<Option<Float>> {
    let Some(view) = probs else { return Ok(None) };
    call.same_device(view, "probs")?;
    call.shape(view, "probs", &[rows as i64])?;
    call.float(view, "probs").map(Some)
}

/// The order of the chunks: as many entries as there are splits on the device.
fn order_of<'a>(
    call: &Call<'_, '_>,
    index: Option<&TensorView<'a>>,
    splits: &Splits<'_>,
) -> PyResult<Option<Integers<'a>>> {
    let Some(view) = index else { return Ok(None) };
    let (index, count) = integers(call, view, "sorted_index")?;
    match splits {
        Splits::Device(_, splits) if *splits != count => {
            Err(Error::shape(call.op, "sorted_index", format_args!("of {splits} entries, one per split"), count))
                .python()
        }
        _ => Ok(Some(index)),
    }
}

/// Rows moved in segments: (out, `out_probs`, padded splits where the splits to pad by are a tensor). `splits` is a list of int or a tensor on the input's device; `mode` is
/// 0 to pad, 1 to unpad, 2 to sort chunks, 3 to undo that.
#[pyfunction]
#[pyo3(signature = (inp, probs, splits, index, mode, align, rows, /))]
pub(crate) fn moe_pad<'py>(
    inp: &Bound<'py, PyAny>,
    probs: Option<&Bound<'py, PyAny>>,
    splits: &Bound<'py, PyAny>,
    index: Option<&Bound<'py, PyAny>>,
    mode: u32,
    align: usize,
    rows: usize,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = inp.py();
    let state = state(py)?;
    let (mode, op) = match mode {
        0 => (Move::Pad, "Fp8Padding"),
        1 => (Move::Unpad, "Fp8Unpadding"),
        2 => (Move::Sort, "moe_sort_chunks_by_index"),
        _ => (Move::Unsort, "moe_sort_chunks_by_index"),
    };
    let (inp, probs) = (Input::new(state, inp, "inp")?, Input::optional(state, probs, "probs")?);
    let x = inp.view(state)?;
    let probs_view = probs.as_ref().map(|probs| probs.view(state)).transpose()?;
    let call = Call::new(state, py, op, x.device())?;
    let (in_rows, cols) = call.matrix(&x, "inp")?;
    let float = call.float(&x, "inp")?;
    let prob = row_probs(&call, probs_view.as_ref(), in_rows)?;
    let values =
        if splits.is_instance_of::<pyo3::types::PyList>() { Some(splits.extract::<Vec<i64>>()?) } else { None };
    let held = if values.is_none() { Some(Input::new(state, splits, "splits")?) } else { None };
    let splits_view = held.as_ref().map(|held| held.view(state)).transpose()?;
    let splits = match (&values, &splits_view) {
        (_, Some(view)) => {
            let (data, count) = integers(&call, view, "splits")?;
            Splits::Device(data, count)
        }
        (values, None) => Splits::Values(values.as_deref().unwrap_or(&[])),
    };
    let index = Input::optional(state, index, "sorted_index")?;
    let index_view = index.as_ref().map(|index| index.view(state)).transpose()?;
    let index = order_of(&call, index_view.as_ref(), &splits)?;
    let plan =
        PadPlan::new(PadSpec { mode, in_rows, out_rows: rows, row_bytes: cols * float.size(), align }).python()?;
    let out = call.empty(&[rows as i64, cols as i64], float.into())?;
    let out_probs = prob.map(|prob| call.empty(&[rows as i64], prob.into())).transpose()?;
    let padded = match (&splits_view, mode) {
        (Some(view), Move::Pad) => Some(call.empty(view.shape(), view.dtype())?),
        _ => None,
    };
    let buffers = PadBuffers {
        x: x.data(),
        out: call.pointer(Some(&out))?,
        probs: probs_view.map_or(DevPtr::null(), |view| view.data()),
        out_probs: call.pointer(out_probs.as_ref())?,
        prob,
        index,
        padded_splits: call.pointer(padded.as_ref())?,
    };
    call.run(0, |target, _| plan.run(target, &buffers, &splits))?;
    (out, out_probs, padded).into_pyobject(py)
}
