//! Weight gradients that are delayed until `backward_dw`, and those of products that torch computed.

use pyo3::intern;
use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::program::Port;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::Place;

use crate::direct::gemm::gemm;
use crate::error::Failure;
use crate::program::backward::Read;
use crate::program::main_grad::{MainGrad, main_grad};
use crate::program::weight::{WaitingGrad, WaitingOperands, WaitingRows, WeightHandle};
use crate::tensor::given::weight_view;
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

const OP: &str = "ops";

/// Computes the oldest delayed weight gradient for `weight`; returns the new tensor, or None when
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
    let target = fuse.then(|| main_grad(state, weight, waiting.overwrite_main_grad)).transpose()?;
    if let WaitingOperands::Plain { x, grad } = &waiting.operands {
        let into = target.map(|MainGrad { grad, accumulate, .. }| (grad, accumulate));
        let (x, grad) = (x.bind(py), grad.bind(py));
        return Ok(plain_product(x, grad, into.as_ref().map(|(grad, accumulate)| (grad, *accumulate)))?);
    }
    let view = weight_view(state, weight)?;
    let (dw, accumulate) = if let Some(MainGrad { grad, accumulate, .. }) = target {
        (grad, accumulate)
    } else {
        let dtype = match &waiting.operands {
            WaitingOperands::Kept(WaitingRows { program, linear, .. }) => {
                program.grad_dtype(program.linear_param(*linear)).into()
            }
            _ => view.dtype(),
        };
        (state.empty_sized(py, view.device(), view.shape(), dtype)?, false)
    };
    match &waiting.operands {
        WaitingOperands::Kept(rows) => run_rows(state, rows, &dw, accumulate)?,
        WaitingOperands::NoRows if accumulate => {}
        WaitingOperands::NoRows => drop(dw.call_method0("zero_")?),
        WaitingOperands::Plain { .. } => {} // given above
    }
    if fuse {
        return Ok(None);
    }
    if view_of(&state.reader, &dw, "the weight's gradient")?.dtype() == view.dtype() {
        return Ok(Some(dw));
    }
    // What autograd does with a gradient of another type than its parameter's.
    Ok(Some(dw.call_method1(intern!(py, "to"), (state.torch.dtype(py, view.dtype()),))?))
}

/// The GEMM of a delayed gradient.
fn run_rows(state: &State, waiting: &WaitingRows, dw: &Bound<'_, PyAny>, accumulate: bool) -> Result<(), Failure> {
    let (py, program) = (dw.py(), &waiting.program);
    let device = program.key().device;
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    let sized = &waiting.sized;
    let read = Read::new(state, program, sized, waiting.saved.bind(py))?;
    let view = view_of(&state.reader, dw, "the weight's gradient")?;
    let bytes = sized.waiting_scratch(waiting.linear);
    let external = Dispatcher::external_bytes(place, bytes)?;
    let scratch = state.optional_bytes(py, place.device, external.bytes())?;
    let memory = external.memory(state.pointer(scratch.as_ref())?);
    let mut table = state.tables.take();
    let mut call = program.call(&mut table);
    read.bind(state, &mut call)?;
    call.set_deferred(waiting.linear, state.pointer(Some(waiting.grad.bind(py)))?);
    call.set(Port::GradParam(program.linear_param(waiting.linear) as u16), view.data());
    let mut dispatcher = state.dispatcher(py)?;
    let (kind, address) = ((view.dtype(), accumulate), view.data().address());
    let plan = program.weight_grad_plan(&mut dispatcher.0, sized.rows(), waiting.linear, kind, address)?;
    call.set_weight_grad(waiting.linear, plan);
    let mut lane = dispatcher.0.lane(place, bytes, memory)?;
    sized.run_waiting(&mut lane, waiting.linear, call)?;
    state.tables.give_back(table);
    Ok(())
}

/// `gradᵀ · x`, as torch computes it for autograd; or, into an `out` of the caller's, set or added to in one product where
/// its types have one. None where it went into `out`.
#[pyfunction]
#[pyo3(signature = (x, grad, out=None, accumulate=false, /))]
pub(crate) fn weight_gradient<'py>(
    x: &Bound<'py, PyAny>,
    grad: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    accumulate: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    plain_product(x, grad, out.map(|out| (out, accumulate)))
}

fn plain_product<'py>(
    x: &Bound<'py, PyAny>,
    grad: &Bound<'py, PyAny>,
    into: Option<(&Bound<'py, PyAny>, bool)>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = x.py();
    // A deferred product runs where gradients are recorded: without `detach`, it would keep the forward's graph.
    let rows = |tensor: &Bound<'py, PyAny>| -> PyResult<Bound<'py, PyAny>> {
        let cols = tensor.getattr(intern!(py, "shape"))?.get_item(-1)?;
        tensor.call_method0(intern!(py, "detach"))?.call_method1(intern!(py, "reshape"), ((-1, cols),))
    };
    let product = |x: &Bound<'py, PyAny>, grad: &Bound<'py, PyAny>| {
        grad.call_method0(intern!(py, "t"))?.call_method1(intern!(py, "mm"), (x,))
    };
    let empty = x.call_method0(intern!(py, "numel"))?.extract::<u64>()? == 0;
    let Some((out, accumulate)) = into else {
        let cols = |tensor: &Bound<'py, PyAny>| tensor.getattr(intern!(py, "shape"))?.get_item(-1);
        if empty {
            return x.call_method1(intern!(py, "new_zeros"), (cols(grad)?, cols(x)?)).map(Some);
        }
        // With the strides that autograd's own product has, for instance those of an expanded gradient: torch sums a copy in
        // another order.
        return product(&rows(x)?, &rows(grad)?).map(Some);
    };
    if empty {
        if !accumulate {
            out.call_method0(intern!(py, "zero_"))?;
        }
        return Ok(None);
    }
    let [x, grad] = [rows(x)?, rows(grad)?].map(|tensor| tensor.call_method0(intern!(py, "contiguous")));
    let (x, grad) = (x?, grad?);
    let state = state(py)?;
    let float = |tensor: &Bound<'py, PyAny>| -> PyResult<bool> {
        Ok(state.reader.read(tensor)?.is_some_and(|view| view.dtype().as_float().is_some()))
    };
    if float(&x)? && float(&grad)? && float(out)? {
        gemm((grad, None, None, 0, true), (x, None, None, 0, true), out, None, accumulate, false, false)?;
    } else {
        let product = product(&x, &grad)?;
        out.call_method1(if accumulate { "add_" } else { "copy_" }, (product,))?;
    }
    Ok(None)
}
