//! Joins quantised weights of experts, one parameter each, to one value for a program.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use smallvec::SmallVec;

use crate::tensor::value::QuantizedValue;
use crate::torch::process::State;

type Tensors<'py> = SmallVec<[Bound<'py, PyAny>; 8]>;

/// One value of all `parts`, in their memory if it is adjacent, else copied; none if they differ in format or shape, or
/// have no common layout.
pub(crate) fn stacked<'py>(
    state: &State,
    py: Python<'py>,
    parts: &[Bound<'py, QuantizedValue>],
) -> PyResult<Option<QuantizedValue>> {
    let parts = parts.iter().map(QuantizedValue::snapshot).collect::<PyResult<SmallVec<[_; 8]>>>()?;
    let Some(first) = parts.first() else { return Ok(None) };
    if first.groups() != 1 || !parts.iter().all(|part| part.is_like(first)) {
        return Ok(None);
    }
    if parts.len() == 1 {
        return Ok(parts.into_iter().next());
    }
    let mut layouts = [(None, None), (None, None)];
    for (columnwise, layout) in layouts.iter_mut().enumerate() {
        let columnwise = columnwise == 1;
        let (mut data, mut scales) = (Tensors::new(), Tensors::new());
        for part in &parts {
            let Some((bytes, scale)) = part.part(py, columnwise) else { break };
            data.push(bytes);
            scales.push(scale);
        }
        if data.len() != parts.len() {
            continue;
        }
        let scale = joined(state, &scales, first.is_per_tensor())?;
        let Some(data) = joined(state, &data, !columnwise)? else { return Ok(None) };
        *layout = (Some(data.unbind()), scale.map(Bound::unbind));
    }
    if first.is_per_tensor() {
        // Both layouts share one scale, which is stored with the row layout.
        let of_columns = layouts[1].1.take();
        layouts[0].1 = layouts[0].1.take().or(of_columns);
    }
    if layouts[0].0.is_none() && layouts[1].0.is_none() {
        return Ok(None);
    }
    let keeps_col = parts.iter().all(QuantizedValue::keeps_col);
    Ok(Some(QuantizedValue::of_parts(py, first, parts.len(), layouts, keeps_col)))
}

/// The same for Python.
#[pyfunction]
#[pyo3(signature = (parts, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn stack_values(py: Python<'_>, parts: Vec<Bound<'_, QuantizedValue>>) -> PyResult<Option<QuantizedValue>> {
    stacked(crate::torch::process::state(py)?, py, &parts)
}

/// Joins tensors of one shape along their first dimension, or along a new one. None if they do not fit each other.
pub(crate) fn joined<'py>(
    state: &State,
    tensors: &[Bound<'py, PyAny>],
    along_first: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = tensors[0].py();
    let Some(first) = state.reader.read(&tensors[0])? else { return Ok(None) };
    let (mut end, mut adjacent) = (first.data().address(), true);
    for tensor in tensors {
        let Some(view) = state.reader.read(tensor)? else { return Ok(None) };
        if view.shape() != first.shape() || (view.dtype(), view.device()) != (first.dtype(), first.device()) {
            return Ok(None);
        }
        adjacent &= view.is_contiguous() && view.data().address() == end;
        end = view.data().address() + view.numel() * view.dtype().size();
    }
    let mut size: SmallVec<[i64; 4]> = first.shape().into();
    if along_first && !size.is_empty() {
        size[0] *= tensors.len() as i64;
    } else {
        size.insert(0, tensors.len() as i64);
    }
    if adjacent && end <= end_of_storage(&tensors[0])? {
        return Ok(Some(state.torch.in_storage_of(&tensors[0], &size, 0)?));
    }
    let detached =
        tensors.iter().map(|tensor| tensor.call_method0(intern!(py, "detach"))).collect::<PyResult<Vec<_>>>()?;
    let name = if along_first { intern!(py, "cat") } else { intern!(py, "stack") };
    Ok(Some(py.import(intern!(py, "torch"))?.call_method1(name, (PyList::new(py, detached)?,))?))
}

/// The end address of a tensor's storage; adjacent memory beyond it may belong to another storage.
pub(crate) fn end_of_storage(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = tensor.py();
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let start = storage.call_method0(intern!(py, "data_ptr"))?.extract::<usize>()?;
    Ok(start + storage.call_method0(intern!(py, "nbytes"))?.extract::<usize>()?)
}
