//! The state of a forward's compilation, and helpers of its ops: places of values, their consumers, and saved tensors.

use te_fast_kernels::Float;

use crate::ops::amax::ScaleRule;
use crate::ops::dequantize::DequantizeSpec;
use crate::program::buffer::{Arena, At};
use crate::program::chain::{Link, Op};
use crate::program::edge::{LayoutAt, Layouts, Rows};
use crate::program::facts::Facts;
use crate::program::port::{LinearPort, Port};
use crate::program::work::{FlowName, Flows, SlotAt, Step, Work};
use crate::recipe::definition::{Quantization, Recipe, Scaling};
use crate::runtime::dispatcher::Dispatcher;

/// The tensors of forward that an op's backward reads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Kept {
    #[default]
    Nothing,
    /// The input of a linear op, in the form for its weight gradient.
    Linear {
        x: LayoutAt,
    },
    /// The input of a linear op is computed again.
    Recomputed,
    Norm {
        x: At,
        mean: At,
        rstd: At,
    },
    Activation {
        x: At,
        quantized: Option<(DequantizeSpec, LayoutAt)>,
        row_scale: At,
    },
}

/// The input of backward's compilation.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Per op.
    pub(crate) kept: Vec<Kept>,
    /// Weights converted to the type of the activations, per linear op.
    pub(crate) converted: Vec<At>,
    /// Numbers of the rows that a linear op gathers from its input, per linear op.
    pub(crate) numbers: Vec<At>,
    /// Of the routers, per op.
    pub(crate) routers: Vec<Option<Routed>>,
    /// Of the permutations, per op.
    pub(crate) routes: Vec<Option<Route>>,
}

/// The buffers of a router for its permutation and its backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routed {
    /// The tokens in f32.
    pub(crate) x: At,
    /// The weight in f32.
    pub(crate) w: At,
    /// What its backward reads of the scores.
    pub(crate) scores: At,
    /// The mask of the chosen experts.
    pub(crate) map: At,
    /// Their probabilities.
    pub(crate) probs: At,
}

/// The buffers of a permutation for later ops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// The row map.
    pub(crate) map: At,
    /// The last row of each expert.
    pub(crate) ends: At,
    /// Counts of experts' rows.
    pub(crate) splits: At,
    /// Probabilities of rows.
    pub(crate) factors: At,
    /// Numbers of rows; null if the rows themselves are permuted.
    pub(crate) numbers: At,
}

impl Left {
    /// The permutation whose rows an op works on.
    pub(crate) fn route_of(&self, link: &Link) -> Option<&Route> {
        self.routes.get(link.permuted_by?)?.as_ref()
    }

    /// Counts of the experts' rows for the op at `index`.
    pub(crate) fn splits_of(&self, facts: &Facts, index: usize) -> At {
        self.route_of(&facts.chain.links()[index]).map_or_else(|| facts.splits_of(index), |route| route.splits)
    }

    /// The factors of an activation's rows.
    pub(crate) fn factors_of(&self, link: &Link) -> At {
        let own = || At::of(Port::Extra(link.extra_input as u16));
        self.route_of(link).map_or_else(own, |route| route.factors)
    }
}

/// A compiled forward.
#[derive(Debug)]
pub(crate) struct Forward {
    pub(crate) flows: Flows,
    pub(crate) left: Left,
    /// Place of the output: the output port, or a tensor that it is identical to.
    pub(crate) output: Port,
    /// The same for each extra output.
    pub(crate) extra_outputs: Vec<Port>,
    pub(crate) notes: Vec<String>,
    pub(crate) hands_over: bool,
    /// A GEMM stores the output in FP8.
    pub(crate) output_is_row: bool,
}

/// Values that a forward hands over in FP8 from GEMM to GEMM.
#[derive(Debug, Default)]
pub(super) struct Handovers {
    /// Inverse scales and found maxima, a row per value; without it, no value is handed over.
    pub(super) table: At,
    /// The linear ops that take a value, by row.
    pub(super) takers: Vec<usize>,
    /// Some value comes straight from a linear op, not from an activation behind it.
    pub(super) direct: bool,
}

pub(super) struct Compiler<'a> {
    pub(super) facts: &'a Facts,
    pub(super) dispatcher: &'a mut Dispatcher,
    pub(super) out: Forward,
    pub(super) handovers: Handovers,
    /// GEMMs may store FP8.
    pub(super) stores_fp8: bool,
    /// Values of residual connections, by the op where they begin.
    pub(super) residuals: Vec<At>,
}

/// FP8 output of a kernel that computes and quantises, and its slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fused {
    pub(crate) layouts: Layouts,
    pub(crate) slot: SlotAt,
}

impl Fused {
    pub(crate) const NONE: Self = Self {
        layouts: Layouts {
            row: LayoutAt { data: At::NONE, scale: At::NONE },
            col: LayoutAt { data: At::NONE, scale: At::NONE },
        },
        slot: SlotAt::NONE,
    };

    /// For the gradient of a linear op's output.
    pub(crate) const fn of_grad(linear: usize, layouts: Layouts) -> Self {
        Self { layouts, slot: slot(linear, LinearPort::GradScale, LinearPort::GradAmax) }
    }

    /// For a linear op's input.
    pub(crate) const fn of_input(linear: usize, layouts: Layouts) -> Self {
        Self { layouts, slot: slot(linear, LinearPort::InputScale, LinearPort::InputAmax) }
    }
}

/// Scale and maximum of an operand of a linear op's.
pub(crate) const fn slot(linear: usize, scale: LinearPort, amax: LinearPort) -> SlotAt {
    let linear = linear as u16;
    SlotAt { scale: At::of(Port::Linear(linear, scale)), amax: At::of(Port::Linear(linear, amax)) }
}

impl<'a> Compiler<'a> {
    pub(super) fn new(dispatcher: &'a mut Dispatcher, facts: &'a Facts, stores_fp8: bool) -> Self {
        let linears = facts.linears.len();
        let ops = facts.chain.links().len();
        let left = Left {
            kept: vec![Kept::Nothing; ops],
            converted: vec![At::NONE; linears],
            numbers: vec![At::NONE; linears],
            routers: vec![None; ops],
            routes: vec![None; ops],
        };
        let out = Forward {
            flows: Flows::new(linears),
            left,
            output: Port::None,
            extra_outputs: Vec::new(),
            notes: Vec::new(),
            hands_over: false,
            output_is_row: false,
        };
        let residuals = vec![At::NONE; facts.chain.links().len()];
        Self { facts, dispatcher, out, handovers: Handovers::default(), stores_fp8, residuals }
    }

    pub(super) fn link(&self, index: usize) -> Option<&'a Link> {
        self.facts.chain.links().get(index)
    }

    pub(super) fn op_at(&self, index: usize) -> Option<Op> {
        self.link(index).map(|link| link.op)
    }

    /// The next step, on the rows of the first op's input.
    pub(super) fn step(&mut self, work: Work, ops: (usize, usize), text: &'static str) {
        self.step_on(self.facts.edges[ops.0].rows, work, ops, text);
    }

    pub(super) fn step_on(&mut self, rows: Rows, work: Work, ops: (usize, usize), text: &'static str) {
        self.out.flows.push(FlowName::Forward, Step { work, rows, ops, text });
    }

    pub(super) fn scratch(&mut self) -> At {
        self.out.flows.buffers.add(FlowName::Forward.scratch())
    }

    pub(super) fn saved(&mut self) -> At {
        self.out.flows.buffers.add(Arena::Saved)
    }

    /// A buffer that backward reads, or one of the forward's own.
    pub(super) fn buffer(&mut self, kept: bool) -> At {
        if kept { self.saved() } else { self.scratch() }
    }

    /// Whether the backward of op `index` needs the operands of its forward.
    pub(super) fn runs_backward(&self, index: usize) -> bool {
        let (facts, link) = (self.facts, &self.facts.chain.links()[index]);
        let own = (link.param..link.param + link.op.params()).any(|param| facts.key.params[param].1);
        let extra = (link.extra_input..link.extra_input + link.extra_inputs()).any(|extra| facts.key.extras[extra].1);
        facts.grads_before[index] || own || extra
    }

    /// Whether backward reads edge `index` in high precision.
    fn keeps_edge(&self, index: usize) -> bool {
        match self.op_at(index) {
            Some(Op::Norm { .. }) => self.runs_backward(index),
            Some(Op::Activation { cache_quantized_input, .. }) => !cache_quantized_input && self.runs_backward(index),
            Some(Op::Linear { .. }) => self.facts.linears[self.facts.chain.links()[index].linear].keeps_high(),
            Some(Op::Router(_)) => self.keeps_tokens(index) && self.facts.key.activation == Float::F32,
            _ => false,
        }
    }

    /// The first op from `index` on that is not an identity; and whether other ops read its input, too.
    pub(super) fn consumer(&self, mut index: usize) -> (usize, bool) {
        let mut handed_out = false;
        while let Some(Op::Identity | Op::MakeExtraOutput { .. } | Op::Residual) = self.op_at(index) {
            handed_out |= !matches!(self.op_at(index), Some(Op::Identity));
            index += 1;
        }
        (index, handed_out)
    }

    /// The place for the value of edge `index`.
    pub(super) fn place_of(&mut self, index: usize) -> At {
        let mut first = index;
        while let Some(Op::Identity | Op::Residual) = self.op_at(first) {
            first += 1;
        }
        match self.link(first) {
            None if self.facts.output_kind().is_some() => self.scratch(),
            None => At::of(Port::Output),
            Some(link) if matches!(link.op, Op::MakeExtraOutput { .. }) => {
                At::of(Port::ExtraOutput(link.extra_output as u16))
            }
            Some(_) => {
                let kept = self.keeps_edge(first);
                self.buffer(kept)
            }
        }
    }

    /// The linear op that takes edge `index` in FP8 under delayed scaling, from a kernel that computes and quantises.
    pub(super) fn fp8_consumer(&self, index: usize) -> Option<(usize, bool)> {
        let (consumer, handed_out) = self.consumer(index);
        let link = self.link(consumer)?;
        let delayed = self.facts.recipe.as_ref().is_some_and(Recipe::is_delayed);
        (matches!(link.op, Op::Linear { groups: None, .. }) && delayed).then_some((link.linear, handed_out))
    }

    /// The place where the op that computes edge `index` writes the scale for the linear op behind it, and the scale's
    /// rule. Only under current scaling: no launch then reads the tensor just for its maximum.
    pub(super) fn measured(&mut self, index: usize) -> Option<(At, ScaleRule)> {
        let (consumer, _) = self.consumer(index);
        let link = self.link(consumer)?;
        let recipe = self.facts.recipe.as_ref().filter(|recipe| recipe.scaling == Scaling::Current)?;
        let Quantization { amax_epsilon: eps, power_2_scale: pow2, .. } = recipe.input;
        let rule = ScaleRule { output: recipe.fwd, eps, pow2 };
        let quantizes = matches!(link.op, Op::Linear { groups: None, .. })
            && self.facts.linears.get(link.linear).is_some_and(|op| op.casts.is_some() && op.given.is_none());
        quantizes.then(|| (self.scratch(), rule))
    }

    /// Notes why a value is quantised by a separate launch: for `reason`, or because of the scaling.
    pub(super) fn note_unfused(&mut self, index: usize, what: &str, reason: Option<&'static str>) {
        let (consumer, _) = self.consumer(index + 1);
        let Some(link) = self.link(consumer).filter(|link| matches!(link.op, Op::Linear { .. })) else { return };
        let reason = match (reason, self.facts.recipe.as_ref().map(|recipe| recipe.scaling)) {
            (Some(reason), _) => reason,
            (None, Some(Scaling::Current)) => {
                "current scaling needs the maximum of the whole tensor before it can quantise"
            }
            (None, Some(Scaling::Block)) => "block scaling quantises in blocks that span rows",
            (None, Some(Scaling::Delayed)) if matches!(link.op, Op::Linear { groups: Some(_), .. }) => {
                "each expert has a scale of its own"
            }
            _ => return,
        };
        let note = format!("{what} {} does not quantise for {}: {reason}", self.facts.label(index), link.label);
        self.out.notes.push(note);
    }

    /// The places for the layouts of a linear op's input.
    pub(super) fn fused(&mut self, linear: usize) -> Fused {
        let op = &self.facts.linears[linear];
        let Some(casts) = &op.casts else { return Fused::NONE };
        let mut col = LayoutAt::default();
        if casts.usages.input().columnwise {
            col = LayoutAt { data: self.saved(), scale: self.saved() };
        }
        let data = self.buffer(op.keeps_row());
        // Both layouts of a tensor share one scale, and backward reads it from a saved buffer.
        let shared = col.is_some() && casts.x.shares_scale();
        let scale = if shared { col.scale } else { self.buffer(op.keeps_row()) };
        Fused::of_input(linear, Layouts { row: LayoutAt { data, scale }, col })
    }
}
