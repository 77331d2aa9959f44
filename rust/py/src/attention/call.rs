//! A call of torch's attention whose launches are known: tensors are read and allocated, and launches made, without torch.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::tensor::{MAX_DIMS, TensorView};
use te_fast_core::cuda::learned::observed::Repeated;
use te_fast_core::launch::target::{Backend, Target};
use te_fast_core::ops::attention::{ALIGNMENT, on_the_host};

use crate::attention::observed::RepeatedLaunches;
use crate::direct::call::DirectCall;
use crate::error::IntoPython;
use crate::torch::process::state;
use crate::torch::reader::view_of;

const OP: &str = "attention";

/// A call for tensors of certain sizes, strides and types.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct RepeatedCall {
    launches: Mutex<Repeated>,
    bytes: usize,
    device: Device,
    given: Vec<Layout>,
    made: Vec<Made>,
}

#[derive(Debug)]
struct Layout {
    dtype: DType,
    sizes: SmallVec<[i64; MAX_DIMS]>,
    strides: SmallVec<[i64; MAX_DIMS]>,
}

/// A tensor that a call makes.
#[derive(Debug)]
struct Made {
    dtype: DType,
    sizes: Py<PyTuple>,
    strides: Py<PyTuple>,
}

impl Layout {
    fn of(view: &TensorView<'_>) -> Self {
        Self { dtype: view.dtype(), sizes: view.shape().into(), strides: view.strides().into() }
    }

    fn is_of(&self, view: &TensorView<'_>) -> bool {
        view.dtype() == self.dtype
            && view.shape() == &self.sizes[..]
            && self.has_strides(view.strides())
            && view.data().is_aligned(ALIGNMENT)
    }

    /// Whether these are the strides, where they matter.
    fn has_strides(&self, strides: &[i64]) -> bool {
        let own = self.sizes.iter().zip(&self.strides);
        own.zip(strides).all(|((&size, own), stride)| size == 1 || own == stride)
    }
}

#[pymethods]
impl RepeatedCall {
    /// Takes launches with the tensors that the observed call got and made.
    #[new]
    #[pyo3(signature = (launches, given, made, /))]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists by value")]
    fn new(
        py: Python<'_>,
        launches: PyRef<'_, RepeatedLaunches>,
        given: Vec<Bound<'_, PyAny>>,
        made: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let state = state(py)?;
        let read = |tensor| view_of(&state.reader, tensor, "a tensor").python();
        let device = match given.first() {
            Some(first) => read(first)?.device(),
            None => return Err(Error::state(OP, "a call without tensors; report this")).python(),
        };
        let given = given.iter().map(|tensor| Ok(Layout::of(&read(tensor)?))).collect::<PyResult<_>>()?;
        let made = made.iter().map(|tensor| {
            let view = read(tensor)?;
            let (sizes, strides) = (PyTuple::new(py, view.shape())?, PyTuple::new(py, view.strides())?);
            Ok(Made { dtype: view.dtype(), sizes: sizes.unbind(), strides: strides.unbind() })
        });
        let made = made.collect::<PyResult<_>>()?;
        let launches = launches.take()?;
        Ok(Self { bytes: launches.workspace_bytes(), launches: Mutex::new(launches), device, given, made })
    }

    /// Makes the launches for tensors; returns new tensors, or None if the given ones differ in more than address.
    #[pyo3(signature = (*given))]
    fn run<'py>(&self, given: &Bound<'py, PyTuple>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let py = given.py();
        let state = state(py)?;
        let mut addresses = SmallVec::<[u64; 12]>::new();
        if given.len() != self.given.len() {
            return Ok(None);
        }
        for (tensor, layout) in given.iter_borrowed().zip(&self.given) {
            let found = state.reader.read(&tensor)?.filter(|view| view.device() == self.device && layout.is_of(view));
            let Some(view) = found else { return Ok(None) };
            addresses.push(view.data().address() as u64);
        }
        let call = DirectCall::new(state, py, OP, self.device)?;
        let mut made = SmallVec::<[Bound<'py, PyAny>; 3]>::new();
        for Made { dtype, sizes, strides } in &self.made {
            let tensor = state.empty(py, self.device, sizes.bind(py), strides.bind(py), *dtype)?;
            addresses.push(call.pointer(Some(&tensor))?.address() as u64);
            made.push(tensor);
        }
        call.run(self.bytes, |target, workspace| {
            addresses.push(workspace.address() as u64);
            let Target { backend: Backend::Cuda(queue), trace } = target else {
                return Err(on_the_host());
            };
            trace.counters.learned_attentions += 1;
            self.launches.lock().unwrap_or_else(PoisonError::into_inner).launch(queue, &addresses)
        })?;
        PyTuple::new(py, made).map(Some)
    }
}
