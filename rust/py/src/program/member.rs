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

/// A weight that takes part: the handle that keeps the quantised weight.
#[derive(Debug)]
pub(crate) struct Member {
    handle: Py<PyWeakrefReference>,
    /// The launch that it has joined.
    round: AtomicU64,
}

/// The tensors whose versions make a weight's version; the weight begins with tensor number `first`.
///
/// torch exchanges a parameter for another one only if nothing refers to it weakly. So these references live in the handle,
/// which drops them together with its quantised weight.
#[derive(Debug)]
pub(crate) struct Sources {
    tensors: SmallVec<[Py<PyWeakrefReference>; 2]>,
    first: usize,
}

/// The same tensors, held.
pub(crate) struct Held<'py> {
    tensors: SmallVec<[Bound<'py, PyAny>; 2]>,
    first: usize,
}

/// The last quantisation of a handle's weight, and its member.
#[derive(Debug)]
pub(crate) struct Joining {
    pub(crate) member: Arc<Member>,
    pub(crate) sources: Sources,
    /// torch's weak reference to the storage of the weight.
    pub(crate) storage: Py<PyAny>,
    pub(crate) record: WeightRecord,
    pub(crate) cast: WeightCast,
}

impl Sources {
    /// None if the weight is not a parameter of its module, but a view or a copy for the call.
    pub(crate) fn new(state: &State, (tensors, first): (&[Bound<'_, PyAny>], usize)) -> PyResult<Option<Self>> {
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
        Ok(Some(Self { tensors: sources, first }))
    }

    /// Whether they are these tensors.
    pub(crate) fn are(&self, py: Python<'_>, (tensors, first): (&[Bound<'_, PyAny>], usize)) -> bool {
        let same = |(known, tensor): (&Py<PyWeakrefReference>, &Bound<'_, PyAny>)| {
            known.bind(py).upgrade().is_some_and(|known| known.is(tensor))
        };
        (self.first, self.tensors.len()) == (first, tensors.len()) && self.tensors.iter().zip(tensors).all(same)
    }

    /// None if one of them is gone.
    pub(crate) fn held<'py>(&self, py: Python<'py>) -> Option<Held<'py>> {
        let tensors: Option<_> = self.tensors.iter().map(|source| source.bind(py).upgrade()).collect();
        tensors.map(|tensors| Held { tensors, first: self.first })
    }
}

impl Member {
    pub(crate) fn new(handle: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { handle: PyWeakrefReference::new(handle)?.unbind(), round: AtomicU64::new(0) })
    }

    /// Whether it has not joined launch number `round` yet; it has from then on.
    pub(crate) fn is_new_to(&self, round: u64) -> bool {
        self.round.swap(round, Ordering::Relaxed) != round
    }

    /// The handle that keeps the quantised weight; none if its layer is gone.
    pub(crate) fn handle<'py, T: PyTypeInfo>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, T>>> {
        Ok(self.handle.bind(py).upgrade().map(Bound::cast_into::<T>).transpose()?)
    }
}

impl Held<'_> {
    /// Whether an optimizer that has one of its parameters has stepped since step number `steps` of all.
    pub(crate) fn is_written_since(&self, steps: u64) -> bool {
        self.tensors.iter().any(|source| written_since(source, steps))
    }

    /// The weight's address and version; none if kernels cannot read it as it lies.
    pub(crate) fn read(&self, state: &State) -> PyResult<Option<(DevPtr<'_>, WeightToken)>> {
        let mut version = 0;
        for source in &self.tensors {
            version += source.getattr(&state.torch.names.version)?.extract::<i64>()? as u64;
        }
        let view = state.reader.read(&self.tensors[self.first])?.filter(TensorView::is_contiguous);
        Ok(view.map(|view| {
            let token = WeightToken { address: view.data().address(), version: Some(version), dtype: view.dtype() };
            (view.data(), token)
        }))
    }
}
