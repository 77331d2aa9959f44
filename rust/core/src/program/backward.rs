//! Compiles a chain's backward: walks the ops from the end, and fuses some of them.

use crate::base::error::Result;
use crate::ops::activation_backward::{ActivationBackwardPointers, ActivationBackwardSpec};
use crate::ops::affine::{AffinePointers, AffineSpec};
use crate::ops::amax::ScaleRule;
use crate::ops::cast::{CastPointers, CastSpec};
use crate::ops::dequantize::DequantizePointers;
use crate::ops::norm_backward::{NormBackwardPointers, NormBackwardSpec};
use crate::ops::norm_spec::NormKind;
use crate::ops::sum_groups::{SumGroupsPointers, SumGroupsSpec};
use crate::program::backward_compiler::{Backward, Compiler};
use crate::program::buffer::At;
use crate::program::chain::{Link, Op};
use crate::program::edge::{Layouts, Value};
use crate::program::facts::Facts;
use crate::program::forward_compiler::{Fused, Kept, Left, slot};
use crate::program::port::{LinearPort, Outer, Port};
use crate::program::work::{Flows, Work, quantised};
use crate::recipe::definition::{Quantization, Recipe, Scaling};
use crate::runtime::dispatcher::Dispatcher;
use crate::runtime::lane::MEASURE_COUNTERS_AT;

/// Compiles the backward of a compiled forward; GEMMs store FP8 if `stores_fp8` allows it.
pub(crate) fn compile(
    dispatcher: &mut Dispatcher,
    facts: &Facts,
    (left, flows): (&Left, Flows),
    stores_fp8: bool,
) -> Result<Backward> {
    let mut compiler = Compiler::new(dispatcher, facts, (left, flows), stores_fp8);
    let mut grad = compiler.grad_output();
    for (index, link) in facts.chain.links().iter().enumerate().rev() {
        if !compiler.runs(index) {
            return Ok(compiler.out);
        }
        compiler.op(index, link, &mut grad)?;
    }
    if facts.key.input_grad {
        compiler.grad_input(&grad);
    }
    Ok(compiler.out)
}

impl Compiler<'_> {
    /// The gradient of the output, as the call passes it.
    fn grad_output(&mut self) -> Value {
        let facts = self.facts;
        let given = facts.key.outer.grad_output.filter(|given| facts.takes_grad(*given).is_some());
        let Some(given) = given else { return Value::high(At::of(Port::GradOutput)) };
        Value::quantized(Layouts::outer(Outer::GradOutput, given))
    }

    /// The gradient of the input: at the place where the first op wrote it, or quantised.
    fn grad_input(&mut self, grad: &Value) {
        let (Some(cast), Some(kind)) = (self.facts.grad_input_cast(), self.facts.grad_input_kind()) else {
            self.out.grad_input = grad.high.port;
            return;
        };
        self.out.grad_input = Port::GradInput;
        if self.out.grad_input_is_row {
            return; // the GEMM has stored it in FP8
        }
        let slot = slot(0, LinearPort::GradInputScale, LinearPort::GradInputAmax);
        let at = quantised(grad.high, &Layouts::outer(Outer::GradInput, kind), slot, self.scratch());
        self.step(Work::Quantize { cast, unpacks: None, at }, 0, "cast of the input's gradient");
    }

    fn op(&mut self, index: usize, link: &Link, grad: &mut Value) -> Result<()> {
        match link.op {
            Op::Identity => {}
            Op::Linear { .. } => self.linear(index, link, grad)?,
            Op::Bias { size, groups } => self.bias(index, link, (size, groups), grad),
            Op::Norm { .. } => self.norm(index, link, grad),
            Op::Activation { .. } => self.activation(index, link, grad),
            Op::AddExtraInput { .. } => {
                if self.facts.key.extras[link.extra_input].1 {
                    self.out.grad_extras[link.extra_input] = grad.high.port;
                }
            }
            Op::MakeExtraOutput { in_place } => self.branch(index, in_place, grad),
            Op::Residual => self.branch(index, false, grad),
            Op::AddResidual { begin } => self.residual_grads[begin] = grad.high,
            // Behind a linear op, the scale is a factor of that op's GEMMs.
            Op::ConstantScale { .. } if matches!(self.op_before(index), Some((_, Op::Linear { groups: None, .. }))) => {
            }
            Op::ConstantScale { scale } => self.affine(index, grad, scale, At::NONE, None, "scale"),
            Op::Router(router) => self.router(index, link, router, grad)?,
            Op::Permute { .. } => self.permute(index, link, grad)?,
            Op::Unpermute => self.unpermute(index, link, grad)?,
        }
        Ok(())
    }

    /// `alpha · g + r` as the gradient of edge `index`.
    fn affine(&mut self, index: usize, grad: &mut Value, alpha: f32, r: At, into: Option<At>, text: &'static str) {
        let y = into.unwrap_or_else(|| self.place_of(index));
        let (cols, input) = (self.facts.edges[index].cols, self.facts.key.activation);
        let spec = AffineSpec::of(cols, input, alpha);
        let at = AffinePointers { x: grad.high, r, b: At::NONE, y };
        self.step(Work::Affine { spec, at }, index, text);
        *grad = Value::high(y);
    }

    /// Adds the gradient of a residual branch, unless the next op has added it.
    fn branch(&mut self, index: usize, in_place: bool, grad: &mut Value) {
        if self.takes_branch(index).is_some() {
            return;
        }
        let other = self.other_grad(index);
        self.affine(index, grad, 1.0, other, in_place.then_some(other), "add");
    }

    fn bias(&mut self, index: usize, link: &Link, (cols, groups): (usize, Option<usize>), grad: &Value) {
        let out = self.param_grad(link.param);
        if !out.is_some() {
            return;
        }
        let input = self.facts.key.activation;
        let high = match (&grad.quantized, self.facts.key.outer.grad_output) {
            (None, _) => grad.high,
            (Some(layouts), Some(given)) if layouts.row.data.port == Port::GradOutput => {
                let spec = given.dequantize(cols, input);
                let (q, scale_inv) = (layouts.row.data, layouts.row.scale);
                let at = DequantizePointers { q, out: self.scratch(), scale_inv };
                self.step(Work::Dequantize { spec, at }, index, "dequantise the gradient");
                at.out
            }
            (Some(_), _) => return, // an activation's backward has summed it already
        };
        if let Some(groups) = groups {
            let spec = SumGroupsSpec { groups, rows: 0, cols, input, row_scale: None };
            let splits = self.left.splits_of(self.facts, index);
            let at = SumGroupsPointers { x: high, sums: out, row_scale: At::NONE, splits };
            self.step(Work::SumGroups { spec, at }, index, "gradients of the biases");
            return;
        }
        // The linear op's plans include a bias right behind it, but not a bias behind an identity.
        let by_cast = grad.quantized.is_none() && index > 0;
        if by_cast && matches!(self.facts.chain.links()[index - 1].op, Op::Linear { groups: None, .. }) {
            let linear = &self.facts.linears[link.linear - 1];
            if linear.dy().is_some() {
                self.bias_grad = out; // the quantisation of the gradient sums it
                return;
            }
        }
        let processors = self.facts.limits.multiprocessors;
        let spec = CastSpec::column_sums(0, cols, input, processors);
        let at = CastPointers {
            x: high,
            dbias: out,
            partial: self.scratch(),
            counters: At::of(Port::Counters),
            ..CastPointers::default()
        };
        self.step(Work::ColumnSums { spec, at }, index, "bias gradient");
    }

    fn norm(&mut self, index: usize, link: &Link, grad: &mut Value) {
        let Op::Norm { kind, cols, zero_centered_gamma, .. } = link.op else { return };
        let Kept::Norm { x, mean, rstd } = self.left.kept[index] else { return };
        let input_grad = self.facts.grads_before[index];
        let dgamma = self.param_grad(link.param);
        let layer_norm = matches!(kind, NormKind::LayerNorm);
        let dbeta = if layer_norm { self.param_grad(link.param + 1) } else { At::NONE };
        let add = self.branch_before(index).filter(|_| input_grad).unwrap_or(At::NONE);
        let spec = NormBackwardSpec {
            rows: 0,
            cols,
            kind,
            input: self.facts.key.activation,
            weight: self.facts.key.params[link.param].0,
            zero_centered_gamma,
            add: add.is_some(),
            dx: input_grad,
            dgamma: dgamma.is_some(),
            dbeta: dbeta.is_some(),
            limits: self.facts.limits,
        };
        let dx = if input_grad { self.place_of(index) } else { At::NONE };
        let at = NormBackwardPointers {
            dy: grad.high,
            x,
            gamma: At::of(Port::Param(link.param as u16)),
            mean,
            rstd,
            add,
            dx,
            dgamma,
            dbeta,
            partial: self.scratch(),
            counters: At::of(Port::Counters),
            ..NormBackwardPointers::default()
        };
        let text = if add.is_some() { "norm backward + add" } else { "norm backward" };
        self.step(Work::NormBackward { spec, at }, index, text);
        *grad = Value::high(dx);
    }

    /// The linear op before the activation at `index`, maybe with a bias between, whose gradient the activation's
    /// backward may quantise; and the bias's parameter.
    fn fp8_producer(&self, index: usize) -> Option<(usize, Option<usize>)> {
        if !self.facts.recipe.as_ref().is_some_and(Recipe::is_delayed) {
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
        let quantizes = matches!(op, Op::Linear { groups: None, .. }) && self.facts.linears[linear].dy().is_some();
        quantizes.then_some((linear, bias))
    }

    /// The activation's input in high precision.
    pub(super) fn activation_input(&mut self, index: usize, kept: &Kept) -> At {
        let Kept::Activation { x, quantized, .. } = *kept else { return At::NONE };
        let Some((spec, q)) = quantized else { return x };
        let at = DequantizePointers { q: q.data, out: self.scratch(), scale_inv: q.scale };
        self.step(Work::Dequantize { spec, at }, index, "dequantise the kept input");
        at.out
    }

    fn activation(&mut self, index: usize, link: &Link, grad: &mut Value) {
        let Op::Activation { function, interleave, .. } = link.op else { return };
        let kept = self.left.kept[index];
        let Kept::Activation { row_scale, .. } = kept else { return };
        let x = self.activation_input(index, &kept);
        let wants_factors = row_scale.is_some() && self.facts.wants_factors(link);
        let for_experts = self.experts_before(index, wants_factors);
        if let Some(Ok(experts)) = for_experts {
            let row_scale_grad = self.factor_grad(link, row_scale);
            return self.activation_grad_for_experts(index, experts, [x, row_scale, row_scale_grad], grad);
        }
        let producer = self.fp8_producer(index);
        if producer.is_none() {
            self.note_unfused(index, for_experts.and_then(std::result::Result::err));
        }
        let Fused { layouts: to, slot } =
            producer.map_or(Fused::NONE, |(linear, _)| Fused::of_grad(linear, self.grad_layouts(linear)));
        let dbias = producer.and_then(|(_, bias)| bias).map_or(At::NONE, |param| self.param_grad(param));
        let dx = if producer.is_none() && self.facts.grads_before[index] { self.place_of(index) } else { At::NONE };
        let row_scale_grad = self.factor_grad(link, row_scale);
        let measured = if dx.is_some() { self.measured(index) } else { None };
        let spec = ActivationBackwardSpec {
            rows: 0,
            cols: self.facts.edges[index + 1].cols,
            activation: function,
            interleave,
            input: self.facts.key.activation,
            high: dx.is_some(),
            fp8: producer.and(self.facts.recipe.as_ref()).map(|recipe| recipe.bwd),
            rowwise: to.row.is_some(),
            columnwise: to.col.is_some(),
            dbias: dbias.is_some(),
            row_scale: if row_scale.is_some() { self.facts.factor_type(link) } else { None },
            row_scale_grad: row_scale_grad.is_some(),
            measures: measured.map(|(_, rule)| rule),
            processors: self.facts.limits.multiprocessors,
        };
        let at = ActivationBackwardPointers {
            dy: grad.high,
            x,
            dx,
            out: to.row.data,
            out_t: to.col.data,
            row_scale,
            row_scale_grad,
            scale: slot.scale,
            scale_inv: to.scale_inv(),
            amax: slot.amax,
            noop: At::NONE,
            measured: measured.map_or(At::NONE, |(at, _)| at),
            measure_counters: At::of(Port::Counters).plus(MEASURE_COUNTERS_AT),
            dbias,
            partial: self.scratch(),
            counters: At::of(Port::Counters),
        };
        self.step(Work::ActivationBackward { spec, at }, index, activation_text(&spec));
        *grad = Value { quantized: producer.map(|_| to), scale: measured.map(|(at, _)| at), ..Value::high(dx) };
    }

    /// The place for the gradient of an activation's row factors.
    fn factor_grad(&mut self, link: &Link, row_scale: At) -> At {
        if !row_scale.is_some() || !self.facts.wants_factors(link) {
            return At::NONE;
        }
        if let Some(by) = link.permuted_by {
            self.factor_grads[by] = self.scratch();
            return self.factor_grads[by];
        }
        let port = Port::GradExtra(link.extra_input as u16);
        self.out.grad_extras[link.extra_input] = port;
        At::of(port)
    }

    /// The place where the op that computes the gradient of edge `index` writes the scale for the linear op before it,
    /// and the scale's rule. Only under current scaling: no launch then reads the tensor just for its maximum.
    fn measured(&mut self, index: usize) -> Option<(At, ScaleRule)> {
        let recipe = self.facts.recipe.as_ref().filter(|recipe| recipe.scaling == Scaling::Current)?;
        let Quantization { amax_epsilon: eps, power_2_scale: pow2, .. } = recipe.grad;
        let rule = ScaleRule { output: recipe.bwd, eps, pow2 };
        let (mut before, mut op) = self.op_before(index)?;
        if let Op::Bias { .. } = op {
            (before, op) = self.op_before(before)?;
        }
        let linear = self.facts.chain.links()[before].linear;
        let quantizes = matches!(op, Op::Linear { groups: None, .. }) && self.facts.linears[linear].dy().is_some();
        quantizes.then(|| (self.scratch(), rule))
    }

    /// Notes why a gradient is quantised by a separate launch: for `reason`, or because of the scaling.
    fn note_unfused(&mut self, index: usize, reason: Option<&'static str>) {
        let per_tensor = self.facts.recipe.as_ref().is_some_and(|recipe| !recipe.is_delayed());
        let behind_linear = matches!(self.op_before(index), Some((_, Op::Linear { .. } | Op::Bias { .. })));
        let scaling = (per_tensor && behind_linear).then_some("only delayed scaling knows the scale beforehand");
        if let Some(reason) = reason.or(scaling) {
            let label = self.facts.label(index);
            self.out.notes.push(format!("the backward of {label} does not quantise: {reason}"));
        }
    }
}

const fn activation_text(spec: &ActivationBackwardSpec) -> &'static str {
    match (spec.fp8.is_some(), spec.columnwise, spec.dbias) {
        (false, ..) => "activation backward",
        (true, false, false) => "activation backward + cast",
        (true, true, false) => "activation backward + cast + transpose",
        (true, false, true) => "activation backward + bias gradient + cast",
        (true, true, true) => "activation backward + bias gradient + cast + transpose",
    }
}
