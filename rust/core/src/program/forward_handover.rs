//! Hand-over of FP8 from one linear op's GEMM to the next: delayed scaling knows the scale before the value is there.

use std::sync::Arc;

use crate::error::{ErrorKind, Result};
use crate::gemm::{Epilogue, GemmPlan};
use crate::ops::handover::ROW_BYTES;
use crate::program::Facts;
use crate::program::forward::Compiler;
use crate::program::linear_op::Tail;
use crate::program::memory::At;
use crate::program::step::{Action, QuantAt};
use crate::recipe::{Recipe, Usage};

/// What a forward hands over.
#[derive(Debug)]
pub(super) struct Handovers {
    /// Rows of scales, one per value; nothing is handed over without.
    table: At,
    /// The linear ops that take a value, by row.
    takers: Vec<usize>,
    /// Some value comes straight from a linear op, not from an activation behind one.
    direct: bool,
}

impl Handovers {
    pub(super) const NONE: Self = Self { table: At::NONE, takers: Vec::new(), direct: false };

    /// Whether the two launches around the GEMMs are worth it: each value saves one. One value alone is handed over
    /// between neighbours only, so that an MLP of two linear ops has the fewest launches.
    pub(super) fn pay(&self) -> bool {
        self.takers.len() > 1 || self.direct
    }
}

/// Whether some linear op could take its input so: no backward reads it.
pub(super) fn handovers_possible(facts: &Facts<'_>) -> bool {
    facts.recipe.is_some_and(Recipe::is_delayed) && facts.linears.iter().skip(1).any(|taker| !taker.weight_grad)
}

impl Compiler<'_> {
    /// The first step lays out the scales of whatever is handed over later.
    pub(super) fn begin_handovers(&mut self) {
        let table = self.scratch(self.facts.linears.len() * ROW_BYTES);
        self.handovers.table = table;
        self.step(Action::Handover { linears: Vec::new(), table, after: false }, (0, 0), "scales of what stays in FP8");
    }

    /// The last one raises the maxima.
    pub(super) fn end_handovers(&mut self) {
        let (table, takers) = (self.handovers.table, &self.handovers.takers);
        let all = (0, self.facts.chain.links().len() - 1);
        if let Some(first) = self.out.steps.first_mut() {
            first.action = Action::Handover { linears: takers.clone(), table, after: false };
            first.ops = all;
        }
        let last = Action::Handover { linears: takers.clone(), table, after: true };
        self.touch(&[table]);
        self.step(last, all, "maxima of what stayed in FP8");
    }

    /// The GEMM of the op at `index` and its tail with an FP8 result for the linear op that takes edge `next`, where
    /// nothing else reads the value.
    pub(super) fn hand_over(
        &mut self,
        index: usize,
        next: usize,
        tail: Tail,
    ) -> Result<Option<(Arc<GemmPlan>, QuantAt)>> {
        let (Some((taker, false)), Some(recipe)) = (self.fp8_consumer(next), self.facts.recipe) else {
            return Ok(None);
        };
        let taker_op = &self.facts.linears[taker];
        if taker_op.weight_grad {
            self.note_kept_high(index, next, "whose weight gradient needs it transposed");
            return Ok(None);
        }
        let own = &self.facts.linears[self.facts.chain.links()[index].linear];
        let plan = match own.fprop(self.dispatcher, tail, Some(recipe.fwd)) {
            Ok(plan) => plan,
            Err(error) if matches!(error.kind(), ErrorKind::Cublas { .. }) => {
                self.note_kept_high(index, next, "because cuBLASLt has no such product with an FP8 result");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if !self.handovers.table.is_some() {
            self.note_kept_high(index, next, "because one value saves a launch and needs two");
            return Ok(None);
        }
        let Some(quantized) = &taker_op.quantized else { return Ok(None) };
        let segments = quantized.x_segments(Usage { rowwise: true, columnwise: false });
        let data = self.scratch(segments.bytes).plus(segments.row);
        let scale = self.handovers.table.plus(self.handovers.takers.len() * ROW_BYTES);
        self.handovers.takers.push(taker);
        self.handovers.direct |= tail.epilogue == Epilogue::None;
        Ok(Some((plan, QuantAt { data, scale })))
    }

    fn note_kept_high(&mut self, index: usize, next: usize, reason: &str) {
        let links = self.facts.chain.links();
        let (from, to) = (&links[index].label, &links[self.consumer(next).0].label);
        self.out.notes.push(format!("{from} does not hand FP8 over to {to}, {reason}"));
    }
}
