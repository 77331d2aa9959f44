//! The decisions of a call that a trace takes once and eager code takes in every call: needed gradients, region, use of
//! weights. They and the number of rows give the sizes of results, so that the compiler can plan its memory.

use std::fmt::Write;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::program::{OuterKinds, Port, Program, ProgramKey, SizedProgram};
use te_fast_core::quant::weight::Microbatch;
use te_fast_core::recipe::definition::Recipe;
use te_fast_core::recipe::region::{Former, Given, Region};

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::kinds::{Described, GivenKind};
use crate::graphs::packing::Packing;
use crate::program::check::check;
use crate::program::handle::{ProgramHandle, PyProgram, Tuples};
use crate::program::tensors::{Tensors, float, typed, typed_extras};
use crate::torch::process::{State, state};

/// Rows of a step, in which the bytes for backward are counted; every buffer takes whole steps.
const STEP: usize = 256;

/// A part of a parameter; a parameter in one piece is its own part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) rows: i64,
    /// Whether it wants a gradient.
    pub(super) wanted: bool,
    /// Whether the `main_grad` of a parameter in one piece is overwritten in every microbatch.
    pub(super) overwrites: bool,
}

/// The parts of one parameter.
pub(super) type Parts = SmallVec<[Part; 1]>;

/// Description of compiled calls of a program, without tensors and row counts.
#[pyclass(module = "te_fast._native", frozen)]
pub(crate) struct TracedCall {
    pub(super) key: ProgramKey,
    /// The region of its forward; none in high precision.
    pub(super) region: Option<(Region, Option<Given>)>,
    pub(super) microbatch: Microbatch,
    /// For a region that the graph enters itself, whether this call is its first FP8 module; else none.
    pub(super) is_first: Option<bool>,
    /// Whether forward gets the graph's copies of scales, which its recomputation gets, too.
    pub(super) keeps_scales: bool,
    /// Columns of output and extra outputs.
    pub(super) widths: Vec<usize>,
    /// Bytes for backward without weights: for no rows, and for each step of rows.
    pub(super) saved: (usize, usize),
    /// The parts of each parameter.
    pub(super) parts: Vec<Parts>,
    /// Parameters that are quantised tensors, by number.
    pub(super) given: Vec<Option<GivenKind>>,
    /// For each linear op, bytes of the row and the column layout of its weight; none if the parameter itself is
    /// quantised.
    pub(super) weights: Vec<(usize, usize)>,
    /// Of each linear op, the parameter that is its weight.
    pub(super) weight_params: Vec<usize>,
    /// Linear ops whose weight backward reads in FP8.
    pub(super) reads_weight: Vec<bool>,
    /// Where the weights lie that the graph passes to backward; none if calls share their memory.
    pub(super) packing: Option<Packing>,
    pub(super) reads: Vec<Port>,
    pub(super) extra_cols: Vec<usize>,
    pub(super) grad_dtypes: Vec<DType>,
    pub(super) param_shapes: Vec<SmallVec<[i64; 4]>>,
    /// Places of output, extra outputs, and the gradients of input and extra inputs: new tensors, or other tensors.
    pub(super) outputs: Vec<Port>,
    pub(super) grad_input: Port,
    pub(super) grad_extras: Vec<Port>,
    pub(super) elsewhere: Elsewhere,
    text: String,
    pub(super) number: i64,
}

#[pymethods]
impl TracedCall {
    /// Text that identifies the call, equal in every process.
    #[getter]
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The text's number in graphs.
    #[getter]
    fn number(&self) -> i64 {
        self.number
    }

    /// Columns of the input.
    #[getter]
    fn cols(&self) -> usize {
        self.key.cols
    }

    /// Places of output and extra outputs, as (kind, number); `("new", 0)` for a new tensor.
    #[getter]
    fn outputs(&self) -> Vec<Place> {
        let own = |index| if index == 0 { Port::Output } else { Port::ExtraOutput(index - 1) };
        places_of(&self.outputs, own)
    }

    /// The same for the gradient of the input.
    #[getter]
    fn grad_input(&self) -> Place {
        place_of(self.grad_input)
    }

    /// The same for the gradients of the extra inputs.
    #[getter]
    fn grad_extras(&self) -> Vec<Place> {
        places_of(&self.grad_extras, Port::GradExtra)
    }

    /// Shapes of the parameters.
    #[getter]
    fn param_shapes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        self.param_shapes.iter().map(|shape| PyTuple::new(py, shape)).collect()
    }

    /// Columns of output and extra outputs.
    #[getter]
    fn widths(&self) -> Vec<usize> {
        self.widths.clone()
    }

    /// Bytes of the buffer for backward: for no rows, for each step of rows; and the rows of a step.
    #[getter]
    fn saved(&self) -> (usize, usize, usize) {
        (self.packed() + self.saved.0, self.saved.1, STEP)
    }

    /// Bytes of the row and the column layout of each linear op's weight; nothing in high precision.
    #[getter]
    fn weights(&self) -> Vec<(usize, usize)> {
        self.weights.clone()
    }

    /// Bytes of the buffers of the quantised weights, in order: if calls share them, of each linear op row layout and
    /// column layout, if it has them; else one for the layouts that backward does not read.
    #[getter]
    pub(super) fn memory(&self) -> Vec<usize> {
        if let Some(packing) = &self.packing {
            return Some(packing.once).filter(|&bytes| bytes != 0).into_iter().collect();
        }
        self.weights.iter().flat_map(|&(row, col)| [row, col]).filter(|&bytes| bytes != 0).collect()
    }

    /// The weights that backward reads in FP8 from tensors of their own, in the order of the linear ops: of such a buffer the
    /// number, the column layout where there is one, else the row layout, as ("memory", number), or ("param", number) of a
    /// parameter that is quantised.
    #[getter]
    fn weights_of_backward(&self) -> Vec<Place> {
        let (mut at, mut found) = (0, Vec::new());
        for (linear, (&(row, col), &reads)) in self.weights.iter().zip(&self.reads_weight).enumerate() {
            at += usize::from(row != 0) + usize::from(col != 0);
            let param = self.weight_params[linear];
            if reads && self.given[param].is_some() {
                found.push(("param", param));
            } else if reads && self.packing.is_none() {
                found.push(("memory", at - 1));
            }
        }
        found
    }

    /// Parameters that are quantised tensors.
    #[getter]
    fn given(&self) -> Vec<usize> {
        (0..self.given.len()).filter(|&param| self.given[param].is_some()).collect()
    }

    /// Whether quantised weights lie in memory that calls pass.
    #[getter]
    fn keeps_weights(&self) -> bool {
        self.memory_buffers() != 0 && !self.passes_weights()
    }

    /// The tensors of the call that backward reads, as (kind, number).
    #[getter]
    fn reads(&self) -> Vec<Place> {
        self.reads.iter().map(|&port| place_of(port)).collect()
    }

    /// Whether the gradient of the input is needed.
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

    /// Extra inputs whose gradient is needed.
    #[getter]
    fn extra_grads(&self) -> Vec<bool> {
        self.key.extras.iter().map(|&(_, grad)| grad).collect()
    }

    /// torch's types of the extra inputs, and of their gradients.
    #[getter]
    fn extra_dtypes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let state = state(py)?;
        Ok(self.key.extras.iter().map(|&(dtype, _)| state.torch.dtype(py, dtype).clone()).collect())
    }

    /// Columns of the extra inputs.
    #[getter]
    fn extra_widths(&self) -> Vec<usize> {
        self.extra_cols.clone()
    }

    /// The rows of each parameter's parts.
    #[getter]
    fn parts(&self) -> Vec<Vec<i64>> {
        self.parts.iter().map(|parts| parts.iter().map(|part| part.rows).collect()).collect()
    }

    /// Parts whose gradients backward makes, for each parameter.
    #[getter]
    fn part_grads(&self) -> Vec<Vec<bool>> {
        self.parts.iter().map(|parts| parts.iter().map(|part| part.wanted).collect()).collect()
    }

    /// Whether gradients go into `main_grad`s of parts, which are not in the graph.
    #[getter]
    pub(super) fn fuses_parts(&self) -> bool {
        !(self.elsewhere.fused_parts.is_empty() && self.elsewhere.begun.is_empty())
    }

    /// Parameters in one piece whose gradients go into `main_grad`.
    #[getter]
    fn fused(&self) -> Vec<usize> {
        self.elsewhere.fused.clone()
    }

    /// The same for parameters in parts.
    #[getter]
    fn fused_parts(&self) -> Vec<usize> {
        self.elsewhere.fused_parts.clone()
    }

    /// For each parameter, whether its `main_grad` is overwritten instead of added to.
    #[getter]
    fn overwritten(&self) -> Vec<bool> {
        (0..self.parts.len()).map(|param| self.overwrites_main_grad(param)).collect()
    }

    /// Parameters whose gradients are delayed until `backward_dw`.
    #[getter]
    fn deferred(&self) -> Vec<usize> {
        self.elsewhere.deferred.clone()
    }

    /// Delayed gradients that `backward_dw` adds to `main_grad`.
    #[getter]
    fn fused_later(&self) -> Vec<usize> {
        self.elsewhere.fused_later.clone()
    }

    /// Number of rows to append to a call.
    pub(super) fn missing_rows(&self, rows: usize) -> usize {
        self.region.as_ref().filter(|_| self.key.any_rows).map_or(0, |(region, _)| region.recipe.missing_rows(rows))
    }

    /// Whether the call quantises with scales of delayed scaling.
    #[getter]
    pub(super) fn is_delayed(&self) -> bool {
        self.region.as_ref().is_some_and(|(region, _)| region.recipe.is_delayed()) && !self.weights.is_empty()
    }
}

impl TracedCall {
    /// Whether each `main_grad` is overwritten instead of added to.
    pub(super) fn is_first_microbatch(&self) -> bool {
        self.microbatch == Microbatch::First
    }

    /// Whether the `main_grad` of a parameter in one piece is overwritten instead of added to.
    pub(super) fn overwrites_main_grad(&self, param: usize) -> bool {
        self.is_first_microbatch() || self.parts[param].iter().any(|part| part.overwrites)
    }

    /// Of each part of a quantised parameter that backward reads in FP8, whether it reads the column layout.
    pub(super) fn given_columns(&self) -> Vec<bool> {
        let of_parts = |param: usize| {
            let kind = self.given[param]?;
            Some(std::iter::repeat_n(kind.columnwise, self.parts[param].len()))
        };
        self.weights_that_backward_reads().filter_map(of_parts).flatten().collect()
    }

    /// The parameters that are weights which backward reads in FP8, in the order of the linear ops.
    pub(super) fn weights_that_backward_reads(&self) -> impl Iterator<Item = usize> + '_ {
        let in_fp8 = self.weights.len(); // none in high precision
        let read = self.weight_params.iter().zip(&self.reads_weight).take(in_fp8).filter(|(_, reads)| **reads);
        read.map(|(&param, _)| param)
    }

    /// Whether a parameter consists of several parts.
    pub(super) fn has_parts(&self) -> bool {
        self.parts.iter().any(|parts| parts.len() > 1)
    }

    /// Outputs that are new tensors, with the columns of each.
    pub(super) fn new_outputs(&self) -> impl Iterator<Item = (Port, usize)> + '_ {
        let own = |index: usize| if index == 0 { Port::Output } else { Port::ExtraOutput(index as u16 - 1) };
        let all = self.outputs.iter().zip(&self.widths).enumerate();
        all.filter(move |&(index, (&port, _))| port == own(index)).map(|(_, (&port, &cols))| (port, cols))
    }

    /// Gradients of extra inputs that are tensors of their own and wanted.
    pub(super) fn new_extra_grads(&self) -> impl Iterator<Item = (Port, usize)> + '_ {
        let all = self.grad_extras.iter().zip(&self.extra_cols).enumerate();
        all.filter(|&(index, (&port, _))| self.key.extras[index].1 && port == Port::GradExtra(index as u16))
            .map(|(_, (&port, &cols))| (port, cols))
    }

    /// Number of tensors that forward makes, including memory of kept weights.
    pub(super) fn made(&self) -> usize {
        self.new_outputs().count() + usize::from(self.has_saved()) + self.memory_buffers()
    }

    /// Whether the gradient of the input is a tensor of its own, and wanted.
    pub(super) fn makes_grad_input(&self) -> bool {
        self.key.input_grad && self.grad_input == Port::GradInput
    }

    /// Tensors that backward makes.
    pub(super) fn new_grads(&self) -> usize {
        usize::from(self.makes_grad_input()) + self.new_param_grads().count() + self.new_extra_grads().count()
    }

    /// Parameters whose gradients are results of backward.
    pub(super) fn new_param_grads(&self) -> impl Iterator<Item = usize> + '_ {
        let Elsewhere { fused, fused_parts, deferred, .. } = &self.elsewhere;
        let wanted = self.key.params.iter().enumerate().filter(|(_, (_, grad))| *grad).map(|(param, _)| param);
        wanted.filter(move |param| ![fused, fused_parts, deferred].iter().any(|list| list.contains(param)))
    }

    /// The same with the places of its weights, its text and its number.
    fn packed_and_numbered(mut self) -> Self {
        self.packing = self.passes_weights().then(|| Packing::of(&self.weights, &self.reads_weight));
        self.text = self.described();
        self.number = number_of(&self.text);
        self
    }

    fn described(&self) -> String {
        let key = &self.key;
        let flag = |flag: bool| if flag { 'g' } else { '-' };
        let mut text = format!("{:x} {} {:?} {}", key.epoch.unwrap_or(0), key.cols, key.activation, key.device);
        // Writing to a string does not fail.
        let _ = write!(text, " {}{}|", u8::from(key.any_rows), flag(key.input_grad));
        let params = key.params.iter().map(|&(dtype, grad)| (DType::from(dtype), grad)).collect();
        for list in [&params, &key.extras] {
            for &(dtype, grad) in list {
                let _ = write!(text, "{dtype:?}{}", flag(grad));
            }
            text.push('|');
        }
        for call in &key.linears {
            let _ = write!(text, "{}{}", u8::from(call.deferred), u8::from(call.save_original_input));
        }
        let region = (self.microbatch, self.is_first, self.keeps_scales);
        let Elsewhere { fused, fused_parts, fused_later, begun, .. } = &self.elsewhere;
        let made = (fused, fused_parts, fused_later, begun, &self.widths, self.saved, &self.weights);
        let places = (&self.outputs, self.grad_input, &self.grad_extras, &self.reads, &self.reads_weight);
        let _ = write!(text, "{region:?}{made:?}{places:?}{:?}{:?}", self.param_shapes, self.parts);
        if self.given.iter().any(Option::is_some) {
            let _ = write!(text, "{:?}", self.given);
        }
        text
    }

    pub(super) fn any_grad(&self) -> bool {
        self.key.any_grad()
    }

    /// Whether weights are quantised in every call, with their column layouts as results.
    pub(super) fn passes_weights(&self) -> bool {
        self.any_grad() && self.microbatch == Microbatch::Unknown
    }

    /// Whether Python runs a call: if it has no rows, or rows must be padded for its GEMMs.
    pub(super) fn is_pythons(&self, state: &State, py: Python<'_>, rows: usize) -> PyResult<bool> {
        let pads = state.dispatcher(py)?.0.auto_pad;
        Ok(rows == 0 || (pads && self.missing_rows(rows) != 0))
    }

    /// Buffers of quantised weights.
    pub(super) fn memory_buffers(&self) -> usize {
        match &self.packing {
            Some(packing) => usize::from(packing.once != 0),
            None => self.weights.iter().map(|&(row, col)| usize::from(row != 0) + usize::from(col != 0)).sum(),
        }
    }

    /// Bytes of weights in front of forward's buffer for backward.
    pub(super) fn packed(&self) -> usize {
        self.packing.as_ref().map_or(0, |packing| packing.saved)
    }

    /// Whether forward saves a buffer for backward.
    pub(super) fn has_saved(&self) -> bool {
        self.any_grad() && (self.saved != (0, 0) || self.packed() != 0)
    }

    pub(super) fn recipe(&self) -> Option<&Recipe> {
        self.region.as_ref().map(|(region, _)| &region.recipe)
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

/// The kind of a tensor of a call and its number among these.
type Place = (&'static str, usize);

fn place_of(port: Port) -> Place {
    match port {
        Port::Input => ("input", 0),
        Port::Extra(index) => ("extra", index.into()),
        Port::ExtraOutput(index) => ("output", index.into()),
        Port::Param(index) => ("param", index.into()),
        Port::GradOutput => ("grad", 0),
        Port::GradExtraOutput(index) => ("grad", usize::from(index) + 1),
        Port::GradExtra(index) => ("extra grad", index.into()),
        _ => NEW,
    }
}

/// A tensor that the call makes.
const NEW: Place = ("new", 0);

/// The place of each of these; `own` gives the port of a separate tensor.
fn places_of(ports: &[Port], own: impl Fn(u16) -> Port) -> Vec<Place> {
    let place = |(index, &port)| if port == own(index as u16) { NEW } else { place_of(port) };
    ports.iter().enumerate().map(place).collect()
}

/// A number that stands for a text in every process: FNV-1a, without its sign.
fn number_of(text: &str) -> i64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    (text.bytes().fold(0xcbf2_9ce4_8422_2325, step) >> 1) as i64
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

/// `is_first_microbatch`; whether this is the first FP8 module of a region that the graph enters itself, none for a region around
/// the graph; whether the graph keeps forward's scales.
type How = (Option<bool>, Option<bool>, bool);

/// Whether the input wants a gradient; for each part of each parameter its rows, whether it wants a gradient, and whether its
/// `main_grad` is overwritten in every microbatch; whether the extra inputs want a gradient.
type Wants = (bool, Vec<Vec<(i64, bool, bool)>>, Vec<bool>);

/// Describes calls of a program in the region in force: of inputs like `x` and `extras`, whose values do not matter.
///
/// `given` describes the parameters that are quantised tensors.
#[pyfunction]
#[pyo3(signature = (handle, x, extras, params, wants, how, given, /))]
#[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
pub(crate) fn traced_call<'py>(
    handle: &Bound<'py, ProgramHandle>,
    x: &Bound<'py, PyAny>,
    extras: Vec<Bound<'py, PyAny>>,
    params: Vec<Bound<'py, PyAny>>,
    wants: Wants,
    how: How,
    given: Vec<Option<Described>>,
) -> PyResult<TracedCall> {
    let describe = || -> Result<TracedCall, Failure> {
        let state = state(x.py())?;
        let tensors = Tensors::read(state, x, &extras, &params)?;
        let parts: Vec<Parts> = wants.1.iter().map(|parts| parts.iter().map(part_of).collect()).collect();
        let (key, region) = key_of(state, handle, &tensors, (wants.0, &parts, &wants.2))?;
        let _guard = state.guard(x.py(), key.device)?;
        let recipe = region.as_ref().map(|(region, _)| &region.recipe);
        let shapes: Vec<_> = tensors.params.iter().map(|param| param.shape().into()).collect();
        let sized = |rows| program_for(state, handle, (&key, rows), recipe, &shapes);
        let ((compiled, one), (_, two)) = (sized(STEP)?, sized(2 * STEP)?);
        let program = &compiled.program;
        {
            let handle = handle.try_borrow()?;
            check(x.py(), (&handle.chain, &handle.params), &tensors, tensors.x.rows(), program.widths())?;
        }
        refuse_written_inputs(program)?;
        let linears = 0..key.linears.len();
        let given = GivenKind::of_params(&given, program, recipe)?;
        let bytes = |linear| match (given[program.linear_param(linear)], program.weight_layout(linear)) {
            (Some(_), _) => (0, 0),
            (None, layout) => (layout.row_bytes, layout.col_bytes),
        };
        let call = TracedCall {
            widths: program.result_cols().collect(),
            saved: (2 * one.saved_bytes() - two.saved_bytes(), two.saved_bytes() - one.saved_bytes()),
            weights: linears.clone().filter(|_| region.is_some()).map(bytes).collect(),
            reads_weight: linears.clone().map(|linear| program.reads_weight(linear)).collect(),
            weight_params: linears.map(|linear| program.linear_param(linear)).collect(),
            reads: program.reads().to_vec(),
            extra_cols: (0..key.extras.len()).map(|index| program.cols_of_extra(index)).collect(),
            grad_dtypes: (0..key.params.len()).map(|param| program.grad_dtype(param).into()).collect(),
            param_shapes: shapes,
            outputs: std::iter::once(program.output()).chain(program.extra_outputs().iter().copied()).collect(),
            grad_input: program.grad_input(),
            grad_extras: program.grad_extras().to_vec(),
            microbatch: how.0.into(),
            elsewhere: Elsewhere::of(handle, program, how.0.into())?,
            parts,
            given,
            key,
            region,
            is_first: how.1,
            keeps_scales: how.2,
            packing: None,
            text: String::new(),
            number: 0,
        };
        Ok(call.packed_and_numbered())
    };
    describe().map_err(|failure| named_by(handle, failure))
}

fn refuse_written_inputs(program: &Program) -> Result<(), Error> {
    program.written_extra_inputs().first().map_or(Ok(()), |index| {
        let message =
            format!("extra input {index} is written in place, which a traced graph does not show; pass in_place=False");
        Err(Error::unsupported(OP, message))
    })
}

type InForce = Option<(Region, Option<Given>)>;

/// The key of such a call, and the region in force; none in high precision.
fn key_of(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    tensors: &Tensors<'_>,
    (wants_input, parts, wanted_extras): (bool, &[Parts], &[bool]),
) -> Result<(ProgramKey, InForce), Failure> {
    let py = handle.py();
    let (region, given, any_rows) = {
        let mut dispatcher = state.dispatcher(py)?;
        let region = *dispatcher.0.autocast.current();
        (region, dispatcher.0.autocast.given().cloned(), dispatcher.0.auto_pad)
    };
    let wanted: Vec<bool> = parts.iter().map(|parts| parts.iter().any(|part| part.wanted)).collect();
    let key = ProgramKey {
        epoch: region.enabled.then_some(region.epoch),
        cols: tensors.x.shape().last().map_or(1, |&cols| cols as usize),
        activation: float(&tensors.x, "the input")?,
        device: tensors.x.device(),
        any_rows,
        input_grad: wants_input,
        params: typed(&tensors.params, &wanted, "a parameter")?,
        extras: typed_extras(&tensors.extras, wanted_extras),
        linears: handle.try_borrow()?.linear_calls(py)?.to_vec(),
        outer: OuterKinds::default(),
    };
    Ok((key, region.enabled.then_some((region, given))))
}

/// Parameters whose gradients are not results of backward.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    /// Those of parameters in one piece that go into `main_grad`.
    pub(super) fused: Vec<usize>,
    /// Those that go into the `main_grad`s of a parameter's parts.
    pub(super) fused_parts: Vec<usize>,
    /// Those that wait for `backward_dw`.
    pub(super) deferred: Vec<usize>,
    /// Delayed gradients that `backward_dw` adds to `main_grad`.
    pub(super) fused_later: Vec<usize>,
    /// Delayed gradients of parts in the first microbatch: backward sets the `main_grad`s to zero.
    pub(super) begun: Vec<usize>,
}

impl Elsewhere {
    fn of(handle: &Bound<'_, ProgramHandle>, program: &Program, microbatch: Microbatch) -> Result<Self, Failure> {
        let mut found = Self::default();
        for (linear, call) in program.key().linears.iter().enumerate() {
            let param = program.linear_param(linear);
            let Some((weight, _)) = ProgramHandle::linear_at(handle, linear)? else { break };
            if !program.key().params[param].1 {
                continue;
            }
            let in_parts = fuses_parts(handle, param)?;
            let fuses = in_parts || weight.bind(handle.py()).try_borrow()?.fuse_wgrad_accumulation;
            match (fuses, call.deferred) {
                (true, true) => found.fused_later.push(param),
                (true, false) if in_parts => found.fused_parts.push(param),
                (true, false) => found.fused.push(param),
                (false, _) => {}
            }
            if in_parts && call.deferred && microbatch == Microbatch::First {
                found.begun.push(param);
            }
            if call.deferred {
                found.deferred.push(param);
            }
        }
        Ok(found)
    }
}

/// Whether gradients go into the `main_grad`s of a parameter's parts.
fn fuses_parts(handle: &Bound<'_, ProgramHandle>, param: usize) -> Result<bool, Failure> {
    let handle = handle.try_borrow()?;
    Ok(handle.params.get(param).is_some_and(|param| param.fuses && !param.parts.is_empty()))
}

fn part_of(&(rows, wanted, overwrites): &(i64, bool, bool)) -> Part {
    Part { rows, wanted, overwrites }
}

#[cold]
pub(super) fn named_by(program: &Bound<'_, ProgramHandle>, failure: Failure) -> PyErr {
    let name = program.try_borrow().ok().map(|handle| handle.name.clone());
    failure.named(name.as_deref())
}

/// The compiled program of a key, sized for a number of rows.
pub(super) fn program_for(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    (key, rows): (&ProgramKey, usize),
    recipe: Option<&Recipe>,
    params: &[SmallVec<[i64; 4]>],
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
    let params = params.iter().map(|shape| Tuples::new(py, shape)).collect::<PyResult<_>>()?;
    let compiled = Arc::new(PyProgram::new(program, params));
    let mut handle = handle.try_borrow_mut()?;
    let (kept, former) = handle.programs.insert(Arc::clone(&compiled));
    let sized = kept.sized(&mut state.dispatcher(py)?.0, rows);
    drop(handle);
    drop(former);
    Ok((compiled, sized?))
}
