//! Compiles a chain's forward: which launches, on which places, and what they leave to backward.

use te_fast_kernels::Float;

use crate::dispatch::Dispatcher;
use crate::error::Result;
use crate::gemm::Epilogue;
use crate::ops::activation::{Activation, ActivationPlan, ActivationSpec};
use crate::ops::affine::{AffinePlan, AffineSpec};
use crate::ops::cast_block::BlockShape;
use crate::ops::dequantize::{DequantizePlan, DequantizeSpec};
use crate::ops::norm::{NormKind, NormPlan, NormSpec};
use crate::program::chain::{Chain, Link, Op, ProgramKey};
use crate::program::linear_op::{LinearOp, Tail};
use crate::program::memory::{At, Place, Saved, Scratch};
use crate::program::step::{Action, Fused, Operand, QuantAt, SlotOf, Step, UnpackAt};
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
    /// A high-precision weight in the type of the activations, where that is not the parameter's.
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

pub(crate) struct Compiler<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) key: &'a ProgramKey,
    pub(crate) recipe: Option<&'a Recipe>,
    pub(crate) widths: &'a [usize],
    pub(crate) linears: &'a [LinearOp],
    /// Whether anything before op `i` wants a gradient.
    pub(crate) grads_before: &'a [bool],
    pub(crate) dispatcher: &'a mut Dispatcher,
    pub(crate) out: Forward,
}

/// The value of an edge as the ops before it left it.
#[derive(Clone, Copy, Debug)]
struct Value {
    high: At,
    /// Row and column layout for the linear op that comes next.
    quantized: Option<(QuantAt, QuantAt)>,
}

impl Compiler<'_> {
    pub(crate) fn run(mut self) -> Result<Forward> {
        let count = self.chain.links().len();
        self.out.kept = vec![Kept::Nothing; count];
        self.out.converted = vec![At::NONE; self.linears.len()];
        let mut value = Value { high: At::of(Place::Input), quantized: None };
        let mut index = 0;
        while index < count {
            let link = &self.chain.links()[index];
            let next = self.op(index, link, &mut value).map_err(|error| error.within(&link.label))?;
            index = next;
        }
        self.out.output = value.high.place;
        Ok(self.out)
    }

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
                let row = (Place::Param(link.param as u16), self.key.params[link.param].0);
                self.affine(index, value, 1.0, At::NONE, Some(row), "bias")
            }
            Op::ConstantScale { scale } => self.affine(index, value, scale, At::NONE, None, "scale"),
        }
    }

    fn link(&self, index: usize) -> Option<&Link> {
        self.chain.links().get(index)
    }

    fn op_at(&self, index: usize) -> Option<Op> {
        self.link(index).map(|link| link.op)
    }

    fn step(&mut self, action: Action, ops: (usize, usize), text: &'static str) {
        self.out.steps.push(Step { action, ops, text });
    }

    /// Marks places as used by the next step.
    fn touch(&mut self, places: &[At]) {
        let step = self.out.steps.len();
        places.iter().for_each(|&at| self.out.scratch.touch(at, step));
    }

    fn scratch(&mut self, bytes: usize) -> At {
        if bytes == 0 { At::NONE } else { self.out.scratch.allocate(bytes, self.out.steps.len()) }
    }

    /// Whether the backward of op `index` needs what its forward computed from.
    fn runs_backward(&self, index: usize) -> bool {
        let link = &self.chain.links()[index];
        let own = (link.param..link.param + link.op.params()).any(|param| self.key.params[param].1);
        let extra = link.op.extra_inputs() != 0 && self.key.extras[link.extra_input].1;
        self.grads_before[index] || own || extra
    }

    /// Whether backward reads edge `index` in high precision.
    fn keeps_edge(&self, index: usize) -> bool {
        match self.op_at(index) {
            Some(Op::Norm { .. }) => self.runs_backward(index),
            Some(Op::Activation { cache_quantized_input, .. }) => !cache_quantized_input && self.runs_backward(index),
            Some(Op::Linear { .. }) => {
                let linear = &self.linears[self.chain.links()[index].linear];
                linear.weight_grad && linear.quantized.is_none()
            }
            _ => false,
        }
    }

    /// The first op from `index` on that does more than hand its input on; and whether it is handed out before.
    fn consumer(&self, mut index: usize) -> (usize, bool) {
        let mut handed_out = false;
        while let Some(Op::Identity | Op::MakeExtraOutput { .. }) = self.op_at(index) {
            handed_out |= matches!(self.op_at(index), Some(Op::MakeExtraOutput { .. }));
            index += 1;
        }
        (index, handed_out)
    }

    /// Where the value of edge `index` goes.
    fn place_of(&mut self, index: usize) -> At {
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
                let bytes = self.key.rows * self.widths[index] * self.key.activation.size();
                if self.keeps_edge(first) { self.out.saved.allocate(bytes) } else { self.scratch(bytes.max(1)) }
            }
        }
    }

    /// The linear op that takes edge `index` in FP8 under delayed scaling, from a kernel that computes and quantises.
    fn fp8_consumer(&self, index: usize) -> Option<(usize, bool)> {
        let (consumer, handed_out) = self.consumer(index);
        let link = self.link(consumer)?;
        let delayed = self.recipe.is_some_and(Recipe::is_delayed);
        (matches!(link.op, Op::Linear { .. }) && delayed).then_some((link.linear, handed_out))
    }

    /// Says why a value is quantised by a launch of its own.
    fn note_unfused(&mut self, index: usize, what: &str) {
        let (consumer, _) = self.consumer(index + 1);
        let Some(link) = self.link(consumer).filter(|link| matches!(link.op, Op::Linear { .. })) else { return };
        let scaling = match self.recipe.map(|recipe| recipe.scaling) {
            Some(Scaling::Current) => "current scaling needs the maximum of the whole tensor before it can quantise",
            Some(Scaling::Block) => "block scaling quantises in blocks that span rows",
            _ => return,
        };
        let note =
            format!("{what} {} does not quantise for {}: {scaling}", self.chain.links()[index].label, link.label);
        self.out.notes.push(note);
    }

    /// Where the layouts of a linear op's input go.
    fn input_layouts(&mut self, linear: usize) -> (QuantAt, QuantAt) {
        let Some(quantized) = &self.linears[linear].quantized else { return (QuantAt::default(), QuantAt::default()) };
        let columnwise = quantized.usages.input().columnwise;
        let row_segments = quantized.x_segments(Usage { rowwise: true, columnwise: false });
        let col_segments = quantized.x_segments(Usage { rowwise: false, columnwise });
        let shares_scale = quantized.x.shares_scale();
        let row = self.scratch(row_segments.bytes);
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

    fn fused(&mut self, linear: usize) -> Fused {
        let (row, col) = self.input_layouts(linear);
        self.touch(&[row.data, row.scale]);
        Fused { row, col, slot: SlotOf::Input(linear) }
    }

    fn linear(&mut self, index: usize, link: &Link, value: &mut Value) -> Result<usize> {
        let linear = link.linear;
        let (tail, d, next, text) = self.tail(index);
        let x = if self.linears[linear].quantized.is_some() {
            self.quantized_operands(index, linear, value)?
        } else {
            if self.linears[linear].weight_grad {
                self.out.kept[index] = Kept::Linear { x: QuantAt { data: value.high, scale: At::NONE } };
            }
            Operand::high(value.high)
        };
        let w = self.weight_operand(index, link)?;
        let bias = if tail.bias { self.bias(index + 1)? } else { At::NONE };
        let d = match d {
            Some(extra) => extra,
            None => self.place_of(next),
        };
        let plan = self.linears[linear].fprop(self.dispatcher, &tail)?;
        let touched = |operand: Operand| match operand {
            Operand::At(at) => [at.data, at.scale],
            _ => [At::NONE; 2],
        };
        self.touch(&touched(x));
        self.touch(&touched(w));
        self.touch(&[bias, d]);
        self.step(Action::Gemm { plan, x, w, bias, d }, (index, next - 1), text);
        *value = Value { high: d, quantized: None };
        Ok(next)
    }

    /// What is fused behind the GEMM of the linear op at `index`, where the result goes if that is settled by it, the
    /// next op, and the name of the whole.
    fn tail(&mut self, index: usize) -> (Tail, Option<At>, usize, &'static str) {
        let mut tail = Tail { bias: false, alpha: 1.0, epilogue: Epilogue::None, accumulate: false };
        let mut next = index + 1;
        tail.bias = matches!(self.op_at(next), Some(Op::Bias { .. }));
        next += usize::from(tail.bias);
        let extra = |at: Option<&Link>| match at {
            Some(link) if matches!(link.op, Op::AddExtraInput { in_place: true }) => {
                Some(At::of(Place::Extra(link.extra_input as u16)))
            }
            _ => None,
        };
        if let Some(extra) = extra(self.link(next)) {
            tail.accumulate = true;
            return (tail, Some(extra), next + 1, if tail.bias { "gemm + bias + add" } else { "gemm + add" });
        }
        if let (false, Some(Op::ConstantScale { scale }), Some(extra)) =
            (tail.bias, self.op_at(next), extra(self.link(next + 1)))
        {
            (tail.alpha, tail.accumulate) = (scale, true);
            return (tail, Some(extra), next + 2, "gemm + scale + add");
        }
        if let Some(epilogue) = self.epilogue(next) {
            tail.epilogue = epilogue;
            let text = match (tail.bias, epilogue) {
                (true, Epilogue::Gelu) => "gemm + bias + gelu",
                (true, _) => "gemm + bias + relu",
                (false, Epilogue::Gelu) => "gemm + gelu",
                (false, _) => "gemm + relu",
            };
            return (tail, None, next + 1, text);
        }
        (tail, None, next, if tail.bias { "gemm + bias" } else { "gemm" })
    }

    /// cuBLASLt's epilogue for the activation at `index`: where backward needs its input, it is not computed away.
    fn epilogue(&mut self, index: usize) -> Option<Epilogue> {
        let Some(Op::Activation { function, scaled: false, .. }) = self.op_at(index) else { return None };
        let epilogue = match function {
            Activation::Gelu => Epilogue::Gelu,
            Activation::Relu => Epilogue::Relu,
            _ => return None,
        };
        let reason = if self.runs_backward(index) {
            "backward needs the activation's input"
        } else if self.recipe.is_some_and(|recipe| !recipe.is_per_tensor()) {
            "cuBLASLt has no activation behind block-scaled operands"
        } else {
            return Some(epilogue);
        };
        let label = &self.chain.links()[index].label;
        self.out.notes.push(format!("{label} is not an epilogue of the GEMM before it: {reason}"));
        None
    }

    /// The input of a linear op in FP8: as the op before left it, or by a launch of its own.
    fn quantized_operands(&mut self, index: usize, linear: usize, value: &mut Value) -> Result<Operand> {
        let (row, col) = match value.quantized.take() {
            Some(layouts) => layouts,
            None => {
                let to = self.fused(linear);
                let Some(quantized) = &self.linears[linear].quantized else { return Ok(Operand::high(value.high)) };
                let plan = quantized.x;
                let spare = self.scratch(plan.scratch_bytes());
                self.touch(&[value.high, spare]);
                let text = if to.col.data.is_some() { "cast + transpose" } else { "cast" };
                let action =
                    Action::Quantize { plan, x: value.high, to, dbias: At::NONE, spare, unpack: UnpackAt::default() };
                self.step(action, (index, index), text);
                (to.row, to.col)
            }
        };
        if col.data.is_some() {
            self.out.kept[index] = Kept::Linear { x: col };
        }
        Ok(Operand::At(row))
    }

    /// The weight: quantised if the kept one does not serve, or converted, or as it is.
    fn weight_operand(&mut self, index: usize, link: &Link) -> Result<Operand> {
        let linear = &self.linears[link.linear];
        let param = At::of(Place::Param(link.param as u16));
        if let Some(quantized) = &linear.quantized {
            let plan = quantized.w;
            let spare = self.scratch(plan.scratch_bytes());
            self.touch(&[spare]);
            self.step(
                Action::Weight { linear: link.linear, plan, spare },
                (index, index),
                "weight cast, if it changed",
            );
            return Ok(Operand::WeightRow(link.linear));
        }
        if linear.weight == linear.activation {
            return Ok(Operand::high(param));
        }
        let (outputs, inputs, input_grad, from) = (linear.outputs, linear.inputs, linear.input_grad, linear.weight);
        let bytes = outputs * inputs * self.key.activation.size();
        let to = if input_grad { self.out.saved.allocate(bytes) } else { self.scratch(bytes) };
        self.convert(index, param, (outputs, inputs), from, to)?;
        self.out.converted[link.linear] = to;
        Ok(Operand::high(to))
    }

    /// A bias in the type that the GEMM takes.
    fn bias(&mut self, index: usize) -> Result<At> {
        let link = &self.chain.links()[index];
        let (from, wanted) = (self.key.params[link.param].0, self.linears[link.linear - 1].bias_dtype());
        let param = At::of(Place::Param(link.param as u16));
        let Op::Bias { size } = link.op else { return Ok(param) };
        if from == wanted {
            return Ok(param);
        }
        let to = self.scratch(size * wanted.size());
        let plan =
            AffinePlan::new(AffineSpec { rows: 1, cols: size, input: from, output: wanted, row: from, alpha: 1.0 })?;
        self.touch(&[to]);
        self.step(Action::Affine { plan, x: param, r: At::NONE, b: At::NONE, y: to }, (index, index), "convert bias");
        Ok(to)
    }

    fn convert(&mut self, index: usize, x: At, (rows, cols): (usize, usize), from: Float, y: At) -> Result<()> {
        let output = self.key.activation;
        let plan = AffinePlan::new(AffineSpec { rows, cols, input: from, output, row: from, alpha: 1.0 })?;
        self.touch(&[y]);
        self.step(Action::Affine { plan, x, r: At::NONE, b: At::NONE, y }, (index, index), "convert weight");
        Ok(())
    }

    fn norm(&mut self, index: usize, residual: At, sum: At, value: &mut Value) -> Result<usize> {
        let link = &self.chain.links()[index];
        let Op::Norm { kind, cols, eps, zero_centered_gamma } = link.op else { return Ok(index + 1) };
        let (param, rows) = (link.param, self.key.rows);
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
            input: self.key.activation,
            weight: self.key.params[param].0,
            zero_centered_gamma,
            eps,
            residual: residual.is_some(),
            high,
            fp8: fp8.and(self.recipe).map(|recipe| recipe.fwd),
            rowwise: to.row.data.is_some(),
            columnwise: to.col.data.is_some(),
            stats,
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
            for _ in self.chain.links()[index + 1..consumer].iter().filter(|link| link.op.extra_outputs() != 0) {
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
        let (rows, cols, activation) = (self.key.rows, self.widths[index], self.key.activation);
        let (b, b_type) = row.map_or((At::NONE, activation), |(place, dtype)| (At::of(place), dtype));
        let spec = AffineSpec { rows, cols, input: activation, output: activation, row: b_type, alpha };
        let plan = AffinePlan::new(spec)?;
        self.touch(&[value.high, r, y]);
        self.step(Action::Affine { plan, x: value.high, r, b, y }, (index, index), text);
        *value = Value { high: y, quantized: None };
        Ok(index + 1)
    }

    fn activation(&mut self, index: usize, value: &mut Value) -> Result<usize> {
        let link = &self.chain.links()[index];
        let Op::Activation { function, interleave, scaled, cache_quantized_input } = link.op else {
            return Ok(index + 1);
        };
        let row_scale = if scaled { At::of(Place::Extra(link.extra_input as u16)) } else { At::NONE };
        let row_scale_type = scaled.then(|| self.key.extras[link.extra_input].0);
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
            rows: self.key.rows,
            cols: self.widths[index + 1],
            activation: function,
            interleave,
            input: self.key.activation,
            high,
            fp8: fp8.and(self.recipe).map(|recipe| recipe.fwd),
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
            let (rows, cols, input) = (self.key.rows, self.widths[index], self.key.activation);
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
                processors: self.dispatcher.multiprocessors(self.key.device)?,
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
