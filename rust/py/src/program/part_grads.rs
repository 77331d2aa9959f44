//! Gradients of parameters that are joined from parts: each trained part gets its rows.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use smallvec::SmallVec;

use crate::error::Failure;
use crate::program::main_grad::{Dummies, FusedParts, MainGrads, give_later};
use crate::program::parts::{Joined, Share};
use crate::program::tensors::{Objects, Optional};
use crate::torch::process::State;

/// Autograd's gradients of the parts that it has got, from `grads` of the parameters. `fused` has the `main_grad`s of parts by
/// parameter. If `main_grad` takes a gradient later, `overwrite` tells that this gradient is the first.
pub(crate) fn of_parts<'py>(
    (state, py): (&State, Python<'py>),
    joined: &Joined,
    (grads, fused): (Optional<'py>, &FusedParts<'py>),
    overwrite: bool,
) -> Result<Optional<'py>, Failure> {
    let mut list = Optional::with_capacity(joined.edge_count());
    for (param, (grad, (share, parts, trained))) in grads.into_iter().zip(joined.shares()).enumerate() {
        if !share.is_split {
            list.push(grad);
            continue;
        }
        let own = (share, parts, trained);
        let fused = fused.iter().find(|(of, _)| *of == param).map(|(_, fused)| fused);
        let given = match (grad, fused) {
            (grad, Some(fused)) => into_main_grads((state, py), own, (grad, fused))?,
            // Autograd drops those of frozen parts.
            (Some(grad), None) => split(&grad, &share.rows)?.into_iter().map(Some).collect(),
            (None, None) if share.fuses() => later(state, py, own, overwrite)?,
            // Delayed, or no part needs it.
            (None, None) => SmallVec::from_elem(None, parts.len()),
        };
        match share.edge {
            None => list.extend(given),
            Some(edge) => list.push(given.into_iter().nth(edge).flatten()),
        }
    }
    Ok(list)
}

/// A parameter's share, its parts, and which of them are trained.
type Own<'a> = (&'a Share, &'a [Py<PyAny>], &'a [bool]);

/// Autograd's gradients of parts whose gradients go, or have gone, into their `main_grad`s.
fn into_main_grads<'py>(
    (state, py): (&State, Python<'py>),
    (share, parts, trained): Own<'_>,
    (grad, fused): (Option<Bound<'py, PyAny>>, &MainGrads<'py>),
) -> Result<Optional<'py>, Failure> {
    if let Some(grad) = grad {
        let pieces = split(&grad, &share.rows)?.into_iter().zip(trained);
        fused.give(py, pieces.filter_map(|(piece, &trained)| trained.then_some(piece)))?;
    }
    let (mut told, mut dummies) = (fused.told(), Dummies::default());
    let of_part = |((part, &rows), &trained): ((&Py<PyAny>, &i64), &bool)| {
        let is_told = trained && told.next().unwrap_or(false);
        is_told.then(|| dummies.tell(state, part.bind(py), rows)).transpose()
    };
    Ok(parts.iter().zip(&share.rows).zip(trained).map(of_part).collect::<PyResult<_>>()?)
}

/// Autograd's gradients of parts whose gradients `backward_dw` adds to `main_grad` later.
fn later<'py>(
    state: &State,
    py: Python<'py>,
    (_, parts, trained): Own<'_>,
    overwrite: bool,
) -> Result<Optional<'py>, Failure> {
    let of_part = |(part, &trained): (&Py<PyAny>, &bool)| {
        if trained { give_later(state, part.bind(py), overwrite) } else { Ok(None) }
    };
    parts.iter().zip(trained).map(of_part).collect()
}

/// The rows of each part of a gradient, in its memory, by one call of torch. They are not views, which would cost torch
/// more when it assigns them to parameters.
fn split<'py>(grad: &Bound<'py, PyAny>, rows: &[i64]) -> PyResult<Objects<'py>> {
    let (py, rows) = (grad.py(), PyList::new(grad.py(), rows)?);
    grad.call_method1(intern!(py, "unsafe_split_with_sizes"), (rows,))?.try_iter()?.collect()
}
