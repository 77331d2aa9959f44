//! The quantisation of an operand, for any number of rows.

use crate::base::error::Result;
use crate::ops::cast_groups::{CastGroupsSpec, Gather};
use crate::program::edge::{Edge, Kind, QuantizedKind, Rows};
use crate::quant::quantizer::{QuantGroups, QuantPlan, QuantSpec};
use crate::recipe::definition::{Block, Scaling};
use crate::recipe::usage::Usage;

/// How an operand is quantised, for any number of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cast {
    spec: QuantSpec,
    edge: Edge,
    /// Scales of the column layout are stored as bytes if that is exact.
    byte_scales: bool,
}

impl Cast {
    /// The quantisation of a spec, for any number of rows.
    pub(crate) fn new(rows: Rows, spec: QuantSpec) -> Self {
        let (dtype, block, usage) = (spec.output, spec.quantization.block, spec.usage);
        let kind = Kind::Quantized(QuantizedKind { dtype, block, usage });
        Self { spec, edge: Edge { rows, cols: spec.cols, kind }, byte_scales: false }
    }

    /// The same for a saved column layout: scales that are powers of two take a quarter of the bytes.
    pub(crate) fn with_byte_scales(self) -> Self {
        let QuantSpec { scaling, quantization, usage, .. } = self.spec;
        let packs = self.spec.groups.is_none()
            && scaling == Scaling::Block
            && quantization.block == Block::Row
            && quantization.power_2_scale;
        Self { byte_scales: packs && usage.columnwise, ..self }
    }

    /// The same with one scale that is known beforehand, as under delayed scaling.
    pub(crate) fn with_known_scale(self) -> Self {
        Self { spec: QuantSpec { scaling: Scaling::Delayed, ..self.spec }, ..self }
    }

    /// The same for rows that belong to groups.
    pub(crate) fn of_groups(self, groups: Option<QuantGroups>) -> Self {
        Self { spec: QuantSpec { groups, ..self.spec }, ..self }
    }

    /// The same for rows that are gathered from tokens.
    pub(crate) fn gathering(self, gather: Gather) -> Self {
        self.of_groups(self.spec.groups.map(|groups| QuantGroups { gather: Some(gather), ..groups }))
    }

    /// The cast of the rows of experts, for any number of rows; none for one tensor, and for blocks that no kernel takes.
    pub(crate) fn groups_spec(&self) -> Option<CastGroupsSpec> {
        self.spec.of_groups(self.spec.groups?).ok()
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
