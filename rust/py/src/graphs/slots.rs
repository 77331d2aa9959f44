//! Scales of delayed scaling in graphs. They are the programs' own: a graph has only the programs' handles.

use std::sync::Arc;

use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::quant::value::LinearSlots;
use te_fast_core::recipe::slots::AmaxSlots;
use te_fast_core::recipe::update::update_used;
use te_fast_core::runtime::lane::Place;

use crate::autocast::recipe::NativeRecipe;
use crate::error::{Failure, IntoPython};
use crate::graphs::OP;
use crate::graphs::call::{TracedCall, named_by};
use crate::graphs::registry::Operator;
use crate::program::handle::ProgramHandle;
use crate::program::tensors::Views;
use crate::program::weight::{OpSlots, WeightHandle};
use crate::torch::process::{State, state};

/// The slots of one linear op in a call.
pub(super) struct CallSlots<'a> {
    pub(super) owner: OpSlots,
    /// The graph's copy of forward's scales, which serves forward and its recomputation.
    kept: Option<DevPtr<'a>>,
    /// The call raises maxima, which makes the slots due.
    pub(super) raises: bool,
}

impl CallSlots<'_> {
    /// The addresses that the call reads and writes.
    pub(super) fn addresses(&self) -> LinearSlots<'_> {
        let mut slots = match self.kept {
            Some(scales) => self.owner.with_scales(scales),
            None => self.owner.slots(),
        };
        if !self.raises {
            (slots.input.amax, slots.weight.amax) = (DevPtr::null(), DevPtr::null());
        }
        slots
    }
}

/// The slots of each linear op of a program.
pub(super) fn slots_of<'a>(handle: &Bound<'_, ProgramHandle>) -> Result<SmallVec<[CallSlots<'a>; 2]>, Failure> {
    let py = handle.py();
    let slots_of = |weight: &Py<WeightHandle>| -> Result<_, Failure> {
        let missing = || Error::state(OP, "the scales of delayed scaling are gone; run the layer's forward again");
        let owner = weight.bind(py).try_borrow()?.slots.clone().ok_or_else(missing)?;
        Ok(CallSlots { owner, kept: None, raises: true })
    };
    handle.try_borrow()?.weights.iter().map(slots_of).collect()
}

/// Lets a forward quantise with the graph's copies of its scales, one for each owner of slots, in order.
pub(super) fn use_kept<'a>(list: &mut [CallSlots<'a>], copies: &Views<'a>) -> Result<(), Error> {
    let mut seen = SmallVec::<[u64; 4]>::new();
    for slots in list {
        let id = slots.owner.forward.id();
        let at = seen.iter().position(|&known| known == id).unwrap_or_else(|| {
            seen.push(id);
            seen.len() - 1
        });
        let missing =
            || Error::state(OP, "a compiled call brings fewer scales than its linear ops have; compile it again");
        slots.kept = Some(copies.get(at).ok_or_else(missing)?.data());
    }
    Ok(())
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
        program.first_module_done = false;
    } else if program.first_module != Some(last) || program.first_module_done {
        program.first_module = None;
    }
    Ok(())
}

/// Updates the forward scales of programs, all under one recipe, at the end of a region inside of a graph.
#[pyfunction]
#[pyo3(signature = (programs, recipe, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_update_scales(
    py: Python<'_>,
    programs: Vec<Bound<'_, PyAny>>,
    recipe: &Bound<'_, NativeRecipe>,
) -> PyResult<()> {
    let state = state(py)?;
    let mut due: Vec<Arc<AmaxSlots>> = Vec::with_capacity(programs.len());
    for handle in &programs {
        let program = Operator::program(state, handle).map_err(|failure| failure.named(None))?;
        for CallSlots { owner, .. } in slots_of(&program).map_err(|failure| named_by(&program, failure))? {
            if due.iter().all(|slots| slots.id() != owner.forward.id()) {
                due.push(owner.forward);
            }
        }
    }
    let Some(device) = due.first().map(|slots| slots.device()) else { return Ok(()) };
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    update_used(&mut state.dispatcher(py)?.0, &recipe.get().0, place, &due).python()
}
