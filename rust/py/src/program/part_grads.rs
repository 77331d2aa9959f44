//! Gradients of parameters that are joined of parts: each trained part gets its rows.

use pyo3::prelude::*;
use smallvec::SmallVec;

use crate::error::Failure;
use crate::program::handle::ProgramHandle;
use crate::program::main_grad::{after_main_grad, give_all, give_later};
use crate::program::parts::{Joined, Share};
use crate::program::tensors::{Objects, Optional};
use crate::torch::process::State;
use crate::torch::reader::view_of;

/// The gradients autograd gets for the parts, of which some are `wanted`; `grads` are those of the parameters. Where a
/// part accumulates into its `main_grad`, `overwrite` says that this gradient is the first.
pub(crate) fn of_parts<'py>(
    state: &State,
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
        let given = of_split(state, py, (grad, share), (parts, wanted), into);
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
    state: &State,
    py: Python<'py>,
    (grad, share): (Option<Bound<'py, PyAny>>, &Share),
    (parts, wanted): (&[Py<PyAny>], &[bool]),
    into: Option<bool>,
) -> Result<Optional<'py>, Failure> {
    let mut first = 0;
    let mut list = Optional::new();
    let (mut fused, mut pieces, mut places) = (Objects::new(), Vec::new(), Vec::new());
    for ((part, &wanted), &rows) in parts.iter().zip(wanted).zip(&share.rows) {
        let piece = match &grad {
            Some(grad) if wanted => Some(rows_of(state, grad, first, rows)?),
            _ => None,
        };
        first += rows;
        list.push(match (piece, into) {
            _ if !wanted => None,
            (piece, None) => piece,
            (Some(piece), Some(_)) => {
                places.push(list.len());
                pieces.push(piece);
                fused.push(part.bind(py).clone());
                None
            }
            (None, Some(overwrite)) => give_later(part.bind(py), overwrite)?,
        });
    }
    if let Some(overwrite) = into.filter(|_| !fused.is_empty()) {
        for (place, given) in places.into_iter().zip(give_all(&fused, pieces, overwrite)?) {
            list[place] = given;
        }
    }
    Ok(list)
}

/// Some rows of a gradient, in its memory.
fn rows_of<'py>(state: &State, grad: &Bound<'py, PyAny>, first: i64, rows: i64) -> Result<Bound<'py, PyAny>, Failure> {
    let view = view_of(&state.reader, grad, "a gradient")?;
    let mut size: SmallVec<[i64; 2]> = view.shape().into();
    size[0] = rows;
    Ok(state.torch.in_storage_of(grad, &size, first * size[1..].iter().product::<i64>())?)
}
