//! Entry points of programs: with an autograd node of their own, or inside one of Python's.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyAnyMethods, PyBool, PyDict, PyDictMethods, PyTuple};
use te_fast_core::Error;
use te_fast_core::autocast::Former;

use crate::error::{IntoPython, is_a, named};
use crate::linear::{Argument, Bits, can_skip_module_call};
use crate::program::ProgramHandle;
use crate::program_backward::{ProgramSaved, run};
use crate::program_check::mixed_types;
use crate::program_run::{Call, Done};
use crate::program_tensors::{parameters, requires_grad};
use crate::state::{State, state};
use crate::tensor::{instance_dict, view_of};

const OP: &str = "ops";

/// Runs a chain on `x`; one autograd node. Returns the output, and the extra outputs behind it if there are any.
#[pyfunction]
#[pyo3(signature = (program, owner, x, extra_inputs, is_first_microbatch=None, /))]
pub(crate) fn program_apply<'py>(
    program: &Bound<'py, ProgramHandle>,
    owner: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    extra_inputs: &Bound<'py, PyTuple>,
    is_first_microbatch: Option<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    apply_in_region((program, owner), x, extra_inputs, is_first_microbatch, Bits::MIXED_DTYPES)
}

/// The same; without [`Bits::MIXED_DTYPES`], parameters must have the input's type.
fn apply_in_region<'py>(
    (program, owner): (&Bound<'py, ProgramHandle>, &Bound<'py, PyAny>),
    x: &Bound<'py, PyAny>,
    extra_inputs: &Bound<'py, PyTuple>,
    is_first_microbatch: Option<bool>,
    mixed: u32,
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(x.py())?;
    let run = || {
        if state.dispatcher(x.py())?.0.auto_pad && lacks_rows(state, x)? {
            check_types(state, program, x, mixed)?;
            autocast_dtype(state, program, x, mixed)?;
            let arguments = (program, owner, x, extra_inputs, is_first_microbatch);
            return ops(x.py())?.call_method1(intern!(x.py(), "program_padded"), arguments);
        }
        let extras: Vec<Bound<'py, PyAny>> = extra_inputs.iter().collect();
        apply(state, program, owner, x, &extras, Bits::of_microbatch(is_first_microbatch) | mixed)
    };
    if let Some(former) = recomputed_region(state, program)? {
        let again = run();
        state.dispatcher(x.py())?.0.autocast.exit(&former, false);
        return again;
    }
    run()
}

fn ops(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import(intern!(py, "te_fast.pytorch._ops"))
}

/// Whether rows have to be appended; the call itself says what is wrong with an input that is none.
#[cold]
fn lacks_rows(state: &State, x: &Bound<'_, PyAny>) -> PyResult<bool> {
    let Ok(view) = view_of(&state.reader, x, "the input") else { return Ok(false) };
    Ok(view.numel() != 0 && !view.shape().is_empty() && state.dispatcher(x.py())?.0.rows_to_pad(view.rows()) != 0)
}

/// Refuses parameters of another type than the input's, unless `mixed`; the fast path finds out by its compiled program.
#[cold]
fn check_types(state: &State, program: &Bound<'_, ProgramHandle>, x: &Bound<'_, PyAny>, mixed: u32) -> PyResult<()> {
    if Bits(mixed).has(Bits::MIXED_DTYPES) {
        return Ok(());
    }
    let dtype = view_of(&state.reader, x, "the input").python()?.dtype();
    for parameter in parameters(program)? {
        let other = view_of(&state.reader, &parameter, "a parameter").python()?.dtype();
        if other != dtype {
            return Err(mixed_types(other, dtype)).python();
        }
    }
    Ok(())
}

/// `module(x, *extra_inputs)` of a module whose result is its program's: as `nn.Module.__call__`, without its cost
/// where no hook and no override asks for it. The module names the program in `_direct_program` of its dict, or None
/// while calls have to go through `forward`. Argument names are those of `forward`.
#[pyfunction]
#[pyo3(signature = (module, input=Argument(None), *extra_inputs, is_first_microbatch=None, **others))]
pub(crate) fn program_module_call<'py>(
    module: &Bound<'py, PyAny>,
    input: Argument<'py>,
    extra_inputs: &Bound<'py, PyTuple>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
    others: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let Argument(input) = input;
    let (py, input) = (module.py(), input.as_ref());
    let state = state(py)?;
    let attributes = instance_dict(module)?;
    let program = attributes.get_item(intern!(py, "_direct_program"))?.filter(|program| !program.is_none());
    let plain = input.filter(|input| others.is_none() && state.torch.is_plain(input));
    let direct = plain.zip(program);
    if let Some((input, program)) = direct
        && extra_inputs.iter().all(|extra| state.torch.is_plain(&extra))
        && can_skip_module_call(module, state, &attributes)?
    {
        let program = program.cast::<ProgramHandle>()?;
        // Another number of extra inputs is an error, which the long way words.
        if program.try_borrow()?.chain.extra_inputs() == extra_inputs.len() {
            let is_first = is_first_microbatch.filter(|first| !first.is_none());
            let is_first = is_first.map(PyAnyMethods::is_truthy).transpose()?;
            match apply_in_region((program, module), input, extra_inputs, is_first, 0) {
                // Types that differ within the chain: the long way casts in between.
                Err(error) if is_a(py, &error, "DtypeError") => {}
                done => return done,
            }
        }
    }
    let keywords = others.map_or_else(|| Ok(PyDict::new(py)), PyDictMethods::copy)?;
    if let Some(is_first) = is_first_microbatch {
        keywords.set_item(intern!(py, "is_first_microbatch"), is_first)?;
    }
    let mut arguments = vec![module.clone()];
    arguments.extend(input.cloned());
    arguments.extend(extra_inputs.iter());
    state.torch.call_module(&PyTuple::new(py, arguments)?, &keywords)
}

/// Activation checkpointing runs a forward again during backward, when the autocast region may be over: puts the
/// region of the chain's last forward in force, and returns the one to go back to.
#[inline]
fn recomputed_region(state: &State, program: &Bound<'_, ProgramHandle>) -> PyResult<Option<Former>> {
    let py = program.py();
    let Some(region) = program.try_borrow()?.last_region else { return Ok(None) };
    let mut dispatcher = state.dispatcher(py)?;
    let autocast = &mut dispatcher.0.autocast;
    if autocast.current().enabled || autocast.depth() != 0 || autocast.held().0 {
        return Ok(None); // the region around it says what is wanted
    }
    drop(dispatcher);
    if state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? < 0 {
        program.try_borrow_mut()?.last_region = None;
        return Ok(None);
    }
    dispatcher = state.dispatcher(py)?;
    Ok(Some(dispatcher.0.autocast.repeat(&region)))
}

fn apply<'py>(
    state: &State,
    program: &Bound<'py, ProgramHandle>,
    owner: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    extras: &[Bound<'py, PyAny>],
    bits: u32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let (x, extras, is_cast) = &cast(state, program, x, extras, bits)?;
    let bits = if *is_cast { bits | Bits::MIXED_DTYPES } else { bits };
    let params = parameters(program)?;
    let mut wants = false;
    let grad_mode = state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true));
    if grad_mode {
        for tensor in std::iter::once(x).chain(&params).chain(extras) {
            wants = wants || requires_grad(tensor)?;
        }
    }
    let named_error = |error| program.try_borrow().map_or_else(PyErr::from, |handle| named(&error, Some(&handle.name)));
    if view_of(&state.reader, x, "the input").map_err(named_error)?.numel() == 0 {
        check_types(state, program, x, bits)?;
        let region = *state.dispatcher(py)?.0.autocast.current();
        if region.enabled && region.recipe.is_delayed() && !program.try_borrow()?.weights.is_empty() {
            // Other ranks may have rows, and reduce their maxima with this one.
            owner.call_method0(intern!(py, "_init_delayed_scaling"))?;
        }
        let overwrite = Bits(bits).has(Bits::FIRST_MICROBATCH);
        let arguments = (program, x, PyTuple::new(py, extras)?, PyTuple::new(py, &params)?, overwrite);
        return ops(py)?.call_method1(intern!(py, "program_on_nothing"), arguments);
    }
    if wants {
        let mut arguments = Vec::with_capacity(params.len() + extras.len() + 4);
        arguments.push(x.clone());
        arguments.extend(params);
        arguments.extend(extras.iter().cloned());
        arguments.push(program.clone().into_any());
        arguments.push(owner.clone());
        arguments.push(bits.into_pyobject(py)?.into_any());
        return program_function(py)?.call1(PyTuple::new(py, arguments)?);
    }
    // What is recomputed later with gradients is fused as it will be then: the same bits.
    let grads = !grad_mode && state.dispatcher(py)?.0.autocast.recompute;
    let call = Call {
        state,
        handle: program,
        owner,
        x,
        extras,
        params,
        bits: Bits(bits),
        grads,
        input_grad: grads,
        extra_grads: vec![grads; extras.len()],
        grad_mode,
    };
    results(call.run()?)
}

/// `torch._C._FunctionBase.apply` of the programs' autograd function.
fn program_function(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static APPLY: pyo3::sync::PyOnceLock<Py<PyAny>> = pyo3::sync::PyOnceLock::new();
    let apply = APPLY.get_or_try_init(py, || ops(py)?.getattr("program_function_apply").map(Bound::unbind))?;
    Ok(apply.bind(py).clone())
}

/// The output alone, or a tuple with the extra outputs behind it.
fn results(done: Done<'_>) -> PyResult<Bound<'_, PyAny>> {
    let py = done.y.py();
    if done.extra_outputs.is_empty() {
        return Ok(done.y);
    }
    let all = std::iter::once(done.y).chain(done.extra_outputs).collect::<Vec<_>>();
    Ok(PyTuple::new(py, all)?.into_any())
}

type Inputs<'py> = (Bound<'py, PyAny>, Vec<Bound<'py, PyAny>>, bool);

/// The inputs in the type that `torch.autocast` wants, with a check of their number; and whether it wants any.
#[inline]
fn cast<'py>(
    state: &State,
    program: &Bound<'py, ProgramHandle>,
    x: &Bound<'py, PyAny>,
    extras: &[Bound<'py, PyAny>],
    bits: u32,
) -> PyResult<Inputs<'py>> {
    {
        let handle = program.try_borrow()?;
        if handle.chain.extra_inputs() != extras.len() {
            let message = format!("expected {} extra inputs, got {}", handle.chain.extra_inputs(), extras.len());
            return Err(named(&Error::value(OP, message), Some(&handle.name)));
        }
    }
    let Some(dtype) = autocast_dtype(state, program, x, bits)? else {
        return Ok((x.clone(), extras.to_vec(), false));
    };
    let to = |tensor: &Bound<'py, PyAny>| tensor.call_method1(intern!(tensor.py(), "to"), (&dtype,));
    Ok((to(x)?, extras.iter().map(to).collect::<PyResult<_>>()?, true))
}

/// The type that `torch.autocast` wants, if it is on. Without [`Bits::MIXED_DTYPES`], chains of which only a part computes
/// in that type are refused.
#[inline]
fn autocast_dtype<'py>(
    state: &State,
    program: &Bound<'py, ProgramHandle>,
    x: &Bound<'py, PyAny>,
    bits: u32,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = x.py();
    if !state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()? {
        return Ok(None);
    }
    let torch = py.import(intern!(py, "torch"))?;
    let kind = x.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?;
    if !torch.call_method1(intern!(py, "is_autocast_enabled"), (&kind,))?.is_truthy()? {
        return Ok(None);
    }
    if !(Bits(bits).has(Bits::MIXED_DTYPES) || program.try_borrow()?.chain.follows_autocast()) {
        return Err(Error::dtype(OP, "the chain", "ops that all compute in the type of torch.autocast", "others"))
            .python();
    }
    torch.call_method1(intern!(py, "get_autocast_dtype"), (&kind,)).map(Some)
}

fn kept<'py>(
    state: &State,
    program: &Bound<'py, ProgramHandle>,
    done: &mut Done<'py>,
    extras: &[Bound<'py, PyAny>],
    bits: Bits,
) -> PyResult<ProgramSaved> {
    let py = program.py();
    let delayed = done.weights.iter().any(|weight| weight.slots.is_some());
    let extra_shapes = extras
        .iter()
        .map(|extra| Ok(view_of(&state.reader, extra, "an extra input").python()?.shape().to_vec()))
        .collect::<PyResult<_>>()?;
    Ok(ProgramSaved {
        handle: program.clone().unbind(),
        compiled: std::sync::Arc::clone(&done.compiled),
        shapes: std::sync::Arc::clone(&done.shapes),
        weights: std::mem::take(&mut done.weights),
        extra_shapes,
        params: std::mem::take(&mut done.params).into_iter().map(Bound::unbind).collect(),
        overwrite_main_grad: bits.has(Bits::FIRST_MICROBATCH) && !done.skippable,
        updates_backward_scales: delayed && state.dispatcher(py)?.0.autocast.take_first_fp8_module(),
    })
}

/// Forward of the autograd function: called by torch with gradients off; `arguments` are input, parameters, extra
/// inputs, program, owner and bits.
#[pyfunction]
#[pyo3(signature = (ctx, *arguments))]
pub(crate) fn program_autograd_forward<'py>(
    ctx: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = ctx.py();
    let state = state(py)?;
    let count = arguments.len();
    let program = arguments.get_item(count - 3)?.cast_into::<ProgramHandle>()?;
    let owner = arguments.get_item(count - 2)?;
    let bits = Bits(arguments.get_item(count - 1)?.extract()?);
    let tensors: Vec<Bound<'py, PyAny>> = arguments.iter().take(count - 3).collect();
    let params = program.try_borrow()?.chain.params();
    let (x, rest) = (&tensors[0], &tensors[1..]);
    let (params, extras) = rest.split_at(params);
    let call = Call {
        state,
        handle: &program,
        owner: &owner,
        x,
        extras,
        params: params.to_vec(),
        bits,
        grads: true,
        input_grad: requires_grad(x)?,
        extra_grads: extras.iter().map(requires_grad).collect::<PyResult<_>>()?,
        grad_mode: true,
    };
    let mut done = call.run()?;
    ctx.setattr(intern!(py, "to_save"), done.to_save(x, extras)?)?;
    let saved = kept(state, &program, &mut done, extras, bits)?;
    ctx.setattr(intern!(py, "te_saved"), Bound::new(py, saved)?)?;
    results(done)
}

/// A forward without an autograd node, for one inside Python's: (output, extra outputs, what backward needs or None,
/// tensors to save).
#[pyfunction]
#[pyo3(signature = (program, owner, x, extra_inputs, is_first_microbatch, input_needs_grad, extra_need_grad, parameters_need_grad, /))]
#[expect(clippy::type_complexity, reason = "a Python tuple")]
pub(crate) fn program_run_forward<'py>(
    program: &Bound<'py, ProgramHandle>,
    owner: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    extra_inputs: &Bound<'py, PyTuple>,
    is_first_microbatch: Option<bool>,
    input_needs_grad: bool,
    extra_need_grad: Vec<bool>,
    parameters_need_grad: bool,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>, Option<Bound<'py, ProgramSaved>>, Bound<'py, PyTuple>)> {
    let py = x.py();
    let state = state(py)?;
    let bits = Bits(Bits::of_microbatch(is_first_microbatch) | Bits::MIXED_DTYPES);
    let extras: Vec<Bound<'py, PyAny>> = extra_inputs.iter().collect();
    let params = parameters(program)?;
    let wants = input_needs_grad || parameters_need_grad || extra_need_grad.iter().any(|&wanted| wanted);
    let call = Call {
        state,
        handle: program,
        owner,
        x,
        extras: &extras,
        params,
        bits,
        grads: parameters_need_grad,
        input_grad: input_needs_grad,
        extra_grads: extra_need_grad,
        grad_mode: wants,
    };
    let former = recomputed_region(state, program)?;
    let done = call.run();
    if let Some(former) = former {
        state.dispatcher(py)?.0.autocast.exit(&former, false);
    }
    let mut done = done?;
    let (y, outputs) = (done.y.clone(), PyTuple::new(py, &done.extra_outputs)?);
    if !wants {
        return Ok((y, outputs, None, PyTuple::empty(py)));
    }
    let to_save = done.to_save(x, &extras)?;
    let saved = Bound::new(py, kept(state, program, &mut done, &extras, bits)?)?;
    Ok((y, outputs, Some(saved), to_save))
}

/// The backward of [`program_run_forward`]: gradients of input, parameters and extra inputs; None where none is wanted.
#[pyfunction]
#[pyo3(signature = (kept, saved_tensors, grad_output, extra_grads, /))]
#[expect(clippy::type_complexity, reason = "a Python tuple")]
pub(crate) fn program_run_backward<'py>(
    kept: &Bound<'py, ProgramSaved>,
    saved_tensors: &Bound<'py, PyTuple>,
    grad_output: &Bound<'py, PyAny>,
    extra_grads: &Bound<'py, PyTuple>,
) -> PyResult<(Option<Bound<'py, PyAny>>, Bound<'py, PyTuple>, Bound<'py, PyTuple>)> {
    let py = kept.py();
    let grads: Vec<Bound<'py, PyAny>> = std::iter::once(grad_output.clone()).chain(extra_grads.iter()).collect();
    let grads = run(state(py)?, kept.get(), saved_tensors, &grads)?;
    Ok((grads.input, PyTuple::new(py, grads.params)?, PyTuple::new(py, grads.extras)?))
}
