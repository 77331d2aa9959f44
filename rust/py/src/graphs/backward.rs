//! Backward as an operator.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::smallvec;
use te_fast_core::Error;
use te_fast_core::program::Port;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::{TracedCall, named_by, program_for};
use crate::graphs::slots::{given_slots, slots_of};
use crate::graphs::weights::weights_of_backward;
use crate::program::backward::{Grads, ProgramSaved, run};
use crate::program::handle::ProgramHandle;
use crate::program::weight::GivenSlots;
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

/// Gradients that a compiler's backward makes: of input, parameters and extra inputs, those that are new tensors. Whether
/// the gradients' scales are due, too: the region's first module has run its backward.
///
/// `saved` is what forward left to backward, `reads` the tensors that [`TracedCall`] names, `weights` the column layouts of
/// the quantised weights that it reads, `grads` gradients of output and extra outputs.
#[pyfunction]
#[pyo3(signature = (program, call, saved, reads, weights, grads, params, histories, scales, main_grads, /))]
#[expect(clippy::too_many_arguments, reason = "a Python function's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_backward<'py>(
    program: &Bound<'py, ProgramHandle>,
    call: &Bound<'py, TracedCall>,
    saved: Option<Bound<'py, PyAny>>,
    reads: Vec<Bound<'py, PyAny>>,
    weights: Vec<Bound<'py, PyAny>>,
    grads: Vec<Bound<'py, PyAny>>,
    params: Vec<Bound<'py, PyAny>>,
    histories: Vec<Bound<'py, PyAny>>,
    scales: Vec<Bound<'py, PyAny>>,
    main_grads: Vec<Bound<'py, PyAny>>,
) -> PyResult<(Vec<Bound<'py, PyAny>>, bool)> {
    let py = program.py();
    let state = state(py)?;
    let traced = call.get();
    let _region = traced.enter(py, state)?;
    let given = given_slots(state, &histories, &scales, false)?;
    let tensors = Given { dy: grads.first(), weights: &weights, params: &params, main_grads: &main_grads };
    let prepare = || saved_of(state, program, traced, &tensors, &given);
    let kept = prepare().map_err(|failure| named_by(program, failure))?;
    let defers = traced.key.linears.iter().any(|linear| linear.deferred);
    // What waits for `backward_dw` outlives the call, and the compiler's memory does not.
    let own = |tensor: Bound<'py, PyAny>| if defers { tensor.call_method0("clone") } else { Ok(tensor) };
    let none = || py.None().into_bound(py);
    // It was made for whole steps of rows.
    let narrow = |saved: Bound<'py, PyAny>| saved.call_method1("narrow", (0, 0, kept.sized.saved_bytes()));
    let saved = saved.map_or_else(|| Ok(none()), |saved| own(narrow(saved)?))?;
    let reads = reads.into_iter().map(own).collect::<PyResult<Vec<_>>>()?;
    let tensors: Vec<_> = std::iter::once(saved).chain(reads).collect();
    let tensors = PyTuple::new(py, tensors)?;
    let gradients = run(state, &kept, &tensors, &grads)?;
    let list = own_gradients(traced, &kept, gradients)?;
    let is_last = traced.is_delayed() && program.try_borrow()?.was_first;
    Ok((list, is_last))
}

/// Tensors that a backward is given.
struct Given<'a, 'py> {
    dy: Option<&'a Bound<'py, PyAny>>,
    weights: &'a [Bound<'py, PyAny>],
    params: &'a [Bound<'py, PyAny>],
    main_grads: &'a [Bound<'py, PyAny>],
}

/// What eager's backward would have been left by its forward.
fn saved_of(
    state: &State,
    program: &Bound<'_, ProgramHandle>,
    traced: &TracedCall,
    tensors: &Given<'_, '_>,
    slots: &[Arc<GivenSlots>],
) -> Result<ProgramSaved, Failure> {
    let py = program.py();
    let dy = tensors.dy.ok_or_else(|| Error::state(OP, "a backward without a gradient"))?;
    let rows = view_of(&state.reader, dy, "a gradient")?.rows();
    let _guard = state.guard(py, traced.key.device)?;
    let recipe = traced.region.as_ref().map(|(region, _)| &region.recipe);
    let (compiled, sized) = program_for(state, program, (&traced.key, rows), recipe, tensors.params)?;
    let of = &compiled.program;
    let slots = slots_of(program, slots, false)?;
    let weights = weights_of_backward(state, py, traced, (of, tensors.weights), slots)?;
    let unbound = |list: &[Bound<'_, PyAny>]| list.iter().map(|tensor| tensor.clone().unbind()).collect();
    Ok(ProgramSaved {
        handle: program.clone().unbind(),
        shapes: ProgramHandle::shapes(program, &[rows as i64, traced.key.cols as i64], of)?,
        weights: Mutex::new(weights),
        extra_shapes: traced.extra_cols.iter().map(|&cols| smallvec![rows as i64, cols as i64]).collect(),
        params: tensors.params.iter().map(|param| param.clone().unbind()).collect(),
        joined: None,
        overwrite_main_grad: traced.overwrites_main_grad(),
        main_grads: Some(unbound(tensors.main_grads)),
        updates_backward_scales: false,
        compiled,
        sized,
    })
}

/// The gradients that are results, of which none may be another tensor of the call.
fn own_gradients<'py>(
    traced: &TracedCall,
    kept: &ProgramSaved,
    gradients: Grads<'py>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let own = |grad: Bound<'py, PyAny>, port: Port, new: Port| {
        if port == new { Ok(grad) } else { grad.call_method0("clone") }
    };
    let program = &kept.compiled.program;
    let mut list = Vec::new();
    if let Some(dx) = gradients.input.filter(|_| traced.key.input_grad) {
        list.push(own(dx, program.grad_input(), Port::GradInput)?);
    }
    list.extend(gradients.params.into_iter().flatten());
    for (index, grad) in gradients.extras.into_iter().enumerate() {
        if let Some(grad) = grad.filter(|_| traced.key.extras[index].1) {
            list.push(own(grad, program.grad_extras()[index], Port::GradExtra(index as u16))?);
        }
    }
    Ok(list)
}
