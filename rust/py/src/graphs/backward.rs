//! Backward as an operator.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::program::{Port, Program, SizedProgram};
use te_fast_core::quant::value::WeightBuffer;
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::{Elsewhere, TracedCall, named_by, program_for};
use crate::graphs::given::Layout;
use crate::graphs::launch::Launch;
use crate::graphs::main_grads::{Memory, Target, begin_parts, refuse_capture};
use crate::graphs::operands::{Operand, Operands};
use crate::graphs::registry::{Operator, Otherwise};
use crate::graphs::slots::slots_of;
use crate::program::check::check_grad;
use crate::program::handle::ProgramHandle;
use crate::program::weight::{WaitingGrad, WaitingOperands, WaitingRows};
use crate::torch::process::{State, state};

/// A backward in compiled code, which writes into tensors of the graph.
///
/// `reads` are the gradients of output and extra outputs, the buffer of forward, the tensors that [`TracedCall`] names,
/// and quantised weights. `writes` are the gradients of input, parameters and extra inputs that are separate tensors, and
/// each `main_grad` of a weight in one piece.
#[pyfunction]
#[pyo3(signature = (reads, writes, program, call, /))]
pub(crate) fn traced_backward<'py>(
    reads: &Bound<'py, PyList>,
    writes: &Bound<'py, PyList>,
    program: &Bound<'py, PyAny>,
    call: i64,
) -> PyResult<()> {
    let py = program.py();
    let operator = Operator::run(state(py)?, (reads, writes), (program, call), backward, Otherwise::Backward)?;
    let traced = operator.call.get();
    let was_first = if let Some(is_first) = traced.is_first {
        is_first
    } else {
        let mut program = operator.program.try_borrow_mut()?;
        let was_first = program.first_module.is_some();
        program.first_module_done |= was_first;
        was_first
    };
    let is_last = traced.is_delayed() && was_first && !reads.is_empty();
    if is_last { Operator::otherwise(py, Otherwise::AfterBackward, (reads.get_item(0)?,)) } else { Ok(()) }
}

/// Lets a backward on no rows have gradients of zeros, for `backward_dw` and in the `main_grad`s of parts.
#[pyfunction]
#[pyo3(signature = (program, call, /))]
pub(crate) fn traced_on_nothing(program: &Bound<'_, PyAny>, call: i64) -> PyResult<()> {
    let py = program.py();
    let state = state(py)?;
    let operator = Operator::find(state, program, call).map_err(|failure| failure.named(None))?;
    let traced = operator.call.get();
    for linear in (0..traced.key.linears.len()).filter(|&linear| traced.key.linears[linear].deferred) {
        let Some((weight, param)) = ProgramHandle::linear_at(&operator.program, linear)? else { break };
        if traced.elsewhere.deferred.contains(&param) {
            let overwrite_main_grad = traced.is_first_microbatch();
            let waiting = WaitingGrad { operands: WaitingOperands::NoRows, overwrite_main_grad };
            weight.bind(py).try_borrow_mut()?.waiting.push_back(waiting);
        }
    }
    let Elsewhere { fused_parts, begun, .. } = &traced.elsewhere;
    let begun = begin_parts(state, &operator.program, traced, fused_parts, true)
        .and_then(|()| begin_parts(state, &operator.program, traced, begun, false));
    begun.map_err(|failure| named_by(&operator.program, failure))
}

/// A running backward.
#[derive(Default)]
struct Run<'a, 'py> {
    launch: Launch<'a>,
    main_grads: SmallVec<[Target<'py>; 2]>,
    /// For each linear op with a delayed weight gradient, its number and the operands.
    waiting: SmallVec<[(usize, Bound<'py, PyAny>); 2]>,
    /// Weights that are quantised parameters, by linear op.
    given: SmallVec<[(usize, Layout<'a, 'py>); 2]>,
    /// Forward's buffer and the call's tensors that backward reads, for delayed gradients.
    kept: SmallVec<[Operand<'a, 'py>; 4]>,
}

/// Returns whether it ran; Python runs calls on no rows, and with rows that must be padded.
fn backward<'a, 'py>(
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
    to.check_written(traced.new_grads())?;
    let _guard = state.guard(py, key.device)?;
    let place = Place { device: key.device, stream: state.reader.stream(py, key.device)? };
    let (compiled, sized) = program_for(state, handle, (key, rows), traced.recipe(), &traced.param_shapes)?;
    let program = &compiled.program;
    let mut run = Run::default();
    run.read(traced, (program, &sized), from)?;
    run.write(traced, rows, to)?;
    run.wait(state, traced, &sized, place)?;
    if traced.is_delayed() {
        run.launch.slots = slots_of(handle)?;
    }
    for &param in &traced.elsewhere.fused {
        run.main_grads.push(Target::of_whole(traced, param, to)?);
    }
    if traced.fuses_parts() {
        refuse_capture(place)?;
    }
    for &param in &traced.elsewhere.fused_parts {
        run.main_grads.push(Target::of_parts(state, handle, (traced, program), param)?);
    }
    begin_parts(state, handle, traced, &traced.elsewhere.begun, false)?;
    run.launch(state, py, (program, &sized, place))?;
    for target in run.main_grads.drain(..) {
        target.give(traced)?;
    }
    if !run.waiting.is_empty() {
        run.put_off(handle, traced, (program, &sized))?;
    }
    Ok(true)
}

impl<'a, 'py> Run<'a, 'py> {
    /// Gradients, forward's buffer, and the tensors that it read.
    fn read(
        &mut self,
        traced: &TracedCall,
        (program, sized): (&Program, &SizedProgram),
        from: &mut Operands<'a, 'py>,
    ) -> Result<(), Failure> {
        let device = traced.key.device;
        for index in 0..traced.widths.len() {
            let grad = from.take()?.view;
            check_grad(program, sized.rows(), index, &grad)?;
            let port = if index == 0 { Port::GradOutput } else { Port::GradExtraOutput(index as u16 - 1) };
            self.launch.set(port, grad.data());
        }
        let kept = usize::from(traced.has_saved()) + traced.reads.len();
        self.kept = if traced.elsewhere.deferred.is_empty() { SmallVec::new() } else { from.peek(kept)? };
        let mut saved = DevPtr::null();
        if traced.has_saved() {
            saved = from.take_sized(traced.packed() + sized.saved_bytes(), DType::U8, device)?;
            self.launch.set(Port::Saved, saved.offset(traced.packed()));
        }
        for (&port, &(elements, dtype)) in program.reads().iter().zip(sized.read_extents()) {
            self.launch.set(port, from.take_sized(elements, dtype, device)?);
        }
        for linear in (0..traced.key.linears.len()).filter(|_| traced.region.is_some()) {
            let layout = program.weight_layout(linear);
            let mut buffer = WeightBuffer { row: DevPtr::null(), col: DevPtr::null(), layout };
            let is_read = program.reads_weight(linear);
            if is_read && let Some(given) = Layout::take(traced, (program, linear), from)? {
                self.given.push((linear, given));
            } else if let Some(packing) = traced.packing.as_ref().filter(|_| is_read) {
                buffer = packing.buffer(linear, layout, (saved, DevPtr::null()));
            } else if is_read {
                let has_col = layout.col_bytes != 0;
                let (bytes, part) =
                    if has_col { (layout.col_bytes, &mut buffer.col) } else { (layout.row_bytes, &mut buffer.row) };
                *part = from.take_sized(bytes, DType::U8, device)?;
            }
            self.launch.weights.push(buffer);
        }
        Ok(())
    }

    /// Gradients that are separate tensors.
    fn write(&mut self, traced: &TracedCall, rows: usize, to: &mut Operands<'a, 'py>) -> Result<(), Failure> {
        let key = &traced.key;
        let activation = DType::from(key.activation);
        if traced.makes_grad_input() {
            self.launch.set(Port::GradInput, to.take_sized(rows * key.cols, activation, key.device)?);
        }
        for param in traced.new_param_grads() {
            let elements = traced.param_shapes[param].iter().product::<i64>() as usize;
            let grad = to.take_sized(elements, traced.grad_dtypes[param], key.device)?;
            self.launch.set(Port::GradParam(param as u16), grad);
        }
        for (port, cols) in traced.new_extra_grads() {
            let Port::GradExtra(index) = port else { continue };
            let dtype = key.extras[usize::from(index)].0;
            self.launch.set(port, to.take_sized(rows * cols, dtype, key.device)?);
        }
        Ok(())
    }

    /// Memory for the operands of `backward_dw`, which outlive the call; the compiler's memory does not.
    fn wait(&mut self, state: &State, traced: &TracedCall, sized: &SizedProgram, place: Place) -> Result<(), Failure> {
        if traced.elsewhere.deferred.is_empty() {
            return Ok(());
        }
        if matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)? {
            let message = "delay_wgrad_compute leaves tensors to backward_dw(), which a CUDA graph would overwrite; compile without CUDA graphs";
            return Err(Error::state(OP, message).into());
        }
        for (linear, &bytes) in sized.deferred_bytes().iter().enumerate().filter(|&(_, &bytes)| bytes != 0) {
            let Some(any) = self.kept.first() else { break };
            self.waiting.push((linear, state.bytes(any.object.py(), place.device, bytes)?));
        }
        Ok(())
    }

    fn launch(
        &self,
        state: &State,
        py: Python<'_>,
        (program, sized, place): (&Program, &SizedProgram, Place),
    ) -> Result<(), Failure> {
        let mut targets = SmallVec::<[(usize, usize, Memory<'_>); 2]>::new();
        for target in &self.main_grads {
            let mut linears = 0..program.key().linears.len();
            let Some(linear) = linears.find(|&linear| program.linear_param(linear) == target.param) else { continue };
            targets.push((linear, target.param, target.memory(state)?));
        }
        let external = Dispatcher::external_bytes(place, sized.backward_scratch())?;
        let scratch = state.optional_bytes(py, place.device, external.bytes())?;
        let memory = external.memory(state.pointer(scratch.as_ref())?);
        let mut table = state.tables.take();
        let mut call = program.call(&mut table);
        self.launch.bind(&mut call);
        for (linear, given) in &self.given {
            let [row, col] = given.layouts(state, program.weight_layout(*linear).usage.columnwise)?;
            call.set_layouts(*linear, row, col);
        }
        for (linear, kept) in &self.waiting {
            call.set_deferred(*linear, state.pointer(Some(kept))?);
        }
        {
            let mut dispatcher = state.dispatcher(py)?;
            for (linear, param, (memory, dtype, accumulates)) in targets {
                let (kind, address) = ((dtype, accumulates), memory.address());
                let plan = program.weight_grad_plan(&mut dispatcher.0, sized.rows(), linear, kind, address)?;
                call.set(Port::GradParam(param as u16), memory);
                call.set_weight_grad(linear, plan);
            }
            sized.run_backward(&mut dispatcher.0.lane(place, sized.backward_scratch(), memory)?, call)?;
            for slots in &self.launch.slots {
                dispatcher.0.autocast.mark_ran(&slots.owner.backward);
            }
        }
        state.tables.give_back(table);
        Ok(())
    }

    /// Leaves delayed weight gradients to `backward_dw`, with copies of their operands.
    fn put_off(
        self,
        handle: &Bound<'py, ProgramHandle>,
        traced: &TracedCall,
        (program, sized): (&Arc<Program>, &Arc<SizedProgram>),
    ) -> Result<(), Failure> {
        let py = handle.py();
        let mut tensors = SmallVec::<[Bound<'py, PyAny>; 4]>::new();
        let mut kept = self.kept.iter();
        tensors.push(match kept.next().filter(|_| traced.has_saved()) {
            // It was made for whole steps of rows, and weights stand in front.
            Some(saved) => {
                let place = (0, traced.packed(), sized.saved_bytes());
                let exact = saved.object.call_method1(intern!(py, "narrow"), place)?;
                exact.call_method0(intern!(py, "clone"))?
            }
            None => py.None().into_bound(py),
        });
        let reads = self.kept.iter().skip(usize::from(traced.has_saved()));
        for read in reads {
            tensors.push(read.object.call_method0(intern!(py, "clone"))?);
        }
        let saved = PyTuple::new(py, tensors)?.unbind();
        for (linear, grad) in self.waiting {
            let Some((weight, _)) = ProgramHandle::linear_at(handle, linear)? else { break };
            let operands = WaitingOperands::Kept(WaitingRows {
                program: Arc::clone(program),
                sized: Arc::clone(sized),
                linear,
                saved: saved.clone_ref(py),
                grad: grad.unbind(),
            });
            let waiting = WaitingGrad { operands, overwrite_main_grad: traced.is_first_microbatch() };
            weight.bind(py).try_borrow_mut()?.waiting.push_back(waiting);
        }
        Ok(())
    }
}
