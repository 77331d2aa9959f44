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
use crate::program::main_grad::{MainGrads, begin, check_main_grad};
use crate::torch::process::State;

/// The memory that the product of one weight's gradient writes.
pub(super) struct Target<'py> {
    pub(super) param: usize,
    memory: Bound<'py, PyAny>,
    dtype: DType,
    /// Whether the product adds to it.
    accumulates: bool,
    /// The `main_grad`s of parts that take their rows of it, if the product cannot write these itself.
    parts: Option<MainGrads<'py>>,
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
            parts: None,
        })
    }

    /// The `main_grad`s of a weight's parts, or memory for the gradient of all of them, as eager code decides.
    pub(super) fn of_parts(
        state: &State,
        handle: &Bound<'py, ProgramHandle>,
        (traced, program): (&TracedCall, &Program),
        param: usize,
    ) -> Result<Self, Failure> {
        let (py, shape, device) = (handle.py(), &traced.param_shapes[param], traced.key.device);
        let (rows, trained): (SmallVec<[i64; 8]>, SmallVec<[bool; 8]>) =
            traced.parts[param].iter().map(|part| (part.rows, part.wanted)).unzip();
        let (parts, how) = (parts_of(handle, param)?, (py, traced.is_first_microbatch()));
        let mut parts = MainGrads::of(state, (&parts, &trained), (&rows, shape, device), how)?;
        if let Some(whole) = parts.take_whole() {
            let (memory, dtype, accumulates) = (whole.grad, whole.dtype, whole.accumulate);
            return Ok(Self { param, memory, dtype, accumulates, parts: None });
        }
        let dtype = parts.dtype().unwrap_or_else(|| program.grad_dtype(param).into());
        let memory = state.empty_sized(py, device, shape, dtype)?;
        Ok(Self { param, memory, dtype, accumulates: false, parts: Some(parts) })
    }

    /// The address of the memory.
    pub(super) fn memory(&self, state: &State) -> Result<Memory<'_>, Failure> {
        Ok((state.pointer(Some(&self.memory))?, self.dtype, self.accumulates))
    }

    /// Gives the parts their rows of the computed gradient.
    pub(super) fn give(self, traced: &TracedCall) -> Result<(), Failure> {
        let Some(main_grads) = self.parts else { return Ok(()) };
        let (py, parts) = (self.memory.py(), &traced.parts[self.param]);
        let rows = PyList::new(py, parts.iter().map(|part| part.rows))?;
        let pieces = self.memory.call_method1(intern!(py, "unsafe_split_with_sizes"), (rows,))?;
        let trained = parts.iter().enumerate().filter(|(_, part)| part.wanted);
        let grads = trained.map(|(at, _)| pieces.get_item(at)).collect::<PyResult<SmallVec<[_; 8]>>>()?;
        Ok(main_grads.give(py, grads.into_iter())?)
    }
}

/// Sets those `main_grad`s of parts to zero whose former value does not matter: before the first delayed gradient, and for a
/// backward on no rows.
pub(super) fn begin_parts(
    state: &State,
    handle: &Bound<'_, ProgramHandle>,
    traced: &TracedCall,
    params: &[usize],
    is_on_nothing: bool,
) -> Result<(), Failure> {
    for &param in params {
        for (weight, part) in parts_of(handle, param)?.iter().zip(&traced.parts[param]) {
            if part.wanted {
                begin(state, weight.bind(handle.py()), traced.is_first_microbatch(), is_on_nothing)?;
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

fn parts_of(handle: &Bound<'_, ProgramHandle>, param: usize) -> Result<SmallVec<[Py<PyAny>; 8]>, Failure> {
    let py = handle.py();
    let (parameters, names): (_, SmallVec<[_; 8]>) = {
        let handle = handle.try_borrow()?;
        let param = &handle.params[param];
        (param.parameters.clone_ref(py), param.parts.iter().map(|name| name.clone_ref(py)).collect())
    };
    let mut parts = SmallVec::new();
    for name in &names {
        let removed = || Error::state(OP, format!("parameter {} was removed", name.bind(py)));
        parts.push(parameters.bind(py).get_item(name.bind(py))?.ok_or_else(removed)?.unbind());
    }
    Ok(parts)
}
