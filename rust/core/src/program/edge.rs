//! Values between ops: rows, columns, format and place.

use te_fast_kernels::{Float, Fp8};

use crate::ops::cast_block::{BlockShape, scale_shape};
use crate::ops::dequantize::DequantizeSpec;
use crate::ops::transpose::TransposeSpec;
use crate::program::buffer::At;
use crate::program::port::{Beside, Outer, Port};
use crate::recipe::definition::Block;
use crate::recipe::usage::Usage;

/// A symbolic row count, since compiled code is valid for any number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// The rows of the chain's input.
    Input,
    /// A multiple of the input's rows: the rows of experts, for tokens with that many experts.
    Each(usize),
    /// A constant count, as of a weight.
    Fixed(usize),
}

impl Rows {
    /// The count for an input with a number of rows.
    pub(crate) const fn count(self, input: usize) -> usize {
        match self {
            Self::Input => input,
            Self::Each(number) => input.saturating_mul(number),
            Self::Fixed(count) => count,
        }
    }
}

/// How a value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// In high precision.
    High(Float),
    /// In FP8.
    Quantized(QuantizedKind),
}

/// A value in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizedKind {
    /// Element type.
    pub dtype: Fp8,
    /// Elements that share a scale.
    pub block: Block,
    /// Layouts that exist.
    pub usage: Usage,
}

impl QuantizedKind {
    /// How a value with a number of columns is dequantised, for any number of rows.
    pub(crate) const fn dequantize(self, cols: usize, output: Float) -> DequantizeSpec {
        let block = match self.block {
            Block::Tensor => None,
            Block::Row => Some(BlockShape::OneDimensional),
            Block::Square => Some(BlockShape::TwoDimensional),
        };
        DequantizeSpec { rows: 0, cols, ld: cols, input: self.dtype, output, block }
    }

    /// How its column layout is made from its row layout.
    pub(crate) const fn transpose(self, cols: usize) -> TransposeSpec {
        TransposeSpec { rows: 0, cols, padded: true, block_scales: matches!(self.block, Block::Square) }
    }

    /// Number of scales of a row layout; for a column layout, pass the transposed sizes.
    #[must_use]
    pub fn scales(self, rows: usize, cols: usize) -> usize {
        match self.block {
            Block::Tensor => 1,
            Block::Row => scale_shape(BlockShape::OneDimensional, rows, cols).iter().product(),
            Block::Square => scale_shape(BlockShape::TwoDimensional, rows, cols).iter().product(),
        }
    }
}

impl Kind {
    /// Layouts that exist.
    pub(crate) const fn usage(self) -> Usage {
        match self {
            Self::High(_) => Usage { rowwise: true, columnwise: false },
            Self::Quantized(QuantizedKind { usage, .. }) => usage,
        }
    }
}

/// A value between two ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) rows: Rows,
    pub(crate) cols: usize,
    pub(crate) kind: Kind,
}

/// The place of one layout of a value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayoutAt {
    /// Elements.
    pub(crate) data: At,
    /// Inverse scales; none in high precision.
    pub(crate) scale: At,
}

impl LayoutAt {
    /// A value in high precision.
    pub(crate) const fn high(at: At) -> Self {
        Self { data: at, scale: At::NONE }
    }

    pub(crate) fn is_some(&self) -> bool {
        self.data.is_some()
    }
}

/// The places of the layouts of a value in FP8; layouts that the edge's kind does not have are [`Port::Null`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Layouts {
    pub(crate) row: LayoutAt,
    pub(crate) col: LayoutAt,
}

impl Layouts {
    /// The places of a value in FP8 that a call passes or receives.
    pub(crate) fn outer(outer: Outer, kind: QuantizedKind) -> Self {
        let beside = |part| At::of(Port::Beside(outer, part));
        let shared = matches!(kind.block, Block::Tensor);
        let mut layouts = Self::default();
        if kind.usage.rowwise {
            layouts.row = LayoutAt { data: At::of(outer.port()), scale: beside(Beside::RowScale) };
        }
        if kind.usage.columnwise {
            let scale = if shared && kind.usage.rowwise { Beside::RowScale } else { Beside::ColScale };
            layouts.col = LayoutAt { data: beside(Beside::Col), scale: beside(scale) };
        }
        layouts
    }

    /// Per-tensor scaling has one inverse scale, beside the row layout if there is one.
    pub(crate) fn scale_inv(&self) -> At {
        if self.row.is_some() { self.row.scale } else { self.col.scale }
    }
}

/// A value as earlier ops have written it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Value {
    /// In high precision.
    pub(crate) high: At,
    /// In FP8, for the next linear op.
    pub(crate) quantized: Option<Layouts>,
    /// Numbers of the rows, if `high` has tokens' rows: the next linear op gathers these as it quantises.
    pub(crate) numbers: At,
    /// The scale for the next linear op, if the op that computed the value has computed the scale, too.
    pub(crate) scale: Option<At>,
}

impl Value {
    pub(crate) const fn high(high: At) -> Self {
        Self { high, quantized: None, numbers: At::NONE, scale: None }
    }

    pub(crate) const fn quantized(layouts: Layouts) -> Self {
        Self { quantized: Some(layouts), ..Self::high(At::NONE) }
    }
}
