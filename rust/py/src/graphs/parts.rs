//! Parameters that consist of parts. A graph passes the parts, so that it copies none of them; an operator joins them to
//! whole parameters, in the parts' memory if they are adjacent, before anything else reads them.

use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::program::Port;

use crate::error::Failure;
use crate::graphs::OP;
use crate::graphs::call::TracedCall;
use crate::program::parts::join;
use crate::program::tensors::Objects;
use crate::tensor::stack::joined;
use crate::torch::process::State;

/// The tensors that an operator reads, with whole parameters in place of parts.
#[derive(Default)]
pub(super) struct Wholes<'py> {
    pub(super) objects: Objects<'py>,
    /// For each, the number of the first tensor behind its own among those that the operator was given.
    pub(super) ends: SmallVec<[usize; 16]>,
}

/// What stands next among the tensors of an operator.
enum Next {
    /// A tensor in one piece.
    One,
    /// The parts of a parameter, or their values in high precision.
    Plain(usize),
    /// The parts of a quantised parameter: bytes and scales of each, of the column layout or the row layout.
    Quantized { param: usize, columnwise: bool },
}

impl<'py> Wholes<'py> {
    /// Joins the parts among an operator's tensors; none if no parameter has parts.
    #[inline]
    pub(super) fn of(
        state: &State,
        traced: &TracedCall,
        given: &[Bound<'py, PyAny>],
        is_forward: bool,
    ) -> Result<Option<Self>, Failure> {
        if !traced.has_parts() {
            return Ok(None);
        }
        let mut wholes = Self::default();
        for next in next_tensors(traced, is_forward) {
            wholes.add(state, traced, given, &next)?;
        }
        for (at, behind) in given.iter().enumerate().skip(wholes.end()) {
            wholes.push(behind.clone(), at + 1);
        }
        Ok(Some(wholes))
    }

    fn end(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn push(&mut self, object: Bound<'py, PyAny>, end: usize) {
        self.objects.push(object);
        self.ends.push(end);
    }

    fn add(
        &mut self,
        state: &State,
        traced: &TracedCall,
        given: &[Bound<'py, PyAny>],
        next: &Next,
    ) -> Result<(), Failure> {
        let start = self.end();
        let take = |count: usize| {
            let missing = "a compiled call brings fewer tensors than it was traced with; compile it again";
            given.get(start..start + count).ok_or_else(|| Error::state(OP, missing))
        };
        match *next {
            Next::One => self.push(take(1)?[0].clone(), start + 1),
            Next::Plain(param) => {
                let count = traced.parts[param].len();
                self.push(plain(state, take(count)?)?, start + count);
            }
            Next::Quantized { param, columnwise } => {
                let tensors = take(2 * traced.parts[param].len())?;
                let end = start + tensors.len();
                let is_per_tensor = traced.given[param].is_some_and(|kind| kind.is_per_tensor());
                // Scales of one per value lie in a row; other tensors of a column layout are stacked.
                for (first, along_first) in [(0, !columnwise), (1, is_per_tensor)] {
                    let own: SmallVec<[_; 8]> = tensors.iter().skip(first).step_by(2).cloned().collect();
                    let whole = match own.as_slice() {
                        [one] => one.clone(),
                        own => joined(state, own, along_first)?.ok_or_else(unfit)?,
                    };
                    self.push(whole, end);
                }
            }
        }
        Ok(())
    }
}

fn plain<'py>(state: &State, parts: &[Bound<'py, PyAny>]) -> Result<Bound<'py, PyAny>, Failure> {
    if let [one] = parts {
        return Ok(one.clone());
    }
    Ok(join(state, parts, &mut SmallVec::new(), |_, _| Ok(true))?.ok_or_else(unfit)?.0)
}

#[cold]
fn unfit() -> Error {
    Error::state(OP, "the parts of a parameter differ in shape, type or device; compile the function again")
}

/// The tensors of an operator in order, as far as parameters are among them.
fn next_tensors(traced: &TracedCall, is_forward: bool) -> SmallVec<[Next; 16]> {
    let row_of = |param: usize| match traced.given[param] {
        Some(_) => Next::Quantized { param, columnwise: false },
        None => Next::Plain(param),
    };
    if is_forward {
        let inputs = (0..=traced.key.extras.len()).map(|_| Next::One);
        return inputs.chain((0..traced.parts.len()).map(row_of)).collect();
    }
    let grads = (0..traced.widths.len() + usize::from(traced.has_saved())).map(|_| Next::One);
    let reads = traced.reads.iter().map(|&port| match port {
        Port::Param(param) => Next::Plain(param.into()),
        _ => Next::One,
    });
    let weights = traced.weights_that_backward_reads().filter_map(|param| match traced.given[param] {
        Some(kind) => Some(Next::Quantized { param, columnwise: kind.columnwise }),
        None => traced.packing.is_none().then_some(Next::One),
    });
    grads.chain(reads).chain(weights).collect()
}
