//! A weight that is quantised together with others: its owner and its tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::type_object::PyTypeInfo;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use smallvec::SmallVec;
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::program::WeightCast;
use te_fast_core::quant::weight::{WeightRecord, WeightToken};

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

    /// The weight with its tensors; none if its layer or one of its parts is gone.
    pub(crate) fn alive<T: PyTypeInfo>(self: Arc<Self>, py: Python<'_>) -> PyResult<Option<Alive<'_, T>>> {
        let Some(handle) = self.handle(py)? else { return Ok(None) };
        let sources: Option<_> = self.sources.iter().map(|source| source.bind(py).upgrade()).collect();
        Ok(sources.map(|sources| Alive { member: self, handle, sources }))
    }
}

/// A member whose tensors are held.
pub(crate) struct Alive<'py, T> {
    pub(crate) member: Arc<Member>,
    pub(crate) handle: Bound<'py, T>,
    sources: SmallVec<[Bound<'py, PyAny>; 2]>,
}

impl<T> Alive<'_, T> {
    /// Whether an optimizer that has one of its parameters has stepped since step number `steps` of all.
    pub(crate) fn is_written_since(&self, steps: u64) -> bool {
        self.sources.iter().any(|source| written_since(source, steps))
    }

    /// The weight's address and version; none if kernels cannot read it as it lies.
    pub(crate) fn read(&self, state: &State) -> PyResult<Option<(DevPtr<'_>, WeightToken)>> {
        let mut version = 0;
        for source in &self.sources {
            version += source.getattr(&state.torch.names.version)?.extract::<i64>()? as u64;
        }
        let view = state.reader.read(&self.sources[self.member.first])?.filter(TensorView::is_contiguous);
        Ok(view.map(|view| {
            let token = WeightToken { address: view.data().address(), version: Some(version), dtype: view.dtype() };
            (view.data(), token)
        }))
    }
}
