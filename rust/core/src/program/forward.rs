//! Compiles a chain's forward: which launches, on which places, and what they leave to backward.

use te_fast_kernels::Float;

use crate::dispatch::Dispatcher;
use crate::error::Result;
use crate::ops::activation::{ActivationPlan, ActivationSpec};
use crate::ops::affine::{AffinePlan, AffineSpec};
use crate::ops::cast_block::BlockShape;
use crate::ops::dequantize::{DequantizePlan, DequantizeSpec};
use crate::ops::norm::{NormKind, NormPlan, NormSpec};
use crate::program::Facts;
use crate::program::chain::{Link, Op};
use crate::program::forward_handover::{Handovers, handovers_possible};
use crate::program::memory::{At, Place, Saved, Scratch};
use crate::program::step::{Action, Fused, QuantAt, SlotOf, Step, UnpackAt};
use crate::quantizer::{QuantPlan, QuantSpec};
use crate::recipe::{Quantization, Recipe, Scaling, Usage};

/// What an op's backward reads of its forward.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Kept {
    #[default]
    Nothing,
    /// The input of a linear op, as its weight's gradient takes it.
    Linear {
        x: QuantAt,
    },
    Norm {
        x: At,
        mean: At,
        rstd: At,
    },
    Activation {
        x: At,
        quantized: Option<(DequantizePlan, QuantAt)>,
        row_scale: At,
    },
}

/// A compiled forward, and what backward is compiled from.
#[derive(Debug, Default)]
pub(crate) struct Forward {
    pub(crate) steps: Vec<Step>,
    pub(crate) scratch: Scratch,
    pub(crate) saved: Saved,
    pub(crate) kept: Vec<Kept>,
    /// Weights converted to the type of the activations, per linear op.
    pub(crate) converted: Vec<At>,
    /// Where the output is: the output itself, or a tensor that it is the same as.
    pub(crate) output: Place,
    /// The same for each extra output.
    pub(crate) extra_outputs: Vec<Place>,
    pub(crate) notes: Vec<String>,
}

pub(super) struct Compiler<'a> {
    pub(super) facts: &'a Facts<'a>,
    pub(super) dispatcher: &'a mut Dispatcher,
    pub(super) out: Forward,
    pub(super) handovers: Handovers,
}

/// The value of an edge as the ops before it left it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value {
    pub(super) high: At,
    /// Row and column layout for the linear op that comes next.
    pub(super) quantized: Option<(QuantAt, QuantAt)>,
}

/// Compiles the forward; without handing FP8 over where that turns out not to pay.
pub(crate) fn compile(dispatcher: &mut Dispatcher, facts: &Facts<'_>) -> Result<Forward> {
    if handovers_possible(facts) {
        let mut compiler = Compiler::new(dispatcher, facts);
        compiler.begin_handovers();
        compiler.run()?;
        if compiler.handovers.pay() {
            compiler.end_handovers();
            return Ok(compiler.out);
        }
    }
    let mut compiler = Compiler::new(dispatcher, facts);
    compiler.run()?;
    Ok(compiler.out)
}

impl<'a> Compiler<'a> {
    fn new(dispatcher: &'a mut Dispatcher, facts: &'a Facts<'a>) -> Self {
        Self { facts, dispatcher, out: Forward::default(), handovers: Handovers::NONE }
    }

    fn run(&mut self) -> Result<()> {
        let count = self.facts.chain.links().len();
        self.out.kept = vec![Kept::Nothing; count];
        self.out.converted = vec![At::NONE; self.facts.linears.len()];
        let mut value = Value { high: At::of(Place::Input), quantized: None };
        let mut index = 0;
        while index < count {
            let link = &self.facts.chain.links()[index];
            let next = self.op(index, link, &mut value).map_err(|error| error.within(&link.label))?;
            index = next;
        }
        self.out.output = value.high.place;
        Ok(())
    }
}

impl Compiler<'_> {
    /// Compiles the op at `index` with what fuses behind it; returns the next op.
    fn op(&mut self, index: usize, link: &Link, value: &mut Value) -> Result<usize> {
        match link.op {
            Op::Identity => Ok(index + 1),
            Op::MakeExtraOutput { .. } => {
                self.out.extra_outputs.push(value.high.place);
                Ok(index + 1)
            }
            Op::Linear { .. } => self.linear(index, link, value),
            Op::Norm { .. } => self.norm(index, At::NONE, At::NONE, value),
            Op::Activation { .. } => self.activation(index, value),
            Op::AddExtraInput { in_place } => self.add(index, link, in_place, value),
            Op::Bias { .. } => {
                let row = (Place::Param(link.param as u16), self.facts.key.params[link.param].0);
                self.affine(index, value, 1.0, At::NONE, Some(row), "bias")
            }
            Op::ConstantScale { scale } => self.affine(index, value, scale, At::NONE, None, "scale"),
        }
    }

    pub(super) fn link(&self, index: usize) -> Option<&Link> {
        self.facts.chain.links().get(index)
    }

    pub(super) fn op_at(&self, index: usize) -> Option<Op> {
        self.link(index).map(|link| link.op)
    }

    pub(super) fn step(&mut self, action: Action, ops: (usize, usize), text: &'static str) {
        self.out.steps.push(Step { action, ops, text });
    }

    /// Marks places as used by the next step.
    pub(super) fn touch(&mut self, places: &[At]) {
        let step = self.out.steps.len();
        for &at in places {
            self.out.scratch.touch(at, step);
        }
    }

    pub(super) fn scratch(&mut self, bytes: usize) -> At {
        if bytes == 0 { At::NONE } else { self.out.scratch.allocate(bytes, self.out.steps.len()) }
    }

    /// Whether the backward of op `index` needs what its forward computed from.
    pub(super) fn runs_backward(&self, index: usize) -> bool {
        let link = &self.facts.chain.links()[index];
        let own = (link.param..link.param + link.op.params()).any(|param| self.facts.key.params[param].1);
        let extra = link.op.extra_inputs() != 0 && self.facts.key.extras[link.extra_input].1;
        self.facts.grads_before[index] || own || extra
    }

    /// Whether backward reads edge `index` in high precision.
    fn keeps_edge(&self, index: usize) -> bool {
        match self.op_at(index) {
            Some(Op::Norm { .. }) => self.runs_backward(index),
            Some(Op::Activation { cache_quantized_input, .. }) => !cache_quantized_input && self.runs_backward(index),
            Some(Op::Linear { .. }) => self.facts.linears[self.facts.chain.links()[index].linear].keeps_high(),
            _ => false,
        }
    }

    /// The first op from `index` on that does more than hand its input on; and whether it is handed out before.
    pub(super) fn consumer(&self, mut index: usize) -> (usize, bool) {
        let mut handed_out = false;
        while let Some(Op::Identity | Op::MakeExtraOutput { .. }) = self.op_at(index) {
            handed_out |= matches!(self.op_at(index), Some(Op::MakeExtraOutput { .. }));
            index += 1;
        }
        (index, handed_out)
    }

    /// Where the value of edge `index` goes.
    pub(super) fn place_of(&mut self, index: usize) -> At {
        let mut first = index;
        while let Some(Op::Identity) = self.op_at(first) {
            first += 1;
        }
        match self.link(first) {
            None => At::of(Place::Output),
            Some(link) if matches!(link.op, Op::MakeExtraOutput { .. }) => {
                At::of(Place::ExtraOutput(link.extra_output as u16))
            }
            Some(_) => {
                let bytes = self.facts.key.rows * self.facts.widths[index] * self.facts.key.activation.size();
                if self.keeps_edge(first) { self.out.saved.allocate(bytes) } else { self.scratch(bytes.max(1)) }
            }
        }
    }

    /// The linear op that takes edge `index` in FP8 under delayed scaling, from a kernel that computes and quantises.
    pub(super) fn fp8_consumer(&self, index: usize) -> Option<(usize, bool)> {
        let (consumer, handed_out) = self.consumer(index);
        let link = self.link(consumer)?;
        let delayed = self.facts.recipe.is_some_and(Recipe::is_delayed);
        (matches!(link.op, Op::Linear { .. }) && delayed).then_some((link.linear, handed_out))
    }

    /// Says why a value is quantised by a launch of its own.
    fn note_unfused(&mut self, index: usize, what: &str) {
        let (consumer, _) = self.consumer(index + 1);
        let Some(link) = self.link(consumer).filter(|link| matches!(link.op, Op::Linear { .. })) else { return };
        let scaling = match self.facts.recipe.map(|recipe| recipe.scaling) {
            Some(Scaling::Current) => "current scaling needs the maximum of the whole tensor before it can quantise",
            Some(Scaling::Block) => "block scaling quantises in blocks that span rows",
            _ => return,
        };
        let note =
            format!("{what} {} does not quantise for {}: {scaling}", self.facts.chain.links()[index].label, link.label);
        self.out.notes.push(note);
    }

    /// Where the layouts of a linear op's input go.
    fn input_layouts(&mut self, linear: usize) -> (QuantAt, QuantAt) {
        let Some(quantized) = &self.facts.linears[linear].quantized else {
            return (QuantAt::default(), QuantAt::default());
        };
        let columnwise = quantized.usages.input().columnwise;
        let row_segments = quantized.x_segments(Usage { rowwise: true, columnwise: false });
        let col_segments = quantized.x_segments(Usage { rowwise: false, columnwise });
        let shares_scale = quantized.x.shares_scale();
        let keeps_row = self.facts.linears[linear].keeps_row();
        let row =
            if keeps_row { self.out.saved.allocate(row_segments.bytes) } else { self.scratch(row_segments.bytes) };
        let mut row = QuantAt { data: row.plus(row_segments.row), scale: row.plus(row_segments.row_scale) };
        let mut col = QuantAt::default();
        if columnwise {
            let at = self.out.saved.allocate(col_segments.bytes);
            col = QuantAt { data: at.plus(col_segments.col), scale: at.plus(col_segments.col_scale) };
            if shares_scale {
                row.scale = col.scale;
            }
        }
        (row, col)
    }

    pub(super) fn fused(&mut self, linear: usize) -> Fused {
        let (row, col) = self.input_layouts(linear);
        self.touch(&[row.data, row.scale]);
        Fused { row, col, slot: SlotOf::Input(linear) }
    }

    fn norm(&mut self, index: usize, residual: At, sum: At, value: &mut Value) -> Result<usize> {
        let link = &self.facts.chain.links()[index];
        let Op::Norm { kind, cols, eps, zero_centered_gamma } = link.op else { return Ok(index + 1) };
        let (param, rows) = (link.param, self.facts.key.rows);
        let fp8 = self.fp8_consumer(index + 1);
        if fp8.is_none() {
            self.note_unfused(index, "norm");
        }
        let high = fp8.is_none_or(|(_, handed_out)| handed_out);
        let stats = self.runs_backward(index);
        let to = fp8.map_or(Fused::NONE, |(linear, _)| self.fused(linear));
        let y = if high { self.place_of(index + 1) } else { At::NONE };
        let mut stat = |wanted: bool| if wanted { self.out.saved.allocate(4 * rows.max(1)) } else { At::NONE };
        let layer_norm = matches!(kind, NormKind::LayerNorm);
        let (mean, rstd) = (stat(stats && layer_norm), stat(stats));
        let plan = NormPlan::new(NormSpec {
            rows,
            cols,
            kind,
            input: self.facts.key.activation,
            weight: self.facts.key.params[param].0,
            zero_centered_gamma,
            eps,
            residual: residual.is_some(),
            high,
            fp8: fp8.and(self.facts.recipe).map(|recipe| recipe.fwd),
            rowwise: to.row.data.is_some(),
            columnwise: to.col.data.is_some(),
            stats,
            limits: self.dispatcher.limits(self.facts.key.device)?,
        })?;
        let x = value.high;
        if stats {
            let x = if residual.is_some() { sum } else { x };
            self.out.kept[index] = Kept::Norm { x, mean, rstd };
        }
        self.touch(&[x, residual, sum, y]);
        let gamma = At::of(Place::Param(param as u16));
        let beta = if layer_norm { At::of(Place::Param(param as u16 + 1)) } else { At::NONE };
        let text = match (residual.is_some(), to.row.data.is_some(), to.col.data.is_some()) {
            (false, false, _) => "norm",
            (false, true, false) => "norm + cast",
            (false, true, true) => "norm + cast + transpose",
            (true, false, _) => "add + norm",
            (true, true, false) => "add + norm + cast",
            (true, true, true) => "add + norm + cast + transpose",
        };
        let first = if residual.is_some() { self.before(index) } else { index };
        self.step(Action::Norm { plan, x, residual, sum, gamma, beta, y, mean, rstd, to }, (first, index), text);
        *value = Value { high: y, quantized: fp8.map(|_| (to.row, to.col)) };
        Ok(index + 1)
    }

    /// The addition whose result the norm at `index` takes.
    fn before(&self, index: usize) -> usize {
        (0..index).rev().find(|&at| matches!(self.op_at(at), Some(Op::AddExtraInput { .. }))).unwrap_or(index)
    }

    fn add(&mut self, index: usize, link: &Link, in_place: bool, value: &mut Value) -> Result<usize> {
        let extra = At::of(Place::Extra(link.extra_input as u16));
        let (consumer, handed_out) = self.consumer(index + 1);
        if in_place {
            return self.affine(index, value, 1.0, extra, None, "add in place");
        }
        if !matches!(self.op_at(consumer), Some(Op::Norm { .. })) {
            return self.affine(index, value, 1.0, extra, None, "add");
        }
        let sum = self.place_of(index + 1);
        if handed_out {
            for _ in self.facts.chain.links()[index + 1..consumer].iter().filter(|link| link.op.extra_outputs() != 0) {
                self.out.extra_outputs.push(sum.place);
            }
        }
        self.norm(consumer, extra, sum, value)
    }

    /// `alpha · x + r + b` into edge `index + 1`.
    fn affine(
        &mut self,
        index: usize,
        value: &mut Value,
        alpha: f32,
        r: At,
        row: Option<(Place, Float)>,
        text: &'static str,
    ) -> Result<usize> {
        let in_place = matches!(self.op_at(index), Some(Op::AddExtraInput { in_place: true }));
        let y = if in_place { r } else { self.place_of(index + 1) };
        let (rows, cols, activation) = (self.facts.key.rows, self.facts.widths[index], self.facts.key.activation);
        let (b, b_type) = row.map_or((At::NONE, activation), |(place, dtype)| (At::of(place), dtype));
        let spec = AffineSpec { rows, cols, input: activation, output: activation, row: b_type, alpha };
        let plan = AffinePlan::new(spec)?;
        self.touch(&[value.high, r, y]);
        self.step(Action::Affine { plan, x: value.high, r, b, y }, (index, index), text);
        *value = Value { high: y, quantized: None };
        Ok(index + 1)
    }

    fn activation(&mut self, index: usize, value: &mut Value) -> Result<usize> {
        let link = &self.facts.chain.links()[index];
        let Op::Activation { function, interleave, scaled, cache_quantized_input } = link.op else {
            return Ok(index + 1);
        };
        let row_scale = if scaled { At::of(Place::Extra(link.extra_input as u16)) } else { At::NONE };
        let row_scale_type = scaled.then(|| self.facts.key.extras[link.extra_input].0);
        let fp8 = self.fp8_consumer(index + 1);
        if fp8.is_none() {
            self.note_unfused(index, "activation");
        }
        let high = fp8.is_none_or(|(_, handed_out)| handed_out);
        if self.runs_backward(index) {
            self.keep_activation(index, value.high, row_scale, cache_quantized_input)?;
        }
        let to = fp8.map_or(Fused::NONE, |(linear, _)| self.fused(linear));
        let y = if high { self.place_of(index + 1) } else { At::NONE };
        let plan = ActivationPlan::new(ActivationSpec {
            rows: self.facts.key.rows,
            cols: self.facts.widths[index + 1],
            activation: function,
            interleave,
            input: self.facts.key.activation,
            high,
            fp8: fp8.and(self.facts.recipe).map(|recipe| recipe.fwd),
            rowwise: to.row.data.is_some(),
            columnwise: to.col.data.is_some(),
            row_scale: row_scale_type,
        })?;
        self.touch(&[value.high, y]);
        let text = match (to.row.data.is_some(), to.col.data.is_some()) {
            (false, _) => "activation",
            (true, false) => "activation + cast",
            (true, true) => "activation + cast + transpose",
        };
        self.step(Action::Activation { plan, x: value.high, row_scale, y, to }, (index, index), text);
        *value = Value { high: y, quantized: fp8.map(|_| (to.row, to.col)) };
        Ok(index + 1)
    }

    /// Keeps an activation's input for backward, in high precision or, to save memory, in FP8 under current scaling.
    fn keep_activation(&mut self, index: usize, x: At, row_scale: At, in_fp8: bool) -> Result<()> {
        let mut quantized = None;
        if in_fp8 {
            let (rows, cols, input) = (self.facts.key.rows, self.facts.widths[index], self.facts.key.activation);
            let usage = Usage { rowwise: true, columnwise: false };
            let output = te_fast_kernels::Fp8::E4m3;
            let plan = QuantPlan::new(&QuantSpec {
                scaling: Scaling::Current,
                quantization: Quantization::PER_TENSOR,
                rows,
                cols,
                input,
                output,
                usage,
                dbias: false,
                processors: self.dispatcher.multiprocessors(self.facts.key.device)?,
            })?;
            let segments = crate::linear::Segments::behind(0, &plan, usage);
            let at = self.out.saved.allocate(segments.bytes);
            let row = QuantAt { data: at.plus(segments.row), scale: at.plus(segments.row_scale) };
            let spare = self.scratch(plan.scratch_bytes());
            self.touch(&[x, spare]);
            let to = Fused { row, col: QuantAt::default(), slot: SlotOf::None };
            self.step(
                Action::Quantize { plan, x, to, dbias: At::NONE, spare, unpack: UnpackAt::default() },
                (index, index),
                "cast of the kept input",
            );
            let block: Option<BlockShape> = None;
            let back =
                DequantizePlan::new(DequantizeSpec { rows, cols, ld: cols, input: output, output: input, block })?;
            quantized = Some((back, row));
        }
        self.out.kept[index] = Kept::Activation { x, quantized, row_scale };
        Ok(())
    }
}
