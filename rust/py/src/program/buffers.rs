//! Memory from the caller for the result of a call and for the gradient of its input.

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

/// The caller's tensors: contiguous, with the type, device and number of elements of the results.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct Buffers {
    /// For the result.
    pub(crate) output: Option<Py<PyAny>>,
    /// For the gradient of the input.
    pub(crate) grad_input: Option<Py<PyAny>>,
}

#[pymethods]
impl Buffers {
    #[new]
    #[pyo3(signature = (output, grad_input, /))]
    const fn new(output: Option<Py<PyAny>>, grad_input: Option<Py<PyAny>>) -> Self {
        Self { output, grad_input }
    }

    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.output.iter().chain(&self.grad_input).try_for_each(|tensor| visit.call(tensor))
    }
}
