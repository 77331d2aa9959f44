//! The launches of a call of torch's, captured without running. `te_fast.attention.learned` makes the calls.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::Device;
use te_fast_core::cuda::device::Stream;
use te_fast_core::cuda::learned::observed::{Observed, Repeated, Span};

use crate::error::IntoPython;
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

/// The launches of one captured call.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct ObservedLaunches(Mutex<Option<Observed>>);

/// Launches that several captured calls have in common.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct RepeatedLaunches(Mutex<Option<Repeated>>);

#[pymethods]
impl RepeatedLaunches {
    /// Bytes of private memory of a call; 0 once a plan has the launches.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Repeated::workspace_bytes)
    }

    fn __len__(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Repeated::len)
    }
}

impl RepeatedLaunches {
    /// The launches, for a plan.
    pub(crate) fn take(&self) -> PyResult<Repeated> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| Error::state("repeat", "the launches belong to a plan already")).python()
    }
}

/// The handle of a new stream of a GPU. torch gives its own streams to several users, so that a capture on one of them could
/// contain the launches of others.
#[pyfunction]
#[pyo3(signature = (index, /))]
pub(crate) fn new_stream(py: Python<'_>, index: u16) -> PyResult<u64> {
    let state = state(py)?;
    let _guard = state.guard(py, Device::Cuda(index))?;
    Ok(te_fast_core::cuda::device::new_stream().python()?.handle())
}

/// Captures what `call` sends to the current stream of a tensor's device, which nobody else uses meanwhile, and which must not
/// be the default stream. Returns what `call` returns, and the launches; None in their place if they cannot be repeated.
#[pyfunction]
#[pyo3(signature = (alike, call, /))]
pub(crate) fn observe_launches<'py>(
    alike: &Bound<'py, PyAny>,
    call: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Option<ObservedLaunches>)> {
    let py = alike.py();
    let state = state(py)?;
    let device = view_of(&state.reader, alike, "the tensor").python()?.device();
    let Device::Cuda(ordinal) = device else {
        return Err(Error::device("observe", "the tensor", "a GPU", device)).python();
    };
    let stream = state.reader.stream(py, device)?;
    if stream == Stream::DEFAULT {
        return Err(Error::state("observe", "the default stream cannot be captured; use another one")).python();
    }
    let major = state.dispatcher(py)?.0.facts(ordinal).python()?.capability.0;
    let (result, observed) = Observed::of(stream, major, || call.call0()).python()?;
    Ok((result?, observed.map(|observed| ObservedLaunches(Mutex::new(Some(observed))))))
}

/// The launches that captures have in common, each given with the tensors of its call; None if they have none. The
/// workspace is its bytes and the number of its blocks.
#[pyfunction]
#[pyo3(signature = (captures, workspace, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts lists by value")]
pub(crate) fn repeat_launches(
    py: Python<'_>,
    captures: Vec<(PyRef<'_, ObservedLaunches>, Vec<Bound<'_, PyAny>>)>,
    workspace: (usize, usize),
) -> PyResult<Option<RepeatedLaunches>> {
    let state = state(py)?;
    let mut all = Vec::with_capacity(captures.len());
    for (observed, tensors) in &captures {
        let Some(observed) = observed.0.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Err(Error::state("repeat", "a capture was read already")).python();
        };
        let spans = tensors.iter().map(|tensor| span(state, tensor)).collect::<PyResult<_>>()?;
        all.push((observed, spans));
    }
    Ok(Repeated::of(all, workspace).map(|launches| RepeatedLaunches(Mutex::new(Some(launches)))))
}

/// Whether launches are learned at all.
#[pyfunction]
pub(crate) fn learns_launches() -> bool {
    te_fast_core::base::config::learns_launches()
}

/// The memory of a tensor without gaps.
fn span(state: &State, tensor: &Bound<'_, PyAny>) -> PyResult<Span> {
    let view = view_of(&state.reader, tensor, "a tensor").python()?;
    Ok(Span { address: view.data().address() as u64, bytes: (view.numel() * view.dtype().size()) as u64 })
}
