//! Weight gradients of programs that were put off until `backward_dw`.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::dispatch::{Dispatcher, Place};
use te_fast_core::kernel::DevPtr;
use te_fast_core::program::{Bindings, Place as Where};

use crate::error::Failure;
use crate::linear_backward::{MainGrad, main_grad};
use crate::program::{WaitingGrad, WaitingRows, WeightHandle};
use crate::program_backward::Read;
use crate::state::{State, state};
use crate::tensor::view_of;

const OP: &str = "ops";

/// Runs the oldest weight gradient that was put off and gives it to `weight`; returns the new tensor, or None when
/// it went into `main_grad`.
#[pyfunction]
#[pyo3(signature = (handle, weight, fuse_wgrad_accumulation, /))]
pub(crate) fn program_backward_dw<'py>(
    handle: &Bound<'py, WeightHandle>,
    weight: &Bound<'py, PyAny>,
    fuse_wgrad_accumulation: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let state = state(handle.py())?;
    run_waiting(state, handle, weight, fuse_wgrad_accumulation).map_err(|failure| {
        let name = handle.try_borrow().ok().map(|handle| handle.name().to_string());
        failure.named(name.as_deref())
    })
}

fn run_waiting<'py>(
    state: &State,
    handle: &Bound<'py, WeightHandle>,
    weight: &Bound<'py, PyAny>,
    fuse: bool,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    let Some(waiting) = handle.try_borrow_mut()?.waiting.pop_front() else {
        return Err(Error::state(OP, "backward_dw() was called without a backward before it").into());
    };
    let done = give(state, weight, fuse, &waiting);
    if done.is_err() {
        handle.try_borrow_mut()?.waiting.push_front(waiting); // it can be asked for again
    }
    done
}

fn give<'py>(
    state: &State,
    weight: &Bound<'py, PyAny>,
    fuse: bool,
    waiting: &WaitingGrad,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    let py = weight.py();
    let (dw, accumulate) = if fuse {
        let MainGrad { grad, accumulate, .. } = main_grad(state, weight, waiting.overwrite_main_grad)?;
        (grad, accumulate)
    } else {
        let view = view_of(&state.reader, weight, "weight")?;
        (state.empty_sized(py, view.device(), view.shape(), view.dtype())?, false)
    };
    match &waiting.rows {
        Some(rows) => run_rows(state, rows, &dw, accumulate)?,
        None if accumulate => {}
        None => drop(dw.call_method0("zero_")?),
    }
    Ok(if fuse { None } else { Some(dw) })
}

/// The GEMM of a gradient that waited.
fn run_rows(state: &State, waiting: &WaitingRows, dw: &Bound<'_, PyAny>, accumulate: bool) -> Result<(), Failure> {
    let (py, program) = (dw.py(), &waiting.program);
    let device = program.key().device;
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    let read = Read::new(state, program, waiting.saved.bind(py))?;
    let key = program.key();
    let list = |count: usize, at: fn(u16) -> Where| {
        (0..count as u16).map(|index| read.pointer(state, at(index))).collect::<Result<Vec<_>, _>>()
    };
    let (extras, extra_outputs) =
        (list(key.extras.len(), Where::Extra)?, list(program.extra_outputs().len(), Where::ExtraOutput)?);
    let mut deferred = vec![DevPtr::null(); program.deferred_bytes().len()];
    deferred[waiting.linear] = state.pointer(Some(waiting.grad.bind(py)))?;
    let bindings = Bindings {
        input: read.pointer(state, Where::Input)?,
        extras: &extras,
        extra_outputs: &extra_outputs,
        saved: state.pointer(read.saved.as_ref())?,
        deferred: &deferred,
        ..Bindings::NONE
    };
    let view = view_of(&state.reader, dw, "the weight's gradient")?;
    let external = Dispatcher::external_bytes(place, 0)?;
    let scratch = state.optional_bytes(py, place.device, external.bytes())?;
    let memory = external.memory(state.pointer(scratch.as_ref())?);
    let mut dispatcher = state.dispatcher(py)?;
    let address = view.data().address();
    let plan = program.weight_grad_plan(&mut dispatcher.0, waiting.linear, view.dtype(), accumulate, address)?;
    let mut lane = dispatcher.0.lane(place, 0, memory)?;
    program.run_waiting(&mut lane, waiting.linear, &plan, &bindings, view.data())?;
    Ok(())
}
