//! Attention between two programs of a layer, without torch: tensors are read and allocated, and a plan launches.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::MAX_DIMS;
use te_fast_core::launch::target::Target;
use te_fast_core::ops::attention::{AttentionPlan, GradLayout};
use te_fast_core::ops::packed_heads::split;

use crate::attention::observed::RepeatedLaunches;
use crate::direct::call::DirectCall;
use crate::direct::rope::{Heads, Order, WaveTensors, packed, read_waves};
use crate::error::IntoPython;
use crate::torch::operand::{fits, saved_tensor};
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

const OP: &str = "attention";

type Sizes = SmallVec<[i64; MAX_DIMS]>;

/// Attention for products of one shape, type and device.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct RepeatedAttention {
    plan: Mutex<AttentionPlan>,
    /// Whether there is a backward, so that forward leaves sums for it.
    trains: bool,
    device: Device,
    dtype: DType,
    product: Sizes,
    /// The result, heads merged.
    context: Sizes,
    /// The sums of exponentials, in FP32, where there is a backward.
    sums: Sizes,
}

/// The private memory of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// The stream's own, where there is enough.
    OfStream,
    /// A tensor. A stream that runs one call needs no memory of its own.
    Tensor,
}

/// A forward's result, and what backward reads beside it: the product, whose queries and keys are rotated, and the sums.
pub(crate) struct Attended<'py> {
    pub(crate) product: Bound<'py, PyAny>,
    pub(crate) context: Bound<'py, PyAny>,
    pub(crate) sums: Option<Bound<'py, PyAny>>,
}

#[pymethods]
impl RepeatedAttention {
    /// Takes the launches of a forward, and of a backward with layouts of the gradients of queries, keys and values. The
    /// product, the result and the sums say what the tensors of calls are like.
    #[new]
    #[pyo3(signature = (forward, backward, tensors, heads, interleaved, order, /))]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
    fn new(
        py: Python<'_>,
        forward: PyRef<'_, RepeatedLaunches>,
        backward: Option<(PyRef<'_, RepeatedLaunches>, [Bound<'_, PyAny>; 3])>,
        tensors: (Bound<'_, PyAny>, Bound<'_, PyAny>, Option<Bound<'_, PyAny>>),
        heads: Heads,
        interleaved: bool,
        order: Order,
    ) -> PyResult<Self> {
        let state = state(py)?;
        let product = view_of(&state.reader, &tensors.0, "the product").python()?;
        let context = view_of(&state.reader, &tensors.1, "the result").python()?;
        let sums = match &tensors.2 {
            Some(sums) => view_of(&state.reader, sums, "the sums").python()?.shape().into(),
            None => Sizes::new(),
        };
        let trains = backward.is_some();
        let backward = match &backward {
            Some((launches, [of_q, of_k, of_v])) => {
                let grads = [layout(state, of_q)?, layout(state, of_k)?, layout(state, of_v)?];
                Some((launches.take()?, grads))
            }
            None => None,
        };
        let (a, b, c, d) = order;
        let of = (packed(heads)?, interleaved, [a, b, c, d]);
        let plan = AttentionPlan::new(of, &product, forward.take()?, backward).python()?;
        Ok(Self {
            plan: Mutex::new(plan),
            trains,
            device: product.device(),
            dtype: product.dtype(),
            product: product.shape().into(),
            context: context.shape().into(),
            sums,
        })
    }

    /// Attends: returns the result, and the tensors that [`Self::grad`] takes. Queries and keys are rotated in place. Layers
    /// call the functions below instead.
    #[pyo3(signature = (product, waves, /))]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
    fn run<'py>(
        &self,
        product: &Bound<'py, PyAny>,
        waves: Option<WaveTensors<'py>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let py = product.py();
        let state = state(py)?;
        if !self.takes(state, product) {
            let view = view_of(&state.reader, product, "the product").python()?;
            let got = format_args!("{:?} of {}", view.shape(), view.dtype());
            return Err(Error::shape(OP, "the product", format_args!("{:?} of {}", self.product, self.dtype), got))
                .python();
        }
        let attended = self.forward(state, product, waves.as_ref(), Memory::Tensor)?;
        let saved = attended.saved(py)?;
        Ok((attended.context, saved))
    }

    /// The gradient of the product, from that of the result.
    #[pyo3(signature = (tensors, grad, waves, /))]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
    fn grad<'py>(
        &self,
        tensors: &Bound<'py, PyTuple>,
        grad: &Bound<'py, PyAny>,
        waves: Option<WaveTensors<'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.backward(state(grad.py())?, tensors, grad, waves.as_ref(), Memory::Tensor)
    }
}

impl Memory {
    fn run(
        self,
        call: &DirectCall<'_, '_>,
        bytes: usize,
        body: impl FnOnce(&mut Target<'_>, DevPtr<'_>) -> te_fast_core::Result<()>,
    ) -> PyResult<()> {
        match self {
            Self::OfStream => call.run(bytes, body),
            Self::Tensor => call.run_in_tensor(bytes, body),
        }
    }
}

impl<'py> Attended<'py> {
    /// What autograd saves.
    pub(crate) fn saved(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        match &self.sums {
            Some(sums) => PyTuple::new(py, [&self.product, &self.context, sums]),
            None => Ok(PyTuple::empty(py)),
        }
    }
}

impl RepeatedAttention {
    /// Whether there is a backward.
    pub(crate) fn trains(&self) -> bool {
        self.trains
    }

    /// Whether the launches are those of such a product.
    pub(crate) fn takes(&self, state: &State, product: &Bound<'_, PyAny>) -> bool {
        state.reader.read(product).ok().flatten().is_some_and(|view| {
            view.device() == self.device
                && view.dtype() == self.dtype
                && view.shape() == &self.product[..]
                && fits(&view)
        })
    }

    /// Attends with a product that [`Self::takes`] has taken.
    pub(crate) fn forward<'py>(
        &self,
        state: &State,
        product: &Bound<'py, PyAny>,
        waves: Option<&WaveTensors<'py>>,
        memory: Memory,
    ) -> PyResult<Attended<'py>> {
        let call = DirectCall::new(state, product.py(), OP, self.device)?;
        let waves = read_waves(&call, waves)?;
        let context = call.empty(&self.context, self.dtype)?;
        let sums = if self.trains { Some(call.empty(&self.sums, DType::F32)?) } else { None };
        let view = view_of(&state.reader, product, "the product").python()?;
        let pointers = [view.data(), call.pointer(Some(&context))?, call.pointer(sums.as_ref())?];
        let bytes = self.plan().forward_bytes();
        memory.run(&call, bytes, |target, workspace| {
            let mut plan = self.plan();
            if waves.is_some() {
                split(target, plan.heads(), &view, None, &waves, plan.interleaved())?;
            }
            plan.forward(target, pointers, workspace)
        })?;
        Ok(Attended { product: product.clone(), context, sums })
    }

    /// The gradient of the product, from what forward has saved and the gradient of its result.
    pub(crate) fn backward<'py>(
        &self,
        state: &State,
        tensors: &Bound<'py, PyTuple>,
        grad: &Bound<'py, PyAny>,
        waves: Option<&WaveTensors<'py>>,
        memory: Memory,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = DirectCall::new(state, grad.py(), OP, self.device)?;
        let waves = read_waves(&call, waves)?;
        let (product, context, sums) =
            tensors.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
        let whole = |tensor, sizes: &Sizes, dtype| {
            let elements = sizes.iter().product::<i64>() as usize;
            saved_tensor(state, OP, tensor, (elements, dtype), self.device).map_err(|failure| failure.named(None))
        };
        let product = whole(product, &self.product, self.dtype)?;
        let context = whole(context, &self.context, self.dtype)?;
        let sums = whole(sums, &self.sums, DType::F32)?;
        let grad = whole(grad.clone(), &self.context, self.dtype)?;
        let result = call.empty(&self.product, self.dtype)?;
        let into = view_of(&state.reader, &result, "the product's gradient").python()?;
        let data = |tensor| call.pointer(Some(tensor));
        let read = [data(&product)?, data(&context)?, data(&sums)?, data(&grad)?];
        let bytes = self.plan().backward_bytes();
        memory.run(&call, bytes, |target, scratch| self.plan().backward(target, read, &waves, &into, scratch))?;
        Ok(result)
    }

    /// The plan. Nothing that calls Python runs while it is locked.
    fn plan(&self) -> MutexGuard<'_, AttentionPlan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The layout of a gradient.
fn layout(state: &State, grad: &Bound<'_, PyAny>) -> PyResult<GradLayout> {
    let view = view_of(&state.reader, grad, "a gradient").python()?;
    let no_gaps = || Error::shape(OP, "a gradient", "without gaps", format_args!("{:?}", view.strides()));
    GradLayout::of(&view).ok_or_else(no_gaps).python()
}
