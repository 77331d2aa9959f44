//! The state of a backward's compilation, and helpers of its ops: the places of gradients, and the ops that add them.

use te_fast_kernels::Float;

use crate::program::buffer::{Arena, At};
use crate::program::chain::Op;
use crate::program::edge::{LayoutAt, Layouts, Rows};
use crate::program::facts::Facts;
use crate::program::forward_compiler::Left;
use crate::program::port::Port;
use crate::program::work::{FlowName, Flows, Step, Work};
use crate::runtime::dispatcher::Dispatcher;

/// A compiled backward.
#[derive(Debug)]
pub(crate) struct Backward {
    pub(crate) flows: Flows,
    /// Place of the input's gradient.
    pub(crate) grad_input: Port,
    /// The same for each extra input.
    pub(crate) grad_extras: Vec<Port>,
    pub(crate) notes: Vec<String>,
    /// A GEMM stores FP8.
    pub(crate) hands_over: bool,
    /// Whether a GEMM stores the input's gradient in FP8.
    pub(crate) grad_input_is_row: bool,
}

pub(super) struct Compiler<'a> {
    pub(super) dispatcher: &'a mut Dispatcher,
    pub(super) facts: &'a Facts,
    pub(super) left: &'a Left,
    pub(super) out: Backward,
    /// Gradient of a bias that the quantisation of the gradient computes.
    pub(super) bias_grad: At,
    /// GEMMs may store FP8.
    pub(super) stores_fp8: bool,
    /// Gradients of the factors of permuted rows, by the op that permuted them.
    pub(super) factor_grads: Vec<At>,
    /// Gradients of routers' probabilities, by the router.
    pub(super) probs_grads: Vec<At>,
    /// Gradients of residual connections, by the op where they begin.
    pub(super) residual_grads: Vec<At>,
}

impl<'a> Compiler<'a> {
    pub(super) fn new(
        dispatcher: &'a mut Dispatcher,
        facts: &'a Facts,
        (left, flows): (&'a Left, Flows),
        stores_fp8: bool,
    ) -> Self {
        let out = Backward {
            flows,
            grad_input: Port::None,
            grad_extras: vec![Port::None; facts.chain.extra_inputs()],
            notes: Vec::new(),
            hands_over: false,
            grad_input_is_row: false,
        };
        let [factor_grads, probs_grads, residual_grads] =
            std::array::from_fn(|_| vec![At::NONE; facts.chain.links().len()]);
        let bias_grad = At::NONE;
        Self { dispatcher, facts, left, out, bias_grad, stores_fp8, factor_grads, probs_grads, residual_grads }
    }

    /// Whether the op or an earlier one needs a gradient.
    pub(super) fn runs(&self, index: usize) -> bool {
        self.facts.grads_before[index + 1]
    }

    /// The op before `index`, without identities.
    pub(super) fn op_before(&self, index: usize) -> Option<(usize, Op)> {
        let links = self.facts.chain.links();
        (0..index).rev().map(|at| (at, links[at].op)).find(|(_, op)| !matches!(op, Op::Identity))
    }

    /// The next step, on the rows of the op's input.
    pub(super) fn step(&mut self, work: Work, index: usize, text: &'static str) {
        self.step_of(FlowName::Backward, self.facts.edges[index].rows, work, index, text);
    }

    pub(super) fn step_of(&mut self, flow: FlowName, rows: Rows, work: Work, index: usize, text: &'static str) {
        self.out.flows.push(flow, Step { work, rows, ops: (index, index), text });
    }

    pub(super) fn scratch(&mut self) -> At {
        self.buffer(FlowName::Backward.scratch())
    }

    pub(super) fn buffer(&mut self, arena: Arena) -> At {
        self.out.flows.buffers.add(arena)
    }

    /// A buffer that the weight gradient of a linear op reads; it is kept if that gradient is delayed.
    pub(super) fn for_weight_grad(&mut self, linear: usize) -> At {
        let waits = self.facts.linears[linear].deferred;
        self.buffer(if waits { Arena::Deferred(linear as u16) } else { FlowName::Backward.scratch() })
    }

    /// Layouts of a linear op's gradient in FP8.
    pub(super) fn grad_layouts(&mut self, linear: usize) -> Layouts {
        let Some(dy) = self.facts.linears[linear].dy() else { return Layouts::default() };
        let mut layouts = Layouts::default();
        if dy.usage().columnwise {
            layouts.col = LayoutAt { data: self.for_weight_grad(linear), scale: self.for_weight_grad(linear) };
        }
        if dy.usage().rowwise {
            let shared = layouts.col.is_some() && dy.shares_scale();
            let scale = if shared { layouts.col.scale } else { self.scratch() };
            layouts.row = LayoutAt { data: self.scratch(), scale };
        }
        layouts
    }

    /// The place for the gradient of edge `index`: a result of the program if one has it, else scratch.
    pub(super) fn place_of(&mut self, index: usize) -> At {
        let Facts { chain, key, .. } = self.facts;
        let mut is_grad_input = key.input_grad;
        for (at, link) in chain.links()[..index].iter().enumerate().rev() {
            match link.op {
                // The gradient of their input is the gradient of their output.
                Op::Identity | Op::Bias { .. } | Op::AddResidual { .. } => {}
                // Its product adds to the gradient in place.
                Op::Router(_) if key.activation == Float::F32 => {}
                // The next op has added the other gradient.
                Op::MakeExtraOutput { .. } | Op::Residual if self.takes_branch(at).is_some() => {}
                Op::AddExtraInput { .. } if !key.extras[link.extra_input].1 => {}
                Op::AddExtraInput { .. } => return At::of(Port::GradExtra(link.extra_input as u16)),
                _ => {
                    is_grad_input = false;
                    break;
                }
            }
        }
        if is_grad_input && self.facts.grad_input_kind().is_none() {
            return At::of(Port::GradInput);
        }
        self.scratch()
    }

    pub(super) fn param_grad(&self, param: usize) -> At {
        if self.facts.key.params[param].1 { At::of(Port::GradParam(param as u16)) } else { At::NONE }
    }

    /// The op behind a value that adds the gradient of the value's other consumer in its own launch.
    pub(super) fn takes_branch(&self, index: usize) -> Option<usize> {
        let links = self.facts.chain.links();
        let in_place = match links[index].op {
            Op::MakeExtraOutput { in_place } => in_place,
            Op::Residual => false,
            _ => return None,
        };
        let behind = (index + 1..links.len()).find(|&at| !matches!(links[at].op, Op::Identity))?;
        match links[behind].op {
            Op::Norm { .. } => Some(behind),
            Op::Linear { groups: None, .. } => in_place.then_some(behind),
            _ => None,
        }
    }

    /// The residual branch's gradient that op `index` adds to the gradient of its input.
    pub(super) fn branch_before(&self, index: usize) -> Option<At> {
        let (before, _) = self.op_before(index)?;
        (self.takes_branch(before) == Some(index)).then(|| self.other_grad(before))
    }

    /// The gradient of a value from its other consumer.
    pub(super) fn other_grad(&self, index: usize) -> At {
        let link = &self.facts.chain.links()[index];
        match link.op {
            Op::Residual => self.residual_grads[index],
            _ => At::of(Port::GradExtraOutput(link.extra_output as u16)),
        }
    }
}
