//! The tensors of a program's call: where they come from, and whether they are what a compiled program takes.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use te_fast_core::kernel::DevPtr;
use te_fast_core::linear::{Segments, WeightBuffer};
use te_fast_core::program::LinearSlots;
use te_fast_core::tensor::{DType, TensorView};
use te_fast_core::{Error, Float};

use crate::error::IntoPython;
use crate::linear_run::readable;
use crate::program::ProgramHandle;
use crate::state::State;
use crate::weight::CachedWeight;

const OP: &str = "ops";

#[inline]
pub(crate) fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()
}

/// The parameters of a program, as their modules hold them now.
pub(crate) fn parameters<'py>(handle: &Bound<'py, ProgramHandle>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let py = handle.py();
    let program = handle.try_borrow()?;
    program
        .params
        .iter()
        .map(|param| {
            let found = param.parameters.bind(py).get_item(param.name.bind(py))?;
            found.filter(|value| !value.is_none()).map_or_else(
                || {
                    let message = format!("{}: parameter {} was removed", program.name, param.name.bind(py));
                    Err(Error::state(OP, message)).python()
                },
                Ok,
            )
        })
        .collect()
}

/// Copies of those tensors that are not contiguous and aligned.
pub(crate) fn copies<'py>(
    state: &State,
    list: &[Bound<'py, PyAny>],
    what: &'static str,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    list.iter().map(|tensor| Ok(readable(state, tensor, what)?.unwrap_or_else(|| tensor.clone()))).collect()
}

pub(crate) fn float(view: &TensorView<'_>, what: &'static str) -> Result<Float, Error> {
    view.dtype().as_float().ok_or_else(|| Error::dtype(OP, what, "float32, float16 or bfloat16", view.dtype()))
}

/// Whether tensors have these types and want these gradients.
pub(crate) fn same(list: &[(Float, bool)], views: &[TensorView<'_>], grads: &[bool]) -> bool {
    list.len() == views.len()
        && list
            .iter()
            .zip(views)
            .zip(grads)
            .all(|((&(dtype, grad), view), &wanted)| grad == wanted && view.dtype() == DType::from(dtype))
}

pub(crate) fn typed(views: &[TensorView<'_>], grads: &[bool], what: &'static str) -> Result<Vec<(Float, bool)>, Error> {
    views.iter().zip(grads).map(|(view, &grad)| Ok((float(view, what)?, grad))).collect()
}

/// Buffers and slots as a program takes them.
pub(crate) fn weight_arguments<'a>(
    weights: impl Iterator<Item = (&'a Option<Arc<CachedWeight>>, LinearSlots<'a>)>,
) -> (Vec<WeightBuffer<'a>>, Vec<LinearSlots<'a>>) {
    weights
        .map(|(quantized, slots)| {
            let none = || WeightBuffer { data: DevPtr::null(), segments: Segments::default() };
            let buffer = quantized.as_ref().map_or_else(none, |quantized| quantized.weight_buffer());
            (buffer, slots)
        })
        .unzip()
}
