//! Values between ops: how many rows and columns they have, how they are stored, and where.

use te_fast_kernels::{Float, Fp8};

use crate::program::buffer::At;
use crate::recipe::definition::Block;
use crate::recipe::usage::Usage;

/// A row count by name: what is compiled holds for any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Those of the chain's input.
    Input,
    /// A count that no call changes: a weight's.
    Fixed(usize),
}

/// How a value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// In high precision.
    High(Float),
    /// In FP8.
    Quantized {
        /// Element type.
        dtype: Fp8,
        /// Elements that share a scale.
        block: Block,
        /// Layouts that are there.
        usage: Usage,
    },
}

impl Kind {
    /// Layouts that are there.
    pub(crate) const fn usage(self) -> Usage {
        match self {
            Self::High(_) => Usage { rowwise: true, columnwise: false },
            Self::Quantized { usage, .. } => usage,
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

/// Where one layout of a value lies.
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

/// Where the layouts of a value in FP8 lie; those that its edge's kind does not name are nowhere.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Layouts {
    pub(crate) row: LayoutAt,
    pub(crate) col: LayoutAt,
}

impl Layouts {
    /// Per-tensor scaling has one inverse scale, beside the row layout if there is one.
    pub(crate) fn scale_inv(&self) -> At {
        if self.row.is_some() { self.row.scale } else { self.col.scale }
    }
}

/// A value as the ops before it left it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Value {
    /// In high precision.
    pub(crate) high: At,
    /// In FP8, for the linear op that comes next.
    pub(crate) quantized: Option<Layouts>,
}

impl Value {
    pub(crate) const fn high(high: At) -> Self {
        Self { high, quantized: None }
    }
}
