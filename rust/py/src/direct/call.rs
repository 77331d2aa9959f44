//! The preparation of every direct call: make tensors contiguous, check them, find the place and private memory.

use pyo3::prelude::*;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::launch::target::Target;
use te_fast_core::ops::row_map::Prob;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::{External, Lane, Memory, OWN_SCRATCH_LIMIT, Place};
use te_fast_core::{Error, Float};

use crate::error::{IntoPython, traced_by_jit};
use crate::torch::process::{Guard, State};
use crate::torch::reader::view_of;

/// A tensor, and a contiguous copy for kernels if its layout needs one.
pub(crate) struct Input<'a, 'py> {
    given: TensorView<'a>,
    copy: Option<Bound<'py, PyAny>>,
}

impl<'a, 'py> Input<'a, 'py> {
    /// `tensor`, made contiguous when it is not.
    #[inline]
    pub(crate) fn new(state: &State, tensor: &'a Bound<'py, PyAny>, what: &'static str) -> PyResult<Self> {
        let given =
            view_of(&state.reader, tensor, what).map_err(|error| unreadable(state, tensor, what, error)).python()?;
        let copy = if given.is_contiguous() { None } else { Some(tensor.call_method0("contiguous")?) };
        Ok(Self { given, copy })
    }

    /// The same for an optional tensor.
    pub(crate) fn optional(
        state: &State,
        tensor: Option<&'a Bound<'py, PyAny>>,
        what: &'static str,
    ) -> PyResult<Option<Self>> {
        tensor.map(|tensor| Self::new(state, tensor, what)).transpose()
    }

    /// Whether the kernel gets a copy, so that what it writes does not come back.
    pub(crate) fn is_copy(&self) -> bool {
        self.copy.is_some()
    }

    #[inline]
    pub(crate) fn view(&self, state: &State) -> PyResult<TensorView<'_>> {
        match &self.copy {
            None => Ok(self.given),
            Some(copy) => view_of(&state.reader, copy, "a tensor").python(),
        }
    }
}

/// The error for a tensor that cannot be read, with a remedy for quantised tensors.
#[cold]
fn unreadable(state: &State, tensor: &Bound<'_, PyAny>, what: &str, error: Error) -> Error {
    let is_tensor = tensor.is_instance(state.torch.tensor.bind(tensor.py())).unwrap_or(false);
    if !is_tensor || state.torch.is_plain(tensor) {
        return error;
    }
    let name = tensor.get_type().name().map_or_else(|_| "tensor subclass".to_string(), |name| name.to_string());
    Error::unsupported(
        "te_fast",
        format_args!(
            "{what} is a {name}, which has no memory of its own; give a plain tensor, for a quantised one its .dequantize(). \
             moe_permute_and_quantize permutes into FP8"
        ),
    )
}

/// The place of a call.
pub(crate) struct DirectCall<'s, 'py> {
    pub(crate) state: &'s State,
    pub(crate) py: Python<'py>,
    pub(crate) op: &'static str,
    pub(crate) place: Place,
    _guard: Guard<'py>,
}

impl<'s, 'py> DirectCall<'s, 'py> {
    pub(crate) fn new(state: &'s State, py: Python<'py>, op: &'static str, device: Device) -> PyResult<Self> {
        if state.torch.is_jit_tracing(py)? {
            return Err(traced_by_jit(op));
        }
        let guard = state.guard(py, device)?;
        let place = Place { device, stream: state.reader.stream(py, device)? };
        Ok(Self { state, py, op, place, _guard: guard })
    }

    pub(crate) fn empty(&self, size: &[i64], dtype: DType) -> PyResult<Bound<'py, PyAny>> {
        self.state.empty_sized(self.py, self.place.device, size, dtype)
    }

    /// A pointer to a tensor that the call has just made, null for none.
    pub(crate) fn pointer<'a>(&self, tensor: Option<&'a Bound<'py, PyAny>>) -> PyResult<DevPtr<'a>> {
        self.state.pointer(tensor).python()
    }

    /// Runs `body` with `bytes` of private memory: the stream's own, or a tensor if a graph under capture must keep the
    /// memory or if it is large.
    pub(crate) fn run(
        &self,
        bytes: usize,
        body: impl FnOnce(&mut Target<'_>, DevPtr<'_>) -> te_fast_core::Result<()>,
    ) -> PyResult<()> {
        let captured = self.place.device != Device::Cpu && bytes != 0 && is_capturing(self.place.stream).python()?;
        if bytes != 0 && !captured && bytes <= OWN_SCRATCH_LIMIT {
            let mut dispatcher = self.state.dispatcher(self.py)?;
            let mut lane = dispatcher.0.lane(self.place, bytes, Memory::Own).python()?;
            return body(&mut lane.target, lane.workspace.scratch).python();
        }
        self.run_in_tensor(bytes, body)
    }

    /// The same with a tensor as private memory: the stream needs none of its own.
    pub(crate) fn run_in_tensor(
        &self,
        bytes: usize,
        body: impl FnOnce(&mut Target<'_>, DevPtr<'_>) -> te_fast_core::Result<()>,
    ) -> PyResult<()> {
        let memory = self.state.optional_bytes(self.py, self.place.device, bytes)?;
        let scratch = self.pointer(memory.as_ref())?;
        let mut dispatcher = self.state.dispatcher(self.py)?;
        let mut target = dispatcher.0.target(self.place).python()?;
        body(&mut target, scratch).python()
    }

    /// Runs `body` with `bytes` of scratch memory and the stream's other private memory.
    pub(crate) fn with_lane(
        &self,
        bytes: usize,
        body: impl FnOnce(&mut Lane<'_>) -> te_fast_core::Result<()>,
    ) -> PyResult<()> {
        let external = Dispatcher::external_bytes(self.place, bytes).python()?;
        self.on_lane(external, bytes, body)
    }

    /// Runs `body` with `bytes` of scratch memory and `counters` bytes of counters, which are zero; no matrix products.
    pub(crate) fn with_counters(
        &self,
        counters: usize,
        bytes: usize,
        body: impl FnOnce(&mut Lane<'_>) -> te_fast_core::Result<()>,
    ) -> PyResult<()> {
        let external = Dispatcher::external_counted(self.place, counters, bytes).python()?;
        self.on_lane(external, bytes, body)
    }

    fn on_lane(
        &self,
        external: External,
        bytes: usize,
        body: impl FnOnce(&mut Lane<'_>) -> te_fast_core::Result<()>,
    ) -> PyResult<()> {
        let scratch = self.state.optional_bytes(self.py, self.place.device, external.bytes())?;
        let memory = external.memory(self.pointer(scratch.as_ref())?);
        let mut dispatcher = self.state.dispatcher(self.py)?;
        let mut lane = dispatcher.0.lane(self.place, bytes, memory).python()?;
        body(&mut lane).python()
    }

    /// `view` must be on the call's device.
    pub(crate) fn same_device(&self, view: &TensorView<'_>, what: &'static str) -> PyResult<()> {
        if view.device() == self.place.device {
            return Ok(());
        }
        Err(Error::device(self.op, what, format_args!("the input's device {}", self.place.device), view.device()))
            .python()
    }

    /// `view` must have this shape.
    pub(crate) fn shape(&self, view: &TensorView<'_>, what: &'static str, expected: &[i64]) -> PyResult<()> {
        if view.shape() == expected {
            return Ok(());
        }
        Err(Error::shape(self.op, what, format_args!("of shape {expected:?}"), format_args!("{:?}", view.shape())))
            .python()
    }

    /// The type of rows.
    pub(crate) fn float(&self, view: &TensorView<'_>, what: &'static str) -> PyResult<Float> {
        match view.dtype().as_float() {
            Some(float) => Ok(float),
            None => Err(Error::dtype(self.op, what, "torch.float32, torch.float16 or torch.bfloat16", view.dtype()))
                .python(),
        }
    }

    /// `view` must be of `dtype`.
    pub(crate) fn dtype(&self, view: &TensorView<'_>, what: &'static str, dtype: DType) -> PyResult<()> {
        if view.dtype() == dtype {
            return Ok(());
        }
        Err(Error::dtype(self.op, what, dtype, view.dtype())).python()
    }

    /// Rows and columns of a matrix.
    pub(crate) fn matrix(&self, view: &TensorView<'_>, what: &'static str) -> PyResult<(usize, usize)> {
        match view.shape() {
            &[rows, cols] => Ok((rows as usize, cols as usize)),
            other => Err(Error::shape(self.op, what, "of two dimensions (tokens, hidden)", format_args!("{other:?}")))
                .python(),
        }
    }

    /// Probabilities `(tokens, slots)`, or none.
    pub(crate) fn probs(&self, probs: Option<&TensorView<'_>>, tokens: usize, slots: usize) -> PyResult<Option<Prob>> {
        let Some(view) = probs else { return Ok(None) };
        self.same_device(view, "probs")?;
        self.shape(view, "probs", &[tokens as i64, slots as i64])?;
        self.prob(view, "probs").map(Some)
    }

    /// The type of probabilities.
    pub(crate) fn prob(&self, view: &TensorView<'_>, what: &'static str) -> PyResult<Prob> {
        let expected = "torch.float32, torch.float16, torch.bfloat16 or torch.float64";
        Prob::of(view.dtype()).ok_or_else(|| Error::dtype(self.op, what, expected, view.dtype())).python()
    }
}
