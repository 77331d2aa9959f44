//! Compiles permutations of tokens: rows go to experts and come back, in either direction. In FP8, rows are not moved
//! to the experts: the linear op gathers them by number as it quantises.

use te_fast_kernels::Float;

use crate::base::error::{Error, Result};
use crate::ops::permute_map::Routing;
use crate::ops::route::{RoutePointers, RouteSpec, Way};
use crate::program::backward_compiler::Compiler as Backward;
use crate::program::buffer::At;
use crate::program::chain::{Link, OP, Op};
use crate::program::edge::{Rows, Value};
use crate::program::facts::Facts;
use crate::program::forward_compiler::{Compiler as Forward, Route};
use crate::program::linear_op::{BackwardOperands, LinearOp};
use crate::program::port::Port;
use crate::program::work::{FlowName, Work};

impl Facts {
    /// A move of the permutation at op `by`, in any direction.
    fn route(&self, by: usize, way: Way) -> RouteSpec {
        let link = &self.chain.links()[by];
        let (experts, topk) = match link.op {
            Op::Permute { experts, topk, .. } => (experts, topk),
            _ => (0, 0),
        };
        let prob = self.probs_of(by).0.as_float().unwrap_or(Float::F32);
        RouteSpec { way, tokens: 0, topk, experts, cols: 0, input: self.key.activation, prob }
    }
}

/// Whether a linear op of experts quantises its input and never reads it in high precision.
fn gathers_input(op: &LinearOp) -> bool {
    let reads_again = op.backward() == BackwardOperands::Quantized || !op.weight_grad;
    op.groups.is_some() && op.casts.is_some() && reads_again
}

/// The same for the gradient of its result.
fn gathers_grad(op: &LinearOp) -> bool {
    op.groups.is_some() && op.dy().is_some() && op.backward() == BackwardOperands::Quantized
}

/// What a permutation moves rows by.
struct Given {
    routing: Routing,
    mask: At,
    probs: At,
    /// Memory of the caller's for the counts of experts' rows, or null.
    counts: At,
}

impl Forward<'_> {
    pub(super) fn permute(&mut self, index: usize, link: &Link, value: &mut Value) -> Result<usize> {
        let facts = self.facts;
        let given = self.routing(index, link)?;
        let (consumer, _) = self.consumer(index + 1);
        let gathers = self.link(consumer).is_some_and(|link| match link.op {
            Op::Linear { .. } => gathers_input(&facts.linears[link.linear]),
            _ => false,
        });
        let keeps = facts.key.any_grad();
        let mut buffer = || self.buffer(keeps);
        let (map, ends, factors) = (buffer(), buffer(), buffer());
        let splits = if given.counts.is_some() { given.counts } else { buffer() };
        let numbers = if gathers { buffer() } else { At::NONE };
        let route = Route { map, ends, splits, factors, numbers };
        let (way, out) = if gathers {
            (Way::Numbers(given.routing), numbers)
        } else {
            (Way::Out(given.routing), self.place_of(index + 1))
        };
        let at = RoutePointers {
            x: if gathers { At::NONE } else { value.high },
            out,
            routing: given.mask,
            probs: given.probs,
            factors,
            row_id_map: map,
            ends,
            splits,
            scratch: self.scratch(),
            state: At::of(Port::Counters),
        };
        let spec = RouteSpec { cols: facts.edges[index].cols, ..facts.route(index, way) };
        let text = if gathers { "numbers of the permuted rows" } else { "permute" };
        self.step_on(Rows::Input, Work::Route { spec, at }, (index, index), text);
        self.out.left.routes[index] = Some(route);
        *value = if gathers { Value { numbers, ..*value } } else { Value::high(out) };
        Ok(index + 1)
    }

    /// The mask and the probabilities of the permutation at `index`: a router's, or extra inputs.
    fn routing(&self, index: usize, link: &Link) -> Result<Given> {
        let router = index.checked_sub(1).and_then(|before| Some((self.link(before)?, self.out.left.routers[before]?)));
        if let Some((router, routed)) = router {
            let counted = router.extra_inputs() != 0;
            let counts = if counted { At::of(Port::Extra(router.counts_input() as u16)) } else { At::NONE };
            return Ok(Given { routing: Routing::Mask8, mask: routed.map, probs: routed.probs, counts });
        }
        let mask = self.facts.key.extras[link.extra_input].0;
        let extra = |number: usize| At::of(Port::Extra((link.extra_input + number) as u16));
        match Routing::of_mask(mask) {
            Some(routing) => Ok(Given { routing, mask: extra(0), probs: extra(1), counts: At::NONE }),
            None => Err(Error::dtype(OP, "the routing map", "bool or integers", mask)),
        }
    }

    pub(super) fn unpermute(&mut self, index: usize, value: &mut Value) -> usize {
        let link = &self.facts.chain.links()[index];
        let (Some(by), Some(route)) = (link.permuted_by, self.out.left.route_of(link).copied()) else {
            return index + 1;
        };
        let out = self.place_of(index + 1);
        let at = RoutePointers { x: value.high, out, row_id_map: route.map, ..RoutePointers::default() };
        let spec = RouteSpec { cols: self.facts.edges[index].cols, ..self.facts.route(by, Way::Back) };
        self.step_on(Rows::Input, Work::Route { spec, at }, (index, index), "unpermute");
        *value = Value::high(out);
        index + 1
    }
}

impl Backward<'_> {
    /// The gradients of tokens, and of their probabilities.
    pub(super) fn permute(&mut self, index: usize, link: &Link, grad: &mut Value) -> Result<()> {
        let Some(route) = self.left.routes[index] else {
            return Err(Error::state(OP, "a permutation left nothing to its backward"));
        };
        let factors = self.factor_grads[index];
        let probs_grad = if factors.is_some() { self.probs_grad(index, link) } else { At::NONE };
        let out = self.place_of(index);
        let at = RoutePointers {
            x: grad.high,
            out,
            probs: probs_grad,
            factors,
            row_id_map: route.map,
            ..RoutePointers::default()
        };
        let spec = RouteSpec { cols: self.facts.edges[index].cols, ..self.facts.route(index, Way::Back) };
        self.step_of(FlowName::Backward, Rows::Input, Work::Route { spec, at }, index, "permute backward");
        *grad = Value::high(out);
        Ok(())
    }

    /// The place for the gradient of a permutation's probabilities.
    fn probs_grad(&mut self, index: usize, link: &Link) -> At {
        if let Op::Permute { routed: true, .. } = link.op {
            self.probs_grads[index - 1] = self.scratch();
            return self.probs_grads[index - 1];
        }
        let (probs, port) = (link.extra_input + 1, Port::GradExtra((link.extra_input + 1) as u16));
        self.out.grad_extras[probs] = port;
        At::of(port)
    }

    /// The gradient of the experts' rows, which is the gradient of each row's token.
    pub(super) fn unpermute(&mut self, index: usize, link: &Link, grad: &mut Value) -> Result<()> {
        let (Some(by), Some(route)) = (link.permuted_by, self.left.route_of(link).copied()) else {
            return Err(Error::state(OP, "the way back of no permutation"));
        };
        let before = self.op_before(index).map(|(at, op)| (&self.facts.chain.links()[at], op));
        if let (Some((linear, Op::Linear { .. })), true) = (before, route.numbers.is_some())
            && gathers_grad(&self.facts.linears[linear.linear])
        {
            grad.numbers = route.numbers;
            return Ok(());
        }
        let out = self.place_of(index);
        let at =
            RoutePointers { x: grad.high, out, row_id_map: route.map, ends: route.ends, ..RoutePointers::default() };
        let spec = RouteSpec { cols: self.facts.edges[index].cols, ..self.facts.route(by, Way::Again) };
        self.step_of(FlowName::Backward, Rows::Input, Work::Route { spec, at }, index, "unpermute backward");
        *grad = Value::high(out);
        Ok(())
    }
}
