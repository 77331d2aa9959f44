//! Activation recomputation under delayed scaling: the second run of a forward quantises with the first one's scales.
//! Python keeps them in between (`_scale_tape.py`); linear layers and programs ask here.

use pyo3::prelude::*;
use te_fast_core::autocast::AmaxSlots;
use te_fast_core::kernel::DevPtr;
use te_fast_core::linear::Slot;

use crate::autocast::{Replaced, request_of};
use crate::error::IntoPython;
use crate::linear::hooks;
use crate::state::{State, state};
use crate::tensor::Held;

/// The forward scales of an earlier call, which its recomputation uses without raising a maximum.
#[derive(Debug)]
pub(crate) struct Replay {
    scale: Held,
    /// Updates of the scales before it.
    pub(crate) generation: u64,
}

impl Replay {
    /// One tensor's slot.
    pub(crate) fn slot(&self, index: usize) -> Slot<'_> {
        Slot { scale: self.scale.ptr().offset(4 * index), amax: DevPtr::null() }
    }
}

/// Tells Python that a linear op runs within activation recomputation: the first phase notes its scales, the second hands
/// them back. `handle` is what the op keeps between calls; `grads` is torch's grad mode where the op was called.
#[cold]
pub(crate) fn replay(
    state: &State,
    handle: &Bound<'_, PyAny>,
    slots: &AmaxSlots,
    grads: bool,
) -> PyResult<Option<Replay>> {
    let py = handle.py();
    let generation = state.dispatcher(py)?.0.forward_generation;
    let found = hooks(py)?.recompute.bind(py).call1((handle, slots.id(), generation, grads))?;
    if found.is_none() {
        return Ok(None);
    }
    let (scale, generation): (Bound<'_, PyAny>, u64) = found.extract()?;
    Ok(Some(Replay { scale: Held::new(&state.reader, &scale)?, generation }))
}

/// Whether layers of delayed scaling take part in activation recomputation.
#[pyfunction]
#[pyo3(signature = (active, /))]
pub(crate) fn autocast_set_recompute(py: Python<'_>, active: bool) -> PyResult<()> {
    state(py)?.dispatcher(py)?.0.autocast.recompute = active;
    Ok(())
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
pub(crate) struct HeldRegion(Option<Replaced>);

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
        let former = state(py)?.dispatcher(py)?.0.autocast.hold(&request).python()?;
        Replaced::by(py, former, recipe, group).map(|replaced| Self(Some(replaced)))
    }

    /// Puts back what was in force before; once.
    fn take_back(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(replaced) = self.0.take() else { return Ok(()) };
        let former = replaced.restore_objects(py)?;
        state(py)?.dispatcher(py)?.0.autocast.take_back(&former);
        Ok(())
    }
}
