//! Memory of FP8 values: their layouts, a weight's buffers, and delayed scaling's slots.

use crate::base::pointer::DevPtr;
use crate::quant::quantizer::QuantPlan;
use crate::recipe::usage::Usage;
use crate::runtime::lane::aligned;

/// One quantised layout: FP8 bytes and inverse scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantized<'a> {
    /// FP8 bytes.
    pub data: DevPtr<'a>,
    /// FP32 inverse scales.
    pub scale: DevPtr<'a>,
}

impl Quantized<'_> {
    /// Not there.
    pub const NONE: Self = Self { data: DevPtr::null(), scale: DevPtr::null() };
}

/// The memory of a quantised weight's layouts. Each layout has its own buffer, so that a layout that only forward reads
/// can be freed before backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightLayout {
    /// Layouts that exist.
    pub usage: Usage,
    /// Bytes of the row layout's buffer, 0 without one.
    pub row_bytes: usize,
    /// Bytes of the column layout's buffer, 0 without one.
    pub col_bytes: usize,
    pub(crate) row_scale: usize,
    pub(crate) col_scale: usize,
    /// Whether both layouts share one scale, which is in the column layout's buffer.
    pub(crate) shared_scale: bool,
}

impl WeightLayout {
    /// The layouts of `plan` that `usage` names.
    pub(crate) fn new(plan: &QuantPlan, usage: Usage) -> Self {
        let mut layout = Self { usage, ..Self::default() };
        layout.shared_scale = usage.rowwise && usage.columnwise && plan.shares_scale();
        if usage.rowwise {
            layout.row_scale = aligned(plan.row_bytes());
            let scale = if layout.shared_scale { 0 } else { aligned(plan.row_scale_bytes()) };
            layout.row_bytes = layout.row_scale + scale;
        }
        if usage.columnwise {
            layout.col_scale = aligned(plan.col_bytes());
            layout.col_bytes = layout.col_scale + aligned(plan.col_scale_bytes());
        }
        layout
    }

    /// Bytes of both buffers.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.row_bytes + self.col_bytes
    }
}

/// Scale and live absolute maximum of one slot of delayed scaling; null pointers for other recipes.
#[derive(Clone, Copy, Debug)]
pub struct Slot<'a> {
    /// Scale to quantise with.
    pub scale: DevPtr<'a>,
    /// Maximum to raise.
    pub amax: DevPtr<'a>,
}

impl Slot<'_> {
    /// No slot.
    pub const NONE: Self = Self { scale: DevPtr::null(), amax: DevPtr::null() };
}

/// A quantised weight, as its layer keeps it.
#[derive(Clone, Copy, Debug)]
pub struct WeightBuffer<'a> {
    /// Buffer of the row layout; null if it does not exist, or no longer.
    pub row: DevPtr<'a>,
    /// Buffer of the column layout.
    pub col: DevPtr<'a>,
    /// The places in these buffers.
    pub layout: WeightLayout,
}

impl<'a> WeightBuffer<'a> {
    /// A weight whose buffers follow each other.
    #[must_use]
    pub const fn contiguous(data: DevPtr<'a>, layout: WeightLayout) -> Self {
        Self { row: data, col: data.offset(layout.row_bytes), layout }
    }

    /// The row layout; null pointers if it does not exist.
    #[must_use]
    pub fn row(&self) -> Quantized<'a> {
        let WeightLayout { usage, row_scale, col_scale, shared_scale, .. } = self.layout;
        if !usage.rowwise || self.row.is_null() {
            return Quantized::NONE;
        }
        let scale = if shared_scale { self.col.offset(col_scale) } else { self.row.offset(row_scale) };
        Quantized { data: self.row, scale }
    }

    /// The column layout; null pointers if it does not exist.
    #[must_use]
    pub fn col(&self) -> Quantized<'a> {
        if self.layout.usage.columnwise {
            Quantized { data: self.col, scale: self.col.offset(self.layout.col_scale) }
        } else {
            Quantized::NONE
        }
    }
}

/// Delayed-scaling slots of one linear op; null pointers for other recipes.
#[derive(Clone, Copy, Debug)]
pub struct LinearSlots<'a> {
    /// The slot of the input.
    pub input: Slot<'a>,
    /// The slot of the weight.
    pub weight: Slot<'a>,
    /// The slot of the output's gradient.
    pub grad: Slot<'a>,
    /// The slot of an output in FP8.
    pub output: Slot<'a>,
    /// The slot of an FP8 gradient of the input.
    pub grad_input: Slot<'a>,
}

impl LinearSlots<'_> {
    /// No slot.
    pub const NONE: Self =
        Self { input: Slot::NONE, weight: Slot::NONE, grad: Slot::NONE, output: Slot::NONE, grad_input: Slot::NONE };
}
