//! Weight gradients that go into the caller's buffer `main_grad`, as in Megatron-LM.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::tensor::TensorView;

use crate::error::{Failure, IntoPython};
use crate::hooks::hooks;
use crate::tensor::given::weight_view;
use crate::torch::process::{State, Torch, contiguous_strides};
use crate::torch::reader::{instance_dict, view_of};

const OP: &str = "linear";

/// The buffer that a weight's gradient is added to.
pub(crate) struct MainGrad<'py> {
    pub(crate) grad: Bound<'py, PyAny>,
    pub(crate) dtype: DType,
    pub(crate) address: usize,
    /// Whether the gradient is added instead of written.
    pub(crate) accumulate: bool,
}

/// The `main_grad` of a weight.
pub(crate) fn main_grad<'py>(
    state: &State,
    weight: &Bound<'py, PyAny>,
    overwrite: bool,
) -> Result<MainGrad<'py>, Failure> {
    let attributes = Attributes::of(state, weight)?;
    let grad = attributes.buffer()?;
    let overwrites = overwrite || attributes.overwrites()?;
    let view = view_of(&state.reader, &grad, "main_grad")?;
    let w = weight_view(state, weight)?;
    check_main_grad(&view, w.shape(), w.device())?;
    let (dtype, address) = (view.dtype(), view.data().address());
    Ok(MainGrad { grad, dtype, address, accumulate: !overwrites })
}

/// The `main_grad` of a stack's part.
struct PartGrad<'py> {
    grad: Bound<'py, PyAny>,
    accumulate: bool,
    /// Whether the part is told that its gradient has been added.
    is_told: bool,
}

/// The `main_grad`s of the trained parts of a stack, in order.
pub(crate) struct MainGrads<'py> {
    list: SmallVec<[PartGrad<'py>; 8]>,
    /// Their type, if they share one.
    dtype: Option<DType>,
    /// All as one, if every part is trained, and if they are adjacent and take the gradient in the same way.
    whole: Option<MainGrad<'py>>,
}

/// The `main_grad`s of parts, by parameter.
pub(crate) type FusedParts<'py> = SmallVec<[(usize, MainGrads<'py>); 2]>;

impl<'py> MainGrads<'py> {
    /// Those of `parts`, which have so many `rows` of a stack of this `shape`.
    pub(crate) fn of(
        state: &State,
        (parts, trained): (&[Py<PyAny>], &[bool]),
        (rows, shape, device): (&[i64], &[i64], Device),
        (py, overwrite): (Python<'py>, bool),
    ) -> Result<Self, Failure> {
        let mut shape: SmallVec<[i64; 4]> = shape.into();
        let mut list: SmallVec<[PartGrad<'py>; 8]> = SmallVec::with_capacity(parts.len());
        let mut whole: Option<MainGrad<'py>> = None;
        let (mut end, mut dtype, mut is_one) = (0, None, !trained.contains(&false));
        for ((part, &rows), _) in parts.iter().zip(rows).zip(trained).filter(|(_, trained)| **trained) {
            let attributes = Attributes::of(state, part.bind(py))?;
            let grad = attributes.buffer()?;
            let accumulate = !(overwrite || attributes.overwrites()?);
            let is_told = attributes.get(intern!(py, "grad_added_to_main_grad"))?.is_some();
            if let Some(own) = shape.first_mut() {
                *own = rows;
            }
            let view = view_of(&state.reader, &grad, "main_grad")?;
            check_main_grad(&view, &shape, device)?;
            let (own, address, bytes) = (view.dtype(), view.data().address(), view.numel() * view.dtype().size());
            if let Some(first) = &whole {
                is_one &= address == end && (own, accumulate) == (first.dtype, first.accumulate);
                dtype = dtype.filter(|&dtype| dtype == own);
            } else {
                whole = Some(MainGrad { grad: grad.clone(), dtype: own, address, accumulate });
                dtype = Some(own);
            }
            end = address + bytes;
            list.push(PartGrad { grad, accumulate, is_told });
        }
        Ok(Self { list, dtype, whole: whole.filter(|_| is_one) })
    }

    /// All as one, if the product can add to them.
    pub(crate) fn take_whole(&mut self) -> Option<MainGrad<'py>> {
        self.whole.take()
    }

    /// Their type, if they share one.
    pub(crate) const fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Gives each its gradient, by one call of torch for all that add and one for all that overwrite.
    pub(crate) fn give(&self, py: Python<'py>, grads: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<()> {
        let (mut set, mut added) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for (part, grad) in self.list.iter().zip(grads) {
            let (buffers, grads) = if part.accumulate { &mut added } else { &mut set };
            buffers.push(part.grad.clone());
            grads.push(grad);
        }
        let torch = py.import(intern!(py, "torch"))?;
        for (function, (buffers, grads)) in [("_foreach_copy_", set), ("_foreach_add_", added)] {
            if !buffers.is_empty() {
                torch.call_method1(function, (buffers, grads))?;
            }
        }
        Ok(())
    }

    /// For each, whether its part is told.
    pub(crate) fn told(&self) -> impl Iterator<Item = bool> {
        self.list.iter().map(|part| part.is_told)
    }
}

/// Refuses a buffer that cannot take the gradient of a weight of this shape.
pub(crate) fn check_main_grad(view: &TensorView<'_>, shape: &[i64], device: Device) -> Result<(), Error> {
    if view.shape() == shape && view.is_contiguous() && view.device() == device && view.dtype().as_float().is_some() {
        return Ok(());
    }
    let got = format!("{} of shape {:?} on {}", view.dtype(), view.shape(), view.device());
    let expected = format!("a contiguous float tensor of shape {shape:?} on {device}");
    Err(Error::shape(OP, "main_grad", expected, got))
}

/// The attributes that users have set on a parameter. The look-up in the dict avoids an exception for a missing one.
enum Attributes<'a, 'py> {
    Plain(&'a Bound<'py, PyAny>, Bound<'py, PyDict>),
    Other(&'a Bound<'py, PyAny>),
}

impl<'a, 'py> Attributes<'a, 'py> {
    #[inline]
    fn of(state: &State, weight: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(if state.torch.is_plain(weight) { Self::Plain(weight, instance_dict(weight)?) } else { Self::Other(weight) })
    }

    #[inline]
    fn get(&self, name: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Plain(_, attributes) => attributes.get_item(name),
            Self::Other(weight) => weight.getattr_opt(name),
        }
    }

    /// The `main_grad` as it is.
    fn buffer(&self) -> Result<Bound<'py, PyAny>, Failure> {
        let (Self::Plain(weight, _) | Self::Other(weight)) = self;
        if self.get(intern!(weight.py(), "__fsdp_param__"))?.is_some() {
            return Ok(weight.call_method0("get_main_grad")?);
        }
        match self.get(intern!(weight.py(), "main_grad"))? {
            Some(grad) if !grad.is_none() => Ok(grad),
            _ => Err(Error::state(OP, "fuse_wgrad_accumulation=True needs weight.main_grad; set it before backward, or construct the layer without").into()),
        }
    }

    fn overwrites(&self) -> PyResult<bool> {
        let (Self::Plain(weight, _) | Self::Other(weight)) = self;
        self.get(intern!(weight.py(), "overwrite_main_grad"))?.map_or(Ok(false), |value| value.is_truthy())
    }
}

/// Whether a parameter with these attributes gets a dummy gradient, or asks for its `main_grad` by a function of its own, as those
/// do whose hooks reduce `main_grad`.
pub(crate) fn expects_dummy(attributes: &Bound<'_, PyDict>) -> PyResult<bool> {
    let py = attributes.py();
    Ok(attributes.contains(intern!(py, "grad_added_to_main_grad"))?
        || attributes.contains(intern!(py, "__fsdp_param__"))?)
}

/// Sets the `main_grad` of a weight to zero if its former value does not matter. With `heeds_mark`, a weight that is marked
/// with `overwrite_main_grad` counts, too.
pub(crate) fn begin(
    state: &State,
    weight: &Bound<'_, PyAny>,
    overwrite: bool,
    heeds_mark: bool,
) -> Result<(), Failure> {
    let attributes = Attributes::of(state, weight)?;
    if overwrite || (heeds_mark && attributes.overwrites()?) {
        attributes.buffer()?.call_method0("zero_")?;
    }
    Ok(())
}

/// Prepares the `main_grad` of a weight whose gradient `backward_dw` adds later; returns autograd's gradient.
pub(crate) fn give_later<'py>(
    state: &State,
    weight: &Bound<'py, PyAny>,
    overwrite: bool,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    begin(state, weight, overwrite, false)?;
    Ok(after_main_grad(state, weight)?)
}

/// Transformer Engine's rule: if the parameter has `grad_added_to_main_grad`, the attribute becomes true and autograd
/// gets a dummy gradient, so that hooks run; otherwise autograd gets none.
pub(crate) fn after_main_grad<'py>(state: &State, weight: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = weight.py();
    if Attributes::of(state, weight)?.get(intern!(py, "grad_added_to_main_grad"))?.is_none() {
        return Ok(None);
    }
    weight.setattr(intern!(py, "grad_added_to_main_grad"), true)?;
    hooks(py)?.dummy_wgrad.bind(py).call1((weight,)).map(Some)
}

/// Tells parts of one stack that their gradients have been added, and makes their dummy gradients. Parts of one size share
/// the memory of a dummy; each has its own tensor, since autograd copies one that has other owners.
#[derive(Default)]
pub(crate) struct Dummies<'py>(Option<(i64, Bound<'py, PyTuple>)>);

impl<'py> Dummies<'py> {
    /// The dummy gradient of a part with so many rows.
    pub(crate) fn tell(&mut self, state: &State, part: &Bound<'py, PyAny>, rows: i64) -> PyResult<Bound<'py, PyAny>> {
        let py = part.py();
        part.setattr(intern!(py, "grad_added_to_main_grad"), true)?;
        let zeros = Attributes::of(state, part)?.get(intern!(py, "zero_out_wgrad"))?;
        let has_zeros = zeros.map_or(Ok(false), |zeros| zeros.is_truthy())?;
        if let Some((known, alike)) = &self.0
            && (*known, has_zeros) == (rows, false)
        {
            return state.torch.alias(alike);
        }
        let dummy = hooks(py)?.dummy_wgrad.bind(py).call1((part,))?;
        if !has_zeros {
            let shape = view_of(&state.reader, &dummy, "a dummy gradient").python()?;
            self.0 = Some((rows, Torch::to_alias(&dummy, shape.shape(), &contiguous_strides(shape.shape()), 0)?));
        }
        Ok(dummy)
    }
}
