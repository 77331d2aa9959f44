//! Which parts need a place of their own in autograd's graph, although no gradient of theirs leaves a backward.
//!
//! A part whose gradient goes into `main_grad` has an edge for its hooks alone. An edge costs torch more than the rest of the part's
//! step. So a stack gets one edge if nobody can see the others: torch runs the node of a parameter, `AccumulateGrad`, for hooks of the
//! tensor and for hooks of the node. The node owns the tensor, and dies with its last owner. So a tensor with no other owner than its
//! Python object has no node, and no hook of a node (as of torch's and Megatron-LM's data parallelism, which keep the nodes).

use pyo3::intern;
use pyo3::prelude::*;

use crate::program::main_grad::expects_dummy;
use crate::torch::process::State;
use crate::torch::reader::instance_dict;

/// The part that stands for all trained ones in autograd's graph.
#[derive(Default)]
pub(crate) struct LoneEdge {
    first: Option<usize>,
    is_observed: bool,
}

impl LoneEdge {
    /// Notes the next trained part, by its number.
    #[inline]
    pub(crate) fn note(&mut self, state: &State, part: &Bound<'_, PyAny>, number: usize) -> PyResult<()> {
        if self.first.is_none() {
            self.first = Some(number);
        } else {
            self.is_observed = self.is_observed || is_observed(state, part)?;
        }
        Ok(())
    }

    /// The number of the first trained part; none if another part is observed, or none is trained.
    pub(crate) fn found(self) -> Option<usize> {
        self.first.filter(|_| !self.is_observed)
    }
}

/// Whether torch would run a hook for the part's gradient, or its gradient flows on to other tensors.
fn is_observed(state: &State, part: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (py, names) = (part.py(), &state.torch.names);
    let Some(owners) = &state.torch.use_count else { return Ok(true) };
    if !state.torch.is_plain(part) || expects_dummy(&instance_dict(part)?)? {
        return Ok(true);
    }
    Ok(owners.bind(py).call1((part,))?.extract::<i64>()? != 1
        || !part.getattr(&names.is_leaf)?.is_truthy()?
        || !part.getattr(intern!(py, "_backward_hooks"))?.is_none()
        || !part.getattr(intern!(py, "_post_accumulate_grad_hooks"))?.is_none())
}
