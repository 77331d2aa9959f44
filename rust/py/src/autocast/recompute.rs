//! Activation recomputation under delayed scaling: the second run of a forward quantises with the first one's scales.
//! Python keeps these scales in between (`runtime/scale_tape.py`), and programs request them here.

use pyo3::prelude::*;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::quant::value::Slot;
use te_fast_core::recipe::region::Former;
use te_fast_core::recipe::slots::AmaxSlots;

use crate::autocast::region::{given_of, release, request_of};
use crate::error::IntoPython;
use crate::hooks::hooks;
use crate::torch::process::{State, state};
use crate::torch::reader::Held;

/// The forward scales of an earlier call, which its recomputation uses without raising a maximum.
#[derive(Debug)]
pub(crate) struct RecordedScales {
    scale: Held,
    /// Updates of the scales before it.
    pub(crate) generation: u64,
}

impl RecordedScales {
    /// One tensor's slot.
    pub(crate) fn slot(&self, index: usize) -> Slot<'_> {
        Slot { scale: self.scale.ptr().offset(4 * index), amax: DevPtr::null() }
    }
}

/// Tells Python that a linear op runs within activation recomputation: the first phase notes its scales, and the second
/// phase returns them. `handle` is the op's weight handle; `grads` is torch's grad mode where the op was called.
#[cold]
pub(crate) fn recorded_scales(
    state: &State,
    handle: &Bound<'_, PyAny>,
    slots: &AmaxSlots,
    grads: bool,
) -> PyResult<Option<RecordedScales>> {
    let py = handle.py();
    let generation = state.dispatcher(py)?.0.forward_generation;
    let found = hooks(py)?.recompute.bind(py).call1((handle, slots.id(), generation, grads))?;
    if found.is_none() {
        return Ok(None);
    }
    let (scale, generation): (Bound<'_, PyAny>, u64) = found.extract()?;
    Ok(Some(RecordedScales { scale: Held::new(&state.reader, &scale)?, generation }))
}

/// Puts this thread into a phase of activation recomputation; returns the thread's number, for
/// [`autocast_leave_phase`].
#[pyfunction]
pub(crate) fn autocast_enter_phase(py: Python<'_>) -> PyResult<u64> {
    Ok(state(py)?.dispatcher(py)?.0.autocast.enter_phase())
}

/// Ends the last phase of a thread.
#[pyfunction]
#[pyo3(signature = (thread, /))]
pub(crate) fn autocast_leave_phase(py: Python<'_>, thread: u64) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.leave_phase(thread);
    Ok(())
}

/// The number of the thread whose phases this thread is in, or None.
#[pyfunction]
pub(crate) fn autocast_phase_thread(py: Python<'_>) -> PyResult<Option<u64>> {
    Ok(state(py)?.dispatcher(py)?.0.autocast.phase_thread())
}

/// Whether the region in force is a recorded one, and whether this thread has regions of its own.
#[pyfunction]
pub(crate) fn autocast_held(py: Python<'_>) -> PyResult<(bool, bool)> {
    Ok(state(py)?.dispatcher(py)?.0.autocast.held())
}

/// Whether the caller is the first FP8 module of the outermost region; true once.
#[pyfunction]
pub(crate) fn autocast_take_first(py: Python<'_>) -> PyResult<bool> {
    Ok(state(py)?.dispatcher(py)?.0.autocast.take_first_fp8_module())
}

/// Overwrites whether the next FP8 module is the first one.
#[pyfunction]
#[pyo3(signature = (is_first, /))]
pub(crate) fn autocast_set_first(py: Python<'_>, is_first: bool) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.set_first_fp8_module(is_first);
    Ok(())
}

/// A recorded region in force, of the thread that made this.
#[pyclass(module = "te_fast._native")]
#[derive(Debug)]
pub(crate) struct HeldRegion(Option<Former>);

#[pymethods]
impl HeldRegion {
    /// The recipe must have its native form.
    #[new]
    #[pyo3(signature = (recipe, enabled, calibrating, graph, group, /))]
    fn new(
        py: Python<'_>,
        recipe: Option<Py<PyAny>>,
        enabled: bool,
        calibrating: bool,
        graph: bool,
        group: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let request = request_of(py, recipe.as_ref(), (enabled, calibrating, graph), group.as_ref())?;
        let given = given_of(recipe, group);
        Ok(Self(Some(state(py)?.dispatcher(py)?.0.autocast.hold(&request, given.clone()).python()?)))
    }

    /// Restores the former region; once.
    fn take_back(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, former) = (slf.py(), slf.try_borrow_mut()?.0.take());
        let Some(former) = former else { return Ok(()) };
        let state = state(py)?;
        state.dispatcher(py)?.0.autocast.take_back(&former);
        drop(former);
        release(py, state)
    }
}
