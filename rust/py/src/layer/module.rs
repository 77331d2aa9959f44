//! `nn.Module.__call__` without its cost, if there is no hook and no override.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyAnyMethods, PyDict, PyDictMethods, PyTuple};

use crate::program::asked::InFp8;
use crate::tensor::given::given;
use crate::torch::process::{State, TensorKind, state};
use crate::torch::reader::instance_dict;

/// An argument that may be missing, as distinct from None.
pub(crate) struct Argument<'py>(pub(crate) Option<Bound<'py, PyAny>>);

impl<'py> FromPyObject<'_, 'py> for Argument<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(Some(object.to_owned())))
    }
}

/// The arguments of a plain call of a layer: its `forward` on one tensor.
pub(crate) struct PlainCall<'a, 'py> {
    pub(crate) state: &'a State,
    /// `module.__dict__`.
    pub(crate) attributes: &'a Bound<'py, PyDict>,
    /// Whether the native side may read `inp`: a tensor of torch's own class, or a quantised one.
    pub(crate) is_plain: bool,
    pub(crate) is_first_microbatch: Option<bool>,
    pub(crate) in_fp8: InFp8,
}

/// Whether the native side reads a tensor: of torch's own classes, or quantised.
#[inline]
pub(crate) fn is_native(state: &State, inp: &Bound<'_, PyAny>) -> bool {
    state.torch.is_plain(inp) || given(state, inp).is_some()
}

/// The call of a layer with `Linear`'s arguments; `forward` handles plain calls.
#[inline]
pub(crate) fn module_call<'py>(
    module: &Bound<'py, PyAny>,
    inp: Option<&Bound<'py, PyAny>>,
    optional: &[(&str, Option<&Bound<'py, PyAny>>); 3],
    others: Option<&Bound<'py, PyDict>>,
    forward: impl FnOnce(&PlainCall<'_, 'py>, &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let state = state(module.py())?;
    let attributes = instance_dict(module)?;
    let [(_, is_first_microbatch), (_, fp8_output), (_, fp8_grad)] = optional;
    let plain = others.is_none();
    let kind = inp.map_or(TensorKind::None, |inp| state.torch.kind_of(inp));
    if let (Some(inp), true, true) = (inp, plain, kind != TensorKind::None)
        && can_skip_module_call(module, state, &attributes)?
    {
        let is_plain = kind == TensorKind::Plain || given(state, inp).is_some();
        let is_first_microbatch = truth(*is_first_microbatch)?;
        let in_fp8 = InFp8 { output: truth(*fp8_output)? == Some(true), grad: truth(*fp8_grad)? == Some(true) };
        return forward(&PlainCall { state, attributes: &attributes, is_plain, is_first_microbatch, in_fp8 }, inp);
    }
    slow_call(state, module, inp, optional, others)
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

/// Whether calls of modules are their classes' own forwards alone: no hook of them or of all modules, no compiled call,
/// and no `forward` of an instance.
#[pyfunction]
#[pyo3(signature = (*modules))]
pub(crate) fn are_called_plainly(modules: &Bound<'_, PyTuple>) -> PyResult<bool> {
    let state = state(modules.py())?;
    for module in modules {
        if !is_unhooked(&instance_dict(&module)?)? {
            return Ok(false);
        }
    }
    Ok(has_no_global_hook(state, modules.py()))
}

/// Whether children of modules are those that were found before, and have no hooks: `watched` has each module, and its
/// children by name.
#[pyfunction]
#[pyo3(signature = (watched, /))]
pub(crate) fn are_as_found(watched: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = watched.py();
    for entry in watched.try_iter()? {
        let (owner, known) = entry?.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let children = instance_dict(&owner)?.get_item(intern!(py, "_modules"))?;
        let Some(children) = children.as_ref().and_then(|children| children.cast::<PyDict>().ok()) else {
            return Ok(false);
        };
        for child in known.try_iter()? {
            let (name, module) = child?.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
            if !children.get_item(name)?.is_some_and(|child| child.is(&module))
                || !has_no_hook(&instance_dict(&module)?)?
            {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Whether a module has no hooks, no compiled call and no `forward` of its own.
#[inline]
pub(crate) fn is_unhooked(attributes: &Bound<'_, PyDict>) -> PyResult<bool> {
    let py = attributes.py();
    let compiled = attributes.get_item(intern!(py, "_compiled_call_impl"))?;
    Ok(has_no_hook(attributes)?
        && compiled.is_none_or(|call| call.is_none())
        && !attributes.contains(intern!(py, "forward"))?)
}

#[inline]
fn has_no_hook(attributes: &Bound<'_, PyDict>) -> PyResult<bool> {
    let py = attributes.py();
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
    Ok(true)
}

pub(crate) fn has_no_global_hook(state: &State, py: Python<'_>) -> bool {
    state.torch.global_hooks.iter().all(|hooks| hooks.bind(py).is_empty())
}

/// Whether the call is plain: [`is_unhooked`], no hook of all modules, and no other `forward` than that of the class with
/// this native call (of a mixin or a subclass).
#[inline]
pub(crate) fn can_skip_module_call(
    module: &Bound<'_, PyAny>,
    state: &State,
    attributes: &Bound<'_, PyDict>,
) -> PyResult<bool> {
    let py = module.py();
    let class = module.get_type();
    Ok(is_unhooked(attributes)?
        && has_no_global_hook(state, py)
        && class.getattr(intern!(py, "forward"))?.is(&class.getattr(intern!(py, "_called_forward"))?))
}
