//! Weight gradients that the backward of a compiled call puts into `main_grad`.
//!
//! The `main_grad` of a weight in one piece is a tensor of the graph. Those of a weight's parts are not: they are views of
//! one memory as a rule, of which a compiler would copy a part for each of them. The operator finds them at the parameters.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::program::Program;
use te_fast_core::runtime::lane::Place;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::TracedCall;
use crate::graphs::operands::Operands;
use crate::program::handle::ProgramHandle;
use crate::program::main_grad::{add_all, begin, check_main_grad, main_grads_dtype, stacked_main_grad};
use crate::program::tensors::Objects;
use crate::torch::process::State;

/// The memory that the product of one weight's gradient writes.
pub(super) struct Target<'py> {
    pub(super) param: usize,
    memory: Bound<'py, PyAny>,
    dtype: DType,
    /// Whether the product adds to it.
    accumulates: bool,
    /// The parts that take their rows of it into their `main_grad`s, if the product cannot write these itself.
    parts: Objects<'py>,
}

/// The same as an address.
pub(super) type Memory<'a> = (DevPtr<'a>, DType, bool);

impl<'py> Target<'py> {
    /// The `main_grad` of a weight in one piece, from the tensors that the call writes.
    pub(super) fn of_whole(traced: &TracedCall, param: usize, to: &mut Operands<'_, 'py>) -> Result<Self, Failure> {
        let buffer = to.take()?;
        check_main_grad(&buffer.view, &traced.param_shapes[param], traced.key.device)?;
        Ok(Self {
            param,
            memory: buffer.object.clone(),
            dtype: buffer.view.dtype(),
            accumulates: !traced.overwrites_main_grad(param),
            parts: Objects::new(),
        })
    }

    /// The `main_grad`s of a weight's parts, or memory for the gradient of all of them, as eager code decides.
    pub(super) fn of_parts(
        state: &State,
        handle: &Bound<'py, ProgramHandle>,
        (traced, program): (&TracedCall, &Program),
        param: usize,
    ) -> Result<Self, Failure> {
        let parts = parts_of(handle, param)?;
        if let Some(stack) = stacked_main_grad(state, &parts, traced.is_first_microbatch())? {
            let (memory, dtype, accumulates) = (stack.grad, stack.dtype, stack.accumulate);
            return Ok(Self { param, memory, dtype, accumulates, parts: Objects::new() });
        }
        let dtype = main_grads_dtype(state, &parts)?.unwrap_or_else(|| program.grad_dtype(param).into());
        let memory = state.empty_sized(handle.py(), traced.key.device, &traced.param_shapes[param], dtype)?;
        Ok(Self { param, memory, dtype, accumulates: false, parts })
    }

    /// The address of the memory.
    pub(super) fn memory(&self, state: &State) -> Result<Memory<'_>, Failure> {
        Ok((state.pointer(Some(&self.memory))?, self.dtype, self.accumulates))
    }

    /// Gives the parts their rows of the computed gradient.
    pub(super) fn give(self, traced: &TracedCall) -> Result<(), Failure> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let (py, parts) = (self.memory.py(), &traced.parts[self.param]);
        let rows = PyList::new(py, parts.iter().map(|part| part.rows))?;
        let pieces = self.memory.call_method1(intern!(py, "unsafe_split_with_sizes"), (rows,))?;
        let (mut weights, mut grads) = (Objects::new(), Vec::new());
        for (at, (weight, _)) in self.parts.iter().zip(parts).enumerate().filter(|(_, (_, part))| part.wanted) {
            weights.push(weight.clone());
            grads.push(pieces.get_item(at)?);
        }
        add_all(&weights, grads, traced.is_first_microbatch())
    }
}

/// Sets those `main_grad`s of parts to zero whose former value does not matter: before the first delayed gradient, and for a
/// backward on no rows.
pub(super) fn begin_parts(
    handle: &Bound<'_, ProgramHandle>,
    traced: &TracedCall,
    params: &[usize],
    is_on_nothing: bool,
) -> Result<(), Failure> {
    for &param in params {
        for (weight, part) in parts_of(handle, param)?.iter().zip(&traced.parts[param]) {
            if part.wanted {
                begin(weight, traced.is_first_microbatch(), is_on_nothing)?;
            }
        }
    }
    Ok(())
}

/// Refuses the capture of a CUDA graph, which would keep the addresses of `main_grad`s that its arguments do not have.
pub(super) fn refuse_capture(place: Place) -> Result<(), Failure> {
    if matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)? {
        let message = "fuse_wgrad_accumulation with a weight in parts writes to main_grads that a CUDA graph does not know; compile without CUDA graphs, or make the layer with one weight (no parameters_split, single_grouped_weight=True)";
        return Err(Error::state(OP, message).into());
    }
    Ok(())
}

fn parts_of<'py>(handle: &Bound<'py, ProgramHandle>, param: usize) -> Result<Objects<'py>, Failure> {
    let py = handle.py();
    let (parameters, names): (_, SmallVec<[_; 8]>) = {
        let handle = handle.try_borrow()?;
        let param = &handle.params[param];
        (param.parameters.clone_ref(py), param.parts.iter().map(|name| name.clone_ref(py)).collect())
    };
    let mut parts = Objects::new();
    for name in &names {
        let removed = || Error::state(OP, format!("parameter {} was removed", name.bind(py)));
        parts.push(parameters.bind(py).get_item(name.bind(py))?.ok_or_else(removed)?);
    }
    Ok(parts)
}
