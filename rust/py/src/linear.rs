//! The linear layer's entry points: read the tensors, find the plan, allocate, run, wrap.

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAnyMethods, PyBool, PyDict, PyDictMethods, PyTuple};
use te_fast_core::autocast::Former;
use te_fast_core::layer::Microbatch;
use te_fast_core::recipe::BackwardOverride;

use crate::layer::{LinearHandle, LinearSaved};
use crate::linear_run::run;
use crate::replay::replay;
use crate::state::{State, state};
use crate::tensor::instance_dict;

/// Python's half: what runs when a call leaves the fast path.
#[derive(Debug)]
pub(crate) struct Hooks {
    /// `torch._C._FunctionBase.apply` of the layer's autograd function.
    pub(crate) apply: Py<PyAny>,
    /// The same backward for `create_graph=True`, where differentiating again must raise.
    pub(crate) backward_once: Py<PyAny>,
    /// Updates the backward scales of delayed scaling.
    pub(crate) update_backward_scales: Py<PyAny>,
    /// The tensor of `set_skip_fp8_weight_update_tensor`, or None.
    pub(crate) skip_weight_flag: Py<PyAny>,
    /// `recompute(handle, slots, generation, grads) -> None | (scale, generation)`, while activation recomputation is on.
    pub(crate) recompute: Py<PyAny>,
}

static HOOKS: PyOnceLock<Hooks> = PyOnceLock::new();

/// Tells the native side Python's half; once, at import.
#[pyfunction]
pub(crate) fn install_linear(
    py: Python<'_>,
    apply: Py<PyAny>,
    backward_once: Py<PyAny>,
    update_backward_scales: Py<PyAny>,
    skip_weight_flag: Py<PyAny>,
    recompute: Py<PyAny>,
) {
    let hooks = Hooks { apply, backward_once, update_backward_scales, skip_weight_flag, recompute };
    let _ = HOOKS.set(py, hooks);
}

pub(crate) fn hooks(py: Python<'_>) -> PyResult<&Hooks> {
    HOOKS.get(py).ok_or_else(|| PyRuntimeError::new_err("te_fast.pytorch._ops was not imported"))
}

/// What a call asks for, as bits that cross the autograd function in one integer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bits(pub(crate) u32);

impl Bits {
    pub(crate) const INPUT_GRAD: u32 = 1;
    pub(crate) const WEIGHT_GRAD: u32 = 2;
    pub(crate) const BIAS_GRAD: u32 = 4;
    pub(crate) const ANY_GRAD: u32 = 7;
    pub(crate) const FIRST_MICROBATCH: u32 = 8;
    pub(crate) const LATER_MICROBATCH: u32 = 16;
    pub(crate) const MIXED_DTYPES: u32 = 32;

    pub(crate) const fn has(self, bit: u32) -> bool {
        self.0 & bit != 0
    }

    pub(crate) fn of_microbatch(is_first: Option<bool>) -> u32 {
        match is_first {
            Some(true) => Self::FIRST_MICROBATCH,
            Some(false) => Self::LATER_MICROBATCH,
            None => 0,
        }
    }

    pub(crate) const fn microbatch(self) -> Microbatch {
        if self.has(Self::FIRST_MICROBATCH) {
            Microbatch::First
        } else if self.has(Self::LATER_MICROBATCH) {
            Microbatch::Later
        } else {
            Microbatch::Unknown
        }
    }
}

/// An argument that may be left out, which is not the same as None.
pub(crate) struct Argument<'py>(pub(crate) Option<Bound<'py, PyAny>>);

impl<'py> FromPyObject<'_, 'py> for Argument<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(Some(object.to_owned())))
    }
}

/// `layer(x)`: as `nn.Module.__call__`, without its cost where no hook and no override asks for it. Other keywords are
/// those of a `forward` in the place of the layer's.
#[pyfunction]
#[pyo3(signature = (module, inp=Argument(None), is_first_microbatch=None, fp8_output=None, fp8_grad=None, **others))]
pub(crate) fn linear_call<'py>(
    module: &Bound<'py, PyAny>,
    inp: Argument<'py>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
    fp8_output: Option<&Bound<'py, PyAny>>,
    fp8_grad: Option<&Bound<'py, PyAny>>,
    others: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let Argument(inp) = inp;
    let optional = [("is_first_microbatch", is_first_microbatch), ("fp8_output", fp8_output), ("fp8_grad", fp8_grad)];
    module_call(module, inp.as_ref(), &optional, others, |state, attributes, inp, first| {
        forward(state, module, attributes, inp, first)
    })
}

/// The call of a layer with [`linear_call`]'s arguments: `forward` is for those that ask for no more than that.
#[inline]
pub(crate) fn module_call<'py>(
    module: &Bound<'py, PyAny>,
    inp: Option<&Bound<'py, PyAny>>,
    optional: &[(&str, Option<&Bound<'py, PyAny>>); 3],
    others: Option<&Bound<'py, PyDict>>,
    forward: impl FnOnce(&State, &Bound<'py, PyDict>, &Bound<'py, PyAny>, Option<bool>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(module.py())?;
    let attributes = instance_dict(module)?;
    let [(_, is_first_microbatch), rest @ ..] = optional;
    let plain = others.is_none() && rest.iter().all(|(_, value)| value.is_none());
    match inp.filter(|inp| state.torch.is_tensor(inp)) {
        Some(inp) if plain && can_skip_module_call(module, state, &attributes)? => {
            forward(state, &attributes, inp, truth(*is_first_microbatch)?)
        }
        _ => slow_call(state, module, inp, optional, others),
    }
}

/// `is_first_microbatch` by its truth value, as Transformer Engine takes it; `None` stays.
#[inline]
pub(crate) fn truth(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<bool>> {
    value.map(PyAnyMethods::is_truthy).transpose()
}

#[cold]
fn slow_call<'py>(
    state: &State,
    module: &Bound<'py, PyAny>,
    inp: Option<&Bound<'py, PyAny>>,
    optional: &[(&str, Option<&Bound<'py, PyAny>>)],
    others: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    let keywords = others.map_or_else(|| Ok(PyDict::new(py)), PyDictMethods::copy)?;
    for (name, value) in optional {
        if let Some(value) = value {
            keywords.set_item(name, value)?;
        }
    }
    let arguments = std::iter::once(module).chain(inp);
    state.torch.call_module(&PyTuple::new(py, arguments.collect::<Vec<_>>())?, &keywords)
}

/// No hook of the module or of all modules, no compiled call, no `forward` of the instance's own or of another class
/// than the one whose native call this is: of a mixin, a subclass, or put in its place.
#[inline]
pub(crate) fn can_skip_module_call(
    module: &Bound<'_, PyAny>,
    state: &State,
    attributes: &Bound<'_, PyDict>,
) -> PyResult<bool> {
    let py = module.py();
    for hooks in [
        intern!(py, "_forward_hooks"),
        intern!(py, "_forward_pre_hooks"),
        intern!(py, "_backward_hooks"),
        intern!(py, "_backward_pre_hooks"),
    ] {
        match attributes.get_item(hooks)? {
            Some(hooks) if hooks.cast::<PyDict>().is_ok_and(PyDictMethods::is_empty) => {}
            _ => return Ok(false),
        }
    }
    let class = module.get_type();
    Ok(state.torch.global_hooks.iter().all(|hooks| hooks.bind(py).is_empty())
        && class.getattr(intern!(py, "forward"))?.is(&class.getattr(intern!(py, "_called_forward"))?)
        && !attributes.contains(intern!(py, "forward"))?
        && !attributes.contains(intern!(py, "_compiled_call_impl"))?)
}

/// `Linear.forward`.
#[pyfunction]
#[pyo3(signature = (module, inp, is_first_microbatch=None))]
pub(crate) fn linear_forward<'py>(
    module: &Bound<'py, PyAny>,
    inp: &Bound<'py, PyAny>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    forward(state(module.py())?, module, &instance_dict(module)?, inp, truth(is_first_microbatch)?)
}

/// Weight and bias, if they are plain tensors; no bias where none is applied.
#[inline]
fn parameters<'py>(
    state: &State,
    attributes: &Bound<'py, PyDict>,
    applies_bias: bool,
) -> PyResult<Option<Parameters<'py>>> {
    let py = attributes.py();
    let Some(parameters) = attributes.get_item(intern!(py, "_parameters"))? else { return Ok(None) };
    let parameters = parameters.cast::<PyDict>()?;
    let plain = |name| -> PyResult<_> { Ok(parameters.get_item(name)?.filter(|value| state.torch.is_plain(value))) };
    let Some(weight) = plain(intern!(py, "weight"))? else { return Ok(None) };
    if !applies_bias {
        return Ok(Some((weight, None)));
    }
    Ok(plain(intern!(py, "bias"))?.map(|bias| (weight, Some(bias))))
}

type Parameters<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

#[inline]
fn forward<'py>(
    state: &State,
    module: &Bound<'py, PyAny>,
    attributes: &Bound<'py, PyDict>,
    input: &Bound<'py, PyAny>,
    is_first_microbatch: Option<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    let general = || module.call_method1(intern!(py, "_forward_general"), (input, is_first_microbatch));
    let Some(handle) = attributes.get_item(intern!(py, "_handle"))? else { return general() };
    let handle = handle.cast::<LinearHandle>()?;
    let (config, last_epoch) = {
        let handle = handle.try_borrow()?;
        (handle.config, handle.last_region.as_ref().map(|region| region.epoch))
    };
    let (region, auto_pad, recompute) = {
        let mut dispatcher = state.dispatcher(py)?;
        let region = *dispatcher.0.autocast.current();
        (region, dispatcher.0.auto_pad, dispatcher.0.autocast.recompute)
    };
    if region.enabled && last_epoch != Some(region.epoch) {
        handle.try_borrow_mut()?.last_region = Some(region);
        module.call_method0(intern!(py, "_enter_region"))?;
    }
    if !region.enabled
        && last_epoch.is_some()
        && let Some(former) = recomputed_region(state, handle)?
    {
        let again = forward(state, module, attributes, input, is_first_microbatch);
        state.dispatcher(py)?.0.autocast.exit(&former, false);
        return again;
    }
    let overridden = region.recipe.backward_override != BackwardOverride::None; // runs a program
    if !config.whole
        || overridden
        || !state.torch.is_plain(input)
        || state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()?
    {
        return general();
    }
    let Some((weight, bias)) = parameters(state, attributes, config.apply_bias)? else { return general() };
    let y = if region.enabled {
        match state.reader.read(input)? {
            // Rows are appended in Python.
            Some(view) if view.numel() > 0 && (!auto_pad || region.recipe.missing_rows(view.rows()) == 0) => {}
            _ => return general(),
        }
        if region.recipe.is_delayed() {
            ensure_slots(state, module, handle, (region.epoch, recompute))?;
        }
        fp8_linear(state, handle, input, &weight, bias.as_ref(), Bits::of_microbatch(is_first_microbatch))?
    } else {
        if region.calibrating || config.fuse_wgrad_accumulation || config.delay_wgrad_compute {
            return general();
        }
        plain_linear(state, input, &weight, bias.as_ref())?
    };
    let Some(y) = y else { return general() };
    if config.return_bias { module.call_method1(intern!(py, "_with_bias"), (y,)) } else { Ok(y) }
}

/// Quantised; none where the weight has no memory, of which the layer says what to do.
#[inline]
fn fp8_linear<'py>(
    state: &State,
    handle: &Bound<'py, LinearHandle>,
    input: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    bits: u32,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    match apply(state, handle, input, weight, bias, bits) {
        Err(_) if weight.getattr(intern!(weight.py(), "is_meta"))?.is_truthy()? => Ok(None),
        result => result.map(Some),
    }
}

/// torch's own; none where the layer is to say what does not fit. Saved-tensor hooks end a recomputation by another
/// exception.
fn plain_linear<'py>(
    state: &State,
    input: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = input.py();
    match state.torch.linear.bind(py).call1((input, weight, bias)) {
        Err(error) if error.is_instance_of::<PyRuntimeError>(py) => Ok(None),
        result => result.map(Some),
    }
}

/// Activation checkpointing runs a forward again during backward, when the autocast region may be over: puts the
/// region of the layer's last forward in force, and returns the one to go back to.
#[cold]
fn recomputed_region(state: &State, handle: &Bound<'_, LinearHandle>) -> PyResult<Option<Former>> {
    let py = handle.py();
    if state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? < 0 {
        handle.try_borrow_mut()?.last_region = None;
        return Ok(None);
    }
    let Some(region) = handle.try_borrow()?.last_region else { return Ok(None) };
    let mut dispatcher = state.dispatcher(py)?;
    let autocast = &mut dispatcher.0.autocast;
    if autocast.depth() != 0 || autocast.held().0 {
        return Ok(None); // an enclosing region says what is wanted
    }
    Ok(Some(autocast.repeat(&region)))
}

/// Sets delayed scaling up for the region, if this layer has not seen it, and for a phase of recomputation.
#[inline]
fn ensure_slots(
    state: &State,
    module: &Bound<'_, PyAny>,
    handle: &Bound<'_, LinearHandle>,
    (epoch, recompute): (u64, bool),
) -> PyResult<()> {
    if handle.try_borrow()?.slots.as_ref().is_none_or(|slots| !slots.serve(epoch)) {
        module.call_method0(intern!(module.py(), "_init_delayed_scaling"))?;
    }
    if recompute { recompute_scales(state, handle) } else { Ok(()) }
}

/// Has the next call quantise with the scales that activation recomputation wants.
#[cold]
fn recompute_scales(state: &State, handle: &Bound<'_, LinearHandle>) -> PyResult<()> {
    let slots = handle.try_borrow()?.slots.clone();
    let Some(slots) = slots else { return Ok(()) };
    let grads = state.torch.is_grad_enabled.bind(handle.py()).call0()?.is_truthy()?;
    let replay = replay(state, handle, &slots.forward, grads)?;
    handle.try_borrow_mut()?.replay = replay;
    Ok(())
}

/// Quantised `x · Wᵀ + b` with autograd, on tensors that were prepared by Python.
#[pyfunction]
#[pyo3(signature = (module, handle, inp, weight, bias, is_first_microbatch, mixed_dtypes, version, /))]
pub(crate) fn linear_apply<'py>(
    module: &Bound<'py, PyAny>,
    handle: &Bound<'py, LinearHandle>,
    inp: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    is_first_microbatch: Option<bool>,
    mixed_dtypes: bool,
    version: Option<u64>,
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(module.py())?;
    handle.try_borrow_mut()?.version = version;
    let (region, recompute) = {
        let mut dispatcher = state.dispatcher(module.py())?;
        (*dispatcher.0.autocast.current(), dispatcher.0.autocast.recompute)
    };
    if region.recipe.is_delayed() {
        ensure_slots(state, module, handle, (region.epoch, recompute))?;
    }
    let mixed = if mixed_dtypes { Bits::MIXED_DTYPES } else { 0 };
    apply(state, handle, inp, weight, bias, Bits::of_microbatch(is_first_microbatch) | mixed)
}

#[inline]
fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()
}

#[inline]
fn apply<'py>(
    state: &State,
    handle: &Bound<'py, LinearHandle>,
    input: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    mut bits: u32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = input.py();
    if state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true)) {
        bits |= (u32::from(requires_grad(input)?) * Bits::INPUT_GRAD)
            | (u32::from(requires_grad(weight)?) * Bits::WEIGHT_GRAD);
        if let Some(bias) = bias {
            bits |= u32::from(requires_grad(bias)?) * Bits::BIAS_GRAD;
        }
    }
    if bits & Bits::ANY_GRAD != 0 {
        return hooks(py)?.apply.bind(py).call1((input, weight, bias, handle, bits));
    }
    Ok(run(state, handle, input, weight, bias, Bits(bits))?.y)
}

/// Forward of the autograd function: called by torch with gradients off.
#[pyfunction]
pub(crate) fn linear_autograd_forward<'py>(
    ctx: &Bound<'py, PyAny>,
    input: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    handle: &Bound<'py, LinearHandle>,
    bits: u32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = ctx.py();
    let state = state(py)?;
    let bits = Bits(bits);
    let done = run(state, handle, input, weight, bias, bits)?;
    let config = handle.try_borrow()?.config;
    let keeps_input = done.plan.key().needs.save_original_input && bits.has(Bits::WEIGHT_GRAD);
    if keeps_input {
        let kept = PyTuple::new(py, [done.saved.unwrap_or_else(|| py.None().into_bound(py)), input.clone()])?;
        ctx.setattr(intern!(py, "to_save"), kept)?;
    } else if let Some(saved) = done.saved {
        ctx.setattr(intern!(py, "to_save"), PyTuple::new(py, [saved])?)?;
    }
    let updates_backward_scales = done.slots.is_some() && state.dispatcher(py)?.0.autocast.take_first_fp8_module();
    let kept = LinearSaved {
        plan: done.plan,
        handle: handle.clone().unbind(),
        geometry: done.geometry,
        weight: done.weight,
        weight_object: weight.clone().unbind(),
        weight_version: done.weight_version,
        fuse_wgrad_accumulation: config.fuse_wgrad_accumulation,
        slots: done.slots,
        overwrite_main_grad: done.overwrite_main_grad,
        updates_backward_scales,
        bias_grad: bits.has(Bits::BIAS_GRAD),
    };
    ctx.setattr(intern!(py, "te_saved"), Bound::new(py, kept)?)?;
    Ok(done.y)
}
