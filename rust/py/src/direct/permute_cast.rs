//! MoE permutation into FP8, padding and chunk sorting for Python.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyInt, PyList, PyTuple};
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::pad::{Integers, Move, PadPlan, PadPointers, PadSpec, Splits};
use te_fast_core::ops::permute_cast::{PermuteCastPlan, PermuteCastPointers, PermuteCastSpec, Scaling};
use te_fast_core::ops::permute_map::{MapPointers, STATE_BYTES};
use te_fast_core::ops::row_map::Prob;
use te_fast_core::{Error, Fp8};

use crate::direct::call::{DirectCall, Input};
use crate::direct::permute_route::{Permuted, Route, RouteSpec, TokenInputs, Wanted, map_outputs};
use crate::error::IntoPython;
use crate::torch::process::state;

/// The quantisation of rows: (e5m2, scale, amax, eps, pow2).
type CastArguments<'py> = (bool, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>, f32, bool);

fn one_f32<'a>(
    call: &DirectCall<'_, '_>,
    tensor: Option<&'a Bound<'_, PyAny>>,
    what: &'static str,
) -> PyResult<DevPtr<'a>> {
    let Some(tensor) = tensor else { return Ok(DevPtr::null()) };
    let view = crate::torch::reader::view_of(&call.state.reader, tensor, what).python()?;
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
    let (e5m2, scale, amax, eps, pow2) = cast.extract::<CastArguments<'_>>()?;
    let inputs = TokenInputs::new(state, inp, routing_map, probs)?;
    let views = inputs.views(state)?;
    let call = DirectCall::new(state, py, op, views.x.device())?;
    let route = Route::new(&call, &views, RouteSpec { rows, align, index: false })?;
    let scaling = if scale.is_some() { Scaling::Tensor } else { Scaling::Block { eps, pow2 } };
    let output = if e5m2 { Fp8::E5m2 } else { Fp8::E4m3 };
    let Route { cols, float: input, prob, shape, .. } = route;
    let multiprocessors = state.dispatcher(py)?.0.multiprocessors(call.place.device).python()?;
    let spec = PermuteCastSpec { shape, cols, input, output, prob, scaling, multiprocessors };
    let plan = PermuteCastPlan::new(spec).python()?;

    let permuted = Permuted::new(&call, &route, output.into(), Wanted { pads: align > 0, ends: false })?;
    let (blocks, ld) = plan.scale_shape();
    let scale_inv = if scale.is_some() { None } else { Some(call.empty(&[blocks as i64, ld as i64], DType::F32)?) };
    let outputs = map_outputs(&call, &views.routing, &permuted.map)?;
    let at = PermuteCastPointers {
        x: views.x.data(),
        out: call.pointer(Some(&permuted.out))?,
        probs: views.probs(),
        out_probs: call.pointer(permuted.probs.as_ref())?,
        scale: one_f32(&call, scale.as_ref(), "scale")?,
        amax: one_f32(&call, amax.as_ref(), "amax")?,
        scale_inv: call.pointer(scale_inv.as_ref())?,
        ..PermuteCastPointers::default()
    };
    let route = route.filling(plan.fill_words());
    call.with_counters(STATE_BYTES, route.scratch_bytes() + plan.scratch_bytes(), |lane| {
        let token_scales = lane.workspace.scratch.offset(route.scratch_bytes());
        let outputs = MapPointers { fill: token_scales, ..outputs };
        let (making, map) = route.making(&mut lane.target, &outputs, lane.workspace)?;
        plan.run(&mut lane.target, &PermuteCastPointers { token_scales, ..at }, &map, &making)
    })?;
    let map = permuted.map;
    (permuted.out, scale_inv, permuted.probs, map.row_id_map, map.pad_offsets, map.padded_counts).into_pyobject(py)
}

/// A vector of integers on the call's device.
fn integers<'a>(
    call: &DirectCall<'_, '_>,
    view: &TensorView<'a>,
    what: &'static str,
) -> PyResult<(Integers<'a>, usize)> {
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
fn row_probs(call: &DirectCall<'_, '_>, probs: Option<&TensorView<'_>>, rows: usize) -> PyResult<Option<Prob>> {
    let Some(view) = probs else { return Ok(None) };
    call.same_device(view, "probs")?;
    call.shape(view, "probs", &[rows as i64])?;
    call.prob(view, "probs").map(Some)
}

/// The order of the chunks: as many entries as there are splits on the device.
fn order_of<'a>(
    call: &DirectCall<'_, '_>,
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

/// The integers of a list.
fn integers_of(list: &Bound<'_, PyList>) -> PyResult<Vec<i64>> {
    let mut integers = Vec::with_capacity(list.len()); // collect() does not know the length of results
    for value in list {
        integers.push(value.extract()?);
    }
    Ok(integers)
}

/// Every value rounded up to a multiple of `align`; an overflow saturates to a value that no plan takes.
fn padded_to(values: &[i64], align: usize) -> Vec<i64> {
    let align = i64::try_from(align).unwrap_or(i64::MAX).max(1);
    let raised = |rows: i64| rows.saturating_add(align - 1);
    if align.count_ones() == 1 {
        return values.iter().map(|&rows| raised(rows) & -align).collect(); // a division costs as much as the rest
    }
    values.iter().map(|&rows| raised(rows).div_euclid(align) * align).collect()
}

/// The meaning of a mode, and the public function that uses it.
const fn move_of(mode: u32) -> (Move, &'static str) {
    match mode {
        0 => (Move::Pad, "Fp8Padding"),
        1 => (Move::Unpad, "Fp8Unpadding"),
        2 => (Move::Sort, "moe_sort_chunks_by_index"),
        _ => (Move::Unsort, "moe_sort_chunks_by_index"),
    }
}

/// A list of splits that was checked against the rows of the input, and the padded splits.
struct Listed {
    values: Vec<i64>,
    padded: Vec<i64>,
    out_rows: usize,
}

impl Listed {
    fn new(mode: u32, splits: &Bound<'_, PyList>, align: usize, in_rows: usize) -> PyResult<Self> {
        let (mode, op) = move_of(mode);
        let refuse = |expected: std::fmt::Arguments<'_>| {
            Err(Error::shape(op, "m_splits", expected, format_args!("{splits:?}"))).python()
        };
        let Ok(values) = integers_of(splits) else {
            return refuse(format_args!("integers of 64 bits"));
        };
        let add = |sum: usize, &rows: &i64| usize::try_from(rows).ok()?.checked_add(sum);
        let plain = values.iter().try_fold(0, add).filter(|&rows| rows <= in_rows);
        let padded = if plain.is_some() { padded_to(&values, align) } else { Vec::new() };
        let padded_rows = padded.iter().fold(0_i64, |sum, &rows| sum.saturating_add(rows)) as usize;
        match (plain, mode) {
            (Some(_), Move::Pad) => Ok(Self { values, padded, out_rows: padded_rows }),
            (Some(plain), _) if padded_rows <= in_rows => Ok(Self { values, padded, out_rows: plain }),
            _ => refuse(format_args!("none negative, and take at most the {in_rows} rows of inp")),
        }
    }

    fn pads_nothing(&self) -> bool {
        self.padded == self.values
    }

    fn padded_list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let known = multiples(py);
        let integer = |&rows: &i64| match known.get(rows as usize / STEP) {
            Some(integer) if (rows as usize).is_multiple_of(STEP) => integer.bind(py).clone(),
            _ => PyInt::new(py, rows),
        };
        PyList::new(py, self.padded.iter().map(integer))
    }
}

/// The usual divisor of alignments.
const STEP: usize = 16;

/// The first multiples of [`STEP`] as Python integers, since making and freeing integers would dominate the time of a
/// list of padded splits.
fn multiples(py: Python<'_>) -> &'static [Py<PyInt>] {
    static MULTIPLES: PyOnceLock<Vec<Py<PyInt>>> = PyOnceLock::new();
    MULTIPLES.get_or_init(py, || (0..4096).map(|count| PyInt::new(py, count * STEP).unbind()).collect())
}

/// Rows padded or unpadded by a list: (out, padded splits). The list gives the number of rows; if no padding is needed,
/// out is None. Padded splits come with `mode` 0, to pad; 1 is to unpad.
#[pyfunction]
#[pyo3(signature = (inp, splits, mode, align, /))]
pub(crate) fn moe_pad_list<'py>(
    inp: &Bound<'py, PyAny>,
    splits: &Bound<'py, PyList>,
    mode: u32,
    align: usize,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = inp.py();
    let state = state(py)?;
    let (kind, op) = move_of(mode);
    let inp = Input::new(state, inp, "inp")?;
    let x = inp.view(state)?;
    let call = DirectCall::new(state, py, op, x.device())?;
    let (in_rows, cols) = call.matrix(&x, "inp")?;
    let float = call.float(&x, "inp")?;
    let listed = Listed::new(mode, splits, align, in_rows)?;
    if listed.pads_nothing() {
        return (py.None(), splits).into_pyobject(py);
    }
    let (out_rows, row_bytes) = (listed.out_rows, cols * float.size());
    let plan = PadPlan::new(PadSpec { mode: kind, in_rows, out_rows, row_bytes, align, prob: None }).python()?;
    let out = call.empty(&[out_rows as i64, cols as i64], float.into())?;
    let at = PadPointers { x: x.data(), out: call.pointer(Some(&out))?, ..PadPointers::default() };
    call.run(0, |target, _| plan.run(target, &at, &Splits::Values(&listed.values), None))?;
    let padded = if kind == Move::Pad { Some(listed.padded_list(py)?) } else { None };
    (out, padded).into_pyobject(py)
}

/// Sizes of the result of `moe_pad_list` for an input with `in_rows` rows: (rows of the output, padded splits); no rows
/// if no padding is needed.
#[pyfunction]
#[pyo3(signature = (splits, mode, align, in_rows, /))]
pub(crate) fn moe_padded_splits<'py>(
    splits: &Bound<'py, PyList>,
    mode: u32,
    align: usize,
    in_rows: usize,
) -> PyResult<(Option<usize>, Bound<'py, PyList>)> {
    let listed = Listed::new(mode, splits, align, in_rows)?;
    if listed.pads_nothing() {
        return Ok((None, splits.clone()));
    }
    Ok((Some(listed.out_rows), listed.padded_list(splits.py())?))
}

/// Rows moved in segments: (out, `out_probs`, padded splits). `splits` is a list of int or a tensor on the input's
/// device; `mode` is 0 to pad, 1 to unpad, 2 to sort chunks, 3 to undo that. Padded splits are returned only if a
/// tensor of splits pads rows.
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
    let (mode, op) = move_of(mode);
    let (inp, probs) = (Input::new(state, inp, "inp")?, Input::optional(state, probs, "probs")?);
    let x = inp.view(state)?;
    let probs_view = probs.as_ref().map(|probs| probs.view(state)).transpose()?;
    let call = DirectCall::new(state, py, op, x.device())?;
    let (in_rows, cols) = call.matrix(&x, "inp")?;
    let float = call.float(&x, "inp")?;
    let prob = row_probs(&call, probs_view.as_ref(), in_rows)?;
    let values = splits.cast::<PyList>().ok().map(integers_of).transpose()?;
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
    let plan = PadPlan::new(PadSpec { mode, in_rows, out_rows: rows, row_bytes: cols * float.size(), align, prob })
        .python()?;
    let out = call.empty(&[rows as i64, cols as i64], float.into())?;
    let out_probs = prob.map(|prob| call.empty(&[rows as i64], prob.into())).transpose()?;
    let padded = match (&splits_view, mode) {
        (Some(view), Move::Pad) => Some(call.empty(view.shape(), view.dtype())?),
        _ => None,
    };
    let at = PadPointers {
        x: x.data(),
        out: call.pointer(Some(&out))?,
        probs: probs_view.map_or(DevPtr::null(), |view| view.data()),
        out_probs: call.pointer(out_probs.as_ref())?,
        padded_splits: call.pointer(padded.as_ref())?,
        ..PadPointers::default()
    };
    call.run(0, |target, _| plan.run(target, &at, &splits, index))?;
    (out, out_probs, padded).into_pyobject(py)
}
