//! Gradients of parameters that are joined from parts: each trained part gets its rows.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::error::Failure;
use crate::program::handle::ProgramHandle;
use crate::program::main_grad::{after_main_grad, give_all, give_later};
use crate::program::parts::{Joined, Share};
use crate::program::tensors::{Objects, Optional};

/// Autograd's gradients of the `wanted` parts, from `grads` of the parameters. If a part accumulates into its
/// `main_grad`, `overwrite` tells that this gradient is the first.
pub(crate) fn of_parts<'py>(
    (handle, joined): (&Bound<'py, ProgramHandle>, &Joined),
    (grads, in_parts): (Optional<'py>, &[usize]),
    wanted: &[bool],
    overwrite: bool,
) -> PyResult<Optional<'py>> {
    let py = handle.py();
    let fuses = handle.try_borrow()?.fuses_parts;
    let mut list = Optional::new();
    for (param, (grad, (share, parts))) in grads.into_iter().zip(joined.shares()).enumerate() {
        let wanted = &wanted[list.len()..];
        if !share.is_split {
            list.push(grad);
            continue;
        }
        if in_parts.contains(&param) {
            for part in parts {
                list.push(after_main_grad(part.bind(py))?);
            }
            continue;
        }
        let into = (fuses && share.is_weight).then_some(overwrite);
        let given = of_split(py, (grad, share), (parts, wanted), into);
        list.extend(
            given.map_err(|failure| {
                failure.named(handle.try_borrow().ok().map(|handle| handle.name.clone()).as_deref())
            })?,
        );
    }
    Ok(list)
}

/// The same for one parameter, whose parts' gradients go `into` their `main_grad`, or to autograd. A missing gradient
/// is delayed, or no part needs it.
fn of_split<'py>(
    py: Python<'py>,
    (grad, share): (Option<Bound<'py, PyAny>>, &Share),
    (parts, wanted): (&[Py<PyAny>], &[bool]),
    into: Option<bool>,
) -> Result<Optional<'py>, Failure> {
    let mut list = Optional::new();
    let (mut fused, mut taken, mut places) = (Objects::new(), Vec::new(), Vec::new());
    let mut pieces = match &grad {
        Some(grad) => Some(split(grad, &share.rows)?.into_iter()),
        None => None,
    };
    for (part, &wanted) in parts.iter().zip(wanted) {
        let piece = pieces.as_mut().and_then(Iterator::next).filter(|_| wanted);
        list.push(match (piece, into) {
            _ if !wanted => None,
            (piece, None) => piece,
            (Some(piece), Some(_)) => {
                places.push(list.len());
                taken.push(piece);
                fused.push(part.bind(py).clone());
                None
            }
            (None, Some(overwrite)) => give_later(part.bind(py), overwrite)?,
        });
    }
    if let Some(overwrite) = into.filter(|_| !fused.is_empty()) {
        for (place, given) in places.into_iter().zip(give_all(&fused, taken, overwrite)?) {
            list[place] = given;
        }
    }
    Ok(list)
}

/// The rows of each part of a gradient, in its memory, by one call of torch. They are not views, which would cost torch
/// more when it assigns them to parameters.
fn split<'py>(grad: &Bound<'py, PyAny>, rows: &[i64]) -> PyResult<Objects<'py>> {
    let (py, rows) = (grad.py(), PyList::new(grad.py(), rows)?);
    grad.call_method1(intern!(py, "unsafe_split_with_sizes"), (rows,))?.try_iter()?.collect()
}
