//! What a compiler decides once, where eager decides at every call: what wants a gradient, which region is in force, how
//! weights are kept. Sizes of results follow from it and the number of rows, so that the compiler can plan its memory.

use std::fmt::Write;
use std::sync::Arc;

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::program::{Port, Program, ProgramKey, SizedProgram};
use te_fast_core::quant::weight::Microbatch;
use te_fast_core::recipe::definition::Recipe;
use te_fast_core::recipe::region::{Former, Given, Region};

use crate::error::Failure;
use crate::graphs::OP;
use crate::program::check::check;
use crate::program::handle::{ProgramHandle, PyProgram, Tuples};
use crate::program::tensors::{Tensors, float, typed};
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

/// Rows by which the size of what backward needs is counted: every buffer's bytes are whole steps of them.
const STEP: usize = 256;

/// All that is to be known of a compiler's calls of a program, but for tensors and row counts.
#[pyclass(module = "te_fast._native", frozen)]
pub(crate) struct TracedCall {
    pub(super) key: ProgramKey,
    /// The region of its forward; none in high precision.
    pub(super) region: Option<(Region, Option<Given>)>,
    pub(super) microbatch: Microbatch,
    /// Whether the region of the call is one that the graph enters itself: then whether this is its first FP8 module.
    pub(super) is_first: Option<bool>,
    pub(super) overwrites_main_grad: bool,
    /// Columns of output and extra outputs.
    pub(super) widths: Vec<usize>,
    /// Bytes of what backward needs: for no rows, and for each step of rows.
    pub(super) saved: (usize, usize),
    /// Of each linear op, bytes of the row and the column layout of its weight.
    pub(super) weights: Vec<(usize, usize)>,
    /// Linear ops whose weight backward reads in FP8.
    pub(super) reads_weight: Vec<bool>,
    pub(super) reads: Vec<Port>,
    pub(super) extra_cols: Vec<usize>,
    pub(super) grad_dtypes: Vec<DType>,
    elsewhere: Elsewhere,
}

#[pymethods]
impl TracedCall {
    /// What tells calls apart, and the same in every process.
    #[getter]
    fn text(&self) -> String {
        let key = &self.key;
        let flag = |flag: bool| if flag { 'g' } else { '-' };
        let mut text = format!("{:x} {} {:?} {}", key.epoch.unwrap_or(0), key.cols, key.activation, key.device);
        // Writing to a string does not fail.
        let _ = write!(text, " {}{}|", u8::from(key.any_rows), flag(key.input_grad));
        for list in [&key.params, &key.extras] {
            for &(dtype, grad) in list {
                let _ = write!(text, "{dtype:?}{}", flag(grad));
            }
            text.push('|');
        }
        for call in &key.linears {
            let _ = write!(text, "{}{}", u8::from(call.deferred), u8::from(call.save_original_input));
        }
        let region = (self.microbatch, self.is_first, self.overwrites_main_grad);
        let made = (&self.elsewhere.fused, &self.elsewhere.fused_later, &self.widths, self.saved, &self.weights);
        let _ = write!(text, "{region:?}{made:?}");
        text
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
        self.elsewhere.fused.clone()
    }

    /// Parameters whose gradients wait for `backward_dw`.
    #[getter]
    fn deferred(&self) -> Vec<usize> {
        self.elsewhere.deferred.clone()
    }

    /// Those of the latter that go into `main_grad` then.
    #[getter]
    fn fused_later(&self) -> Vec<usize> {
        self.elsewhere.fused_later.clone()
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
    pub(super) fn overwrites_main_grad(&self) -> bool {
        self.microbatch == Microbatch::First || self.overwrites_main_grad
    }

    /// Whether the graph itself enters the region of the call.
    #[getter]
    fn is_inside(&self) -> bool {
        self.is_first.is_some()
    }

    /// Whether the call quantises with scales of delayed scaling.
    #[getter]
    pub(super) fn is_delayed(&self) -> bool {
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
    pub(super) fn any_grad(&self) -> bool {
        self.key.any_grad()
    }

    /// Weights are quantised at every call, and their column layouts are results of it.
    pub(super) fn passes_weights(&self) -> bool {
        self.any_grad() && self.microbatch == Microbatch::Unknown
    }

    pub(super) fn passing_weights(&self) -> impl Iterator<Item = usize> + '_ {
        let all = self.weights.iter().zip(&self.reads_weight);
        all.filter(|&(_, &reads)| reads && self.passes_weights())
            .map(|(&(row, col), _)| if col == 0 { row } else { col })
    }

    pub(super) fn saved_bytes(&self, rows: usize) -> usize {
        self.saved.0 + self.saved.1 * rows.div_ceil(STEP)
    }

    /// Puts the region of the call in force, if another one is.
    pub(super) fn enter<'a>(&self, py: Python<'a>, state: &'a State) -> PyResult<Entered<'a>> {
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
pub(super) struct Entered<'a> {
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
    let describe = || -> Result<TracedCall, Failure> {
        let state = state(x.py())?;
        let tensors = Tensors::read(state, x, &extras, &params)?;
        let (key, region) = key_of(state, handle, &tensors, &wants)?;
        let _guard = state.guard(x.py(), key.device)?;
        let recipe = region.as_ref().map(|(region, _)| &region.recipe);
        let sized = |rows| program_for(state, handle, (&key, rows), recipe, &params);
        let ((compiled, one), (_, two)) = (sized(STEP)?, sized(2 * STEP)?);
        let program = &compiled.program;
        {
            let handle = handle.try_borrow()?;
            check(x.py(), (&handle.chain, &handle.params), &tensors, tensors.x.rows(), program.widths())?;
        }
        if let Some(index) = program.written_extra_inputs().first() {
            let message = format!(
                "extra input {index} is written in place, which a traced graph does not show; pass in_place=False"
            );
            return Err(Error::unsupported(OP, message).into());
        }
        let elsewhere = Elsewhere::of(handle, program)?;
        let (one, two) = (one.saved_bytes(), two.saved_bytes());
        let linears = 0..key.linears.len();
        let bytes = |linear| {
            let layout = program.weight_layout(linear);
            (layout.row_bytes, layout.col_bytes)
        };
        Ok(TracedCall {
            widths: std::iter::once(program.out_cols()).chain(program.extra_output_cols().iter().copied()).collect(),
            saved: (2 * one - two, two - one),
            weights: linears.clone().filter(|_| region.is_some()).map(bytes).collect(),
            reads_weight: linears.map(|linear| program.reads_weight(linear)).collect(),
            reads: program.reads().to_vec(),
            extra_cols: (0..key.extras.len()).map(|index| program.cols_of_extra(index)).collect(),
            grad_dtypes: (0..key.params.len()).map(|param| program.grad_dtype(param).into()).collect(),
            microbatch: is_first_microbatch.into(),
            elsewhere,
            key,
            region,
            is_first,
            overwrites_main_grad,
        })
    };
    describe().map_err(|failure| named_by(handle, failure))
}

type InForce = Option<(Region, Option<Given>)>;

/// The key of such a call, and the region in force; none in high precision.
fn key_of(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    tensors: &Tensors<'_>,
    wants: &(bool, Vec<bool>, Vec<bool>),
) -> Result<(ProgramKey, InForce), Failure> {
    let py = handle.py();
    let (region, given, any_rows) = {
        let mut dispatcher = state.dispatcher(py)?;
        let region = *dispatcher.0.autocast.current();
        (region, dispatcher.0.autocast.given().cloned(), dispatcher.0.auto_pad)
    };
    let key = ProgramKey {
        epoch: region.enabled.then_some(region.epoch),
        cols: tensors.x.shape().last().map_or(1, |&cols| cols as usize),
        activation: float(&tensors.x, "the input")?,
        device: tensors.x.device(),
        any_rows,
        input_grad: wants.0,
        params: typed(&tensors.params, &wants.1, "a parameter")?,
        extras: typed(&tensors.extras, &wants.2, "an extra input")?,
        linears: handle.try_borrow()?.linear_calls(py)?.to_vec(),
    };
    Ok((key, region.enabled.then_some((region, given))))
}

/// Parameters whose gradients are no results of backward.
#[derive(Debug, Default)]
struct Elsewhere {
    /// Those that go into `main_grad`.
    fused: Vec<usize>,
    /// Those that wait for `backward_dw`.
    deferred: Vec<usize>,
    /// Those of the latter that go into `main_grad` then.
    fused_later: Vec<usize>,
}

impl Elsewhere {
    fn of(handle: &Bound<'_, ProgramHandle>, program: &Program) -> Result<Self, Failure> {
        let mut found = Self::default();
        for (linear, call) in program.key().linears.iter().enumerate() {
            let param = program.linear_param(linear);
            let Some((weight, _)) = ProgramHandle::linear_at(handle, linear)? else { break };
            if !program.key().params[param].1 {
                continue;
            }
            let fuses = weight.bind(handle.py()).try_borrow()?.fuse_wgrad_accumulation;
            if fuses {
                if call.deferred { found.fused_later.push(param) } else { found.fused.push(param) }
            }
            if call.deferred {
                found.deferred.push(param);
            }
        }
        Ok(found)
    }
}

#[cold]
pub(super) fn named_by(program: &Bound<'_, ProgramHandle>, failure: Failure) -> PyErr {
    let name = program.try_borrow().ok().map(|handle| handle.name.clone());
    failure.named(name.as_deref())
}

/// The compiled program of a key, sized for so many rows.
pub(super) fn program_for(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    (key, rows): (&ProgramKey, usize),
    recipe: Option<&Recipe>,
    params: &[Bound<'_, PyAny>],
) -> Result<(Arc<PyProgram>, Arc<SizedProgram>), Failure> {
    let py = handle.py();
    let chain = {
        let mut handle = handle.try_borrow_mut()?;
        if let Some(kept) = handle.programs.find(|program| program.key() == key) {
            let sized = kept.sized(&mut state.dispatcher(py)?.0, rows)?;
            return Ok((Arc::clone(kept.compiled()), sized));
        }
        handle.chain.clone()
    };
    let program = Arc::new(Program::new(&mut state.dispatcher(py)?.0, &chain, key.clone(), recipe)?);
    let tuples = |param| Ok(Tuples::new(py, view_of(&state.reader, param, "a parameter")?.shape())?);
    let compiled = Arc::new(PyProgram { params: params.iter().map(tuples).collect::<Result<_, Failure>>()?, program });
    let mut handle = handle.try_borrow_mut()?;
    let (kept, former) = handle.programs.insert(Arc::clone(&compiled));
    let sized = kept.sized(&mut state.dispatcher(py)?.0, rows);
    drop(handle);
    drop(former);
    Ok((compiled, sized?))
}
