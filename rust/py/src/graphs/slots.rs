//! Scales of delayed scaling that a graph brings: an operator reads and writes them where the graph has them.

use std::sync::Arc;

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::recipe::update::update_given;
use te_fast_core::runtime::lane::Place;

use crate::autocast::recipe::NativeRecipe;
use crate::error::{Failure, IntoPython};
use crate::graphs::OP;
use crate::graphs::call::TracedCall;
use crate::program::handle::ProgramHandle;
use crate::program::weight::{GivenSlots, OpSlots};
use crate::torch::process::{State, state};
use crate::torch::reader::{Held, view_of};

/// Histories and scales that a call brings, one of each for each set of slots of the chain's linear ops.
pub(super) fn given_slots(
    state: &State,
    histories: &[Bound<'_, PyAny>],
    scales: &[Bound<'_, PyAny>],
    is_forward: bool,
) -> PyResult<Vec<Arc<GivenSlots>>> {
    histories
        .iter()
        .zip(scales)
        .map(|(history, scale)| {
            let (history, scale) = (Held::of_call(&state.reader, history)?, Held::of_call(&state.reader, scale)?);
            Ok(Arc::new(GivenSlots { history, scale, is_forward }))
        })
        .collect()
}

/// The slots of each linear op, in memory that the call brings; ops of one layer share theirs.
pub(super) fn slots_of(
    handle: &Bound<'_, ProgramHandle>,
    given: &[Arc<GivenSlots>],
    is_forward: bool,
) -> Result<Vec<Option<OpSlots>>, Failure> {
    let py = handle.py();
    let weights: Vec<_> = handle.try_borrow()?.weights.iter().map(|weight| weight.clone_ref(py)).collect();
    let mut seen = Vec::new();
    let mut list = Vec::with_capacity(weights.len());
    for weight in weights {
        let slots = weight.bind(py).try_borrow()?.slots.clone();
        let Some(slots) = slots.filter(|_| !given.is_empty()) else {
            list.push(None);
            continue;
        };
        let id = if is_forward { slots.forward.id() } else { slots.backward.id() };
        let at = seen.iter().position(|&known| known == id).unwrap_or_else(|| {
            seen.push(id);
            seen.len() - 1
        });
        let memory = given.get(at).ok_or_else(|| {
            Error::state(OP, "a compiled call brings fewer scales than its linear ops have; compile it again")
        })?;
        list.push(Some(slots.given(memory)));
    }
    Ok(list)
}

/// Notes at a forward of a compiler's whether it is that of its region's first FP8 module, whose backward updates the scales.
#[pyfunction]
#[pyo3(signature = (program, call, /))]
pub(crate) fn traced_note_first(program: &Bound<'_, ProgramHandle>, call: &Bound<'_, TracedCall>) -> PyResult<()> {
    let (py, traced) = (program.py(), call.get());
    let state = state(py)?;
    if !traced.is_delayed() || !traced.any_grad() {
        return Ok(());
    }
    let is_repeated = state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? >= 0;
    if !is_repeated {
        let is_first = match traced.is_first {
            Some(is_first) => is_first,
            None => state.dispatcher(py)?.0.autocast.take_first_fp8_module(),
        };
        program.try_borrow_mut()?.was_first = is_first;
    }
    Ok(())
}

/// Updates scales that a graph brings, all of one recipe, from their histories: the end of a region inside of a graph.
#[pyfunction]
#[pyo3(signature = (histories, scales, recipe, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_update_scales(
    py: Python<'_>,
    histories: Vec<Bound<'_, PyAny>>,
    scales: Vec<Bound<'_, PyAny>>,
    recipe: &Bound<'_, NativeRecipe>,
) -> PyResult<()> {
    let state = state(py)?;
    let mut given = Vec::with_capacity(histories.len());
    for (history, scale) in histories.iter().zip(&scales) {
        let history = view_of(&state.reader, history, "amax_history").python()?;
        let scale = view_of(&state.reader, scale, "scale").python()?;
        given.push((history, scale));
    }
    let Some(device) = given.first().map(|(history, _)| history.device()) else { return Ok(()) };
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    update_given(&mut state.dispatcher(py)?.0, &recipe.get().0, place, &given).python()
}
