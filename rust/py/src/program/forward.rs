//! One forward of a program: read the tensors, find the program and its form for the rows, allocate, run, keep weights.
//!
//! The dispatcher and the handles are borrowed only between calls into Python, which may let other threads in.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::launch::trace::{CLOCK, Stage};
use te_fast_core::program::{Outer, OuterKinds, Port, Program, ProgramKey, QuantizedKind, SizedProgram, WeightCast};
use te_fast_core::quant::cache::Keep;
use te_fast_core::quant::value::LinearSlots;
use te_fast_core::quant::weight::{Microbatch, WeightRecord, WeightToken};
use te_fast_core::recipe::definition::BackwardOverride;
use te_fast_core::recipe::region::Region;
use te_fast_core::recipe::usage::Usage;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::Place;

use crate::autocast::recompute::{RecordedScales, recorded_scales};
use crate::error::Failure;
use crate::hooks::skip_flag;
use crate::program::asked::InFp8;
use crate::program::buffers::Buffers;
use crate::program::check::check;
use crate::program::handle::{ProgramHandle, PyProgram, Shapes, Tuples};
use crate::program::parts::Joined;
use crate::program::tensors::{Flags, Objects, Tensors, float, requires_grad, same, typed, typed_extras};
use crate::program::together::{self, Source};
use crate::program::transfers::Transfers;
use crate::program::weight::{OpSlots, WeightHandle, recycle, reusable, storage_of};
use crate::program::weight_memory::{CachedWeight, Wanted, for_backward, make_weight};
use crate::tensor::given::GivenWeight;
use crate::tensor::handed::{Made, Stamp};
use crate::tensor::value::QuantizedValue;
use crate::torch::process::State;
use crate::torch::reader::view_of;

const OP: &str = "ops";

/// One linear op's weight in a call.
#[derive(Clone, Debug)]
pub(crate) struct CallWeight {
    /// None in high precision, and if the parameter itself is quantised.
    pub(crate) quantized: Option<Arc<CachedWeight>>,
    /// The parameter itself is quantised: backward reads its layouts.
    pub(crate) is_given: bool,
    pub(crate) slots: Option<OpSlots>,
    /// torch's version of the weight, none for inference tensors. For a quantised parameter, the number of its values;
    /// none if its bytes are gathered again for backward.
    pub(crate) version: Option<u64>,
}

impl CallWeight {
    pub(crate) fn slots(&self) -> LinearSlots<'_> {
        self.slots.as_ref().map_or(LinearSlots::NONE, OpSlots::slots)
    }
}

/// Those of all linear ops.
pub(crate) type CallWeights = SmallVec<[CallWeight; 2]>;

/// The results of a forward.
pub(crate) struct Done<'py> {
    pub(crate) y: Bound<'py, PyAny>,
    pub(crate) extra_outputs: Vec<Bound<'py, PyAny>>,
    pub(crate) saved: Option<Bound<'py, PyAny>>,
    pub(crate) compiled: Arc<PyProgram>,
    pub(crate) sized: Arc<SizedProgram>,
    pub(crate) shapes: Arc<Shapes>,
    pub(crate) weights: CallWeights,
    /// Whether a flag on the device decides if weights are quantised; `is_first_microbatch` then counts as False.
    pub(crate) skippable: bool,
    /// The extra inputs as they were read: the call's own tensors, or copies, which ops may have written in place.
    extras: SmallVec<[Bound<'py, PyAny>; 2]>,
    /// A quantised input: its parts that backward reads, by port, and a record of its content.
    handed: SmallVec<[(Port, Bound<'py, PyAny>); 2]>,
    pub(crate) stamp: Option<Stamp>,
}

impl<'py> Done<'py> {
    /// The tensors that backward reads: the saved buffer, and the call's own tensors in the order of
    /// [`Program::reads`].
    pub(crate) fn to_save(&self, call: &Call<'_, 'py>) -> PyResult<Bound<'py, PyTuple>> {
        let x = call.x;
        let py = x.py();
        let mut tensors = Objects::new();
        tensors.push(self.saved.clone().unwrap_or_else(|| py.None().into_bound(py)));
        for place in self.compiled.program.reads() {
            tensors.push(match *place {
                port if self.stamp.is_some() && matches!(port, Port::Input | Port::Beside(Outer::Input, _)) => {
                    let handed = self.handed.iter().find(|(known, _)| *known == port);
                    handed.map_or_else(|| py.None().into_bound(py), |(_, tensor)| tensor.clone())
                }
                Port::Input => x.clone(),
                Port::Extra(index) => self.extras[usize::from(index)].clone(),
                Port::ExtraOutput(index) => self.extra_outputs[usize::from(index)].clone(),
                Port::Param(index) => call.params[usize::from(index)].clone(),
                _ => py.None().into_bound(py),
            });
        }
        PyTuple::new(py, tensors)
    }
}

/// One forward. `extra_grads` and `input_grad` tell which inputs need a gradient; parameters are checked if `grads` is
/// set.
pub(crate) struct Call<'a, 'py> {
    pub(crate) state: &'a State,
    pub(crate) handle: &'a Bound<'py, ProgramHandle>,
    pub(crate) owner: &'a Bound<'py, PyAny>,
    pub(crate) x: &'a Bound<'py, PyAny>,
    pub(crate) extras: &'a [Bound<'py, PyAny>],
    pub(crate) params: &'a [Bound<'py, PyAny>],
    /// The parts of joined parameters, for autograd.
    pub(crate) joined: Option<Bound<'py, Joined>>,
    pub(crate) microbatch: Microbatch,
    /// Version of a concatenated weight.
    pub(crate) version: Option<u64>,
    pub(crate) grads: bool,
    pub(crate) input_grad: bool,
    pub(crate) extra_grads: Flags,
    /// Which parameters need a gradient, if that is known already.
    pub(crate) param_grads: Option<Flags>,
    /// torch's grad mode where the chain was called.
    pub(crate) grad_mode: bool,
    /// The quantised results that the call requests.
    pub(crate) in_fp8: InFp8,
    /// The caller's memory for the result and for the input's gradient.
    pub(crate) buffers: Option<Bound<'py, Buffers>>,
    /// Rows that arrive, and results that leave, beside the launches.
    pub(crate) transfers: Transfers<'py>,
}

impl<'a, 'py> Call<'a, 'py> {
    /// A call without gradients.
    #[inline]
    pub(crate) fn new(
        state: &'a State,
        (handle, owner): (&'a Bound<'py, ProgramHandle>, &'a Bound<'py, PyAny>),
        x: &'a Bound<'py, PyAny>,
        (extras, params): (&'a [Bound<'py, PyAny>], &'a [Bound<'py, PyAny>]),
        (microbatch, version): (Microbatch, Option<u64>),
    ) -> Self {
        let extra_grads = SmallVec::new();
        let (grads, input_grad, grad_mode, joined, buffers) = (false, false, false, None, None);
        Self {
            state,
            handle,
            owner,
            x,
            extras,
            params,
            joined,
            microbatch,
            version,
            grads,
            input_grad,
            extra_grads,
            param_grads: None,
            grad_mode,
            in_fp8: InFp8::default(),
            buffers,
            transfers: Transfers::default(),
        }
    }

    /// The same with results in FP8.
    #[inline]
    pub(crate) fn handing_out(mut self, in_fp8: InFp8) -> Self {
        self.in_fp8 = in_fp8;
        self
    }

    /// The same with parameters that are joined from parts.
    #[inline]
    pub(crate) fn of_parts(mut self, joined: Option<Bound<'py, Joined>>) -> Self {
        self.version = joined.as_ref().map_or(self.version, |joined| Some(joined.get().version(self.microbatch)));
        self.joined = joined;
        self
    }

    /// The same into the caller's memory.
    #[inline]
    pub(crate) fn into_buffers(mut self, buffers: Option<Bound<'py, Buffers>>) -> Self {
        self.buffers = buffers;
        self
    }

    /// The same beside transfers.
    pub(crate) fn beside(mut self, transfers: Transfers<'py>) -> Self {
        self.transfers = transfers;
        self
    }

    /// Sets which inputs need a gradient; parameters are checked if `grads` is set.
    pub(crate) fn wants(&mut self, grads: bool, input_grad: bool, extra_grads: Flags, grad_mode: bool) {
        (self.grads, self.input_grad, self.extra_grads, self.grad_mode) = (grads, input_grad, extra_grads, grad_mode);
    }

    /// The Python exception, with the program's name.
    #[cold]
    pub(crate) fn named(&self, failure: Failure) -> PyErr {
        let name = self.handle.try_borrow().ok().map(|handle| handle.name.clone());
        failure.named(name.as_deref())
    }

    /// Reads the tensors and runs.
    pub(crate) fn run(&self) -> PyResult<Done<'py>> {
        CLOCK.start();
        let run = || self.read_and_run();
        run().map_err(|failure| self.named(failure))
    }

    /// Runs on tensors that have been read.
    #[inline]
    pub(crate) fn run_on(&self, tensors: &Tensors<'_>) -> PyResult<Done<'py>> {
        CLOCK.start();
        self.on_readable(tensors).map_err(|failure| self.named(failure))
    }

    fn read_and_run(&self) -> Result<Done<'py>, Failure> {
        self.on_readable(&Tensors::read(self.state, self.x, self.extras, self.params)?)
    }

    #[inline]
    fn on_readable(&self, tensors: &Tensors<'_>) -> Result<Done<'py>, Failure> {
        let in_fp8 = tensors.given().is_empty() || self.state.dispatcher(self.x.py())?.0.autocast.current().enabled;
        if tensors.fit() && in_fp8 { self.on_tensors(tensors, self.extras) } else { self.on_copies(!in_fp8) }
    }

    /// The same on copies of tensors that are strided, misaligned, or quantised where the program reads plain ones.
    #[cold]
    fn on_copies(&self, dequantizes: bool) -> Result<Done<'py>, Failure> {
        self.transfers.wait()?; // copies read all rows
        let copies = Tensors::copies(self.state, self.x, self.extras, self.params, dequantizes)?;
        let written: SmallVec<[usize; 2]> = self.handle.try_borrow()?.chain.written_extra_inputs().into();
        let copied = written.into_iter().filter(|&index| !copies.extras[index].is(&self.extras[index]));
        let copied: SmallVec<[usize; 2]> = copied.collect();
        for &index in &copied {
            check_writable(self.state, &self.extras[index])?;
        }
        let done = self.on_tensors(&Tensors::from_copies(self.state, &copies)?, &copies.extras)?;
        for index in copied {
            let own = self.extras[index].call_method0(intern!(self.x.py(), "detach"))?;
            own.call_method1(intern!(self.x.py(), "copy_"), (&copies.extras[index],))?;
        }
        Ok(done)
    }

    fn on_tensors(&self, tensors: &Tensors<'_>, extras: &[Bound<'py, PyAny>]) -> Result<Done<'py>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let x = &tensors.x;
        CLOCK.mark(Stage::Read);
        let _guard = state.guard(py, x.device())?;
        let place = Place { device: x.device(), stream: state.reader.stream(py, x.device())? };
        let (region, in_graph_phase) = {
            let dispatcher = &mut state.dispatcher(py)?.0;
            (*dispatcher.autocast.current(), dispatcher.graph_phase)
        };
        let (compiled, sized) = self.program(tensors, &region)?;
        let program = &compiled.program;
        let replays = if region.enabled && region.recipe.is_delayed() {
            self.ensure_slots(region.epoch)?;
            self.replays()?
        } else {
            Vec::new()
        };
        self.handle.try_borrow_mut()?.last_region = region.enabled.then_some(region);
        let shapes = ProgramHandle::shapes(self.handle, x.shape(), program)?;
        let capturing = matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)?;
        // Also in warm-ups of a phase of captures: memory that a warm-up allocates lies outside of the graphs' pool, in
        // which graphs that were captured earlier would overwrite it at each replay.
        let flagged = region.enabled && (capturing || region.graph || in_graph_phase);
        let flag = if flagged { skip_flag(state, py, place.device)? } else { None };
        let prepared = self.weights(tensors, &compiled, &region, (place, capturing), flag.is_some(), replays)?;
        // Weights that do not exist yet are quantised, for any value of the flag, since a graph runs later. In a phase, so
        // is a weight that no warm-up has made.
        let skips = (capturing && !in_graph_phase) || prepared.iter().all(|weight| weight.reused);
        CLOCK.mark(Stage::Plan);

        let extra_outputs = self.extra_outputs(&compiled, &shapes, place, extras)?;
        let y = self.output(&compiled, &shapes, place, extras, &extra_outputs)?;
        let saved = state.optional_bytes(py, place.device, sized.saved_bytes())?;
        let results = Results { y, extra_outputs, saved };
        let flag = flag.as_ref().map(|flag| flag.bind(py));
        self.launch(tensors, (program, &sized), &results, &prepared, place, flag.filter(|_| skips))?;
        self.note_writes(program, extras)?;
        let skippable = flag.is_some();
        let weights = self.keep(tensors, &compiled, prepared, place, capturing, skippable)?;
        CLOCK.mark(Stage::Finish);
        let Results { y, extra_outputs, saved } = results;
        let y = match y {
            Output::High(y) => y,
            Output::InFp8(made) => {
                let (kind, dtype) = (made.kind(), DType::from(program.key().activation));
                let quantizer = compiled.quantizer(self.owner, kind, false)?;
                made.tensor(state, dtype, shapes.output.size.bind(py), &quantizer)?
            }
        };
        let extras = extras.into();
        let (handed, stamp) = tensors.handed(state, py)?.map_or_else(Default::default, |value| {
            let read = |port: &Port| Some((*port, value.tensor(py, *port)?));
            (program.reads().iter().filter_map(read).collect(), Some(value.stamp()))
        });
        Ok(Done { y, extra_outputs, saved, compiled, sized, shapes, weights, skippable, extras, handed, stamp })
    }

    /// Tells torch of writes in place, so that a backward that needs the former values raises.
    #[inline]
    pub(crate) fn note_writes(&self, program: &Program, extras: &[Bound<'py, PyAny>]) -> PyResult<()> {
        for &index in program.written_extra_inputs() {
            let py = self.x.py();
            let module = py.import(intern!(py, "torch.autograd.graph"))?;
            module.call_method1(intern!(py, "increment_version"), (&extras[index],))?;
        }
        Ok(())
    }

    /// The program for these tensors, found or compiled, and sized.
    fn program(&self, tensors: &Tensors<'_>, region: &Region) -> Result<(Arc<PyProgram>, Arc<SizedProgram>), Failure> {
        let (py, state) = (self.x.py(), self.state);
        let x = &tensors.x;
        let handed = tensors.handed(state, py)?.map(|value| value.kind);
        let activation = float(x, "the input")?;
        let wants = |tensor: &Bound<'_, PyAny>| -> PyResult<bool> { Ok(self.grads && requires_grad(tensor)?) };
        let param_grads = match &self.param_grads {
            Some(known) => known.clone(),
            None => self.params.iter().map(wants).collect::<PyResult<Flags>>()?,
        };
        let any_rows = state.dispatcher(py)?.0.auto_pad;
        let mut handle = self.handle.try_borrow_mut()?;
        let linears = handle.linear_calls(py)?;
        let epoch = region.enabled.then_some(region.epoch);
        let outer = self.outer(handed, region);
        let (rows, cols) = (x.rows(), x.shape().last().map_or(1, |&cols| cols as usize));
        let ProgramHandle { programs, chain, params, .. } = &mut *handle;
        let found = programs.find(|program| {
            let key = program.key();
            key.epoch == epoch
                && key.cols == cols
                && key.activation == activation
                && key.device == x.device()
                && key.any_rows == any_rows
                && key.input_grad == self.input_grad
                && key.linears[..] == linears[..]
                && key.outer == outer
                && same(&key.params, &tensors.params, &param_grads)
                && same(&key.extras, &tensors.extras, &self.extra_grads)
        });
        if let Some(kept) = found {
            check(py, (chain, params), tensors, rows, kept.compiled().program.widths())?;
            let sized = kept.sized(&mut state.dispatcher(py)?.0, rows)?;
            return Ok((Arc::clone(kept.compiled()), sized));
        }
        drop(handle);
        let key = ProgramKey {
            epoch,
            cols,
            activation,
            device: x.device(),
            any_rows,
            input_grad: self.input_grad,
            params: typed(&tensors.params, &param_grads, "a parameter")?,
            extras: typed_extras(&tensors.extras, &self.extra_grads),
            linears: linears.to_vec(),
            outer,
        };
        self.compile(tensors, region, key, rows)
    }

    #[cold]
    fn compile(
        &self,
        tensors: &Tensors<'_>,
        region: &Region,
        key: ProgramKey,
        rows: usize,
    ) -> Result<(Arc<PyProgram>, Arc<SizedProgram>), Failure> {
        let (py, state) = (self.x.py(), self.state);
        let chain = {
            let handle = self.handle.try_borrow()?;
            let widths = handle.chain.widths(key.cols)?;
            check(py, (&handle.chain, &handle.params), tensors, rows, widths.into_iter())?;
            handle.chain.clone()
        };
        let recipe = region.enabled.then_some(&region.recipe);
        let program = {
            let mut dispatcher = state.dispatcher(py)?;
            Arc::new(Program::new(&mut dispatcher.0, &chain, key, recipe)?)
        };
        let params = tensors.params.iter().map(|view| Tuples::new(py, view.shape())).collect::<PyResult<_>>()?;
        let compiled = Arc::new(PyProgram::new(program, params));
        let mut handle = self.handle.try_borrow_mut()?;
        let (kept, former) = handle.programs.insert(Arc::clone(&compiled));
        let sized = kept.sized(&mut state.dispatcher(py)?.0, rows);
        drop(handle);
        drop(former);
        Ok((compiled, sized?))
    }

    /// Quantised inputs and results. The column layout of the output is for the next layer's weight gradient, which also
    /// follows a forward without gradients that is recomputed later; under delayed scaling the next layer makes it, so
    /// that the GEMM can store the row layout.
    #[inline]
    fn outer(&self, input: Option<QuantizedKind>, region: &Region) -> OuterKinds {
        let InFp8 { output, grad } = self.in_fp8;
        if !region.enabled || !(output || grad) {
            return OuterKinds { input, ..OuterKinds::default() };
        }
        let trains = self.grad_mode || self.grads;
        let usage = Usage { rowwise: true, columnwise: trains && !region.recipe.is_delayed() };
        let grad = grad && self.input_grad && region.recipe.backward_override == BackwardOverride::None;
        OuterKinds { input, output: output.then_some(usage), grad_output: None, grad_input: grad }
    }

    #[cold]
    fn init_slots(&self) -> PyResult<()> {
        self.owner.call_method0(intern!(self.x.py(), "_init_delayed_scaling")).map(drop)
    }

    pub(crate) fn ensure_slots(&self, epoch: u64) -> PyResult<()> {
        let py = self.x.py();
        let has_slots = self.handle.try_borrow()?.has_slots(py, epoch)?;
        if has_slots { Ok(()) } else { self.init_slots() }
    }

    /// For each linear op, the scales from activation recomputation; empty outside of it.
    fn replays(&self) -> PyResult<Vec<Option<RecordedScales>>> {
        let (py, state) = (self.x.py(), self.state);
        if !state.dispatcher(py)?.0.autocast.recomputes() {
            return Ok(Vec::new());
        }
        let weights: Vec<_> = self.handle.try_borrow()?.weights.iter().map(|weight| weight.clone_ref(py)).collect();
        let one = |weight: Py<WeightHandle>| {
            let slots = weight.bind(py).try_borrow()?.slots.clone();
            slots.map_or(Ok(None), |slots| recorded_scales(state, weight.bind(py), &slots.forward, self.grad_mode))
        };
        weights.into_iter().map(one).collect()
    }

    /// The quantised weight of every linear op: the kept one if it can be used, else memory for a new one.
    fn weights(
        &self,
        tensors: &Tensors<'_>,
        compiled: &PyProgram,
        region: &Region,
        (place, capturing): (Place, bool),
        skippable: bool,
        replays: Vec<Option<RecordedScales>>,
    ) -> Result<SmallVec<[Prepared<'py>; 2]>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let linears = compiled.program.key().linears.len();
        let delayed = region.recipe.is_delayed();
        let (generation, cache_epoch, optimizer_steps, together) = {
            let Dispatcher { forward_generation, cache_epoch, optimizer_steps, config, .. } = &state.dispatcher(py)?.0;
            (*forward_generation, *cache_epoch, *optimizer_steps, config.weights_together)
        };
        let together = together && together::may_run_ahead(self.owner)?;
        let mut list = SmallVec::with_capacity(linears);
        let mut replays = replays.into_iter();
        for linear in 0..linears {
            let Some((weight, param)) = ProgramHandle::linear_at(self.handle, linear)? else { break };
            let given = tensors.given().iter().find(|(number, _)| *number == param).map(|(_, value)| value.bind(py));
            let version = match (self.version, given) {
                (Some(_), _) => None,
                (None, Some(value)) => QuantizedValue::stamp(value)?,
                (None, None) => {
                    self.params[param].getattr(intern!(py, "_version")).and_then(|version| version.extract()).ok()
                }
            };
            if !region.enabled {
                list.push(Prepared::high_precision(version));
                continue;
            }
            let weight = weight.bind(py);
            let view = &tensors.params[param];
            let replay = replays.next().flatten();
            if let Some(value) = given {
                let slots = if delayed { weight.try_borrow()?.slots.clone() } else { None };
                let kind = (&region.recipe, compiled.program.groups(linear));
                let layouts = GivenWeight::of_forward(state, value, kind, (place.device, view))?;
                list.push(Prepared { given: Some(layouts), slots, replay, ..Prepared::high_precision(version) });
                continue;
            }
            let copied = self.joined.as_ref().and_then(|joined| joined.get().copied(param));
            let record = WeightRecord {
                token: WeightToken {
                    address: copied.map_or_else(|| tensors.origin(param), |(place, _)| place),
                    version: self.version.or(version),
                    dtype: view.dtype(),
                },
                device: place.device,
                layout: compiled.program.weight_layout(linear),
                epoch: region.epoch,
                generation: replay.as_ref().map_or(if delayed { generation } else { 0 }, |replay| replay.generation),
                cache_epoch,
                training: compiled.program.key().any_grad(),
                optimizer_steps,
            };
            let slots = if delayed { weight.try_borrow()?.slots.clone() } else { None };
            let reused = if skippable {
                weight.try_borrow()?.cache.skippable(&record)
            } else {
                let (parameter, microbatch) = (&self.params[param], self.microbatch);
                reusable(state, weight, parameter, &record, microbatch, (place, capturing))?
            };
            let is_reused = reused.is_some();
            // Weights whose calls see no more than the present.
            let cast = if skippable || capturing || replay.is_some() || !together {
                None
            } else {
                compiled.program.weight_cast(linear)
            };
            let ready = match &cast {
                Some(cast) if !is_reused => together::ready(state, weight, &record, cast, place)?,
                _ => None,
            };
            let is_ready = ready.is_some();
            let (quantized, fresh) = if let Some(reused) = reused {
                (reused, skippable.then_some(param))
            } else if let Some(ready) = ready {
                (ready, Some(param))
            } else {
                let parameter = copied.map_or(&self.params[param], |(_, first)| first.bind(py));
                let storage = storage_of(state, weight, parameter)?;
                let former = if skippable { None } else { recycle(weight, (place, capturing))? };
                let made = make_weight(py, state, Wanted { storage, record, former })?;
                (Arc::new(made), Some(param))
            };
            let quantized = Some(quantized);
            list.push(Prepared {
                quantized,
                slots,
                replay,
                version,
                fresh,
                cast,
                is_ready,
                reused: is_reused,
                given: None,
            });
        }
        Self::check_given(tensors, compiled)?;
        Ok(list)
    }

    /// Refuses quantised parameters that are not weights, since their views have no memory.
    fn check_given(tensors: &Tensors<'_>, compiled: &PyProgram) -> Result<(), Failure> {
        let program = &compiled.program;
        let is_weight = |param: usize| (0..program.key().linears.len()).any(|at| program.linear_param(at) == param);
        if tensors.given().iter().all(|&(param, _)| is_weight(param)) {
            return Ok(());
        }
        let message = "a quantised parameter that is no weight of a linear op; dequantize() it";
        Err(Error::unsupported(OP, message).into())
    }

    pub(crate) fn extra_outputs(
        &self,
        compiled: &PyProgram,
        shapes: &Shapes,
        place: Place,
        extras: &[Bound<'py, PyAny>],
    ) -> Result<Vec<Bound<'py, PyAny>>, Failure> {
        let (py, state) = (self.x.py(), self.state);
        let program = &compiled.program;
        let mut outputs: Vec<Bound<'py, PyAny>> = Vec::with_capacity(shapes.extra_outputs.len());
        let kinds = program.extra_output_kinds().iter().zip(&shapes.extra_outputs);
        for (index, (&at, (&(_, dtype), tuples))) in program.extra_outputs().iter().zip(kinds).enumerate() {
            let tensor = match at {
                Port::Input => self.x.clone(),
                Port::Extra(extra) => extras[usize::from(extra)].clone(),
                Port::ExtraOutput(other) if usize::from(other) != index => {
                    outputs[usize::from(other)].call_method0("detach")?
                }
                _ => state.empty(py, place.device, tuples.size.bind(py), tuples.stride.bind(py), dtype.into())?,
            };
            outputs.push(tensor);
        }
        Ok(outputs)
    }

    pub(crate) fn output(
        &self,
        compiled: &PyProgram,
        shapes: &Shapes,
        place: Place,
        extras: &[Bound<'py, PyAny>],
        extra_outputs: &[Bound<'py, PyAny>],
    ) -> Result<Output<'py>, Failure> {
        let dtype = DType::from(compiled.program.key().activation);
        let (py, out) = (self.x.py(), &shapes.output);
        if let Some(kind) = compiled.program.output_kind() {
            let made = Made::allocate(self.state, py, (place.device, kind), &out.shape)?;
            return Ok(Output::InFp8(made));
        }
        if let (Some(buffers), Port::Output) = (&self.buffers, compiled.program.output())
            && let Some(output) = &buffers.get().output
        {
            let shape = (out.size.bind(py), out.stride.bind(py));
            return Ok(Output::High(viewed(self.state, output.bind(py), shape, dtype)?));
        }
        Ok(Output::High(match compiled.program.output() {
            Port::Input if extra_outputs.is_empty() => self.x.clone(),
            Port::Input => self.x.call_method0("detach")?,
            Port::Extra(extra) => extras[usize::from(extra)].clone(),
            // Two outputs must be two tensors for autograd.
            Port::ExtraOutput(index) => extra_outputs[usize::from(index)].call_method0("detach")?,
            _ => self.state.empty(py, place.device, out.size.bind(py), out.stride.bind(py), dtype)?,
        }))
    }

    fn keep(
        &self,
        tensors: &Tensors<'_>,
        compiled: &PyProgram,
        prepared: SmallVec<[Prepared<'py>; 2]>,
        place: Place,
        capturing: bool,
        skippable: bool,
    ) -> Result<CallWeights, Failure> {
        let (py, state) = (self.x.py(), self.state);
        // A weight that the optimizer will change is left to its backward.
        let trains = |param: usize| self.grads && compiled.program.key().params[param].1;
        let mut list = CallWeights::new();
        for (linear, prepared) in prepared.into_iter().enumerate() {
            let Prepared { mut quantized, given, slots, version, fresh, is_ready, cast, .. } = prepared;
            let mut is_left = false;
            if let (Some(quantized), Some(_)) = (&quantized, fresh)
                && let Some((weight, param)) = ProgramHandle::linear_at(self.handle, linear)?
            {
                let keep = match self.microbatch {
                    Microbatch::Unknown if trains(param) && capturing => Keep::WhileCaptured,
                    Microbatch::Unknown if trains(param) => Keep::WhileNeeded,
                    _ if capturing => Keep::ForCapture,
                    _ => Keep::Long,
                };
                if skippable {
                    let capture = capturing.then_some(place.stream);
                    let former = weight.bind(py).try_borrow_mut()?.cache.keep_skippable(quantized, capture)?;
                    drop(former);
                } else {
                    let former = weight.bind(py).try_borrow_mut()?.cache.keep(quantized, place.stream, keep);
                    drop(former);
                    is_left = !weight.bind(py).try_borrow()?.cache.holds(quantized);
                }
                if let Some(cast) = cast
                    && tensors.is_in_place(param)
                    && self.joined.as_ref().map_or(self.version.is_none(), |joined| !joined.get().is_copied(param))
                {
                    let joined = self.joined.as_ref().map(Bound::get);
                    let source = Source { param: &self.params[param], index: param, joined };
                    together::join(state, weight.bind(py), quantized, cast, &source, (place, !is_ready))?;
                }
            }
            if is_left {
                let reads = compiled.program.reads_weight(linear);
                quantized = quantized.filter(|_| reads).map(|weight| for_backward(py, weight));
            }
            list.push(CallWeight { quantized, is_given: given.is_some(), slots, version });
        }
        Ok(list)
    }
}

/// The output of a call.
pub(crate) enum Output<'py> {
    High(Bound<'py, PyAny>),
    InFp8(Made<'py>),
}

impl<'py> Output<'py> {
    /// The tensor, if it is in high precision.
    pub(crate) const fn high(&self) -> Option<&Bound<'py, PyAny>> {
        match self {
            Self::High(tensor) => Some(tensor),
            Self::InFp8(_) => None,
        }
    }
}

/// A tensor on the caller's memory, in the shape of the result. It becomes a result of autograd, while the caller's
/// tensor stays plain for the next call.
pub(crate) fn viewed<'py>(
    state: &State,
    buffer: &Bound<'py, PyAny>,
    (size, stride): (&Bound<'py, PyTuple>, &Bound<'py, PyTuple>),
    dtype: DType,
) -> Result<Bound<'py, PyAny>, Failure> {
    let view = view_of(&state.reader, buffer, "a buffer")?;
    let wanted: usize = size.iter().map(|size| size.extract::<usize>()).product::<PyResult<usize>>()?;
    if view.numel() != wanted || view.dtype() != dtype || !view.is_contiguous() {
        let expected = format!("a contiguous {dtype} tensor of {wanted} elements");
        let got = format!("{} of shape {:?}", view.dtype(), view.shape());
        return Err(Error::shape(OP, "a buffer of the caller's", expected, got).into());
    }
    Ok(buffer.call_method1(intern!(buffer.py(), "as_strided"), (size, stride))?)
}

/// The tensors that a call makes.
pub(crate) struct Results<'py> {
    pub(crate) y: Output<'py>,
    pub(crate) extra_outputs: Vec<Bound<'py, PyAny>>,
    pub(crate) saved: Option<Bound<'py, PyAny>>,
}

/// A weight before its launch.
pub(crate) struct Prepared<'py> {
    pub(crate) quantized: Option<Arc<CachedWeight>>,
    /// The parameter's own layouts, if it is quantised.
    pub(crate) given: Option<GivenWeight<'py>>,
    pub(crate) slots: Option<OpSlots>,
    pub(crate) replay: Option<RecordedScales>,
    pub(crate) version: Option<u64>,
    /// The parameter to quantise now.
    pub(crate) fresh: Option<usize>,
    /// Whether the launch of all weights has quantised it.
    pub(crate) is_ready: bool,
    /// How a launch of all weights quantises it.
    cast: Option<WeightCast>,
    /// The kept weight is used.
    pub(crate) reused: bool,
}

/// Refuses an extra input that an op writes in place if its elements share memory.
fn check_writable(state: &State, extra: &Bound<'_, PyAny>) -> Result<(), Failure> {
    let view = view_of(&state.reader, extra, "an extra input")?;
    if view.shape().iter().zip(view.strides()).any(|(&size, &stride)| size > 1 && stride == 0) {
        let expected = "memory of its own for each element, since an op writes in place; pass .contiguous()";
        return Err(Error::layout(OP, "an extra input", expected, "an expanded tensor").into());
    }
    Ok(())
}

impl Prepared<'_> {
    /// A weight that is not quantised here.
    pub(crate) const fn high_precision(version: Option<u64>) -> Self {
        Self {
            quantized: None,
            given: None,
            slots: None,
            replay: None,
            version,
            fresh: None,
            is_ready: false,
            cast: None,
            reused: true,
        }
    }

    pub(crate) fn slots(&self) -> LinearSlots<'_> {
        match (&self.slots, &self.replay) {
            (Some(slots), Some(replay)) => slots.replayed(replay),
            (Some(slots), None) => slots.slots(),
            (None, _) => LinearSlots::NONE,
        }
    }
}
