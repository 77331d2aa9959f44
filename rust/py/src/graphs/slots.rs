//! Scales of delayed scaling in a graph's tensors, which operators read and write.

use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::quant::value::LinearSlots;
use te_fast_core::recipe::update::update_given;
use te_fast_core::runtime::lane::Place;

use crate::autocast::recipe::NativeRecipe;
use crate::error::{Failure, IntoPython};
use crate::graphs::OP;
use crate::graphs::call::TracedCall;
use crate::program::handle::ProgramHandle;
use crate::program::tensors::Views;
use crate::program::weight::OpSlots;
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

/// The slots of one linear op, and their addresses in the call.
pub(super) struct Given<'a> {
    pub(super) owner: OpSlots,
    pub(super) slots: LinearSlots<'a>,
    /// The call raises maxima, which makes the slots due.
    pub(super) raises: bool,
}

impl Given<'_> {
    /// Leaves the maxima as they are.
    pub(super) fn raise_nothing(&mut self) {
        self.raises = false;
        (self.slots.input.amax, self.slots.weight.amax) = (DevPtr::null(), DevPtr::null());
    }
}

/// The slots of each linear op; ops of one layer share a tensor of scales and a history.
pub(super) fn given_slots<'a>(
    handle: &Bound<'_, ProgramHandle>,
    (scales, histories): (&Views<'a>, &Views<'a>),
    is_forward: bool,
) -> Result<SmallVec<[Given<'a>; 2]>, Failure> {
    let py = handle.py();
    let mut seen = SmallVec::<[u64; 4]>::new();
    let mut list = SmallVec::new();
    for weight in &handle.try_borrow()?.weights {
        let Some(owner) = weight.bind(py).try_borrow()?.slots.clone() else { continue };
        let id = if is_forward { owner.forward.id() } else { owner.backward.id() };
        let at = seen.iter().position(|&known| known == id).unwrap_or_else(|| {
            seen.push(id);
            seen.len() - 1
        });
        let (Some(scale), Some(history)) = (scales.get(at), histories.get(at)) else {
            let message = "a compiled call brings fewer scales than its linear ops have; compile it again";
            return Err(Error::state(OP, message).into());
        };
        let slots = owner.given(scale.data(), history.data(), is_forward);
        list.push(Given { owner, slots, raises: true });
    }
    Ok(list)
}

/// Notes whether a forward belongs to its region's first FP8 module, whose backward updates the scales.
pub(super) fn note_first(
    state: &State,
    program: &Bound<'_, ProgramHandle>,
    traced: &TracedCall,
    is_repeated: bool,
) -> PyResult<()> {
    // For a region that the graph enters, the call has this information.
    if !traced.any_grad() || is_repeated || traced.is_first.is_some() {
        return Ok(());
    }
    let (is_first, last) = {
        let autocast = &mut state.dispatcher(program.py())?.0.autocast;
        (autocast.take_first_fp8_module(), autocast.first_modules())
    };
    let mut program = program.try_borrow_mut()?;
    if is_first {
        program.first_module = Some(last);
    } else if program.first_module != Some(last) {
        program.first_module = None;
    }
    Ok(())
}

/// Updates a graph's scales, all of one recipe, from their histories, at the end of a region inside of a graph.
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
