//! MoE permutation for Python: read the tensors, allocate the outputs, run the plans.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::gemm::grouped::BLOCK;
use te_fast_core::launch::target::Target;
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};
use te_fast_core::ops::permute::{PermutePlan, PermutePointers};
use te_fast_core::ops::permute_map::{EndsPlan, Making, MapPlan, MapPointers, MapSpec, STATE_BYTES, read_dropped};
use te_fast_core::ops::permute_merge::{UnpermuteBwdPointers, UnpermutePlan, UnpermutePointers};
use te_fast_core::ops::permute_scales::{PermuteScalesPlan, PermuteScalesPointers, ScaleLines};
use te_fast_core::ops::row_map::{Layout, MapBuffers, MapShape, Prob};
use te_fast_core::runtime::lane::Workspace;

use crate::direct::call::{DirectCall, Input};
use crate::direct::permute_route::{
    MapTensors, Permuted, Route, RouteSpec, TokenInputs, Wanted, map_outputs, routing_of,
};
use crate::error::IntoPython;
use crate::torch::process::state;
use crate::torch::reader::view_of;

/// Block scales of the rows to permute, and memory for the permuted ones.
struct Scales<'a, 'py> {
    given: TensorView<'a>,
    out: Bound<'py, PyAny>,
    plan: PermuteScalesPlan,
}

impl<'a, 'py> Scales<'a, 'py> {
    /// Reads f32 `(blocks, at least tokens)`; the permuted lines are as long as GEMMs read them.
    fn new(call: &DirectCall<'_, 'py>, scales: &'a Input<'_, 'py>, shape: MapShape) -> PyResult<Self> {
        let given = scales.view(call.state)?;
        call.same_device(&given, "scales")?;
        call.dtype(&given, "scales", DType::F32)?;
        let (lines, in_line) = call.matrix(&given, "scales")?;
        let [_, out_line] = scale_shape(BlockShape::OneDimensional, shape.rows, lines * BLOCK);
        let plan = PermuteScalesPlan::new(shape, ScaleLines { lines, in_line, out_line }).python()?;
        let out = call.empty(&[lines as i64, out_line as i64], DType::F32)?;
        Ok(Self { given, out, plan })
    }
}

/// Bytes of the numbers by which scales are gathered; none without scales.
fn number_bytes(scales: Option<&Scales<'_, '_>>) -> usize {
    scales.map_or(0, |scales| scales.plan.number_bytes())
}

/// Rows permuted and, if there are scales, numbered in `numbers`, by which the scales then go to `out_scales`.
fn run_permutation(
    target: &mut Target<'_>,
    (plan, at): (&PermutePlan, &PermutePointers<DevPtr<'_>>),
    (map, making): (&MapBuffers<'_>, &Making<'_>),
    scales: Option<(&Scales<'_, '_>, DevPtr<'_>)>,
    numbers: DevPtr<'_>,
) -> te_fast_core::Result<()> {
    let Some((scales, out)) = scales else { return plan.run(target, at, map, making) };
    plan.run(target, &PermutePointers { numbers, ..*at }, map, making)?;
    scales.plan.run(target, &PermuteScalesPointers { scales: scales.given.data(), numbers, out })
}

/// Map and permutation in one call: (out, `permuted_probs`, `row_id_map`, `pad_offsets`, `padded_counts`, ends, permuted
/// scales).
#[pyfunction]
#[pyo3(signature = (inp, routing_map, probs, rows, align, index, keep_ends, scales=None, /))]
pub(crate) fn moe_permute<'py>(
    inp: &Bound<'py, PyAny>,
    routing_map: &Bound<'py, PyAny>,
    probs: Option<&Bound<'py, PyAny>>,
    rows: usize,
    align: usize,
    index: bool,
    keep_ends: bool,
    scales: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyTuple>> {
    let (py, op) = (inp.py(), "moe_permute");
    let state = state(py)?;
    let inputs = TokenInputs::new(state, inp, routing_map, probs)?;
    let views = inputs.views(state)?;
    let scales = Input::optional(state, scales, "scales")?;
    let call = DirectCall::new(state, py, op, views.x.device())?;
    let route = Route::new(&call, &views, RouteSpec { rows, align, index })?;
    let scales = scales.as_ref().map(|scales| Scales::new(&call, scales, route.shape)).transpose()?;
    let plan = PermutePlan::new(route.shape, route.cols * route.float.size(), route.prob).python()?;
    let permuted = Permuted::new(&call, &route, route.float.into(), Wanted { pads: align > 0, ends: keep_ends })?;
    let outputs = map_outputs(&call, &views.routing, &permuted.map)?;
    let (out, out_probs) = (call.pointer(Some(&permuted.out))?, call.pointer(permuted.probs.as_ref())?);
    let at = PermutePointers { x: views.x.data(), out, probs: views.probs(), out_probs, ..PermutePointers::default() };
    let out_scales = call.pointer(scales.as_ref().map(|scales| &scales.out))?;
    let of_map = route.scratch_bytes();
    call.with_counters(STATE_BYTES, of_map + number_bytes(scales.as_ref()), |lane| {
        let (making, map) = route.making(&mut lane.target, &outputs, lane.workspace)?;
        let numbers = lane.workspace.scratch.offset(of_map);
        let scales = scales.as_ref().map(|scales| (scales, out_scales));
        run_permutation(&mut lane.target, (&plan, &at), (&map, &making), scales, numbers)
    })?;
    let (map, scales) = (permuted.map, scales.as_ref().map(|scales| scales.out.clone()));
    (permuted.out, permuted.probs, map.row_id_map, map.pad_offsets, map.padded_counts, map.ends, scales)
        .into_pyobject(py)
}

/// The map alone: (`row_id_map`, `pad_offsets`, `padded_counts`, ends, totals); totals are the padded and the routed rows.
#[pyfunction]
#[pyo3(signature = (routing_map, align, index, /))]
pub(crate) fn moe_map<'py>(
    routing_map: &Bound<'py, PyAny>,
    align: usize,
    index: bool,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = routing_map.py();
    let state = state(py)?;
    let routing_map = Input::new(state, routing_map, "routing_map")?;
    let view = routing_map.view(state)?;
    let call = DirectCall::new(state, py, "moe_permute", view.device())?;
    let tokens = view.shape().first().map_or(0, |&tokens| tokens as usize);
    let (layout, routing) = routing_of(&call, &view, index, tokens)?;
    let shape = MapShape { tokens, rows: usize::MAX, layout };
    let plan = MapPlan::new(MapSpec { shape, routing, align: align.max(1), leads: false }).python()?;
    let map = MapTensors::new(&call, &shape, &plan, Wanted { pads: align > 0, ends: true })?;
    let totals = call.empty(&[2], DType::I64)?;
    let outputs = MapPointers { totals: call.pointer(Some(&totals))?, ..map_outputs(&call, &view, &map)? };
    call.with_counters(STATE_BYTES, plan.scratch_bytes(), |lane| {
        let Workspace { scratch: counts, counters: state, .. } = lane.workspace;
        plan.run(&mut lane.target, &MapPointers { counts, state, ..outputs })
    })?;
    (map.row_id_map, map.pad_offsets, map.padded_counts, map.ends, totals).into_pyobject(py)
}

/// Shape of a finished map: of two dimensions for a mask, else an index map with `top_k` slots per token.
fn shape_of(call: &DirectCall<'_, '_>, map: &TensorView<'_>, top_k: usize, rows: usize) -> PyResult<MapShape> {
    call.same_device(map, "row_id_map")?;
    call.dtype(map, "row_id_map", DType::I32)?;
    let shape = match (top_k, map.shape()) {
        (0, &[tokens, width]) if width % 2 == 1 => {
            Some(MapShape { tokens: tokens as usize, rows, layout: Layout::Mask { experts: (width as usize - 1) / 2 } })
        }
        (1.., &[entries]) if (entries as usize).is_multiple_of(top_k) => {
            Some(MapShape { tokens: entries as usize / top_k, rows, layout: Layout::Index { top_k } })
        }
        _ => None,
    };
    let expected = if top_k == 0 {
        "of shape (tokens, 2 * experts + 1), as map_type 'mask' makes it"
    } else {
        "of tokens * top_k entries, as map_type 'index' makes it"
    };
    match shape {
        Some(shape) => Ok(shape),
        None => Err(Error::shape(call.op, "row_id_map", expected, format_args!("{:?}", map.shape()))).python(),
    }
}

/// Pad offsets of a mask map, or null.
fn pads_of<'a>(call: &DirectCall<'_, '_>, pads: Option<&TensorView<'a>>, shape: &MapShape) -> PyResult<DevPtr<'a>> {
    let Some(pads) = pads else { return Ok(DevPtr::null()) };
    call.same_device(pads, "pad_offsets")?;
    call.dtype(pads, "pad_offsets", DType::I64)?;
    call.shape(pads, "pad_offsets", &[shape.groups() as i64])?;
    Ok(pads.data())
}

/// Rows permuted by a finished map: (out, `permuted_probs`, permuted scales). Without `ends` they are counted from the map
/// first.
#[pyfunction]
#[pyo3(signature = (inp, probs, row_id_map, pad_offsets, ends, rows, top_k, scales=None, /))]
pub(crate) fn moe_apply<'py>(
    inp: &Bound<'py, PyAny>,
    probs: Option<&Bound<'py, PyAny>>,
    row_id_map: &Bound<'py, PyAny>,
    pad_offsets: Option<&Bound<'py, PyAny>>,
    ends: Option<&Bound<'py, PyAny>>,
    rows: usize,
    top_k: usize,
    scales: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = inp.py();
    let state = state(py)?;
    let (inp, row_id_map) = (Input::new(state, inp, "inp")?, Input::new(state, row_id_map, "row_id_map")?);
    let (probs, pads) = (Input::optional(state, probs, "probs")?, Input::optional(state, pad_offsets, "pad_offsets")?);
    let scales = Input::optional(state, scales, "scales")?;
    let (x, map) = (inp.view(state)?, row_id_map.view(state)?);
    let call = DirectCall::new(state, py, "moe_permute", x.device())?;
    let (tokens, cols) = call.matrix(&x, "inp")?;
    let float = call.float(&x, "inp")?;
    let shape = shape_of(&call, &map, top_k, rows)?;
    call.shape(&x, "inp", &[shape.tokens as i64, cols as i64])?;
    let probs_view = probs.as_ref().map(|probs| probs.view(state)).transpose()?;
    let prob = call.probs(probs_view.as_ref(), tokens, shape.slots())?;
    let pads_view = pads.as_ref().map(|pads| pads.view(state)).transpose()?;
    let pad_offsets = pads_of(&call, pads_view.as_ref(), &shape)?;
    let scales = scales.as_ref().map(|scales| Scales::new(&call, scales, shape)).transpose()?;
    let plan = PermutePlan::new(shape, cols * float.size(), prob).python()?;
    let counted = CountedEnds::new(&call, &shape, ends)?;
    let out = call.empty(&[rows as i64, cols as i64], float.into())?;
    let out_probs = prob.map(|prob| call.empty(&[rows as i64], prob.into())).transpose()?;
    let at = PermutePointers {
        x: x.data(),
        out: call.pointer(Some(&out))?,
        probs: probs_view.map_or(DevPtr::null(), |view| view.data()),
        out_probs: call.pointer(out_probs.as_ref())?,
        ..PermutePointers::default()
    };
    let out_scales = call.pointer(scales.as_ref().map(|scales| &scales.out))?;
    let of_ends = counted.bytes(); // of whole i32, as the numbers are
    call.run(of_ends + number_bytes(scales.as_ref()), |target, scratch| {
        let map = counted.count(target, map.data(), pad_offsets, scratch)?;
        let numbers = scratch.offset(of_ends);
        let scales = scales.as_ref().map(|scales| (scales, out_scales));
        run_permutation(target, (&plan, &at), (&map, &Making::default()), scales, numbers)
    })?;
    (out, out_probs, scales.as_ref().map(|scales| scales.out.clone())).into_pyobject(py)
}

/// The ends from a permutation, or ends that are still to be counted.
struct CountedEnds<'a> {
    given: DevPtr<'a>,
    plan: EndsPlan,
}

impl<'a> CountedEnds<'a> {
    fn new(call: &DirectCall<'_, '_>, shape: &MapShape, ends: Option<&'a Bound<'_, PyAny>>) -> PyResult<Self> {
        let given = match ends {
            Some(ends) => {
                let view = view_of(&call.state.reader, ends, "ends").python()?;
                call.same_device(&view, "ends")?;
                call.dtype(&view, "ends", DType::I32)?;
                call.shape(&view, "ends", &[shape.groups() as i64])?;
                view.data()
            }
            None => DevPtr::null(),
        };
        Ok(Self { given, plan: EndsPlan::new(*shape).python()? })
    }

    fn bytes(&self) -> usize {
        if self.given.is_null() { self.plan.bytes() } else { 0 }
    }

    fn count<'b>(
        &self,
        target: &mut Target<'_>,
        map: DevPtr<'b>,
        pad_offsets: DevPtr<'b>,
        scratch: DevPtr<'b>,
    ) -> te_fast_core::Result<MapBuffers<'b>>
    where
        'a: 'b,
    {
        if self.given.is_null() {
            self.plan.run(target, map, scratch)?;
            return Ok(MapBuffers { map, pad_offsets, ends: scratch, partials: self.plan.partials() });
        }
        Ok(MapBuffers { map, pad_offsets, ends: self.given, partials: 1 })
    }
}

/// Rows merged back: (out, values of `in_probs` per token and slot). `probs` weigh the rows.
#[pyfunction]
#[pyo3(signature = (inp, row_id_map, probs, pad_offsets, in_probs, tokens, top_k, /))]
pub(crate) fn moe_unpermute<'py>(
    inp: &Bound<'py, PyAny>,
    row_id_map: &Bound<'py, PyAny>,
    probs: Option<&Bound<'py, PyAny>>,
    pad_offsets: Option<&Bound<'py, PyAny>>,
    in_probs: Option<&Bound<'py, PyAny>>,
    tokens: usize,
    top_k: usize,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = inp.py();
    let state = state(py)?;
    let (inp, row_id_map) = (Input::new(state, inp, "inp")?, Input::new(state, row_id_map, "row_id_map")?);
    let (probs, in_probs) =
        (Input::optional(state, probs, "merging_probs")?, Input::optional(state, in_probs, "probs")?);
    let pads = Input::optional(state, pad_offsets, "pad_offsets")?;
    let (x, map) = (inp.view(state)?, row_id_map.view(state)?);
    let call = DirectCall::new(state, py, "moe_unpermute", x.device())?;
    let (rows, cols) = call.matrix(&x, "inp")?;
    let float = call.float(&x, "inp")?;
    let shape = shape_of(&call, &map, top_k, rows)?;
    if shape.tokens != tokens {
        return Err(Error::shape(
            call.op,
            "restore_shape",
            format_args!("({}, {cols}), as row_id_map has it", shape.tokens),
            tokens,
        ))
        .python();
    }
    let probs_view = probs.as_ref().map(|probs| probs.view(state)).transpose()?;
    let prob = call.probs(probs_view.as_ref(), tokens, shape.slots())?;
    let in_view = in_probs.as_ref().map(|probs| probs.view(state)).transpose()?;
    let out_prob = match &in_view {
        Some(view) => {
            call.shape(view, "the gradient of permuted_probs", &[rows as i64])?;
            Some(call.prob(view, "the gradient of permuted_probs")?)
        }
        None => None,
    };
    let pads_view = pads.as_ref().map(|pads| pads.view(state)).transpose()?;
    let pad_offsets = pads_of(&call, pads_view.as_ref(), &shape)?;
    let plan = UnpermutePlan::new(shape, cols, float).python()?;
    let out = call.empty(&[tokens as i64, cols as i64], float.into())?;
    let out_probs = out_prob.map(|prob| call.empty(&[tokens as i64, shape.slots() as i64], prob.into())).transpose()?;
    let at = UnpermutePointers {
        x: x.data(),
        out: call.pointer(Some(&out))?,
        probs: probs_view.map_or(DevPtr::null(), |view| view.data()),
        in_probs: in_view.map_or(DevPtr::null(), |view| view.data()),
        out_probs: call.pointer(out_probs.as_ref())?,
    };
    let map = MapBuffers { map: map.data(), pad_offsets, ends: DevPtr::null(), partials: 0 };
    call.run(0, |target, _| plan.run(target, &at, &map, (prob, out_prob)))?;
    (out, out_probs).into_pyobject(py)
}

/// Gradients of a merge with probabilities: (rows, probs).
#[pyfunction]
#[pyo3(signature = (dout, inp, row_id_map, probs, pad_offsets, ends, top_k, /))]
pub(crate) fn moe_unpermute_backward<'py>(
    dout: &Bound<'py, PyAny>,
    inp: &Bound<'py, PyAny>,
    row_id_map: &Bound<'py, PyAny>,
    probs: &Bound<'py, PyAny>,
    pad_offsets: Option<&Bound<'py, PyAny>>,
    ends: Option<&Bound<'py, PyAny>>,
    top_k: usize,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = inp.py();
    let state = state(py)?;
    let (dout, inp) = (Input::new(state, dout, "the gradient")?, Input::new(state, inp, "inp")?);
    let (row_id_map, probs) =
        (Input::new(state, row_id_map, "row_id_map")?, Input::new(state, probs, "merging_probs")?);
    let pads = Input::optional(state, pad_offsets, "pad_offsets")?;
    let (grad, x, map, probs) = (dout.view(state)?, inp.view(state)?, row_id_map.view(state)?, probs.view(state)?);
    let call = DirectCall::new(state, py, "moe_unpermute", x.device())?;
    let (rows, cols) = call.matrix(&x, "inp")?;
    let float = call.float(&x, "inp")?;
    let shape = shape_of(&call, &map, top_k, rows)?;
    call.same_device(&grad, "the gradient")?;
    call.dtype(&grad, "the gradient", x.dtype())?;
    call.shape(&grad, "the gradient", &[shape.tokens as i64, cols as i64])?;
    let prob = call.probs(Some(&probs), shape.tokens, shape.slots())?.unwrap_or(Prob::F32);
    let pads_view = pads.as_ref().map(|pads| pads.view(state)).transpose()?;
    let pad_offsets = pads_of(&call, pads_view.as_ref(), &shape)?;
    let plan = UnpermutePlan::new(shape, cols, float).python()?;
    let counted = CountedEnds::new(&call, &shape, ends)?;
    let dx = call.empty(&[rows as i64, cols as i64], float.into())?;
    let dprobs = call.empty(&[shape.tokens as i64, shape.slots() as i64], prob.into())?;
    let at = UnpermuteBwdPointers {
        dout: grad.data(),
        x: x.data(),
        dx: call.pointer(Some(&dx))?,
        probs: probs.data(),
        dprobs: call.pointer(Some(&dprobs))?,
    };
    call.run(counted.bytes(), |target, scratch| {
        let map = counted.count(target, map.data(), pad_offsets, scratch)?;
        plan.run_bwd(target, &at, &map, prob)
    })?;
    (dx, dprobs).into_pyobject(py)
}

/// The count of dropped rows of `like`'s device, one int64; `clear` resets it.
#[pyfunction]
#[pyo3(signature = (like, clear, /))]
pub(crate) fn moe_dropped<'py>(like: &Bound<'py, PyAny>, clear: bool) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    let state = state(py)?;
    let device = view_of(&state.reader, like, "a tensor").python()?.device();
    let call = DirectCall::new(state, py, "moe_dropped", device)?;
    let out = call.empty(&[], DType::I64)?;
    let pointer = call.pointer(Some(&out))?;
    call.run(0, |target, _| read_dropped(target, pointer, clear))?;
    Ok(out)
}
