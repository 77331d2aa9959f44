//! A program for one row count, ready to run.

use crate::base::dtype::{DType, Device};
use crate::base::error::{Error, Result};
use crate::launch::target::Target;
use crate::launch::trace::{CLOCK, Stage};
use crate::program::bindings::Bindings;
use crate::program::buffer::{Arena, Placement};
use crate::program::chain::OP;
use crate::program::compile::Compiled;
use crate::program::facts::Facts;
use crate::program::pieces::{Act, Cuts, Pause, Script, Transfer};
use crate::program::planned::Planned;
use crate::program::port::Port;
use crate::program::replay::Replay;
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
    hands_over: bool,
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
            let replay = (graphs && launches.iter().any(Planned::is_certain)).then(Replay::default);
            Flow {
                buffers: if launches.is_empty() { Vec::new() } else { buffers_of(facts, compiled, &placement, number) },
                launches,
                scratch: placement.scratch[number],
                cuts: cuts_of(flows.all().nth(number).unwrap_or_default(), number),
                replay,
            }
        };
        Ok(Self {
            rows,
            flows: launches.into_iter().enumerate().map(flow).collect(),
            saved_bytes: placement.saved,
            read_extents: compiled.reads.iter().map(|&port| facts.extent_of(port, rows)).collect(),
            deferred_bytes: placement.deferred,
            buffers: flows.buffers.len(),
            hands_over: compiled.hands_over,
        })
    }

    /// Whether its products may hand FP8 values to each other.
    pub(crate) const fn hands_over(&self) -> bool {
        self.hands_over
    }

    /// What multiplies in each launch of a flow, and why; empty for launches that are no matrix product.
    pub(crate) fn reasons(&self, flow: FlowName) -> impl Iterator<Item = &'static str> {
        self.flows[flow.number()].launches.iter().map(Planned::reason)
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

    /// The launches of a flow that runs beside transfers, whose products are cut if possible, and if it pays or is asked
    /// for in all cases.
    ///
    /// # Errors
    /// Transfers that do not fit the flow's product, or what cuBLAS lacks.
    pub fn script<'a>(
        &self,
        dispatcher: &mut Dispatcher,
        device: Device,
        flow: FlowName,
        transfers: (&[Transfer<'a>], bool),
    ) -> Result<Script<'a>> {
        let Flow { launches, cuts, .. } = &self.flows[flow.number()];
        Script::new(dispatcher, device, flow, (launches, cuts), transfers)
    }

    /// Launches a script up to its next pause; None at its end. All calls have the same addresses and the same memory.
    ///
    /// # Errors
    /// A launch's refusal.
    pub fn resume<'a, 'd: 'a, 's: 'a>(
        &self,
        script: &mut Script<'s>,
        lane: &mut Lane<'d>,
        mut call: Bindings<'_, 'a>,
    ) -> Result<Option<Pause>> {
        let flow = &self.flows[script.flow().number()];
        call.set_workspace(&lane.workspace);
        flow.set_buffers(&mut call, self.buffers);
        let target = &mut lane.target;
        while let Some(act) = script.advance() {
            match act {
                Act::Launch(number) => run(&flow.launches[*number], target, &call)?,
                Act::Piece(piece) => {
                    let Planned::Gemm(_, io) = &flow.launches[piece.launch] else {
                        return Err(Error::state(OP, "a piece of no product; report this"));
                    };
                    piece.run(target, &io.map(|cell| call.at(*cell)))?;
                    CLOCK.mark(Stage::Gemm);
                }
                Act::Pause(pause) => return Ok(Some(*pause)),
            }
        }
        Ok(None)
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
            Some(replay) => {
                let replayed = replay.run(&mut lane.target, &mut call, launch);
                CLOCK.mark(Stage::Gemm); // a replayed graph includes its casts
                replayed
            }
            None => launch(&mut lane.target, &mut call),
        }
    }
}

impl Flow {
    fn run(&self, target: &mut Target<'_>, call: &mut Bindings<'_, '_>, buffers: usize) -> Result<()> {
        self.set_buffers(call, buffers);
        self.launches.iter().try_for_each(|launch| run(launch, target, call))
    }

    fn set_buffers(&self, call: &mut Bindings<'_, '_>, buffers: usize) {
        call.grow(buffers);
        self.buffers.iter().for_each(|buffer| call.set_buffer(buffer.number, buffer.base, buffer.offset));
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
