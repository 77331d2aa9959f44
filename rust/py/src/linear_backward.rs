//! Backward of the linear layer: torch calls it once per forward, with the gradient of the output.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};
use te_fast_core::Error;
use te_fast_core::dispatch::{Dispatcher, Place};
use te_fast_core::kernel::DevPtr;
use te_fast_core::linear::{Backward, LinearPlan, Slot};
use te_fast_core::tensor::DType;

use crate::error::Failure;
use crate::layer::{DeferredWeightGrad, LinearHandle, LinearSaved, deferral_number, slot};
use crate::linear::hooks;
use crate::linear_run::{name, readable, saved_tensor};
use crate::state::{State, state};
use crate::tensor::view_of;

const OP: &str = "linear";

/// `apply` of the autograd node: the gradients of (input, weight, bias, handle, bits).
#[pyfunction]
pub(crate) fn linear_backward<'py>(
    ctx: &Bound<'py, PyAny>,
    grad_output: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = ctx.py();
    let state = state(py)?;
    if state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true)) {
        return hooks(py)?.backward_once.bind(py).call1((ctx, grad_output));
    }
    let tensors = ctx.getattr(intern!(py, "saved_tensors"))?.cast_into::<PyTuple>()?;
    let kept = ctx.getattr(intern!(py, "te_saved"))?.cast_into::<LinearSaved>()?;
    let call = BackwardCall { state, kept: kept.get(), tensors: &tensors };
    let gradients = call.run(grad_output).map_err(|failure| name(failure, kept.get().handle.bind(py)))?;
    if kept.get().updates_backward_scales {
        hooks(py)?.update_backward_scales.bind(py).call0()?;
    }
    Ok(gradients.into_any())
}

/// One backward.
struct BackwardCall<'a, 'py> {
    state: &'a State,
    kept: &'a LinearSaved,
    /// (quantised input, input), as far as forward kept them; each may be None.
    tensors: &'a Bound<'py, PyTuple>,
}

/// Where the weight's gradient goes.
enum WeightGrad<'py> {
    /// Nowhere.
    None,
    /// A new tensor.
    New(Bound<'py, PyAny>),
    /// `main_grad`, set or added to.
    Main(MainGrad<'py>),
    /// Later, from a kept gradient of the output.
    Deferred(Bound<'py, PyAny>),
}

impl<'py> BackwardCall<'_, 'py> {
    fn run(&self, grad_output: &Bound<'py, PyAny>) -> Result<Bound<'py, PyTuple>, Failure> {
        let (py, state, kept) = (grad_output.py(), self.state, self.kept);
        let key = *kept.plan.key();
        self.check_weight(py)?;
        let copy = readable(state, grad_output, "grad_output")?;
        let grad_output = copy.as_ref().unwrap_or(grad_output);
        let dy = view_of(&state.reader, grad_output, "grad_output")?;
        let activation = DType::from(key.activation);
        let cols = kept.plan.out_cols();
        if dy.dtype() != activation || dy.device() != key.device || (dy.rows(), dy.cols()) != (key.rows, cols) {
            let got = format!("{} on {} of shape {:?}", dy.dtype(), dy.device(), dy.shape());
            let expected = format!("{activation} on {}, {} rows of {cols}, as the output", key.device, key.rows);
            return Err(Error::shape(OP, "the gradient of the output", expected, got).into());
        }
        let _guard = state.guard(py, key.device)?;
        let place = Place { device: key.device, stream: state.reader.stream(py, key.device)? };
        let sizes = kept.geometry.get();
        let dx = if key.needs.input_grad {
            Some(state.empty(py, key.device, sizes.x_size.bind(py), sizes.x_stride.bind(py), activation)?)
        } else {
            None
        };
        let quantises = key.needs.input_grad || key.needs.weight_grad;
        let db = match (kept.bias_grad, quantises) {
            (true, true) => {
                let (size, stride) = kept.handle.bind(py).try_borrow()?.bias_tuples(py);
                Some(state.empty(py, key.device, &size, &stride, activation)?)
            }
            (true, false) => Some(column_sums(grad_output)?),
            (false, _) => None,
        };
        let target = self.weight_grad(py, place)?;
        self.launch(grad_output, place, dx.as_ref(), db.as_ref().filter(|_| quantises), &target)?;
        let dw = self.finish(py, target)?;
        let none = || py.None().into_bound(py);
        let gradients = [dx.unwrap_or_else(none), dw.unwrap_or_else(none), db.unwrap_or_else(none), none(), none()];
        Ok(PyTuple::new(py, gradients)?)
    }

    /// torch's rule for what backward reads: it must be what forward read. The quantised weight may have been made
    /// anew in the same memory since, from other values.
    fn check_weight(&self, py: Python<'py>) -> Result<(), Failure> {
        let kept = self.kept;
        let (true, Some(known)) = (kept.plan.key().needs.input_grad, kept.weight_version) else { return Ok(()) };
        let version = kept.weight_object.bind(py).getattr(intern!(py, "_version"))?.extract::<u64>()?;
        if version == known {
            return Ok(());
        }
        let message = format!(
            "the weight was modified by an inplace operation between forward and backward (it is at version {version}, expected {known}); modify it after backward"
        );
        Err(Error::state(OP, message).into())
    }

    fn launch(
        &self,
        grad_output: &Bound<'py, PyAny>,
        place: Place,
        dx: Option<&Bound<'py, PyAny>>,
        db: Option<&Bound<'py, PyAny>>,
        target: &WeightGrad<'py>,
    ) -> Result<(), Failure> {
        let (py, state, kept) = (grad_output.py(), self.state, self.kept);
        let plan = &kept.plan;
        let (saved, input) = saved_tensors(state, plan, self.tensor(0)?, self.tensor(1)?)?;
        let external = Dispatcher::external_bytes(place, plan.backward_scratch())?;
        let scratch = state.optional_bytes(py, place.device, external.bytes())?;
        let (dw, kept_dy) = match target {
            WeightGrad::None => (None, None),
            WeightGrad::New(dw) => (Some(dw), None),
            WeightGrad::Main(MainGrad { grad, .. }) => (Some(grad), None),
            WeightGrad::Deferred(kept_dy) => (None, Some(kept_dy)),
        };
        let io = Backward {
            dy: state.pointer(Some(grad_output))?,
            x: state.pointer(input.as_ref())?,
            saved: state.pointer(saved.as_ref())?,
            weight: kept.weight.weight_buffer(),
            dx: state.pointer(dx)?,
            dw: state.pointer(dw)?,
            db: state.pointer(db)?,
            slot: kept.slots.as_ref().map_or(Slot::NONE, |slots| slot(&slots.backward, 0)),
            input_slot: Slot::NONE,
            kept_dy: state.pointer(kept_dy)?,
        };
        let memory = external.memory(state.pointer(scratch.as_ref())?);
        let mut dispatcher = state.dispatcher(py)?;
        if let Some(slots) = &kept.slots {
            dispatcher.0.autocast.mark_ran(&slots.backward);
        }
        let main = match target {
            &WeightGrad::Main(MainGrad { dtype, accumulate, address, .. }) => {
                Some(plan.weight_grad_plan(&mut dispatcher.0, dtype, accumulate, address)?)
            }
            _ => None,
        };
        let mut lane = dispatcher.0.lane(place, plan.backward_scratch(), memory)?;
        match main {
            None => plan.backward(&mut lane, &io)?,
            Some(wgrad) => plan.backward_into(&mut lane, &wgrad, &io)?,
        }
        Ok(())
    }

    fn tensor(&self, index: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        if index >= self.tensors.len() {
            return Ok(None);
        }
        Ok(Some(self.tensors.get_item(index)?).filter(|tensor| !tensor.is_none()))
    }

    fn weight_grad(&self, py: Python<'py>, place: Place) -> Result<WeightGrad<'py>, Failure> {
        let kept = self.kept;
        let key = kept.plan.key();
        if !key.needs.weight_grad {
            return Ok(WeightGrad::None);
        }
        kept.weight.note_gradient();
        let config = kept.handle.bind(py).try_borrow()?.config;
        if config.delay_wgrad_compute {
            return Ok(WeightGrad::Deferred(self.state.bytes(py, place.device, kept.plan.kept_dy_bytes())?));
        }
        if kept.fuse_wgrad_accumulation {
            let weight = kept.weight_object.bind(py);
            return Ok(WeightGrad::Main(main_grad(self.state, weight, kept.overwrite_main_grad)?));
        }
        let (size, stride) = kept.handle.bind(py).try_borrow()?.weight_tuples(py);
        Ok(WeightGrad::New(self.state.empty(py, place.device, &size, &stride, key.weight.into())?))
    }

    /// What autograd is given for the weight.
    fn finish(&self, py: Python<'py>, target: WeightGrad<'py>) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        match target {
            WeightGrad::None => Ok(None),
            WeightGrad::New(dw) => Ok(Some(dw)),
            WeightGrad::Main(_) => Ok(after_main_grad(self.kept.weight_object.bind(py))?),
            WeightGrad::Deferred(kept_dy) => {
                let (saved, x) = (self.tensor(0)?.map(Bound::unbind), self.tensor(1)?.map(Bound::unbind));
                let deferred = DeferredWeightGrad {
                    number: deferral_number(),
                    plan: self.kept.plan.clone(),
                    saved,
                    x,
                    kept_dy: kept_dy.unbind(),
                    overwrite_main_grad: self.kept.overwrite_main_grad,
                };
                self.kept.handle.bind(py).try_borrow_mut()?.deferred.push_back(deferred);
                if !self.kept.fuse_wgrad_accumulation {
                    return Ok(None);
                }
                Ok(after_main_grad(self.kept.weight_object.bind(py))?)
            }
        }
    }
}

type Optional<'py> = Option<Bound<'py, PyAny>>;

/// The quantised input and the input itself as kernels read them, if they are what forward saved.
fn saved_tensors<'py>(
    state: &State,
    plan: &LinearPlan,
    saved: Optional<'py>,
    input: Optional<'py>,
) -> Result<(Optional<'py>, Optional<'py>), Failure> {
    let key = plan.key();
    let checked = |tensor: Optional<'py>, extent: (usize, DType)| {
        tensor.map(|tensor| saved_tensor(state, OP, tensor, extent, key.device)).transpose()
    };
    let (bytes, elements) = ((plan.saved_bytes(), DType::U8), (plan.input_elements(), key.activation.into()));
    Ok((checked(saved, bytes)?, checked(input, elements)?))
}

fn column_sums<'py>(grad_output: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let columns = grad_output.getattr("shape")?.get_item(-1)?;
    grad_output.call_method1("reshape", ((-1, columns),))?.call_method1("sum", (0,))
}

/// The buffer that a weight's gradient is added to, as Megatron-LM keeps it.
pub(crate) struct MainGrad<'py> {
    pub(crate) grad: Bound<'py, PyAny>,
    pub(crate) dtype: DType,
    pub(crate) address: usize,
    /// It is added to, not set.
    pub(crate) accumulate: bool,
}

/// The `main_grad` of a weight.
pub(crate) fn main_grad<'py>(
    state: &State,
    weight: &Bound<'py, PyAny>,
    overwrite: bool,
) -> Result<MainGrad<'py>, Failure> {
    let grad = if weight.hasattr("__fsdp_param__")? {
        weight.call_method0("get_main_grad")?
    } else {
        match weight.getattr_opt("main_grad")? {
            Some(grad) if !grad.is_none() => grad,
            _ => return Err(Error::state(OP, "fuse_wgrad_accumulation=True needs weight.main_grad; set it before backward, or construct the layer without").into()),
        }
    };
    let overwrite_attribute = match weight.getattr_opt("overwrite_main_grad")? {
        Some(value) => value.is_truthy()?,
        None => false,
    };
    let view = view_of(&state.reader, &grad, "main_grad")?;
    let w = view_of(&state.reader, weight, "weight")?;
    if view.shape() != w.shape()
        || !view.is_contiguous()
        || view.device() != w.device()
        || view.dtype().as_float().is_none()
    {
        let got = format!("{} of shape {:?} on {}", view.dtype(), view.shape(), view.device());
        let expected = format!("a contiguous float tensor of shape {:?} on {}", w.shape(), w.device());
        return Err(Error::shape(OP, "main_grad", expected, got).into());
    }
    let (dtype, address) = (view.dtype(), view.data().address());
    Ok(MainGrad { grad, dtype, address, accumulate: !(overwrite || overwrite_attribute) })
}

/// Transformer Engine's rule: with `grad_added_to_main_grad` set on the parameter, it becomes true and autograd gets a
/// dummy gradient, so that hooks fire; else it gets none.
pub(crate) fn after_main_grad<'py>(weight: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if !weight.hasattr("grad_added_to_main_grad")? {
        return Ok(None);
    }
    weight.setattr("grad_added_to_main_grad", true)?;
    let py = weight.py();
    py.import("te_fast.pytorch.base")?.getattr("dummy_wgrad_for")?.call1((weight,)).map(Some)
}

/// Runs the oldest weight gradient that was put off and gives it to `weight`; returns the new tensor, or None when
/// it went into `main_grad`.
#[pyfunction]
#[pyo3(signature = (handle, weight, fuse_wgrad_accumulation, /))]
pub(crate) fn linear_backward_dw<'py>(
    handle: &Bound<'py, LinearHandle>,
    weight: &Bound<'py, PyAny>,
    fuse_wgrad_accumulation: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let state = state(handle.py())?;
    run_deferred(state, handle, weight, fuse_wgrad_accumulation).map_err(|failure| name(failure, handle))
}

fn run_deferred<'py>(
    state: &State,
    handle: &Bound<'py, LinearHandle>,
    weight: &Bound<'py, PyAny>,
    fuse: bool,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    let Some(deferred) = handle.try_borrow_mut()?.deferred.pop_front() else {
        return Err(Error::state(OP, "backward_dw() was called without a backward before it").into());
    };
    let done = give(state, handle, weight, fuse, &deferred);
    if done.is_err() {
        handle.try_borrow_mut()?.deferred.push_front(deferred); // it can be asked for again
    }
    done
}

fn give<'py>(
    state: &State,
    handle: &Bound<'py, LinearHandle>,
    weight: &Bound<'py, PyAny>,
    fuse: bool,
    deferred: &DeferredWeightGrad,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    let py = handle.py();
    let plan = &deferred.plan;
    let key = plan.key();
    let _guard = state.guard(py, key.device)?;
    let place = Place { device: key.device, stream: state.reader.stream(py, key.device)? };
    let (dw, accumulate) = if fuse {
        let MainGrad { grad, accumulate, .. } = main_grad(state, weight, deferred.overwrite_main_grad)?;
        (grad, accumulate)
    } else {
        let (size, stride) = handle.try_borrow()?.weight_tuples(py);
        (state.empty(py, key.device, &size, &stride, key.weight.into())?, false)
    };
    let external = Dispatcher::external_bytes(place, plan.backward_scratch())?;
    let scratch = state.optional_bytes(py, place.device, external.bytes())?;
    let bound = |tensor: &Option<Py<PyAny>>| tensor.as_ref().map(|tensor| tensor.bind(py).clone());
    let (saved, x) = saved_tensors(state, plan, bound(&deferred.saved), bound(&deferred.x))?;
    let none = DevPtr::null();
    let dw_view = view_of(&state.reader, &dw, "the weight's gradient")?;
    let io = Backward {
        dy: none,
        x: state.pointer(x.as_ref())?,
        saved: state.pointer(saved.as_ref())?,
        weight: te_fast_core::linear::WeightBuffer { data: none, segments: plan.weight_segments() },
        dx: none,
        dw: dw_view.data(),
        db: none,
        slot: Slot::NONE,
        input_slot: Slot::NONE,
        kept_dy: state.pointer(Some(deferred.kept_dy.bind(py)))?,
    };
    let memory = external.memory(state.pointer(scratch.as_ref())?);
    let mut dispatcher = state.dispatcher(py)?;
    let wgrad = plan.weight_grad_plan(&mut dispatcher.0, dw_view.dtype(), accumulate, dw_view.data().address())?;
    plan.weight_grad(&mut dispatcher.0.lane(place, plan.backward_scratch(), memory)?, &wgrad, &io)?;
    Ok(if fuse { None } else { Some(dw) })
}
