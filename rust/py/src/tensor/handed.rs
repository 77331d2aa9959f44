//! FP8 values that users pass to calls or get from them: inputs and outputs of layers, and their gradients.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAnyMethods, PyDictMethods, PyTuple};
use te_fast_core::Error;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::program::{Beside, Bindings, Outer, Port, QuantizedKind};
use te_fast_core::quant::content::Content;
use te_fast_core::recipe::definition::Block;
use te_fast_core::recipe::usage::Usage;

use crate::error::Failure;
use crate::tensor::call_memory::{CallMemory, GRANULE, LayoutBytes, scale_sizes};
use crate::tensor::value::{Outside, QuantizedValue};
use crate::torch::operand::{contiguous_copy, fits};
use crate::torch::process::State;
use crate::torch::reader::{Held, instance_dict, view_of};

const OP: &str = "ops";

/// Bytes and scales of a layout.
#[derive(Debug)]
struct Part {
    data: Piece,
    scale: Piece,
}

/// A tensor, and the first byte of a value's part in it.
#[derive(Debug)]
struct Piece {
    held: Held,
    offset: usize,
}

impl Piece {
    fn ptr(&self) -> DevPtr<'_> {
        self.held.ptr().offset(self.offset)
    }
}

impl From<Held> for Piece {
    fn from(held: Held) -> Self {
        Self { held, offset: 0 }
    }
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
        if let Some(own) = Self::of_call(py, &*value.try_borrow()?) {
            return Ok(own);
        }
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
            data: bytes(state, &data, rows * cols, place)?.into(),
            scale: scales(state, &scale, kind, (rows, cols), place)?.into(),
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

    /// A value that a call has made, in the call's own memory; none if GEMMs cannot read it there, or if it has tensors,
    /// which users may have exchanged.
    fn of_call(py: Python<'_>, value: &QuantizedValue) -> Option<Self> {
        let (made, is_col_valid) = value.made()?;
        if !made.fits_gemms() {
            return None;
        }
        let piece = |columnwise, is_scale| {
            let (held, offset) = made.place(columnwise, is_scale)?;
            Some(Piece { held: held.again(py), offset })
        };
        let part = |columnwise| Some(Part { data: piece(columnwise, false)?, scale: piece(columnwise, true)? });
        let col = if is_col_valid { part(true) } else { None };
        let usage = Usage { rowwise: true, columnwise: col.is_some() };
        let content = value.row_content().clone();
        let values = content.values();
        Some(Self { kind: value.kind(usage), row: part(false)?, col, content, values })
    }

    /// The tensor that backward saves for a port: of the part, or of the memory that ends with it or begins with it.
    pub(crate) fn tensor<'py>(&self, py: Python<'py>, port: Port) -> Option<Bound<'py, PyAny>> {
        let col = self.col.as_ref();
        let piece = match port {
            Port::Beside(_, Beside::RowScale) => Some(&self.row.scale),
            Port::Beside(_, Beside::Col) => col.map(|part| &part.data),
            Port::Beside(_, Beside::ColScale) => col.map(|part| &part.scale),
            _ => Some(&self.row.data),
        };
        piece.map(|piece| piece.held.tensor(py).clone())
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

/// The first byte of a saved part in the memory of the call that made the value, as [`HandedValue::tensor`] gives it.
/// `saved` is the saved tensor; None if it is a tensor of the part alone.
pub(crate) fn offset_in_memory(
    (kind, rows, cols): (QuantizedKind, usize, usize),
    port: Port,
    saved: &TensorView<'_>,
    device: Device,
) -> Option<usize> {
    let (columnwise, is_scale) = match port {
        Port::Beside(_, Beside::RowScale) => (false, true),
        Port::Beside(_, Beside::Col) => (true, false),
        Port::Beside(_, Beside::ColScale) => (true, true),
        _ => (false, false),
    };
    // One scale lies in the column layout's memory, if there is one.
    let columnwise = if is_scale && kind.block == Block::Tensor { kind.usage.columnwise } else { columnwise };
    let bytes = LayoutBytes::new(kind, (rows, cols), columnwise);
    let is_memory = saved.dtype() == DType::U8 && saved.device() == device && saved.numel() == bytes.total();
    (is_memory && fits(saved)).then(|| bytes.offset(is_scale))
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
    let [blocks, length] = scale_sizes(kind.block, (rows, cols));
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
        return Ok(Some(Part { data: Held::seen(&data, &view).into(), scale: scale.into() }));
    }
    let padded = state.empty_sized(py, place.0, &[cols as i64, length as i64], DType::U8)?;
    padded.call_method0(intern!(py, "zero_"))?;
    let flat = data.call_method1(intern!(py, "reshape"), (cols, rows))?;
    padded.call_method1(intern!(py, "narrow"), (1, 0, rows))?.call_method1(intern!(py, "copy_"), (flat,))?;
    Ok(Some(Part { data: Held::new(&state.reader, &padded)?.into(), scale: scale.into() }))
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

/// A value in FP8 that a call makes.
pub(crate) struct Made {
    memory: CallMemory,
    device: Device,
}

impl Made {
    /// Memory for a value of this shape.
    pub(crate) fn allocate(
        state: &State,
        py: Python<'_>,
        (device, kind): (Device, QuantizedKind),
        shape: &[i64],
    ) -> Result<Self, Failure> {
        Ok(Self { memory: CallMemory::allocate(state, py, (device, kind), shape)?, device })
    }

    /// The format of the value.
    pub(crate) const fn kind(&self) -> QuantizedKind {
        self.memory.kind()
    }

    /// Sets the addresses of all parts.
    pub(crate) fn bind<'a>(&'a self, place: (Outer, &mut Bindings<'_, 'a>)) {
        self.memory.bind(place);
    }

    /// The tensor for users, with a nominal type.
    pub(crate) fn tensor<'py>(
        self,
        state: &State,
        dtype: DType,
        size: &Bound<'py, PyTuple>,
        quantizer: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyAny>, Failure> {
        let py = size.py();
        let classes = classes(py)?;
        let class = if self.kind().block == Block::Tensor { &classes.per_tensor } else { &classes.block };
        let device = self.memory.device(py)?;
        let outside = Outside { shape: self.memory.shape().into(), dtype, device: self.device };
        let dtype = state.torch.dtype(py, dtype);
        // Without strides the tensor is contiguous.
        let arguments = (class, size, py.None(), py.None(), py.None(), dtype, &classes.strided, device);
        let made = classes.make_wrapper_subclass.bind(py).call1(arguments)?;
        let value = QuantizedValue::of_call(self.memory, outside);
        let attributes = instance_dict(&made)?;
        attributes.set_item(intern!(py, "_value"), Bound::new(py, value)?)?;
        attributes.set_item(intern!(py, "_quantizer"), quantizer)?;
        Ok(made)
    }
}
