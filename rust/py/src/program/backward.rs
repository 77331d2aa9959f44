//! Backward of a program: torch calls it once per forward, with the gradients of output and extra outputs.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::DType;
use te_fast_core::program::{Bindings, FlowName, Outer, Port, Program, ProgramKey, SizedProgram};
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::hooks::{OTHERS, hooks};
use crate::program::buffers::Buffers;
use crate::program::check::check_grad;
use crate::program::forward::{CallWeights, Output, viewed};
use crate::program::handle::{ProgramHandle, PyProgram, Shapes, Tuples};
use crate::program::main_grad::{FusedParts, MainGrad, MainGrads, after_main_grad, main_grad};
use crate::program::part_grads::of_parts;
use crate::program::parts::Joined;
use crate::program::tensors::{Objects, Optional};
use crate::program::transfers::Transfers;
use crate::program::weight::{WaitingGrad, WaitingOperands, WaitingRows};
use crate::program::weight_memory::weight_buffer;
use crate::tensor::given::{GivenWeight, dequantized, given, nominal_view};
use crate::tensor::handed::{HandedValue, Made, Stamp};
use crate::tensor::value::QuantizedValue;
use crate::torch::operand::{readable, saved_tensor};
use crate::torch::process::{State, state};
use crate::torch::reader::view_of;

const OP: &str = "ops";

/// Data of a forward that its backward needs, beside the saved tensors.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct ProgramSaved {
    pub(crate) handle: Py<ProgramHandle>,
    pub(crate) compiled: Arc<PyProgram>,
    pub(crate) sized: Arc<SizedProgram>,
    pub(crate) shapes: Arc<Shapes>,
    /// Taken by the graph's last backward.
    pub(crate) weights: Mutex<CallWeights>,
    /// Shapes of the extra inputs.
    pub(crate) extra_shapes: SmallVec<[SmallVec<[i64; 4]>; 2]>,
    /// The parameters, for their `main_grad` and to see whether they were changed since; None for a copy of parts.
    pub(crate) params: SmallVec<[Py<PyAny>; 6]>,
    /// The parts of joined parameters.
    pub(crate) joined: Option<Py<Joined>>,
    /// Memory that the caller has passed.
    pub(crate) buffers: Option<Py<Buffers>>,
    /// `is_first_microbatch=True`: `main_grad` is overwritten.
    pub(crate) overwrite_main_grad: bool,
    /// A quantised input.
    pub(crate) stamp: Option<Stamp>,
    /// The object whose quantizer makes a gradient in FP8.
    pub(crate) owner: Py<PyAny>,
    /// This chain was the first FP8 module of its region: its backward is the last, and updates the scales.
    pub(crate) updates_backward_scales: bool,
}

#[pymethods]
impl ProgramSaved {
    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.visit(&visit)
    }

    /// Whether the FP8 weights that backward reads still exist.
    #[getter]
    fn holds_weights(&self) -> bool {
        !self.weights.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Whether the backward updates the backward scales.
    #[getter]
    fn updates_backward_scales(&self) -> bool {
        self.updates_backward_scales
    }
}

impl ProgramSaved {
    /// Shows Python's garbage collector what it refers to.
    pub(crate) fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.handle)?;
        visit.call(&self.owner)?;
        self.joined.iter().try_for_each(|joined| visit.call(joined))?;
        self.buffers.iter().try_for_each(|buffers| visit.call(buffers))?;
        self.params.iter().try_for_each(|param| visit.call(param))
    }

    /// The program's name in messages.
    fn name(&self, py: Python<'_>) -> Option<String> {
        self.handle.bind(py).try_borrow().ok().map(|handle| handle.name.clone())
    }

    /// torch's rule for saved tensors, applied to a quantised input: it must not have changed since forward.
    fn check_input(&self) -> Result<(), Failure> {
        let reads = |port: &Port| matches!(port, Port::Input | Port::Beside(Outer::Input, _));
        let is_read = self.compiled.program.reads().iter().any(reads);
        if is_read && self.stamp.as_ref().is_some_and(Stamp::is_stale) {
            let message = "the quantised input was written between forward and backward; write it after backward";
            return Err(Error::state(OP, message).into());
        }
        Ok(())
    }

    /// The quantised weights of the forward. The graph's last backward takes and frees them, before the optimizer
    /// steps, although the graph's nodes may live on with an output.
    fn weights(&self, state: &State, py: Python<'_>) -> Result<CallWeights, Failure> {
        let retains = match &state.torch.retains_graph {
            Some(retains) => retains.bind(py).call0()?.is_truthy()?,
            None => true,
        };
        let mut kept = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let weights = if retains { kept.clone() } else { std::mem::take(&mut *kept) };
        drop(kept);
        if weights.len() != self.sized.deferred_bytes().len() {
            let message = "backward ran through this graph a second time, and the first one freed its FP8 weights; pass retain_graph=True to the first";
            return Err(Error::state(OP, message).into());
        }
        Ok(weights)
    }

    /// After a backward that failed.
    fn give_back(&self, weights: CallWeights) {
        let mut kept = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_empty() {
            *kept = weights;
        }
    }
}

/// The destination of a parameter's gradient.
enum ParamGrad<'py> {
    None,
    New(Bound<'py, PyAny>),
    Main(MainGrad<'py>),
    /// The adjacent `main_grad`s of the parts of a stack, as one.
    Parts(MainGrad<'py>),
    /// A stack in the type of its parts' separate `main_grad`s, which is added to them, so that it is rounded once.
    Apart(MainGrad<'py>),
    /// The gradient of a linear op's output, for later.
    Waiting(Bound<'py, PyAny>),
}

type ParamGrads<'py> = SmallVec<[ParamGrad<'py>; 6]>;

/// Gradients of one backward: input, parameters, extra inputs.
pub(crate) struct Grads<'py> {
    pub(crate) input: Option<Bound<'py, PyAny>>,
    pub(crate) params: Optional<'py>,
    /// The `main_grad`s of parts, by parameter.
    pub(crate) fused: FusedParts<'py>,
    pub(crate) extras: Optional<'py>,
}

/// `apply` of the autograd node: gradients of (input, parameters..., extra inputs..., program, owner,
/// `is_first_microbatch`, version).
#[pyfunction]
#[pyo3(signature = (ctx, *grads))]
pub(crate) fn program_backward<'py>(
    ctx: &Bound<'py, PyAny>,
    grads: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = ctx.py();
    let state = state(py)?;
    if state.torch.is_grad_enabled.bind(py).call0()?.is(PyBool::new(py, true)) {
        let arguments: Vec<_> = std::iter::once(ctx.clone()).chain(grads.iter()).collect();
        return hooks(py)?.backward_once.bind(py).call1(PyTuple::new(py, arguments)?);
    }
    let kept = ctx.getattr(intern!(py, "te_saved"))?.cast_into::<ProgramSaved>()?;
    let kept = kept.get();
    // Check this before torch does, whose message would name bytes instead of the input.
    kept.check_input().map_err(|failure| failure.named(kept.name(py).as_deref()))?;
    let tensors = ctx.getattr(intern!(py, "saved_tensors"))?.cast_into::<PyTuple>()?;
    let grads = gradients(state, kept, &tensors, &grads.iter().collect::<Objects<'_>>())?;
    let none = || py.None().into_bound(py);
    let mut all: SmallVec<[_; 12]> = SmallVec::new();
    all.push(grads.input.unwrap_or_else(none));
    all.extend(grads.params.into_iter().map(|grad| grad.unwrap_or_else(none)));
    all.extend(grads.extras.into_iter().map(|grad| grad.unwrap_or_else(none)));
    all.extend((0..OTHERS).map(|_| none()));
    Ok(PyTuple::new(py, all)?.into_any())
}

/// Runs a backward; the gradients are those of the tensors that autograd got in forward, parameters or their parts.
pub(crate) fn gradients<'py>(
    state: &State,
    kept: &ProgramSaved,
    tensors: &Bound<'py, PyTuple>,
    grads: &[Bound<'py, PyAny>],
) -> PyResult<Grads<'py>> {
    let py = tensors.py();
    let mut found = run(state, kept, tensors, grads, Transfers::default())?;
    if let Some(joined) = &kept.joined {
        let (given, overwrite) = ((found.params, &found.fused), kept.overwrite_main_grad);
        found.params = of_parts((state, py), joined.get(), given, overwrite)
            .map_err(|failure| failure.named(kept.name(py).as_deref()))?;
    }
    Ok(found)
}

/// Runs a backward and, if this node is the region's last, the update of the backward scales.
pub(crate) fn run<'py>(
    state: &State,
    kept: &ProgramSaved,
    tensors: &Bound<'py, PyTuple>,
    grads: &[Bound<'py, PyAny>],
    transfers: Transfers<'py>,
) -> PyResult<Grads<'py>> {
    let py = tensors.py();
    let weights = kept.weights(state, py).map_err(|failure| failure.named(kept.name(py).as_deref()))?;
    let (compiled, sized) = (Arc::clone(&kept.compiled), Arc::clone(&kept.sized));
    let mut call = BackwardCall { state, kept, compiled, sized, tensors, weights, handed: None, transfers };
    let gradients = match call.run(grads) {
        Ok(gradients) => gradients,
        Err(failure) => {
            kept.give_back(call.weights);
            return Err(failure.named(kept.name(py).as_deref()));
        }
    };
    if kept.updates_backward_scales {
        hooks(py)?.update_backward_scales.bind(py).call0()?;
    }
    Ok(gradients)
}

/// A program, and its form for a number of rows.
type Compiled = (Arc<PyProgram>, Arc<SizedProgram>);

struct BackwardCall<'a, 'py> {
    state: &'a State,
    kept: &'a ProgramSaved,
    /// The forward's program, or the matching program for a gradient in FP8.
    compiled: Arc<PyProgram>,
    sized: Arc<SizedProgram>,
    tensors: &'a Bound<'py, PyTuple>,
    weights: CallWeights,
    /// The quantised gradient of the output, if the GEMMs read it.
    handed: Option<HandedValue>,
    /// Rows of the gradient that arrive beside the launches.
    transfers: Transfers<'py>,
}

/// The call's own tensors that backward reads, by place.
pub(crate) struct Read<'py> {
    pub(crate) saved: Option<Bound<'py, PyAny>>,
    tensors: SmallVec<[(Port, Bound<'py, PyAny>); 4]>,
}

impl<'py> Read<'py> {
    pub(crate) fn new(
        state: &State,
        program: &Program,
        sized: &SizedProgram,
        tensors: &Bound<'py, PyTuple>,
    ) -> Result<Self, Failure> {
        let device = program.key().device;
        let read = |tensor: Bound<'py, PyAny>, extent| {
            // The view of a quantised parameter, which forward has saved as it is.
            let tensor = match given(state, &tensor) {
                Some(value) => dequantized(&tensor, &value)?,
                None => tensor,
            };
            saved_tensor(state, OP, tensor, extent, device)
        };
        let saved = Some(tensors.get_item(0)?).filter(|saved| !saved.is_none());
        let saved = saved.map(|saved| read(saved, (sized.saved_bytes(), DType::U8))).transpose()?;
        let places = program.reads().iter().zip(sized.read_extents());
        let tensors = places
            .zip(tensors.iter().skip(1))
            .map(|((&place, &(elements, dtype)), tensor)| Ok((place, read(tensor, (elements, dtype))?)))
            .collect::<Result<_, Failure>>()?;
        Ok(Self { saved, tensors })
    }

    /// Sets all addresses.
    pub(crate) fn bind<'a>(&'a self, state: &State, call: &mut Bindings<'_, 'a>) -> te_fast_core::Result<()> {
        call.set(Port::Saved, state.pointer(self.saved.as_ref())?);
        for (port, tensor) in &self.tensors {
            call.set(*port, state.pointer(Some(tensor))?);
        }
        Ok(())
    }
}

impl<'py> BackwardCall<'_, 'py> {
    fn run(&mut self, grads: &[Bound<'py, PyAny>]) -> Result<Grads<'py>, Failure> {
        let (py, state, kept) = (self.tensors.py(), self.state, self.kept);
        self.check_weights(py)?;
        kept.check_input()?;
        let mut read = Objects::new();
        for (index, grad) in grads.iter().enumerate() {
            read.push(self.read_grad(index, grad)?);
        }
        let grads = read;
        let compiled = Arc::clone(&self.compiled);
        let program = &compiled.program;
        let key = program.key();
        let _guard = state.guard(py, key.device)?;
        let place = Place { device: key.device, stream: state.reader.stream(py, key.device)? };
        let activation = DType::from(key.activation);
        let input = self.grad_input(py, program)?;
        let extras = self.extra_grads(py)?;
        let (targets, fused) = self.param_grads(py, place)?;
        self.launch(place, &grads, input.as_ref(), &extras, &targets)?;
        let alias = |place: Port| -> Option<Bound<'py, PyAny>> {
            match place {
                Port::GradOutput => grads.first().cloned(),
                Port::GradExtraOutput(index) => grads.get(usize::from(index) + 1).cloned(),
                Port::GradExtra(index) => extras[usize::from(index)].clone(),
                _ => None,
            }
        };
        let input = match input {
            None => None,
            Some(Output::High(input)) => Some(input),
            Some(Output::InFp8(made)) => {
                let quantizer = compiled.quantizer(kept.owner.bind(py), made.kind(), true)?;
                Some(made.tensor(state, activation, kept.shapes.input.size.bind(py), &quantizer)?)
            }
        };
        Ok(Grads {
            input: input.or_else(|| alias(program.grad_input())),
            extras: program
                .grad_extras()
                .iter()
                .zip(&kept.extra_shapes)
                .map(|(&place, shape)| alias(place).map(|grad| shaped(state, grad, shape)).transpose())
                .collect::<Result<_, _>>()?,
            params: self.finish(py, targets)?,
            fused,
        })
    }

    /// Memory for the gradient of the input, if it is a separate tensor.
    fn grad_input(&self, py: Python<'py>, program: &Program) -> Result<Option<Output<'py>>, Failure> {
        let (state, kept, key) = (self.state, self.kept, program.key());
        let activation = DType::from(key.activation);
        let tuples = &kept.shapes.input;
        Ok(match (program.grad_input(), program.grad_input_kind()) {
            (Port::GradInput, Some(kind)) => {
                Some(Output::InFp8(Made::allocate(state, py, (key.device, kind), &tuples.shape)?))
            }
            (Port::GradInput, None) => {
                let (size, stride) = (tuples.size.bind(py), tuples.stride.bind(py));
                let buffer = kept.buffers.as_ref().and_then(|buffers| buffers.get().grad_input.as_ref());
                Some(Output::High(match buffer {
                    Some(buffer) => viewed(state, buffer.bind(py), (size, stride), activation)?,
                    None => state.empty(py, key.device, size, stride, activation)?,
                }))
            }
            _ => None,
        })
    }

    /// A gradient in a form that kernels read: quantised if the GEMMs read FP8, else dequantised.
    fn read_grad(&mut self, index: usize, grad: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>, Failure> {
        let state = self.state;
        let rows = self.sized.rows();
        let dense = match given(state, grad) {
            None => readable(state, grad, "a gradient")?.unwrap_or_else(|| grad.clone()),
            Some(value) => {
                if index == 0 && QuantizedValue::snapshot(&value)?.part(grad.py(), false).is_some() {
                    let view = nominal_view(state, grad, &value)?;
                    let handed = HandedValue::read(state, &view, &value, "a gradient")?;
                    if self.compiled.program.takes_grad(handed.kind) {
                        check_grad(&self.compiled.program, rows, index, &view)?;
                        self.take_grad(grad.py(), handed)?;
                        return Ok(grad.clone());
                    }
                }
                // No product reads it, so its values are read at once.
                std::mem::take(&mut self.transfers).wait()?;
                dequantized(grad, &value)?
            }
        };
        check_grad(&self.compiled.program, rows, index, &view_of(&state.reader, &dense, "a gradient")?)?;
        Ok(dense)
    }

    /// Chooses the backward that reads a gradient in FP8, of the same chain and for the same forward.
    fn take_grad(&mut self, py: Python<'py>, handed: HandedValue) -> Result<(), Failure> {
        let own = &self.kept.compiled;
        let mut key = own.program.key().clone();
        key.outer.grad_output = Some(handed.kind);
        let found = self.found(py, &key)?;
        let (compiled, sized) = if let Some(found) = found { found } else { self.compiled_for(py, key)? };
        if compiled.program.reads() != own.program.reads() || sized.saved_bytes() != self.kept.sized.saved_bytes() {
            return Err(Error::state(OP, "two backwards of one forward read other things; report this").into());
        }
        (self.compiled, self.sized, self.handed) = (compiled, sized, Some(handed));
        Ok(())
    }

    /// The program of a key that the chain keeps.
    fn found(&self, py: Python<'py>, key: &ProgramKey) -> Result<Option<Compiled>, Failure> {
        let mut handle = self.kept.handle.bind(py).try_borrow_mut()?;
        let Some(kept) = handle.programs.find(|program| program.key() == key) else { return Ok(None) };
        let sized = kept.sized(&mut self.state.dispatcher(py)?.0, self.kept.sized.rows())?;
        Ok(Some((Arc::clone(kept.compiled()), sized)))
    }

    /// Compiles the program of a new key.
    #[cold]
    fn compiled_for(&self, py: Python<'py>, key: ProgramKey) -> Result<Compiled, Failure> {
        let (state, own, handle) = (self.state, &self.kept.compiled, self.kept.handle.bind(py));
        let chain = handle.try_borrow()?.chain.clone();
        let shapes = own.params.iter().map(|tuples| Tuples::new(py, &tuples.shape)).collect::<PyResult<_>>()?;
        let program = {
            let mut dispatcher = state.dispatcher(py)?;
            Arc::new(Program::new(&mut dispatcher.0, &chain, key, own.program.recipe())?)
        };
        let made = Arc::new(PyProgram::new(program, shapes));
        let mut handle = handle.try_borrow_mut()?;
        let (kept, former) = handle.programs.insert(Arc::clone(&made));
        let sized = kept.sized(&mut state.dispatcher(py)?.0, self.kept.sized.rows());
        drop(handle);
        drop(former);
        Ok((made, sized?))
    }

    /// torch's rule for saved tensors: the weight must not have changed since forward. The FP8 weight in the same
    /// memory may have been made from other values since.
    fn check_weights(&self, py: Python<'py>) -> Result<(), Failure> {
        if let Some(joined) = &self.kept.joined {
            return self.check_parts(py, joined.get());
        }
        let program = &self.kept.compiled.program;
        for (linear, weight) in self.weights.iter().enumerate() {
            let is_quantized = weight.quantized.is_some() || weight.is_given;
            let (true, true, Some(known)) = (is_quantized, program.reads_weight(linear), weight.version) else {
                continue;
            };
            let param = self.kept.params[program.linear_param(linear)].bind(py);
            if weight.is_given {
                let now = given(self.state, param).map(|value| QuantizedValue::stamp(&value)).transpose()?.flatten();
                if now != Some(known) {
                    let message = "the weight was modified by an inplace operation, or written otherwise, between forward and backward; modify it after backward";
                    return Err(Error::state(OP, message).into());
                }
                continue;
            }
            let version = param.getattr(intern!(py, "_version"))?.extract::<u64>()?;
            if version != known {
                let message = format!(
                    "the weight was modified by an inplace operation between forward and backward (it is at version {version}, expected {known}); modify it after backward"
                );
                return Err(Error::state(OP, message).into());
            }
        }
        Ok(())
    }

    /// The same for weights of parts, whose versions torch does not compare.
    fn check_parts(&self, py: Python<'py>, joined: &Joined) -> Result<(), Failure> {
        let program = &self.kept.compiled.program;
        let reads = self.weights.iter().enumerate().any(|(linear, weight)| match weight.quantized {
            Some(_) => program.reads_weight(linear),
            None if weight.is_given => program.reads_weight(linear),
            None => program.reads().contains(&Port::Param(program.linear_param(linear) as u16)),
        });
        if reads && joined.was_changed(self.state, py)? {
            let message = "a part of the weight was modified by an inplace operation between forward and backward; modify it after backward";
            return Err(Error::state(OP, message).into());
        }
        Ok(())
    }

    fn extra_grads(&self, py: Python<'py>) -> Result<Optional<'py>, Failure> {
        let (program, state) = (&self.kept.compiled.program, self.state);
        let mut list = Optional::new();
        for (index, &place) in program.grad_extras().iter().enumerate() {
            let own = place == Port::GradExtra(index as u16);
            let make = || {
                let dtype = program.key().extras[index].0;
                state.empty_sized(py, program.key().device, &self.kept.extra_shapes[index], dtype)
            };
            list.push(own.then(make).transpose()?);
        }
        Ok(list)
    }

    /// The destinations of the parameters' gradients, and the `main_grad`s of parts.
    fn param_grads(&self, py: Python<'py>, place: Place) -> Result<(ParamGrads<'py>, FusedParts<'py>), Failure> {
        let (kept, state) = (self.kept, self.state);
        let program = &kept.compiled.program;
        let mut number = 0;
        let (mut list, mut fused) = (ParamGrads::new(), FusedParts::new());
        for (param, &(_, wanted)) in program.key().params.iter().enumerate() {
            let next = ProgramHandle::linear_at(kept.handle.bind(py), number)?;
            let linear = next.filter(|(_, of)| *of == param).map(|(weight, _)| (number, weight));
            number += usize::from(linear.is_some());
            if !wanted {
                list.push(ParamGrad::None);
                continue;
            }
            if let Some((number, weight)) = linear {
                if let Some(quantized) = &self.weights[number].quantized {
                    quantized.note_gradient();
                }
                let deferred = self.sized.deferred_bytes()[number];
                if deferred != 0 {
                    list.push(ParamGrad::Waiting(state.bytes(py, place.device, deferred)?));
                    continue;
                }
                if weight.bind(py).try_borrow()?.fuse_wgrad_accumulation {
                    let (param, overwrite) = (kept.params[param].bind(py), kept.overwrite_main_grad);
                    let grad = main_grad(state, param, overwrite)?;
                    list.push(ParamGrad::Main(grad));
                    continue;
                }
                if let Some(mut grads) = self.main_grads(py, place, param)? {
                    let target = match grads.take_whole() {
                        Some(whole) => Some(ParamGrad::Parts(whole)),
                        None => self.grad_of_parts(place, param, grads.dtype())?.map(ParamGrad::Apart),
                    };
                    fused.push((param, grads));
                    if let Some(target) = target {
                        list.push(target);
                        continue;
                    }
                }
            }
            let tuples = &kept.compiled.params[param];
            let dtype = program.grad_dtype(param).into();
            let grad = state.empty(py, place.device, tuples.size.bind(py), tuples.stride.bind(py), dtype)?;
            list.push(ParamGrad::New(grad));
        }
        Ok((list, fused))
    }

    /// The `main_grad`s of the parts of a weight, if its gradient goes there.
    fn main_grads(&self, py: Python<'py>, place: Place, param: usize) -> Result<Option<MainGrads<'py>>, Failure> {
        let kept = self.kept;
        let Some(joined) = &kept.joined else { return Ok(None) };
        let Some((share, parts, trained)) = joined.get().shares().nth(param).filter(|(share, ..)| share.fuses()) else {
            return Ok(None);
        };
        let sizes = (share.rows.as_slice(), kept.compiled.params[param].shape.as_slice(), place.device);
        MainGrads::of(self.state, (parts, trained), sizes, (py, kept.overwrite_main_grad)).map(Some)
    }

    /// Memory for the gradient of parts in the one type of their `main_grad`s, if it differs from the weight's type.
    fn grad_of_parts(
        &self,
        place: Place,
        param: usize,
        dtype: Option<DType>,
    ) -> Result<Option<MainGrad<'py>>, Failure> {
        let (state, py) = (self.state, self.tensors.py());
        let own = DType::from(self.kept.compiled.program.grad_dtype(param));
        let Some(dtype) = dtype.filter(|&dtype| dtype != own) else { return Ok(None) };
        let tuples = &self.kept.compiled.params[param];
        let grad = state.empty(py, place.device, tuples.size.bind(py), tuples.stride.bind(py), dtype)?;
        let address = state.pointer(Some(&grad))?.address();
        Ok(Some(MainGrad { grad, dtype, address, accumulate: false }))
    }

    fn launch(
        &self,
        place: Place,
        grads: &[Bound<'py, PyAny>],
        input: Option<&Output<'py>>,
        extras: &[Option<Bound<'py, PyAny>>],
        targets: &[ParamGrad<'py>],
    ) -> Result<(), Failure> {
        let (py, state) = (self.tensors.py(), self.state);
        let program = &self.compiled.program;
        let sized = &self.sized;
        let read = Read::new(state, program, sized, self.tensors)?;
        let given = self.given_weights(py, place)?;
        let (bytes, transfers) = (sized.backward_scratch(), &self.transfers);
        let external = transfers.external(place, bytes)?;
        let scratch = state.optional_bytes(py, place.device, external.bytes())?;
        let memory = external.memory(state.pointer(scratch.as_ref())?);
        let mut script = None;
        loop {
            let mut table = state.tables.take();
            let mut call = program.call(&mut table);
            read.bind(state, &mut call)?;
            self.bind_grads(&mut call, grads, input, extras)?;
            for (linear, weight) in self.weights.iter().enumerate() {
                if let Some(quantized) = &weight.quantized {
                    call.set_weight(linear, &weight_buffer(quantized));
                }
                if let Some(Some(given)) = given.get(linear) {
                    let [row, col] = given.layouts(state)?;
                    call.set_layouts(linear, row, col);
                }
                call.set_slots(linear, &weight.slots());
            }
            self.set_param_grads(&mut call, targets)?;
            let mut dispatcher = state.dispatcher(py)?;
            self.set_main_grads(&mut call, &mut dispatcher.0, targets)?;
            let pause = if transfers.is_empty() {
                sized.run_backward(&mut dispatcher.0.lane(place, bytes, memory)?, call)?;
                None
            } else {
                let flow = (&**sized, FlowName::Backward, place.device);
                let script = transfers.script(state, &mut dispatcher.0, flow, &mut script)?;
                sized.resume(script, &mut dispatcher.0.lane(place, bytes, memory)?, call)?
            };
            if pause.is_none() {
                for slots in self.weights.iter().filter_map(|weight| weight.slots.as_ref()) {
                    dispatcher.0.autocast.mark_ran(&slots.backward);
                }
            }
            drop(dispatcher);
            state.tables.give_back(table);
            let Some(pause) = pause else { return Ok(()) };
            transfers.act(pause, None)?;
        }
    }

    /// Gradients of outputs and inputs.
    fn bind_grads<'a>(
        &'a self,
        call: &mut Bindings<'_, 'a>,
        grads: &'a [Bound<'py, PyAny>],
        input: Option<&'a Output<'py>>,
        extras: &'a [Option<Bound<'py, PyAny>>],
    ) -> Result<(), Failure> {
        let state = self.state;
        for (index, grad) in grads.iter().enumerate() {
            let port = if index == 0 { Port::GradOutput } else { Port::GradExtraOutput(index as u16 - 1) };
            match &self.handed {
                Some(handed) if index == 0 => handed.bind((Outer::GradOutput, &mut *call)),
                _ => call.set(port, state.pointer(Some(grad))?),
            }
        }
        match input {
            Some(Output::High(input)) => call.set(Port::GradInput, state.pointer(Some(input))?),
            Some(Output::InFp8(made)) => made.bind(state, (Outer::GradInput, &mut *call))?,
            None => {}
        }
        for (index, grad) in extras.iter().enumerate() {
            call.set(Port::GradExtra(index as u16), state.pointer(grad.as_ref())?);
        }
        Ok(())
    }

    /// The layouts of quantised parameters that backward reads.
    fn given_weights(&self, py: Python<'py>, place: Place) -> Result<SmallVec<[Option<GivenWeight<'py>>; 2]>, Failure> {
        let (state, program) = (self.state, &self.kept.compiled.program);
        let mut list = SmallVec::new();
        for (linear, weight) in self.weights.iter().enumerate() {
            if !weight.is_given || !program.reads_weight(linear) {
                list.push(None);
                continue;
            }
            let param = self.kept.params[program.linear_param(linear)].bind(py);
            let Some(value) = given(state, param) else {
                let message = "the weight was quantised in forward, and is no quantised tensor in backward";
                return Err(Error::state(OP, message).into());
            };
            let nominal = nominal_view(state, param, &value)?;
            let layout = program.weight_layout(linear);
            list.push(Some(GivenWeight::of_backward(state, &value, &layout, (place, &nominal))?));
        }
        Ok(list)
    }

    /// The linear op whose weight a parameter is.
    fn linear_of(&self, param: usize) -> Option<usize> {
        (0..self.weights.len()).find(|&linear| self.kept.compiled.program.linear_param(linear) == param)
    }

    /// The destinations of the parameters' gradients.
    fn set_param_grads<'a>(&self, call: &mut Bindings<'_, 'a>, targets: &'a [ParamGrad<'py>]) -> Result<(), Failure> {
        for (param, target) in targets.iter().enumerate() {
            let port = Port::GradParam(param as u16);
            match (target, self.linear_of(param)) {
                (ParamGrad::New(grad), _) => call.set(port, self.state.pointer(Some(grad))?),
                (ParamGrad::Main(main) | ParamGrad::Parts(main) | ParamGrad::Apart(main), _) => {
                    call.set(port, self.state.pointer(Some(&main.grad))?);
                }
                (ParamGrad::Waiting(grad), Some(linear)) => {
                    call.set_deferred(linear, self.state.pointer(Some(grad))?);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The products of gradients that go into the caller's buffers.
    fn set_main_grads(
        &self,
        call: &mut Bindings<'_, '_>,
        dispatcher: &mut Dispatcher,
        targets: &[ParamGrad<'py>],
    ) -> Result<(), Failure> {
        let (program, sized) = (&self.compiled.program, &self.sized);
        for (param, target) in targets.iter().enumerate() {
            let linear = self.linear_of(param);
            if let (ParamGrad::Main(main) | ParamGrad::Parts(main) | ParamGrad::Apart(main), Some(linear)) =
                (target, linear)
            {
                let kind = (main.dtype, main.accumulate);
                let plan = program.weight_grad_plan(dispatcher, sized.rows(), linear, kind, main.address)?;
                call.set_weight_grad(linear, plan);
            }
        }
        Ok(())
    }

    /// Autograd's gradients of the parameters.
    fn finish(&self, py: Python<'py>, targets: ParamGrads<'py>) -> Result<Optional<'py>, Failure> {
        let kept = self.kept;
        let mut list = Optional::new();
        for (param, target) in targets.into_iter().enumerate() {
            list.push(match target {
                ParamGrad::None | ParamGrad::Parts(_) => None,
                ParamGrad::New(grad) => Some(grad),
                ParamGrad::Apart(main) => Some(main.grad),
                ParamGrad::Main(_) => after_main_grad(self.state, kept.params[param].bind(py))?,
                ParamGrad::Waiting(grad) => {
                    let handle = kept.handle.bind(py).try_borrow()?;
                    let linear = handle.chain.linear_params().iter().position(|&of| of == param).unwrap_or(0);
                    let (program, sized) = (Arc::clone(&self.compiled.program), Arc::clone(&self.sized));
                    let (saved, grad) = (self.tensors.clone().unbind(), grad.unbind());
                    let operands = WaitingOperands::Kept(WaitingRows { program, sized, linear, saved, grad });
                    let waiting = WaitingGrad { operands, overwrite_main_grad: kept.overwrite_main_grad };
                    let weight = handle.weights[linear].clone_ref(py);
                    drop(handle);
                    let mut weight = weight.bind(py).try_borrow_mut()?;
                    weight.waiting.push_back(waiting);
                    let fuses = weight.fuse_wgrad_accumulation;
                    drop(weight);
                    if fuses { after_main_grad(self.state, kept.params[param].bind(py))? } else { None }
                }
            });
        }
        Ok(list)
    }
}

/// The gradient in the shape of its tensor: an extra input may have other leading dimensions than the input.
fn shaped<'py>(state: &State, grad: Bound<'py, PyAny>, shape: &[i64]) -> Result<Bound<'py, PyAny>, Failure> {
    if view_of(&state.reader, &grad, "a gradient")?.shape() == shape {
        return Ok(grad);
    }
    Ok(grad.call_method1("view", (shape.to_vec(),))?)
}
