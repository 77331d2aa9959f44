//! Forward as an operator.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::program::{Port, SizedProgram};
use te_fast_core::quant::value::Quantized;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::{TracedCall, program_for};
use crate::graphs::given::Params;
use crate::graphs::launch::Launch;
use crate::graphs::operands::Operands;
use crate::graphs::registry::{Operator, Otherwise};
use crate::graphs::slots::{note_first, slots_of, use_kept};
use crate::graphs::weights::{GivenWeight, buffers, note_kept, quantized};
use crate::program::check::check;
use crate::program::handle::{Parameter, ProgramHandle, PyProgram};
use crate::program::tensors::Tensors;
use crate::torch::process::{State, state};

/// A forward in compiled code, which writes into tensors of the graph.
///
/// `reads` are input, extra inputs, parameters, and kept scales; `writes` are output and extra outputs that are separate
/// tensors, the buffer for backward, memory of the quantised weights, and under delayed scaling the tensor that keeps
/// operators in order.
#[pyfunction]
#[pyo3(signature = (reads, writes, program, call, /))]
pub(crate) fn traced_forward<'py>(
    reads: &Bound<'py, PyList>,
    writes: &Bound<'py, PyList>,
    program: &Bound<'py, PyAny>,
    call: i64,
) -> PyResult<()> {
    let state = state(program.py())?;
    Operator::run(state, (reads, writes), (program, call), forward, Otherwise::Forward).map(drop)
}

/// Returns whether it ran; Python runs calls on no rows, and with rows that must be padded.
fn forward<'a, 'py>(
    state: &State,
    operator: &Operator<'py>,
    from: &mut Operands<'a, 'py>,
    to: &mut Operands<'a, 'py>,
) -> Result<bool, Failure> {
    let (traced, handle, py) = (operator.call.get(), &operator.program, operator.program.py());
    let key = &traced.key;
    let rows = from.rows();
    if traced.is_pythons(state, py, rows)? {
        return Ok(false);
    }
    to.check_written(traced.made())?;
    let x = from.take()?.view;
    let extras = from.take_views(key.extras.len())?;
    let params = Params::take(traced, from)?;
    if x.device() != key.device {
        let expected = format!("{}, where the call was traced", key.device);
        return Err(Error::device(OP, "the input", expected, x.device()).into());
    }
    let _guard = state.guard(py, key.device)?;
    let place = Place { device: key.device, stream: state.reader.stream(py, key.device)? };
    let is_repeated = traced.is_delayed() && prepare_scales(state, operator, place)?;
    let (compiled, sized) = program_for(state, handle, (key, rows), traced.recipe(), &traced.param_shapes)?;
    let tensors = Tensors::of_views(x, extras, params.views.clone());
    {
        let handle = handle.try_borrow()?;
        check(py, (&handle.chain, &handle.params), &tensors, rows, compiled.program.widths())?;
        check_as_traced(py, traced, &handle.params, &tensors)?;
    }
    let mut launch = Launch::default();
    bind_inputs(&mut launch, &tensors);
    let saved = bind_results(&mut launch, traced, &sized, to)?;
    let mut weights = SmallVec::new();
    if let Some((region, _)) = &traced.region {
        let memory = to.peek(traced.memory_buffers())?;
        launch.weights = buffers(traced, &compiled.program, saved, to)?;
        for (linear, &param) in traced.weight_params.iter().enumerate() {
            launch.given.extend(params.row_of(param).map(|row| (linear, [row, Quantized::NONE])));
        }
        let given = (params.operands.as_slice(), memory.as_slice());
        weights = quantized(state, (handle, traced, region), given, &launch.weights, place)?;
    }
    if traced.is_delayed() {
        launch.slots = slots_of(handle)?;
        if traced.keeps_scales {
            use_kept(&mut launch.slots, &from.take_views(from.left())?)?;
        }
        launch.slots.iter_mut().for_each(|slots| slots.raises = !is_repeated);
    }
    run(state, py, (&compiled, &sized, place), &launch, (&weights, &tensors))?;
    if !traced.passes_weights() {
        note_kept(state, handle, &params.operands, &weights, place)?;
    }
    Ok(true)
}

/// Refuses tensors that another `.data` has given another type or shape since the trace: torch skips its guards of a
/// module's tensors where the module's dictionaries are unchanged.
fn check_as_traced(
    py: Python<'_>,
    traced: &TracedCall,
    params: &[Parameter],
    tensors: &Tensors<'_>,
) -> Result<(), Failure> {
    let (key, x) = (&traced.key, &tensors.x);
    if x.dtype() != key.activation.into() || x.cols() != key.cols {
        let expected = format!("{} of {} columns, as the call was traced", DType::from(key.activation), key.cols);
        return Err(Error::dtype(OP, "the input", expected, format!("{} of {}", x.dtype(), x.cols())).into());
    }
    let known = key.params.iter().zip(&traced.param_shapes);
    for (param, (view, (&(dtype, _), shape))) in params.iter().zip(tensors.params.iter().zip(known)) {
        let is_of_type = view.dtype() == dtype.into();
        if is_of_type && view.shape() == shape.as_slice() {
            continue;
        }
        let name = param.name.bind(py);
        let expected = format!(
            "{} of shape {shape:?}, as parameter {name} was when the call was traced (compile the function again, with torch.compiler.reset(), after the model is converted)",
            DType::from(dtype)
        );
        let got = format!("{} of shape {:?}", view.dtype(), view.shape());
        let refuse = if is_of_type { Error::shape } else { Error::dtype };
        return Err(refuse(OP, "a parameter", expected, got).into());
    }
    Ok(())
}

fn bind_inputs<'a>(launch: &mut Launch<'a>, tensors: &Tensors<'a>) {
    launch.set(Port::Input, tensors.x.data());
    for (index, extra) in tensors.extras.iter().enumerate() {
        launch.set(Port::Extra(index as u16), extra.data());
    }
    for (index, param) in tensors.params.iter().enumerate() {
        launch.set(Port::Param(index as u16), param.data());
    }
}

/// Binds outputs and the buffer for backward; returns where that buffer begins.
fn bind_results<'a>(
    launch: &mut Launch<'a>,
    traced: &TracedCall,
    sized: &SizedProgram,
    to: &mut Operands<'a, '_>,
) -> Result<DevPtr<'a>, Error> {
    let key = &traced.key;
    for (port, cols) in traced.new_outputs() {
        launch.set(port, to.take_sized(sized.rows() * cols, key.activation.into(), key.device)?);
    }
    if !traced.has_saved() {
        return Ok(DevPtr::null());
    }
    let saved = to.take_sized(traced.packed() + sized.saved_bytes(), DType::U8, key.device)?;
    launch.set(Port::Saved, saved.offset(traced.packed()));
    Ok(saved)
}

fn run(
    state: &State,
    py: Python<'_>,
    (compiled, sized, place): (&PyProgram, &SizedProgram, Place),
    launch: &Launch<'_>,
    (weights, tensors): (&[GivenWeight], &Tensors<'_>),
) -> Result<(), Failure> {
    let external = Dispatcher::external_bytes(place, sized.forward_scratch())?;
    let scratch = state.optional_bytes(py, place.device, external.bytes())?;
    let memory = external.memory(state.pointer(scratch.as_ref())?);
    let mut table = state.tables.take();
    let mut call = compiled.program.call(&mut table);
    launch.bind(&mut call);
    for (linear, weight) in weights.iter().enumerate() {
        if let Some(param) = weight.fresh {
            call.set_fresh_weight(linear, tensors.params[param].data());
        }
    }
    {
        let mut dispatcher = state.dispatcher(py)?;
        sized.run_forward(&mut dispatcher.0.lane(place, sized.forward_scratch(), memory)?, call)?;
        for slots in launch.slots.iter().filter(|slots| slots.raises) {
            dispatcher.0.autocast.mark_ran(&slots.owner.forward);
        }
    }
    state.tables.give_back(table);
    Ok(())
}

/// Checks, before a call under delayed scaling, that it has slots and may use the scales. Returns whether it repeats a
/// forward with that forward's scales, and so records no maxima.
fn prepare_scales(state: &State, operator: &Operator<'_>, place: Place) -> Result<bool, Failure> {
    let (traced, handle, py) = (operator.call.get(), &operator.program, operator.program.py());
    let Some((region, _)) = &traced.region else { return Ok(false) };
    let is_captured = matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)?;
    if is_captured && traced.is_first.is_none() {
        let message = "a CUDA graph does not mark the layers of delayed scaling whose scales the region around it is to update; enter the region inside of the compiled function";
        return Err(Error::state(OP, message).into());
    }
    if !handle.try_borrow()?.has_slots(py, region.epoch)? {
        let _region = traced.enter(py, state)?;
        operator.owner.call_method0(intern!(py, "_init_delayed_scaling"))?;
    }
    let is_repeated = state.torch.current_graph_task_id.bind(py).call0()?.extract::<i64>()? >= 0;
    note_first(state, handle, traced, is_repeated)?;
    // An FP8 weight that calls share would belong to another call.
    if is_repeated && traced.keeps_scales && traced.passes_weights() {
        return Ok(true);
    }
    refuse_late_repetition(state, handle, traced, is_repeated)?;
    Ok(false)
}

/// A recomputation quantises with the scales that it gets. After an update these are no longer its forward's scales.
fn refuse_late_repetition(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    traced: &TracedCall,
    is_repeated: bool,
) -> Result<(), Failure> {
    let generation = state.dispatcher(handle.py())?.0.forward_generation;
    let mut handle = handle.try_borrow_mut()?;
    if !is_repeated {
        handle.traced_generation = generation;
        return Ok(());
    }
    if traced.any_grad() && handle.traced_generation != generation {
        let message = "activations are recomputed after the autocast region's end has updated the scales of delayed scaling; end the region behind backward, or use te_fast.pytorch.checkpoint, whose graph keeps the scales, without is_first_microbatch";
        return Err(Error::state(OP, message).into());
    }
    Ok(())
}
