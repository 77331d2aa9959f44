//! Backward of a program: torch calls it once per forward, with the gradients of output and extra outputs.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};
use te_fast_core::Error;
use te_fast_core::dispatch::{Dispatcher, Place};
use te_fast_core::gemm::GemmPlan;
use te_fast_core::kernel::DevPtr;
use te_fast_core::program::{Bindings, Place as Where, Program, Weights};
use te_fast_core::tensor::DType;

use crate::error::Failure;
use crate::linear::hooks;
use crate::linear_backward::{MainGrad, after_main_grad, main_grad};
use crate::linear_run::{readable, saved_tensor};
use crate::program::{Compiled, ProgramHandle, Shapes, WaitingGrad, WaitingRows};
use crate::program_check::check_grad;
use crate::program_run::CallWeight;
use crate::program_tensors::weight_arguments;
use crate::state::{State, state};
use crate::tensor::view_of;

const OP: &str = "ops";

/// What a backward needs of its forward, beside the saved tensors.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct ProgramSaved {
    pub(crate) handle: Py<ProgramHandle>,
    pub(crate) compiled: Arc<Compiled>,
    pub(crate) shapes: Arc<Shapes>,
    pub(crate) weights: Vec<CallWeight>,
    /// Shapes of the extra inputs.
    pub(crate) extra_shapes: Vec<Vec<i64>>,
    /// The parameters, for their `main_grad` and to see whether they were changed since.
    pub(crate) params: Vec<Py<PyAny>>,
    /// `is_first_microbatch=True`: `main_grad` is overwritten.
    pub(crate) overwrite_main_grad: bool,
    /// This chain was the first FP8 module of its region: its backward is the last, and updates the scales.
    pub(crate) updates_backward_scales: bool,
}

#[pymethods]
impl ProgramSaved {
    /// Whether the backward updates the backward scales.
    #[getter]
    fn updates_backward_scales(&self) -> bool {
        self.updates_backward_scales
    }
}

/// Where a parameter's gradient goes.
enum ParamGrad<'py> {
    None,
    New(Bound<'py, PyAny>),
    Main(MainGrad<'py>),
    /// The gradient of a linear op's output, for later.
    Waiting(Bound<'py, PyAny>),
}

/// Gradients of one backward: input, parameters, extra inputs.
pub(crate) struct Grads<'py> {
    pub(crate) input: Option<Bound<'py, PyAny>>,
    pub(crate) params: Vec<Option<Bound<'py, PyAny>>>,
    pub(crate) extras: Vec<Option<Bound<'py, PyAny>>>,
}

/// `apply` of the autograd node: gradients of (input, parameters..., extra inputs..., handle, owner, bits).
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
        return py
            .import(intern!(py, "te_fast.pytorch._ops"))?
            .call_method1(intern!(py, "program_backward_once"), PyTuple::new(py, arguments)?);
    }
    let tensors = ctx.getattr(intern!(py, "saved_tensors"))?.cast_into::<PyTuple>()?;
    let kept = ctx.getattr(intern!(py, "te_saved"))?.cast_into::<ProgramSaved>()?;
    let list: Vec<Bound<'py, PyAny>> = grads.iter().collect();
    let grads = run(state, kept.get(), &tensors, &list)?;
    let none = || py.None().into_bound(py);
    let mut all = Vec::with_capacity(grads.params.len() + grads.extras.len() + 4);
    all.push(grads.input.unwrap_or_else(none));
    all.extend(grads.params.into_iter().map(|grad| grad.unwrap_or_else(none)));
    all.extend(grads.extras.into_iter().map(|grad| grad.unwrap_or_else(none)));
    all.extend([none(), none(), none()]);
    Ok(PyTuple::new(py, all)?.into_any())
}

/// Runs a backward and, where this node is the region's last, the update of the backward scales.
pub(crate) fn run<'py>(
    state: &State,
    kept: &ProgramSaved,
    tensors: &Bound<'py, PyTuple>,
    grads: &[Bound<'py, PyAny>],
) -> PyResult<Grads<'py>> {
    let py = tensors.py();
    let call = BackwardCall { state, kept, tensors };
    let gradients = call.run(grads).map_err(|failure| {
        let name = kept.handle.bind(py).try_borrow().ok().map(|handle| handle.name.clone());
        failure.named(name.as_deref())
    })?;
    if kept.updates_backward_scales {
        hooks(py)?.update_backward_scales.bind(py).call0()?;
    }
    Ok(gradients)
}

struct BackwardCall<'a, 'py> {
    state: &'a State,
    kept: &'a ProgramSaved,
    tensors: &'a Bound<'py, PyTuple>,
}

/// The call's own tensors as backward reads them, by place.
pub(crate) struct Read<'py> {
    pub(crate) saved: Option<Bound<'py, PyAny>>,
    tensors: Vec<(Where, Bound<'py, PyAny>)>,
}

impl<'py> Read<'py> {
    pub(crate) fn new(state: &State, program: &Program, tensors: &Bound<'py, PyTuple>) -> Result<Self, Failure> {
        let device = program.key().device;
        let read = |tensor, extent| saved_tensor(state, OP, tensor, extent, device);
        let saved = Some(tensors.get_item(0)?).filter(|saved| !saved.is_none());
        let saved = saved.map(|saved| read(saved, (program.saved_bytes(), DType::U8))).transpose()?;
        let places = program.reads().iter().zip(program.read_extents());
        let tensors = places
            .zip(tensors.iter().skip(1))
            .map(|((&place, &(elements, dtype)), tensor)| Ok((place, read(tensor, (elements, dtype.into()))?)))
            .collect::<Result<_, Failure>>()?;
        Ok(Self { saved, tensors })
    }

    pub(crate) fn pointer(&self, state: &State, place: Where) -> te_fast_core::Result<DevPtr<'_>> {
        let found = self.tensors.iter().find(|(at, _)| *at == place);
        state.pointer(found.map(|(_, tensor)| tensor))
    }
}

impl<'py> BackwardCall<'_, 'py> {
    fn run(&self, grads: &[Bound<'py, PyAny>]) -> Result<Grads<'py>, Failure> {
        let (py, state, kept) = (self.tensors.py(), self.state, self.kept);
        let program = &kept.compiled.program;
        let key = program.key();
        self.check_weights(py)?;
        let grads: Vec<Bound<'py, PyAny>> = grads
            .iter()
            .map(|grad| Ok(readable(state, grad, "a gradient")?.unwrap_or_else(|| grad.clone())))
            .collect::<PyResult<_>>()?;
        for (index, grad) in grads.iter().enumerate() {
            check_grad(program, index, &view_of(&state.reader, grad, "a gradient")?)?;
        }
        let _guard = state.guard(py, key.device)?;
        let place = Place { device: key.device, stream: state.reader.stream(py, key.device)? };
        let activation = DType::from(key.activation);
        let input = match program.grad_input() {
            Where::GradInput => {
                let tuples = &kept.shapes.input;
                Some(state.empty(py, key.device, tuples.size.bind(py), tuples.stride.bind(py), activation)?)
            }
            _ => None,
        };
        let extras = self.extra_grads(py)?;
        let targets = self.param_grads(py, place)?;
        self.launch(place, &grads, input.as_ref(), &extras, &targets)?;
        let alias = |place: Where| -> Option<Bound<'py, PyAny>> {
            match place {
                Where::GradOutput => grads.first().cloned(),
                Where::GradExtraOutput(index) => grads.get(usize::from(index) + 1).cloned(),
                Where::GradExtra(index) => extras[usize::from(index)].clone(),
                _ => None,
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
        })
    }

    /// torch's rule for what backward reads: it must be what forward read. The quantised weight may have been made
    /// anew in the same memory since, from other values.
    fn check_weights(&self, py: Python<'py>) -> Result<(), Failure> {
        let name = intern!(py, "_version"); // before anything is borrowed
        let handle = self.kept.handle.bind(py).try_borrow()?;
        for (linear, (weight, &param)) in self.kept.weights.iter().zip(handle.chain.linear_params()).enumerate() {
            let (true, true, Some(known)) =
                (weight.quantized.is_some(), self.kept.compiled.program.reads_weight(linear), weight.version)
            else {
                continue;
            };
            let version = self.kept.params[param].bind(py).getattr(name)?.extract::<u64>()?;
            if version != known {
                let message = format!(
                    "the weight was modified by an inplace operation between forward and backward (it is at version {version}, expected {known}); modify it after backward"
                );
                return Err(Error::state(OP, message).into());
            }
        }
        Ok(())
    }

    fn extra_grads(&self, py: Python<'py>) -> Result<Vec<Option<Bound<'py, PyAny>>>, Failure> {
        let (program, state) = (&self.kept.compiled.program, self.state);
        let mut list = Vec::with_capacity(program.grad_extras().len());
        for (index, &place) in program.grad_extras().iter().enumerate() {
            let own = place == Where::GradExtra(index as u16);
            let make = || {
                let dtype = program.key().extras[index].0.into();
                state.empty_sized(py, program.key().device, &self.kept.extra_shapes[index], dtype)
            };
            list.push(own.then(make).transpose()?);
        }
        Ok(list)
    }

    fn param_grads(&self, py: Python<'py>, place: Place) -> Result<Vec<ParamGrad<'py>>, Failure> {
        let (kept, state) = (self.kept, self.state);
        let program = &kept.compiled.program;
        let mut number = 0;
        let mut list = Vec::with_capacity(kept.params.len());
        for (param, &(_, wanted)) in program.key().params.iter().enumerate() {
            let next = ProgramHandle::linear_at(kept.handle.bind(py), number)?;
            let linear = next.filter(|(_, of)| *of == param).map(|(weight, _)| (number, weight));
            number += usize::from(linear.is_some());
            if !wanted {
                list.push(ParamGrad::None);
                continue;
            }
            if let Some((number, weight)) = linear {
                if let Some(quantized) = &kept.weights[number].quantized {
                    quantized.note_gradient();
                }
                let deferred = program.deferred_bytes()[number];
                if deferred != 0 {
                    list.push(ParamGrad::Waiting(state.bytes(py, place.device, deferred)?));
                    continue;
                }
                if weight.bind(py).try_borrow()?.fuse_wgrad_accumulation {
                    let grad = main_grad(state, kept.params[param].bind(py), kept.overwrite_main_grad)?;
                    list.push(ParamGrad::Main(grad));
                    continue;
                }
            }
            let tuples = &kept.compiled.params[param];
            let dtype = program.grad_dtype(param).into();
            let grad = state.empty(py, place.device, tuples.size.bind(py), tuples.stride.bind(py), dtype)?;
            list.push(ParamGrad::New(grad));
        }
        Ok(list)
    }

    fn launch(
        &self,
        place: Place,
        grads: &[Bound<'py, PyAny>],
        input: Option<&Bound<'py, PyAny>>,
        extras: &[Option<Bound<'py, PyAny>>],
        targets: &[ParamGrad<'py>],
    ) -> Result<(), Failure> {
        let (py, state, kept) = (self.tensors.py(), self.state, self.kept);
        let program = &kept.compiled.program;
        let read = Read::new(state, program, self.tensors)?;
        let external = Dispatcher::external_bytes(place, program.backward_scratch())?;
        let scratch = state.optional_bytes(py, place.device, external.bytes())?;
        let (buffers, slots) = weight_arguments(kept.weights.iter().map(|weight| (&weight.quantized, weight.slots())));
        let tensors = Pointers::new(state, &read, kept, grads)?;
        let grad_extras = extras.iter().map(|grad| state.pointer(grad.as_ref())).collect::<Result<Vec<_>, _>>()?;
        let (grad_params, deferred) = self.target_pointers(py, targets)?;
        let bindings = Bindings {
            input: tensors.input,
            extras: &tensors.extras,
            extra_outputs: &tensors.extra_outputs,
            params: &tensors.params,
            saved: tensors.saved,
            grad_output: tensors.grad_output,
            grad_extra_outputs: &tensors.grad_extra_outputs,
            grad_input: state.pointer(input)?,
            grad_extras: &grad_extras,
            grad_params: &grad_params,
            deferred: &deferred,
            ..Bindings::NONE
        };
        let weight_grads = self.weight_grad_plans(py, targets)?;
        let memory = external.memory(state.pointer(scratch.as_ref())?);
        let mut dispatcher = state.dispatcher(py)?;
        let weights = Weights { buffers: &buffers, fresh: &[], slots: &slots, skip: DevPtr::null() };
        let mut lane = dispatcher.0.lane(place, program.backward_scratch(), memory)?;
        program.run_backward(&mut lane, &bindings, &weights, &weight_grads)?;
        for slots in kept.weights.iter().filter_map(|weight| weight.slots.as_ref()) {
            dispatcher.0.autocast.mark_ran(&slots.backward);
        }
        Ok(())
    }

    /// Plans of the weight gradients that go into `main_grad`.
    fn weight_grad_plans(
        &self,
        py: Python<'py>,
        targets: &[ParamGrad<'py>],
    ) -> Result<Vec<Option<Arc<GemmPlan>>>, Failure> {
        let (state, kept) = (self.state, self.kept);
        let handle = kept.handle.bind(py).try_borrow()?;
        let mut dispatcher = state.dispatcher(py)?;
        let params = handle.chain.linear_params().iter().enumerate();
        params
            .map(|(linear, &param)| {
                let ParamGrad::Main(MainGrad { dtype, accumulate, address, .. }) = targets[param] else {
                    return Ok(None);
                };
                let program = &kept.compiled.program;
                Ok(Some(program.weight_grad_plan(&mut dispatcher.0, linear, dtype, accumulate, address)?))
            })
            .collect()
    }

    fn target_pointers<'a>(
        &self,
        py: Python<'py>,
        targets: &'a [ParamGrad<'py>],
    ) -> Result<(Vec<DevPtr<'a>>, Vec<DevPtr<'a>>), Failure> {
        let handle = self.kept.handle.bind(py).try_borrow()?;
        let pointer = |target: &'a ParamGrad<'py>| match target {
            ParamGrad::New(grad) | ParamGrad::Main(MainGrad { grad, .. }) => self.state.pointer(Some(grad)),
            ParamGrad::None | ParamGrad::Waiting(_) => Ok(DevPtr::null()),
        };
        let params = targets.iter().map(pointer).collect::<Result<Vec<_>, _>>()?;
        let waiting = |&param: &usize| match &targets[param] {
            ParamGrad::Waiting(grad) => self.state.pointer(Some(grad)),
            _ => Ok(DevPtr::null()),
        };
        let deferred = handle.chain.linear_params().iter().map(waiting).collect::<Result<Vec<_>, _>>()?;
        Ok((params, deferred))
    }

    /// What autograd is given for the parameters.
    fn finish(&self, py: Python<'py>, targets: Vec<ParamGrad<'py>>) -> Result<Vec<Option<Bound<'py, PyAny>>>, Failure> {
        let kept = self.kept;
        let mut list = Vec::with_capacity(targets.len());
        for (param, target) in targets.into_iter().enumerate() {
            list.push(match target {
                ParamGrad::None => None,
                ParamGrad::New(grad) => Some(grad),
                ParamGrad::Main(_) => after_main_grad(kept.params[param].bind(py))?,
                ParamGrad::Waiting(grad) => {
                    let handle = kept.handle.bind(py).try_borrow()?;
                    let linear = handle.chain.linear_params().iter().position(|&of| of == param).unwrap_or(0);
                    let program = Arc::clone(&kept.compiled.program);
                    let (saved, grad) = (self.tensors.clone().unbind(), grad.unbind());
                    let rows = Some(WaitingRows { program, linear, saved, grad });
                    let waiting = WaitingGrad::new(rows, kept.overwrite_main_grad);
                    let weight = handle.weights[linear].clone_ref(py);
                    drop(handle);
                    let mut weight = weight.bind(py).try_borrow_mut()?;
                    weight.waiting.push_back(waiting);
                    let fuses = weight.fuse_wgrad_accumulation;
                    drop(weight);
                    if fuses { after_main_grad(kept.params[param].bind(py))? } else { None }
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

/// Addresses of what backward reads.
struct Pointers<'a> {
    input: DevPtr<'a>,
    extras: Vec<DevPtr<'a>>,
    extra_outputs: Vec<DevPtr<'a>>,
    params: Vec<DevPtr<'a>>,
    saved: DevPtr<'a>,
    grad_output: DevPtr<'a>,
    grad_extra_outputs: Vec<DevPtr<'a>>,
}

impl<'a> Pointers<'a> {
    fn new(
        state: &State,
        read: &'a Read<'_>,
        kept: &ProgramSaved,
        grads: &'a [Bound<'_, PyAny>],
    ) -> Result<Self, Failure> {
        let key = kept.compiled.program.key();
        let list = |count: usize, place: fn(u16) -> Where| {
            (0..count as u16).map(|index| read.pointer(state, place(index))).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            input: read.pointer(state, Where::Input)?,
            extras: list(key.extras.len(), Where::Extra)?,
            extra_outputs: list(kept.shapes.extra_outputs.len(), Where::ExtraOutput)?,
            params: list(key.params.len(), Where::Param)?,
            saved: state.pointer(read.saved.as_ref())?,
            grad_output: state.pointer(grads.first())?,
            grad_extra_outputs: grads.iter().skip(1).map(|grad| state.pointer(Some(grad))).collect::<Result<_, _>>()?,
        })
    }
}
