//! A program for one row count, ready to run.

use crate::base::dtype::{DType, Device};
use crate::base::error::Result;
use crate::launch::target::Target;
use crate::launch::trace::{CLOCK, Stage};
use crate::program::bindings::Bindings;
use crate::program::buffer::{Arena, Placement};
use crate::program::compile::Compiled;
use crate::program::facts::Facts;
use crate::program::pieces::{Cuts, Pieces, Travel};
use crate::program::planned::Planned;
use crate::program::port::Port;
use crate::program::replay::{Replay, WORTHWHILE};
use crate::program::sizing::Sizing;
use crate::program::work::{FlowName, Step};
use crate::runtime::dispatcher::Dispatcher;
use crate::runtime::lane::Lane;

/// A program for one row count.
#[derive(Debug)]
pub struct SizedProgram {
    rows: usize,
    /// By the number of the flow.
    flows: Vec<Flow>,
    saved_bytes: usize,
    deferred_bytes: Vec<usize>,
    read_extents: Vec<(usize, DType)>,
    buffers: usize,
}

/// Launches of one flow.
#[derive(Debug)]
struct Flow {
    launches: Vec<Planned>,
    buffers: Vec<BufferAt>,
    scratch: usize,
    cuts: Cuts,
    /// Graphs of the flow; none if they do not pay or are turned off.
    replay: Option<Replay>,
}

/// A buffer: its number among the addresses, and its place.
#[derive(Clone, Copy, Debug)]
struct BufferAt {
    number: u32,
    base: u32,
    offset: usize,
}

impl SizedProgram {
    pub(crate) fn new(
        dispatcher: &mut Dispatcher,
        facts: &Facts,
        compiled: &Compiled,
        (rows, graphs): (usize, bool),
    ) -> Result<Self> {
        for (index, linear) in facts.linear_indices().zip(&facts.linears) {
            linear.check_rows(rows).map_err(|error| facts.within(index, error))?;
        }
        let flows = &compiled.flows;
        let mut sizing = Sizing::new(dispatcher, facts, rows, flows.buffers.len());
        let launches = flows.all().map(|steps| sizing.launches(steps)).collect::<Result<Vec<_>>>()?;
        let bytes = sizing.bytes(flows.all())?;
        let placement = flows.buffers.place(&bytes, launches.len(), facts.linears.len());
        let flow = |(number, launches): (usize, Vec<Planned>)| {
            let pays = launches.iter().filter(|launch| launch.is_certain()).count() >= WORTHWHILE;
            Flow {
                buffers: if launches.is_empty() { Vec::new() } else { buffers_of(facts, compiled, &placement, number) },
                launches,
                scratch: placement.scratch[number],
                cuts: cuts_of(flows.all().nth(number).unwrap_or_default(), number),
                replay: (graphs && pays).then(Replay::default),
            }
        };
        Ok(Self {
            rows,
            flows: launches.into_iter().enumerate().map(flow).collect(),
            saved_bytes: placement.saved,
            read_extents: compiled.reads.iter().map(|&port| facts.extent_of(port, rows)).collect(),
            deferred_bytes: placement.deferred,
            buffers: flows.buffers.len(),
        })
    }

    /// Rows of the input.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes that forward saves for backward.
    #[must_use]
    pub const fn saved_bytes(&self) -> usize {
        self.saved_bytes
    }

    /// Bytes of delayed weight gradients, per linear op; 0 for those that are not delayed.
    #[must_use]
    pub fn deferred_bytes(&self) -> &[usize] {
        &self.deferred_bytes
    }

    /// Elements and type of each tensor that backward reads.
    #[must_use]
    pub fn read_extents(&self) -> &[(usize, DType)] {
        &self.read_extents
    }

    /// Private bytes of a forward.
    #[must_use]
    pub fn forward_scratch(&self) -> usize {
        self.scratch(FlowName::Forward)
    }

    /// Private bytes of a backward.
    #[must_use]
    pub fn backward_scratch(&self) -> usize {
        self.scratch(FlowName::Backward)
    }

    /// Private bytes of a delayed weight gradient.
    #[must_use]
    pub fn waiting_scratch(&self, linear: usize) -> usize {
        self.scratch(FlowName::Waiting(linear))
    }

    fn scratch(&self, flow: FlowName) -> usize {
        self.flows[flow.number()].scratch
    }

    /// Prepares chunks for a flow, whose product is cut if possible.
    ///
    /// # Errors
    /// Rows that cannot be cut so, or what cuBLAS lacks.
    pub fn prepare(
        &self,
        dispatcher: &mut Dispatcher,
        device: Device,
        flow: FlowName,
        mut pieces: Vec<Pieces>,
    ) -> Result<Vec<Pieces>> {
        let flow = &self.flows[flow.number()];
        let mut former = None;
        for one in &mut pieces {
            let at = flow.cuts.of(one.travel());
            let Some(Planned::Gemm(plan, _)) = at.map(|at| &flow.launches[at]) else { continue };
            // A product is cut once.
            if at == former {
                continue;
            }
            if let Some(problem) = one.problem_of(plan.problem())? {
                one.set_plan(dispatcher.gemm(device, problem)?);
                former = at;
            }
        }
        Ok(pieces)
    }

    /// Launches the forward, on a lane with [`SizedProgram::forward_scratch`] bytes.
    ///
    /// # Errors
    /// A launch's refusal.
    #[inline]
    pub fn run_forward<'a, 'd: 'a>(&self, lane: &mut Lane<'d>, call: Bindings<'_, 'a>) -> Result<()> {
        self.run(FlowName::Forward, lane, call)
    }

    /// Launches the backward, on a lane with [`SizedProgram::backward_scratch`] bytes.
    ///
    /// # Errors
    /// A launch's refusal.
    #[inline]
    pub fn run_backward<'a, 'd: 'a>(&self, lane: &mut Lane<'d>, call: Bindings<'_, 'a>) -> Result<()> {
        self.run(FlowName::Backward, lane, call)
    }

    /// Launches a delayed weight gradient, into [`Port::GradParam`] of the weight and through the plan of
    /// [`Bindings::set_weight_grad`], on a lane with [`SizedProgram::waiting_scratch`] bytes.
    ///
    /// # Errors
    /// A launch's refusal.
    pub fn run_waiting<'a, 'd: 'a>(&self, lane: &mut Lane<'d>, linear: usize, call: Bindings<'_, 'a>) -> Result<()> {
        self.run(FlowName::Waiting(linear), lane, call)
    }

    #[inline]
    fn run<'a, 'd: 'a>(&self, flow: FlowName, lane: &mut Lane<'d>, mut call: Bindings<'_, 'a>) -> Result<()> {
        let flow = &self.flows[flow.number()];
        call.set_workspace(&lane.workspace);
        let launch = |target: &mut Target<'_>, call: &mut Bindings<'_, '_>| flow.run(target, call, self.buffers);
        match &flow.replay {
            Some(replay) if !call.is_in_pieces() => {
                let replayed = replay.run(&mut lane.target, &mut call, launch);
                CLOCK.mark(Stage::Gemm); // a replayed graph includes its casts
                replayed
            }
            _ => launch(&mut lane.target, &mut call),
        }
    }
}

impl Flow {
    fn run(&self, target: &mut Target<'_>, call: &mut Bindings<'_, '_>, buffers: usize) -> Result<()> {
        call.grow(buffers);
        self.buffers.iter().for_each(|buffer| call.set_buffer(buffer.number, buffer.base, buffer.offset));
        if call.is_in_pieces() {
            return self.run_in_pieces(target, call);
        }
        self.launches.iter().try_for_each(|launch| run(launch, target, call))
    }

    /// The same beside a stream that brings or takes rows.
    #[cold]
    fn run_in_pieces(&self, target: &mut Target<'_>, call: &Bindings<'_, '_>) -> Result<()> {
        let all = call.pieces();
        let place = |pieces: &Pieces| self.cuts.of(pieces.travel()).filter(|_| pieces.is_cut());
        let (cut, whole): (Vec<_>, Vec<_>) = all.iter().partition(|pieces| place(pieces).is_some());
        let late = if cut.iter().any(|pieces| pieces.travel() == Travel::Arriving) { self.cuts.late() } else { &[] };
        whole.iter().try_for_each(|pieces| pieces.before(target))?;
        for (number, launch) in self.launches.iter().enumerate().filter(|(number, _)| !late.contains(number)) {
            let here = cut.iter().find(|pieces| place(pieces) == Some(number));
            let (Some(pieces), Planned::Gemm(_, io)) = (here, launch) else {
                run(launch, target, call)?;
                continue;
            };
            pieces.run(target, &io.map(|cell| call.at(*cell)))?;
            if pieces.travel() == Travel::Arriving {
                late.iter().try_for_each(|&number| run(&self.launches[number], target, call))?;
            }
        }
        whole.iter().try_for_each(|pieces| pieces.behind(target))
    }
}

#[inline]
fn run(launch: &Planned, target: &mut Target<'_>, call: &Bindings<'_, '_>) -> Result<()> {
    let launched = launch.run(target, call);
    CLOCK.mark(if launch.is_gemm() { Stage::Gemm } else { Stage::Cast });
    launched
}

/// The launches of a flow that can be cut.
fn cuts_of(steps: &[Step], flow: usize) -> Cuts {
    match flow {
        0 => Cuts::new(steps, Port::Input, Port::Output),
        1 => Cuts::new(steps, Port::GradOutput, Port::GradInput),
        _ => Cuts::default(),
    }
}

/// The buffers that the flow of this number may use.
fn buffers_of(facts: &Facts, compiled: &Compiled, placement: &Placement, flow: usize) -> Vec<BufferAt> {
    let base = |arena: Arena| match arena {
        Arena::Scratch(of) if usize::from(of) == flow => Some(Port::Scratch),
        Arena::Scratch(_) => None,
        Arena::Saved => Some(Port::Saved),
        Arena::Deferred(linear) => Some(Port::deferred(linear)),
    };
    let arenas = compiled.flows.buffers.arenas().enumerate();
    let one = |(index, arena): (usize, Arena)| {
        let base = facts.ports.of(base(arena)?) as u32;
        let number = facts.ports.of(Port::Buffer(index as u16)) as u32;
        Some(BufferAt { number, base, offset: placement.offsets[index] })
    };
    arenas.filter_map(one).collect()
}
