//! A chain on zero rows: nothing is launched, and gradients are zeros.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error::Failure;
use crate::program::handle::ProgramHandle;
use crate::program::main_grad::{MainGrad, after_main_grad, main_grad};
use crate::program::weight::{WaitingGrad, WaitingOperands};
use crate::torch::process::{State, state};

/// Autograd's gradients of the parameters: zeros, or none if the gradient goes into `main_grad` or is delayed.
#[pyfunction]
#[pyo3(signature = (program, params, wanted, overwrite_main_grad, /))]
pub(crate) fn program_grads_of_nothing<'py>(
    program: &Bound<'py, ProgramHandle>,
    params: &Bound<'py, PyTuple>,
    wanted: Vec<bool>,
    overwrite_main_grad: bool,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = program.py();
    let state = state(py)?;
    let mut number = 0;
    let zeros_like = py.import(intern!(py, "torch"))?.getattr(intern!(py, "zeros_like"))?;
    let mut grads = Vec::with_capacity(params.len());
    for (index, (param, wanted)) in params.iter().zip(wanted).enumerate() {
        let linear = ProgramHandle::linear_at(program, number)?.filter(|(_, of)| *of == index);
        number += usize::from(linear.is_some());
        if !wanted {
            grads.push(None);
            continue;
        }
        if let Some((weight, _)) = linear {
            let mut weight = weight.bind(py).try_borrow_mut()?;
            if weight.delay_wgrad_compute {
                weight.waiting.push_back(WaitingGrad { operands: WaitingOperands::NoRows, overwrite_main_grad });
                let fuses = weight.fuse_wgrad_accumulation;
                drop(weight);
                grads.push(if fuses { after_main_grad(state, &param)? } else { None });
                continue;
            }
            if weight.fuse_wgrad_accumulation {
                drop(weight);
                let given = into_main_grad(state, &param, overwrite_main_grad);
                let name = || program.try_borrow().ok().map(|handle| handle.name.clone());
                grads.push(given.map_err(|failure| failure.named(name().as_deref()))?);
                continue;
            }
        }
        grads.push(Some(zeros_like.call1((param,))?));
    }
    PyTuple::new(py, grads)
}

fn into_main_grad<'py>(
    state: &State,
    weight: &Bound<'py, PyAny>,
    overwrite: bool,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    let MainGrad { grad, accumulate, .. } = main_grad(state, weight, overwrite)?;
    if !accumulate {
        grad.call_method0("zero_")?;
    }
    Ok(after_main_grad(state, weight)?)
}
