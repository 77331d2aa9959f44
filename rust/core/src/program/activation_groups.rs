//! Compiles gated activations beside the linear ops of experts: the launch that computes an activation, or its gradient,
//! also quantises it for these.

use crate::ops::activation_groups::{ActivationGroupsPointers, ActivationGroupsSpec, ActivationWay};
use crate::program::backward_compiler::Compiler as Backward;
use crate::program::buffer::At;
use crate::program::cast::Cast;
use crate::program::chain::{Link, Op};
use crate::program::edge::{LayoutAt, Value};
use crate::program::facts::Facts;
use crate::program::forward_compiler::{Compiler as Forward, Fused, Kept};
use crate::program::linear_op::BackwardOperands;
use crate::program::port::Port;
use crate::program::work::Work;

/// How an activation is quantised for the linear op of experts at `linear`; or, if another launch does that, why.
type ForExperts = Option<Result<(usize, ActivationGroupsSpec), &'static str>>;

impl Facts {
    fn activation_of_groups(&self, link: &Link, cast: &Cast, way: ActivationWay) -> Option<ActivationGroupsSpec> {
        let Op::Activation { function: activation, interleave, scaled, .. } = link.op else { return None };
        let row_scale = if scaled { self.factor_type(link) } else { None };
        Some(ActivationGroupsSpec { cast: cast.groups_spec()?, activation, interleave, row_scale, way })
    }

    /// The spec, unless no kernel has it.
    fn fitting(
        &self,
        linear: usize,
        spec: ActivationGroupsSpec,
    ) -> Result<(usize, ActivationGroupsSpec), &'static str> {
        if !self.is_hopper {
            return Err("the kernel that quantises for experts as it computes is made for Hopper");
        }
        spec.obstacle().map_or(Ok((linear, spec)), Err)
    }
}

impl Forward<'_> {
    /// The linear op of experts behind the activation at `index`; none if it is another op, or reads high precision.
    pub(super) fn experts_behind(&self, index: usize) -> ForExperts {
        let facts = self.facts;
        let (consumer, handed_out) = self.consumer(index + 1);
        let link = self.link(consumer).filter(|link| matches!(link.op, Op::Linear { groups: Some(_), .. }))?;
        let op = &facts.linears[link.linear];
        let cast = &op.casts.as_ref()?.x;
        if handed_out || op.keeps_high() {
            return Some(Err("its result is read in high precision, too"));
        }
        let spec = facts.activation_of_groups(&facts.chain.links()[index], cast, ActivationWay::Forward)?;
        Some(facts.fitting(consumer, spec))
    }

    /// The activation at `index`, quantised for the linear op at `consumer`.
    pub(super) fn activation_for_experts(
        &mut self,
        index: usize,
        (consumer, spec): (usize, ActivationGroupsSpec),
        row_scale: At,
        value: &mut Value,
    ) {
        let facts = self.facts;
        let Fused { layouts: to, slot } = self.fused(facts.chain.links()[consumer].linear);
        let at = ActivationGroupsPointers {
            x: value.high,
            row_scale,
            out: to.row.data,
            out_t: to.col.data,
            scale: slot.scale,
            scale_inv: to.scale_inv(),
            scale_inv_t: to.col.scale,
            amax: slot.amax,
            splits: self.out.left.splits_of(facts, consumer),
            ..ActivationGroupsPointers::default()
        };
        let text = if to.col.is_some() { "activation + cast + transpose" } else { "activation + cast" };
        self.step(Work::ActivationGroups { spec, at }, (index, index), text);
        *value = Value::quantized(to);
    }
}

impl Backward<'_> {
    /// The linear op of experts before the activation at `index`, if it reads its gradient in FP8 alone; the same
    /// results as forward's.
    pub(super) fn experts_before(&self, index: usize, row_scale_grad: bool) -> ForExperts {
        let facts = self.facts;
        let links = facts.chain.links();
        let (before, op) = self.op_before(index)?;
        if let Op::Bias { groups: Some(_), .. } = op {
            return Some(Err("the gradients of the biases read it in high precision, too"));
        }
        let Op::Linear { groups: Some(_), .. } = op else { return None };
        let linear = &facts.linears[links[before].linear];
        let cast = linear.dy().filter(|_| linear.backward() == BackwardOperands::Quantized)?;
        let spec = facts.activation_of_groups(&links[index], cast, ActivationWay::Backward { row_scale_grad })?;
        Some(facts.fitting(before, spec))
    }

    /// Computes the activation in front of the linear op of experts at `index` again, in the layout for the weights'
    /// gradients; none if no kernel does.
    pub(super) fn recomputed_for_experts(&mut self, index: usize) -> Option<LayoutAt> {
        let facts = self.facts;
        let linear = facts.chain.links()[index].linear;
        let op = &facts.linears[linear];
        let activation = op.recomputed?;
        let link = &facts.chain.links()[activation];
        let spec = facts.activation_of_groups(link, op.x_again()?, ActivationWay::Forward)?;
        let (_, spec) = facts.fitting(index, spec).ok()?;
        let kept = self.left.kept[activation];
        let Kept::Activation { row_scale, .. } = kept else { return None };
        let col = LayoutAt { data: self.for_weight_grad(linear), scale: self.for_weight_grad(linear) };
        // Delayed scaling, whose scale is not known any more, takes no recomputation.
        let at = ActivationGroupsPointers {
            x: self.activation_input(activation, &kept),
            row_scale,
            out_t: col.data,
            scale_inv: col.scale,
            scale_inv_t: col.scale,
            splits: self.left.splits_of(facts, index),
            ..ActivationGroupsPointers::default()
        };
        self.step(Work::ActivationGroups { spec, at }, activation, "activation again + transposed cast");
        Some(col)
    }

    /// The gradient of the activation at `index`, quantised for the linear op at `before`.
    pub(super) fn activation_grad_for_experts(
        &mut self,
        index: usize,
        (before, spec): (usize, ActivationGroupsSpec),
        [x, row_scale, row_scale_grad]: [At; 3],
        grad: &mut Value,
    ) {
        let facts = self.facts;
        let linear = facts.chain.links()[before].linear;
        let Fused { layouts: to, slot } = Fused::of_grad(linear, self.grad_layouts(linear));
        let at = ActivationGroupsPointers {
            x,
            dy: grad.high,
            row_scale,
            row_scale_grad,
            out: to.row.data,
            out_t: to.col.data,
            scale: slot.scale,
            scale_inv: to.scale_inv(),
            scale_inv_t: to.col.scale,
            amax: slot.amax,
            splits: self.left.splits_of(facts, before),
            sums: self.scratch(),
            counters: At::of(Port::Counters),
        };
        let text = match (to.row.is_some(), to.col.is_some()) {
            (true, true) => "activation backward + cast + transpose",
            (true, false) => "activation backward + cast",
            (false, _) => "activation backward + transposed cast",
        };
        self.step(Work::ActivationGroups { spec, at }, index, text);
        *grad = Value::quantized(to);
    }
}
