//! Chains of ops compiled to programs: each direction is a list of launches on places that are fixed beforehand.
//!
//! [`Chain`] is what was written down, [`ProgramKey`] what a call looks like, [`Program`] what runs. A call brings
//! addresses ([`Bindings`]) and quantised weights; nothing is decided in it.

mod backward;
mod chain;
mod forward;
mod forward_handover;
mod forward_linear;
mod linear_op;
mod memory;
mod replay;
mod step;

use std::sync::Arc;

use te_fast_kernels::Float;

pub use chain::{Chain, Link, Op, ProgramKey};
pub use memory::{Bindings, Place};
pub use step::LinearSlots;

use crate::dispatch::{Dispatcher, Lane};
use crate::error::Result;
use crate::gemm::{GemmIo, GemmPlan};
use crate::kernel::DevPtr;
use crate::linear::{Segments, WeightBuffer};
use crate::program::backward::Backward;
use crate::program::forward::{Forward, Kept};
use crate::program::linear_op::{BackwardOperands, LinearOp};
use crate::program::memory::Resolver;
use crate::program::replay::Replay;
use crate::program::step::{Call, Operand, QuantAt, Step};
use crate::recipe::Recipe;
use crate::tensor::DType;

/// The quantised weights of a call.
#[derive(Clone, Copy)]
pub struct Weights<'a, 'r> {
    /// One buffer per linear op.
    pub buffers: &'r [WeightBuffer<'a>],
    /// Weights in high precision that are to be quantised into their buffers.
    pub fresh: &'r [Option<DevPtr<'a>>],
    /// Slots of delayed scaling.
    pub slots: &'r [LinearSlots<'a>],
    /// A device float that makes quantisation a no-op when it is 1; null without.
    pub skip: DevPtr<'a>,
}

/// A step as `explain` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explained {
    /// What is launched.
    pub text: &'static str,
    /// First and last op that it computes.
    pub ops: (usize, usize),
}

/// A chain compiled for one key.
#[derive(Debug)]
pub struct Program {
    key: ProgramKey,
    recipe: Option<Recipe>,
    linears: Vec<LinearOp>,
    forward: Direction,
    backward: Direction,
    saved_offsets: Vec<usize>,
    saved_bytes: usize,
    output: Place,
    extra_outputs: Vec<Place>,
    grad_input: Place,
    grad_extras: Vec<Place>,
    deferred: Vec<usize>,
    /// What a waiting weight gradient is computed from, per linear op: the input and the gradient.
    waiting: Vec<Option<(QuantAt, QuantAt)>>,
    grad_dtypes: Vec<Float>,
    /// Columns of the edges.
    widths: Vec<usize>,
    extra_output_cols: Vec<usize>,
    reads: Vec<Place>,
    read_extents: Vec<(usize, Float)>,
    notes: Vec<String>,
    graphs: bool,
}

#[derive(Debug, Default)]
struct Direction {
    steps: Vec<Step>,
    offsets: Vec<usize>,
    scratch: usize,
    replay: Replay,
}

impl Program {
    /// Compiles `chain`; in FP8 under `recipe`, in high precision without. The device must be current.
    ///
    /// # Errors
    /// Ops that do not fit each other or the key (naming the op), or what the device or cuBLAS lacks.
    pub fn new(dispatcher: &mut Dispatcher, chain: &Chain, key: ProgramKey, recipe: Option<&Recipe>) -> Result<Self> {
        let widths = chain.widths(key.cols)?;
        let grads_before = grads_before(chain, &key);
        let processors = dispatcher.multiprocessors(key.device)?;
        let linears = linear_indices(chain)
            .map(|index| LinearOp::new(chain, index, &key, recipe, grads_before[index], processors))
            .collect::<Result<Vec<_>>>()?;
        let (forward, backward) = compile(
            dispatcher,
            &Facts { chain, key: &key, recipe, widths: &widths, linears: &linears, grads_before: &grads_before },
        )?;
        let waiting = linear_indices(chain)
            .zip(&linears)
            .map(|(index, linear)| waiting(&forward.kept[index], linear, &key, chain.links()[index].linear))
            .collect();
        let extra_output_cols = chain
            .links()
            .iter()
            .zip(&widths)
            .filter(|(link, _)| matches!(link.op, Op::MakeExtraOutput { .. }))
            .map(|(_, &cols)| cols)
            .collect();
        let reads = reads(&forward.kept, &backward.steps);
        Ok(Self {
            recipe: recipe.copied(),
            waiting,
            grad_dtypes: (0..chain.params()).map(|param| backward::grad_dtype(chain, &key, param)).collect(),
            extra_output_cols,
            read_extents: reads.iter().map(|&place| chain.extent_of(&key, &widths, place)).collect(),
            reads,
            widths,
            saved_bytes: forward.saved.bytes,
            saved_offsets: forward.saved.offsets,
            output: forward.output,
            extra_outputs: forward.extra_outputs,
            notes: [forward.notes, backward.notes].concat(),
            forward: Direction::new(forward.steps, &forward.scratch),
            grad_input: backward.grad_input,
            grad_extras: backward.grad_extras,
            deferred: backward.deferred,
            backward: Direction::new(backward.steps, &backward.scratch),
            linears,
            key,
            graphs: dispatcher.config.graphs && !dispatcher.config.synchronise,
        })
    }

    /// What it was compiled for.
    #[must_use]
    pub const fn key(&self) -> &ProgramKey {
        &self.key
    }

    /// The recipe in it.
    #[must_use]
    pub const fn recipe(&self) -> Option<&Recipe> {
        self.recipe.as_ref()
    }

    /// Where the output is: [`Place::Output`], or a tensor that it is the same as.
    #[must_use]
    pub const fn output(&self) -> Place {
        self.output
    }

    /// The same for each extra output.
    #[must_use]
    pub fn extra_outputs(&self) -> &[Place] {
        &self.extra_outputs
    }

    /// Where the input's gradient is: [`Place::GradInput`], or a tensor that it is the same as.
    #[must_use]
    pub const fn grad_input(&self) -> Place {
        self.grad_input
    }

    /// The same for each extra input.
    #[must_use]
    pub fn grad_extras(&self) -> &[Place] {
        &self.grad_extras
    }

    /// Columns of the output.
    #[must_use]
    pub fn out_cols(&self) -> usize {
        self.widths.last().copied().unwrap_or(self.key.cols)
    }

    /// Columns of the edges: the input of each op, and the output.
    #[must_use]
    pub fn widths(&self) -> &[usize] {
        &self.widths
    }

    /// Columns of each extra output.
    #[must_use]
    pub fn extra_output_cols(&self) -> &[usize] {
        &self.extra_output_cols
    }

    /// Type that a parameter's gradient is written in.
    #[must_use]
    pub fn grad_dtype(&self, param: usize) -> Float {
        self.grad_dtypes[param]
    }

    /// Bytes that forward leaves to backward.
    #[must_use]
    pub const fn saved_bytes(&self) -> usize {
        self.saved_bytes
    }

    /// The call's own tensors (input, extra inputs and outputs, parameters) that backward reads.
    #[must_use]
    pub fn reads(&self) -> &[Place] {
        &self.reads
    }

    /// Bytes of the gradient that waits for `backward_dw`, per linear op; 0 for those that do not wait.
    #[must_use]
    pub fn deferred_bytes(&self) -> &[usize] {
        &self.deferred
    }

    /// Elements and type of each tensor that backward reads.
    #[must_use]
    pub fn read_extents(&self) -> &[(usize, Float)] {
        &self.read_extents
    }

    /// Whether backward reads the quantised weight of a linear op.
    #[must_use]
    pub fn reads_weight(&self, linear: usize) -> bool {
        self.linears[linear].input_grad
    }

    /// Where the quantised weight's layouts lie in a buffer of a linear op's; empty in high precision.
    #[must_use]
    pub fn weight_segments(&self, linear: usize) -> Segments {
        self.linears[linear].weight_segments()
    }

    /// Private bytes of a forward.
    #[must_use]
    pub const fn forward_scratch(&self) -> usize {
        self.forward.scratch
    }

    /// Private bytes of a backward.
    #[must_use]
    pub const fn backward_scratch(&self) -> usize {
        self.backward.scratch
    }

    /// Launches the forward.
    ///
    /// # Errors
    /// A launch's refusal.
    pub fn run_forward(&self, lane: &mut Lane<'_>, bindings: &Bindings<'_>, weights: &Weights<'_, '_>) -> Result<()> {
        self.run(&self.forward, lane, bindings, weights, &[])
    }

    /// Launches the backward; `weight_grads` names plans for gradients that do not go into tensors of the weight's type.
    ///
    /// # Errors
    /// A launch's refusal.
    pub fn run_backward(
        &self,
        lane: &mut Lane<'_>,
        bindings: &Bindings<'_>,
        weights: &Weights<'_, '_>,
        weight_grads: &[Option<Arc<GemmPlan>>],
    ) -> Result<()> {
        self.run(&self.backward, lane, bindings, weights, weight_grads)
    }

    fn run(
        &self,
        direction: &Direction,
        lane: &mut Lane<'_>,
        bindings: &Bindings<'_>,
        weights: &Weights<'_, '_>,
        weight_grads: &[Option<Arc<GemmPlan>>],
    ) -> Result<()> {
        let Lane { target, workspace } = lane;
        let resolver = Resolver {
            bindings,
            scratch: workspace.scratch,
            scratch_offsets: &direction.offsets,
            saved_offsets: &self.saved_offsets,
        };
        let call = Call {
            resolver: &resolver,
            workspace: *workspace,
            weights: weights.buffers,
            fresh: weights.fresh,
            slots: weights.slots,
            weight_grads,
            skip_weight: weights.skip,
        };
        let addresses = |list: &mut Vec<u64>| addresses(&call, bindings, list);
        direction.replay.run(self.graphs, direction.steps.len(), target, addresses, |target| {
            direction.steps.iter().try_for_each(|step| step.run(target, &call))
        })
    }

    /// The GEMM of a weight gradient that goes into a buffer of the caller's: `main_grad`, added or set.
    ///
    /// # Errors
    /// See [`Dispatcher::gemm`].
    pub fn weight_grad_plan(
        &self,
        dispatcher: &mut Dispatcher,
        linear: usize,
        d: DType,
        accumulate: bool,
        address: usize,
    ) -> Result<Arc<GemmPlan>> {
        let alignment = 1_usize << address.trailing_zeros().min(8);
        self.linears[linear].wgrad(dispatcher, d, accumulate, alignment as u16)
    }

    /// A weight gradient that waited, with a plan from [`Program::weight_grad_plan`]; `bindings.grad_params` has the one
    /// address that it goes to.
    ///
    /// # Errors
    /// A launch's refusal.
    pub fn run_waiting(
        &self,
        lane: &mut Lane<'_>,
        linear: usize,
        plan: &GemmPlan,
        bindings: &Bindings<'_>,
        d: DevPtr<'_>,
    ) -> Result<()> {
        let Some((x, dy)) = self.waiting[linear] else { return Ok(()) };
        let Lane { target, workspace } = lane;
        let resolver =
            Resolver { bindings, scratch: workspace.scratch, scratch_offsets: &[], saved_offsets: &self.saved_offsets };
        let io = GemmIo {
            x: resolver.get(dy.data),
            x_scale: resolver.get(dy.scale),
            w: resolver.get(x.data),
            w_scale: resolver.get(x.scale),
            d,
            workspace: workspace.gemm,
            ..GemmIo::NONE
        };
        plan.run(target, &io)
    }

    /// The launches of forward and of backward.
    #[must_use]
    pub fn explain(&self) -> [Vec<Explained>; 2] {
        let list = |direction: &Direction| {
            direction.steps.iter().map(|step| Explained { text: step.text, ops: step.ops }).collect()
        };
        [list(&self.forward), list(&self.backward)]
    }

    /// Why fusions did not apply.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Everything that the launches of a call depend on beyond its program.
fn addresses(call: &Call<'_, '_>, bindings: &Bindings<'_>, list: &mut Vec<u64>) {
    let b = bindings;
    let single = [b.input, b.output, b.saved, b.grad_output, b.grad_input, call.skip_weight];
    let own = [call.workspace.gemm, call.workspace.counters, call.workspace.scratch];
    let many = [b.extras, b.extra_outputs, b.params, b.grad_extra_outputs, b.grad_extras, b.grad_params, b.deferred];
    list.extend(single.iter().chain(&own).chain(many.into_iter().flatten()).map(|at| at.address() as u64));
    for weight in call.weights {
        list.push(weight.data.address() as u64);
        list.extend(weight.segments.offsets().map(|offset| offset as u64));
    }
    list.extend(call.fresh.iter().map(|fresh| fresh.map_or(0, |at| at.address() as u64)));
    for slots in call.slots {
        for slot in [slots.input, slots.weight, slots.grad] {
            list.extend([slot.scale.address() as u64, slot.amax.address() as u64]);
        }
    }
    for plan in call.weight_grads.iter().flatten() {
        list.push((plan.problem().d as u64) << 1 | u64::from(plan.problem().accumulate));
    }
}

/// What both directions are compiled from.
pub(crate) struct Facts<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) key: &'a ProgramKey,
    pub(crate) recipe: Option<&'a Recipe>,
    pub(crate) widths: &'a [usize],
    pub(crate) linears: &'a [LinearOp],
    /// For each op, and behind the last, whether anything before wants a gradient.
    pub(crate) grads_before: &'a [bool],
}

fn compile(dispatcher: &mut Dispatcher, facts: &Facts<'_>) -> Result<(Forward, Backward)> {
    let forward = forward::compile(dispatcher, facts)?;
    if !facts.key.any_grad() {
        let grad_extras = vec![Place::None; facts.chain.extra_inputs()];
        return Ok((forward, Backward { grad_extras, ..Backward::default() }));
    }
    let none = memory::At::NONE;
    let backward = backward::Compiler {
        facts,
        forward: &forward,
        dispatcher,
        out: Backward::default(),
        unpacked: none,
        bias_grad: none,
    }
    .run()?;
    Ok((forward, backward))
}

impl Direction {
    fn new(steps: Vec<Step>, scratch: &memory::Scratch) -> Self {
        let (offsets, scratch) = scratch.layout();
        Self { steps, offsets, scratch, replay: Replay::default() }
    }
}

fn linear_indices(chain: &Chain) -> impl Iterator<Item = usize> + '_ {
    chain.links().iter().enumerate().filter(|(_, link)| matches!(link.op, Op::Linear { .. })).map(|(index, _)| index)
}

/// For each op, and behind the last, whether anything before wants a gradient.
fn grads_before(chain: &Chain, key: &ProgramKey) -> Vec<bool> {
    let mut wanted = key.input_grad;
    let mut list = vec![wanted];
    for link in chain.links() {
        let params = link.param..link.param + link.op.params();
        let extras = link.extra_input..link.extra_input + link.op.extra_inputs();
        wanted |= key.params[params].iter().chain(&key.extras[extras]).any(|&(_, grad)| grad);
        list.push(wanted);
    }
    list
}

fn waiting(kept: &Kept, linear: &LinearOp, key: &ProgramKey, number: usize) -> Option<(QuantAt, QuantAt)> {
    let Kept::Linear { x } = *kept else { return None };
    if !(key.deferred[number] && linear.weight_grad) {
        return None;
    }
    let base = memory::At::of(Place::Deferred(number as u16));
    let high = |at| QuantAt { data: at, scale: memory::At::NONE };
    match linear.backward() {
        BackwardOperands::High => return Some((x, high(base))),
        BackwardOperands::Dequantized => return Some((high(base.plus(linear.high_grad_bytes())), high(base))),
        BackwardOperands::Quantized => {}
    }
    let (segments, scales) = linear.grad_segments();
    let dy = QuantAt { data: base.plus(segments.col), scale: base.plus(segments.col_scale) };
    let x = QuantAt { scale: scales.map_or(x.scale, |scales| base.plus(scales.offset())), ..x };
    Some((x, dy))
}

/// The call's own tensors that backward reads.
fn reads(kept: &[Kept], backward: &[Step]) -> Vec<Place> {
    let mut places = Vec::new();
    let mut note = |place: Place| {
        let own = matches!(place, Place::Input | Place::Extra(_) | Place::ExtraOutput(_) | Place::Param(_));
        if own && !places.contains(&place) {
            places.push(place);
        }
    };
    for kept in kept {
        match *kept {
            Kept::Nothing => {}
            Kept::Linear { x } => note(x.data.place),
            Kept::Norm { x, .. } => note(x.place),
            Kept::Activation { x, quantized, row_scale } => {
                if quantized.is_none() {
                    note(x.place);
                }
                note(row_scale.place);
            }
        }
    }
    for step in backward {
        match &step.action {
            step::Action::Gemm { w: Operand::At(at), .. } => note(at.data.place),
            step::Action::NormBackward { gamma, .. } => note(gamma.place),
            step::Action::Affine { x, .. } => note(x.place),
            _ => {}
        }
    }
    places
}
