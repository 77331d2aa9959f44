//! The value of a user's quantised tensor: bytes and scales in one or both layouts, and its casts.
//!
//! Users may read and replace the inner tensors, and torch may free their memory. So each use reads addresses again.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;
use te_fast_core::base::dtype::{DType, Device};
use te_fast_core::base::pointer::DevPtr;
use te_fast_core::base::tensor::TensorView;
use te_fast_core::ops::cast_block::scale_shape;
use te_fast_core::ops::cast_groups::Division;
use te_fast_core::ops::transpose::{TransposePlan, TransposePointers, TransposeSpec};
use te_fast_core::program::QuantizedKind;
use te_fast_core::quant::content::{Content, Versions};
use te_fast_core::quant::quantizer::{QuantGroups, QuantPlan, QuantPointers, QuantSpec};
use te_fast_core::recipe::definition::{Block, Quantization, Scaling};
use te_fast_core::recipe::usage::Usage;
use te_fast_core::{Error, Fp8};

use crate::direct::call::DirectCall;
use crate::direct::tensors::{contiguous, fp8_named, single_f32};
use crate::error::IntoPython;
use crate::tensor::dequantize::{dequantized, from_columns};
use crate::tensor::kind::{block_numbered, block_shape, fp8_name, scale_count};
use crate::torch::process::{State, contiguous_strides, state};
use crate::torch::reader::view_of;

const OP: &str = "quantize";
/// Alignment of addresses and rows of a layout that kernels write.
const ALIGNMENT: usize = 16;

type Object = Option<Py<PyAny>>;
type Sizes = SmallVec<[i64; 4]>;

/// One layout.
#[derive(Debug, Default)]
struct Layout {
    data: Object,
    /// Per-tensor scaling has one scale, which the row layout stores even without data.
    scale: Object,
    content: Content,
}

impl Layout {
    fn shared(&self, py: Python<'_>) -> Self {
        let of = |object: &Object| object.as_ref().map(|tensor| tensor.clone_ref(py));
        Self { data: of(&self.data), scale: of(&self.scale), content: self.content.clone() }
    }
}

/// The shape, nominal type and device of the one tensor that has a value.
#[derive(Clone, Debug)]
pub(crate) struct Outside {
    pub(crate) shape: Sizes,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

/// A quantised value.
#[pyclass(module = "te_fast._native", name = "QuantizedValue")]
#[derive(Debug)]
pub(crate) struct QuantizedValue {
    block: Block,
    fp8: Fp8,
    /// Number of adjacent values with their own scales, such as the weights of experts.
    groups: usize,
    row: Layout,
    col: Layout,
    /// Whether a column layout that a backward makes is kept; not if the bytes are gathered again for each backward.
    #[pyo3(get, set)]
    keeps_col: bool,
    /// Known of a value that a call has made, and whose tensor nobody else has.
    outside: Option<Outside>,
}

/// Rule of scales: whether from the tensor, smallest amax, whether powers of two.
pub(super) type Rule = (bool, f32, bool);

#[pymethods]
impl QuantizedValue {
    /// Bytes and inverse scales of both layouts, None for missing ones; `block` is 0 (one scale), 1 (1x128) or 2
    /// (128x128). Of several `groups`, all of them are stacks.
    #[new]
    #[pyo3(signature = (block, fp8, row, row_scale, col, col_scale, groups=1))]
    fn new(
        py: Python<'_>,
        block: u8,
        fp8: &str,
        row: Object,
        row_scale: Object,
        col: Object,
        col_scale: Object,
        groups: usize,
    ) -> PyResult<Self> {
        let block = block_numbered(block)?;
        let layout = |data, scale| Layout { data, scale, content: Content::new() };
        let (row, col) = (layout(row, row_scale), layout(col, col_scale));
        let (fp8, groups) = (fp8_named(fp8)?, groups.max(1));
        let value = Self { block, fp8, groups, row, col, keeps_col: true, outside: None };
        value.agree(py);
        Ok(value)
    }

    /// 0 for one scale, 1 for a scale per 1x128, 2 for one per 128x128.
    #[getter]
    fn block(&self) -> u8 {
        self.block as u8
    }

    /// Number of values in the stack; 1 without a stack.
    #[getter]
    pub(crate) const fn groups(&self) -> usize {
        self.groups
    }

    /// `e4m3` or `e5m2`.
    #[getter]
    pub(super) fn fp8(&self) -> &'static str {
        fp8_name(self.fp8)
    }

    #[setter]
    fn set_fp8(&mut self, name: &str) -> PyResult<()> {
        self.fp8 = fp8_named(name)?;
        Ok(())
    }

    /// Bytes of the row layout.
    #[getter]
    fn row(&self, py: Python<'_>) -> Object {
        self.row.data.as_ref().map(|tensor| tensor.clone_ref(py))
    }

    /// Replaces the bytes; the column layout then counts as out of date.
    #[setter]
    fn set_row(slf: &Bound<'_, Self>, data: Object) -> PyResult<()> {
        let mut value = slf.try_borrow_mut()?;
        value.row.content = Content::new();
        let former = std::mem::replace(&mut value.row.data, data);
        drop(value);
        drop(former);
        Ok(())
    }

    /// Its inverse scales.
    #[getter]
    fn row_scale(&self, py: Python<'_>) -> Object {
        self.row.scale.as_ref().map(|tensor| tensor.clone_ref(py))
    }

    #[setter]
    fn set_row_scale(slf: &Bound<'_, Self>, scale: Object) -> PyResult<()> {
        let former = std::mem::replace(&mut slf.try_borrow_mut()?.row.scale, scale);
        drop(former);
        Ok(())
    }

    /// Bytes of the column layout.
    #[getter]
    fn col(&self, py: Python<'_>) -> Object {
        self.col.data.as_ref().map(|tensor| tensor.clone_ref(py))
    }

    /// Replaces the bytes, which have the values of the row layout.
    #[setter]
    fn set_col(slf: &Bound<'_, Self>, data: Object) -> PyResult<()> {
        let mut value = slf.try_borrow_mut()?;
        value.col.content = Content::new();
        let former = std::mem::replace(&mut value.col.data, data);
        drop(value);
        drop(former);
        Self::snapshot(slf)?.agree(slf.py());
        Ok(())
    }

    /// Its inverse scales; the one scale of a value that has one.
    #[getter]
    fn col_scale(&self, py: Python<'_>) -> Object {
        let layout = if self.block == Block::Tensor { &self.row } else { &self.col };
        layout.scale.as_ref().map(|tensor| tensor.clone_ref(py))
    }

    #[setter]
    fn set_col_scale(slf: &Bound<'_, Self>, scale: Object) -> PyResult<()> {
        let former = std::mem::replace(&mut slf.try_borrow_mut()?.col.scale, scale);
        drop(former);
        Ok(())
    }

    /// Whether there is a column layout with the values of the row layout.
    #[getter]
    fn col_is_valid(slf: &Bound<'_, Self>) -> PyResult<bool> {
        Ok(Self::snapshot(slf)?.is_col_valid(slf.py()))
    }

    /// Notes whether the column layout has the values of the row layout.
    #[setter]
    fn set_col_is_valid(slf: &Bound<'_, Self>, valid: bool) -> PyResult<()> {
        if valid {
            Self::snapshot(slf)?.agree(slf.py());
        } else {
            slf.try_borrow_mut()?.col.content = Content::new();
        }
        Ok(())
    }

    /// Another value over the same bytes and scales.
    fn share(&self, py: Python<'_>) -> Self {
        let (row, col) = (self.row.shared(py), self.col.shared(py));
        let &Self { block, fp8, groups, keeps_col, .. } = self;
        Self { block, fp8, groups, row, col, keeps_col, outside: None }
    }

    /// Notes that others have written the bytes of the row layout.
    fn note_write(&self) {
        self.row.content.write();
    }

    /// Shares the record of `other`, whose bytes these are in another shape.
    fn note_same_bytes(&mut self, other: &Bound<'_, Self>) -> PyResult<()> {
        let other = other.try_borrow()?;
        self.row.content = other.row.content.clone();
        self.col.content = other.col.content.clone();
        Ok(())
    }

    /// Quantises `x` into these layouts (row, column), in existing memory if it fits; other layouts are dropped.
    /// Existing layouts must have the shape of `x`. Delayed scaling passes `scale` and a maximum to raise, for a stack
    /// one for each value.
    #[pyo3(signature = (x, usage, rule, scale=None, amax=None, noop=None, /))]
    pub(super) fn quantize(
        slf: &Bound<'_, Self>,
        x: &Bound<'_, PyAny>,
        usage: (bool, bool),
        rule: Rule,
        scale: Option<&Bound<'_, PyAny>>,
        amax: Option<&Bound<'_, PyAny>>,
        noop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let view = contiguous(state(slf.py())?, x, OP, "x")?;
        Self::quantize_view(slf, &view, usage, rule, scale, amax, noop)?;
        Self::snapshot(slf)?.agree(slf.py());
        Ok(())
    }

    /// Makes the column layout from the row layout, in existing memory if it fits. Blocks of 1x128 need the original
    /// values for it.
    pub(crate) fn transpose(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let value = Self::snapshot(slf)?;
        let (col, col_scale) = value.columns(py, true)?;
        let mut value = slf.try_borrow_mut()?;
        let content = value.col.content.clone();
        let col = Layout { data: Some(col.unbind()), scale: col_scale.map(Bound::unbind), content };
        let former = std::mem::replace(&mut value.col, col);
        drop(value);
        drop(former);
        Self::snapshot(slf)?.agree(py);
        Ok(())
    }

    /// The values, as a tensor of `dtype`: float32, float16 or bfloat16.
    pub(crate) fn dequantize<'py>(slf: &Bound<'py, Self>, dtype: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let state = state(py)?;
        let (data, scale, columnwise, kind) = {
            let value = slf.try_borrow()?;
            let columnwise = value.row.data.is_none();
            let (data, scale) =
                if columnwise { (value.col(py), value.col_scale(py)) } else { (value.row(py), value.row_scale(py)) };
            (data, scale, columnwise, (value.block, value.fp8, value.groups))
        };
        let (Some(data), Some(scale)) = (data, scale) else {
            return Err(Error::state("dequantize", "the quantised tensor has no data, or no scales")).python();
        };
        let (data, scale) = (data.into_bound(py), scale.into_bound(py));
        let contiguous = |tensor: Bound<'py, PyAny>| {
            if view_of(&state.reader, &tensor, "a quantised tensor").is_ok_and(|view| view.is_contiguous()) {
                return Ok(tensor);
            }
            tensor.call_method0(intern!(py, "contiguous"))
        };
        let (data, scale) = (contiguous(data)?, contiguous(scale)?);
        let out = dequantized(state, (&data, &scale), kind, dtype, columnwise)?;
        if columnwise { from_columns(&out, kind.2) } else { Ok(out) }
    }

    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 calls with")]
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        [&self.row.data, &self.row.scale, &self.col.data, &self.col.scale]
            .into_iter()
            .flatten()
            .try_for_each(|tensor| visit.call(tensor))
    }

    fn __clear__(&mut self) {
        (self.row, self.col) = (Layout::default(), Layout::default());
    }
}

/// A layout to write: the users' tensor, and the tensor for kernels, which differs if they cannot write the users'.
pub(super) struct Target<'py> {
    seen: Bound<'py, PyAny>,
    pub(super) written: Bound<'py, PyAny>,
    is_fresh: bool,
}

pub(super) struct Targets<'py> {
    pub(super) row: Option<Target<'py>>,
    pub(super) row_scale: Option<Bound<'py, PyAny>>,
    pub(super) col: Option<Target<'py>>,
    pub(super) col_scale: Option<Bound<'py, PyAny>>,
}

impl QuantizedValue {
    /// The same for a view: of a plain tensor, or of its memory as another shape.
    pub(super) fn quantize_view(
        slf: &Bound<'_, Self>,
        view: &TensorView<'_>,
        usage: (bool, bool),
        rule: Rule,
        scale: Option<&Bound<'_, PyAny>>,
        amax: Option<&Bound<'_, PyAny>>,
        noop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let state = state(slf.py())?;
        let usage = Usage { rowwise: usage.0, columnwise: usage.1 };
        let value = Self::snapshot(slf)?;
        let (scale, slots) = slots_of(state, scale, "scale", (view, value.groups))?;
        let (amax, _) = slots_of(state, amax, "amax", (view, value.groups))?;
        let noop = single_f32(state, noop, "noop_flag", view)?;
        let io = QuantPointers { x: view.data(), scale, amax, noop, ..QuantPointers::default() };
        let plan = value.plan(state, slf.py(), (view, slots), usage, rule)?;
        let call = DirectCall::new(state, slf.py(), OP, view.device())?;
        let targets = value.targets(&call, view, usage, !io.noop.is_null())?;
        if view.numel() != 0 {
            let io = QuantPointers {
                row: call.pointer(targets.row.as_ref().map(|row| &row.written))?,
                row_scale: call.pointer(targets.row_scale.as_ref())?,
                col: call.pointer(targets.col.as_ref().map(|col| &col.written))?,
                col_scale: call.pointer(targets.col_scale.as_ref())?,
                ..io
            };
            call.with_lane(plan.scratch_bytes(), |lane| {
                let (scratch, counters) = (lane.workspace.scratch, lane.workspace.counters);
                plan.run(&mut lane.target, &QuantPointers { scratch, counters, ..io })
            })?;
        }
        drop(call);
        Self::take(slf, targets)
    }

    /// The same bytes and scales in a new value, which may be borrowed while Python runs.
    pub(crate) fn snapshot(slf: &Bound<'_, Self>) -> PyResult<Self> {
        Ok(slf.try_borrow()?.share(slf.py()))
    }

    /// Whether there is a column layout with the values of the row layout.
    pub(crate) fn is_col_valid(&self, py: Python<'_>) -> bool {
        self.col.data.is_some()
            && (self.row.data.is_none() || self.col.content.agrees(&self.row.content, self.versions(py)))
    }

    /// Bytes and scales of a valid layout.
    pub(crate) fn part<'py>(
        &self,
        py: Python<'py>,
        columnwise: bool,
    ) -> Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let (data, scale) = if columnwise {
            (self.col.data.as_ref().filter(|_| self.is_col_valid(py)), self.col_scale(py))
        } else {
            (self.row.data.as_ref(), self.row_scale(py))
        };
        Some((data?.bind(py).clone(), scale?.into_bound(py)))
    }

    /// Format of the value, with the existing layouts.
    pub(crate) const fn kind(&self, usage: Usage) -> QuantizedKind {
        QuantizedKind { dtype: self.fp8, block: self.block, usage }
    }

    /// What its tensor is, if that is known.
    pub(crate) const fn outside(&self) -> Option<&Outside> {
        self.outside.as_ref()
    }

    /// Whether there are bytes in either layout.
    pub(crate) const fn has_bytes(&self) -> bool {
        self.row.data.is_some() || self.col.data.is_some()
    }

    /// The bytes of the existing layouts.
    pub(super) fn bytes<'py>(&self, py: Python<'py>) -> impl Iterator<Item = Bound<'py, PyAny>> {
        [self.row(py), self.col(py)].into_iter().flatten().map(move |data| data.into_bound(py))
    }

    /// Whether it has such blocks, as the `block` of Python's, and is a stack of so many values.
    pub(super) fn is_of(&self, block: u8, groups: usize) -> bool {
        (self.block as u8, self.groups) == (block, groups)
    }

    /// The record of the row layout.
    pub(crate) const fn row_content(&self) -> &Content {
        &self.row.content
    }

    /// A value that a call has made for one tensor: bytes and scales of its row layout and of its column layout, with
    /// equal values.
    pub(crate) fn of_call<'py>(
        kind: QuantizedKind,
        outside: Outside,
        (row, row_scale): (Bound<'py, PyAny>, Bound<'py, PyAny>),
        col: Option<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)>,
    ) -> Self {
        let layout = |data: Bound<'py, PyAny>, scale: Option<Bound<'py, PyAny>>| Layout {
            data: Some(data.unbind()),
            scale: scale.map(Bound::unbind),
            content: Content::new(),
        };
        let col = col.map_or_else(Layout::default, |(data, scale)| layout(data, scale));
        let row = layout(row, Some(row_scale));
        let (block, fp8, outside) = (kind.block, kind.dtype, Some(outside));
        let value = Self { block, fp8, groups: 1, row, col, keeps_col: true, outside };
        if value.col.data.is_some() {
            value.col.content.agree(&value.row.content, [Some(0), Some(0)]); // versions of new memory
        }
        value
    }

    /// The column layout, from the row layout; with `reuses`, in the former one's memory. Both layouts share one scale.
    pub(crate) fn columns<'py>(
        &self,
        py: Python<'py>,
        reuses: bool,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let state = state(py)?;
        let (Some((data, scale)), true) = (self.part(py, false), self.block != Block::Row) else {
            let message = "a column layout is made of a row layout with one scale, or with one for each 128x128; quantise with rowwise and columnwise usage";
            return Err(Error::state(OP, message)).python();
        };
        let contiguous = |tensor: &Bound<'py, PyAny>| {
            tensor.call_method0(intern!(py, "detach"))?.call_method0(intern!(py, "contiguous"))
        };
        let (data, scale) = (contiguous(&data)?, contiguous(&scale)?);
        let view = view_of(&state.reader, &data, "data of the quantised tensor").python()?;
        let scales = view_of(&state.reader, &scale, "scales of the quantised tensor").python()?;
        let (rows, cols, block_scales) = (view.rows() / self.groups, view.cols(), self.block == Block::Square);
        let call = DirectCall::new(state, py, OP, view.device())?;
        call.same_device(&scales, "scales of the quantised tensor")?;
        let expected = self.scale_count(rows, cols);
        if scales.numel() != expected || scales.dtype() != DType::F32 || view.dtype().size() != 1 {
            let got = format!("{:?} of {} beside {}", scales.shape(), scales.dtype(), view.dtype());
            return Err(Error::shape(OP, "scales", format!("{expected} float32 beside bytes"), got)).python();
        }
        let plan = TransposePlan::new(TransposeSpec { rows, cols, padded: false, block_scales }).python()?;
        let size = self.col_size(view.shape());
        let kept = |object: &Object| object.as_ref().filter(|_| reuses).map(|tensor| tensor.bind(py).clone());
        let col = kept(&self.col.data).filter(|kept| fits_columns(&call, kept, &size));
        let col = col.map_or_else(|| call.empty(&size, DType::U8), Ok)?;
        let shape = self.scale_size(cols, rows);
        let col_scale = block_scales.then(|| kept_or_new(&call, kept(&self.col.scale), &shape)).transpose()?;
        let (out_t, scale_t) = (call.pointer(Some(&col))?, call.pointer(col_scale.as_ref())?);
        let scale_bytes = size_of::<f32>() * expected / self.groups;
        let of_group = |group: usize| TransposePointers {
            q: view.data().offset(group * rows * cols),
            out_t: out_t.offset(group * plan.out_bytes()),
            scale: scales.data().offset(group * scale_bytes),
            scale_t: scale_t.offset(group * plan.scale_bytes()),
        };
        if view.numel() != 0 {
            call.run(0, |target, _| (0..self.groups).try_for_each(|group| plan.run(target, &of_group(group))))?;
        }
        Ok((col, col_scale))
    }

    /// The number of the row layout's values; none for bytes that are gathered again for each use.
    pub(crate) fn stamp(slf: &Bound<'_, Self>) -> PyResult<Option<u64>> {
        let value = slf.try_borrow()?;
        Ok(value.keeps_col.then(|| value.row.content.values()))
    }

    /// Whether a column layout that a call makes is kept.
    pub(crate) const fn keeps_col(&self) -> bool {
        self.keeps_col
    }

    /// A value of a row layout, or a stack of several.
    pub(crate) fn of_row((block, groups): (Block, usize), fp8: Fp8, row: [Bound<'_, PyAny>; 2]) -> Self {
        let [data, scale] = row.map(|tensor| Some(tensor.unbind()));
        let row = Layout { data, scale, content: Content::new() };
        Self { block, fp8, groups, row, col: Layout::default(), keeps_col: true, outside: None }
    }

    /// The shape of its scales, and its FP8 type.
    pub(crate) const fn block_and_type(&self) -> (Block, Fp8) {
        (self.block, self.fp8)
    }

    /// The shape of its scales, and its number of values.
    pub(crate) const fn block_and_groups(&self) -> (Block, usize) {
        (self.block, self.groups)
    }

    /// Number of scales of a layout, from the rows and columns of each value.
    pub(crate) fn scale_count(&self, rows: usize, cols: usize) -> usize {
        self.groups * scale_count(self.block, rows, cols)
    }

    /// The shape of these scales.
    fn scale_size(&self, rows: usize, cols: usize) -> Sizes {
        let stack = (self.groups != 1 || self.block == Block::Tensor).then_some(self.groups as i64);
        let one = block_shape(self.block).map(|block| scale_shape(block, rows, cols).map(|size| size as i64));
        stack.into_iter().chain(one.into_iter().flatten()).collect()
    }

    /// The shape of the column layout of a row layout of this shape.
    fn col_size(&self, size: &[i64]) -> Sizes {
        if self.groups == 1 {
            return rotated(size);
        }
        let (groups, cols) = (self.groups as i64, size.last().copied().unwrap_or(1));
        let rows = size.iter().rev().skip(1).product::<i64>() / groups;
        Sizes::from_slice(&[groups, cols, rows])
    }

    /// Joins several adjacent values of one format to one value, in these layouts, if all have them.
    pub(crate) fn of_parts(
        py: Python<'_>,
        first: &Self,
        groups: usize,
        [(row, row_scale), (col, col_scale)]: [(Object, Object); 2],
        keeps_col: bool,
    ) -> Self {
        let layout = |data, scale| Layout { data, scale, content: Content::new() };
        let (row, col) = (layout(row, row_scale), layout(col, col_scale));
        let value = Self { block: first.block, fp8: first.fp8, groups, row, col, keeps_col, outside: None };
        value.agree(py);
        value
    }

    /// Whether both have the same scaling and FP8 type.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        (self.block, self.fp8, self.groups) == (other.block, other.fp8, other.groups)
    }

    /// Whether both layouts have one scale.
    pub(crate) fn is_per_tensor(&self) -> bool {
        self.block == Block::Tensor
    }

    fn plan(
        &self,
        state: &State,
        py: Python<'_>,
        (x, slots): (&TensorView<'_>, usize),
        usage: Usage,
        (current, amax_epsilon, power_2_scale): Rule,
    ) -> PyResult<QuantPlan> {
        let Some(input) = x.dtype().as_float() else {
            return Err(Error::dtype(OP, "x", "float32, float16 or bfloat16", x.dtype())).python();
        };
        if usage.is_empty() {
            return Err(Error::value(OP, "the quantizer asks for neither layout; set rowwise or columnwise usage"))
                .python();
        }
        let scaling = match (self.block, current) {
            (Block::Tensor, true) => Scaling::Current,
            (Block::Tensor, false) => Scaling::Delayed,
            _ => Scaling::Block,
        };
        let processors = state.dispatcher(py)?.0.multiprocessors(x.device()).python()?;
        if !x.rows().is_multiple_of(self.groups) {
            let expected = format!("a stack of {} values", self.groups);
            return Err(Error::shape(OP, "x", expected, format!("{:?}", x.shape()))).python();
        }
        let stack = QuantGroups { count: self.groups, division: Division::Equal, slots, gather: None };
        QuantPlan::new(&QuantSpec {
            scaling,
            quantization: Quantization { power_2_scale, amax_epsilon, block: self.block },
            rows: x.rows() / self.groups,
            cols: x.cols(),
            input,
            output: self.fp8,
            usage,
            dbias: false,
            groups: (self.groups != 1).then_some(stack),
            processors,
        })
        .python()
    }

    /// The destination of a cast of `x`: existing memory if it fits.
    pub(super) fn targets<'py>(
        &self,
        call: &DirectCall<'_, 'py>,
        x: &TensorView<'_>,
        usage: Usage,
        keeps: bool,
    ) -> PyResult<Targets<'py>> {
        let (py, rows, cols) = (call.py, x.rows() / self.groups, x.cols());
        let (size, rotated) = (Sizes::from_slice(x.shape()), self.col_size(x.shape()));
        let block = block_shape(self.block);
        let bound = |object: &Object| object.as_ref().map(|tensor| tensor.bind(py).clone());
        for (layout, size) in [(&self.row, &size), (&self.col, &rotated)] {
            if let Some(tensor) = bound(&layout.data) {
                check_place(call, &tensor, size)?;
            }
        }
        let target = |layout: &Layout, size: &[i64], row, ld| target(call, bound(&layout.data), size, (row, ld), keeps);
        let row = usage.rowwise.then(|| target(&self.row, &size, cols, cols));
        let col = usage.columnwise.then(|| target(&self.col, &rotated, rows, rows.next_multiple_of(ALIGNMENT)));
        let scale = |kept: &Object, size: Sizes| kept_or_new(call, bound(kept), &size);
        let row_scale = (usage.rowwise || block.is_none()).then(|| scale(&self.row.scale, self.scale_size(rows, cols)));
        let row_scale = row_scale.transpose()?;
        let col_scale = match (usage.columnwise, block) {
            (true, Some(_)) => Some(scale(&self.col.scale, self.scale_size(cols, rows))?),
            (true, None) => row_scale.clone(),
            _ => None,
        };
        Ok(Targets { row: row.transpose()?, row_scale, col: col.transpose()?, col_scale })
    }

    /// Stores the written layouts. The caller then notes, at the final versions, that both have equal values.
    pub(super) fn take(slf: &Bound<'_, Self>, targets: Targets<'_>) -> PyResult<()> {
        let py = slf.py();
        for target in [&targets.row, &targets.col].into_iter().flatten() {
            if !target.written.is(&target.seen) {
                target.seen.call_method1(intern!(py, "copy_"), (&target.written,))?;
            }
        }
        let is_per_tensor = slf.try_borrow()?.block == Block::Tensor;
        let kept = |layout: &Layout, target: Option<Target<'_>>, scale: Option<Bound<'_, PyAny>>| match target {
            None => Layout { scale: scale.map(Bound::unbind), ..Layout::default() },
            Some(target) => {
                let content = if target.is_fresh { Content::new() } else { layout.content.clone() };
                content.write();
                Layout { data: Some(target.seen.unbind()), scale: scale.map(Bound::unbind), content }
            }
        };
        let mut value = slf.try_borrow_mut()?;
        let row = kept(&value.row, targets.row, targets.row_scale);
        let col = kept(&value.col, targets.col, targets.col_scale.filter(|_| !is_per_tensor));
        let former = (std::mem::replace(&mut value.row, row), std::mem::replace(&mut value.col, col));
        drop(value);
        drop(former);
        Ok(())
    }

    /// Notes that both layouts have equal values.
    pub(super) fn agree(&self, py: Python<'_>) {
        if self.row.data.is_some() && self.col.data.is_some() {
            self.col.content.agree(&self.row.content, self.versions(py));
        }
    }

    fn versions(&self, py: Python<'_>) -> Versions {
        [&self.row.data, &self.col.data].map(|data| {
            let tensor = data.as_ref()?.bind(py);
            tensor.getattr(intern!(py, "_version")).and_then(|version| version.extract()).ok()
        })
    }
}

/// The last size first: the shape of a column layout.
fn rotated(size: &[i64]) -> Sizes {
    size.iter().rev().take(1).chain(size.split_last().map_or(&[][..], |(_, leading)| leading)).copied().collect()
}

/// Scales or maxima, one for each value of a stack, and their distance; or null.
fn slots_of<'a>(
    state: &State,
    tensor: Option<&'a Bound<'_, PyAny>>,
    what: &'static str,
    (like, groups): (&TensorView<'_>, usize),
) -> PyResult<(DevPtr<'a>, usize)> {
    let Some(given) = tensor.filter(|_| groups != 1) else {
        return Ok((single_f32(state, tensor, what, like)?, 1));
    };
    let view = view_of(&state.reader, given, what).python()?;
    let fits = view.shape() == [groups as i64] && view.dtype() == DType::F32 && view.device() == like.device();
    if !fits {
        let got = format!("{:?} {} on {}", view.shape(), view.dtype(), view.device());
        return Err(Error::shape(OP, what, format!("{groups} float32 on the input's device"), got)).python();
    }
    Ok((view.data(), view.strides()[0].max(0) as usize))
}

/// Refuses memory of another shape or device than the source tensor.
fn check_place(call: &DirectCall<'_, '_>, tensor: &Bound<'_, PyAny>, size: &[i64]) -> PyResult<()> {
    let view = view_of(&call.state.reader, tensor, "data of the quantised tensor").python()?;
    call.same_device(&view, "the quantised tensor")?;
    if view.dtype().size() != 1 {
        return Err(Error::dtype(OP, "data of the quantised tensor", "torch.uint8", view.dtype())).python();
    }
    call.shape(&view, "data of the quantised tensor", size)
}

/// Whether a column layout of `size` can be written there.
fn fits_columns(call: &DirectCall<'_, '_>, kept: &Bound<'_, PyAny>, size: &[i64]) -> bool {
    view_of(&call.state.reader, kept, "data").is_ok_and(|kept| {
        kept.shape() == size && kept.is_contiguous() && kept.device() == call.place.device && kept.dtype().size() == 1
    })
}

/// The destination of a layout of `size`, whose rows have length `row` and, for kernels, leading dimension `ld`. With
/// `keeps`, existing content may have to stay.
fn target<'py>(
    call: &DirectCall<'_, 'py>,
    kept: Option<Bound<'py, PyAny>>,
    size: &[i64],
    (row, ld): (usize, usize),
    keeps: bool,
) -> PyResult<Target<'py>> {
    let (py, is_fresh) = (call.py, kept.is_none());
    let seen = kept.map_or_else(|| call.empty(size, DType::U8), Ok)?;
    let view = view_of(&call.state.reader, &seen, "data of the quantised tensor").python()?;
    if view.numel() == 0 || (row == ld && view.is_contiguous() && view.is_aligned(ALIGNMENT)) {
        return Ok(Target { written: seen.clone(), seen, is_fresh });
    }
    let bytes = call.empty(&[(view.numel() / row * ld) as i64], DType::U8)?;
    let mut strides = contiguous_strides(size);
    if row != ld {
        // The lines of a column layout are in its first dimension, those of a stack's in the second.
        for stride in strides.iter_mut().filter(|stride| **stride >= row as i64) {
            *stride = *stride / row as i64 * ld as i64;
        }
    }
    let written =
        bytes.call_method1(intern!(py, "as_strided"), (PyTuple::new(py, size)?, PyTuple::new(py, strides)?))?;
    if keeps && !is_fresh {
        written.call_method1(intern!(py, "copy_"), (&seen,))?;
    }
    Ok(Target { seen, written, is_fresh })
}

/// The existing scales if the number of float32 fits, else new ones.
fn kept_or_new<'py>(
    call: &DirectCall<'_, 'py>,
    kept: Option<Bound<'py, PyAny>>,
    size: &[i64],
) -> PyResult<Bound<'py, PyAny>> {
    if let Some(kept) = kept {
        let view = view_of(&call.state.reader, &kept, "scales of the quantised tensor").python()?;
        call.same_device(&view, "scales of the quantised tensor")?;
        let fits = view.shape() == size || (size == [1] && view.numel() == 1);
        if fits && view.dtype() == DType::F32 && view.is_contiguous() {
            return Ok(kept);
        }
    }
    call.empty(size, DType::F32)
}
