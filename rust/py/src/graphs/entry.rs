//! An operator as Python code calls it: straight, where nobody watches, past torch's dispatcher, which converts every argument
//! twice.

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
    match straight(reads, writes, program, call)? {
        Some(Straight { reads, writes, number }) => {
            traced_forward(reads, writes, program, number).map(|()| none(program))
        }
        None => dispatched(operator, (reads, writes, program, call)),
    }
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
    match straight(reads, writes, program, call)? {
        Some(Straight { reads, writes, number }) => {
            traced_backward(reads, writes, program, number).map(|()| none(program))
        }
        None => dispatched(operator, (reads, writes, program, call)),
    }
}

struct Straight<'a, 'py> {
    reads: &'a Bound<'py, PyList>,
    writes: &'a Bound<'py, PyList>,
    number: i64,
}

/// The arguments of a call that nobody watches: of plain tensors, outside of tracers, modes and profilers.
#[inline]
fn straight<'a, 'py>(
    reads: &'a Bound<'py, PyAny>,
    writes: &'a Bound<'py, PyAny>,
    program: &Bound<'py, PyAny>,
    call: &Bound<'py, PyAny>,
) -> PyResult<Option<Straight<'a, 'py>>> {
    let py = program.py();
    let state = state(py)?;
    let (Ok(reads), Ok(writes), Ok(number)) = (reads.cast::<PyList>(), writes.cast::<PyList>(), call.extract()) else {
        return Ok(None);
    };
    let is_plain = |list: &Bound<'_, PyList>| list.iter().all(|tensor| state.torch.is_plain(&tensor));
    let is_straight = state.torch.is_plain(program) && is_plain(reads) && is_plain(writes);
    Ok((is_straight && state.torch.is_unwatched(py)?).then_some(Straight { reads, writes, number }))
}

fn none<'py>(any: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
    any.py().None().into_bound(any.py())
}

type Arguments<'a, 'py> = (&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>);

/// The same as torch calls an operator.
#[cold]
fn dispatched<'py>(
    operator: &Bound<'py, PyAny>,
    (reads, writes, program, call): Arguments<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = operator.py();
    let base = py.import(intern!(py, "torch._ops"))?.getattr(intern!(py, "OpOverload"))?;
    base.call_method1(intern!(py, "__call__"), (operator, reads, writes, program, call))
}
