//! Weights that are quantised tensors, read by a program's call without torch's dispatch.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDictMethods;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::cuda::device::is_capturing;
use te_fast_core::quant::value::{Quantized, WeightLayout};
use te_fast_core::recipe::definition::{Block, Recipe};
use te_fast_core::runtime::lane::Place;
use te_fast_core::{Error, Fp8};

use crate::error::Failure;
use crate::tensor::kind::{fp8_name, scale_count};
use crate::tensor::value::{Outside, QuantizedValue};
use crate::torch::operand::{fits, readable};
use crate::torch::process::State;
use crate::torch::reader::{instance_dict, view_of};

const OP: &str = "ops";

/// The native value of a tensor that is a quantised one.
#[inline]
pub(crate) fn given<'py>(state: &State, tensor: &Bound<'py, PyAny>) -> Option<Bound<'py, QuantizedValue>> {
    if state.torch.is_plain(tensor) {
        return None;
    }
    let value = instance_dict(tensor).ok()?.get_item(intern!(tensor.py(), "_value")).ok()??;
    value.cast_into::<QuantizedValue>().ok()
}

/// The view of a quantised tensor: its shape and nominal type, without memory.
pub(crate) fn nominal_view<'a>(
    state: &State,
    tensor: &'a Bound<'_, PyAny>,
    value: &Bound<'_, QuantizedValue>,
) -> Result<TensorView<'a>, Failure> {
    let (known, has_bytes) = {
        let value = value.try_borrow()?;
        let known = value
            .outside()
            .and_then(|Outside { shape, dtype, device }| TensorView::new(DevPtr::null(), *device, *dtype, shape, None));
        (known, value.has_bytes())
    };
    let view = if known.is_some() { known } else { state.reader.read_outside(tensor)? };
    let view = view.filter(|view| view.dtype().as_float().is_some());
    view.filter(|_| has_bytes).ok_or_else(|| {
        let got = "one of another type, or whose bytes were freed";
        Error::dtype(OP, "a quantised parameter", "of float32, float16 or bfloat16, with data", got).into()
    })
}

/// The shape, type and device of a weight, quantised or not; the address of one that is not.
pub(crate) fn weight_view<'a>(state: &State, weight: &'a Bound<'_, PyAny>) -> Result<TensorView<'a>, Failure> {
    match given(state, weight) {
        None => Ok(view_of(&state.reader, weight, "weight")?),
        Some(value) => nominal_view(state, weight, &value),
    }
}

/// The tensors of both layouts; none for missing or invalid ones.
pub(crate) struct GivenWeight<'py>([Option<Part<'py>>; 2]);

impl<'py> GivenWeight<'py> {
    /// The layouts of `value` that a call reads, checked against a recipe and a number of experts.
    pub(crate) fn of_forward(
        state: &State,
        value: &Bound<'py, QuantizedValue>,
        (recipe, groups): (&Recipe, usize),
        place: (Device, &TensorView<'_>),
    ) -> Result<Self, Failure> {
        {
            let value = value.try_borrow()?;
            check_groups(value.groups(), groups)?;
            check_weight_kind(value.block_and_type(), recipe)?;
        }
        let row = QuantizedValue::snapshot(value)?.part(value.py(), false);
        let weight = Self([aligned(state, row)?, None]);
        weight.check(state, value, place)?;
        Ok(weight)
    }

    /// The column layout, made if it is missing; the row layout if a program reads no column layout.
    pub(crate) fn of_backward(
        state: &State,
        value: &Bound<'py, QuantizedValue>,
        layout: &WeightLayout,
        (place, nominal): (Place, &TensorView<'_>),
    ) -> Result<Self, Failure> {
        let py = value.py();
        let weight = if layout.usage.columnwise {
            let shared = QuantizedValue::snapshot(value)?;
            let mut made = None;
            if !shared.is_col_valid(py) {
                if matches!(place.device, Device::Cuda(_)) && is_capturing(place.stream)? {
                    let message = "a graph under capture cannot make the weight's column layout, whose bytes would exist when the graph runs; call weight.update_usage(columnwise_usage=True) before";
                    return Err(Error::state(OP, message).into());
                }
                if shared.keeps_col() {
                    QuantizedValue::transpose(value)?;
                } else {
                    let (data, scale) = shared.columns(py, false)?;
                    let scale = scale.or_else(|| Some(shared.part(py, false)?.1));
                    made = scale.map(|scale| (data, scale));
                }
            }
            let col = if made.is_some() { made } else { QuantizedValue::snapshot(value)?.part(py, true) };
            Self([None, aligned(state, col)?])
        } else {
            Self([aligned(state, QuantizedValue::snapshot(value)?.part(py, false))?, None])
        };
        weight.check(state, value, (place.device, nominal))?;
        Ok(weight)
    }

    /// Refuses memory that does not fit such a weight, since users may exchange it.
    fn check(
        &self,
        state: &State,
        value: &Bound<'_, QuantizedValue>,
        place: (Device, &TensorView<'_>),
    ) -> Result<(), Failure> {
        let Some(columnwise) = self.0.iter().position(Option::is_some) else {
            let message = "the weight's layout is not there; quantise it anew with rowwise usage";
            return Err(Error::state(OP, message).into());
        };
        let Some((data, scale)) = &self.0[columnwise] else { return Ok(()) };
        let bytes = view_of(&state.reader, data, "data of a quantised weight")?;
        let scales = view_of(&state.reader, scale, "scales of a quantised weight")?;
        let (block, groups) = value.try_borrow()?.block_and_groups();
        Ok(check_layout((block, groups), (&bytes, &scales), place, columnwise == 1)?)
    }

    /// Addresses in row and column layout.
    pub(crate) fn layouts(&self, state: &State) -> te_fast_core::Result<[Quantized<'_>; 2]> {
        let mut layouts = [Quantized::NONE; 2];
        for (layout, part) in layouts.iter_mut().zip(&self.0) {
            if let Some((data, scale)) = part {
                *layout = Quantized { data: state.pointer(Some(data))?, scale: state.pointer(Some(scale))? };
            }
        }
        Ok(layouts)
    }
}

/// Bytes and scales of one layout.
type Part<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The same with scales that GEMMs can read, copied if needed: an expert's scales follow those of the expert before it.
fn aligned<'py>(state: &State, part: Option<Part<'py>>) -> PyResult<Option<Part<'py>>> {
    let Some((data, scale)) = part else { return Ok(None) };
    let copy = readable(state, &scale, "scales of a quantised weight")?;
    Ok(Some((data, copy.unwrap_or(scale))))
}

/// Refuses a weight whose values are not one for each expert.
pub(crate) fn check_groups(values: usize, experts: usize) -> Result<(), Error> {
    if values == experts {
        return Ok(());
    }
    let message = format!(
        "the weight is a stack of {values} quantised values, and there are {experts} experts, each with scales of its own; make the weight by quantized_model_init"
    );
    Err(Error::state(OP, message))
}

/// Refuses a weight that is not quantised as a recipe quantises.
pub(crate) fn check_weight_kind((block, fp8): (Block, Fp8), recipe: &Recipe) -> Result<(), Error> {
    if block == recipe.weight.block && fp8 == recipe.fwd {
        return Ok(());
    }
    let message = format!(
        "the weight was quantised with {} to {}, and the recipe of the region asks for another kind; use the recipe of quantized_model_init",
        block.text(),
        fp8_name(fp8)
    );
    Err(Error::state(OP, message))
}

/// Refuses bytes and scales that do not fit a weight like `nominal`.
pub(crate) fn check_layout(
    (block, groups): (Block, usize),
    (bytes, scales): (&TensorView<'_>, &TensorView<'_>),
    (device, nominal): (Device, &TensorView<'_>),
    columnwise: bool,
) -> Result<(), Error> {
    let (rows, cols) = (nominal.rows() / groups, nominal.cols());
    let (rows, cols) = if columnwise { (cols, rows) } else { (rows, cols) };
    let expected = groups * scale_count(block, rows, cols);
    if bytes.numel() != groups * rows * cols || bytes.dtype().size() != 1 || !fits(bytes) {
        let got = format!("{:?} of {}, strides {:?}", bytes.shape(), bytes.dtype(), bytes.strides());
        let expected = format!("{groups} x {rows} x {cols} bytes, contiguous and on a multiple of 16");
        return Err(Error::shape(OP, "data of a quantised weight", expected, got));
    }
    if scales.numel() != expected || scales.dtype() != DType::F32 || !scales.is_contiguous() {
        let got = format!("{:?} of {}", scales.shape(), scales.dtype());
        let expected = format!("{expected} float32, contiguous");
        return Err(Error::shape(OP, "scales of a quantised weight", expected, got));
    }
    if bytes.device() != device || scales.device() != device {
        let got = format!("data on {} and scales on {}", bytes.device(), scales.device());
        return Err(Error::device(OP, "a quantised weight", format!("{device}, where the input is"), got));
    }
    if columnwise && !cols.is_multiple_of(16) {
        let expected = "a multiple of 16 for the gradient of the input";
        return Err(Error::shape(OP, "rows of a quantised weight", expected, cols));
    }
    Ok(())
}

/// The values of a quantised parameter as a plain tensor, for a call in high precision.
#[cold]
pub(crate) fn dequantized<'py>(
    tensor: &Bound<'py, PyAny>,
    value: &Bound<'py, QuantizedValue>,
) -> PyResult<Bound<'py, PyAny>> {
    let dtype = tensor.getattr(intern!(tensor.py(), "dtype"))?;
    QuantizedValue::dequantize(value, &dtype)
}
