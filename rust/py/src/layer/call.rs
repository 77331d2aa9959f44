//! Calls of `Linear`, `LayerNormLinear` and `LayerNormMLP`: the straight path, and the check whether a call can take
//! it.

use pyo3::exceptions::{PyAttributeError, PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyDictMethods, PyTuple};

use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::launch::trace::CLOCK;
use te_fast_core::recipe::definition::BackwardOverride;

use crate::layer::module::{Argument, PlainCall, can_skip_module_call, is_native, module_call, truth};
use crate::program::asked::InFp8;
use crate::program::buffers::Buffers;
use crate::program::entry::{apply, in_region_of_last_forward};
use crate::program::forward::Call;
use crate::program::handle::{OutsideFp8, ProgramHandle};
use crate::program::parts::{Joined, present};
use crate::program::tensors::Tensors;
use crate::torch::process::{State, TensorKind, state};
use crate::torch::reader::instance_dict;

/// `layer(x)`: equivalent to `nn.Module.__call__`, without its cost if there is no hook and no override. Other keywords
/// belong to a `forward` that replaces the layer's.
#[pyfunction]
#[pyo3(signature = (module, inp=Argument(None), is_first_microbatch=None, fp8_output=None, fp8_grad=None, **others))]
pub(crate) fn layer_call<'py>(
    module: &Bound<'py, PyAny>,
    inp: Argument<'py>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
    fp8_output: Option<&Bound<'py, PyAny>>,
    fp8_grad: Option<&Bound<'py, PyAny>>,
    others: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let Argument(inp) = inp;
    if (fp8_output.is_some() || fp8_grad.is_some())
        && !module.get_type().getattr(intern!(module.py(), "_HANDS_OUT_FP8"))?.is_truthy()?
    {
        let name = if fp8_output.is_some() { "fp8_output" } else { "fp8_grad" };
        let message = format!("forward() got an unexpected keyword argument '{name}'");
        return Err(PyTypeError::new_err(message));
    }
    let optional = [("is_first_microbatch", is_first_microbatch), ("fp8_output", fp8_output), ("fp8_grad", fp8_grad)];
    module_call(module, inp.as_ref(), &optional, others, |call, inp| forward(call, module, inp))
}

/// The `forward` of such a layer.
#[pyfunction]
#[pyo3(signature = (module, inp, is_first_microbatch=None, fp8_output=None, fp8_grad=None))]
pub(crate) fn layer_forward<'py>(
    module: &Bound<'py, PyAny>,
    inp: &Bound<'py, PyAny>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
    fp8_output: Option<&Bound<'py, PyAny>>,
    fp8_grad: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(module.py())?;
    let (is_plain, is_first_microbatch) = (is_native(state, inp), truth(is_first_microbatch)?);
    let in_fp8 = InFp8 { output: truth(fp8_output)? == Some(true), grad: truth(fp8_grad)? == Some(true) };
    let attributes = &instance_dict(module)?;
    forward(&PlainCall { state, attributes, is_plain, is_first_microbatch, in_fp8 }, module, inp)
}

/// The `forward` of a layer of experts, whose rows `splits` counts on the input's device; None if the call must take
/// the layer's general path.
#[pyfunction]
#[pyo3(signature = (module, inp, splits, is_first_microbatch=None, buffers=None, /))]
pub(crate) fn grouped_layer_forward<'py>(
    module: &Bound<'py, PyAny>,
    inp: &Bound<'py, PyAny>,
    splits: &Bound<'py, PyAny>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
    buffers: Option<Bound<'py, Buffers>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = module.py();
    let state = state(py)?;
    let program = instance_dict(module)?.get_item(intern!(py, "_program"))?;
    let program = program.ok_or_else(|| PyAttributeError::new_err("_program"))?;
    let program = program.cast::<ProgramHandle>()?;
    if !state.torch.is_plain(inp)
        || !state.torch.is_unobserved(py)?
        || state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()?
    {
        return Ok(None);
    }
    let (extras, is_first_microbatch) = (std::slice::from_ref(splits), truth(is_first_microbatch)?);
    in_region_of_last_forward(state, program, || {
        straight(state, module, program, (inp, extras, buffers), (is_first_microbatch, InFp8::default()))
    })
}

/// `layer(x, counts)` of a layer of experts: equivalent to `nn.Module.__call__`, without its cost if there is no hook and
/// no override.
#[pyfunction]
#[pyo3(signature = (module, *arguments, **keywords))]
pub(crate) fn grouped_layer_call<'py>(
    module: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    let state = state(py)?;
    let attributes = instance_dict(module)?;
    let inp = arguments.get_item(0).ok().filter(|inp| state.torch.kind_of(inp) != TensorKind::None);
    if let Some(inp) = inp
        && can_skip_module_call(module, state, &attributes)?
    {
        if let (2, None) = (arguments.len(), keywords)
            && let Some(y) = grouped_straight(state, (module, &attributes), (&inp, &arguments.get_item(1)?), None)?
        {
            return Ok(y);
        }
        return module.getattr(intern!(py, "forward"))?.call(arguments, keywords);
    }
    let all: Vec<_> = std::iter::once(module.clone()).chain(arguments.iter()).collect();
    let keywords = keywords.map_or_else(|| Ok(PyDict::new(py)), PyDictMethods::copy)?;
    state.torch.call_module(&PyTuple::new(py, all)?, &keywords)
}

/// The same without a module's call: the result of a plain call in `forward`, or None for Python to go on.
#[pyfunction]
#[pyo3(signature = (module, inp, counts, is_first_microbatch=None, /))]
pub(crate) fn grouped_layer_straight<'py>(
    module: &Bound<'py, PyAny>,
    inp: &Bound<'py, PyAny>,
    counts: &Bound<'py, PyAny>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let state = state(module.py())?;
    grouped_straight(state, (module, &instance_dict(module)?), (inp, counts), is_first_microbatch)
}

/// A call on tensors of 16 bits and int64 counts on the GPU where an earlier call found that one launch serves all experts
/// (`_one_launch_on`, its number). None for others, and where Python must report something.
fn grouped_straight<'py>(
    state: &State,
    (module, attributes): (&Bound<'py, PyAny>, &Bound<'py, PyDict>),
    (inp, counts): (&Bound<'py, PyAny>, &Bound<'py, PyAny>),
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = module.py();
    let entry = |name| attributes.get_item(name);
    let Some(known) = entry(intern!(py, "_one_launch_on"))?.filter(|known| !known.is_none()) else { return Ok(None) };
    if !state.torch.is_plain(inp)
        || !state.torch.is_plain(counts)
        || entry(intern!(py, "return_bias"))?.is_none_or(|returns| !returns.is(PyBool::new(py, false)))
    {
        return Ok(None);
    }
    let (Some(x), Some(rows)) = (state.reader.read(inp)?, state.reader.read(counts)?) else { return Ok(None) };
    let experts = entry(intern!(py, "num_gemms"))?.map_or(Ok(0), |experts| experts.extract::<i64>())?;
    let fits = x.device() == Device::Cuda(known.extract()?)
        && x.dtype().size() == 2
        && (rows.device(), rows.dtype()) == (x.device(), DType::I64)
        && rows.shape() == [experts]
        && rows.is_contiguous();
    let region = *state.dispatcher(py)?.0.autocast.current();
    if !fits || (region.enabled && region.recipe.backward_override == BackwardOverride::Dequantized) {
        return Ok(None);
    }
    grouped_layer_forward(module, inp, counts, is_first_microbatch, None)
}

/// Runs the layer's program, or `_forward_general` if the call cannot take the straight path.
#[inline]
fn forward<'py>(
    call: &PlainCall<'_, 'py>,
    module: &Bound<'py, PyAny>,
    input: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let &PlainCall { state, attributes, is_first_microbatch, in_fp8, .. } = call;
    let py = module.py();
    let program = attributes.get_item(intern!(py, "_program"))?.ok_or_else(|| PyAttributeError::new_err("_program"))?;
    let program = program.cast::<ProgramHandle>()?;
    let is_plain = call.is_plain
        && state.torch.is_unobserved(py)?
        && !state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()?;
    let asked = (is_first_microbatch, in_fp8);
    let straight = || if is_plain { straight(state, module, program, (input, &[], None), asked) } else { Ok(None) };
    let general = || {
        let arguments = (input, is_first_microbatch);
        if in_fp8 == InFp8::default() {
            return module.call_method1(intern!(py, "_forward_general"), arguments);
        }
        let keywords = PyDict::new(py);
        keywords.set_item(intern!(py, "fp8_output"), in_fp8.output)?;
        keywords.set_item(intern!(py, "fp8_grad"), in_fp8.grad)?;
        module.call_method(intern!(py, "_forward_general"), arguments, Some(&keywords))
    };
    if program.try_borrow()?.outside_fp8 == OutsideFp8::Program {
        // The general path runs programs, which repeat the region themselves.
        return in_region_of_last_forward(state, program, straight)?.map_or_else(general, Ok);
    }
    in_region_of_last_forward(state, program, || straight()?.map_or_else(general, Ok))
}

/// A call that needs no Python; none if it does, or if the layer must report a mismatch.
#[inline]
fn straight<'py>(
    state: &State,
    module: &Bound<'py, PyAny>,
    program: &Bound<'py, ProgramHandle>,
    (input, extras, buffers): (&Bound<'py, PyAny>, &[Bound<'py, PyAny>], Option<Bound<'py, Buffers>>),
    (is_first_microbatch, in_fp8): (Option<bool>, InFp8),
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = module.py();
    let region = *state.dispatcher(py)?.0.autocast.current();
    let (last_epoch, outside) = {
        let handle = program.try_borrow()?;
        if !handle.is_direct {
            return Ok(None);
        }
        (handle.last_region.as_ref().map(|region| region.epoch), handle.outside_fp8)
    };
    if region.enabled && last_epoch != Some(region.epoch) {
        if region.recipe.is_custom() {
            return Ok(None);
        }
        module.call_method0(intern!(py, "_enter_region"))?;
    } else if !region.enabled && (region.calibrating || outside == OutsideFp8::General) {
        return Ok(None);
    }
    let Some((joined, params)) = present(state, program, region.enabled)? else { return Ok(None) };
    let (returns_bias, bias) = ProgramHandle::returned_bias(program)?;
    if returns_bias && bias.is_none() {
        return Ok(None);
    }
    if !region.enabled && outside == OutsideFp8::Torch {
        if !state.torch.is_plain(input) {
            return Ok(None);
        }
        let y = torch_linear(state, input, &params, joined.as_ref())?;
        // If this forward is repeated, it must not repeat the region of an earlier one.
        program.try_borrow_mut()?.last_region = None;
        return y.map(|y| with_bias(bias, y)).transpose();
    }
    CLOCK.start();
    let Ok(tensors) = Tensors::read(state, input, extras, &params) else { return Ok(None) };
    // Outside of FP8, Python dequantises what kernels cannot read.
    if !region.enabled && tensors.handed(state, py).is_err() {
        return Ok(None);
    }
    if !tensors.are_of_one_kind(program.try_borrow()?.chain.input_cols())
        || (joined.is_some() && lacks_rows(state, &tensors, py)?)
    {
        return Ok(None);
    }
    let asked = (is_first_microbatch.into(), None);
    let call = Call::new(state, (program, module), input, (extras, &params), asked)
        .of_parts(joined)
        .into_buffers(buffers)
        .handing_out(in_fp8);
    let y = apply(call, &tensors)?;
    with_bias(bias, y).map(Some)
}

/// Whether a call has no rows, or must be padded for its GEMMs; autograd then joins the parts.
fn lacks_rows(state: &State, tensors: &Tensors<'_>, py: Python<'_>) -> PyResult<bool> {
    Ok(tensors.x.numel() == 0 || state.dispatcher(py)?.0.rows_to_pad(tensors.x.rows()) != 0)
}

/// torch's own linear function; none if the layer must report a mismatch, for a strided input, whose gradients torch
/// rounds differently, and for parts under gradients, of which torch would not see changes before backward. Saved-tensor
/// hooks end a recomputation by another exception.
fn torch_linear<'py>(
    state: &State,
    input: &Bound<'py, PyAny>,
    params: &[Bound<'py, PyAny>],
    joined: Option<&Bound<'py, Joined>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = input.py();
    if let Some(joined) = joined
        && state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true))
        && (joined.get().is_trained() || input.getattr(intern!(py, "requires_grad"))?.is_truthy()?)
    {
        return Ok(None);
    }
    if state.reader.read(input)?.is_some_and(|view| !view.is_contiguous()) {
        return Ok(None);
    }
    let [weight, bias @ ..] = params else { return Ok(None) };
    match state.torch.linear.bind(py).call1((input, weight, bias.first())) {
        Err(error) if error.is_instance_of::<PyRuntimeError>(py) => Ok(None),
        result => result.map(Some),
    }
}

/// The result and the bias, if the layer returns it: `(y, bias, *others)`.
#[inline]
fn with_bias<'py>(bias: Option<Bound<'py, PyAny>>, out: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = out.py();
    let Some(bias) = bias else { return Ok(out) };
    let dtype = intern!(py, "dtype");
    let beside = |y: &Bound<'py, PyAny>| -> PyResult<Bound<'py, PyAny>> {
        let wanted = y.getattr(dtype)?;
        if bias.getattr(dtype)?.is(&wanted) {
            return Ok(bias.clone());
        }
        bias.call_method1(intern!(py, "to"), (wanted,))
    };
    let Ok(results) = out.cast::<PyTuple>() else {
        let bias = beside(&out)?;
        return Ok(PyTuple::new(py, [out, bias])?.into_any());
    };
    let y = results.get_item(0)?;
    let bias = beside(&y)?;
    let all: Vec<_> = [y, bias].into_iter().chain(results.iter().skip(1)).collect();
    Ok(PyTuple::new(py, all)?.into_any())
}
