//! A product whose rows arrive or leave in chunks on another stream, while the product of other chunks runs.
//!
//! Ranks have shares of the rows, in order, and a chunk is a piece of every share. The pieces of a product have the
//! bits of the whole, since each row has its own sums.

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::cuda::device::{Event, Stream, record, wait_until};
use crate::gemm::plan::GemmPlan;
use crate::gemm::problem::{GemmPointers, Problem, ScaleMode};
use crate::launch::target::{Backend, Target};
use crate::program::chain::OP;
use crate::program::linear_op::Product;
use crate::program::port::Port;
use crate::program::work::{Step, Work};

/// The direction of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Travel {
    /// Another stream writes the chunks that the product reads.
    Arriving,
    /// Another stream reads the chunks that the product writes.
    Leaving,
}

/// Chunks of a call's rows, and the event of each: recorded when an arriving chunk is complete, or recorded here when a
/// leaving chunk is.
#[derive(Clone, Debug)]
pub struct Pieces {
    travel: Travel,
    shares: usize,
    events: Vec<Event>,
    /// The product of one piece; none if no product is cut.
    plan: Option<Arc<GemmPlan>>,
}

impl Pieces {
    /// One chunk per event; each has a piece of each of `shares` equal parts of the rows.
    #[must_use]
    pub fn new(travel: Travel, shares: usize, events: impl IntoIterator<Item = Event>) -> Self {
        Self { travel, shares, events: events.into_iter().collect(), plan: None }
    }

    pub(crate) const fn travel(&self) -> Travel {
        self.travel
    }

    /// The problem of one piece, if the whole can be cut.
    pub(crate) fn problem_of(&self, whole: &Problem) -> Result<Option<Problem>> {
        let count = self.events.len() * self.shares;
        if count == 0 || !whole.m.is_multiple_of(count) {
            return Err(Error::shape(OP, "the rows of a call in chunks", format!("a multiple of {count}"), whole.m));
        }
        let piece = Problem { m: whole.m / count, ..*whole };
        let aligned = |bytes: usize| bytes.is_multiple_of(usize::from(whole.alignment));
        let fits = !whole.x.k_outermost
            && matches!(whole.x.scale, ScaleMode::None | ScaleMode::Tensor)
            && aligned(piece.m * piece.x.ld * piece.x.dtype.size())
            && aligned(piece.m * piece.ldd * piece.d.size());
        Ok(fits.then_some(piece))
    }

    pub(crate) fn set_plan(&mut self, plan: Arc<GemmPlan>) {
        self.plan = Some(plan);
    }

    pub(crate) const fn is_cut(&self) -> bool {
        self.plan.is_some()
    }

    /// Runs the product piece by piece, in the order of the chunks.
    pub(crate) fn run(&self, target: &mut Target<'_>, io: &GemmPointers<DevPtr<'_>>) -> Result<()> {
        let Some(plan) = &self.plan else { return Err(Error::state(OP, "chunks without a plan; report this")) };
        let problem = plan.problem();
        let [x, d] = [problem.x.ld * problem.x.dtype.size(), problem.ldd * problem.d.size()].map(|row| row * problem.m);
        for (chunk, &event) in self.events.iter().enumerate() {
            if self.travel == Travel::Arriving {
                each(target, event, wait_until)?;
            }
            for share in 0..self.shares {
                let piece = share * self.events.len() + chunk;
                plan.run(target, &GemmPointers { x: io.x.offset(piece * x), d: io.d.offset(piece * d), ..*io })?;
            }
            if self.travel == Travel::Leaving {
                each(target, event, record)?;
            }
        }
        Ok(())
    }

    /// Waits for all chunks, if no product is cut.
    pub(crate) fn before(&self, target: &mut Target<'_>) -> Result<()> {
        if self.travel == Travel::Leaving {
            return Ok(());
        }
        self.events.iter().try_for_each(|&event| each(target, event, wait_until))
    }

    /// Records the events of all chunks, if no product is cut.
    pub(crate) fn behind(&self, target: &mut Target<'_>) -> Result<()> {
        if self.travel == Travel::Arriving {
            return Ok(());
        }
        self.events.iter().try_for_each(|&event| each(target, event, record))
    }
}

/// Applies an event to the stream; the host has no events, and has finished its work already.
fn each(target: &mut Target<'_>, event: Event, act: fn(Stream, Event) -> Result<()>) -> Result<()> {
    match &target.backend {
        Backend::Cuda(queue) => act(queue.stream, event),
        Backend::Host => Ok(()),
    }
}

/// The launches of a flow that can be cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cuts {
    arriving: Option<usize>,
    leaving: Option<usize>,
    /// Launches before `arriving` that also read the arriving rows, and may run after it.
    late: Vec<usize>,
}

impl Cuts {
    /// The cuts of a flow with input `comes` and result `goes`.
    pub(crate) fn new(steps: &[Step], comes: Port, goes: Port) -> Self {
        let reads = |step: &Step| {
            let mut found = false;
            step.work.each(|at| found |= at.port == comes);
            found
        };
        // A transpose only uses the memory of its result, which outlives the product.
        let moves = |step: &Step| matches!(step.work, Work::Transpose { .. });
        let arriving = steps.iter().position(|step| reads(step) && !moves(step));
        let arriving = arriving.filter(|&at| product_of(&steps[at]).is_some_and(|io| io.0 == comes && io.1 != comes));
        let late = (0..arriving.unwrap_or(0)).filter(|&at| reads(&steps[at])).collect();
        let leaving = steps.len().checked_sub(1);
        let leaving = leaving.filter(|&at| product_of(&steps[at]).is_some_and(|io| io.1 == goes));
        Self { arriving, leaving, late }
    }

    pub(crate) const fn of(&self, travel: Travel) -> Option<usize> {
        match travel {
            Travel::Arriving => self.arriving,
            Travel::Leaving => self.leaving,
        }
    }

    /// Launches that wait until the product of the arriving rows has run.
    pub(crate) fn late(&self) -> &[usize] {
        &self.late
    }
}

/// The places where a dense product reads and writes rows; none if it stores FP8, since its maximum covers all rows.
fn product_of(step: &Step) -> Option<(Port, Port)> {
    let Work::Gemm { product, at, .. } = &step.work else { return None };
    let by_rows = !matches!(product, Product::WeightGrad) && !at.d_amax.is_some();
    by_rows.then_some((at.x.port, at.d.port))
}
