//! Weight gradients that go into the caller's buffer `main_grad`, as in Megatron-LM.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::tensor::TensorView;

use crate::error::Failure;
use crate::hooks::hooks;
use crate::program::tensors::{Optional, requires_grad};
use crate::tensor::given::weight_view;
use crate::torch::process::{State, state};
use crate::torch::reader::{instance_dict, view_of};

const OP: &str = "linear";

/// The buffer that a weight's gradient is added to.
pub(crate) struct MainGrad<'py> {
    pub(crate) grad: Bound<'py, PyAny>,
    pub(crate) dtype: DType,
    pub(crate) address: usize,
    /// Whether the gradient is added instead of written.
    pub(crate) accumulate: bool,
}

/// The `main_grad` of a weight.
pub(crate) fn main_grad<'py>(
    state: &State,
    weight: &Bound<'py, PyAny>,
    overwrite: bool,
) -> Result<MainGrad<'py>, Failure> {
    let grad = buffer(weight)?;
    let overwrites = overwrite || has_overwrite(weight)?;
    checked(state, weight, grad, overwrites)
}

fn checked<'py>(
    state: &State,
    weight: &Bound<'py, PyAny>,
    grad: Bound<'py, PyAny>,
    overwrites: bool,
) -> Result<MainGrad<'py>, Failure> {
    let view = view_of(&state.reader, &grad, "main_grad")?;
    let w = weight_view(state, weight)?;
    check_main_grad(&view, w.shape(), w.device())?;
    let (dtype, address) = (view.dtype(), view.data().address());
    Ok(MainGrad { grad, dtype, address, accumulate: !overwrites })
}

/// The `main_grad`s of the parts of a stack as one tensor, if all parts are trained and their `main_grad`s are adjacent
/// and take the gradient in the same way.
pub(crate) fn stacked_main_grad<'py>(
    state: &State,
    parts: &[Bound<'py, PyAny>],
    overwrite: bool,
) -> Result<Option<MainGrad<'py>>, Failure> {
    let mut stack: Option<(MainGrad<'py>, usize)> = None;
    for part in parts {
        if !requires_grad(part)? {
            return Ok(None);
        }
        let main = main_grad(state, part, overwrite)?;
        let bytes = view_of(&state.reader, &main.grad, "main_grad")?.numel() * main.dtype.size();
        match &mut stack {
            None => {
                let end = main.address + bytes;
                stack = Some((main, end));
            }
            Some((first, end)) => {
                let alike = (main.dtype, main.accumulate) == (first.dtype, first.accumulate);
                if !alike || main.address != *end {
                    return Ok(None);
                }
                *end += bytes;
            }
        }
    }
    Ok(stack.map(|(first, _)| first))
}

/// The type of the `main_grad`s of a stack's trained parts, if they share one.
pub(crate) fn main_grads_dtype(state: &State, parts: &[Bound<'_, PyAny>]) -> Result<Option<DType>, Failure> {
    let mut found = None;
    for part in parts {
        if !requires_grad(part)? {
            continue;
        }
        let dtype = main_grad(state, part, false)?.dtype;
        if found.is_some_and(|other| other != dtype) {
            return Ok(None);
        }
        found = Some(dtype);
    }
    Ok(found)
}

/// Refuses a buffer that cannot take the gradient of a weight of this shape.
pub(crate) fn check_main_grad(view: &TensorView<'_>, shape: &[i64], device: Device) -> Result<(), Error> {
    if view.shape() == shape && view.is_contiguous() && view.device() == device && view.dtype().as_float().is_some() {
        return Ok(());
    }
    let got = format!("{} of shape {:?} on {}", view.dtype(), view.shape(), view.device());
    let expected = format!("a contiguous float tensor of shape {shape:?} on {device}");
    Err(Error::shape(OP, "main_grad", expected, got))
}

/// The `main_grad` of a weight as it is.
fn buffer<'py>(weight: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>, Failure> {
    if attribute(weight, intern!(weight.py(), "__fsdp_param__"))?.is_some() {
        return Ok(weight.call_method0("get_main_grad")?);
    }
    match attribute(weight, intern!(weight.py(), "main_grad"))? {
        Some(grad) if !grad.is_none() => Ok(grad),
        _ => Err(Error::state(OP, "fuse_wgrad_accumulation=True needs weight.main_grad; set it before backward, or construct the layer without").into()),
    }
}

/// An attribute that users may set on a parameter; the look-up in the dict avoids an exception for a missing one.
fn attribute<'py>(weight: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if state(weight.py())?.torch.is_plain(weight) {
        return instance_dict(weight)?.get_item(name);
    }
    weight.getattr_opt(name)
}

fn has_overwrite(weight: &Bound<'_, PyAny>) -> PyResult<bool> {
    attribute(weight, intern!(weight.py(), "overwrite_main_grad"))?.map_or(Ok(false), |value| value.is_truthy())
}

/// Adds computed gradients to the `main_grad`s of several weights at once; returns autograd's gradient for each.
pub(crate) fn give_all<'py>(
    weights: &[Bound<'py, PyAny>],
    grads: Vec<Bound<'py, PyAny>>,
    overwrite: bool,
) -> Result<Optional<'py>, Failure> {
    add_all(weights, grads, overwrite)?;
    weights.iter().map(|weight| Ok(after_main_grad(weight)?)).collect()
}

/// The same without a gradient for autograd: one call of torch for gradients that are added, one for the others.
pub(crate) fn add_all<'py>(
    weights: &[Bound<'py, PyAny>],
    grads: Vec<Bound<'py, PyAny>>,
    overwrite: bool,
) -> Result<(), Failure> {
    let Some(py) = weights.first().map(Bound::py) else { return Ok(()) };
    let (mut set, mut added) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
    for (weight, grad) in weights.iter().zip(grads) {
        let list = if overwrite || has_overwrite(weight)? { &mut set } else { &mut added };
        list.0.push(buffer(weight)?);
        list.1.push(grad);
    }
    let torch = py.import(intern!(py, "torch"))?;
    for (function, (main, grads)) in [("_foreach_copy_", set), ("_foreach_add_", added)] {
        if !main.is_empty() {
            torch.call_method1(function, (main, grads))?;
        }
    }
    Ok(())
}

/// Sets the `main_grad` of a weight to zero if its former value does not matter. With `heeds_mark`, a weight that is marked
/// with `overwrite_main_grad` counts, too.
pub(crate) fn begin(weight: &Bound<'_, PyAny>, overwrite: bool, heeds_mark: bool) -> Result<(), Failure> {
    if overwrite || (heeds_mark && has_overwrite(weight)?) {
        buffer(weight)?.call_method0("zero_")?;
    }
    Ok(())
}

/// The same for a gradient that `backward_dw` adds later.
pub(crate) fn give_later<'py>(
    weight: &Bound<'py, PyAny>,
    overwrite: bool,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    begin(weight, overwrite, false)?;
    Ok(after_main_grad(weight)?)
}

/// Transformer Engine's rule: if the parameter has `grad_added_to_main_grad`, the attribute becomes true and autograd
/// gets a dummy gradient, so that hooks run; otherwise autograd gets none.
pub(crate) fn after_main_grad<'py>(weight: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if attribute(weight, intern!(weight.py(), "grad_added_to_main_grad"))?.is_none() {
        return Ok(None);
    }
    weight.setattr(intern!(weight.py(), "grad_added_to_main_grad"), true)?;
    hooks(weight.py())?.dummy_wgrad.bind(weight.py()).call1((weight,)).map(Some)
}
