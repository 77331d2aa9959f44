//! Moves of tokens' rows to experts and back, for programs: one launch makes the map of a mask and moves rows by it,
//! and later moves use that map.

use te_fast_kernels::Float;

use crate::base::error::Result;
use crate::base::pointer::DevPtr;
use crate::launch::target::Target;
use crate::ops::permute::{PermutePlan, PermutePointers};
use crate::ops::permute_map::{Making, MapPlan, MapPointers, MapSpec, Routing};
use crate::ops::permute_merge::{UnpermutePlan, UnpermutePointers};
use crate::ops::row_map::{Layout, MapBuffers, MapShape, Prob};
use crate::pointers;

/// Bytes of the number of a row's token.
const NUMBER_BYTES: usize = 4;

/// The direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the experts, by a map that is made from the mask.
    Out(Routing),
    /// The same, with numbers instead of rows: a cast gathers the rows by these.
    Numbers(Routing),
    /// To the experts by the finished map: gradients of a sum.
    Again,
    /// Back, summed.
    Back,
}

/// Rows of tokens and of experts.
#[derive(Clone, Copy, Debug)]
pub struct RouteSpec {
    /// The direction.
    pub way: Way,
    /// Tokens.
    pub tokens: usize,
    /// The most experts of a token.
    pub topk: usize,
    /// Experts.
    pub experts: usize,
    /// Columns.
    pub cols: usize,
    /// Type of the rows.
    pub input: Float,
    /// Type of the probabilities.
    pub prob: Float,
}

pointers! {
    /// Buffers of a move.
    pub struct RoutePointers {
        /// Rows that move.
        x,
        /// Destination. For [`Way::Numbers`] i32, the number of the row's token plus one: 0 for a row without a token,
        /// negative for a row with probability 0, which is a row of zeros.
        out,
        /// The mask.
        routing,
        /// Probabilities `[tokens, experts]`, or, for moves back, their gradient, which may be null.
        probs,
        /// Probabilities of rows, or their gradient.
        factors,
        /// i32 `[tokens, 2 experts + 1]`.
        row_id_map,
        /// i32 per expert.
        ends,
        /// i64 per expert, the counts of rows.
        splits,
        /// [`RoutePlan::scratch_bytes`].
        scratch,
        /// Counters that are zero between launches.
        state,
    }
}

#[derive(Clone, Copy, Debug)]
enum Steps {
    Out(MapPlan, PermutePlan),
    Again(PermutePlan),
    Back(UnpermutePlan),
}

/// A checked move of rows.
#[derive(Clone, Copy, Debug)]
pub struct RoutePlan {
    spec: RouteSpec,
    shape: MapShape,
    steps: Steps,
}

const fn prob_of(float: Float) -> Prob {
    match float {
        Float::F32 => Prob::F32,
        Float::F16 => Prob::F16,
        Float::Bf16 => Prob::Bf16,
    }
}

impl RoutePlan {
    /// Checks the sizes.
    ///
    /// # Errors
    /// Sizes beyond what a launch can index.
    pub fn new(spec: RouteSpec) -> Result<Self> {
        let RouteSpec { tokens, topk, experts, cols, input, .. } = spec;
        let shape = MapShape { tokens, rows: tokens.saturating_mul(topk), layout: Layout::Mask { experts } };
        let prob = Some(prob_of(spec.prob));
        let map = |routing| MapPlan::new(MapSpec { shape, routing, align: 1, leads: true });
        let row_bytes = cols * input.size();
        let steps = match spec.way {
            Way::Out(routing) => Steps::Out(map(routing)?, PermutePlan::new(shape, row_bytes, prob)?),
            Way::Numbers(routing) => Steps::Out(map(routing)?, PermutePlan::of_numbers(shape, prob)?),
            Way::Again => Steps::Again(PermutePlan::new(shape, row_bytes, None)?),
            Way::Back => Steps::Back(UnpermutePlan::new(shape, cols, input)?),
        };
        Ok(Self { spec, shape, steps })
    }

    /// Bytes of the destination.
    #[must_use]
    pub const fn out_bytes(&self) -> usize {
        match self.spec.way {
            Way::Out(_) | Way::Again => self.shape.rows * self.spec.cols * self.spec.input.size(),
            Way::Numbers(_) => self.shape.rows * NUMBER_BYTES,
            Way::Back => self.spec.tokens * self.spec.cols * self.spec.input.size(),
        }
    }

    /// Bytes of the factors of rows.
    #[must_use]
    pub const fn factor_bytes(&self) -> usize {
        self.shape.rows * self.spec.prob.size()
    }

    /// Bytes of the probabilities, or of their gradient.
    #[must_use]
    pub const fn prob_bytes(&self) -> usize {
        self.spec.tokens * self.spec.experts * self.spec.prob.size()
    }

    /// Bytes of the map.
    #[must_use]
    pub const fn map_bytes(&self) -> usize {
        self.shape.entries() * size_of::<i32>()
    }

    /// Bytes of the ends.
    #[must_use]
    pub const fn ends_bytes(&self) -> usize {
        self.spec.experts * size_of::<i32>()
    }

    /// Bytes of the counts.
    #[must_use]
    pub const fn split_bytes(&self) -> usize {
        self.spec.experts * size_of::<i64>()
    }

    /// Private bytes.
    #[must_use]
    pub const fn scratch_bytes(&self) -> usize {
        match &self.steps {
            Steps::Out(map, _) => map.scratch_bytes(),
            _ => 0,
        }
    }

    /// Launches it.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn run(&self, target: &mut Target<'_>, at: &RoutePointers<DevPtr<'_>>) -> Result<()> {
        let RoutePointers { x, out, probs, factors, row_id_map, ends, .. } = *at;
        let none = DevPtr::null();
        let finished = MapBuffers { map: row_id_map, pad_offsets: none, ends, partials: 1 };
        match &self.steps {
            Steps::Out(map, rows) => {
                let outputs = MapPointers {
                    routing: at.routing,
                    row_id_map,
                    counts: at.scratch,
                    ends,
                    padded_counts: at.splits,
                    state: at.state,
                    ..MapPointers::default()
                };
                let (making, map) = map.make(target, &outputs)?;
                let at = PermutePointers { x, out, probs, out_probs: factors, ..PermutePointers::default() };
                rows.run(target, &at, &map, &making)
            }
            Steps::Again(rows) => {
                let at = PermutePointers { x, out, ..PermutePointers::default() };
                rows.run(target, &at, &finished, &Making::default())
            }
            Steps::Back(rows) => {
                let moves = !probs.is_null();
                let at = UnpermutePointers { x, out, probs: none, in_probs: factors.when(moves), out_probs: probs };
                let map = MapBuffers { ends: none, partials: 0, ..finished };
                rows.run(target, &at, &map, (None, moves.then_some(prob_of(self.spec.prob))))
            }
        }
    }
}
