//! Python functions that the native side calls when a call leaves the straight path.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};

use crate::error::Failure;
use crate::torch::process::State;
use crate::torch::reader::view_of;

const SKIP: &str = "the tensor of set_skip_fp8_weight_update_tensor";

/// Python functions, set once at import.
#[derive(Debug)]
pub(crate) struct Hooks {
    /// `torch._C._FunctionBase.apply` of the programs' autograd function.
    pub(crate) apply: Py<PyAny>,
    /// The same backward for `create_graph=True`, where differentiating again must raise.
    pub(crate) backward_once: Py<PyAny>,
    /// The same of the autograd function of two programs with a function between them.
    pub(crate) apply_cut: Py<PyAny>,
    pub(crate) cut_backward_once: Py<PyAny>,
    /// `apply_padded`: a call with rows that must be padded for its GEMMs.
    pub(crate) padded: Py<PyAny>,
    /// `run_padded`: the same for `program_run_forward`.
    pub(crate) padded_run: Py<PyAny>,
    /// `apply_on_nothing`: a call on zero rows.
    pub(crate) on_nothing: Py<PyAny>,
    /// Updates the backward scales of delayed scaling.
    pub(crate) update_backward_scales: Py<PyAny>,
    /// The tensor of `set_skip_fp8_weight_update_tensor`, or None.
    pub(crate) skip_weight_flag: Py<PyAny>,
    /// `recompute(handle, slots, generation, grads) -> None | (scale, generation)`, while activation recomputation is on.
    pub(crate) recompute: Py<PyAny>,
    /// `dummy_wgrad(weight) -> Tensor`: autograd's stand-in for a gradient that went into `main_grad`.
    pub(crate) dummy_wgrad: Py<PyAny>,
    /// `forget_maximum(slots, index)`: sets the live maximum of one tensor of delayed scaling to 0.
    pub(crate) forget_maximum: Py<PyAny>,
}

/// Arguments of the autograd function after the tensors: program, owner, `is_first_microbatch`, joined parts or a
/// version, and memory of the caller's.
pub(crate) const OTHERS: usize = 5;

static HOOKS: PyOnceLock<Hooks> = PyOnceLock::new();

/// Sets the Python functions; once, at import.
#[pyfunction]
#[pyo3(signature = (*, apply, backward_once, apply_cut, cut_backward_once, padded, padded_run, on_nothing, update_backward_scales, skip_weight_flag, recompute, dummy_wgrad, forget_maximum))]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python function")]
pub(crate) fn install_hooks(
    py: Python<'_>,
    apply: Py<PyAny>,
    backward_once: Py<PyAny>,
    apply_cut: Py<PyAny>,
    cut_backward_once: Py<PyAny>,
    padded: Py<PyAny>,
    padded_run: Py<PyAny>,
    on_nothing: Py<PyAny>,
    update_backward_scales: Py<PyAny>,
    skip_weight_flag: Py<PyAny>,
    recompute: Py<PyAny>,
    dummy_wgrad: Py<PyAny>,
    forget_maximum: Py<PyAny>,
) {
    let hooks = Hooks {
        apply,
        backward_once,
        apply_cut,
        cut_backward_once,
        padded,
        padded_run,
        on_nothing,
        update_backward_scales,
        skip_weight_flag,
        recompute,
        dummy_wgrad,
        forget_maximum,
    };
    let _ = HOOKS.set(py, hooks);
}

pub(crate) fn hooks(py: Python<'_>) -> PyResult<&Hooks> {
    HOOKS.get(py).ok_or_else(|| PyRuntimeError::new_err("te_fast.pytorch was not imported"))
}

/// The tensor of `FP8GlobalStateManager.set_skip_fp8_weight_update_tensor`.
#[cold]
pub(crate) fn skip_flag(state: &State, py: Python<'_>, device: Device) -> Result<Option<Py<PyAny>>, Failure> {
    const OP: &str = "autocast";
    let flag = hooks(py)?.skip_weight_flag.bind(py).call0()?;
    if flag.is_none() {
        return Ok(None);
    }
    let view = view_of(&state.reader, &flag, "skip_fp8_weight_update")?;
    if view.device() != device {
        let expected = format!("{device}, where the layer is");
        return Err(Error::device(OP, SKIP, expected, view.device()).into());
    }
    if (view.dtype(), view.numel()) != (DType::F32, 1) {
        let got = format!("{} of {}", view.numel(), view.dtype());
        return Err(Error::shape(OP, SKIP, "one element of torch.float32", got).into());
    }
    Ok(Some(flag.unbind()))
}
