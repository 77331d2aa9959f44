//! A weight that is quantised together with others: its owner and its tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::type_object::PyTypeInfo;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use smallvec::SmallVec;
use te_fast_core::program::WeightCast;
use te_fast_core::quant::weight::{WeightRecord, WeightToken};

use crate::error::Failure;
use crate::program::optimizer_writes::written_since;
use crate::torch::process::State;

/// A weight that takes part.
#[derive(Debug)]
pub(crate) struct Member {
    /// The handle that keeps the quantised weight.
    handle: Py<PyWeakrefReference>,
    /// The tensors whose versions make the weight's version; the weight begins with tensor number `first`.
    sources: SmallVec<[Py<PyWeakrefReference>; 2]>,
    first: usize,
    /// The launch that it has joined.
    round: AtomicU64,
}

/// The last quantisation of a handle's weight, and its member.
#[derive(Debug)]
pub(crate) struct Joining {
    pub(crate) member: Arc<Member>,
    /// torch's weak reference to the storage of the weight.
    pub(crate) storage: Py<PyAny>,
    pub(crate) record: WeightRecord,
    pub(crate) cast: WeightCast,
}

impl Member {
    /// None if the weight is not a parameter of its module, but a view or a copy for the call.
    pub(crate) fn new(
        state: &State,
        handle: &Bound<'_, PyAny>,
        (tensors, first): (&[Bound<'_, PyAny>], usize),
    ) -> PyResult<Option<Self>> {
        let is_kept = |tensor: &Bound<'_, PyAny>| -> PyResult<bool> {
            Ok(state.torch.is_plain(tensor) && tensor.getattr(&state.torch.names.is_leaf)?.is_truthy()?)
        };
        let mut sources = SmallVec::new();
        for tensor in tensors {
            if !is_kept(tensor)? {
                return Ok(None);
            }
            sources.push(PyWeakrefReference::new(tensor)?.unbind());
        }
        let handle = PyWeakrefReference::new(handle)?.unbind();
        Ok(Some(Self { handle, sources, first, round: AtomicU64::new(0) }))
    }

    /// Whether it is still the weight of these tensors.
    pub(crate) fn is_of(&self, py: Python<'_>, (tensors, first): (&[Bound<'_, PyAny>], usize)) -> bool {
        let same = |(known, tensor): (&Py<PyWeakrefReference>, &Bound<'_, PyAny>)| {
            known.bind(py).upgrade().is_some_and(|known| known.is(tensor))
        };
        (self.first, self.sources.len()) == (first, tensors.len()) && self.sources.iter().zip(tensors).all(same)
    }

    /// Whether it has not joined launch number `round` yet; it has from then on.
    pub(crate) fn is_new_to(&self, round: u64) -> bool {
        self.round.swap(round, Ordering::Relaxed) != round
    }

    /// The handle that keeps the quantised weight; none if its layer is gone.
    pub(crate) fn handle<'py, T: PyTypeInfo>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, T>>> {
        Ok(self.handle.bind(py).upgrade().map(Bound::cast_into::<T>).transpose()?)
    }

    /// Whether an optimizer that has one of its parameters has stepped since step number `steps` of all.
    pub(crate) fn is_written_since(&self, py: Python<'_>, steps: u64) -> bool {
        self.sources.iter().any(|source| source.bind(py).upgrade().is_some_and(|tensor| written_since(&tensor, steps)))
    }

    /// The tensor that the weight begins with, its address and its version; none if a part is gone.
    pub(crate) fn now<'py>(
        &self,
        state: &State,
        py: Python<'py>,
    ) -> Result<Option<(Bound<'py, PyAny>, WeightToken)>, Failure> {
        let (mut version, mut found) = (0, None);
        for (index, source) in self.sources.iter().enumerate() {
            let Some(tensor) = source.bind(py).upgrade() else { return Ok(None) };
            version += tensor.getattr(intern!(py, "_version"))?.extract::<u64>()?;
            if index == self.first {
                let Some(view) = state.reader.read(&tensor)? else { return Ok(None) };
                if !view.is_contiguous() {
                    return Ok(None);
                }
                found = Some((view.data().address(), view.dtype(), tensor.clone()));
            }
        }
        Ok(found.map(|(address, dtype, tensor)| (tensor, WeightToken { address, version: Some(version), dtype })))
    }
}
