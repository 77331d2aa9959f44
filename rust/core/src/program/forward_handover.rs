//! Hand-over of FP8 from one linear op's GEMM to the next: under delayed scaling the scale is known before the value.

use crate::base::error::{ErrorKind, Result};
use crate::gemm::problem::Epilogue;
use crate::ops::handover::ROW_BYTES;
use crate::program::buffer::At;
use crate::program::chain::Op;
use crate::program::edge::{LayoutAt, Layouts, Rows};
use crate::program::forward_compiler::{Compiler, slot};
use crate::program::linear_op::{Product, Tail};
use crate::program::port::{Beside, LinearPort, Outer, Port};
use crate::program::work::{FlowName, Step, Work};
use crate::recipe::definition::Recipe;

/// Rows of a trial GEMM, by which te_fast finds out whether cuBLASLt has it with an FP8 result.
pub(crate) const PROBE_ROWS: usize = 128;

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

    /// The first step arranges the scales of all values that are handed over later.
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
        let takers = self.handovers.takers.iter();
        let slots = takers.map(|&linear| slot(linear, LinearPort::InputScale, LinearPort::InputAmax)).collect();
        let text = if after { "maxima of what stayed in FP8" } else { "scales of what stays in FP8" };
        let ops = (0, self.facts.chain.links().len() - 1);
        Step { work: Work::Handover { table: self.handovers.table, slots, after }, rows: Rows::Input, ops, text }
    }

    /// The result of the GEMM of the op at `index` and its tail in FP8, for the linear op that takes edge `next`, if no
    /// other op reads the value.
    pub(super) fn hand_over(&mut self, index: usize, next: usize, tail: Tail) -> Result<Option<Layouts>> {
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
        let scale = self.handovers.table.plus(self.handovers.takers.len() * ROW_BYTES);
        self.handovers.takers.push(taker);
        self.handovers.direct |= tail.epilogue == Epilogue::None;
        let row = LayoutAt { data: self.scratch(), scale };
        Ok(Some(Layouts { row, col: LayoutAt::default() }))
    }

    /// The result of the GEMM of the op at `index` and its epilogue in FP8, if it is the chain's quantised output and
    /// its scale is known beforehand.
    pub(super) fn store_output(&mut self, index: usize, next: usize, tail: Tail) -> Result<Option<Layouts>> {
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
        self.output_scale(index, linear, false);
        (self.out.hands_over, self.out.output_is_row) = (true, true);
        Ok(Some(Layouts::outer(Outer::Output, kind)))
    }

    /// The launch before such a GEMM, or after it.
    pub(super) fn output_scale(&mut self, index: usize, linear: usize, after: bool) {
        let table = At::of(Port::Beside(Outer::Output, Beside::RowScale));
        let slots = vec![slot(linear, LinearPort::OutputScale, LinearPort::OutputAmax)];
        let text = if after { "maximum of the output" } else { "scale of the output" };
        self.step(Work::Handover { table, slots, after }, (index, index), text);
    }

    fn note_kept_high(&mut self, index: usize, next: usize, reason: &str) {
        let (from, to) = (self.facts.label(index), self.facts.label(self.consumer(next).0));
        self.out.notes.push(format!("{from} does not hand FP8 over to {to}, {reason}"));
    }
}
