//! Forward as an operator.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use te_fast_core::Error;
use te_fast_core::program::{Port, Program};
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::{TracedCall, named_by, program_for};
use crate::graphs::slots::{given_slots, slots_of};
use crate::graphs::weights::{note_kept, weights};
use crate::program::check::check;
use crate::program::forward::{Call, Results};
use crate::program::handle::ProgramHandle;
use crate::program::tensors::Tensors;
use crate::program::weight::GivenSlots;
use crate::torch::process::{State, state};

/// A forward of a compiler's: output, extra outputs, what backward needs, FP8 weights for backward. All are new tensors.
///
/// `histories` and `scales` are those of delayed scaling, `kept` the memory of quantised weights, row layouts and column layouts
/// in turn, where calls bring it.
#[pyfunction]
#[pyo3(signature = (program, owner, call, x, extras, params, histories, scales, kept, /))]
#[expect(clippy::too_many_arguments, reason = "a Python function's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_forward<'py>(
    program: &Bound<'py, ProgramHandle>,
    owner: &Bound<'py, PyAny>,
    call: &Bound<'py, TracedCall>,
    x: &Bound<'py, PyAny>,
    extras: Vec<Bound<'py, PyAny>>,
    params: Vec<Bound<'py, PyAny>>,
    histories: Vec<Bound<'py, PyAny>>,
    scales: Vec<Bound<'py, PyAny>>,
    kept: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let py = x.py();
    let state = state(py)?;
    let traced = call.get();
    let _region = traced.enter(py, state)?;
    let given = given_slots(state, &histories, &scales, true)?;
    let mut call = Call::new(state, (program, owner), x, (&extras, &params), (traced.microbatch, None));
    call.grads = traced.any_grad();
    let run = || -> Result<_, Failure> {
        let tensors = Tensors::read(state, x, &extras, &params)?;
        if !tensors.given().is_empty() {
            let message = "torch.compile takes no quantised weights yet; call the layer outside of it";
            return Err(Error::unsupported("ops", message).into());
        }
        if tensors.fit() {
            return forward(&call, traced, &tensors, &extras, (&given, &kept));
        }
        let copies = Tensors::copies(state, x, &extras, &params, false)?;
        forward(&call, traced, &Tensors::from_copies(state, &copies)?, &copies.extras, (&given, &kept))
    };
    let results = run().map_err(|failure| named_by(program, failure))?;
    PyList::new(py, results)
}

fn forward<'py>(
    call: &Call<'_, 'py>,
    traced: &TracedCall,
    tensors: &Tensors<'_>,
    extras: &[Bound<'py, PyAny>],
    (given, kept): (&[Arc<GivenSlots>], &[Bound<'py, PyAny>]),
) -> Result<Vec<Bound<'py, PyAny>>, Failure> {
    let (py, state, handle) = (call.x.py(), call.state, call.handle);
    let device = traced.key.device;
    if tensors.x.device() != device {
        return Err(
            Error::device(OP, "the input", format!("{device}, where the call was traced"), tensors.x.device()).into()
        );
    }
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    let recipe = traced.region.as_ref().map(|(region, _)| &region.recipe);
    let rows = tensors.x.rows();
    let (compiled, sized) = program_for(state, handle, (&traced.key, rows), recipe, call.params)?;
    let program = &compiled.program;
    {
        let handle = handle.try_borrow()?;
        check(py, (&handle.chain, &handle.params), tensors, rows, program.widths())?;
    }
    let bytes = traced.saved_bytes(rows);
    if sized.saved_bytes() > bytes {
        let message = format!(
            "{rows} rows leave {} bytes to backward, more than the {bytes} that were traced; compile the call again",
            sized.saved_bytes()
        );
        return Err(Error::state(OP, message).into());
    }
    let slots = if let Some((region, _)) = traced.region.as_ref().filter(|_| traced.is_delayed()) {
        call.ensure_slots(region.epoch)?;
        refuse_late_repetition(state, py, handle, traced)?;
        slots_of(handle, given, true)?
    } else {
        vec![None; traced.key.linears.len()]
    };
    let shapes = ProgramHandle::shapes(handle, tensors.x.shape(), program)?;
    let (prepared, passing) = weights(call, traced, (tensors, program), place, slots, kept)?;
    let extra_outputs = call.extra_outputs(&compiled, &shapes, place, extras)?;
    let y = call.output(&compiled, &shapes, place, extras, &extra_outputs)?;
    let saved = if traced.any_grad() { state.optional_bytes(py, device, bytes)? } else { None };
    let results = Results { y, extra_outputs, saved };
    call.launch(tensors, (program, &sized), &results, &prepared, place, None)?;
    if !traced.passes_weights() {
        note_kept(call, prepared, place)?;
    }
    let mut list = own_results(program, results)?;
    list.extend(passing);
    Ok(list)
}

/// The results, of which none may be another tensor of the call.
fn own_results<'py>(program: &Program, results: Results<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let own = |tensor: Bound<'py, PyAny>, port: Port, new: Port| {
        if port == new { Ok(tensor) } else { tensor.call_method0("clone") }
    };
    let Results { y, extra_outputs, saved } = results;
    let mut list = vec![own(y, program.output(), Port::Output)?];
    for (index, (tensor, &port)) in extra_outputs.into_iter().zip(program.extra_outputs()).enumerate() {
        list.push(own(tensor, port, Port::ExtraOutput(index as u16))?);
    }
    list.extend(saved);
    Ok(list)
}

/// A recomputation quantises with the scales that it is given. Once they have been updated, these are not its forward's.
fn refuse_late_repetition(
    state: &State,
    py: Python<'_>,
    handle: &Bound<'_, ProgramHandle>,
    traced: &TracedCall,
) -> Result<(), Failure> {
    let is_repeated = state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? >= 0;
    let generation = state.dispatcher(py)?.0.forward_generation;
    let mut handle = handle.try_borrow_mut()?;
    if !is_repeated {
        handle.traced_generation = generation;
        return Ok(());
    }
    if traced.any_grad() && handle.traced_generation != generation {
        let message = "activations are recomputed after the autocast region's end has updated the scales of delayed scaling; end the region behind backward, or use te_fast.pytorch.checkpoint outside of torch.compile";
        return Err(Error::state(OP, message).into());
    }
    Ok(())
}
