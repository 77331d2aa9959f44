//! The quantisation of an operand whose rows a call brings.

use te_fast_kernels::{Float, Fp8};

use crate::base::error::Result;
use crate::program::edge::{Edge, Kind};
use crate::quant::quantizer::{QuantPlan, QuantSpec};
use crate::recipe::definition::{Block, Quantization, Scaling};
use crate::recipe::usage::Usage;

/// How an operand is quantised, whatever its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cast {
    spec: QuantSpec,
    edge: Edge,
    /// Scales of the column layout are kept as bytes where that says all of them.
    byte_scales: bool,
}

/// What a [`Cast`] is made of beside the operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CastOptions {
    pub(crate) scaling: Scaling,
    pub(crate) quantization: Quantization,
    pub(crate) output: Fp8,
    pub(crate) usage: Usage,
    /// Sum the columns too.
    pub(crate) dbias: bool,
    pub(crate) processors: u32,
}

impl Cast {
    /// Quantises what `from` is in high precision.
    pub(crate) fn new(from: &Edge, input: Float, options: CastOptions) -> Self {
        let CastOptions { scaling, quantization, output, usage, dbias, processors } = options;
        let spec =
            QuantSpec { scaling, quantization, rows: 0, cols: from.cols, input, output, usage, dbias, processors };
        let kind = Kind::Quantized { dtype: output, block: quantization.block, usage };
        Self { spec, edge: Edge { kind, ..*from }, byte_scales: false }
    }

    /// The same for a column layout that is kept: a quarter of the bytes for its scales, where they are powers of two.
    pub(crate) fn with_byte_scales(self) -> Self {
        let QuantSpec { scaling, quantization, usage, .. } = self.spec;
        let packs = scaling == Scaling::Block && quantization.block == Block::Row && quantization.power_2_scale;
        Self { byte_scales: packs && usage.columnwise, ..self }
    }

    /// The value that it makes.
    pub(crate) const fn edge(&self) -> &Edge {
        &self.edge
    }

    pub(crate) const fn usage(&self) -> Usage {
        self.edge.kind.usage()
    }

    /// Whether the column layout's scales are bytes.
    pub(crate) const fn has_byte_scales(&self) -> bool {
        self.byte_scales
    }

    /// Whether both layouts have the one scale of the tensor.
    pub(crate) fn shares_scale(&self) -> bool {
        self.spec.scaling != Scaling::Block
    }

    /// The launches for `rows` rows.
    pub(crate) fn plan(&self, rows: usize) -> Result<QuantPlan> {
        let plan = QuantPlan::new(&QuantSpec { rows, ..self.spec })?;
        if self.byte_scales { plan.with_byte_scales() } else { Ok(plan) }
    }
}
