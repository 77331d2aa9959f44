//! Compiles a chain's backward: walks the ops from the end, with fusions of its own.

use te_fast_kernels::Float;

use crate::dispatch::Dispatcher;
use crate::error::Result;
use crate::ops::activation_backward::{ActivationBackwardPlan, ActivationBackwardSpec};
use crate::ops::affine::{AffinePlan, AffineSpec};
use crate::ops::cast::{CastPlan, CastSpec};
use crate::ops::norm::NormKind;
use crate::ops::norm_backward::{NormBackwardPlan, NormBackwardSpec};
use crate::program::Facts;
use crate::program::chain::{Chain, Link, Op, ProgramKey};
use crate::program::forward::{Forward, Kept};
use crate::program::linear_op::BackwardOperands;
use crate::program::memory::{At, Place, Scratch};
use crate::program::step::{Action, Fused, Operand, QuantAt, SlotOf, Step, UnpackAt};
use crate::recipe::Recipe;

/// A compiled backward.
#[derive(Debug, Default)]
pub(crate) struct Backward {
    pub(crate) steps: Vec<Step>,
    pub(crate) scratch: Scratch,
    /// Where the input's gradient is.
    pub(crate) grad_input: Place,
    /// The same for each extra input.
    pub(crate) grad_extras: Vec<Place>,
    /// Bytes of the gradients that wait for `backward_dw`, per linear op.
    pub(crate) deferred: Vec<usize>,
    pub(crate) notes: Vec<String>,
}

pub(crate) struct Compiler<'a> {
    pub(crate) facts: &'a Facts<'a>,
    pub(crate) forward: &'a Forward,
    pub(crate) dispatcher: &'a mut Dispatcher,
    pub(crate) out: Backward,
    /// Scales of the next weight gradient's input, where they were kept as bytes.
    pub(crate) unpacked: At,
    /// Gradient of a bias that the quantisation of the gradient computes.
    pub(crate) bias_grad: At,
}

/// The gradient of an edge.
#[derive(Clone, Copy, Debug)]
struct Grad {
    high: At,
    quantized: Option<(QuantAt, QuantAt)>,
}

impl Compiler<'_> {
    pub(crate) fn run(mut self) -> Result<Backward> {
        self.out.grad_extras = vec![Place::None; self.facts.chain.extra_inputs()];
        self.out.deferred = vec![0; self.facts.linears.len()];
        let mut grad = Grad { high: At::of(Place::GradOutput), quantized: None };
        for index in (0..self.facts.chain.links().len()).rev() {
            let link = &self.facts.chain.links()[index];
            if !self.runs(index) {
                return Ok(self.out);
            }
            self.op(index, link, &mut grad).map_err(|error| error.within(&link.label))?;
        }
        if self.facts.key.input_grad {
            self.out.grad_input = grad.high.place;
        }
        Ok(self.out)
    }

    /// Whether the op or anything before it wants a gradient.
    fn runs(&self, index: usize) -> bool {
        self.facts.grads_before[index + 1]
    }

    fn op(&mut self, index: usize, link: &Link, grad: &mut Grad) -> Result<()> {
        match link.op {
            Op::Identity => Ok(()),
            Op::Linear { .. } => self.linear(index, link, grad),
            Op::Bias { size } => self.bias(index, link, size, grad),
            Op::Norm { .. } => self.norm(index, link, grad),
            Op::Activation { .. } => self.activation(index, link, grad),
            Op::AddExtraInput { .. } => {
                if self.facts.key.extras[link.extra_input].1 {
                    self.out.grad_extras[link.extra_input] = grad.high.place;
                }
                Ok(())
            }
            Op::MakeExtraOutput { in_place } => self.branch(index, link, in_place, grad),
            Op::ConstantScale { scale } => {
                if matches!(self.op_before(index), Some((_, Op::Linear { .. }))) {
                    return Ok(()); // a factor of that op's GEMMs
                }
                self.affine(index, grad, scale, At::NONE, None, "scale")
            }
        }
    }

    /// The op before `index`, identities left out.
    fn op_before(&self, index: usize) -> Option<(usize, Op)> {
        let links = self.facts.chain.links();
        (0..index).rev().map(|at| (at, links[at].op)).find(|(_, op)| !matches!(op, Op::Identity))
    }

    fn step(&mut self, action: Action, ops: (usize, usize), text: &'static str) {
        self.out.steps.push(Step { action, ops, text });
    }

    fn touch(&mut self, places: &[At]) {
        let step = self.out.steps.len();
        for &at in places {
            self.out.scratch.touch(at, step);
        }
    }

    fn scratch(&mut self, bytes: usize) -> At {
        if bytes == 0 { At::NONE } else { self.out.scratch.allocate(bytes, self.out.steps.len()) }
    }

    /// Where the gradient of edge `index` goes: to whoever hands it out first, else into scratch.
    fn place_of(&mut self, index: usize) -> At {
        let Facts { chain, key, widths, .. } = *self.facts;
        let mut is_grad_input = key.input_grad;
        for (at, link) in chain.links()[..index].iter().enumerate().rev() {
            match link.op {
                // Their input's gradient is their output's.
                Op::Identity | Op::Bias { .. } => {}
                // The op behind it has added the extra gradient.
                Op::MakeExtraOutput { .. } if self.takes_branch(at).is_some() => {}
                Op::AddExtraInput { .. } if !key.extras[link.extra_input].1 => {}
                Op::AddExtraInput { .. } => return At::of(Place::GradExtra(link.extra_input as u16)),
                _ => {
                    is_grad_input = false;
                    break;
                }
            }
        }
        if is_grad_input {
            return At::of(Place::GradInput);
        }
        self.scratch(key.rows * widths[index] * key.activation.size())
    }

    fn param_grad(&self, param: usize) -> At {
        if self.facts.key.params[param].1 { At::of(Place::GradParam(param as u16)) } else { At::NONE }
    }

    /// `alpha · g + r` as the gradient of edge `index`.
    fn affine(
        &mut self,
        index: usize,
        grad: &mut Grad,
        alpha: f32,
        r: At,
        into: Option<At>,
        text: &'static str,
    ) -> Result<()> {
        let y = into.unwrap_or_else(|| self.place_of(index));
        let (rows, cols, input) = (self.facts.key.rows, self.facts.widths[index], self.facts.key.activation);
        let plan = AffinePlan::new(AffineSpec { rows, cols, input, output: input, row: input, alpha })?;
        self.touch(&[grad.high, r, y]);
        self.step(Action::Affine { plan, x: grad.high, r, b: At::NONE, y }, (index, index), text);
        *grad = Grad { high: y, quantized: None };
        Ok(())
    }

    /// The gradient of an extra output joins, unless the op behind took it along.
    fn branch(&mut self, index: usize, link: &Link, in_place: bool, grad: &mut Grad) -> Result<()> {
        if self.takes_branch(index).is_some() {
            return Ok(());
        }
        let other = At::of(Place::GradExtraOutput(link.extra_output as u16));
        self.affine(index, grad, 1.0, other, in_place.then_some(other), "add")
    }

    /// The op behind a `MakeExtraOutput` that adds the extra gradient in its own launch.
    fn takes_branch(&self, index: usize) -> Option<usize> {
        let links = self.facts.chain.links();
        let Op::MakeExtraOutput { in_place } = links[index].op else { return None };
        let behind = (index + 1..links.len()).find(|&at| !matches!(links[at].op, Op::Identity))?;
        match links[behind].op {
            Op::Norm { .. } => Some(behind),
            Op::Linear { .. } => in_place.then_some(behind),
            _ => None,
        }
    }

    /// The extra output before op `index` whose gradient the op adds.
    fn branch_before(&self, index: usize) -> Option<At> {
        let (before, _) = self.op_before(index)?;
        (self.takes_branch(before) == Some(index))
            .then(|| At::of(Place::GradExtraOutput(self.facts.chain.links()[before].extra_output as u16)))
    }

    fn bias(&mut self, index: usize, link: &Link, cols: usize, grad: &mut Grad) -> Result<()> {
        let out = self.param_grad(link.param);
        if !out.is_some() || grad.quantized.is_some() {
            return Ok(()); // an activation's backward has summed it already
        }
        // The linear op's plans know of a bias right behind it, not of one behind an identity.
        if index > 0 && matches!(self.facts.chain.links()[index - 1].op, Op::Linear { .. }) {
            let linear = &self.facts.linears[link.linear - 1];
            if linear.quantized.as_ref().is_some_and(|quantized| quantized.dy.is_some()) {
                self.bias_grad = out; // the quantisation of the gradient sums it
                return Ok(());
            }
        }
        let (rows, input) = (self.facts.key.rows, self.facts.key.activation);
        let processors = self.dispatcher.multiprocessors(self.facts.key.device)?;
        let plan = CastPlan::new(CastSpec::column_sums(rows, cols, input, processors))?;
        let partial = self.scratch(plan.partial_bytes());
        self.touch(&[grad.high, partial]);
        self.step(Action::ColumnSums { plan, x: grad.high, out, partial }, (index, index), "bias gradient");
        Ok(())
    }

    /// Layouts of the gradient that a linear op's GEMMs read, and where the input's scales are unpacked to; a weight
    /// gradient that waits keeps its own.
    fn grad_layouts(&mut self, linear: usize) -> (Fused, UnpackAt) {
        let op = &self.facts.linears[linear];
        let (segments, scales) = op.grad_segments();
        let at = if self.facts.key.deferred[linear] && op.weight_grad {
            self.out.deferred[linear] = segments.bytes;
            At::of(Place::Deferred(linear as u16))
        } else {
            self.scratch(segments.bytes)
        };
        let layout = |there: bool, data: usize, scale: usize| {
            if there { QuantAt { data: at.plus(data), scale: at.plus(scale) } } else { QuantAt::default() }
        };
        let to = Fused {
            row: layout(segments.usage.rowwise, segments.row, segments.row_scale),
            col: layout(segments.usage.columnwise, segments.col, segments.col_scale),
            slot: SlotOf::Grad(linear),
        };
        let unpack = scales.map_or_else(UnpackAt::default, |scales| UnpackAt {
            packed: At::NONE,
            unpacked: at.plus(scales.offset()),
            count: scales.count(),
        });
        (to, unpack)
    }

    fn linear(&mut self, index: usize, link: &Link, grad: &mut Grad) -> Result<()> {
        let linear = link.linear;
        let (row, col) = if self.facts.linears[linear].backward() == BackwardOperands::Quantized {
            self.quantized_grad(index, linear, grad)
        } else {
            self.plain_grad(index, linear, grad)?
        };
        let op = &self.facts.linears[linear];
        let (weight_grad, input_grad) = (op.weight_grad, op.input_grad);
        let accumulate = self.branch_before(index).filter(|_| input_grad);
        let dgrad = input_grad.then(|| op.dgrad(self.dispatcher, accumulate.is_some())).transpose()?;
        let own_wgrad =
            (weight_grad && !self.facts.key.deferred[linear]).then(|| op.own_wgrad(self.dispatcher)).transpose()?;
        if let Some(plan) = dgrad {
            let d = match accumulate {
                Some(branch) => branch,
                None => self.place_of(index),
            };
            let w = self.weight_operand(index, link)?;
            if let Operand::At(at) = w {
                self.touch(&[at.data]);
            }
            self.touch(&[row.data, row.scale, d]);
            let text = if accumulate.is_some() { "dgrad gemm + add" } else { "dgrad gemm" };
            let (x, bias, handover) = (Operand::At(row), At::NONE, At::NONE);
            self.step(Action::Gemm { plan, x, w, bias, d, handover }, (index, index), text);
            *grad = Grad { high: d, quantized: None };
        }
        let Kept::Linear { x } = self.forward.kept[index] else { return Ok(()) };
        let x = self.kept_input(index, linear, x)?;
        if let Some(plan) = own_wgrad {
            self.touch(&[col.data, col.scale, x.data, x.scale]);
            let (dy, x, d) = (Operand::At(col), Operand::At(x), self.param_grad(link.param));
            self.step(Action::WeightGrad { linear, plan, dy, x, d }, (index, index), "wgrad gemm");
        }
        Ok(())
    }

    /// The input as the weight's gradient takes it.
    fn kept_input(&mut self, index: usize, linear: usize, x: QuantAt) -> Result<QuantAt> {
        let unpacked = std::mem::replace(&mut self.unpacked, At::NONE);
        if unpacked.is_some() {
            return Ok(QuantAt { scale: unpacked, ..x });
        }
        let op = &self.facts.linears[linear];
        let Some(plan) = op.keeps_row().then(|| op.dequantize(false)).transpose()?.flatten() else { return Ok(x) };
        let out = if self.facts.key.deferred[linear] {
            At::of(Place::Deferred(linear as u16)).plus(op.high_grad_bytes())
        } else {
            self.scratch(plan.out_bytes())
        };
        self.step(Action::Dequantize { plan, q: Operand::At(x), out }, (index, index), "dequantise the input");
        Ok(QuantAt { data: out, scale: At::NONE })
    }

    /// The weight as the input's gradient takes it.
    fn weight_operand(&mut self, index: usize, link: &Link) -> Result<Operand> {
        let op = &self.facts.linears[link.linear];
        let param = At::of(Place::Param(link.param as u16));
        let converted = self.forward.converted[link.linear];
        match op.backward() {
            BackwardOperands::Quantized => Ok(Operand::WeightCol(link.linear)),
            BackwardOperands::High if converted.is_some() => Ok(Operand::high(converted)),
            BackwardOperands::High if op.weight == op.activation => Ok(Operand::high(param)),
            BackwardOperands::High => {
                let (rows, cols, input, output) = (op.outputs, op.inputs, op.weight, op.activation);
                let plan = AffinePlan::new(AffineSpec { rows, cols, input, output, row: input, alpha: 1.0 })?;
                let y = self.scratch(rows * cols * output.size());
                let action = Action::Affine { plan, x: param, r: At::NONE, b: At::NONE, y };
                self.step(action, (index, index), "convert weight");
                Ok(Operand::high(y))
            }
            BackwardOperands::Dequantized => {
                let Some(plan) = op.dequantize(true)? else { return Ok(Operand::high(param)) };
                let out = self.scratch(plan.out_bytes());
                let q = Operand::WeightRow(link.linear);
                self.step(Action::Dequantize { plan, q, out }, (index, index), "dequantise the weight");
                Ok(Operand::high(out))
            }
        }
    }

    fn quantized_grad(&mut self, index: usize, linear: usize, grad: &mut Grad) -> (QuantAt, QuantAt) {
        if let Some(layouts) = grad.quantized.take() {
            return layouts;
        }
        let Some(plan) = self.facts.linears[linear].quantized.as_ref().and_then(|quantized| quantized.dy) else {
            return (QuantAt::default(), QuantAt::default());
        };
        let (to, mut unpack) = self.grad_layouts(linear);
        if let (Kept::Linear { x }, true) = (self.forward.kept[index], unpack.count != 0) {
            unpack.packed = x.scale;
            self.unpacked = unpack.unpacked;
        }
        let dbias = std::mem::replace(&mut self.bias_grad, At::NONE);
        let spare = self.scratch(plan.scratch_bytes());
        self.touch(&[grad.high, to.row.data, to.col.data, spare]);
        let text = match (to.col.data.is_some(), dbias.is_some()) {
            (false, false) => "cast",
            (true, false) => "cast + transpose",
            (false, true) => "cast + bias gradient",
            (true, true) => "cast + transpose + bias gradient",
        };
        self.step(Action::Quantize { plan, x: grad.high, to, dbias, spare, unpack }, (index, index), text);
        (to.row, to.col)
    }

    /// The gradient in high precision; copied where the weight's gradient waits for it.
    fn plain_grad(&mut self, index: usize, linear: usize, grad: &mut Grad) -> Result<(QuantAt, QuantAt)> {
        let at = QuantAt { data: grad.high, scale: At::NONE };
        let op = &self.facts.linears[linear];
        if !(self.facts.key.deferred[linear] && op.weight_grad) {
            return Ok((at, at));
        }
        let input = if op.keeps_row() { op.rows * op.inputs * self.facts.key.activation.size() } else { 0 };
        self.out.deferred[linear] = op.high_grad_bytes() + input;
        let (rows, cols, input) = (op.rows, op.outputs, self.facts.key.activation);
        let plan = AffinePlan::new(AffineSpec { rows, cols, input, output: input, row: input, alpha: 1.0 })?;
        let y = At::of(Place::Deferred(linear as u16));
        self.touch(&[grad.high]);
        self.step(Action::Affine { plan, x: grad.high, r: At::NONE, b: At::NONE, y }, (index, index), "keep gradient");
        Ok((at, at))
    }

    fn norm(&mut self, index: usize, link: &Link, grad: &mut Grad) -> Result<()> {
        let Op::Norm { kind, cols, zero_centered_gamma, .. } = link.op else { return Ok(()) };
        let Kept::Norm { x, mean, rstd } = self.forward.kept[index] else { return Ok(()) };
        let input_grad = self.facts.grads_before[index];
        let layer_norm = matches!(kind, NormKind::LayerNorm);
        let dgamma = self.param_grad(link.param);
        let dbeta = if layer_norm { self.param_grad(link.param + 1) } else { At::NONE };
        let add = self.branch_before(index).filter(|_| input_grad).unwrap_or(At::NONE);
        let plan = NormBackwardPlan::new(NormBackwardSpec {
            rows: self.facts.key.rows,
            cols,
            kind,
            input: self.facts.key.activation,
            weight: self.facts.key.params[link.param].0,
            zero_centered_gamma,
            add: add.is_some(),
            dx: input_grad,
            dgamma: dgamma.is_some(),
            dbeta: dbeta.is_some(),
            limits: self.dispatcher.limits(self.facts.key.device)?,
        })?;
        let dx = if input_grad { self.place_of(index) } else { At::NONE };
        let partial = self.scratch(plan.partial_bytes());
        self.touch(&[grad.high, add, dx, partial]);
        let gamma = At::of(Place::Param(link.param as u16));
        let dy = grad.high;
        let text = if add.is_some() { "norm backward + add" } else { "norm backward" };
        let action = Action::NormBackward { plan, dy, x, gamma, mean, rstd, add, dx, dgamma, dbeta, partial };
        self.step(action, (index, index), text);
        *grad = Grad { high: dx, quantized: None };
        Ok(())
    }

    /// The linear op, through at most a bias, whose gradient an activation's backward at `index` may quantise; and the
    /// bias's parameter.
    fn fp8_producer(&self, index: usize) -> Option<(usize, Option<usize>)> {
        if !self.facts.recipe.is_some_and(Recipe::is_delayed) {
            return None;
        }
        let links = self.facts.chain.links();
        let (mut before, mut op) = self.op_before(index)?;
        let mut bias = None;
        if let Op::Bias { .. } = op {
            bias = Some(links[before].param);
            (before, op) = self.op_before(before)?;
        }
        let linear = links[before].linear;
        let quantizes = matches!(op, Op::Linear { .. })
            && self.facts.linears[linear].quantized.as_ref().is_some_and(|quantized| quantized.dy.is_some());
        quantizes.then_some((linear, bias))
    }

    fn activation(&mut self, index: usize, link: &Link, grad: &mut Grad) -> Result<()> {
        let Op::Activation { function, interleave, .. } = link.op else { return Ok(()) };
        let Kept::Activation { x, quantized, row_scale } = self.forward.kept[index] else { return Ok(()) };
        let x = match quantized {
            None => x,
            Some((plan, q)) => {
                let out = self.scratch(plan.out_bytes());
                self.step(
                    Action::Dequantize { plan, q: Operand::At(q), out },
                    (index, index),
                    "dequantise the kept input",
                );
                out
            }
        };
        let producer = self.fp8_producer(index);
        if producer.is_none() {
            self.note_unfused(index);
        }
        let to = producer.map_or(Fused::NONE, |(linear, _)| self.grad_layouts(linear).0);
        let dbias = producer.and_then(|(_, bias)| bias).map_or(At::NONE, |param| self.param_grad(param));
        let dx = if producer.is_none() && self.facts.grads_before[index] { self.place_of(index) } else { At::NONE };
        let scale_grad = row_scale.is_some() && self.facts.key.extras[link.extra_input].1;
        let drow_scale = if scale_grad { At::of(Place::GradExtra(link.extra_input as u16)) } else { At::NONE };
        let plan = ActivationBackwardPlan::new(ActivationBackwardSpec {
            rows: self.facts.key.rows,
            cols: self.facts.widths[index + 1],
            activation: function,
            interleave,
            input: self.facts.key.activation,
            high: dx.is_some(),
            fp8: producer.and(self.facts.recipe).map(|recipe| recipe.bwd),
            rowwise: to.row.data.is_some(),
            columnwise: to.col.data.is_some(),
            dbias: dbias.is_some(),
            row_scale: row_scale.is_some().then(|| self.facts.key.extras[link.extra_input].0),
            row_scale_grad: scale_grad,
            processors: self.dispatcher.multiprocessors(self.facts.key.device)?,
        })?;
        if scale_grad {
            self.out.grad_extras[link.extra_input] = drow_scale.place;
        }
        let partial = self.scratch(plan.partial_bytes());
        self.touch(&[x, grad.high, to.row.data, to.col.data, dx, partial]);
        let text = match (producer.is_some(), to.col.data.is_some(), dbias.is_some()) {
            (false, ..) => "activation backward",
            (true, false, false) => "activation backward + cast",
            (true, true, false) => "activation backward + cast + transpose",
            (true, false, true) => "activation backward + bias gradient + cast",
            (true, true, true) => "activation backward + bias gradient + cast + transpose",
        };
        let dy = grad.high;
        let action = Action::ActivationBackward { plan, dy, x, row_scale, dx, dbias, drow_scale, to, partial };
        self.step(action, (index, index), text);
        *grad = Grad { high: dx, quantized: producer.map(|_| (to.row, to.col)) };
        Ok(())
    }

    fn note_unfused(&mut self, index: usize) {
        let per_tensor = self.facts.recipe.is_some_and(|recipe| !recipe.is_delayed());
        if per_tensor && matches!(self.op_before(index), Some((_, Op::Linear { .. } | Op::Bias { .. }))) {
            let label = &self.facts.chain.links()[index].label;
            self.out.notes.push(format!(
                "the backward of {label} does not quantise: only delayed scaling knows the scale beforehand"
            ));
        }
    }
}

/// Type of a parameter's gradient as the program writes it.
pub(crate) fn grad_dtype(chain: &Chain, key: &ProgramKey, param: usize) -> Float {
    let is_bias = chain.links().iter().any(|link| link.param == param && matches!(link.op, Op::Bias { .. }));
    if is_bias { key.activation } else { key.params[param].0 }
}
