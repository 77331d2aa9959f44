//! Prepares the arguments of operations in place that torch calls with quantised tensors.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::tensor::given::given;
use crate::tensor::value::QuantizedValue;
use crate::torch::process::{State, state};
use crate::torch::reader::{instance_dict, view_of};

/// Quantised tensors that an operation writes, and plain tensors with their values that it writes instead.
struct Written<'py> {
    tensors: Bound<'py, PyList>,
    sources: Bound<'py, PyList>,
}

/// An argument, as far as it matters here.
enum Argument<'py> {
    /// As it is.
    Kept,
    /// With values dequantised.
    Replaced(Bound<'py, PyAny>),
    /// A kind that only the general path handles.
    Unknown,
}

/// Arguments; quantised tensors that are written, and plain tensors in their place.
type Plain<'py> = (Bound<'py, PyTuple>, Bound<'py, PyList>, Bound<'py, PyList>);

/// Positional arguments with every quantised tensor dequantised, and the tensors to quantise again after the operation,
/// from the arguments whose bits are set in `written`. None under a tracer, if a tensor is a view of other bytes, or if
/// a keyword argument is quantised.
#[pyfunction]
#[pyo3(signature = (args, kwargs, written, /))]
pub(crate) fn plain_arguments<'py>(
    args: &Bound<'py, PyTuple>,
    kwargs: &Bound<'py, PyDict>,
    written: u64,
) -> PyResult<Option<Plain<'py>>> {
    let py = args.py();
    let state = state(py)?;
    if !state.torch.is_unobserved(py)? {
        return Ok(None);
    }
    for (_, value) in kwargs.iter() {
        if !matches!(plain(state, &value, None)?, Argument::Kept) {
            return Ok(None);
        }
    }
    let found = Written { tensors: PyList::empty(py), sources: PyList::empty(py) };
    let mut plain_args = Vec::with_capacity(args.len());
    for (place, arg) in args.iter().enumerate() {
        let is_written = place < 64 && written >> place & 1 == 1;
        plain_args.push(match plain(state, &arg, is_written.then_some(&found))? {
            Argument::Kept => arg,
            Argument::Replaced(values) => values,
            Argument::Unknown => return Ok(None),
        });
    }
    Ok(Some((PyTuple::new(py, plain_args)?, found.tensors, found.sources)))
}

fn plain<'py>(state: &State, arg: &Bound<'py, PyAny>, written: Option<&Written<'py>>) -> PyResult<Argument<'py>> {
    if let Ok(list) = arg.cast_exact::<PyList>() {
        return plain_list(state, list, written);
    }
    if arg.is_exact_instance_of::<PyTuple>() {
        return Ok(Argument::Unknown);
    }
    one(state, arg, written)
}

/// A list is copied at its first quantised tensor, so that the caller's list does not change.
fn plain_list<'py>(
    state: &State,
    list: &Bound<'py, PyList>,
    written: Option<&Written<'py>>,
) -> PyResult<Argument<'py>> {
    let mut made: Option<Bound<'py, PyList>> = None;
    for (index, element) in list.iter().enumerate() {
        match one(state, &element, written)? {
            Argument::Kept => {}
            Argument::Unknown => return Ok(Argument::Unknown),
            Argument::Replaced(values) => {
                let copy = match made.take() {
                    Some(copy) => copy,
                    None => list.get_slice(0, list.len()),
                };
                copy.set_item(index, values)?;
                made = Some(copy);
            }
        }
    }
    Ok(made.map_or(Argument::Kept, |copy| Argument::Replaced(copy.into_any())))
}

fn one<'py>(state: &State, arg: &Bound<'py, PyAny>, written: Option<&Written<'py>>) -> PyResult<Argument<'py>> {
    if state.torch.is_plain(arg) || is_scalar(arg) {
        return Ok(Argument::Kept);
    }
    let Some(value) = given(state, arg) else {
        // Tensors of foreign classes, and torch's own objects: types, devices, generators.
        return Ok(Argument::Kept);
    };
    let py = arg.py();
    let is_part = instance_dict(arg)?.get_item(intern!(py, "_is_part"))?;
    let row = QuantizedValue::snapshot(&value)?.part(py, false);
    let (Some((data, scale)), Some(outside)) = (row, state.reader.read_outside(arg)?) else {
        return Ok(Argument::Unknown);
    };
    let is_like_row = view_of(&state.reader, &data, "data").is_ok_and(|data| data.shape() == outside.shape());
    let is_whole = is_part.is_none_or(|part| !part.is_truthy().unwrap_or(true));
    let is_own = state.torch.is_plain(&data) && state.torch.is_plain(&scale);
    if !(is_like_row && is_whole && is_own) || outside.dtype().as_float().is_none() {
        return Ok(Argument::Unknown);
    }
    let values = QuantizedValue::dequantize(&value, state.torch.dtype(py, outside.dtype()))?;
    if let Some(written) = written {
        written.tensors.append(arg)?;
        written.sources.append(&values)?;
    }
    Ok(Argument::Replaced(values))
}

fn is_scalar(arg: &Bound<'_, PyAny>) -> bool {
    arg.is_none()
        || arg.is_exact_instance_of::<PyFloat>()
        || arg.is_exact_instance_of::<PyBool>()
        || arg.is_exact_instance_of::<PyInt>()
        || arg.is_exact_instance_of::<PyString>()
}
