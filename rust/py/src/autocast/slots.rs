//! Delayed-scaling slots for Python, and the update of all scales of a direction.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::recipe::slots::{AmaxSlots, Bucket, Direction, Member, SlotMemory};
use te_fast_core::recipe::update::{self, Gathered, Reduced};
use te_fast_core::runtime::lane::Place;

use crate::autocast::groups;
use crate::autocast::recipe::NativeRecipe;
use crate::error::{IntoPython, named, to_python};
use crate::torch::process::{State, state};
use crate::torch::reader::{Held, view_of};

/// Functions of Python that an update calls, set once by `te_fast.runtime.delayed`.
#[derive(Debug)]
struct Callbacks {
    /// `world_size(group, all_gone) -> int`.
    world_size: Py<PyAny>,
    /// `agree([(id | None, tensors)], group, maxima)`: raises unless the ranks have slots of as many tensors each.
    agree: Py<PyAny>,
    /// `all_reduce(maxima, group)`: the largest of all ranks, in place.
    all_reduce: Py<PyAny>,
    /// `update(forward, [(id, first tensor)], maxima | None)`: scales by users' algorithms.
    update: Py<PyAny>,
}

static CALLBACKS: PyOnceLock<Callbacks> = PyOnceLock::new();

fn callbacks(py: Python<'_>) -> PyResult<&Callbacks> {
    CALLBACKS.get(py).ok_or_else(|| to_python(Error::state("delayed scaling", "te_fast.pytorch has not been imported")))
}

/// Sets the functions that an update of delayed scaling calls: `world_size(group, all_gone)`, `agree(slots, group,
/// maxima)`, `all_reduce(maxima, group)` and `update(forward, slots, maxima)`.
#[pyfunction]
#[pyo3(signature = (world_size, agree, all_reduce, update, /))]
pub(crate) fn delayed_callbacks(
    py: Python<'_>,
    world_size: Py<PyAny>,
    agree: Py<PyAny>,
    all_reduce: Py<PyAny>,
    update: Py<PyAny>,
) {
    CALLBACKS.get_or_init(py, || Callbacks { world_size, agree, all_reduce, update });
}

fn direction(forward: bool) -> Direction {
    if forward { Direction::Forward } else { Direction::Backward }
}

/// Updates the scales of all layers that ran: forward's, or backward's. `distributed` is whether there are other ranks to
/// reduce maxima with, `unfused` whether Python updates all scales, as for users' algorithms.
#[pyfunction]
#[pyo3(signature = (forward, distributed=false, unfused=false, /))]
pub(crate) fn update_scales(py: Python<'_>, forward: bool, distributed: bool, unfused: bool) -> PyResult<()> {
    let direction = direction(forward);
    let state = state(py)?;
    let mut reduced = Vec::new();
    if !distributed {
        state.dispatcher(py)?.0.autocast.forget_all_gone(direction);
    }
    if distributed || unfused || state.dispatcher(py)?.0.autocast.has_own_algorithms() {
        let buckets = state.dispatcher(py)?.0.autocast.buckets(direction).to_vec();
        for bucket in buckets {
            let is_reduced = distributed && bucket.recipe.delayed.reduce_amax;
            let maxima = if is_reduced { reduce(py, state, direction, &bucket)? } else { None };
            if maxima.is_none() && bucket.has_gone() {
                state.dispatcher(py)?.0.autocast.forget_gone(direction, &bucket, None);
            }
            if unfused || bucket.recipe.delayed.custom != 0 {
                let there = bucket.members().iter().filter_map(|member| Some((member.slots()?.id(), member.first)));
                let slots: Vec<_> = there.collect();
                callbacks(py)?.update.bind(py).call1((forward, slots, maxima.map(|(_, maxima)| maxima)))?;
            } else if let Some((gathered, maxima)) = maxima {
                reduced.push((gathered, Held::new(&state.reader, &maxima)?));
            }
        }
    }
    for at in 0..reduced.len() {
        let device_of = |(gathered, _): &(Gathered, Held)| gathered.bucket().device;
        let device = device_of(&reduced[at]);
        if reduced[..at].iter().all(|before| device_of(before) != device) {
            update_device(py, state, direction, device, &reduced)?;
        }
    }
    loop {
        let device = state.dispatcher(py)?.0.autocast.due_device(direction);
        let Some(device) = device else { break };
        update_device(py, state, direction, device, &[])?;
    }
    Ok(())
}

/// The number of slots that are freed on this rank in a reduction: less than any maximum, so that ranks see which slots
/// are freed on all of them.
const GONE: f32 = -1.0;

/// The maxima of a bucket, reduced over its ranks; none if this rank is the only one, or the group is gone.
fn reduce<'py>(
    py: Python<'py>,
    state: &State,
    direction: Direction,
    bucket: &Arc<Bucket>,
) -> PyResult<Option<(Gathered, Bound<'py, PyAny>)>> {
    let callbacks = callbacks(py)?;
    let group = groups::object_of(py, bucket.group)?;
    let is_of_none = bucket.group != 0 && group.is_none();
    if is_of_none || callbacks.world_size.bind(py).call1((&group, bucket.is_gone()))?.extract::<i64>()? <= 1 {
        return Ok(None);
    }
    let _guard = state.guard(py, bucket.device)?;
    let stream = state.reader.stream(py, bucket.device)?;
    let place = Place { device: bucket.device, stream };
    let maxima = state.empty_sized(py, bucket.device, &[i64::from(bucket.tensors())], DType::F32)?;
    let may_wait = bucket.device == Device::Cpu || !is_capturing(stream).python()?;
    if may_wait && !bucket.is_agreed() {
        let id = |member: &Member| member.slots().map(|slots| slots.id());
        let slots: Vec<_> = bucket.members().iter().map(|member| (id(member), member.count)).collect();
        callbacks.agree.bind(py).call1((slots, &group, &maxima))?;
        bucket.agree();
    }
    let has_gone = bucket.has_gone();
    if has_gone {
        maxima.call_method1(intern!(py, "fill_"), (GONE,))?;
    }
    let gathered = {
        let view = view_of(&state.reader, &maxima, "maxima").python()?;
        update::gather(&mut state.dispatcher(py)?.0, bucket, place, view.data(), has_gone).python()?
    };
    callbacks.all_reduce.bind(py).call1((&maxima, &group))?;
    if bucket.looks_for_gone() && has_gone && may_wait {
        let values: Vec<f32> = maxima.call_method0(intern!(py, "tolist"))?.extract()?;
        state.dispatcher(py)?.0.autocast.forget_gone(direction, bucket, Some(&values));
    }
    Ok(Some((gathered, maxima)))
}

fn update_device(
    py: Python<'_>,
    state: &State,
    direction: Direction,
    device: Device,
    reduced: &[(Gathered, Held)],
) -> PyResult<()> {
    let _guard = state.guard(py, device)?;
    let stream = state.reader.stream(py, device)?;
    let reduced: Vec<_> = reduced.iter().map(|(gathered, maxima)| Reduced { gathered, maxima: maxima.ptr() }).collect();
    update::update(&mut state.dispatcher(py)?.0, direction, Place { device, stream }, &reduced).python()
}

/// Tells the dispatcher that others have changed forward scales, so that cached weights are out of date.
#[pyfunction]
pub(crate) fn note_scale_change(py: Python<'_>) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.forward_generation += 1;
    Ok(())
}

/// Begins or ends a phase in which Python's wrappers of graphs warm up and capture.
#[pyfunction]
#[pyo3(signature = (begins, /))]
pub(crate) fn set_graph_phase(py: Python<'_>, begins: bool) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.graph_phase = begins;
    Ok(())
}

/// The numbers of the slots that take part in updates, in the order of all ranks.
#[pyfunction]
#[pyo3(signature = (forward, /))]
pub(crate) fn amax_participants(py: Python<'_>, forward: bool) -> PyResult<Vec<u64>> {
    let slots = state(py)?.dispatcher(py)?.0.autocast.participants(direction(forward));
    Ok(slots.iter().map(|slots| slots.id()).collect())
}

/// Notes that the layers of all of them ran.
#[pyfunction]
#[pyo3(signature = (forward, /))]
pub(crate) fn amax_mark_all_ran(py: Python<'_>, forward: bool) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.mark_all_ran(direction(forward));
    Ok(())
}

#[derive(Debug)]
struct Buffers {
    history: Held,
    scale: Held,
}

impl SlotMemory for Buffers {
    fn history(&self) -> DevPtr<'_> {
        self.history.ptr()
    }

    fn scale(&self) -> DevPtr<'_> {
        self.scale.ptr()
    }
}

/// The delayed-scaling buffers of one layer in one direction, known to the dispatcher as long as this lives.
#[pyclass(module = "te_fast._native", name = "AmaxSlots", frozen)]
#[derive(Debug)]
pub(crate) struct SlotsHandle(Arc<AmaxSlots>);

impl Drop for SlotsHandle {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}

impl SlotsHandle {
    /// The slots themselves, for a layer that reads a number of tensors of one direction.
    pub(crate) fn slots(&self, layer: &str, forward: bool, count: usize) -> PyResult<Arc<AmaxSlots>> {
        let slots = &self.0;
        if slots.direction() == direction(forward) && slots.count() as usize >= count {
            return Ok(Arc::clone(slots));
        }
        let what = if forward { "scaling_fwd" } else { "scaling_bwd" };
        let expected = format!("scales of at least {count} tensors of that direction");
        let got = format!("{:?} scales of {}; they are another layer's", slots.direction(), slots.count());
        Err(named(&Error::shape("delayed scaling", what, expected, got), Some(layer)))
    }
}

#[pymethods]
impl SlotsHandle {
    #[new]
    #[pyo3(signature = (amax_history, scale, recipe, forward, group=None, former=None, /))]
    fn new(
        amax_history: &Bound<'_, PyAny>,
        scale: &Bound<'_, PyAny>,
        recipe: &Bound<'_, NativeRecipe>,
        forward: bool,
        group: Option<&Bound<'_, PyAny>>,
        former: Option<&Bound<'_, Self>>,
    ) -> PyResult<Self> {
        let py = scale.py();
        let state = state(py)?;
        let reader = &state.reader;
        let group = groups::number_of(group)?;
        let plan = {
            let views =
                (view_of(reader, amax_history, "amax_history").python()?, view_of(reader, scale, "scale").python()?);
            let autocast = &mut state.dispatcher(py)?.0.autocast;
            autocast.plan_slots(direction(forward), recipe.get().0, group, &views.0, &views.1).python()?
        };
        let memory = Buffers { history: Held::alias(reader, amax_history)?, scale: Held::alias(reader, scale)? };
        let former = former.map(|former| &*former.get().0);
        Ok(Self(state.dispatcher(py)?.0.autocast.register(plan, Box::new(memory), former)))
    }

    /// Ascends in the order of registration.
    #[getter]
    fn id(&self) -> u64 {
        self.0.id()
    }

    /// Whether the layer ran since the last update.
    #[getter]
    fn ran(&self) -> bool {
        self.0.ran()
    }

    /// Takes part in updates from now on, at the next place in the order of all ranks.
    fn take_part(&self, py: Python<'_>) -> PyResult<()> {
        state(py)?.dispatcher(py)?.0.autocast.take_part(&self.0);
        Ok(())
    }

    /// Takes part in the next update.
    fn mark_ran(&self, py: Python<'_>) -> PyResult<()> {
        state(py)?.dispatcher(py)?.0.autocast.mark_ran(&self.0);
        Ok(())
    }

    /// Takes no part in the next update: the caller has updated the scales itself.
    fn clear_ran(&self) {
        self.0.clear_ran();
    }
}
