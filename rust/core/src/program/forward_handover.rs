//! Hand-over of FP8 from one linear op's GEMM to the next: under delayed scaling the scale is known before the value.

use crate::base::error::{ErrorKind, Result};
use crate::gemm::problem::Epilogue;
use crate::program::buffer::At;
use crate::program::chain::Op;
use crate::program::edge::{LayoutAt, Layouts, Rows};
use crate::program::forward_compiler::{Compiler, slot};
use crate::program::linear_op::{Product, Tail};
use crate::program::port::{Beside, LinearPort, Outer, Port};
use crate::program::work::{FlowName, Step, StoredAt, Work};
use crate::recipe::definition::Recipe;

/// Rows of a trial GEMM, by which te_fast finds out whether cuBLASLt has it with an FP8 result.
pub(crate) const PROBE_ROWS: usize = 128;

/// Bytes of a row of the table of values that are handed over: inverse scale and found maximum. cuBLAS reads inverse scales
/// at multiples of 16 bytes.
const ROW_BYTES: usize = 32;
/// Offset of the found maximum in a row.
const FOUND_AT: usize = 16;

impl Compiler<'_> {
    /// Whether some linear op could take its input by hand-over, since no backward reads that input.
    pub(super) fn handovers_possible(&self) -> bool {
        self.facts.recipe.as_ref().is_some_and(Recipe::is_delayed)
            && self.facts.linears.iter().skip(1).any(|taker| !taker.weight_grad)
    }

    /// Whether the two launches around the GEMMs are worth it: each value saves one. One value alone is handed over
    /// between neighbours only, so that an MLP of two linear ops has the fewest launches.
    pub(super) fn handovers_pay(&self) -> bool {
        self.handovers.takers.len() > 1 || self.handovers.direct
    }

    /// The first step computes the inverse scales of all values that are handed over later.
    pub(super) fn begin_handovers(&mut self) {
        self.handovers.table = self.scratch();
        let step = self.handover(false);
        self.out.flows.push(FlowName::Forward, step);
    }

    /// The last step raises the maxima.
    pub(super) fn end_handovers(&mut self) {
        let (first, last) = (self.handover(false), self.handover(true));
        self.out.flows.replace_first(FlowName::Forward, first);
        self.out.flows.push(FlowName::Forward, last);
        self.out.hands_over = true;
    }

    /// The launch before the GEMMs, or after them.
    fn handover(&self, after: bool) -> Step {
        let values = (0..self.handovers.takers.len()).map(|row| {
            let value = self.handed_over(row);
            if after { StoredAt { inverse: At::NONE, ..value } } else { StoredAt { found: At::NONE, ..value } }
        });
        let text = if after { "maxima of what stayed in FP8" } else { "scales of what stays in FP8" };
        let ops = (0, self.facts.chain.links().len() - 1);
        Step { work: Work::Handover(values.collect()), rows: Rows::Input, ops, text }
    }

    /// The value in a row of the table.
    fn handed_over(&self, row: usize) -> StoredAt {
        let at = self.handovers.table.plus(row * ROW_BYTES);
        let slot = slot(self.handovers.takers[row], LinearPort::InputScale, LinearPort::InputAmax);
        StoredAt { slot, inverse: at, found: at.plus(FOUND_AT) }
    }

    /// The result of the GEMM of the op at `index` and its tail in FP8, for the linear op that takes edge `next`, if no
    /// other op reads the value.
    pub(super) fn hand_over(&mut self, index: usize, next: usize, tail: Tail) -> Result<Option<(Layouts, StoredAt)>> {
        let (Some((taker, false)), Some(recipe)) = (self.fp8_consumer(next), self.facts.recipe.as_ref()) else {
            return Ok(None);
        };
        if self.facts.linears[taker].weight_grad {
            self.note_kept_high(index, next, "whose weight gradient needs it transposed");
            return Ok(None);
        }
        let own = &self.facts.linears[self.facts.chain.links()[index].linear];
        match own.plan(self.dispatcher, PROBE_ROWS, Product::Forward { tail, into: Some(recipe.fwd) }) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::Cublas { .. }) => {
                self.note_kept_high(index, next, "because cuBLASLt has no such product with an FP8 result");
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        if !self.handovers.table.is_some() {
            self.note_kept_high(index, next, "because one value saves a launch and needs two");
            return Ok(None);
        }
        self.handovers.takers.push(taker);
        self.handovers.direct |= tail.epilogue == Epilogue::None;
        let stored = self.handed_over(self.handovers.takers.len() - 1);
        let row = LayoutAt { data: self.scratch(), scale: stored.inverse };
        Ok(Some((Layouts { row, col: LayoutAt::default() }, stored)))
    }

    /// The result of the GEMM of the op at `index` and its epilogue in FP8, if it is the chain's quantised output and
    /// its scale is known beforehand.
    pub(super) fn store_output(
        &mut self,
        index: usize,
        next: usize,
        tail: Tail,
    ) -> Result<Option<(Layouts, StoredAt)>> {
        let facts = self.facts;
        let (Some(kind), Some(recipe)) = (facts.output_kind(), facts.recipe.as_ref()) else { return Ok(None) };
        let ends = (next..facts.chain.links().len()).all(|at| matches!(self.op_at(at), Some(Op::Identity)));
        let is_known = recipe.is_delayed() && !kind.usage.columnwise;
        if !(self.stores_fp8 && ends && is_known) {
            return Ok(None);
        }
        let linear = facts.chain.links()[index].linear;
        let product = Product::Forward { tail, into: Some(kind.dtype) };
        match facts.linears[linear].plan(self.dispatcher, PROBE_ROWS, product) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::Cublas { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
        (self.out.hands_over, self.out.output_is_row) = (true, true);
        let inverse = At::of(Port::Beside(Outer::Output, Beside::RowScale));
        let slot = slot(linear, LinearPort::OutputScale, LinearPort::OutputAmax);
        Ok(Some((Layouts::outer(Outer::Output, kind), StoredAt { slot, inverse, found: self.scratch() })))
    }

    fn note_kept_high(&mut self, index: usize, next: usize, reason: &str) {
        let (from, to) = (self.facts.label(index), self.facts.label(self.consumer(next).0));
        self.out.notes.push(format!("{from} does not hand FP8 over to {to}, {reason}"));
    }
}
