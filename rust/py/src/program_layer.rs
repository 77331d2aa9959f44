//! `layer(x)` of layers that are programs: from Python's call to the program without a Python frame.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyDictMethods, PyTuple};

use crate::error::is_ours;
use crate::linear::{Argument, module_call, truth};
use crate::program::ProgramHandle;
use crate::program_call::program_apply;
use crate::state::{State, state};
use crate::tensor::instance_dict;

/// `layer(x)`: as `nn.Module.__call__`, without its cost where no hook and no override asks for it. Other keywords are
/// those of a `forward` in the place of the layer's.
#[pyfunction]
#[pyo3(signature = (module, inp=Argument(None), is_first_microbatch=None, fp8_output=None, fp8_grad=None, **others))]
pub(crate) fn program_layer_call<'py>(
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

/// The `forward` of such a layer.
#[pyfunction]
#[pyo3(signature = (module, inp, is_first_microbatch=None))]
pub(crate) fn program_layer_forward<'py>(
    module: &Bound<'py, PyAny>,
    inp: &Bound<'py, PyAny>,
    is_first_microbatch: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    forward(state(module.py())?, module, &instance_dict(module)?, inp, truth(is_first_microbatch)?)
}

/// Runs the program in `_direct_program`, or `_forward_general` where there is none or the call is not for it.
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
    let Some(program) = attributes.get_item(intern!(py, "_direct_program"))? else { return general() };
    let Ok(program) = program.cast::<ProgramHandle>() else { return general() };
    // Under torch's autocast the parameters may have another type than the input, which this program refuses.
    if !state.torch.is_plain(input) || state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()? {
        return general();
    }
    let region = *state.dispatcher(py)?.0.autocast.current();
    if region.calibrating && !region.enabled {
        return general();
    }
    let last_epoch = program.try_borrow()?.last_region.as_ref().map(|region| region.epoch);
    if region.enabled && last_epoch != Some(region.epoch) {
        module.call_method0(intern!(py, "_enter_region"))?;
    }
    match program_apply(program, module, input, &PyTuple::empty(py), is_first_microbatch) {
        // Parameters that are somewhere else, or an input that does not fit: said in terms of the layer.
        Err(error) if is_ours(py, &error) => general(),
        result => result,
    }
}
