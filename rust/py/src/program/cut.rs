//! Two programs and a function of torch between them, with one autograd node.
//!
//! The second program reads the input of the first as an extra input: a residual connection around both. The first
//! returns that input as an extra output, so that its backward adds both gradients of the input.
//!
//! Autograd does not see inside of the node. The function is therefore an object with a backward of its own:
//! `run(x, trains)` returns its result, tensors to save and any object, and `grad(object, tensors, grad)` returns the
//! gradient of `x`. Where the launches of the function are known, its `repeated` is the [`RepeatedAttention`] that makes
//! them, and its `split` begins with cosines and sines or None; then a call does not run Python between the programs.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::launch::trace::Recording;
use te_fast_core::quant::weight::Microbatch;
use te_fast_core::recipe::region::Region;

use crate::attention::repeated::{Memory, RepeatedAttention};
use crate::direct::rope::WaveTensors;
use crate::error::named;
use crate::hooks::hooks;
use crate::program::backward::{ProgramSaved, gradients};
use crate::program::entry::{in_region_of_last_forward, kept};
use crate::program::forward::{Call, Done};
use crate::program::handle::{OutsideFp8, ProgramHandle};
use crate::program::parts::{Joined, present};
use crate::program::tensors::{Objects, Tensors, requires_grad};
use crate::torch::process::{State, state};

const OP: &str = "cut_apply";

/// A program and the object that enters its regions.
type Owned<'py> = (Bound<'py, ProgramHandle>, Bound<'py, PyAny>);

/// One of the two programs in a call.
#[derive(Debug)]
struct Half {
    program: Py<ProgramHandle>,
    owner: Py<PyAny>,
    /// Whole parameters.
    params: SmallVec<[Py<PyAny>; 6]>,
    joined: Option<Py<Joined>>,
}

impl Half {
    /// The program with its present parameters. None if Python must cast, pad, warn, or report a mismatch.
    fn of<'py>(
        state: &State,
        (program, owner): &Owned<'py>,
        x: &Bound<'py, PyAny>,
        (region, is_second): (&Region, bool),
    ) -> PyResult<Option<Self>> {
        let py = x.py();
        let (last_epoch, outside, cols) = {
            let handle = program.try_borrow()?;
            let cols = if is_second { None } else { handle.chain.input_cols() };
            (handle.last_region.as_ref().map(|region| region.epoch), handle.outside_fp8, cols)
        };
        if region.enabled && last_epoch != Some(region.epoch) {
            if region.recipe.is_custom() {
                return Ok(None);
            }
            owner.call_method0(intern!(py, "_enter_region"))?;
        } else if !region.enabled && (region.calibrating || outside != OutsideFp8::Program) {
            return Ok(None);
        }
        let Some((joined, params)) = present(state, program, region.enabled)? else { return Ok(None) };
        if !Tensors::read(state, x, &[], &params).is_ok_and(|tensors| tensors.are_of_one_kind(cols)) {
            return Ok(None);
        }
        let (program, owner) = (program.clone().unbind(), owner.clone().unbind());
        let joined = joined.map(Bound::unbind);
        Ok(Some(Self { program, owner, params: params.into_iter().map(Bound::unbind).collect(), joined }))
    }

    fn wholes<'py>(&self, py: Python<'py>) -> Objects<'py> {
        self.params.iter().map(|param| param.bind(py).clone()).collect()
    }

    /// The tensors that autograd gets.
    fn edges(&self) -> SmallVec<[&Py<PyAny>; 8]> {
        match &self.joined {
            Some(joined) => joined.get().edges().collect(),
            None => self.params.iter().collect(),
        }
    }

    fn trains(&self, py: Python<'_>) -> PyResult<bool> {
        for param in &self.params {
            if requires_grad(param.bind(py))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.program)?;
        visit.call(&self.owner)?;
        self.joined.iter().try_for_each(|joined| visit.call(joined))?;
        self.params.iter().try_for_each(|param| visit.call(param))
    }
}

/// A call: its programs with their parameters, and the function between them.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct CutCall {
    first: Half,
    second: Half,
    between: Py<PyAny>,
    microbatch: Microbatch,
}

#[pymethods]
impl CutCall {
    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.first.visit(&visit)?;
        self.second.visit(&visit)?;
        visit.call(&self.between)
    }
}

/// Data of a forward that its backward needs, beside the saved tensors.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct CutSaved {
    /// None if neither the input nor a parameter of the first program needs a gradient.
    first: Option<ProgramSaved>,
    second: ProgramSaved,
    between: Py<PyAny>,
    /// The object that `between` keeps; what made the launches in its place, if something did.
    kept: Py<PyAny>,
    /// Saved tensors of the first program and of the function.
    counts: [usize; 2],
    /// Tensors of the first program that autograd has got.
    edges: usize,
}

#[pymethods]
impl CutSaved {
    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.first.iter().try_for_each(|first| first.visit(&visit))?;
        self.second.visit(&visit)?;
        visit.call(&self.between)?;
        visit.call(&self.kept)
    }
}

/// Runs two programs and a function between them on a plain tensor. None if the call must go through Python, in which
/// case nothing has run.
#[pyfunction]
#[pyo3(signature = (first, second, x, between, is_first_microbatch=None, /))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 extracts tuples by value")]
pub(crate) fn cut_apply<'py>(
    first: Owned<'py>,
    second: Owned<'py>,
    x: &Bound<'py, PyAny>,
    between: &Bound<'py, PyAny>,
    is_first_microbatch: Option<bool>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = x.py();
    let state = state(py)?;
    if !state.torch.is_plain(x)
        || !state.torch.is_unobserved(py)?
        || state.torch.is_autocast_enabled.bind(py).call0()?.is_truthy()?
    {
        return Ok(None);
    }
    let rows = {
        let Ok(Some(view)) = state.reader.read(x) else { return Ok(None) };
        if view.numel() == 0 || !view.is_contiguous() {
            return Ok(None);
        }
        view.rows()
    };
    // The second program runs last, in this node or in a forward by layers: its region is the last forward's.
    in_region_of_last_forward(state, &second.0, || {
        // The region says which rows are padded; backward repeats a forward where it is over.
        if state.dispatcher(py)?.0.rows_to_pad(rows) != 0 {
            return Ok(None);
        }
        let region = *state.dispatcher(py)?.0.autocast.current();
        let (Some(first), Some(second)) =
            (Half::of(state, &first, x, (&region, false))?, Half::of(state, &second, x, (&region, true))?)
        else {
            return Ok(None);
        };
        let call = CutCall { first, second, between: between.clone().unbind(), microbatch: is_first_microbatch.into() };
        let grad_mode = state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true));
        if grad_mode && (requires_grad(x)? || call.first.trains(py)? || call.second.trains(py)?) {
            let mut arguments: SmallVec<[Bound<'py, PyAny>; 16]> = SmallVec::new();
            arguments.push(x.clone());
            for half in [&call.first, &call.second] {
                arguments.extend(half.edges().into_iter().map(|edge| edge.bind(py).clone()));
            }
            arguments.push(Bound::new(py, call)?.into_any());
            return hooks(py)?.apply_cut.bind(py).call1(PyTuple::new(py, arguments)?).map(Some);
        }
        // A forward that is recomputed later with gradients is fused as in the recomputation, so that the bits are equal.
        let recomputes = !grad_mode && state.dispatcher(py)?.0.autocast.recomputes();
        let needs = Needs { halves: [recomputes; 2], input: recomputes, grad_mode };
        run(state, &call, x, &needs).map(|(y, _)| Some(y))
    })
}

/// What needs gradients.
struct Needs {
    /// Of the first program, its parameters or its input; of the second, its parameters.
    halves: [bool; 2],
    input: bool,
    /// torch's grad mode where the call was made.
    grad_mode: bool,
}

/// What the parts of a call leave for backward.
struct Left<'py> {
    first: (Option<ProgramSaved>, Bound<'py, PyTuple>),
    second: (ProgramSaved, Bound<'py, PyTuple>),
    tensors: Bound<'py, PyTuple>,
    kept: Bound<'py, PyAny>,
}

/// Runs all parts; with gradients on, returns what backward needs.
fn run<'py>(
    state: &State,
    cut: &CutCall,
    x: &Bound<'py, PyAny>,
    needs: &Needs,
) -> PyResult<(Bound<'py, PyAny>, Option<Left<'py>>)> {
    let py = x.py();
    let [of_first, of_second] = needs.halves;
    let saves = needs.grad_mode && (of_first || of_second);
    let forward = |half: &Half, x: &Bound<'py, PyAny>, extras: &[Bound<'py, PyAny>], grads: (bool, bool, bool)| {
        let (program, owner, params) = (half.program.bind(py), half.owner.bind(py), half.wholes(py));
        let mut call = Call::new(state, (program, owner), x, (extras, &params), (cut.microbatch, None))
            .of_parts(half.joined.as_ref().map(|joined| joined.bind(py).clone()));
        let (own, of_input, of_extras) = grads;
        call.wants(own, of_input, SmallVec::from_elem(of_extras, extras.len()), needs.grad_mode);
        let mut done = call.run()?;
        let left = if saves && own { Some(left(&call, &mut done)?) } else { None };
        PyResult::Ok((done.y, left))
    };
    let (middle, first) = forward(&cut.first, x, &[], (of_first, of_first && needs.input, false))?;
    let (middle, tensors, kept) = run_between(state, cut.between.bind(py), middle, saves && of_first)?;
    let wants = (of_first || of_second, of_first, needs.input);
    let (y, second) = forward(&cut.second, &middle, std::slice::from_ref(x), wants)?;
    let left = second.map(|second| {
        let first = first.map_or_else(|| (None, PyTuple::empty(py)), |(saved, tensors)| (Some(saved), tensors));
        Left { first, second, tensors, kept }
    });
    Ok((y, left))
}

/// Runs the function between the programs: its result, tensors to save, and what its backward gets beside them.
#[inline]
fn run_between<'py>(
    state: &State,
    between: &Bound<'py, PyAny>,
    x: Bound<'py, PyAny>,
    trains: bool,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>, Bound<'py, PyAny>)> {
    let py = x.py();
    let repeated = between.getattr(intern!(py, "repeated"))?;
    if let Ok(repeated) = repeated.cast::<RepeatedAttention>() {
        let attention = repeated.get();
        let is_recorded = state.dispatcher(py)?.0.trace.recording() != Recording::Off;
        if attention.trains() == trains && !is_recorded && attention.takes(state, &x) {
            let attended = attention.forward(state, &x, waves_of(between)?.as_ref(), Memory::OfStream)?;
            let saved = attended.saved(py)?;
            return Ok((attended.context, saved, repeated.clone().into_any()));
        }
    }
    between.call_method1(intern!(py, "run"), (x, trains))?.extract()
}

/// The cosines and sines of the function between the programs.
fn waves_of<'py>(between: &Bound<'py, PyAny>) -> PyResult<Option<WaveTensors<'py>>> {
    between.getattr(intern!(between.py(), "split"))?.get_item(0)?.extract()
}

/// The gradient of the argument of [`run_between`].
fn grad_between<'py>(
    state: &State,
    saved: &CutSaved,
    tensors: Bound<'py, PyTuple>,
    grad: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = grad.py();
    let (between, kept) = (saved.between.bind(py), saved.kept.bind(py));
    if let Ok(attention) = kept.cast::<RepeatedAttention>() {
        return attention.get().backward(state, &tensors, &grad, waves_of(between)?.as_ref(), Memory::OfStream);
    }
    between.call_method1(intern!(py, "grad"), (kept, tensors, grad))
}

fn left<'py>(call: &Call<'_, 'py>, done: &mut Done<'py>) -> PyResult<(ProgramSaved, Bound<'py, PyTuple>)> {
    let tensors = done.to_save(call)?;
    Ok((kept(call, done)?, tensors))
}

/// Forward of the autograd function: called by torch with gradients off; `arguments` are the input, the tensors of both
/// programs that autograd gets, and the call.
#[pyfunction]
#[pyo3(signature = (ctx, *arguments))]
pub(crate) fn cut_autograd_forward<'py>(
    ctx: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = ctx.py();
    let state = state(py)?;
    let x = &arguments.get_item(0)?;
    let cut = arguments.get_item(arguments.len() - 1)?.cast_into::<CutCall>()?;
    let cut = cut.get();
    let input = requires_grad(x)?;
    let halves = [input || cut.first.trains(py)?, cut.second.trains(py)?];
    let (y, left) = run(state, cut, x, &Needs { halves, input, grad_mode: true })?;
    let Some(Left { first, second, tensors, kept }) = left else {
        return Err(named(&Error::state(OP, "a call without gradients has an autograd node; report this"), None));
    };
    let all: SmallVec<[_; 24]> = first.1.iter().chain(tensors.iter()).chain(second.1.iter()).collect();
    state.torch.save_for_backward(ctx, PyTuple::new(py, all)?)?;
    let saved = CutSaved {
        counts: [first.1.len(), tensors.len()],
        first: first.0,
        second: second.0,
        between: cut.between.clone_ref(py),
        kept: kept.unbind(),
        edges: cut.first.edges().len(),
    };
    ctx.setattr(intern!(py, "te_saved"), Bound::new(py, saved)?)?;
    Ok(y)
}

/// `apply` of the autograd node: gradients of the arguments of [`cut_autograd_forward`].
#[pyfunction]
#[pyo3(signature = (ctx, grad))]
pub(crate) fn cut_backward<'py>(ctx: &Bound<'py, PyAny>, grad: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    let py = ctx.py();
    let state = state(py)?;
    if state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true)) {
        return Ok(hooks(py)?.cut_backward_once.bind(py).call1((ctx, grad))?.cast_into()?);
    }
    let saved = ctx.getattr(intern!(py, "te_saved"))?.cast_into::<CutSaved>()?;
    let saved = saved.get();
    let tensors = ctx.getattr(intern!(py, "saved_tensors"))?.cast_into::<PyTuple>()?;
    let [of_first, of_between] = saved.counts;
    let behind = of_first + of_between;
    let second =
        gradients(state, &saved.second, &tensors.get_slice(behind, tensors.len()), std::slice::from_ref(grad))?;
    let residual = second.extras.into_iter().next().flatten();
    let (input, params) = match (&saved.first, second.input) {
        (Some(first), Some(middle)) => {
            let own = tensors.get_slice(of_first, behind);
            let middle = grad_between(state, saved, own, middle)?;
            // Without a gradient of the input, that of the residual connection is not read.
            let residual = residual.unwrap_or_else(|| grad.clone());
            let first = gradients(state, first, &tensors.get_slice(0, of_first), &[middle, residual])?;
            (first.input, first.params)
        }
        _ => (residual, SmallVec::from_elem(None, saved.edges)),
    };
    let all = std::iter::once(input).chain(params).chain(second.params).chain(std::iter::once(None));
    let none = || py.None().into_bound(py);
    PyTuple::new(py, all.map(|grad| grad.unwrap_or_else(none)).collect::<SmallVec<[_; 16]>>())
}
