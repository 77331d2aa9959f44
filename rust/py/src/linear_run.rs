//! One quantised forward of a linear layer: check, decide, allocate, run, keep.
//!
//! The dispatcher and the layer's handle are borrowed only between calls into Python, which may let other threads in.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use te_fast_core::dispatch::{Dispatcher, Place};
use te_fast_core::driver;
use te_fast_core::layer::{WeightRecord, WeightToken};
use te_fast_core::linear::{Forward, LinearKey, LinearPlan, Slot};
use te_fast_core::recipe::Needs;
use te_fast_core::tensor::{DType, Device, TensorView};
use te_fast_core::trace::{CLOCK, Stage};
use te_fast_core::{Error, Float};

use crate::error::{Failure, IntoPython};
use crate::layer::{Geometry, LayerConfig, LinearHandle, Slots, slot};
use crate::linear::{Bits, hooks};
use crate::replay::Replay;
use crate::state::State;
use crate::tensor::view_of;
use crate::weight::{CachedWeight, make_weight};

const OP: &str = "linear";
const SKIP: &str = "the tensor of set_skip_fp8_weight_update_tensor";
/// Bytes that a kernel's input is aligned to.
const ALIGNMENT: usize = 16;

/// What a forward leaves.
pub(crate) struct Done<'py> {
    pub(crate) y: Bound<'py, PyAny>,
    pub(crate) saved: Option<Bound<'py, PyAny>>,
    pub(crate) plan: Arc<LinearPlan>,
    pub(crate) geometry: Py<Geometry>,
    pub(crate) weight: Arc<CachedWeight>,
    pub(crate) slots: Option<Slots>,
    pub(crate) weight_version: Option<u64>,
    /// `main_grad` is set, not added to.
    pub(crate) overwrite_main_grad: bool,
}

/// The Python exception, with the name of the layer.
#[cold]
pub(crate) fn name(failure: Failure, handle: &Bound<'_, LinearHandle>) -> PyErr {
    let name = handle.try_borrow().ok().map(|handle| handle.name.clone());
    failure.named(name.as_deref())
}

/// A contiguous, aligned copy of `tensor`; none when it is both already.
pub(crate) fn readable<'py>(
    state: &State,
    tensor: &Bound<'py, PyAny>,
    what: &'static str,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let view = view_of(&state.reader, tensor, what).python()?;
    if fits(&view) { Ok(None) } else { contiguous_copy(tensor).map(Some) }
}

/// Whether kernels can read a tensor as it lies.
#[inline]
fn fits(view: &TensorView<'_>) -> bool {
    view.is_contiguous() && view.is_aligned(ALIGNMENT)
}

/// A tensor that forward saved, as kernels read it: of so many elements of a type. Saved-tensor hooks may bring back
/// anything.
pub(crate) fn saved_tensor<'py>(
    state: &State,
    op: &'static str,
    tensor: Bound<'py, PyAny>,
    (elements, dtype): (usize, DType),
    device: Device,
) -> Result<Bound<'py, PyAny>, Failure> {
    let view = view_of(&state.reader, &tensor, "a saved tensor")?;
    view.check_saved(op, elements, dtype, device)?;
    let readable = fits(&view);
    if readable { Ok(tensor) } else { Ok(contiguous_copy(&tensor)?) }
}

#[cold]
fn contiguous_copy<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let options = PyDict::new(py);
    options.set_item("memory_format", py.import("torch")?.getattr("contiguous_format")?)?;
    tensor.call_method0("detach")?.call_method0("resolve_neg")?.call_method("clone", (), Some(&options))
}

/// Quantises and multiplies; gradients are the caller's.
#[inline]
pub(crate) fn run<'py>(
    state: &State,
    handle: &Bound<'py, LinearHandle>,
    input: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    bits: Bits,
) -> PyResult<Done<'py>> {
    let call = Call { state, handle, x: input, weight, parameter: weight, bias, bits };
    CLOCK.start();
    let run = || {
        let (x, w) = (view_of(&state.reader, input, "the input")?, view_of(&state.reader, weight, "the weight")?);
        if fits(&x) && fits(&w) { call.run(&x, &w) } else { call.run_on_copies() }
    };
    run().map_err(|failure| name(failure, handle))
}

/// One forward.
struct Call<'a, 'py> {
    state: &'a State,
    handle: &'a Bound<'py, LinearHandle>,
    x: &'a Bound<'py, PyAny>,
    weight: &'a Bound<'py, PyAny>,
    /// The parameter itself, where `weight` is a copy of it.
    parameter: &'a Bound<'py, PyAny>,
    bias: Option<&'a Bound<'py, PyAny>>,
    bits: Bits,
}

/// What is settled before memory is allocated.
struct Decision {
    plan: Arc<LinearPlan>,
    saved_size: Option<Py<PyTuple>>,
    geometry: Py<Geometry>,
    slots: Option<Slots>,
    replay: Option<Replay>,
    place: Place,
    capturing: bool,
    /// The weight as this call would quantise it.
    record: WeightRecord,
    weight_version: Option<u64>,
    reused: Option<Arc<CachedWeight>>,
    /// A float on the device that says whether a captured graph skips the weight's quantisation.
    skip_flag: Option<Py<PyAny>>,
}

impl<'py> Call<'_, 'py> {
    #[cold]
    fn run_on_copies(&self) -> Result<Done<'py>, Failure> {
        let (x, weight) = (readable(self.state, self.x, "input")?, readable(self.state, self.weight, "weight")?);
        let copies = Call { x: x.as_ref().unwrap_or(self.x), weight: weight.as_ref().unwrap_or(self.weight), ..*self };
        let reader = &self.state.reader;
        copies.run(&view_of(reader, copies.x, "input")?, &view_of(reader, copies.weight, "weight")?)
    }

    fn run(&self, x: &TensorView<'_>, w: &TensorView<'_>) -> Result<Done<'py>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let config = self.handle.try_borrow()?.config;
        self.check(&config, x, w)?;
        CLOCK.mark(Stage::Read);
        let _guard = state.guard(py, x.device())?;
        let decision = self.decide(x, w)?;
        let Decision { plan, geometry, slots, place, .. } = &decision;
        CLOCK.mark(Stage::Plan);
        let sizes = geometry.get();
        let y = state.empty(py, place.device, sizes.y_size.bind(py), sizes.y_stride.bind(py), x.dtype())?;
        let saved = match &decision.saved_size {
            Some(size) => Some(state.empty(py, place.device, size.bind(py), state.unit_stride.bind(py), DType::U8)?),
            None => None,
        };
        let external = Dispatcher::external_bytes(*place, plan.forward_scratch())?;
        let scratch = state.optional_bytes(py, place.device, external.bytes())?;
        let skippable = decision.skip_flag.is_some();
        let fresh = decision.reused.is_none() || skippable;
        let weight = self.quantised_weight(&decision)?;
        let bias = self.bias_operand(plan.key().activation, place.device)?;
        // A weight that is not there yet is quantised, whatever the flag; a graph runs later.
        let skip_flag = decision.skip_flag.as_ref().filter(|_| decision.reused.is_some() || decision.capturing);
        let skip_flag = skip_flag.map(|flag| flag.bind(py));

        let io = Forward {
            x: x.data(),
            fresh_weight: fresh.then(|| w.data()),
            weight: weight.weight_buffer(),
            bias: state.pointer(bias.as_ref())?,
            y: state.pointer(Some(&y))?,
            saved: state.pointer(saved.as_ref())?,
            slots: match (&decision.replay, slots) {
                (Some(replay), _) => [replay.slot(0), replay.slot(1)],
                (None, Some(slots)) => [slot(&slots.forward, 0), slot(&slots.forward, 1)],
                (None, None) => [Slot::NONE; 2],
            },
            skip_weight: state.pointer(skip_flag)?,
        };
        let memory = external.memory(state.pointer(scratch.as_ref())?);
        CLOCK.mark(Stage::Allocate);
        {
            let mut dispatcher = state.dispatcher(py)?;
            plan.forward(&mut dispatcher.0.lane(*place, plan.forward_scratch(), memory)?, &io)?;
            if let (Some(slots), None) = (slots, &decision.replay) {
                dispatcher.0.autocast.mark_ran(&slots.forward);
            }
        }
        if skippable {
            self.handle.try_borrow_mut()?.cache.keep_skippable(&weight);
        } else if fresh {
            let former = self.handle.try_borrow_mut()?.cache.keep(&weight, *place, decision.capturing);
            drop(former);
        }
        CLOCK.mark(Stage::Finish);
        let Decision { plan, geometry, slots, weight_version, .. } = decision;
        // Transformer Engine takes `is_first_microbatch` for False where the flag decides.
        let overwrite_main_grad = self.bits.has(Bits::FIRST_MICROBATCH) && !skippable;
        Ok(Done { y, saved, plan, geometry, weight, slots, weight_version, overwrite_main_grad })
    }

    /// The kept weight, or memory for one.
    fn quantised_weight(&self, decision: &Decision) -> Result<Arc<CachedWeight>, Failure> {
        let Decision { place, capturing, record, .. } = decision;
        if let Some(weight) = &decision.reused {
            return Ok(Arc::clone(weight));
        }
        let recycled = if decision.skip_flag.is_some() {
            None
        } else {
            self.handle.try_borrow_mut()?.cache.recycle(*place, *capturing)
        };
        Ok(Arc::new(make_weight(self.x.py(), self.state, self.parameter, *record, recycled)?))
    }

    /// Shapes, types and devices; sizes that FP8 takes are the plan's to check.
    fn check(&self, config: &LayerConfig, x: &TensorView<'_>, w: &TensorView<'_>) -> Result<(), Error> {
        let (inputs, outputs) = (config.in_features as i64, config.out_features as i64);
        if x.shape().last() != Some(&inputs) {
            let got = format!("a tensor of shape {:?}", x.shape());
            return Err(Error::shape(OP, "the input's last dimension", format!("in_features = {inputs}"), got));
        }
        if w.shape() != [outputs, inputs] {
            return Err(Error::shape(
                OP,
                "the weight",
                format!("of shape [{outputs}, {inputs}]"),
                format!("{:?}", w.shape()),
            ));
        }
        if x.device() != w.device() {
            let expected = format!("{}, where the layer's weight is (move one with .to())", w.device());
            return Err(Error::device(OP, "the input", expected, x.device()));
        }
        if x.dtype() != w.dtype() && !self.bits.has(Bits::MIXED_DTYPES) {
            let expected =
                format!("{}, the type of the layer's parameters (cast it, or use torch.autocast)", w.dtype());
            return Err(Error::dtype(OP, "the input", expected, x.dtype()));
        }
        Ok(())
    }

    fn decide(&self, x: &TensorView<'_>, w: &TensorView<'_>) -> Result<Decision, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let place = Place { device: x.device(), stream: state.reader.stream(py, x.device())? };
        let (token, weight_version) = self.token(w)?;
        let mut handle = self.handle.try_borrow_mut()?;
        let geometry = handle.geometry(py, x)?;
        let mut guard = state.dispatcher(py)?;
        let dispatcher = &mut guard.0;
        let region = *dispatcher.autocast.current();
        let key = LinearKey {
            epoch: region.epoch,
            rows: x.rows(),
            activation: float(x, "the input")?,
            weight: float(w, "the weight")?,
            device: x.device(),
            needs: self.needs(handle.save_original_input),
            bias_grad: self.bits.has(Bits::BIAS_GRAD),
            bias: self.bias.is_some(),
            any_rows: dispatcher.auto_pad,
        };
        let (plan, saved_size) = find_plan(py, &mut handle, dispatcher, key)?;
        let slots = if region.recipe.is_delayed() { handle.slots.clone() } else { None };
        let replay = handle.replay.take();
        let record = WeightRecord {
            token,
            device: key.device,
            segments: plan.weight_segments(),
            epoch: key.epoch,
            generation: generation_of(replay.as_ref(), slots.as_ref(), dispatcher.forward_generation),
            cache_epoch: dispatcher.cache_epoch,
            training: self.bits.has(Bits::ANY_GRAD),
            optimizer_steps: dispatcher.optimizer_steps,
        };
        drop((guard, handle)); // the flag is asked of Python
        let capturing = matches!(place.device, Device::Cuda(_)) && driver::is_capturing(place.stream)?;
        let skip_flag = if capturing || region.graph { skip_flag(state, py, place.device)? } else { None };
        let mut handle = self.handle.try_borrow_mut()?;
        let microbatch = self.bits.microbatch();
        let reused = if skip_flag.is_some() {
            handle.cache.skippable(&record)
        } else {
            handle.cache.reusable(py, state, self.parameter, &record, microbatch, (place, capturing))?
        };
        Ok(Decision {
            plan,
            saved_size,
            geometry,
            slots,
            replay,
            place,
            capturing,
            record,
            weight_version,
            reused,
            skip_flag,
        })
    }

    fn needs(&self, save_original_input: bool) -> Needs {
        let (input_grad, weight_grad) = (self.bits.has(Bits::INPUT_GRAD), self.bits.has(Bits::WEIGHT_GRAD));
        Needs { input_grad, weight_grad, save_original_input, recompute_later: false }
    }

    /// Address and version say whether a weight is the one that was quantised; and torch's own version of it.
    fn token(&self, w: &TensorView<'_>) -> PyResult<(WeightToken, Option<u64>)> {
        let stand_in = self.handle.try_borrow_mut()?.version.take();
        let own = if stand_in.is_some() {
            None
        } else {
            self.parameter.getattr(intern!(self.x.py(), "_version")).and_then(|version| version.extract()).ok()
        };
        let version = stand_in.or(own);
        let address = if self.weight.is(self.parameter) {
            w.data().address()
        } else {
            view_of(&self.state.reader, self.parameter, "weight").python()?.data().address()
        };
        Ok((WeightToken { address, version, dtype: w.dtype() }, own))
    }

    /// The bias in the type that the GEMM's epilogue takes.
    fn bias_operand(&self, activation: Float, device: Device) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        let Some(bias) = self.bias else { return Ok(None) };
        let view = view_of(&self.state.reader, bias, "bias")?;
        let outputs = self.handle.try_borrow()?.config.out_features as i64;
        if view.shape() != [outputs] {
            let expected = format!("of shape [{outputs}]");
            return Err(Error::shape(OP, "the bias", expected, format!("{:?}", view.shape())).into());
        }
        if view.device() != device {
            return Err(Error::device(OP, "the bias", format!("{device}, as the weight"), view.device()).into());
        }
        let wanted: DType = LinearPlan::bias_dtype(activation);
        if view.dtype() == wanted && fits(&view) {
            return Ok(Some(bias.clone()));
        }
        let copy = bias.call_method0("detach")?.call_method1("to", (self.state.torch.dtype(bias.py(), wanted),))?;
        Ok(Some(readable(self.state, &copy, "bias")?.unwrap_or(copy)))
    }
}

/// Updates before the scales that a call uses; 0 where scales follow from the weight alone.
fn generation_of(replay: Option<&Replay>, slots: Option<&Slots>, now: u64) -> u64 {
    replay.map_or(if slots.is_some() { now } else { 0 }, |replay| replay.generation)
}

/// The plan of `key`, and the size of what it keeps for backward as a tuple.
#[inline]
fn find_plan(
    py: Python<'_>,
    handle: &mut LinearHandle,
    dispatcher: &mut Dispatcher,
    key: LinearKey,
) -> Result<Planned, Failure> {
    if let Some((plan, saved_size)) = handle.plans.get(&key) {
        dispatcher.trace.counters.plan_hits += 1;
        return Ok((Arc::clone(plan), saved_size.as_ref().map(|size| size.clone_ref(py))));
    }
    dispatcher.trace.counters.plan_misses += 1;
    let (recipe, config) = (dispatcher.autocast.current().recipe, handle.config);
    let plan = Arc::new(LinearPlan::new(dispatcher, &recipe, key, config.in_features, config.out_features)?);
    let size = PyTuple::new(py, [plan.saved_bytes()])?.unbind();
    let saved_size = (plan.saved_bytes() != 0).then_some(size);
    handle.plans.insert(Arc::clone(&plan), saved_size.as_ref().map(|size| size.clone_ref(py)));
    Ok((plan, saved_size))
}

type Planned = (Arc<LinearPlan>, Option<Py<PyTuple>>);

/// What `FP8GlobalStateManager.set_skip_fp8_weight_update_tensor` has set.
#[cold]
pub(crate) fn skip_flag(state: &State, py: Python<'_>, device: Device) -> Result<Option<Py<PyAny>>, Failure> {
    let flag = hooks(py)?.skip_weight_flag.bind(py).call0()?;
    if flag.is_none() {
        return Ok(None);
    }
    let view = view_of(&state.reader, &flag, "skip_fp8_weight_update")?;
    if view.device() != device {
        let expected = format!("{device}, where the layer is");
        return Err(Error::device(OP, SKIP, expected, view.device()).into());
    }
    if (view.dtype(), view.numel()) != (DType::F32, 1) {
        let got = format!("{} of {}", view.numel(), view.dtype());
        return Err(Error::shape(OP, SKIP, "one element of torch.float32", got).into());
    }
    Ok(Some(flag.unbind()))
}

fn float(view: &TensorView<'_>, what: &'static str) -> Result<Float, Error> {
    view.dtype().as_float().ok_or_else(|| Error::dtype(OP, what, "float32, float16 or bfloat16", view.dtype()))
}
