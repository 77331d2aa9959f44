//! The tensors of a program's call: their source, and the check that a compiled program takes them.

use std::cell::OnceCell;

use pyo3::intern;
use pyo3::prelude::*;
use smallvec::SmallVec;
use te_fast_core::base::dtype::DType;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::{Error, Float};

use crate::error::{Failure, IntoPython};
use crate::program::handle::ProgramHandle;
use crate::tensor::given::{dequantized, given, nominal_view};
use crate::tensor::handed::HandedValue;
use crate::tensor::value::QuantizedValue;
use crate::torch::operand::{fits, readable};
use crate::torch::process::State;
use crate::torch::reader::view_of;

const OP: &str = "ops";

#[inline]
pub(crate) fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()
}

/// The present parameters of a program's modules; none if one is gone, or is neither a plain tensor nor, in FP8, a
/// quantised one.
#[inline]
pub(crate) fn parameters<'py>(
    state: &State,
    handle: &Bound<'py, ProgramHandle>,
    in_fp8: bool,
) -> PyResult<Option<Objects<'py>>> {
    let py = handle.py();
    let program = handle.try_borrow()?;
    let mut list = Objects::new();
    for param in &program.params {
        match param.get(py)? {
            Some(value) if state.torch.is_plain(&value) => list.push(value),
            Some(value) if in_fp8 && given(state, &value).is_some() => list.push(value),
            _ => return Ok(None),
        }
    }
    Ok(Some(list))
}

/// The same for a chain that needs them, or an error.
pub(crate) fn present_parameters<'py>(handle: &Bound<'py, ProgramHandle>) -> PyResult<Objects<'py>> {
    let py = handle.py();
    let program = handle.try_borrow()?;
    if program.has_parts() {
        let message = format!(
            "{}: experts with a parameter each do not run beside operations of the user's own; make them with single_grouped_weight=True and single_grouped_bias=True",
            program.name
        );
        return Err(Error::unsupported(OP, message)).python();
    }
    let found = program.params.iter().map(|param| {
        param.get(py)?.filter(|value| !value.is_none()).map_or_else(
            || {
                let message = format!("{}: parameter {} was removed", program.name, param.name.bind(py));
                Err(Error::state(OP, message)).python()
            },
            Ok,
        )
    });
    found.collect()
}

/// Whether all tensors have the type of the input. Unreadable tensors raise later, when they are read.
#[inline]
pub(crate) fn are_of_one_type(
    state: &State,
    input: &Bound<'_, PyAny>,
    params: &[Bound<'_, PyAny>],
    extras: &[Bound<'_, PyAny>],
) -> PyResult<bool> {
    let Some(x) = state.reader.read(input)? else { return Ok(true) };
    for tensor in params.iter().chain(extras) {
        if state.reader.read(tensor)?.is_some_and(|view| view.dtype() != x.dtype()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Facts of so many tensors.
pub(crate) type Flags = SmallVec<[bool; 8]>;

/// Some tensors of a call, without a heap allocation for usual numbers.
pub(crate) type Objects<'py> = SmallVec<[Bound<'py, PyAny>; 8]>;

/// Optional tensors.
pub(crate) type Optional<'py> = SmallVec<[Option<Bound<'py, PyAny>>; 8]>;

/// As many as `LayerNormMLP` has parameters.
pub(crate) type Views<'a> = SmallVec<[TensorView<'a>; 6]>;

/// The tensors of a call in a form that kernels read.
pub(crate) struct Tensors<'a> {
    pub(crate) x: TensorView<'a>,
    pub(crate) extras: Views<'a>,
    pub(crate) params: Views<'a>,
    /// Addresses of parameters that are read from copies; empty if there are none.
    origins: Vec<usize>,
    /// Quantised parameters, whose views have no memory.
    given: SmallVec<[(usize, Py<QuantizedValue>); 2]>,
    /// A quantised input, whose view has no memory.
    handed: Option<Handed>,
}

/// A quantised input. Its parts are read when the first user needs them: a call that gets an autograd node reads its
/// tensors again inside of it.
struct Handed {
    value: Py<QuantizedValue>,
    read: OnceCell<HandedValue>,
}

/// Tensors of a call, some of which are copies.
pub(crate) struct Copies<'py> {
    pub(crate) x: Bound<'py, PyAny>,
    pub(crate) extras: Vec<Bound<'py, PyAny>>,
    pub(crate) params: Vec<Bound<'py, PyAny>>,
    origins: Vec<usize>,
}

impl<'a> Tensors<'a> {
    /// Their views.
    #[inline]
    pub(crate) fn read(
        state: &State,
        x: &'a Bound<'_, PyAny>,
        extras: &'a [Bound<'_, PyAny>],
        params: &'a [Bound<'_, PyAny>],
    ) -> Result<Self, Failure> {
        let views = |tensors: &'a [Bound<'_, PyAny>], what| -> Result<Views<'a>, Error> {
            tensors.iter().map(|tensor| view_of(&state.reader, tensor, what)).collect()
        };
        let mut quantized = SmallVec::new();
        let mut read = Views::new();
        for (number, param) in params.iter().enumerate() {
            read.push(match given(state, param) {
                None => view_of(&state.reader, param, "a parameter")?,
                Some(value) => {
                    let view = nominal_view(state, param, &value)?;
                    quantized.push((number, value.unbind()));
                    view
                }
            });
        }
        let (x, handed) = match given(state, x) {
            None => (view_of(&state.reader, x, "the input")?, None),
            Some(value) => {
                let view = nominal_view(state, x, &value)?;
                (view, Some(Handed { value: value.unbind(), read: OnceCell::new() }))
            }
        };
        let extras = views(extras, "an extra input")?;
        Ok(Self { x, extras, params: read, origins: Vec::new(), given: quantized, handed })
    }

    /// Tensors that were read.
    pub(crate) fn of_views(x: TensorView<'a>, extras: Views<'a>, params: Views<'a>) -> Self {
        Self { x, extras, params, origins: Vec::new(), given: SmallVec::new(), handed: None }
    }

    /// The parameters that are quantised already, by number.
    #[inline]
    pub(crate) fn given(&self) -> &[(usize, Py<QuantizedValue>)] {
        &self.given
    }

    /// The input, if it is quantised already.
    #[inline]
    pub(crate) fn handed(&self, state: &State, py: Python<'_>) -> Result<Option<&HandedValue>, Failure> {
        let Some(Handed { value, read }) = &self.handed else { return Ok(None) };
        if let Some(known) = read.get() {
            return Ok(Some(known));
        }
        let value = HandedValue::read(state, &self.x, value.bind(py), "the input")?;
        Ok(Some(read.get_or_init(|| value)))
    }

    /// Whether kernels can read all of them without copies.
    #[inline]
    pub(crate) fn fit(&self) -> bool {
        fits(&self.x) && self.extras.iter().chain(&self.params).all(fits)
    }

    /// Whether a layer's program takes these as they are: rows of its size, in the type and on the device of the parameters.
    #[inline]
    pub(crate) fn are_of_one_kind(&self, cols: Option<usize>) -> bool {
        let x = &self.x;
        !x.shape().is_empty()
            && cols.is_none_or(|cols| cols != 0 && cols == x.cols())
            && self.params.iter().all(|param| param.dtype() == x.dtype() && param.device() == x.device())
    }

    /// Copies of tensors that kernels cannot read; quantised parameters stay as they are, or are dequantised.
    #[cold]
    pub(crate) fn copies<'py>(
        state: &State,
        x: &Bound<'py, PyAny>,
        extras: &[Bound<'py, PyAny>],
        params: &[Bound<'py, PyAny>],
        dequantizes: bool,
    ) -> Result<Copies<'py>, Failure> {
        let copied = |tensor: &Bound<'py, PyAny>, what| -> PyResult<_> {
            Ok(readable(state, tensor, what)?.unwrap_or_else(|| tensor.clone()))
        };
        let parameter = |param: &Bound<'py, PyAny>| match given(state, param) {
            None => copied(param, "a parameter"),
            Some(value) if dequantizes => dequantized(param, &value),
            Some(_) => Ok(param.clone()),
        };
        let origin = |param| match given(state, param) {
            None => Ok(view_of(&state.reader, param, "a parameter")?.data().address()),
            Some(_) => Ok(0),
        };
        Ok(Copies {
            // A quantised tensor was copied when it was read.
            x: if given(state, x).is_some() { x.clone() } else { copied(x, "the input")? },
            extras: extras.iter().map(|extra| copied(extra, "an extra input")).collect::<PyResult<_>>()?,
            params: params.iter().map(parameter).collect::<PyResult<_>>()?,
            origins: params.iter().map(origin).collect::<Result<_, Error>>()?,
        })
    }

    /// These, read from copies.
    pub(crate) fn from_copies(state: &State, copies: &'a Copies<'_>) -> Result<Self, Failure> {
        let tensors = Self::read(state, &copies.x, &copies.extras, &copies.params)?;
        Ok(Self { origins: copies.origins.clone(), ..tensors })
    }

    /// The address of a parameter itself, not of the copy.
    #[inline]
    pub(crate) fn origin(&self, param: usize) -> usize {
        self.origins.get(param).copied().unwrap_or_else(|| self.params[param].data().address())
    }

    /// Whether a parameter is read without a copy.
    pub(crate) fn is_in_place(&self, param: usize) -> bool {
        self.origin(param) == self.params[param].data().address()
    }
}

pub(crate) fn float(view: &TensorView<'_>, what: &'static str) -> Result<Float, Error> {
    view.dtype().as_float().ok_or_else(|| Error::dtype(OP, what, "float32, float16 or bfloat16", view.dtype()))
}

/// Whether tensors have these types and need these gradients.
pub(crate) fn same<D: Copy + Into<DType>>(list: &[(D, bool)], views: &[TensorView<'_>], grads: &[bool]) -> bool {
    list.len() == views.len()
        && list
            .iter()
            .zip(views)
            .zip(grads)
            .all(|((&(dtype, grad), view), &wanted)| grad == wanted && view.dtype() == dtype.into())
}

/// Types of extra inputs, and which need a gradient; ops check the types.
pub(crate) fn typed_extras(views: &[TensorView<'_>], grads: &[bool]) -> Vec<(DType, bool)> {
    views.iter().zip(grads).map(|(view, &grad)| (view.dtype(), grad)).collect()
}

pub(crate) fn typed(views: &[TensorView<'_>], grads: &[bool], what: &'static str) -> Result<Vec<(Float, bool)>, Error> {
    views.iter().zip(grads).map(|(view, &grad)| Ok((float(view, what)?, grad))).collect()
}
