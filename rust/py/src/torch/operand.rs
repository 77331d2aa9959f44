//! Tensors in a form that kernels read: contiguous and aligned, or a copy.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::tensor::TensorView;

use crate::error::{Failure, IntoPython};
use crate::torch::process::State;
use crate::torch::reader::view_of;

/// Bytes that a kernel's input is aligned to.
const ALIGNMENT: usize = 16;

/// A contiguous, aligned copy of `tensor`; none when it is both already.
#[inline]
pub(crate) fn readable<'py>(
    state: &State,
    tensor: &Bound<'py, PyAny>,
    what: &'static str,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let view = view_of(&state.reader, tensor, what).python()?;
    if fits(&view) { Ok(None) } else { contiguous_copy(tensor).map(Some) }
}

/// Whether kernels can read a tensor without a copy.
#[inline]
pub(crate) fn fits(view: &TensorView<'_>) -> bool {
    view.is_contiguous() && view.is_aligned(ALIGNMENT)
}

/// A tensor that forward saved, checked for its number of elements and type, since saved-tensor hooks may return any
/// tensor.
pub(crate) fn saved_tensor<'py>(
    state: &State,
    op: &'static str,
    tensor: Bound<'py, PyAny>,
    (elements, dtype): (usize, DType),
    device: Device,
) -> Result<Bound<'py, PyAny>, Failure> {
    let view = view_of(&state.reader, &tensor, "a saved tensor")?;
    view.check_saved(op, elements, dtype, device)?;
    let readable = fits(&view);
    if readable { Ok(tensor) } else { Ok(contiguous_copy(&tensor)?) }
}

#[cold]
pub(crate) fn contiguous_copy<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let options = PyDict::new(py);
    options.set_item("memory_format", py.import("torch")?.getattr("contiguous_format")?)?;
    tensor.call_method0("detach")?.call_method0("resolve_neg")?.call_method("clone", (), Some(&options))
}
