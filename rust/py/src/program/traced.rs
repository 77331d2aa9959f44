//! A program as operators of a compiler's graph call it: tensors in, new tensors out, nothing kept that a graph should know of.
//!
//! A compiler decides once what eager decides at every call: what wants a gradient, which region is in force, how
//! weights are kept. That is a [`TracedCall`]. Sizes of results follow from it and the number of rows, so that the
//! compiler can plan its memory. Tensors are two-dimensional: rows of columns.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::program::{Port, Program, ProgramKey};
use te_fast_core::quant::cache::KeptWeight;
use te_fast_core::quant::weight::{Microbatch, WeightRecord, WeightToken};
use te_fast_core::recipe::region::{Former, Given, Region};
use te_fast_core::recipe::update::update_given;
use te_fast_core::runtime::lane::Place;

use crate::autocast::recipe::NativeRecipe;
use crate::error::{Failure, IntoPython};
use crate::program::backward::{ProgramSaved, run};
use crate::program::bits::Bits;
use crate::program::check::check;
use crate::program::forward::{Call, CallWeight, Prepared, Results};
use crate::program::handle::{Compiled, ProgramHandle, Tuples};
use crate::program::tensors::{Tensors, float};
use crate::program::weight::{GivenSlots, OpSlots, TracedWeight, WeightHandle};
use crate::program::weight_memory::{CachedWeight, WeightMemory, is_gone, share_with};
use crate::torch::process::{State, state};
use crate::torch::reader::{Held, view_of};

const OP: &str = "ops";

/// Rows by which the size of what backward needs is counted: every buffer's bytes are whole steps of them.
const STEP: usize = 256;

/// All that is to be known of a compiler's calls of a program, but for tensors and row counts.
#[pyclass(module = "te_fast._native", frozen)]
pub(crate) struct TracedCall {
    key: ProgramKey,
    /// The region of its forward; none in high precision.
    region: Option<(Region, Option<Given>)>,
    bits: Bits,
    /// Whether the region of the call is one that the graph enters itself: then whether this is its first FP8 module.
    is_first: Option<bool>,
    overwrites_main_grad: bool,
    /// Columns of output and extra outputs.
    widths: Vec<usize>,
    /// Bytes of what backward needs: for no rows, and for each step of rows.
    saved: (usize, usize),
    /// Of each linear op, bytes of the row and the column layout of its weight.
    weights: Vec<(usize, usize)>,
    /// Linear ops whose weight backward reads in FP8.
    reads_weight: Vec<bool>,
    reads: Vec<Port>,
    extra_cols: Vec<usize>,
    grad_dtypes: Vec<DType>,
    /// Parameters whose gradients go into `main_grad`, and that wait for `backward_dw`.
    fused: Vec<usize>,
    deferred: Vec<usize>,
    /// Those of the latter that go into `main_grad` then.
    fused_later: Vec<usize>,
}

#[pymethods]
impl TracedCall {
    /// What tells calls apart, and the same in every process.
    #[getter]
    fn text(&self) -> String {
        let key = &self.key;
        let flag = |flag: bool| if flag { 'g' } else { '-' };
        let typed = |list: &[(te_fast_core::Float, bool)]| -> String {
            list.iter().map(|&(dtype, grad)| format!("{dtype:?}{}", flag(grad))).collect()
        };
        let linears: String = key
            .linears
            .iter()
            .map(|call| format!("{}{}", u8::from(call.deferred), u8::from(call.save_original_input)))
            .collect();
        format!(
            "{:x} {}{:?}{} {} {}|{}|{} {}{}{} {:?} {:?} {:?} {:?} {:?}",
            key.epoch.unwrap_or(0),
            key.cols,
            key.activation,
            key.device,
            u8::from(key.any_rows),
            flag(key.input_grad),
            typed(&key.params),
            typed(&key.extras),
            self.bits.0,
            self.is_first.map_or('?', |first| if first { '1' } else { '0' }),
            u8::from(self.overwrites_main_grad),
            linears,
            (&self.fused, &self.fused_later),
            self.widths,
            self.saved,
            self.weights,
        )
    }

    /// Columns of output and extra outputs.
    #[getter]
    fn widths(&self) -> Vec<usize> {
        self.widths.clone()
    }

    /// Bytes of what backward needs of no rows, of each step of rows, and the rows of a step.
    #[getter]
    fn saved(&self) -> (usize, usize, usize) {
        (self.saved.0, self.saved.1, STEP)
    }

    /// Bytes of the row and the column layout of each linear op's weight; nothing in high precision.
    #[getter]
    fn weights(&self) -> Vec<(usize, usize)> {
        self.weights.clone()
    }

    /// Bytes of each FP8 weight that forward makes for backward alone, one after the other.
    #[getter]
    fn passing(&self) -> Vec<usize> {
        self.passing_weights().collect()
    }

    /// Whether quantised weights lie in memory that calls bring.
    #[getter]
    fn keeps_weights(&self) -> bool {
        self.region.is_some() && !self.weights.is_empty() && !self.passes_weights()
    }

    /// The tensors of the call that backward reads, as (kind, number).
    #[getter]
    fn reads(&self) -> Vec<(&'static str, usize)> {
        self.reads
            .iter()
            .filter_map(|port| match *port {
                Port::Input => Some(("input", 0)),
                Port::Extra(index) => Some(("extra", usize::from(index))),
                Port::ExtraOutput(index) => Some(("output", usize::from(index))),
                Port::Param(index) => Some(("param", usize::from(index))),
                _ => None,
            })
            .collect()
    }

    /// Whether the gradient of the input is wanted.
    #[getter]
    fn input_grad(&self) -> bool {
        self.key.input_grad
    }

    /// Parameters whose gradient backward makes, with its type's bytes; those of `main_grad` and of `backward_dw` too.
    #[getter]
    fn param_grads(&self) -> Vec<bool> {
        self.key.params.iter().map(|&(_, grad)| grad).collect()
    }

    /// torch's types of the parameters' gradients.
    #[getter]
    fn grad_dtypes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let state = state(py)?;
        Ok(self.grad_dtypes.iter().map(|&dtype| state.torch.dtype(py, dtype).clone()).collect())
    }

    /// Extra inputs whose gradient is wanted.
    #[getter]
    fn extra_grads(&self) -> Vec<bool> {
        self.key.extras.iter().map(|&(_, grad)| grad).collect()
    }

    /// Columns of the extra inputs.
    #[getter]
    fn extra_widths(&self) -> Vec<usize> {
        self.extra_cols.clone()
    }

    /// Parameters whose gradients go into `main_grad`.
    #[getter]
    fn fused(&self) -> Vec<usize> {
        self.fused.clone()
    }

    /// Parameters whose gradients wait for `backward_dw`.
    #[getter]
    fn deferred(&self) -> Vec<usize> {
        self.deferred.clone()
    }

    /// Those of the latter that go into `main_grad` then.
    #[getter]
    fn fused_later(&self) -> Vec<usize> {
        self.fused_later.clone()
    }

    /// Of the memory of kept weights, that which backward reads: the column layout where there is one, else the row layout.
    #[getter]
    fn kept_for_backward(&self) -> Vec<usize> {
        let all = self.reads_weight.iter().zip(&self.weights).enumerate();
        let at = |linear: usize, col: usize| 2 * linear + usize::from(col != 0);
        all.filter(|&(_, (&reads, _))| reads).map(|(linear, (_, &(_, col)))| at(linear, col)).collect()
    }

    /// `main_grad` is set and not added to.
    #[getter]
    fn overwrites_main_grad(&self) -> bool {
        self.bits.has(Bits::FIRST_MICROBATCH) || self.overwrites_main_grad
    }

    /// Whether the call quantises with scales of delayed scaling.
    #[getter]
    fn is_delayed(&self) -> bool {
        self.region.as_ref().is_some_and(|(region, _)| region.recipe.is_delayed()) && !self.weights.is_empty()
    }

    /// Rows that a call of so many lacks.
    fn missing_rows(&self, py: Python<'_>, rows: usize) -> PyResult<usize> {
        let Some((region, _)) = &self.region else { return Ok(0) };
        let pads = self.key.any_rows && state(py)?.dispatcher(py)?.0.auto_pad;
        Ok(if pads { region.recipe.missing_rows(rows) } else { 0 })
    }
}

impl TracedCall {
    fn any_grad(&self) -> bool {
        self.key.any_grad()
    }

    /// Weights are quantised at every call, and their column layouts are results of it.
    fn passes_weights(&self) -> bool {
        self.any_grad() && self.bits.microbatch() == Microbatch::Unknown
    }

    fn passing_weights(&self) -> impl Iterator<Item = usize> + '_ {
        let all = self.weights.iter().zip(&self.reads_weight);
        all.filter(|&(_, &reads)| reads && self.passes_weights()).map(|(&(row, col), _)| if col == 0 { row } else { col })
    }

    fn saved_bytes(&self, rows: usize) -> usize {
        self.saved.0 + self.saved.1 * rows.div_ceil(STEP)
    }

    /// Puts the region of the call in force, if another one is.
    fn enter<'a>(&self, py: Python<'a>, state: &'a State) -> PyResult<Entered<'a>> {
        let (wanted, given) = match &self.region {
            Some((region, given)) => (*region, given.clone()),
            None => (Region::HIGH_PRECISION, None),
        };
        let mut dispatcher = state.dispatcher(py)?;
        let current = *dispatcher.0.autocast.current();
        let is_in_force = if wanted.enabled { current.epoch == wanted.epoch } else { !current.enabled };
        let former = (!is_in_force).then(|| dispatcher.0.autocast.repeat_with(&wanted, given));
        Ok(Entered { py, state, former })
    }
}

/// A region in force until it is dropped.
struct Entered<'a> {
    py: Python<'a>,
    state: &'a State,
    former: Option<Former>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let (Some(former), Ok(mut dispatcher)) = (self.former.take(), self.state.dispatcher(self.py)) {
            dispatcher.0.autocast.exit(&former, false);
        }
    }
}

/// Describes calls of a program in the region in force: of inputs like `x` and `extras`, whose values do not matter.
///
/// `wants` says what wants a gradient: input, parameters, extra inputs. `is_first` is whether this is the first FP8
/// module of a region that the graph enters itself, None for a region around the graph.
#[pyfunction]
#[pyo3(signature = (handle, x, extras, params, is_first_microbatch, wants, is_first, overwrites_main_grad, /))]
#[expect(clippy::too_many_arguments, reason = "a Python function's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_call<'py>(
    handle: &Bound<'py, ProgramHandle>,
    x: &Bound<'py, PyAny>,
    extras: Vec<Bound<'py, PyAny>>,
    params: Vec<Bound<'py, PyAny>>,
    is_first_microbatch: Option<bool>,
    wants: (bool, Vec<bool>, Vec<bool>),
    is_first: Option<bool>,
    overwrites_main_grad: bool,
) -> PyResult<TracedCall> {
    let py = x.py();
    let state = state(py)?;
    let describe = || -> Result<TracedCall, Failure> {
        let tensors = Tensors::read(state, x, &extras, &params)?;
        let (region, given, any_rows) = {
            let mut dispatcher = state.dispatcher(py)?;
            let region = *dispatcher.0.autocast.current();
            (region, dispatcher.0.autocast.given().cloned(), dispatcher.0.auto_pad)
        };
        let typed = |views: &[_], grads: &[bool], what| crate::program::tensors::typed(views, grads, what);
        let key = ProgramKey {
            epoch: region.enabled.then_some(region.epoch),
            cols: x_cols(&tensors),
            activation: float(&tensors.x, "the input")?,
            device: tensors.x.device(),
            any_rows,
            input_grad: wants.0,
            params: typed(&tensors.params, &wants.1, "a parameter")?,
            extras: typed(&tensors.extras, &wants.2, "an extra input")?,
            linears: handle.try_borrow()?.linear_calls(py)?.to_vec(),
        };
        let region = region.enabled.then_some((region, given));
        let _guard = state.guard(py, key.device)?;
        let recipe = region.as_ref().map(|(region, _)| &region.recipe);
        let compiled = compiled_for(state, handle, &key, recipe, &params)?;
        {
            let handle = handle.try_borrow()?;
            check(py, &handle, &tensors, tensors.x.rows(), compiled.program.widths())?;
        }
        let program = &compiled.program;
        if let Some(index) = program.written_extra_inputs().first() {
            let message = format!("extra input {index} is written in place, which a traced graph does not show; pass in_place=False");
            return Err(Error::unsupported(OP, message).into());
        }
        let bytes = [STEP, 2 * STEP].map(|rows| {
            program.sized(&mut state.dispatcher(py)?.0, rows).map(|sized| sized.saved_bytes()).python()
        });
        let [one, two] = bytes;
        let (one, two) = (one?, two?);
        let linears = 0..key.linears.len();
        let (mut fused, mut deferred, mut fused_later) = (Vec::new(), Vec::new(), Vec::new());
        for (linear, call) in key.linears.iter().enumerate() {
            let param = program.linear_param(linear);
            if !key.params[param].1 {
                continue;
            }
            let Some((weight, _)) = ProgramHandle::linear_at(handle, linear)? else { break };
            let fuses = weight.bind(py).try_borrow()?.fuse_wgrad_accumulation;
            match (call.deferred, fuses) {
                (true, true) => fused_later.push(param),
                (false, true) => fused.push(param),
                _ => {}
            }
            if call.deferred {
                deferred.push(param);
            }
        }
        let in_fp8 = region.is_some();
        let layouts = linears.clone().map(|linear| program.weight_layout(linear));
        Ok(TracedCall {
            widths: std::iter::once(program.out_cols()).chain(program.extra_output_cols().iter().copied()).collect(),
            saved: (2 * one - two, two - one),
            weights: if in_fp8 { layouts.map(|layout| (layout.row_bytes, layout.col_bytes)).collect() } else { Vec::new() },
            reads_weight: linears.map(|linear| program.reads_weight(linear)).collect(),
            reads: program.reads().to_vec(),
            extra_cols: (0..key.extras.len()).map(|index| program.cols_of_extra(index)).collect(),
            grad_dtypes: (0..key.params.len()).map(|param| program.grad_dtype(param).into()).collect(),
            bits: Bits(Bits::of_microbatch(is_first_microbatch)),
            fused,
            deferred,
            fused_later,
            key,
            region,
            is_first,
            overwrites_main_grad,
        })
    };
    describe().map_err(|failure| named_by(handle, failure))
}

fn x_cols(tensors: &Tensors<'_>) -> usize {
    tensors.x.shape().last().map_or(1, |&cols| cols as usize)
}

#[cold]
fn named_by(program: &Bound<'_, ProgramHandle>, failure: Failure) -> PyErr {
    let name = program.try_borrow().ok().map(|handle| handle.name.clone());
    failure.named(name.as_deref())
}

/// The compiled program of a key.
fn compiled_for(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    key: &ProgramKey,
    recipe: Option<&te_fast_core::recipe::definition::Recipe>,
    params: &[Bound<'_, PyAny>],
) -> Result<Arc<Compiled>, Failure> {
    let py = handle.py();
    if let Some(found) = handle.try_borrow_mut()?.find(|program| program.key() == key) {
        return Ok(found);
    }
    let chain = handle.try_borrow()?.chain.clone();
    let program = Arc::new(Program::new(&mut state.dispatcher(py)?.0, &chain, key.clone(), recipe)?);
    let tuples = |param| Ok(Tuples::new(py, view_of(&state.reader, param, "a parameter")?.shape())?);
    let compiled = Arc::new(Compiled { params: params.iter().map(tuples).collect::<Result<_, Failure>>()?, program });
    handle.try_borrow_mut()?.insert(&compiled);
    Ok(compiled)
}

/// Histories and scales that a call brings, one of each for each set of slots of the chain's linear ops.
fn given_slots(
    state: &State,
    histories: &[Bound<'_, PyAny>],
    scales: &[Bound<'_, PyAny>],
    is_forward: bool,
) -> PyResult<Vec<Arc<GivenSlots>>> {
    histories
        .iter()
        .zip(scales)
        .map(|(history, scale)| {
            let (history, scale) = (Held::alias(&state.reader, history)?, Held::alias(&state.reader, scale)?);
            Ok(Arc::new(GivenSlots { history, scale, is_forward }))
        })
        .collect()
}

/// The slots of each linear op, in memory that the call brings; ops of one layer share theirs.
fn slots_of(
    handle: &Bound<'_, ProgramHandle>,
    given: &[Arc<GivenSlots>],
    is_forward: bool,
) -> Result<Vec<Option<OpSlots>>, Failure> {
    let py = handle.py();
    let weights: Vec<_> = handle.try_borrow()?.weights.iter().map(|weight| weight.clone_ref(py)).collect();
    let mut seen = Vec::new();
    let mut list = Vec::with_capacity(weights.len());
    for weight in weights {
        let slots = weight.bind(py).try_borrow()?.slots.clone();
        let Some(slots) = slots.filter(|_| !given.is_empty()) else {
            list.push(None);
            continue;
        };
        let id = if is_forward { slots.forward.id() } else { slots.backward.id() };
        let at = seen.iter().position(|&known| known == id).unwrap_or_else(|| {
            seen.push(id);
            seen.len() - 1
        });
        let memory = given.get(at).ok_or_else(|| {
            Error::state(OP, "a compiled call brings fewer scales than its linear ops have; compile it again")
        })?;
        list.push(Some(slots.given(memory)));
    }
    Ok(list)
}

/// A forward of a compiler's: output, extra outputs, what backward needs, FP8 weights for backward. All are new tensors.
///
/// `histories` and `scales` are those of delayed scaling, `kept` the memory of quantised weights, row layouts and column layouts
/// in turn, where calls bring it.
#[pyfunction]
#[pyo3(signature = (program, owner, call, x, extras, params, histories, scales, kept, /))]
#[expect(clippy::too_many_arguments, reason = "a Python function's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_forward<'py>(
    program: &Bound<'py, ProgramHandle>,
    owner: &Bound<'py, PyAny>,
    call: &Bound<'py, TracedCall>,
    x: &Bound<'py, PyAny>,
    extras: Vec<Bound<'py, PyAny>>,
    params: Vec<Bound<'py, PyAny>>,
    histories: Vec<Bound<'py, PyAny>>,
    scales: Vec<Bound<'py, PyAny>>,
    kept: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let py = x.py();
    let state = state(py)?;
    let traced = call.get();
    let _region = traced.enter(py, state)?;
    let given = given_slots(state, &histories, &scales, true)?;
    let mut call = Call::new(state, (program, owner), x, (&extras, &params), (traced.bits, None));
    call.grads = traced.any_grad();
    let run = || -> Result<_, Failure> {
        let tensors = Tensors::read(state, x, &extras, &params)?;
        if tensors.fit() {
            return forward(&call, traced, &tensors, &extras, (&given, &kept));
        }
        let copies = Tensors::copies(state, x, &extras, &params)?;
        forward(&call, traced, &Tensors::from_copies(state, &copies)?, &copies.extras, (&given, &kept))
    };
    let results = run().map_err(|failure| named_by(program, failure))?;
    PyList::new(py, results)
}

fn forward<'py>(
    call: &Call<'_, 'py>,
    traced: &TracedCall,
    tensors: &Tensors<'_>,
    extras: &[Bound<'py, PyAny>],
    (given, kept): (&[Arc<GivenSlots>], &[Bound<'py, PyAny>]),
) -> Result<Vec<Bound<'py, PyAny>>, Failure> {
    let (py, state, handle) = (call.x.py(), call.state, call.handle);
    let device = traced.key.device;
    if tensors.x.device() != device {
        return Err(Error::device(OP, "the input", format!("{device}, where the call was traced"), tensors.x.device()).into());
    }
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    let recipe = traced.region.as_ref().map(|(region, _)| &region.recipe);
    let compiled = compiled_for(state, handle, &traced.key, recipe, call.params)?;
    let program = &compiled.program;
    let rows = tensors.x.rows();
    check(py, &*handle.try_borrow()?, tensors, rows, program.widths())?;
    let sized = program.sized(&mut state.dispatcher(py)?.0, rows)?;
    let bytes = traced.saved_bytes(rows);
    if sized.saved_bytes() > bytes {
        let message = format!("{rows} rows leave {} bytes to backward, more than the {bytes} that were traced; compile the call again", sized.saved_bytes());
        return Err(Error::state(OP, message).into());
    }
    let slots = if let Some((region, _)) = traced.region.as_ref().filter(|_| traced.is_delayed()) {
        call.ensure_slots(region.epoch)?;
        refuse_late_repetition(state, py, handle, traced)?;
        slots_of(handle, given, true)?
    } else {
        vec![None; traced.key.linears.len()]
    };
    let shapes =
        handle.try_borrow_mut()?.shapes(py, tensors.x.shape(), program.out_cols(), program.extra_output_cols())?;
    let (prepared, passing) = weights(call, traced, (tensors, program), place, slots, kept)?;
    let extra_outputs = call.extra_outputs(&compiled, &shapes, place, extras)?;
    let y = call.output(&compiled, &shapes, place, extras, &extra_outputs)?;
    let saved = if traced.any_grad() { state.optional_bytes(py, device, bytes)? } else { None };
    let results = Results { y, extra_outputs, saved };
    call.launch(tensors, (program, &sized), &results, &prepared, place, None)?;
    if !traced.passes_weights() {
        note_kept(handle, prepared, place)?;
    }
    // No result may be another tensor of the call.
    let own = |tensor: Bound<'py, PyAny>, port: Port, new: Port| -> PyResult<_> {
        if port == new { Ok(tensor) } else { tensor.call_method0("clone") }
    };
    let Results { y, extra_outputs, saved } = results;
    let mut list = vec![own(y, program.output(), Port::Output)?];
    for (index, (tensor, &port)) in extra_outputs.into_iter().zip(program.extra_outputs()).enumerate() {
        list.push(own(tensor, port, Port::ExtraOutput(index as u16))?);
    }
    list.extend(saved);
    list.extend(passing);
    Ok(list)
}

/// A recomputation quantises with the scales that it is given. Once they have been updated, these are not its forward's.
fn refuse_late_repetition(
    state: &State,
    py: Python<'_>,
    handle: &Bound<'_, ProgramHandle>,
    traced: &TracedCall,
) -> Result<(), Failure> {
    let is_repeated = state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? >= 0;
    let generation = state.dispatcher(py)?.0.forward_generation;
    let mut handle = handle.try_borrow_mut()?;
    if !is_repeated {
        handle.traced_generation = generation;
        return Ok(());
    }
    if traced.any_grad() && handle.traced_generation != generation {
        let message = "activations are recomputed after the autocast region's end has updated the scales of delayed scaling; end the region behind backward, or use te_fast.pytorch.checkpoint outside of torch.compile";
        return Err(Error::state(OP, message).into());
    }
    Ok(())
}

type Weights<'py> = (SmallVec<[Prepared; 2]>, Vec<Bound<'py, PyAny>>);

/// The quantised weights, of which the column layouts are results where nothing keeps them.
fn weights<'py>(
    call: &Call<'_, 'py>,
    traced: &TracedCall,
    (tensors, program): (&Tensors<'_>, &Program),
    place: Place,
    slots: Vec<Option<OpSlots>>,
    kept: &[Bound<'py, PyAny>],
) -> Result<Weights<'py>, Failure> {
    let (py, state) = (call.x.py(), call.state);
    let (mut list, mut passing) = (SmallVec::new(), Vec::new());
    for (linear, slots) in slots.into_iter().enumerate() {
        let Some((region, _)) = &traced.region else {
            list.push(Prepared { quantized: None, slots, replay: None, version: None, fresh: None, reused: true });
            continue;
        };
        let Some((weight, param)) = ProgramHandle::linear_at(call.handle, linear)? else { break };
        let layout = program.weight_layout(linear);
        let (generation, cache_epoch, optimizer_steps) = {
            let dispatcher = &state.dispatcher(py)?.0;
            (dispatcher.forward_generation, dispatcher.cache_epoch, dispatcher.optimizer_steps)
        };
        let version = call.params[param].getattr("_version").and_then(|version| version.extract()).ok();
        let record = WeightRecord {
            token: WeightToken { address: tensors.origin(param), version, dtype: tensors.params[param].dtype() },
            device: place.device,
            layout,
            epoch: region.epoch,
            generation: if region.recipe.is_delayed() { generation } else { 0 },
            cache_epoch,
            training: traced.any_grad(),
            optimizer_steps,
        };
        let (row, col) = if traced.passes_weights() {
            let buffer = |bytes| state.optional_bytes(py, place.device, bytes);
            (buffer(layout.row_bytes)?, buffer(layout.col_bytes)?)
        } else {
            let at = |index: usize, bytes: usize| -> Result<_, Failure> {
                if bytes == 0 {
                    return Ok(None);
                }
                let given = kept.get(2 * linear + index).ok_or_else(|| {
                    Error::state(OP, "a compiled call brings no memory for its quantised weight; compile it again")
                })?;
                view_of(&state.reader, given, "the quantised weight")?.check_saved(OP, bytes, DType::U8, place.device)?;
                Ok(Some(given.clone()))
            };
            (at(0, layout.row_bytes)?, at(1, layout.col_bytes)?)
        };
        if traced.passes_weights() && program.reads_weight(linear) {
            passing.extend(col.as_ref().or(row.as_ref()).cloned());
        }
        let held = |buffer: Option<Bound<'py, PyAny>>| -> PyResult<Option<Arc<Held>>> {
            buffer.map(|buffer| Ok(Arc::new(Held::alias(&state.reader, &buffer)?))).transpose()
        };
        let (row, col) = (held(row)?, held(col)?);
        let storage = call.params[param].call_method0("untyped_storage")?;
        let storage = state.torch.storage_weak_ref.bind(py).call1((storage,))?.unbind();
        let quantized = Arc::new(KeptWeight::new(record, WeightMemory { row, col, storage }));
        let reuses = !traced.passes_weights()
            && serves(state, weight.bind(py), &call.params[param], &quantized, traced.bits.microbatch(), place)?;
        let fresh = (!reuses).then_some(param);
        let reused = fresh.is_none();
        list.push(Prepared { quantized: Some(quantized), slots, replay: None, version: None, fresh, reused });
    }
    Ok((list, passing))
}

/// Whether an earlier call has quantised a weight into the memory of `wanted` that serves.
fn serves(
    state: &State,
    weight: &Bound<'_, WeightHandle>,
    parameter: &Bound<'_, PyAny>,
    wanted: &CachedWeight,
    microbatch: Microbatch,
    place: Place,
) -> Result<bool, Failure> {
    let py = weight.py();
    let capturing = matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)?;
    let frozen = !parameter.getattr(&state.torch.names.requires_grad)?.is_truthy()?;
    let (storage, writer) = {
        let weight = weight.try_borrow()?;
        let Some(known) = &weight.traced else { return Ok(false) };
        let steps = if frozen { known.record.optimizer_steps } else { wanted.record.optimizer_steps };
        let wanted = WeightRecord { optimizer_steps: steps, ..wanted.record };
        if known.record.layout != wanted.layout || !known.record.serves(&wanted, microbatch, capturing) {
            return Ok(false);
        }
        (known.storage.clone_ref(py), known.writer)
    };
    if is_gone(&storage, py, state)? {
        return Ok(false);
    }
    if writer != place.stream && !capturing {
        share_with(py, wanted, place, writer)?;
    }
    Ok(true)
}

/// Remembers what was quantised into memory of the calls', after a launch that has not failed.
fn note_kept(handle: &Bound<'_, ProgramHandle>, prepared: SmallVec<[Prepared; 2]>, place: Place) -> Result<(), Failure> {
    let py = handle.py();
    for (linear, prepared) in prepared.into_iter().enumerate() {
        if let (Some(quantized), Some(_)) = (prepared.quantized, prepared.fresh)
            && let Some((weight, _)) = ProgramHandle::linear_at(handle, linear)?
        {
            let storage = quantized.memory.storage.clone_ref(py);
            let known = TracedWeight { record: quantized.record, storage, writer: place.stream };
            let former = weight.bind(py).try_borrow_mut()?.traced.replace(known);
            drop(former);
        }
    }
    Ok(())
}

/// Notes at a forward of a compiler's whether it is that of its region's first FP8 module, whose backward updates the scales.
#[pyfunction]
#[pyo3(signature = (program, call, /))]
pub(crate) fn traced_note_first(program: &Bound<'_, ProgramHandle>, call: &Bound<'_, TracedCall>) -> PyResult<()> {
    let (py, traced) = (program.py(), call.get());
    let state = state(py)?;
    if !traced.is_delayed() || !traced.any_grad() {
        return Ok(());
    }
    let is_repeated = state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? >= 0;
    if !is_repeated {
        let is_first = match traced.is_first {
            Some(is_first) => is_first,
            None => state.dispatcher(py)?.0.autocast.take_first_fp8_module(),
        };
        program.try_borrow_mut()?.was_first = is_first;
    }
    Ok(())
}

/// Gradients that a compiler's backward makes: of input, parameters and extra inputs, those that are new tensors. Whether
/// the gradients' scales are due, too: the region's first module has run its backward.
///
/// `saved` is what forward left to backward, `reads` the tensors that [`TracedCall`] names, `weights` the column layouts of
/// the quantised weights that it reads, `grads` gradients of output and extra outputs.
#[pyfunction]
#[pyo3(signature = (program, call, saved, reads, weights, grads, params, histories, scales, main_grads, /))]
#[expect(clippy::too_many_arguments, reason = "a Python function's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_backward<'py>(
    program: &Bound<'py, ProgramHandle>,
    call: &Bound<'py, TracedCall>,
    saved: Option<Bound<'py, PyAny>>,
    reads: Vec<Bound<'py, PyAny>>,
    weights: Vec<Bound<'py, PyAny>>,
    grads: Vec<Bound<'py, PyAny>>,
    params: Vec<Bound<'py, PyAny>>,
    histories: Vec<Bound<'py, PyAny>>,
    scales: Vec<Bound<'py, PyAny>>,
    main_grads: Vec<Bound<'py, PyAny>>,
) -> PyResult<(Vec<Bound<'py, PyAny>>, bool)> {
    let py = program.py();
    let state = state(py)?;
    let traced = call.get();
    let _region = traced.enter(py, state)?;
    let given = given_slots(state, &histories, &scales, false)?;
    let prepare = || -> Result<ProgramSaved, Failure> {
        let dy = grads.first().ok_or_else(|| Error::state(OP, "a backward without a gradient"))?;
        let rows = view_of(&state.reader, dy, "a gradient")?.rows();
        let _guard = state.guard(py, traced.key.device)?;
        let recipe = traced.region.as_ref().map(|(region, _)| &region.recipe);
        let compiled = compiled_for(state, program, &traced.key, recipe, &params)?;
        let sized = compiled.program.sized(&mut state.dispatcher(py)?.0, rows)?;
        let shape = [rows as i64, traced.key.cols as i64];
        let of = &compiled.program;
        let shapes = program.try_borrow_mut()?.shapes(py, &shape, of.out_cols(), of.extra_output_cols())?;
        let slots = slots_of(program, &given, false)?;
        let mut columns = weights.iter().peekable();
        let mut list = SmallVec::new();
        for (linear, slots) in (0..traced.key.linears.len()).zip(slots) {
            let layout = of.weight_layout(linear);
            let reads = traced.region.is_some() && of.reads_weight(linear);
            let has_col = layout.col_bytes != 0;
            let quantized = match columns.next_if(|_| reads) {
                Some(given) => {
                    let bytes = if has_col { layout.col_bytes } else { layout.row_bytes };
                    let view = view_of(&state.reader, given, "the quantised weight")?;
                    view.check_saved(OP, bytes, DType::U8, traced.key.device)?;
                    let held = Some(Arc::new(Held::alias(&state.reader, given)?));
                    let (row, col) = if has_col { (None, held) } else { (held, None) };
                    let memory = WeightMemory { row, col, storage: py.None() };
                    Some(Arc::new(KeptWeight::new(record_of(traced, layout), memory)))
                }
                None => None,
            };
            list.push(CallWeight { quantized, slots, version: None });
        }
        Ok(ProgramSaved {
            handle: program.clone().unbind(),
            shapes,
            weights: Mutex::new(list),
            extra_shapes: traced.extra_cols.iter().map(|&cols| vec![rows as i64, cols as i64]).collect(),
            params: params.iter().map(|param| param.clone().unbind()).collect(),
            joined: None,
            overwrite_main_grad: traced.overwrites_main_grad(),
            main_grads: Some(main_grads.iter().map(|grad| grad.clone().unbind()).collect()),
            updates_backward_scales: false,
            compiled,
            sized,
        })
    };
    let kept = prepare().map_err(|failure| named_by(program, failure))?;
    let defers = traced.key.linears.iter().any(|linear| linear.deferred);
    // What waits for `backward_dw` outlives the call, and the compiler's memory does not.
    let own = |tensor: Bound<'py, PyAny>| if defers { tensor.call_method0("clone") } else { Ok(tensor) };
    let none = || py.None().into_bound(py);
    // It was made for whole steps of rows.
    let narrow = |saved: Bound<'py, PyAny>| saved.call_method1("narrow", (0, 0, kept.sized.saved_bytes()));
    let saved = saved.map_or_else(|| Ok(none()), |saved| own(narrow(saved)?))?;
    let reads = reads.into_iter().map(own).collect::<PyResult<Vec<_>>>()?;
    let tensors: Vec<_> = std::iter::once(saved).chain(reads).collect();
    let tensors = PyTuple::new(py, tensors)?;
    let gradients = run(state, &kept, &tensors, &grads)?;
    let is_new = |port: Port, own: Port| port == own;
    let of = &kept.compiled.program;
    let mut list = Vec::new();
    if let Some(dx) = gradients.input.filter(|_| traced.key.input_grad) {
        list.push(if is_new(of.grad_input(), Port::GradInput) { dx } else { dx.call_method0("clone")? });
    }
    list.extend(gradients.params.into_iter().flatten());
    for (index, grad) in gradients.extras.into_iter().enumerate() {
        let Some(grad) = grad.filter(|_| traced.key.extras[index].1) else { continue };
        let is_own = is_new(of.grad_extras()[index], Port::GradExtra(index as u16));
        list.push(if is_own { grad } else { grad.call_method0("clone")? });
    }
    let is_last = traced.is_delayed() && program.try_borrow()?.was_first;
    Ok((list, is_last))
}

/// Updates scales that a graph brings, all of one recipe, from their histories: the end of a region inside of a graph.
#[pyfunction]
#[pyo3(signature = (histories, scales, recipe, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_update_scales(
    py: Python<'_>,
    histories: Vec<Bound<'_, PyAny>>,
    scales: Vec<Bound<'_, PyAny>>,
    recipe: &Bound<'_, NativeRecipe>,
) -> PyResult<()> {
    let state = state(py)?;
    let mut given = Vec::with_capacity(histories.len());
    for (history, scale) in histories.iter().zip(&scales) {
        let history = view_of(&state.reader, history, "amax_history").python()?;
        let scale = view_of(&state.reader, scale, "scale").python()?;
        given.push((history, scale));
    }
    let Some(device) = given.first().map(|(history, _)| history.device()) else { return Ok(()) };
    let _guard = state.guard(py, device)?;
    let place = Place { device, stream: state.reader.stream(py, device)? };
    update_given(&mut state.dispatcher(py)?.0, &recipe.get().0, place, &given).python()
}

/// A record for memory whose layout alone matters.
fn record_of(traced: &TracedCall, layout: te_fast_core::quant::value::WeightLayout) -> WeightRecord {
    WeightRecord {
        token: WeightToken { address: 0, version: None, dtype: traced.key.activation.into() },
        device: traced.key.device,
        layout,
        epoch: traced.key.epoch.unwrap_or(0),
        generation: 0,
        cache_epoch: 0,
        training: true,
        optimizer_steps: 0,
    }
}
