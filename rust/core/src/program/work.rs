//! The steps of a program, for any number of rows: an op's spec, and its pointers as places.

use crate::gemm::problem::GemmPointers;
use crate::ops::activation::{ActivationPointers, ActivationSpec};
use crate::ops::activation_backward::{ActivationBackwardPointers, ActivationBackwardSpec};
use crate::ops::activation_groups::{ActivationGroupsPointers, ActivationGroupsSpec};
use crate::ops::affine::{AffinePointers, AffineSpec};
use crate::ops::cast::{CastPointers, CastSpec};
use crate::ops::dequantize::{DequantizePointers, DequantizeSpec};
use crate::ops::norm::NormPointers;
use crate::ops::norm_backward::{NormBackwardPointers, NormBackwardSpec};
use crate::ops::norm_spec::NormSpec;
use crate::ops::route::{RoutePointers, RouteSpec};
use crate::ops::router::{RouterBwdPointers, RouterPointers, RouterSpec};
use crate::ops::sum_groups::{SumGroupsPointers, SumGroupsSpec};
use crate::ops::transpose::{TransposePointers, TransposeSpec};
use crate::program::buffer::{Arena, At, Buffers};
use crate::program::cast::Cast;
use crate::program::edge::{Layouts, Rows};
use crate::program::linear_op::Product;
use crate::program::port::Port;
use crate::program::router_product::RouterProduct;
use crate::quant::quantizer::{QuantPlan, QuantPointers};

/// One launch, or the few launches of one quantisation. A spec's rows are the step's.
#[derive(Debug)]
pub(crate) enum Work {
    Quantize {
        cast: Cast,
        /// The operand whose saved byte scales this cast unpacks to f32.
        unpacks: Option<Cast>,
        at: QuantPointers<At>,
    },
    /// A weight's quantisation, unless the kept FP8 weight is used.
    Weight {
        plan: QuantPlan,
        at: QuantPointers<At>,
    },
    Gemm {
        linear: usize,
        product: Product,
        at: GemmPointers<At>,
        /// Counts of the rows of a linear op's experts; null for a dense op.
        splits: At,
    },
    /// Sums of the rows of groups.
    SumGroups {
        spec: SumGroupsSpec,
        at: SumGroupsPointers<At>,
    },
    /// Inverse scales and maxima of values that GEMMs store in FP8.
    Handover(Vec<StoredAt>),
    Norm {
        spec: NormSpec,
        at: NormPointers<At>,
    },
    NormBackward {
        spec: NormBackwardSpec,
        at: NormBackwardPointers<At>,
    },
    Activation {
        spec: ActivationSpec,
        at: ActivationPointers<At>,
    },
    ActivationBackward {
        spec: ActivationBackwardSpec,
        at: ActivationBackwardPointers<At>,
    },
    /// An activation of experts' rows, or its gradient, with the cast for the experts' linear op.
    ActivationGroups {
        spec: ActivationGroupsSpec,
        at: ActivationGroupsPointers<At>,
    },
    Affine {
        spec: AffineSpec,
        at: AffinePointers<At>,
    },
    ColumnSums {
        spec: CastSpec,
        at: CastPointers<At>,
    },
    Dequantize {
        spec: DequantizeSpec,
        at: DequantizePointers<At>,
    },
    Transpose {
        spec: TransposeSpec,
        at: TransposePointers<At>,
    },
    /// Moves rows of tokens to experts, or back; the step's rows are the tokens.
    Route {
        spec: RouteSpec,
        at: RoutePointers<At>,
    },
    /// Chooses the experts of tokens.
    Router {
        spec: RouterSpec,
        at: RouterPointers<At>,
    },
    RouterBackward {
        spec: RouterSpec,
        at: RouterBwdPointers<At>,
    },
    /// A product of a router.
    RouterGemm {
        product: RouterProduct,
        at: GemmPointers<At>,
    },
    /// The scales of an operand's column layout, which were saved as bytes.
    Unpack {
        cast: Cast,
        packed: At,
        unpacked: At,
    },
}

/// Scale and maximum of a slot of delayed scaling.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotAt {
    pub(crate) scale: At,
    pub(crate) amax: At,
}

impl SlotAt {
    pub(crate) const NONE: Self = Self { scale: At::NONE, amax: At::NONE };
}

/// The places beside the bytes of a value that a GEMM stores in FP8.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredAt {
    pub(crate) slot: SlotAt,
    /// The inverse scale; none where the launch only raises the maximum.
    pub(crate) inverse: At,
    /// The maximum that the GEMM finds; none before the GEMM.
    pub(crate) found: At,
}

impl StoredAt {
    pub(crate) const fn each(&self) -> [&At; 4] {
        [&self.slot.scale, &self.slot.amax, &self.inverse, &self.found]
    }
}

/// The pointers of a quantisation of `x` into `to`.
pub(crate) fn quantised(x: At, to: &Layouts, slot: SlotAt, scratch: At) -> QuantPointers<At> {
    QuantPointers {
        x,
        row: to.row.data,
        row_scale: to.row.scale,
        col: to.col.data,
        col_scale: to.col.scale,
        scale: slot.scale,
        amax: slot.amax,
        scratch,
        counters: At::of(Port::Counters),
        ..QuantPointers::default()
    }
}

impl Work {
    /// Calls `visit` with every place that the step reads or writes.
    pub(crate) fn each(&self, mut visit: impl FnMut(&At)) {
        match self {
            Self::Quantize { at, .. } | Self::Weight { at, .. } => at.each(visit),
            Self::Gemm { at, splits, .. } => {
                at.each(&mut visit);
                visit(splits);
            }
            Self::SumGroups { at, .. } => at.each(visit),
            Self::Handover(values) => values.iter().flat_map(StoredAt::each).for_each(visit),
            Self::Norm { at, .. } => at.each(visit),
            Self::NormBackward { at, .. } => at.each(visit),
            Self::Activation { at, .. } => at.each(visit),
            Self::ActivationBackward { at, .. } => at.each(visit),
            Self::ActivationGroups { at, .. } => at.each(visit),
            Self::Affine { at, .. } => at.each(visit),
            Self::ColumnSums { at, .. } => at.each(visit),
            Self::Dequantize { at, .. } => at.each(visit),
            Self::Transpose { at, .. } => at.each(visit),
            Self::Route { at, .. } => at.each(visit),
            Self::Router { at, .. } => at.each(visit),
            Self::RouterBackward { at, .. } => at.each(visit),
            Self::RouterGemm { at, .. } => at.each(visit),
            Self::Unpack { packed, unpacked, .. } => [packed, unpacked].into_iter().for_each(visit),
        }
    }
}

/// One launch of a program.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) work: Work,
    pub(crate) rows: Rows,
    /// First and last op that the step computes.
    pub(crate) ops: (usize, usize),
    /// Name of the step, for `explain`.
    pub(crate) text: &'static str,
}

/// Steps that run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowName {
    /// The forward.
    Forward,
    /// The backward.
    Backward,
    /// The delayed weight gradient of a linear op.
    Waiting(usize),
}

impl FlowName {
    pub(crate) const fn number(self) -> usize {
        match self {
            Self::Forward => 0,
            Self::Backward => 1,
            Self::Waiting(linear) => 2 + linear,
        }
    }

    /// The flow's private memory.
    pub(crate) const fn scratch(self) -> Arena {
        Arena::Scratch(self.number() as u16)
    }
}

/// The steps of a program and the buffers between them.
#[derive(Debug)]
pub(crate) struct Flows {
    lists: Vec<Vec<Step>>,
    pub(crate) buffers: Buffers,
}

impl Flows {
    pub(crate) fn new(linears: usize) -> Self {
        Self { lists: (0..2 + linears).map(|_| Vec::new()).collect(), buffers: Buffers::default() }
    }

    pub(crate) fn push(&mut self, flow: FlowName, step: Step) {
        let list = &mut self.lists[flow.number()];
        step.work.each(|&at| self.buffers.touch(at, flow.scratch(), list.len()));
        list.push(step);
    }

    pub(crate) fn steps(&self, flow: FlowName) -> &[Step] {
        &self.lists[flow.number()]
    }

    /// Replaces the first step of a flow by one that is known only at the flow's end.
    pub(crate) fn replace_first(&mut self, flow: FlowName, step: Step) {
        step.work.each(|&at| self.buffers.touch(at, flow.scratch(), 0));
        if let Some(first) = self.lists[flow.number()].first_mut() {
            *first = step;
        }
    }

    /// All flows in the order of their numbers.
    pub(crate) fn all(&self) -> impl Iterator<Item = &[Step]> {
        self.lists.iter().map(Vec::as_slice)
    }
}
