//! Calls of an operator from Python. They bypass torch's dispatcher, which converts every argument twice, unless a
//! mode, tracer or profiler is active.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::graphs::backward::traced_backward;
use crate::graphs::forward::traced_forward;
use crate::torch::process::state;

/// `__call__` of the forward operator.
#[pyfunction]
#[pyo3(signature = (operator, reads, writes, program, call))]
pub(crate) fn traced_forward_call<'py>(
    operator: &Bound<'py, PyAny>,
    reads: &Bound<'py, PyAny>,
    writes: &Bound<'py, PyAny>,
    program: &Bound<'py, PyAny>,
    call: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    call_operator(operator, (reads, writes, program, call), traced_forward)
}

/// `__call__` of the backward operator.
#[pyfunction]
#[pyo3(signature = (operator, reads, writes, program, call))]
pub(crate) fn traced_backward_call<'py>(
    operator: &Bound<'py, PyAny>,
    reads: &Bound<'py, PyAny>,
    writes: &Bound<'py, PyAny>,
    program: &Bound<'py, PyAny>,
    call: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    call_operator(operator, (reads, writes, program, call), traced_backward)
}

type Arguments<'a, 'py> = (&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>);

type Run<'py> = fn(&Bound<'py, PyList>, &Bound<'py, PyList>, &Bound<'py, PyAny>, i64) -> PyResult<()>;

/// Runs an operator directly for plain tensors, outside of tracers, modes and profilers.
#[inline]
fn call_operator<'py>(
    operator: &Bound<'py, PyAny>,
    (reads, writes, program, call): Arguments<'_, 'py>,
    run: Run<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = operator.py();
    let state = state(py)?;
    if let (Ok(from), Ok(to), Ok(number)) = (reads.cast::<PyList>(), writes.cast::<PyList>(), call.extract()) {
        let is_plain = |list: &Bound<'_, PyList>| list.iter().all(|tensor| state.torch.is_plain(&tensor));
        if state.torch.is_plain(program) && is_plain(from) && is_plain(to) && state.torch.is_unwatched(py)? {
            run(from, to, program, number)?;
            return Ok(py.None().into_bound(py));
        }
    }
    dispatched(operator, (reads, writes, program, call))
}

/// The same for calls by torch.
#[cold]
fn dispatched<'py>(
    operator: &Bound<'py, PyAny>,
    (reads, writes, program, call): Arguments<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = operator.py();
    let base = py.import(intern!(py, "torch._ops"))?.getattr(intern!(py, "OpOverload"))?;
    base.call_method1(intern!(py, "__call__"), (operator, reads, writes, program, call))
}
