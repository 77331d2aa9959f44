//! Compiles a chain: the steps of both directions and of delayed weight gradients, and facts for the caller.

use te_fast_kernels::Float;

use crate::base::error::Result;
use crate::program::backward;
use crate::program::chain::Op;
use crate::program::facts::Facts;
use crate::program::forward;
use crate::program::port::{Outer, Port};
use crate::program::work::{FlowName, Flows, Step};
use crate::runtime::dispatcher::Dispatcher;

/// A chain compiled for one key, for any number of rows.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) flows: Flows,
    /// Place of the output: the output port, or a tensor that it is identical to.
    pub(crate) output: Port,
    /// The same for each extra output.
    pub(crate) extra_outputs: Vec<Port>,
    /// Place of the input's gradient.
    pub(crate) grad_input: Port,
    /// The same for each extra input.
    pub(crate) grad_extras: Vec<Port>,
    /// The call's own tensors that backward reads.
    pub(crate) reads: Vec<Port>,
    /// Why fusions did not apply.
    pub(crate) notes: Vec<String>,
    /// Some GEMM hands FP8 over.
    pub(crate) hands_over: bool,
}

impl Compiled {
    /// Compiles `facts`; GEMMs hand FP8 over if `handovers` allows it and it pays.
    pub(crate) fn new(dispatcher: &mut Dispatcher, facts: &Facts, handovers: bool) -> Result<Self> {
        let forward = forward::compile(dispatcher, facts, handovers)?;
        let mut compiled = Self {
            output: forward.output,
            grad_input: Port::None,
            grad_extras: vec![Port::None; facts.chain.extra_inputs()],
            reads: Vec::new(),
            hands_over: forward.hands_over,
            flows: forward.flows,
            extra_outputs: forward.extra_outputs,
            notes: forward.notes,
        };
        if facts.key.any_grad() {
            let left = forward.left;
            let backward = backward::compile(dispatcher, facts, (&left, compiled.flows), handovers)?;
            compiled.hands_over |= backward.hands_over;
            compiled.flows = backward.flows;
            compiled.grad_input = backward.grad_input;
            compiled.grad_extras = backward.grad_extras;
            compiled.notes.extend(backward.notes);
            let waiting = (0..facts.linears.len()).map(FlowName::Waiting);
            let later = std::iter::once(FlowName::Backward).chain(waiting);
            compiled.reads = reads(later.flat_map(|flow| compiled.flows.steps(flow)));
        }
        Ok(compiled)
    }
}

/// The call's own tensors that these steps read.
fn reads<'a>(steps: impl Iterator<Item = &'a Step>) -> Vec<Port> {
    let mut ports = Vec::new();
    for step in steps {
        step.work.each(|at| {
            let own = matches!(
                at.port,
                Port::Input | Port::Beside(Outer::Input, _) | Port::Extra(_) | Port::ExtraOutput(_) | Port::Param(_)
            );
            if own && !ports.contains(&at.port) {
                ports.push(at.port);
            }
        });
    }
    ports
}

/// Type of a parameter's gradient as the program writes it.
pub(crate) fn grad_dtype(facts: &Facts, param: usize) -> Float {
    if let Some(linear) = facts.chain.linear_params().iter().position(|&of| of == param) {
        return facts.linears[linear].weight_grad_dtype();
    }
    let is_bias = facts.chain.links().iter().any(|link| link.param == param && matches!(link.op, Op::Bias { .. }));
    if is_bias { facts.key.activation } else { facts.key.params[param].0 }
}
