//! Calls of modules that consist of one group of ops, without the work that Python does around them.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyAnyMethods, PyDict, PyDictMethods, PyTuple};

use crate::layer::module::{Argument, can_skip_module_call};
use crate::program::asked::InFp8;
use crate::program::entry::{cast_and_apply, in_region_of_last_forward};
use crate::program::handle::ProgramHandle;
use crate::program::steps::ProgramSteps;
use crate::program::tensors::{Objects, are_of_one_type, parameters};
use crate::torch::process::{State, state};
use crate::torch::reader::instance_dict;

/// `module(x, *extra_inputs)` of a module whose result is its program's: equivalent to `nn.Module.__call__`, without
/// its cost if there is no hook and no override. The module names the program, or the steps of several, in
/// `_direct_program` of its dict, or None while calls must go through `forward`; a group of ops that is all of the
/// module is called by `_direct_call`, with input, extra inputs and `is_first_microbatch`. Argument names are those of
/// `forward`.
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
    let entry = |name| Ok::<_, PyErr>(attributes.get_item(name)?.filter(|entry| !entry.is_none()));
    let program = entry(intern!(py, "_direct_program"))?;
    let group = entry(intern!(py, "_direct_call"))?;
    let plain = input.filter(|input| others.is_none() && state.torch.is_plain(input));
    if let Some(input) = plain
        && (program.is_some() || group.is_some())
        && extra_inputs.iter().all(|extra| state.torch.is_plain(&extra))
        && state.torch.is_unobserved(py)?
        && can_skip_module_call(module, state, &attributes)?
        && !state.dispatcher(py)?.0.autocast.current().is_of_factory()
    {
        let is_first = is_first_microbatch.filter(|first| !first.is_none());
        let is_first = is_first.map(PyAnyMethods::is_truthy).transpose()?;
        if let Some(steps) = program.as_ref().and_then(|program| program.cast::<ProgramSteps>().ok()) {
            if extra_inputs.is_empty()
                && let Some(y) = steps.get().run(state, module, input, is_first)?
            {
                return Ok(y);
            }
        } else if let Some(program) = program {
            let program = program.cast::<ProgramHandle>()?;
            let extras: Objects<'py> = extra_inputs.iter().collect();
            if let Some(params) = parameters_of_direct_call(state, program, input, &extras)? {
                let asked = (is_first.into(), None);
                let asked = (asked, InFp8::default(), None);
                let run = || cast_and_apply((program, module), input, &extras, (&params, None), asked);
                return in_region_of_last_forward(state, program, run);
            }
        }
        if let Some(group) = group {
            return group.call1((input, extra_inputs, is_first));
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

/// The parameters, if the program takes such a call as it is: so many extra inputs, and one type of everything, or an
/// autocast type that everything is cast to. Else the long way casts in between, or says what is wrong.
#[inline]
fn parameters_of_direct_call<'py>(
    state: &State,
    program: &Bound<'py, ProgramHandle>,
    input: &Bound<'py, PyAny>,
    extras: &[Bound<'py, PyAny>],
) -> PyResult<Option<Objects<'py>>> {
    let (takes, follows_autocast) = {
        let handle = program.try_borrow()?;
        (handle.chain.extra_inputs(), handle.chain.follows_autocast())
    };
    if takes != extras.len() {
        return Ok(None);
    }
    let in_fp8 = state.dispatcher(input.py())?.0.autocast.current().enabled;
    let Some(params) = parameters(state, program, in_fp8)? else { return Ok(None) };
    let cast = state.torch.is_autocast_enabled.bind(input.py()).call0()?.is_truthy()?;
    let fits = if cast { follows_autocast } else { are_of_one_type(state, input, &params, extras)? };
    Ok(fits.then_some(params))
}
