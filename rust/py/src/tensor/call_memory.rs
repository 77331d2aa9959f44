//! Memory of an FP8 value that a call makes: one allocation for each layout, with its scales.
//!
//! The next layer reads addresses, and its backward saves the allocations. Tensors for bytes and scales are made when
//! somebody asks for them: each costs the host as much as an allocation.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::ops::cast_block::{BlockShape, scale_shape};
use te_fast_core::ops::handover::ROW_BYTES;
use te_fast_core::program::{Beside, Bindings, Outer, Port, QuantizedKind};
use te_fast_core::recipe::definition::Block;

use crate::error::Failure;
use crate::torch::process::{State, contiguous_strides};
use crate::torch::reader::{Held, view_of};

/// The length of a column layout's rows is a multiple of this, as GEMMs need.
pub(crate) const GRANULE: usize = 16;
/// Bytes before the data are a multiple of this, so that the data is aligned as an allocation of its own would be for
/// kernels and GEMMs.
const ALIGNMENT: usize = 256;

type Object = Option<Py<PyAny>>;

/// The place of one layout's parts in its allocation: the scales, then the data up to the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayoutBytes {
    scales: usize,
    data: usize,
}

impl LayoutBytes {
    /// Those of a value with so many rows and columns. The one scale of per-tensor scaling lies in the memory that lives
    /// longest: backward reads the column layout.
    pub(crate) fn new(kind: QuantizedKind, (rows, cols): (usize, usize), columnwise: bool) -> Self {
        let sizes = if columnwise { (cols, rows) } else { (rows, cols) };
        let scales = match kind.block {
            Block::Tensor if columnwise == kind.usage.columnwise => ROW_BYTES,
            Block::Tensor => 0,
            _ => scale_sizes(kind.block, sizes).iter().product::<usize>() * size_of::<f32>(),
        };
        let data = if columnwise { cols * rows.next_multiple_of(GRANULE) } else { rows * cols };
        Self { scales: scales.next_multiple_of(ALIGNMENT), data }
    }

    pub(crate) const fn total(self) -> usize {
        self.scales + self.data
    }

    /// The first byte of the data or of the scales.
    pub(crate) const fn offset(self, is_scale: bool) -> usize {
        if is_scale { 0 } else { self.scales }
    }
}

/// Numbers of scales in both dimensions.
pub(super) fn scale_sizes(block: Block, (rows, cols): (usize, usize)) -> [usize; 2] {
    match block {
        Block::Tensor => [1, 1],
        Block::Row => scale_shape(BlockShape::OneDimensional, rows, cols),
        Block::Square => scale_shape(BlockShape::TwoDimensional, rows, cols),
    }
}

/// The memory of one layout.
#[derive(Debug)]
struct Part {
    held: Held,
    bytes: LayoutBytes,
}

impl Part {
    fn allocate(state: &State, py: Python<'_>, device: Device, bytes: LayoutBytes) -> Result<Self, Failure> {
        let memory = state.bytes(py, device, bytes.total())?;
        let held = Held::seen(&memory, &view_of(&state.reader, &memory, "a buffer")?);
        Ok(Self { held, bytes })
    }

    /// A view of the memory: torch's record of writes is shared with what backward has saved.
    fn view<'py>(
        &self,
        py: Python<'py>,
        (dtype, offset): (DType, usize),
        size: &[i64],
        stride: &[i64],
    ) -> PyResult<Bound<'py, PyAny>> {
        let (size, stride) = (PyTuple::new(py, size)?, PyTuple::new(py, stride)?);
        let mut memory = self.held.tensor(py).clone();
        if dtype == DType::F32 {
            let float32 = py.import(intern!(py, "torch"))?.getattr(intern!(py, "float32"))?;
            memory = memory
                .call_method1(intern!(py, "narrow"), (0, 0, self.bytes.scales))?
                .call_method1(intern!(py, "view"), (float32,))?;
        }
        memory.call_method1(intern!(py, "as_strided"), (size, stride, offset))
    }
}

/// The memory of a value.
#[derive(Debug)]
pub(crate) struct CallMemory {
    kind: QuantizedKind,
    /// The shape of the tensor.
    shape: SmallVec<[i64; 4]>,
    row: Part,
    col: Option<Part>,
}

impl CallMemory {
    pub(crate) fn allocate(
        state: &State,
        py: Python<'_>,
        (device, kind): (Device, QuantizedKind),
        shape: &[i64],
    ) -> Result<Self, Failure> {
        let sizes = rows_and_cols(shape);
        let part = |columnwise| Part::allocate(state, py, device, LayoutBytes::new(kind, sizes, columnwise));
        let col = kind.usage.columnwise.then(|| part(true)).transpose()?;
        Ok(Self { kind, shape: shape.into(), row: part(false)?, col })
    }

    /// The format of the value.
    pub(crate) const fn kind(&self) -> QuantizedKind {
        self.kind
    }

    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Whether GEMMs can read every layout as it lies there.
    pub(crate) fn fits_gemms(&self) -> bool {
        rows_and_cols(&self.shape).0.is_multiple_of(GRANULE)
    }

    pub(crate) fn device<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.row.held.tensor(py).getattr(intern!(py, "device"))
    }

    /// The allocation with a layout's data or with the scales that belong to it, and their first byte there.
    pub(crate) fn place(&self, columnwise: bool, is_scale: bool) -> Option<(&Held, usize)> {
        let has_one_scale = is_scale && self.kind.block == Block::Tensor;
        let part = match &self.col {
            Some(col) if columnwise || has_one_scale => col,
            None if columnwise && !has_one_scale => return None,
            _ => &self.row,
        };
        Some((&part.held, part.bytes.offset(is_scale)))
    }

    /// Sets the addresses of all parts that a call writes.
    pub(crate) fn bind<'a>(&'a self, (outer, call): (Outer, &mut Bindings<'_, 'a>)) {
        let at = |columnwise, is_scale| {
            let place = self.place(columnwise, is_scale);
            place.map_or(DevPtr::null(), |(held, offset)| held.ptr().offset(offset))
        };
        call.set(outer.port(), at(false, false));
        call.set(Port::Beside(outer, Beside::RowScale), at(false, true));
        if self.col.is_some() {
            let is_per_tensor = self.kind.block == Block::Tensor;
            call.set(Port::Beside(outer, Beside::Col), at(true, false));
            let scale = if is_per_tensor { DevPtr::null() } else { at(true, true) };
            call.set(Port::Beside(outer, Beside::ColScale), scale);
        }
    }

    /// Tensors of data and scales for row and column layout; the one scale of per-tensor scaling is the row layout's.
    pub(crate) fn tensors(&self, py: Python<'_>) -> PyResult<[(Object, Object); 2]> {
        let (rows, cols) = rows_and_cols(&self.shape);
        let scales = |part: &Part, sizes| {
            let size = match self.kind.block {
                Block::Tensor => SmallVec::from_slice(&[1]),
                block => scale_sizes(block, sizes).iter().map(|&size| size as i64).collect::<SmallVec<[i64; 2]>>(),
            };
            part.view(py, (DType::F32, 0), &size, &contiguous_strides(&size)).map(|view| Some(view.unbind()))
        };
        let is_per_tensor = self.kind.block == Block::Tensor;
        let strides = contiguous_strides(&self.shape);
        let row = self.row.view(py, (DType::U8, self.row.bytes.scales), &self.shape, &strides)?;
        let row_scale = match &self.col {
            Some(col) if is_per_tensor => scales(col, (1, 1))?,
            _ => scales(&self.row, (rows, cols))?,
        };
        let col = match &self.col {
            None => (None, None),
            Some(part) => {
                let leading = self.shape.split_last().map_or(&[][..], |(_, leading)| leading);
                let one = [cols as i64];
                let size: SmallVec<[i64; 4]> = one.iter().chain(leading).copied().collect();
                let mut strides = contiguous_strides(&size);
                if let Some(first) = strides.first_mut() {
                    *first = rows.next_multiple_of(GRANULE) as i64;
                }
                let data = part.view(py, (DType::U8, part.bytes.scales), &size, &strides)?;
                (Some(data.unbind()), if is_per_tensor { None } else { scales(part, (cols, rows))? })
            }
        };
        Ok([(Some(row.unbind()), row_scale), col])
    }
}

/// Rows and columns of a shape.
fn rows_and_cols(shape: &[i64]) -> (usize, usize) {
    let cols = shape.last().map_or(1, |&cols| cols as usize);
    (shape.iter().rev().skip(1).product::<i64>() as usize, cols)
}
