//! FP8 values that users pass to calls or get from them: inputs and outputs of layers, and their gradients.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAnyMethods, PyDictMethods, PyTuple};
use smallvec::SmallVec;
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};
use te_fast_core::program::{Beside, Bindings, Outer, Port, QuantizedKind};
use te_fast_core::quant::content::Content;
use te_fast_core::recipe::definition::Block;
use te_fast_core::recipe::usage::Usage;

use crate::error::Failure;
use crate::tensor::value::{Outside, QuantizedValue};
use crate::torch::operand::{contiguous_copy, fits};
use crate::torch::process::{State, contiguous_strides};
use crate::torch::reader::{Held, instance_dict, view_of};

const OP: &str = "ops";
/// The length of a column layout's rows is a multiple of this, as GEMMs need.
const GRANULE: usize = 16;

/// Bytes and scales of a layout.
#[derive(Debug)]
struct Part {
    data: Held,
    scale: Held,
}

/// An FP8 value that a call passes. It is read and never written.
#[derive(Debug)]
pub(crate) struct HandedValue {
    pub(crate) kind: QuantizedKind,
    row: Part,
    col: Option<Part>,
    /// The number of the row layout's values.
    content: Content,
    values: u64,
}

impl HandedValue {
    /// The value of a tensor whose view without memory is `nominal`.
    pub(crate) fn read(
        state: &State,
        nominal: &TensorView<'_>,
        value: &Bound<'_, QuantizedValue>,
        what: &'static str,
    ) -> Result<Self, Failure> {
        let py = value.py();
        let shared = QuantizedValue::snapshot(value)?;
        let (rows, cols) = (nominal.rows(), nominal.cols());
        let Some((data, scale)) = shared.part(py, false) else {
            let message = format!(
                "{what} has no row layout, which cannot be made from the column layout; quantise with rowwise usage, or give its dequantize()"
            );
            return Err(Error::state(OP, message).into());
        };
        let mut kind = shared.kind(Usage { rowwise: true, columnwise: false });
        let place = (nominal.device(), what);
        let row = Part {
            data: bytes(state, &data, rows * cols, place)?,
            scale: scales(state, &scale, kind, (rows, cols), place)?,
        };
        let col = match shared.part(py, true) {
            Some(part) => columns(state, part, kind, (rows, cols), place)?,
            None => None,
        };
        kind.usage.columnwise = col.is_some();
        let content = shared.row_content().clone();
        let values = content.values();
        Ok(Self { kind, row, col, content, values })
    }

    /// The tensor at a port.
    pub(crate) fn tensor<'py>(&self, py: Python<'py>, port: Port) -> Option<Bound<'py, PyAny>> {
        let col = self.col.as_ref();
        let tensor = match port {
            Port::Beside(_, Beside::RowScale) => Some(&self.row.scale),
            Port::Beside(_, Beside::Col) => col.map(|part| &part.data),
            Port::Beside(_, Beside::ColScale) => col.map(|part| &part.scale),
            _ => Some(&self.row.data),
        };
        tensor.map(|tensor| tensor.tensor(py).clone())
    }

    /// Sets the addresses of all parts.
    pub(crate) fn bind<'a>(&'a self, (outer, call): (Outer, &mut Bindings<'_, 'a>)) {
        call.set(outer.port(), self.row.data.ptr());
        call.set(Port::Beside(outer, Beside::RowScale), self.row.scale.ptr());
        if let Some(col) = &self.col {
            call.set(Port::Beside(outer, Beside::Col), col.data.ptr());
            call.set(Port::Beside(outer, Beside::ColScale), col.scale.ptr());
        }
    }

    /// A record by which later writes to the bytes are noticed.
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { content: self.content.clone(), values: self.values }
    }
}

/// The content of a value's bytes.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    content: Content,
    values: u64,
}

impl Stamp {
    /// Whether they were written since.
    pub(crate) fn is_stale(&self) -> bool {
        self.content.values() != self.values
    }
}

/// The bytes of a row layout, copied where kernels cannot read them.
fn bytes(
    state: &State,
    data: &Bound<'_, PyAny>,
    count: usize,
    (device, what): (Device, &'static str),
) -> Result<Held, Failure> {
    let view = view_of(&state.reader, data, "data of a quantised tensor")?;
    if view.numel() != count || view.dtype().size() != 1 {
        let got = format!("{:?} of {}", view.shape(), view.dtype());
        return Err(Error::shape(OP, what, format!("{count} bytes of data"), got).into());
    }
    if view.device() != device {
        return Err(Error::device(OP, what, format!("data on {device}"), view.device()).into());
    }
    if fits(&view) { Ok(Held::seen(data, &view)) } else { copied(state, data) }
}

/// A copy that kernels can read.
#[cold]
fn copied(state: &State, tensor: &Bound<'_, PyAny>) -> Result<Held, Failure> {
    Ok(Held::new(&state.reader, &contiguous_copy(tensor)?)?)
}

fn scale_sizes(kind: QuantizedKind, rows: usize, cols: usize) -> [usize; 2] {
    match kind.block {
        Block::Tensor => [1, 1],
        Block::Row => scale_shape(BlockShape::OneDimensional, rows, cols),
        Block::Square => scale_shape(BlockShape::TwoDimensional, rows, cols),
    }
}

/// The scales of a layout. Scales whose last dimension is not padded, as after permutations, are copied into padded
/// memory.
fn scales(
    state: &State,
    scale: &Bound<'_, PyAny>,
    kind: QuantizedKind,
    (rows, cols): (usize, usize),
    (device, what): (Device, &'static str),
) -> Result<Held, Failure> {
    let py = scale.py();
    let view = view_of(&state.reader, scale, "scales of a quantised tensor")?;
    if view.device() != device {
        return Err(Error::device(OP, what, format!("scales on {device}, where the data is"), view.device()).into());
    }
    let [blocks, length] = scale_sizes(kind, rows, cols);
    let count = blocks * length;
    if view.numel() == count && view.dtype() == DType::F32 {
        return if fits(&view) { Ok(Held::seen(scale, &view)) } else { copied(state, scale) };
    }
    let unpadded = [blocks as i64, rows as i64];
    if kind.block != Block::Row || view.dtype() != DType::F32 || view.shape() != unpadded {
        let got = format!("{:?} of {}", view.shape(), view.dtype());
        return Err(Error::shape(OP, what, format!("{count} scales of float32"), got).into());
    }
    let padded = state.empty_sized(py, device, &[blocks as i64, length as i64], DType::F32)?;
    padded.call_method1(intern!(py, "narrow"), (1, 0, rows))?.call_method1(intern!(py, "copy_"), (scale,))?;
    Ok(Held::new(&state.reader, &padded)?)
}

/// The column layout, if GEMMs can read it. With one scale, it is otherwise made from the row layout. With blocks of
/// 1x128 it holds its own values, so it is copied into the right layout.
fn columns(
    state: &State,
    (data, scale): (Bound<'_, PyAny>, Bound<'_, PyAny>),
    kind: QuantizedKind,
    (rows, cols): (usize, usize),
    place: (Device, &'static str),
) -> Result<Option<Part>, Failure> {
    let py = data.py();
    let view = view_of(&state.reader, &data, "data of a quantised tensor")?;
    if view.numel() != rows * cols || view.dtype().size() != 1 || view.device() != place.0 {
        let got = format!("{:?} of {} on {}", view.shape(), view.dtype(), view.device());
        return Err(
            Error::shape(OP, place.1, format!("{cols} x {rows} bytes of column layout on {}", place.0), got).into()
        );
    }
    let length = rows.next_multiple_of(GRANULE);
    // Memory of others may hold anything after the rows.
    let is_laid_out = rows == length && fits(&view);
    if !is_laid_out && kind.block != Block::Row {
        return Ok(None);
    }
    let scale = scales(state, &scale, kind, (cols, rows), place)?;
    if is_laid_out {
        return Ok(Some(Part { data: Held::seen(&data, &view), scale }));
    }
    let padded = state.empty_sized(py, place.0, &[cols as i64, length as i64], DType::U8)?;
    padded.call_method0(intern!(py, "zero_"))?;
    let flat = data.call_method1(intern!(py, "reshape"), (cols, rows))?;
    padded.call_method1(intern!(py, "narrow"), (1, 0, rows))?.call_method1(intern!(py, "copy_"), (flat,))?;
    Ok(Some(Part { data: Held::new(&state.reader, &padded)?, scale }))
}

/// Python's classes of quantised tensors.
struct Classes {
    per_tensor: Py<PyAny>,
    block: Py<PyAny>,
    make_wrapper_subclass: Py<PyAny>,
    strided: Py<PyAny>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

/// Tells the native side the classes of quantised tensors; once, at import.
#[pyfunction]
#[pyo3(signature = (*, per_tensor, block))]
pub(crate) fn install_tensors(py: Python<'_>, per_tensor: Py<PyAny>, block: Py<PyAny>) -> PyResult<()> {
    let torch = py.import("torch")?;
    let make_wrapper_subclass = torch.getattr("Tensor")?.getattr("_make_wrapper_subclass")?.unbind();
    let strided = torch.getattr("strided")?.unbind();
    let _ = CLASSES.set(py, Classes { per_tensor, block, make_wrapper_subclass, strided });
    Ok(())
}

fn classes(py: Python<'_>) -> Result<&Classes, Failure> {
    let missing = || Error::state(OP, "te_fast.tensor was not imported").into();
    CLASSES.get(py).ok_or_else(missing)
}

/// The quantizer of the tensors that an owner's calls return.
pub(crate) fn quantizer_of(owner: &Bound<'_, PyAny>, kind: QuantizedKind, is_grad: bool) -> Result<Py<PyAny>, Failure> {
    let py = owner.py();
    Ok(owner.call_method1(intern!(py, "_outer_quantizer"), (is_grad, kind.usage.columnwise))?.unbind())
}

/// Memory of a value in FP8 that a call makes.
pub(crate) struct Made<'py> {
    kind: QuantizedKind,
    shape: SmallVec<[i64; 4]>,
    device: Device,
    row: Bound<'py, PyAny>,
    row_scale: Bound<'py, PyAny>,
    col: Option<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)>,
}

impl<'py> Made<'py> {
    /// Memory for a value of this shape.
    pub(crate) fn allocate(
        state: &State,
        py: Python<'py>,
        (device, kind): (Device, QuantizedKind),
        shape: &[i64],
    ) -> Result<Self, Failure> {
        let cols = shape.last().map_or(1, |&cols| cols as usize);
        let rows = shape.iter().rev().skip(1).product::<i64>() as usize;
        let floats = |sizes: [usize; 2]| state.empty_sized(py, device, &sizes.map(|size| size as i64), DType::F32);
        let row = state.empty_sized(py, device, shape, DType::U8)?;
        let row_scale = if kind.block == Block::Tensor {
            state.empty_sized(py, device, &[1], DType::F32)?
        } else {
            floats(scale_sizes(kind, rows, cols))?
        };
        let col = if kind.usage.columnwise {
            let scale = (kind.block != Block::Tensor).then(|| floats(scale_sizes(kind, cols, rows))).transpose()?;
            Some((columns_of(state, py, device, (rows, cols), shape)?, scale))
        } else {
            None
        };
        Ok(Self { kind, shape: shape.into(), device, row, row_scale, col })
    }

    /// The format of the value.
    pub(crate) const fn kind(&self) -> QuantizedKind {
        self.kind
    }

    /// Sets the addresses of all parts.
    pub(crate) fn bind<'a>(
        &'a self,
        state: &State,
        (outer, call): (Outer, &mut Bindings<'_, 'a>),
    ) -> te_fast_core::Result<()> {
        call.set(outer.port(), state.pointer(Some(&self.row))?);
        call.set(Port::Beside(outer, Beside::RowScale), state.pointer(Some(&self.row_scale))?);
        if let Some((data, scale)) = &self.col {
            call.set(Port::Beside(outer, Beside::Col), state.pointer(Some(data))?);
            call.set(Port::Beside(outer, Beside::ColScale), state.pointer(scale.as_ref())?);
        }
        Ok(())
    }

    /// The tensor for users, with a nominal type.
    pub(crate) fn tensor(
        self,
        state: &State,
        dtype: DType,
        size: &Bound<'py, PyTuple>,
        quantizer: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyAny>, Failure> {
        let py = size.py();
        let classes = classes(py)?;
        let class = if self.kind.block == Block::Tensor { &classes.per_tensor } else { &classes.block };
        let device = self.row.getattr(intern!(py, "device"))?;
        let outside = Outside { shape: self.shape, dtype, device: self.device };
        let dtype = state.torch.dtype(py, dtype);
        // Without strides the tensor is contiguous.
        let arguments = (class, size, py.None(), py.None(), py.None(), dtype, &classes.strided, device);
        let made = classes.make_wrapper_subclass.bind(py).call1(arguments)?;
        let value = QuantizedValue::of_call(self.kind, outside, (self.row, self.row_scale), self.col);
        let attributes = instance_dict(&made)?;
        attributes.set_item(intern!(py, "_value"), Bound::new(py, value)?)?;
        attributes.set_item(intern!(py, "_quantizer"), quantizer)?;
        Ok(made)
    }
}

/// A column layout for a tensor of `shape`, with rows of the length that GEMMs need.
fn columns_of<'py>(
    state: &State,
    py: Python<'py>,
    device: Device,
    (rows, cols): (usize, usize),
    shape: &[i64],
) -> Result<Bound<'py, PyAny>, Failure> {
    let leading = shape.split_last().map_or(&[][..], |(_, leading)| leading);
    let size: Vec<i64> = std::iter::once(cols as i64).chain(leading.iter().copied()).collect();
    let length = rows.next_multiple_of(GRANULE);
    if length == rows {
        return Ok(state.empty_sized(py, device, &size, DType::U8)?);
    }
    let bytes = state.bytes(py, device, cols * length)?;
    let strides: Vec<i64> = std::iter::once(length as i64).chain(contiguous_strides(leading)).collect();
    Ok(bytes.call_method1(intern!(py, "as_strided"), (PyTuple::new(py, size)?, PyTuple::new(py, strides)?))?)
}
