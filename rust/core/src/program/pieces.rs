//! A flow whose product is cut, so that collectives run beside its pieces.
//!
//! The caller starts a collective, and the flow runs until it needs the result, or has something to send: a *pause*.
//! The launches before a pause are in the stream when the caller continues with its collectives. That is the order in
//! which a GPU with one queue runs them beside each other (`CUDA_DEVICE_MAX_CONNECTIONS=1`).
//!
//! Each element of the result has a sum of its own, so pieces have the bits of the whole, unless cuBLASLt sums a product
//! of another size in another order.

use std::ops::Range;
use std::sync::Arc;

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::base::pointer::DevPtr;
use crate::gemm::grouped::BLOCK;
use crate::gemm::plan::GemmPlan;
use crate::gemm::problem::{GemmPointers, Problem, ScaleMode};
use crate::launch::target::Target;
use crate::program::chain::OP;
use crate::program::linear_op::Product;
use crate::program::planned::Planned;
use crate::program::port::Port;
use crate::program::work::{FlowName, Step, Work};
use crate::runtime::dispatcher::Dispatcher;

/// Rows at which pieces begin, and columns, as matrix products in FP8 and blocks of scales need.
const ROW_GRANULE: usize = 16;
const COLUMN_GRANULE: usize = BLOCK;
/// Bytes that an address is a multiple of, at least.
const LEAST_ALIGNMENT: u16 = 16;
/// Multiplications of a product that is cut, times the bytes of an operand's element, at least. On four H100, layers whose
/// products were half as large took 4 to 40 % longer with cut products: the pieces ended before what travelled beside
/// them, and the host fell behind. Those of this size took 4 % less time.
const LEAST_WORK: f64 = 2e11;

/// A tensor that travels between ranks beside a flow.
#[derive(Clone, Debug)]
pub enum Transfer<'a> {
    /// Rows of the flow's input come from other ranks. Rows from `begin` on are this rank's, and already here.
    Arriving {
        /// This rank's rows, contiguous, apart from the input's memory, which they reach only by the collective.
        own: DevPtr<'a>,
        /// The first of these rows in the input.
        begin: usize,
        /// Their number.
        rows: usize,
    },
    /// The flow's result goes to other ranks in blocks of columns, which end at these. In the result's memory, each
    /// block is a contiguous matrix behind the one before it.
    Leaving(Vec<usize>),
}

/// A point at which the caller acts for one of its transfers. The rows of an arriving transfer must be there when the
/// flow goes on; a leaving one has computed a block of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Index of the transfer.
    pub transfer: usize,
    /// Number of the pause among those of this transfer.
    pub number: usize,
}

/// A part of a cut product.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    /// Number of the product's launch.
    pub(crate) launch: usize,
    plan: Arc<GemmPlan>,
    /// Memory of the first operand, if it is not the input's.
    own: Option<DevPtr<'a>>,
    /// Bytes from the beginning of the operand, the weight, its scales, the bias and the result.
    x: usize,
    w: usize,
    w_scale: usize,
    bias: usize,
    d: usize,
}

impl<'s> Piece<'s> {
    pub(crate) fn run<'a>(&self, target: &mut Target<'_>, io: &GemmPointers<DevPtr<'a>>) -> Result<()>
    where
        's: 'a,
    {
        let pointers = GemmPointers {
            x: self.own.unwrap_or(io.x).offset(self.x),
            w: io.w.offset(self.w),
            w_scale: io.w_scale.offset(self.w_scale),
            bias: io.bias.offset(self.bias),
            d: io.d.offset(self.d),
            ..*io
        };
        self.plan.run(target, &pointers)
    }
}

/// One step of a script.
#[derive(Debug)]
pub(crate) enum Act<'a> {
    Launch(usize),
    Piece(Piece<'a>),
    Pause(Pause),
}

/// The launches, pieces and pauses of one flow, and how far it has come.
#[derive(Debug)]
pub struct Script<'a> {
    flow: FlowName,
    acts: Vec<Act<'a>>,
    next: usize,
}

impl<'a> Script<'a> {
    pub(crate) fn new(
        dispatcher: &mut Dispatcher,
        device: Device,
        flow: FlowName,
        (launches, cuts): (&[Planned], &Cuts),
        (transfers, always): (&[Transfer<'a>], bool),
    ) -> Result<Self> {
        let mut script = Self { flow, acts: Vec::new(), next: 0 };
        let mut places: Vec<(usize, Vec<Act<'a>>)> = Vec::new();
        let (mut late, mut awaited): (&[usize], Vec<usize>) = (&[], Vec::new());
        for (index, transfer) in transfers.iter().enumerate() {
            let at = match transfer {
                Transfer::Arriving { .. } => cuts.arriving,
                Transfer::Leaving(_) => cuts.leaving,
            };
            // A product is cut once.
            let at = at.filter(|&at| places.iter().all(|&(place, _)| place != at));
            let pieces = match at.map(|at| (at, &launches[at])) {
                Some((at, Planned::Gemm(plan, _))) if always || work(plan.problem()) >= LEAST_WORK => {
                    let make = |problem| dispatcher.gemm(device, problem);
                    transfer.acts(CutAt { transfer: index, launch: at }, plan.problem(), make)?.map(|acts| (at, acts))
                }
                _ => None,
            };
            match (pieces, transfer) {
                (Some(pieces), _) => {
                    if matches!(transfer, Transfer::Arriving { .. }) {
                        late = &cuts.late;
                    }
                    places.push(pieces);
                }
                (None, Transfer::Arriving { .. }) => awaited.push(index),
                (None, Transfer::Leaving(_)) => {}
            }
        }
        for number in (0..launches.len()).filter(|number| !late.contains(number)) {
            if cuts.reads == Some(number) {
                script.wait(&mut awaited);
            }
            let Some(place) = places.iter().position(|&(place, _)| place == number) else {
                script.acts.push(Act::Launch(number));
                continue;
            };
            script.acts.append(&mut places[place].1);
            if cuts.arriving == Some(number) {
                script.acts.extend(std::mem::take(&mut late).iter().map(|&number| Act::Launch(number)));
            }
        }
        script.wait(&mut awaited);
        Ok(script)
    }

    /// Pauses for transfers whose rows the next launch reads.
    fn wait(&mut self, awaited: &mut Vec<usize>) {
        self.acts.extend(awaited.drain(..).map(|transfer| Act::Pause(Pause { transfer, number: 0 })));
    }

    /// Whether all launches run as without transfers.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.acts.iter().all(|act| matches!(act, Act::Launch(_)))
    }

    pub(crate) const fn flow(&self) -> FlowName {
        self.flow
    }

    /// The next act, None behind the last.
    pub(crate) fn advance(&mut self) -> Option<&Act<'a>> {
        let act = self.acts.get(self.next)?;
        self.next += 1;
        Some(act)
    }
}

/// A product that a transfer may cut: the transfer's index, and the number of the launch.
#[derive(Clone, Copy, Debug)]
struct CutAt {
    transfer: usize,
    launch: usize,
}

impl CutAt {
    const fn pause<'a>(self, number: usize) -> Act<'a> {
        Act::Pause(Pause { transfer: self.transfer, number })
    }
}

fn work(product: &Problem) -> f64 {
    [product.m, product.n, product.k, product.x.dtype.size()].iter().map(|&count| count as f64).product()
}

/// The alignment of all bytes at which pieces begin.
fn alignment_of(whole: &Problem, starts: usize) -> u16 {
    (1 << starts.trailing_zeros().min(15)).min(whole.alignment)
}

impl<'a> Transfer<'a> {
    /// The pieces and pauses that stand for a product; None if it cannot be cut so.
    fn acts(
        &self,
        at: CutAt,
        whole: &Problem,
        plan: impl FnMut(Problem) -> Result<Arc<GemmPlan>>,
    ) -> Result<Option<Vec<Act<'a>>>> {
        match self {
            Self::Arriving { own, begin, rows } => arriving(at, whole, (*own, *begin..*begin + *rows), plan),
            Self::Leaving(ends) => leaving(at, whole, ends, plan),
        }
    }
}

/// This rank's rows, a pause, and the rows before and behind them.
fn arriving<'a>(
    at: CutAt,
    whole: &Problem,
    (own, rows): (DevPtr<'a>, Range<usize>),
    mut plan: impl FnMut(Problem) -> Result<Arc<GemmPlan>>,
) -> Result<Option<Vec<Act<'a>>>> {
    if rows.is_empty() || rows.end > whole.m {
        return Err(Error::shape(OP, "the rows of a rank", format!("1 to {}", whole.m), rows.len()));
    }
    let [x_row, d_row] = [whole.x.ld * whole.x.dtype.size(), whole.ldd * whole.d.size()];
    let fits = !whole.x.k_outermost
        && whole.x.ld == whole.k
        && matches!(whole.x.scale, ScaleMode::None | ScaleMode::Tensor)
        && [rows.start, rows.end, whole.m].iter().all(|row| row.is_multiple_of(ROW_GRANULE));
    let alignment = alignment_of(whole, own.address() | (ROW_GRANULE * (x_row | d_row)));
    if !fits || alignment < LEAST_ALIGNMENT {
        return Ok(None);
    }
    let mut piece = |rows: &Range<usize>, own: Option<DevPtr<'a>>| -> Result<Act<'a>> {
        Ok(Act::Piece(Piece {
            launch: at.launch,
            plan: plan(Problem { m: rows.len(), alignment, ..*whole })?,
            own,
            x: if own.is_some() { 0 } else { rows.start * x_row },
            w: 0,
            w_scale: 0,
            bias: 0,
            d: rows.start * d_row,
        }))
    };
    let mut acts = vec![piece(&rows, Some(own))?, at.pause(0)];
    for others in [0..rows.start, rows.end..whole.m] {
        if !others.is_empty() {
            acts.push(piece(&others, None)?);
        }
    }
    Ok(Some(acts))
}

/// Blocks of columns, with a pause behind each.
fn leaving<'a>(
    at: CutAt,
    whole: &Problem,
    ends: &[usize],
    mut plan: impl FnMut(Problem) -> Result<Arc<GemmPlan>>,
) -> Result<Option<Vec<Act<'a>>>> {
    let fits = matches!(whole.w.scale, ScaleMode::None | ScaleMode::Tensor | ScaleMode::Block2d)
        && !whole.accumulate
        && whole.ldd == whole.n
        && ends.last() == Some(&whole.n)
        && ends.iter().all(|end| end.is_multiple_of(COLUMN_GRANULE));
    if !fits {
        return Ok(None);
    }
    let w_column = whole.w.dtype.size() * if whole.w.k_outermost { 1 } else { whole.w.ld };
    let [d_column, bias_column] = [whole.m * whole.d.size(), whole.bias.map_or(0, DType::size)];
    let scales_of_block = size_of::<f32>() * whole.k.div_ceil(BLOCK).next_multiple_of(4);
    let alignment = alignment_of(whole, COLUMN_GRANULE * (w_column | d_column | bias_column));
    let (mut acts, mut first) = (Vec::new(), 0);
    for (number, &end) in ends.iter().enumerate() {
        let Some(n) = end.checked_sub(first).filter(|&n| n != 0) else {
            return Err(Error::shape(OP, "blocks of columns", "increasing ends", end));
        };
        acts.push(Act::Piece(Piece {
            launch: at.launch,
            plan: plan(Problem { n, ldd: n, alignment, ..*whole })?,
            own: None,
            x: 0,
            w: first * w_column,
            w_scale: if whole.w.scale == ScaleMode::Block2d { first / BLOCK * scales_of_block } else { 0 },
            bias: first * bias_column,
            d: first * d_column,
        }));
        acts.push(at.pause(number));
        first = end;
    }
    Ok(Some(acts))
}

/// The launches of a flow that can be cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cuts {
    arriving: Option<usize>,
    leaving: Option<usize>,
    /// Launches before `arriving` that also read the arriving rows, and may run after it.
    late: Vec<usize>,
    /// The first launch that reads the arriving rows.
    reads: Option<usize>,
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
        Self { arriving, leaving, late, reads: steps.iter().position(reads) }
    }
}

/// The places where a dense product reads and writes rows; none if it stores FP8, since its maximum covers all rows.
fn product_of(step: &Step) -> Option<(Port, Port)> {
    let Work::Gemm { product, at, .. } = &step.work else { return None };
    let by_rows = !matches!(product, Product::WeightGrad) && !at.d_amax.is_some();
    by_rows.then_some((at.x.port, at.d.port))
}
