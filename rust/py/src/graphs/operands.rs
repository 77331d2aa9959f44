//! The tensors of an operator's call, in order.

use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;

use crate::error::Failure;
use crate::graphs::OP;
use crate::program::tensors::{Objects, Views};
use crate::torch::operand::{fits, readable};
use crate::torch::process::State;
use crate::torch::reader::view_of;

/// The tensors of one argument, each of which is taken once.
pub(super) struct Operands<'a, 'py> {
    objects: &'a [Bound<'py, PyAny>],
    views: SmallVec<[TensorView<'a>; 12]>,
    next: usize,
    /// All tensors that the operator was given, and for each of these the end of its parts among them; none without parts.
    parts: Option<(&'a [Bound<'py, PyAny>], &'a [usize])>,
}

/// One tensor, and the view of it or of its copy.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a, 'py> {
    pub(super) object: &'a Bound<'py, PyAny>,
    pub(super) view: TensorView<'a>,
    /// The tensors that it was joined from, or itself.
    pub(super) parts: &'a [Bound<'py, PyAny>],
}

impl<'a, 'py> Operands<'a, 'py> {
    pub(super) fn read(state: &State, objects: &'a [Bound<'py, PyAny>]) -> Result<Self, Failure> {
        Self::read_as(state, objects, objects)
    }

    /// The same for tensors, some of which are read from copies.
    pub(super) fn read_as(
        state: &State,
        objects: &'a [Bound<'py, PyAny>],
        copies: &'a [Bound<'py, PyAny>],
    ) -> Result<Self, Failure> {
        let mut read = Self { objects, views: SmallVec::new(), next: 0, parts: None };
        for object in copies {
            read.views.push(view_of(&state.reader, object, "a tensor of a compiled call")?);
        }
        Ok(read)
    }

    /// Notes from which of the operator's tensors these were joined.
    pub(super) fn of_parts(mut self, given: &'a [Bound<'py, PyAny>], ends: &'a [usize]) -> Self {
        self.parts = Some((given, ends));
        self
    }

    /// Copies of tensors that kernels cannot read; none if kernels can read all.
    #[inline]
    pub(super) fn copies(&self, state: &State) -> PyResult<Option<Objects<'py>>> {
        if self.views.iter().all(fits) {
            return Ok(None);
        }
        let readable =
            |object| Ok(readable(state, object, "a tensor of a compiled call")?.unwrap_or_else(|| object.clone()));
        self.objects.iter().map(readable).collect::<PyResult<_>>().map(Some)
    }

    /// Refuses memory that kernels cannot write, among the first `count` tensors.
    pub(super) fn check_written(&self, count: usize) -> Result<(), Error> {
        if self.views.iter().take(count).all(fits) {
            return Ok(());
        }
        let message = "the compiler made a strided or misaligned tensor for a result; compile with another backend or without its layout options";
        Err(Error::state(OP, message))
    }

    /// Number of tensors that have not been taken.
    pub(super) fn left(&self) -> usize {
        self.views.len() - self.next
    }

    /// Rows of the first tensor.
    pub(super) fn rows(&self) -> usize {
        self.views.first().map_or(0, TensorView::rows)
    }

    /// The next tensors, without taking them.
    pub(super) fn peek(&self, count: usize) -> Result<SmallVec<[Operand<'a, 'py>; 4]>, Error> {
        (self.next..self.next + count).map(|at| self.at(at)).collect()
    }

    #[inline]
    pub(super) fn take(&mut self) -> Result<Operand<'a, 'py>, Error> {
        let operand = self.at(self.next)?;
        self.next += 1;
        Ok(operand)
    }

    fn at(&self, at: usize) -> Result<Operand<'a, 'py>, Error> {
        let missing =
            || Error::state(OP, "a compiled call brings fewer tensors than it was traced with; compile it again");
        let object = self.objects.get(at).ok_or_else(missing)?;
        let own = std::slice::from_ref(object);
        let parts = self.parts.map_or(own, |(given, ends)| match at {
            0 => &given[..ends[0]],
            _ => &given[ends[at - 1]..ends[at]],
        });
        Ok(Operand { object, view: self.views[at], parts })
    }

    /// Takes the next tensor, with at least a number of elements of a type, on the device.
    #[inline]
    pub(super) fn take_sized(&mut self, elements: usize, dtype: DType, device: Device) -> Result<DevPtr<'a>, Error> {
        let Operand { view, .. } = self.take()?;
        if view.numel() >= elements && view.dtype() == dtype && view.device() == device {
            return Ok(view.data());
        }
        let got = format!("{} of {} on {}", view.numel(), view.dtype(), view.device());
        Err(Error::shape(OP, "a tensor of a compiled call", format!("{elements} elements of {dtype} on {device}"), got))
    }

    /// Views of the next ones.
    pub(super) fn take_views(&mut self, count: usize) -> Result<Views<'a>, Error> {
        (0..count).map(|_| Ok(self.take()?.view)).collect()
    }
}
