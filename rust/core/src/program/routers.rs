//! Compiles routers of tokens. The logits are a product in f32, whatever the types of tokens and weight, and their
//! gradient is split into two products in f32.

use te_fast_kernels::Float;

use crate::base::error::{Error, Result};
use crate::gemm::problem::GemmPointers;
use crate::ops::affine::{AffinePointers, AffineSpec};
use crate::ops::router::{RouterBwdPointers, RouterPointers};
use crate::program::backward_compiler::Compiler as Backward;
use crate::program::buffer::At;
use crate::program::chain::{Link, OP, Router};
use crate::program::edge::{Rows, Value};
use crate::program::forward_compiler::{Compiler as Forward, Routed};
use crate::program::port::Port;
use crate::program::router_product::{ProductKind, RouterProduct};
use crate::program::work::{FlowName, Work};

/// `x · w`, into `d`.
fn product(x: At, w: At, d: At) -> GemmPointers<At> {
    GemmPointers { x, w, d, workspace: At::of(Port::Workspace), ..GemmPointers::default() }
}

impl Forward<'_> {
    /// Whether the backward of the router at `index` reads the tokens.
    pub(super) fn keeps_tokens(&self, index: usize) -> bool {
        self.facts.key.params[self.facts.chain.links()[index].param].1
    }

    pub(super) fn router(&mut self, index: usize, link: &Link, router: Router, tokens: At) {
        let (key, rows) = (&self.facts.key, self.facts.edges[index].rows);
        let (experts, weight) = (router.choice.experts, key.params[link.param].0);
        let runs_backward = self.runs_backward(index);
        let param = At::of(Port::Param(link.param as u16));
        let keeps = (self.keeps_tokens(index), self.facts.grads_before[index]);
        let x = self.in_f32(index, (tokens, key.activation), (rows, router.cols), keeps.0, "convert tokens");
        let w = self.in_f32(index, (param, weight), (Rows::Fixed(experts), router.cols), keeps.1, "convert weight");
        let bias = if router.biased {
            let (extra, dtype) = (At::of(Port::Extra(link.extra_input as u16)), key.extras[link.extra_input].0);
            let bias = (extra, dtype.as_float().unwrap_or(Float::F32));
            self.in_f32(index, bias, (Rows::Fixed(1), experts), false, "convert bias")
        } else {
            At::NONE
        };
        let logits = if router.logits {
            let port = Port::ExtraOutput(link.extra_output as u16);
            self.out.extra_outputs.push(port);
            At::of(port)
        } else {
            self.scratch()
        };
        let work =
            Work::RouterGemm { product: RouterProduct::new(&router, ProductKind::Logits), at: product(x, w, logits) };
        self.step(work, (index, index), "gemm");
        let (scores, map, probs) = (self.buffer(runs_backward), self.buffer(runs_backward), self.scratch());
        let at = RouterPointers { logits, bias, probs, scores, map, ..RouterPointers::default() };
        self.step(Work::Router { spec: router.choice, at }, (index, index), "router");
        self.out.left.routers[index] = Some(Routed { x, w, scores, map, probs });
    }

    /// A tensor in f32: as it is, or converted.
    fn in_f32(
        &mut self,
        index: usize,
        (from, dtype): (At, Float),
        (rows, cols): (Rows, usize),
        kept: bool,
        text: &'static str,
    ) -> At {
        if dtype == Float::F32 {
            return from;
        }
        let spec = AffineSpec::convert(cols, dtype, Float::F32);
        let at = AffinePointers { x: from, y: self.buffer(kept), ..AffinePointers::default() };
        self.step_on(rows, Work::Affine { spec, at }, (index, index), text);
        at.y
    }
}

impl Backward<'_> {
    /// The gradients of the router's weight and, added to those of the permuted rows, of the tokens.
    pub(super) fn router(&mut self, index: usize, link: &Link, router: Router, grad: &mut Value) -> Result<()> {
        let (Some(routed), probs_grad) = (self.left.routers[index], self.probs_grads[index]) else {
            return Err(Error::state(OP, "a router left nothing to its backward"));
        };
        let dlogits = self.scratch();
        let at = RouterBwdPointers { grad: probs_grad, scores: routed.scores, map: routed.map, dlogits };
        self.step(Work::RouterBackward { spec: router.choice, at }, index, "router backward");
        if router.logits {
            let spec = AffineSpec::of(router.choice.experts, Float::F32, 1.0);
            let r = At::of(Port::GradExtraOutput(link.extra_output as u16));
            let at = AffinePointers { x: dlogits, r, y: dlogits, ..AffinePointers::default() };
            self.step(Work::Affine { spec, at }, index, "add");
        }
        self.router_weight_grad(index, link, &router, product(dlogits, routed.x, At::NONE));
        if self.facts.grads_before[index] {
            self.router_tokens_grad(index, &router, product(dlogits, routed.w, At::NONE), grad);
        }
        Ok(())
    }

    /// In f32, and rounded once to the weight's type.
    fn router_weight_grad(&mut self, index: usize, link: &Link, router: &Router, at: GemmPointers<At>) {
        let (weight, wanted) = self.facts.key.params[link.param];
        if !wanted {
            return;
        }
        let out = self.param_grad(link.param);
        let d = if weight == Float::F32 { out } else { self.scratch() };
        let product = RouterProduct::new(router, ProductKind::WeightGrad);
        self.step(Work::RouterGemm { product, at: GemmPointers { d, ..at } }, index, "wgrad gemm");
        if d != out {
            let spec = AffineSpec::convert(router.cols, Float::F32, weight);
            let at = AffinePointers { x: d, y: out, ..AffinePointers::default() };
            let rows = Rows::Fixed(router.choice.experts);
            self.step_of(FlowName::Backward, rows, Work::Affine { spec, at }, index, "convert gradient");
        }
    }

    /// In f32, added to the gradient of the permuted rows, and rounded once to the tokens' type.
    fn router_tokens_grad(&mut self, index: usize, router: &Router, at: GemmPointers<At>, grad: &mut Value) {
        let activation = self.facts.key.activation;
        let accumulate = activation == Float::F32;
        let d = if accumulate { grad.high } else { self.scratch() };
        let product = RouterProduct::new(router, ProductKind::TokensGrad { accumulate });
        let text = if accumulate { "dgrad gemm + add" } else { "dgrad gemm" };
        self.step(Work::RouterGemm { product, at: GemmPointers { d, ..at } }, index, text);
        if accumulate {
            return;
        }
        let spec = AffineSpec { added: activation, ..AffineSpec::convert(router.cols, Float::F32, activation) };
        let at = AffinePointers { x: d, r: grad.high, y: self.place_of(index), ..AffinePointers::default() };
        self.step(Work::Affine { spec, at }, index, "add");
        *grad = Value::high(at.y);
    }
}
