//! Entry points of programs: they take tensors and parameters, and return outputs and data for backward, with their own
//! autograd node or inside a node of Python. They read a module's dictionaries only to gather the parameters of a call
//! without parameters.

use std::ops::Range;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::quant::weight::Microbatch;
use te_fast_core::recipe::region::Former;

use crate::error::{IntoPython, named, traced_by_jit};
use crate::hooks::{OTHERS, hooks};
use crate::program::asked::{Asked, InFp8};
use crate::program::backward::{ProgramSaved, run};
use crate::program::buffers::Buffers;
use crate::program::forward::{Call, Done};
use crate::program::handle::ProgramHandle;
use crate::program::parts::Joined;
use crate::program::tensors::{Flags, Objects, Tensors, present_parameters, requires_grad};
use crate::program::transfers::{Described, Transfers};
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

const OP: &str = "ops";

/// Runs a chain on `x`, with one autograd node. Returns the output, followed by extra outputs if there are any.
///
/// `parameters` replace those of the modules that the chain was built from. `version` is the version of a concatenated
/// weight.
#[pyfunction]
#[pyo3(signature = (program, owner, x, extra_inputs, is_first_microbatch=None, params=None, version=None, buffers=None, fp8_output=false, fp8_grad=false, /))]
#[expect(clippy::too_many_arguments, reason = "a Python function's arguments")]
pub(crate) fn program_apply<'py>(
    program: &Bound<'py, ProgramHandle>,
    owner: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    extra_inputs: &Bound<'py, PyTuple>,
    is_first_microbatch: Option<bool>,
    params: Option<&Bound<'py, PyTuple>>,
    version: Option<u64>,
    buffers: Option<Bound<'py, Buffers>>,
    fp8_output: bool,
    fp8_grad: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(x.py())?;
    let in_fp8 = InFp8 { output: fp8_output, grad: fp8_grad };
    let (joined, params): (_, Objects<'py>) = match params {
        Some(params) => (None, params.iter().collect()),
        None if program.try_borrow()?.has_parts() => joined_parameters(state, program)?,
        None => (None, present_parameters(program)?),
    };
    let extras: Objects<'py> = extra_inputs.iter().collect();
    let asked = (is_first_microbatch.into(), version);
    in_region_of_last_forward(state, program, || {
        cast_and_apply((program, owner), x, &extras, (&params, joined), (asked, in_fp8, buffers))
    })
}

/// Parameters with stacks: the parts for autograd, and the stacks for the program.
fn joined_parameters<'py>(
    state: &State,
    program: &Bound<'py, ProgramHandle>,
) -> PyResult<(Option<Bound<'py, Joined>>, Objects<'py>)> {
    if let Some((joined, params)) = Joined::of(state, program)? {
        return Ok((Some(joined), params));
    }
    let message = "the parameters of experts must be plain tensors of one type on one device; use single_grouped_weight=True for others";
    let name = program.try_borrow()?.name.clone();
    Err(named(&Error::unsupported(OP, message), Some(&name)))
}

/// Runs `call` in the region of the chain's last forward if activation checkpointing repeats a forward during backward,
/// when the autocast region may be over.
#[inline]
pub(crate) fn in_region_of_last_forward<T>(
    state: &State,
    program: &Bound<'_, ProgramHandle>,
    call: impl FnOnce() -> PyResult<T>,
) -> PyResult<T> {
    if state.torch.is_jit_tracing(program.py())? {
        return Err(traced_by_jit(&program.try_borrow()?.name));
    }
    let Some(former) = repeated_region(state, program)? else { return call() };
    let result = call();
    state.dispatcher(program.py())?.0.autocast.exit(&former, false);
    result
}

#[inline]
fn repeated_region(state: &State, program: &Bound<'_, ProgramHandle>) -> PyResult<Option<Former>> {
    let py = program.py();
    let Some(region) = program.try_borrow()?.last_region else { return Ok(None) };
    {
        let mut dispatcher = state.dispatcher(py)?;
        let autocast = &mut dispatcher.0.autocast;
        if autocast.current().enabled || autocast.depth() != 0 || autocast.held().0 {
            return Ok(None); // the region in force decides
        }
    }
    if state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? < 0 {
        program.try_borrow_mut()?.last_region = None;
        return Ok(None);
    }
    Ok(Some(state.dispatcher(py)?.0.autocast.repeat(&region)))
}

/// The functional entry on inputs that `torch.autocast` may want in another type.
pub(crate) fn cast_and_apply<'py>(
    (program, owner): (&Bound<'py, ProgramHandle>, &Bound<'py, PyAny>),
    x: &Bound<'py, PyAny>,
    extras: &[Bound<'py, PyAny>],
    (params, joined): (&[Bound<'py, PyAny>], Option<Bound<'py, Joined>>),
    (asked, in_fp8, buffers): ((Microbatch, Option<u64>), InFp8, Option<Bound<'py, Buffers>>),
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(x.py())?;
    {
        let handle = program.try_borrow()?;
        if handle.chain.extra_inputs() != extras.len() {
            let message = format!("expected {} extra inputs, got {}", handle.chain.extra_inputs(), extras.len());
            return Err(named(&Error::value(OP, message), Some(&handle.name)));
        }
    }
    let cast = cast(state, x, extras)?;
    let (x, extras) = cast.as_ref().map_or((x, extras), |(x, extras)| (x, extras.as_slice()));
    let call = Call::new(state, (program, owner), x, (extras, params), asked)
        .of_parts(joined)
        .into_buffers(buffers)
        .handing_out(in_fp8);
    let tensors = Tensors::read(state, x, extras, params).map_err(|failure| call.named(failure))?;
    apply(call, &tensors)
}

/// The functional entry: a program, its owner, tensors and parameters. Rows are padded for GEMMs, zero rows launch
/// nothing, and a call that needs gradients gets one autograd node.
pub(crate) fn apply<'py>(mut call: Call<'_, 'py>, tensors: &Tensors<'_>) -> PyResult<Bound<'py, PyAny>> {
    let Call { state, handle: program, owner, x, extras, params, microbatch, version, in_fp8, .. } = call;
    let py = x.py();
    if tensors.x.numel() == 0 {
        return on_nothing(&call);
    }
    if call.buffers.is_none()
        && !tensors.x.shape().is_empty()
        && state.dispatcher(py)?.0.rows_to_pad(tensors.x.rows()) != 0
        && !program.try_borrow()?.chain.takes_any_rows()
    {
        if in_fp8 != InFp8::default() {
            let message = "fp8_output and fp8_grad take as many rows as the recipe's GEMMs do; pad the input";
            return Err(call.named(Error::unsupported(OP, message).into()));
        }
        let is_first = Option::<bool>::from(microbatch);
        let arguments = (program, owner, x, PyTuple::new(py, extras)?, is_first, PyTuple::new(py, params)?, version);
        return hooks(py)?.padded.bind(py).call1(arguments);
    }
    let grad_mode = state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true));
    if grad_mode {
        let mut wants = false;
        for tensor in std::iter::once(x).chain(params).chain(extras) {
            wants = wants || requires_grad(tensor)?;
        }
        if wants {
            let mut arguments: SmallVec<[Bound<'py, PyAny>; 12]> = SmallVec::new();
            arguments.push(x.clone());
            match &call.joined {
                Some(joined) => arguments.extend(joined.get().edges().map(|part| part.bind(py).clone())),
                None => arguments.extend(params.iter().cloned()),
            }
            arguments.extend(extras.iter().cloned());
            arguments.push(program.clone().into_any());
            arguments.push(owner.clone());
            arguments.push(Asked { microbatch, in_fp8 }.number().into_pyobject(py)?.into_any());
            arguments.push(match call.joined {
                Some(joined) => joined.into_any(),
                None => version.into_pyobject(py)?,
            });
            arguments.push(call.buffers.map_or_else(|| py.None().into_bound(py), Bound::into_any));
            return hooks(py)?.apply.bind(py).call1(PyTuple::new(py, arguments)?);
        }
    }
    // A forward that is recomputed later with gradients is fused as in the recomputation, so that the bits are equal.
    let grads = !grad_mode && state.dispatcher(py)?.0.autocast.recomputes();
    call.wants(grads, grads, SmallVec::from_elem(grads, extras.len()), grad_mode);
    results(call.run_on(tensors)?)
}

/// A call on zero rows: nothing is launched.
#[cold]
fn on_nothing<'py>(call: &Call<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let Call { state, handle: program, owner, x, extras, params, microbatch, .. } = *call;
    let py = x.py();
    let region = *state.dispatcher(py)?.0.autocast.current();
    if region.enabled && region.recipe.is_delayed() && !program.try_borrow()?.weights.is_empty() {
        // Other ranks may have rows, and reduce their maxima with this rank.
        owner.call_method0(intern!(py, "_init_delayed_scaling"))?;
    }
    let overwrite = microbatch == Microbatch::First;
    let arguments = (program, x, PyTuple::new(py, extras)?, PyTuple::new(py, params)?, overwrite);
    hooks(py)?.on_nothing.bind(py).call1(arguments)
}

/// The output, or a tuple of output and extra outputs.
fn results(done: Done<'_>) -> PyResult<Bound<'_, PyAny>> {
    let py = done.y.py();
    if done.extra_outputs.is_empty() {
        return Ok(done.y);
    }
    let all = std::iter::once(done.y).chain(done.extra_outputs).collect::<Vec<_>>();
    Ok(PyTuple::new(py, all)?.into_any())
}

type Inputs<'py> = (Bound<'py, PyAny>, Vec<Bound<'py, PyAny>>);

/// The inputs in the type of `torch.autocast`; none if it is off.
#[inline]
fn cast<'py>(state: &State, x: &Bound<'py, PyAny>, extras: &[Bound<'py, PyAny>]) -> PyResult<Option<Inputs<'py>>> {
    let Some(dtype) = autocast_dtype(state, x)? else { return Ok(None) };
    let to = |tensor: &Bound<'py, PyAny>| tensor.call_method1(intern!(tensor.py(), "to"), (&dtype,));
    // Counts keep their type.
    let extra = |extra: &Bound<'py, PyAny>| match view_of(&state.reader, extra, "an extra input") {
        Ok(view) if view.dtype().as_float().is_none() => Ok(extra.clone()),
        _ => to(extra),
    };
    Ok(Some((to(x)?, extras.iter().map(extra).collect::<PyResult<_>>()?)))
}

/// The type of `torch.autocast`, if it is on.
#[inline]
fn autocast_dtype<'py>(state: &State, x: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = x.py();
    if !state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()? {
        return Ok(None);
    }
    let torch = py.import(intern!(py, "torch"))?;
    let kind = x.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?;
    if !torch.call_method1(intern!(py, "is_autocast_enabled"), (&kind,))?.is_truthy()? {
        return Ok(None);
    }
    torch.call_method1(intern!(py, "get_autocast_dtype"), (&kind,)).map(Some)
}

/// Data for backward of a forward that ran.
pub(crate) fn kept<'py>(call: &Call<'_, 'py>, done: &mut Done<'py>) -> PyResult<ProgramSaved> {
    let Call { state, handle: program, extras, microbatch, .. } = *call;
    let py = program.py();
    let delayed = done.weights.iter().any(|weight| weight.slots.is_some());
    let kept_param = |(index, param): (usize, &Bound<'py, PyAny>)| match &call.joined {
        Some(joined) if joined.get().is_copied(index) => py.None(),
        _ => param.clone().unbind(),
    };
    let extra_shapes = extras
        .iter()
        .map(|extra| Ok(view_of(&state.reader, extra, "an extra input").python()?.shape().into()))
        .collect::<PyResult<_>>()?;
    Ok(ProgramSaved {
        handle: program.clone().unbind(),
        compiled: Arc::clone(&done.compiled),
        sized: Arc::clone(&done.sized),
        shapes: Arc::clone(&done.shapes),
        weights: std::mem::take(&mut done.weights).into(),
        extra_shapes,
        params: call.params.iter().enumerate().map(kept_param).collect(),
        joined: call.joined.as_ref().map(|joined| joined.clone().unbind()),
        buffers: call.buffers.as_ref().map(|buffers| buffers.clone().unbind()),
        overwrite_main_grad: microbatch == Microbatch::First && !done.skippable,
        stamp: done.stamp.take(),
        owner: call.owner.clone().unbind(),
        updates_backward_scales: delayed && state.dispatcher(py)?.0.autocast.take_first_fp8_module(),
    })
}

/// Forward of the autograd function: called by torch with gradients off; `arguments` are input, parameters or their parts,
/// extra inputs, program, owner, `is_first_microbatch`, how the parts are joined or the version of a concatenated weight, and
/// memory of the caller's.
#[pyfunction]
#[pyo3(signature = (ctx, *arguments))]
pub(crate) fn program_autograd_forward<'py>(
    ctx: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = ctx.py();
    let state = state(py)?;
    let count = arguments.len();
    let program = arguments.get_item(count - OTHERS)?.cast_into::<ProgramHandle>()?;
    let owner = arguments.get_item(count - 4)?;
    let Asked { microbatch, in_fp8 } = Asked::of(arguments.get_item(count - 3)?.extract()?);
    let last = arguments.get_item(count - 2)?;
    let buffers = arguments.get_item(count - 1)?.cast_into::<Buffers>().ok();
    let joined = last.cast::<Joined>().ok().cloned();
    let version = if joined.is_some() { None } else { last.extract()? };
    let x = &arguments.get_item(0)?;
    let given = match &joined {
        Some(joined) => joined.get().edge_count(),
        None => program.try_borrow()?.chain.params(),
    };
    let params: Objects<'py> = match &joined {
        Some(joined) => joined.get().take_wholes(py),
        None => arguments.iter().skip(1).take(given).collect(),
    };
    let extras: Objects<'py> = arguments.iter().take(count - OTHERS).skip(1 + given).collect();
    let (extras, params) = (extras.as_slice(), params.as_slice());
    let mut call = Call::new(state, (&program, &owner), x, (extras, params), (microbatch, version))
        .of_parts(joined)
        .into_buffers(buffers)
        .handing_out(in_fp8);
    // The tensors' own property costs several times as much, for quantised ones most.
    let needs = ctx.getattr(intern!(py, "needs_input_grad"))?.cast_into::<PyTuple>()?;
    let need = |index: usize| needs.get_borrowed_item(index)?.is_truthy();
    let all = |range: Range<usize>| range.map(need).collect::<PyResult<Flags>>();
    call.wants(true, need(0)?, all(1 + given..count - OTHERS)?, true);
    if call.joined.is_none() {
        call.param_grads = Some(all(1..1 + given)?);
    }
    let mut done = call.run()?;
    state.torch.save_for_backward(ctx, done.to_save(&call)?)?;
    let saved = kept(&call, &mut done)?;
    ctx.setattr(intern!(py, "te_saved"), Bound::new(py, saved)?)?;
    results(done)
}

/// A forward without an autograd node, for use inside a node of Python: (output, extra outputs, data for backward or
/// None, tensors to save).
#[pyfunction]
#[pyo3(signature = (program, owner, x, extra_inputs, is_first_microbatch, input_needs_grad, extra_need_grad, parameters_need_grad, params=None, version=None, transfers=None, /))]
#[expect(clippy::too_many_arguments, reason = "a Python function's arguments")]
pub(crate) fn program_run_forward<'py>(
    program: &Bound<'py, ProgramHandle>,
    owner: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    extra_inputs: &Bound<'py, PyTuple>,
    is_first_microbatch: Option<bool>,
    input_needs_grad: bool,
    extra_need_grad: Vec<bool>,
    parameters_need_grad: bool,
    params: Option<&Bound<'py, PyTuple>>,
    version: Option<u64>,
    transfers: Option<(Vec<Described<'py>>, bool)>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let state = state(py)?;
    in_region_of_last_forward(state, program, || {
        // The region says which rows are padded; backward repeats a forward where it is over.
        if transfers.is_none() && lacks_rows(state, x)? {
            let needs = (input_needs_grad, extra_need_grad, parameters_need_grad);
            let arguments =
                (program, owner, x, extra_inputs, is_first_microbatch, needs.0, needs.1, needs.2, params, version);
            return hooks(py)?.padded_run.bind(py).call1(arguments);
        }
        let extras: Objects<'py> = extra_inputs.iter().collect();
        let params: Objects<'py> = match params {
            Some(params) => params.iter().collect(),
            None => present_parameters(program)?,
        };
        let wants = input_needs_grad || parameters_need_grad || extra_need_grad.iter().any(|&wanted| wanted);
        let mut call = Call::new(state, (program, owner), x, (&extras, &params), (is_first_microbatch.into(), version))
            .beside(Transfers::new(transfers));
        // A forward that is recomputed later with gradients is fused as in the recomputation, so that the bits are equal.
        let recomputes = !wants && state.dispatcher(py)?.0.autocast.recomputes();
        let of_extras = extra_need_grad.iter().map(|&wanted| wanted || recomputes).collect();
        call.wants(parameters_need_grad || recomputes, input_needs_grad || recomputes, of_extras, wants);
        let mut done = call.run()?;
        let (y, outputs) = (done.y.clone(), PyTuple::new(py, &done.extra_outputs)?);
        let (saved, to_save) = if wants {
            let to_save = done.to_save(&call)?;
            (Some(Bound::new(py, kept(&call, &mut done)?)?), to_save)
        } else {
            (None, PyTuple::empty(py))
        };
        Ok((y, outputs, saved, to_save).into_pyobject(py)?.into_any())
    })
}

/// Whether `x` must be padded with rows of zeros for the region's GEMMs.
fn lacks_rows(state: &State, x: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = x.py();
    if !state.dispatcher(py)?.0.auto_pad {
        return Ok(false);
    }
    let count = |name| x.call_method0(name)?.extract::<usize>();
    if count(intern!(py, "numel"))? == 0 || count(intern!(py, "dim"))? == 0 {
        return Ok(false);
    }
    let cols = x.call_method1(intern!(py, "size"), (-1,))?.extract::<usize>()?;
    Ok(state.dispatcher(py)?.0.rows_to_pad(count(intern!(py, "numel"))? / cols) != 0)
}

/// The backward of [`program_run_forward`]: gradients of input, parameters and extra inputs; None if not needed.
#[pyfunction]
#[pyo3(signature = (kept, saved_tensors, grad_output, extra_grads, transfers=None, /))]
#[expect(clippy::type_complexity, reason = "a Python tuple")]
pub(crate) fn program_run_backward<'py>(
    kept: &Bound<'py, ProgramSaved>,
    saved_tensors: &Bound<'py, PyTuple>,
    grad_output: &Bound<'py, PyAny>,
    extra_grads: &Bound<'py, PyTuple>,
    transfers: Option<(Vec<Described<'py>>, bool)>,
) -> PyResult<(Option<Bound<'py, PyAny>>, Bound<'py, PyTuple>, Bound<'py, PyTuple>)> {
    let py = kept.py();
    let grads: Objects<'py> = std::iter::once(grad_output.clone()).chain(extra_grads.iter()).collect();
    let grads = run(state(py)?, kept.get(), saved_tensors, &grads, Transfers::new(transfers))?;
    Ok((grads.input, PyTuple::new(py, grads.params)?, PyTuple::new(py, grads.extras)?))
}
