//! Activation recomputation under delayed scaling: the second run of a forward quantises with the first one's scales.
//! Python keeps them in between (`_scale_tape.py`); linear layers and programs ask here.

use pyo3::prelude::*;
use te_fast_core::autocast::AmaxSlots;
use te_fast_core::kernel::DevPtr;
use te_fast_core::linear::Slot;

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

/// Whether layers of delayed scaling take part in activation recomputation, and whether its second phase has put the
/// region of the first one in force.
#[pyfunction]
#[pyo3(signature = (active, as_recorded, /))]
pub(crate) fn autocast_set_recompute(py: Python<'_>, active: bool, as_recorded: bool) -> PyResult<()> {
    let autocast = &mut state(py)?.dispatcher(py)?.0.autocast;
    (autocast.recompute, autocast.as_recorded) = (active, as_recorded);
    Ok(())
}
