//! Finds the program of an operator's call by the address of its handle, and the description of the call by its number.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyWeakrefMethods, PyWeakrefReference};
use rustc_hash::FxHashMap;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};

use crate::error::{Failure, IntoPython};
use crate::graphs::OP;
use crate::graphs::call::{TracedCall, named_by};
use crate::graphs::operands::Operands;
use crate::graphs::parts::Wholes;
use crate::program::handle::ProgramHandle;
use crate::program::tensors::Objects;
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

/// A program in graphs, which lives as long as its layer.
#[derive(Debug)]
struct Registered {
    program: Py<PyWeakrefReference>,
    /// The object that makes the scales of its linear ops.
    owner: Py<PyWeakrefReference>,
}

/// All programs and calls that were traced.
#[pyclass]
#[derive(Debug, Default)]
pub(super) struct Registry {
    by_address: FxHashMap<usize, Registered>,
    /// Addresses of handles by the numbers in them, since a compiler may pass a copy of a handle.
    by_number: FxHashMap<i64, usize>,
    calls: FxHashMap<i64, Py<TracedCall>>,
    /// Python's half: forward, backward and the update behind backward, for calls off the straight path.
    otherwise: Option<[Py<PyAny>; 3]>,
}

/// The operator to run.
pub(super) struct Operator<'py> {
    pub(super) program: Bound<'py, ProgramHandle>,
    pub(super) owner: Bound<'py, PyAny>,
    pub(super) call: Bound<'py, TracedCall>,
}

/// Work that Python does for the native side.
#[derive(Clone, Copy)]
pub(super) enum Otherwise {
    /// A forward on no rows, or with rows that must be padded.
    Forward,
    /// The same for a backward.
    Backward,
    /// The gradients' scales are due at the end of the current backward.
    AfterBackward,
}

fn registry(py: Python<'_>) -> PyResult<&Bound<'_, Registry>> {
    static REGISTRY: PyOnceLock<Py<Registry>> = PyOnceLock::new();
    Ok(REGISTRY.get_or_try_init(py, || Py::new(py, Registry::default()))?.bind(py))
}

/// Sets Python's half of the operators; once.
#[pyfunction]
#[pyo3(signature = (forward, backward, after_backward, /))]
pub(crate) fn traced_install(
    py: Python<'_>,
    forward: Py<PyAny>,
    backward: Py<PyAny>,
    after_backward: Py<PyAny>,
) -> PyResult<()> {
    registry(py)?.try_borrow_mut()?.otherwise = Some([forward, backward, after_backward]);
    Ok(())
}

/// Registers a program by its handle, a tensor of one number.
#[pyfunction]
#[pyo3(signature = (handle, number, program, owner, /))]
pub(crate) fn traced_register(
    handle: &Bound<'_, PyAny>,
    number: i64,
    program: &Bound<'_, ProgramHandle>,
    owner: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = handle.py();
    let address = view_of(&state(py)?.reader, handle, "a handle").python()?.data().address();
    let registered = Registered {
        program: PyWeakrefReference::new(program)?.unbind(),
        owner: PyWeakrefReference::new(owner)?.unbind(),
    };
    let mut registry = registry(py)?.try_borrow_mut()?;
    let former = registry.by_address.insert(address, registered);
    registry.by_number.insert(number, address);
    drop(registry);
    drop(former);
    Ok(())
}

/// Registers the description of a call by its number, or returns the registered one.
#[pyfunction]
#[pyo3(signature = (call, /))]
pub(crate) fn traced_describe<'py>(call: &Bound<'py, TracedCall>) -> PyResult<Bound<'py, TracedCall>> {
    let py = call.py();
    let mut registry = registry(py)?.try_borrow_mut()?;
    let known = registry.calls.entry(call.get().number).or_insert_with(|| call.clone().unbind()).bind(py).clone();
    if known.get().text() != call.get().text() {
        let message = "two kinds of traced calls have one number, which is a hash of each; report both shapes as a bug of te_fast";
        return Err(Error::state(OP, message)).python();
    }
    Ok(known)
}

/// For each quantised parameter that the backward of a call reads in FP8, whether it reads the column layout.
#[pyfunction]
#[pyo3(signature = (call, /))]
pub(crate) fn traced_columns(py: Python<'_>, call: i64) -> PyResult<Vec<bool>> {
    let registry = registry(py)?.try_borrow()?;
    Ok(registry.calls.get(&call).map_or_else(Vec::new, |call| call.get().given_columns()))
}

/// An operator's body on the tensors that it reads and writes; returns whether it ran.
pub(super) type Body<'py> =
    for<'a> fn(&State, &Operator<'py>, &mut Operands<'a, 'py>, &mut Operands<'a, 'py>) -> Result<bool, Failure>;

impl<'py> Operator<'py> {
    /// Runs an operator's body, or Python instead. torch made the lists for this call.
    #[inline]
    pub(super) fn run(
        state: &State,
        (reads, writes): (&Bound<'py, PyList>, &Bound<'py, PyList>),
        (handle, number): (&Bound<'py, PyAny>, i64),
        body: Body<'py>,
        what: Otherwise,
    ) -> PyResult<Self> {
        let operator = Self::find(state, handle, number).map_err(|failure| failure.named(None))?;
        let (from, to) = (reads.iter().collect::<Objects<'_>>(), writes.iter().collect::<Objects<'_>>());
        let run = || -> Result<bool, Failure> {
            let copies;
            let wholes = Wholes::of(state, operator.call.get(), &from, matches!(what, Otherwise::Forward))?;
            let objects = wholes.as_ref().map_or(&from, |wholes| &wholes.objects);
            let mut read = Operands::read(state, objects)?;
            if let Some(made) = read.copies(state)? {
                copies = made;
                read = Operands::read_as(state, objects, &copies)?;
            }
            if let Some(wholes) = &wholes {
                read = read.of_parts(&from, &wholes.ends);
            }
            body(state, &operator, &mut read, &mut Operands::read(state, &to)?)
        };
        if !run().map_err(|failure| named_by(&operator.program, failure))? {
            Self::otherwise(handle.py(), what, (reads, writes, handle, &operator.call))?;
        }
        Ok(operator)
    }

    /// What `handle` and `call` name.
    #[inline]
    pub(super) fn find(state: &State, handle: &Bound<'py, PyAny>, call: i64) -> Result<Self, Failure> {
        let py = handle.py();
        let registry = registry(py)?.try_borrow()?;
        let (program, owner) = registry.program(state, handle)?;
        let Some(call) = registry.calls.get(&call).map(|call| call.bind(py).clone()) else {
            let message =
                "a compiled graph of another process has a call that was not traced in this one; compile it again";
            return Err(Error::state(OP, message).into());
        };
        Ok(Self { program, owner, call })
    }

    /// The program that `handle` names.
    pub(super) fn program(state: &State, handle: &Bound<'py, PyAny>) -> Result<Bound<'py, ProgramHandle>, Failure> {
        Ok(registry(handle.py())?.try_borrow()?.program(state, handle)?.0)
    }

    /// Lets Python run the call, or the work after it.
    #[cold]
    pub(super) fn otherwise<A>(py: Python<'py>, what: Otherwise, arguments: A) -> PyResult<()>
    where
        A: pyo3::call::PyCallArgs<'py>,
    {
        let function = registry(py)?.try_borrow()?.otherwise.as_ref().map(|all| all[what as usize].clone_ref(py));
        let missing = || Error::state(OP, "the operators of graphs were not defined");
        function.ok_or_else(missing).python()?.bind(py).call1(arguments).map(drop)
    }
}

impl Registry {
    /// The program that a handle names, and the owner of its scales.
    #[inline]
    fn program<'py>(
        &self,
        state: &State,
        handle: &Bound<'py, PyAny>,
    ) -> Result<(Bound<'py, ProgramHandle>, Bound<'py, PyAny>), Failure> {
        let py = handle.py();
        let alive = |registered: &Registered| {
            let program = registered.program.bind(py).upgrade()?.cast_into::<ProgramHandle>().ok()?;
            Some((program, registered.owner.bind(py).upgrade()?))
        };
        let known = self.by_address.get(&view_of(&state.reader, handle, "a handle")?.data().address());
        // A copy may have the address of a handle whose program is gone.
        let found = known.and_then(alive).or_else(|| self.copied(state, handle).and_then(alive));
        let deleted = "a compiled graph runs a layer that was deleted; keep the model alive, or compile it again";
        found.ok_or_else(|| Error::state(OP, deleted).into())
    }

    /// The program of a copied handle, if the number in it can be read.
    #[cold]
    fn copied(&self, state: &State, handle: &Bound<'_, PyAny>) -> Option<&Registered> {
        let view = view_of(&state.reader, handle, "a handle").ok()?;
        if (view.device(), view.dtype(), view.numel()) != (Device::Cpu, DType::I64, 1) {
            return None;
        }
        let number = handle.call_method0("item").ok()?.extract::<i64>().ok()?;
        self.by_address.get(self.by_number.get(&number)?)
    }
}
