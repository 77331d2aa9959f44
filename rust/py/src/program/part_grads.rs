//! Gradients of parameters that are joined of parts: each trained part gets its rows.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::error::Failure;
use crate::program::handle::ProgramHandle;
use crate::program::main_grad::{after_main_grad, give_all, give_later};
use crate::program::parts::{Joined, Share};
use crate::program::tensors::{Objects, Optional};

/// The gradients autograd gets for the parts, of which some are `wanted`; `grads` are those of the parameters. Where a
/// part accumulates into its `main_grad`, `overwrite` says that this gradient is the first.
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

/// The same of one parameter, whose parts' gradients go `into` their `main_grad`, which they overwrite or not, or to
/// autograd. A gradient that is not there waits for `backward_dw`, or is wanted by no part.
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

/// The rows of each part of a gradient, in its memory, by one call of torch. No views: those cost torch more as it gives
/// them to parameters.
fn split<'py>(grad: &Bound<'py, PyAny>, rows: &[i64]) -> PyResult<Objects<'py>> {
    let (py, rows) = (grad.py(), PyList::new(grad.py(), rows)?);
    grad.call_method1(intern!(py, "unsafe_split_with_sizes"), (rows,))?.try_iter()?.collect()
}
