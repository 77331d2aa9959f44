//! One forward of a program: read the tensors, find or compile the program, allocate, run, keep.
//!
//! The dispatcher and the handles are borrowed only between calls into Python, which may let other threads in.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use te_fast_core::autocast::Region;
use te_fast_core::dispatch::{Dispatcher, Memory, Place};
use te_fast_core::driver;
use te_fast_core::kernel::DevPtr;
use te_fast_core::layer::{WeightRecord, WeightToken};
use te_fast_core::program::{Bindings, LinearSlots, Place as Where, Program, ProgramKey, Weights};
use te_fast_core::tensor::{DType, Device, TensorView};

use crate::error::Failure;
use crate::linear::Bits;
use crate::linear_run::{readable, skip_flag};
use crate::program::{Compiled, OpSlots, ProgramHandle, Shapes, Tuples, WeightHandle};
use crate::program_check::{check, mixed_types};
use crate::program_tensors::{copies, float, requires_grad, same, typed, weight_arguments};
use crate::replay::{Replay, replay};
use crate::state::State;
use crate::tensor::view_of;
use crate::weight::{CachedWeight, make_weight};

/// One linear op's weight in a call.
#[derive(Debug)]
pub(crate) struct CallWeight {
    /// None in high precision.
    pub(crate) quantized: Option<Arc<CachedWeight>>,
    pub(crate) slots: Option<OpSlots>,
    /// torch's version of the weight; none for inference tensors.
    pub(crate) version: Option<u64>,
}

impl CallWeight {
    pub(crate) fn slots(&self) -> LinearSlots<'_> {
        self.slots.as_ref().map_or(LinearSlots::NONE, OpSlots::slots)
    }
}

/// What a forward leaves.
pub(crate) struct Done<'py> {
    pub(crate) y: Bound<'py, PyAny>,
    pub(crate) extra_outputs: Vec<Bound<'py, PyAny>>,
    pub(crate) saved: Option<Bound<'py, PyAny>>,
    pub(crate) compiled: Arc<Compiled>,
    pub(crate) shapes: Arc<Shapes>,
    pub(crate) params: Vec<Bound<'py, PyAny>>,
    pub(crate) weights: Vec<CallWeight>,
    /// A flag on the device decides whether weights are quantised: `is_first_microbatch` is taken for False.
    pub(crate) skippable: bool,
}

impl<'py> Done<'py> {
    /// What backward reads: the saved buffer, and the call's own tensors in the order of [`Program::reads`].
    pub(crate) fn to_save(&self, x: &Bound<'py, PyAny>, extras: &[Bound<'py, PyAny>]) -> PyResult<Bound<'py, PyTuple>> {
        let py = x.py();
        let mut tensors = vec![self.saved.clone().unwrap_or_else(|| py.None().into_bound(py))];
        for place in self.compiled.program.reads() {
            tensors.push(match *place {
                Where::Input => x.clone(),
                Where::Extra(index) => extras[usize::from(index)].clone(),
                Where::ExtraOutput(index) => self.extra_outputs[usize::from(index)].clone(),
                Where::Param(index) => self.params[usize::from(index)].clone(),
                _ => py.None().into_bound(py),
            });
        }
        PyTuple::new(py, tensors)
    }
}

/// One forward. `extra_grads` and `input_grad` say what wants a gradient; parameters are asked when `grads` is set.
pub(crate) struct Call<'a, 'py> {
    pub(crate) state: &'a State,
    pub(crate) handle: &'a Bound<'py, ProgramHandle>,
    pub(crate) owner: &'a Bound<'py, PyAny>,
    pub(crate) x: &'a Bound<'py, PyAny>,
    pub(crate) extras: &'a [Bound<'py, PyAny>],
    pub(crate) params: Vec<Bound<'py, PyAny>>,
    pub(crate) bits: Bits,
    pub(crate) grads: bool,
    pub(crate) input_grad: bool,
    pub(crate) extra_grads: Vec<bool>,
    /// torch's grad mode where the chain was called.
    pub(crate) grad_mode: bool,
}

/// The tensors of a call as the kernels read them: copies where the originals are strided or misaligned.
pub(crate) struct Tensors<'a> {
    pub(crate) x: TensorView<'a>,
    pub(crate) extras: Vec<TensorView<'a>>,
    pub(crate) params: Vec<TensorView<'a>>,
    /// Which parameters are read from copies: their addresses mean nothing.
    copied: Vec<bool>,
}

impl<'py> Call<'_, 'py> {
    pub(crate) fn run(&self) -> PyResult<Done<'py>> {
        self.prepared().map_err(|failure| {
            let name = self.handle.try_borrow().ok().map(|handle| handle.name.clone());
            failure.named(name.as_deref())
        })
    }

    fn prepared(&self) -> Result<Done<'py>, Failure> {
        let state = self.state;
        let x = readable(state, self.x, "the input")?.unwrap_or_else(|| self.x.clone());
        let (extras, params) =
            (copies(state, self.extras, "an extra input")?, copies(state, &self.params, "a parameter")?);
        let tensors = Tensors {
            x: view_of(&state.reader, &x, "the input")?,
            extras: extras
                .iter()
                .map(|tensor| view_of(&state.reader, tensor, "an extra input"))
                .collect::<Result<_, _>>()?,
            params: params
                .iter()
                .map(|tensor| view_of(&state.reader, tensor, "a parameter"))
                .collect::<Result<_, _>>()?,
            copied: params.iter().zip(&self.params).map(|(read, own)| !read.is(own)).collect(),
        };
        self.on_tensors(&tensors, &extras)
    }

    fn on_tensors(&self, tensors: &Tensors<'_>, extras: &[Bound<'py, PyAny>]) -> Result<Done<'py>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let x = &tensors.x;
        let _guard = state.guard(py, x.device())?;
        let place = Place { device: x.device(), stream: state.reader.stream(py, x.device())? };
        let region = *state.dispatcher(py)?.0.autocast.current();
        let compiled = self.compiled(tensors, &region)?;
        let program = &compiled.program;
        self.handle.try_borrow_mut()?.last_region = region.enabled.then_some(region);
        let replays = if region.enabled && region.recipe.is_delayed() {
            self.ensure_slots(region.epoch)?;
            self.replays()?
        } else {
            Vec::new()
        };
        let shapes = self.handle.try_borrow_mut()?.shapes(py, x, program.out_cols(), program.extra_output_cols())?;
        let capturing = matches!(place.device, Device::Cuda(_)) && driver::is_capturing(place.stream)?;
        let flagged = region.enabled && (capturing || region.graph);
        let flag = if flagged { skip_flag(state, py, place.device)? } else { None };
        let prepared = self.weights(tensors, &compiled, &region, (place, capturing), flag.is_some(), replays)?;
        // Weights that are not there yet are quantised, whatever the flag; a graph runs later.
        let skips = capturing || prepared.iter().all(|weight| weight.reused);
        let flag = flag.as_ref().map(|flag| flag.bind(py));

        let extra_outputs = self.extra_outputs(&compiled, &shapes, place, extras)?;
        let y = self.output(&compiled, &shapes, place, extras, &extra_outputs)?;
        let saved = match &compiled.saved_size {
            Some(size) => Some(state.empty(py, place.device, size.bind(py), state.unit_stride.bind(py), DType::U8)?),
            None => None,
        };
        let external = Dispatcher::external_bytes(place, program.forward_scratch())?;
        let scratch = state.optional_bytes(py, place.device, external.bytes())?;
        let extra_output_pointers =
            extra_outputs.iter().map(|tensor| state.pointer(Some(tensor))).collect::<Result<Vec<_>, _>>()?;
        let params: Vec<DevPtr<'_>> = tensors.params.iter().map(TensorView::data).collect();
        let extra_pointers: Vec<DevPtr<'_>> = tensors.extras.iter().map(TensorView::data).collect();
        let bindings = Bindings {
            input: x.data(),
            extras: &extra_pointers,
            output: if program.output() == Where::Output { state.pointer(Some(&y))? } else { DevPtr::null() },
            extra_outputs: &extra_output_pointers,
            params: &params,
            saved: state.pointer(saved.as_ref())?,
            ..Bindings::NONE
        };
        let memory = external.memory(state.pointer(scratch.as_ref())?);
        let skip = state.pointer(flag.filter(|_| skips))?;
        self.launch(&compiled, &bindings, &prepared, (place, memory), skip)?;
        self.note_writes(extras)?;
        let skippable = flag.is_some();
        let weights = self.keep(prepared, place, capturing, skippable)?;
        let params = self.params.iter().map(Bound::clone).collect();
        Ok(Done { y, extra_outputs, saved, compiled, shapes, params, weights, skippable })
    }

    /// Tells torch of what was written in place, so that a backward that needs what was there before raises.
    #[inline]
    fn note_writes(&self, extras: &[Bound<'py, PyAny>]) -> PyResult<()> {
        for &index in self.handle.try_borrow()?.chain.written_extra_inputs() {
            let py = self.x.py();
            let module = py.import(intern!(py, "torch.autograd.graph"))?;
            module.call_method1(intern!(py, "increment_version"), (&extras[index],))?;
        }
        Ok(())
    }

    /// The compiled program for these tensors.
    fn compiled(&self, tensors: &Tensors<'_>, region: &Region) -> Result<Arc<Compiled>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let x = &tensors.x;
        let activation = float(x, "the input")?;
        let wants = |tensor: &Bound<'_, PyAny>| -> PyResult<bool> { Ok(self.grads && requires_grad(tensor)?) };
        let param_grads = self.params.iter().map(wants).collect::<PyResult<Vec<_>>>()?;
        let any_rows = state.dispatcher(py)?.0.auto_pad;
        let mut handle = self.handle.try_borrow_mut()?;
        let deferred = handle.deferred(py)?;
        let epoch = region.enabled.then_some(region.epoch);
        let (rows, cols) = (x.rows(), x.shape().last().map_or(1, |&cols| cols as usize));
        let found = handle.find(|program| {
            let key = program.key();
            key.epoch == epoch
                && key.rows == rows
                && key.cols == cols
                && key.activation == activation
                && key.device == x.device()
                && key.any_rows == any_rows
                && key.input_grad == self.input_grad
                && key.deferred == deferred
                && same(&key.params, &tensors.params, &param_grads)
                && same(&key.extras, &tensors.extras, &self.extra_grads)
        });
        drop(handle);
        if let Some(compiled) = found {
            self.check_types(compiled.program.key())?;
            check(py, &*self.handle.try_borrow()?, tensors, rows, compiled.program.widths())?;
            state.dispatcher(py)?.0.trace.counters.plan_hits += 1;
            return Ok(compiled);
        }
        let key = ProgramKey {
            epoch,
            rows,
            cols,
            activation,
            device: x.device(),
            any_rows,
            input_grad: self.input_grad,
            params: typed(&tensors.params, &param_grads, "a parameter")?,
            extras: typed(&tensors.extras, &self.extra_grads, "an extra input")?,
            deferred,
        };
        self.check_types(&key)?;
        self.compile(tensors, region, key)
    }

    fn check_types(&self, key: &ProgramKey) -> Result<(), Failure> {
        let other = key.params.iter().find(|(dtype, _)| *dtype != key.activation);
        match other.filter(|_| !self.bits.has(Bits::MIXED_DTYPES)) {
            Some(&(dtype, _)) => Err(mixed_types(dtype.into(), key.activation.into()).into()),
            None => Ok(()),
        }
    }

    #[cold]
    fn compile(&self, tensors: &Tensors<'_>, region: &Region, key: ProgramKey) -> Result<Arc<Compiled>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let chain = {
            let handle = self.handle.try_borrow()?;
            check(py, &handle, tensors, key.rows, &handle.chain.widths(key.cols)?)?;
            handle.chain.clone()
        };
        let recipe = region.enabled.then_some(&region.recipe);
        let program = {
            let mut dispatcher = state.dispatcher(py)?;
            dispatcher.0.trace.counters.plan_misses += 1;
            Arc::new(Program::new(&mut dispatcher.0, &chain, key, recipe)?)
        };
        let size = PyTuple::new(py, [program.saved_bytes()])?.unbind();
        let compiled = Arc::new(Compiled {
            saved_size: (program.saved_bytes() != 0).then_some(size),
            params: tensors.params.iter().map(|view| Tuples::new(py, view.shape())).collect::<PyResult<_>>()?,
            program,
        });
        self.handle.try_borrow_mut()?.insert(&compiled);
        Ok(compiled)
    }

    #[cold]
    fn init_slots(&self) -> PyResult<()> {
        self.owner.call_method0(intern!(self.x.py(), "_init_delayed_scaling")).map(drop)
    }

    fn ensure_slots(&self, epoch: u64) -> PyResult<()> {
        let py = self.x.py();
        let missing = {
            let handle = self.handle.try_borrow()?;
            let mut missing = false;
            for weight in &handle.weights {
                missing |= weight.bind(py).try_borrow()?.slots.as_ref().is_none_or(|slots| !slots.serve(epoch));
            }
            missing
        };
        if missing { self.init_slots() } else { Ok(()) }
    }

    /// For each linear op, the scales that activation recomputation wants; empty outside of it.
    fn replays(&self) -> PyResult<Vec<Option<Replay>>> {
        let (py, state) = (self.x.py(), self.state);
        if !state.dispatcher(py)?.0.autocast.recompute {
            return Ok(Vec::new());
        }
        let weights: Vec<_> = self.handle.try_borrow()?.weights.iter().map(|weight| weight.clone_ref(py)).collect();
        let one = |weight: Py<WeightHandle>| {
            let slots = weight.bind(py).try_borrow()?.slots.clone();
            slots.map_or(Ok(None), |slots| replay(state, weight.bind(py), &slots.forward, self.grad_mode))
        };
        weights.into_iter().map(one).collect()
    }

    /// The quantised weight of every linear op: the kept one where it serves, else memory for a fresh one.
    fn weights(
        &self,
        tensors: &Tensors<'_>,
        compiled: &Compiled,
        region: &Region,
        (place, capturing): (Place, bool),
        skippable: bool,
        replays: Vec<Option<Replay>>,
    ) -> Result<Vec<Prepared>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let linears = self.handle.try_borrow()?.weights.len();
        let delayed = region.recipe.is_delayed();
        let (generation, cache_epoch, optimizer_steps) = {
            let dispatcher = &state.dispatcher(py)?.0;
            (dispatcher.forward_generation, dispatcher.cache_epoch, dispatcher.optimizer_steps)
        };
        let mut list = Vec::with_capacity(linears);
        let mut replays = replays.into_iter();
        for linear in 0..linears {
            let Some((weight, param)) = ProgramHandle::linear_at(self.handle, linear)? else { break };
            let version =
                self.params[param].getattr(intern!(py, "_version")).and_then(|version| version.extract()).ok();
            if !region.enabled {
                list.push(Prepared { quantized: None, slots: None, replay: None, version, fresh: None, reused: true });
                continue;
            }
            let mut weight = weight.bind(py).try_borrow_mut()?;
            let view = &tensors.params[param];
            let address = self.address(tensors, param)?;
            let replay = replays.next().flatten();
            let record = WeightRecord {
                token: WeightToken { address, version, dtype: view.dtype() },
                device: place.device,
                segments: compiled.program.weight_segments(linear),
                epoch: region.epoch,
                generation: replay.as_ref().map_or(if delayed { generation } else { 0 }, |replay| replay.generation),
                cache_epoch,
                training: compiled.program.key().any_grad(),
                optimizer_steps,
            };
            let slots = if delayed { weight.slots.clone() } else { None };
            let reused = if skippable {
                weight.cache.skippable(&record)
            } else {
                let (parameter, microbatch) = (&self.params[param], self.bits.microbatch());
                weight.cache.reusable(py, state, parameter, &record, microbatch, (place, capturing))?
            };
            let is_reused = reused.is_some();
            let (quantized, fresh) = if let Some(reused) = reused {
                (reused, skippable.then_some(param))
            } else {
                let former = if skippable { None } else { weight.cache.recycle(place, capturing) };
                drop(weight);
                let made = make_weight(py, state, &self.params[param], record, former)?;
                (Arc::new(made), Some(param))
            };
            list.push(Prepared { quantized: Some(quantized), slots, replay, version, fresh, reused: is_reused });
        }
        Ok(list)
    }

    /// Where a parameter itself lies, and not the copy that is read.
    fn address(&self, tensors: &Tensors<'_>, param: usize) -> Result<usize, Failure> {
        if tensors.copied[param] {
            return Ok(view_of(&self.state.reader, &self.params[param], "a parameter")?.data().address());
        }
        Ok(tensors.params[param].data().address())
    }

    fn extra_outputs(
        &self,
        compiled: &Compiled,
        shapes: &Shapes,
        place: Place,
        extras: &[Bound<'py, PyAny>],
    ) -> Result<Vec<Bound<'py, PyAny>>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let dtype = DType::from(compiled.program.key().activation);
        let mut outputs: Vec<Bound<'py, PyAny>> = Vec::with_capacity(shapes.extra_outputs.len());
        for (index, (&at, tuples)) in compiled.program.extra_outputs().iter().zip(&shapes.extra_outputs).enumerate() {
            let tensor = match at {
                Where::Input => self.x.clone(),
                Where::Extra(extra) => extras[usize::from(extra)].clone(),
                Where::ExtraOutput(other) if usize::from(other) != index => {
                    outputs[usize::from(other)].call_method0("detach")?
                }
                _ => state.empty(py, place.device, tuples.size.bind(py), tuples.stride.bind(py), dtype)?,
            };
            outputs.push(tensor);
        }
        Ok(outputs)
    }

    fn output(
        &self,
        compiled: &Compiled,
        shapes: &Shapes,
        place: Place,
        extras: &[Bound<'py, PyAny>],
        extra_outputs: &[Bound<'py, PyAny>],
    ) -> Result<Bound<'py, PyAny>, Failure> {
        let dtype = DType::from(compiled.program.key().activation);
        let (py, out) = (self.x.py(), &shapes.output);
        Ok(match compiled.program.output() {
            Where::Input if extra_outputs.is_empty() => self.x.clone(),
            Where::Input => self.x.call_method0("detach")?,
            Where::Extra(extra) => extras[usize::from(extra)].clone(),
            // Two outputs must be two tensors for autograd.
            Where::ExtraOutput(index) => extra_outputs[usize::from(index)].call_method0("detach")?,
            _ => self.state.empty(py, place.device, out.size.bind(py), out.stride.bind(py), dtype)?,
        })
    }

    fn launch(
        &self,
        compiled: &Compiled,
        bindings: &Bindings<'_>,
        prepared: &[Prepared],
        (place, memory): (Place, Memory<'_>),
        skip: DevPtr<'_>,
    ) -> Result<(), Failure> {
        let program = &compiled.program;
        let (buffers, slots) = weight_arguments(prepared.iter().map(|weight| (&weight.quantized, weight.slots())));
        let fresh: Vec<Option<DevPtr<'_>>> =
            prepared.iter().map(|weight| weight.fresh.map(|param| bindings.params[param])).collect();
        let mut dispatcher = self.state.dispatcher(self.x.py())?;
        let weights = Weights { buffers: &buffers, fresh: &fresh, slots: &slots, skip };
        let mut lane = dispatcher.0.lane(place, program.forward_scratch(), memory)?;
        program.run_forward(&mut lane, bindings, &weights)?;
        // A repeated call raises no maximum.
        let first_runs = prepared.iter().filter(|weight| weight.replay.is_none());
        for slots in first_runs.filter_map(|weight| weight.slots.as_ref()) {
            dispatcher.0.autocast.mark_ran(&slots.forward);
        }
        Ok(())
    }

    fn keep(
        &self,
        prepared: Vec<Prepared>,
        place: Place,
        capturing: bool,
        skippable: bool,
    ) -> Result<Vec<CallWeight>, Failure> {
        let py = self.x.py();
        let mut list = Vec::with_capacity(prepared.len());
        for (linear, Prepared { quantized, slots, version, fresh, .. }) in prepared.into_iter().enumerate() {
            if let (Some(quantized), Some(_)) = (&quantized, fresh)
                && let Some((weight, _)) = ProgramHandle::linear_at(self.handle, linear)?
            {
                if skippable {
                    weight.bind(py).try_borrow_mut()?.cache.keep_skippable(quantized);
                } else {
                    let former = weight.bind(py).try_borrow_mut()?.cache.keep(quantized, place, capturing);
                    drop(former);
                }
            }
            list.push(CallWeight { quantized, slots, version });
        }
        Ok(list)
    }
}

/// A weight before its launch.
struct Prepared {
    quantized: Option<Arc<CachedWeight>>,
    slots: Option<OpSlots>,
    replay: Option<Replay>,
    version: Option<u64>,
    /// The parameter that is to be quantised now.
    fresh: Option<usize>,
    /// The kept one serves.
    reused: bool,
}

impl Prepared {
    fn slots(&self) -> LinearSlots<'_> {
        match (&self.slots, &self.replay) {
            (Some(slots), Some(replay)) => slots.replayed(replay),
            (Some(slots), None) => slots.slots(),
            (None, _) => LinearSlots::NONE,
        }
    }
}
